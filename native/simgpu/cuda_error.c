/* Names and texts of results. */
#include "sim_cuda.h"

struct text {
    CUresult code;
    const char *name, *words;
};

#define E(code, words) {CUDA_##code, "CUDA_" #code, words}
static const struct text texts[] = {
    E(SUCCESS, "no error"),
    E(ERROR_INVALID_VALUE, "invalid argument"),
    E(ERROR_OUT_OF_MEMORY, "out of memory"),
    E(ERROR_NOT_INITIALIZED, "initialization error"),
    E(ERROR_DEINITIALIZED, "driver shutting down"),
    E(ERROR_STUB_LIBRARY, "CUDA driver is a stub library"),
    E(ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    E(ERROR_INVALID_DEVICE, "invalid device ordinal"),
    E(ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    E(ERROR_INVALID_CONTEXT, "invalid device context"),
    E(ERROR_MAP_FAILED, "mapping of buffer object failed"),
    E(ERROR_UNMAP_FAILED, "unmapping of buffer object failed"),
    E(ERROR_ALREADY_MAPPED, "resource already mapped"),
    E(ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
    E(ERROR_NOT_MAPPED, "resource not mapped"),
    E(ERROR_UNSUPPORTED_LIMIT, "limit is not supported on this architecture"),
    E(ERROR_CONTEXT_ALREADY_IN_USE, "exclusive-thread device already in use by a different thread"),
    E(ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices"),
    E(ERROR_INVALID_PTX, "a PTX JIT compilation failed"),
    E(ERROR_INVALID_SOURCE, "device kernel image is invalid"),
    E(ERROR_FILE_NOT_FOUND, "file not found"),
    E(ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND, "shared object symbol not found"),
    E(ERROR_SHARED_OBJECT_INIT_FAILED, "shared object initialization failed"),
    E(ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    E(ERROR_INVALID_HANDLE, "invalid resource handle"),
    E(ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    E(ERROR_NOT_FOUND, "named symbol not found"),
    E(ERROR_NOT_READY, "device not ready"),
    E(ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    E(ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    E(ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
    E(ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled"),
    E(ERROR_PRIMARY_CONTEXT_ACTIVE, "cannot set while device is active in this process"),
    E(ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    E(ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already "
                                            "mapped"),
    E(ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory "
                                        "region"),
    E(ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    E(ERROR_NOT_PERMITTED, "operation not permitted"),
    E(ERROR_NOT_SUPPORTED, "operation not supported"),
    E(ERROR_SYSTEM_NOT_READY, "system not yet initialized"),
    E(ERROR_SYSTEM_DRIVER_MISMATCH, "system has unsupported display driver / cuda driver "
                                    "combination"),
    E(ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    E(ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    E(ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    E(ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    E(ERROR_STREAM_CAPTURE_IMPLICIT, "operation would make the legacy stream depend on a capturing "
                                     "blocking stream"),
    E(ERROR_STREAM_CAPTURE_WRONG_THREAD, "attempt to terminate a thread-local capture sequence "
                                         "from another thread"),
    E(ERROR_TIMEOUT, "wait operation timed out"),
    E(ERROR_GRAPH_EXEC_UPDATE_FAILURE, "the graph update was not performed because it included "
                                       "changes which violated constraints"),
    E(ERROR_FUNCTION_NOT_LOADED, "specified kernel function is not loaded"),
    E(ERROR_INVALID_RESOURCE_TYPE, "invalid resource type"),
    E(ERROR_INVALID_RESOURCE_CONFIGURATION, "invalid resource configuration"),
    E(ERROR_UNKNOWN, "unknown error"),
};
#undef E

static CUresult find(CUresult error, const struct text **out) {
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (texts[i].code == error) {
            *out = &texts[i];
            return CUDA_SUCCESS;
        }
    *out = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

SIM_API(cuGetErrorName, (CUresult error, const char **pStr), (error, pStr)) {
    const struct text *t;
    CU_ARG(pStr);
    CUresult r = find(error, &t);
    *pStr = t ? t->name : NULL;
    return r;
}

SIM_API(cuGetErrorString, (CUresult error, const char **pStr), (error, pStr)) {
    const struct text *t;
    CU_ARG(pStr);
    CUresult r = find(error, &t);
    *pStr = t ? t->words : NULL;
    return r;
}
