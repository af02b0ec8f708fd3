/* What a device says about itself. */
#include "sim_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

SIM_API(cuDeviceGetCount, (int *count), (count)) {
    CU_TRY(cu_ready());
    CU_ARG(count);
    *count = cu_ndevs;
    return CUDA_SUCCESS;
}

SIM_API(cuDeviceGet, (CUdevice * device, int ordinal), (device, ordinal)) {
    struct cu_device *d;
    CU_TRY(cu_ready());
    CU_ARG(device);
    CU_TRY(cu_device_of(ordinal, &d));
    *device = ordinal;
    return CUDA_SUCCESS;
}

SIM_API(cuDeviceGetName, (char *name, int len, CUdevice dev), (name, len, dev)) {
    struct cu_device *d;
    CU_TRY(cu_ready());
    CU_ARG(name && len > 0);
    CU_TRY(cu_device_of(dev, &d));
    snprintf(name, (size_t)len, "%s", sim->dom[d->dom].name);
    return CUDA_SUCCESS;
}

static CUresult uuid_of(CUuuid *uuid, CUdevice dev, bool mig) {
    struct cu_device *d;
    CU_TRY(cu_ready());
    CU_ARG(uuid);
    CU_TRY(cu_device_of(dev, &d));
    struct sim_dom *dom = &sim->dom[d->dom];
    /* The first version names the card of a MIG instance, the second the instance. */
    if (!mig && dom->parent >= 0)
        dom = &sim->dom[dom->parent];
    memcpy(uuid->bytes, dom->uuid, sizeof uuid->bytes);
    return CUDA_SUCCESS;
}

SIM_API(cuDeviceGetUuid, (CUuuid * uuid, CUdevice dev), (uuid, dev)) {
    return uuid_of(uuid, dev, false);
}

SIM_API_NEW(cuDeviceGetUuid_v2, (CUuuid * uuid, CUdevice dev), (uuid, dev)) {
    return uuid_of(uuid, dev, true);
}

SIM_API(cuDeviceGetLuid, (char *luid, unsigned *mask, CUdevice dev), (luid, mask, dev)) {
    (void)luid, (void)mask, (void)dev; /* Windows only */
    CU_TRY(cu_ready());
    return CUDA_ERROR_NOT_SUPPORTED;
}

SIM_API(cuDeviceGetPCIBusId, (char *id, int len, CUdevice dev), (id, len, dev)) {
    struct cu_device *d;
    CU_TRY(cu_ready());
    CU_ARG(id && len > 0);
    CU_TRY(cu_device_of(dev, &d));
    struct sim_dom *m = &sim->dom[d->dom];
    snprintf(id, (size_t)len, "%04X:%02X:%02X.0", m->pci_domain, m->pci_bus, m->pci_device);
    return CUDA_SUCCESS;
}

SIM_API(cuDeviceGetByPCIBusId, (CUdevice * dev, const char *id), (dev, id)) {
    unsigned a = 0, b = 0, c = 0;
    CU_TRY(cu_ready());
    CU_ARG(dev && id);
    if (sscanf(id, "%x:%x:%x", &a, &b, &c) != 3) {
        a = 0;
        CU_ARG(sscanf(id, "%x:%x", &b, &c) == 2);
    }
    for (int i = 0; i < cu_ndevs; i++) {
        struct sim_dom *m = &sim->dom[cu_devs[i].dom];
        if (m->pci_domain == a && m->pci_bus == b && m->pci_device == c) {
            *dev = i;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

SIM_API(cuDeviceComputeCapability, (int *major, int *minor, CUdevice dev), (major, minor, dev)) {
    struct cu_device *d;
    CU_TRY(cu_ready());
    CU_ARG(major && minor);
    CU_TRY(cu_device_of(dev, &d));
    *major = (int)sim->dom[d->dom].cc_major;
    *minor = (int)sim->dom[d->dom].cc_minor;
    return CUDA_SUCCESS;
}

SIM_API(cuDeviceGetProperties, (CUdevprop * prop, CUdevice dev), (prop, dev)) {
    struct cu_device *d;
    CU_TRY(cu_ready());
    CU_ARG(prop);
    CU_TRY(cu_device_of(dev, &d));
    *prop = (CUdevprop){.maxThreadsPerBlock = 1024,
                        .maxThreadsDim = {1024, 1024, 64},
                        .maxGridSize = {2147483647, 65535, 65535},
                        .sharedMemPerBlock = 49152,
                        .totalConstantMemory = 65536,
                        .SIMDWidth = 32,
                        .memPitch = 2147483647,
                        .regsPerBlock = 65536,
                        .clockRate = (int)sim->dom[d->dom].clock_khz,
                        .textureAlign = 512};
    return CUDA_SUCCESS;
}

#define A(name) CU_DEVICE_ATTRIBUTE_##name
static const int fixed[A(MAX)] = {
    [A(MAX_THREADS_PER_BLOCK)] = 1024,
    [A(MAX_BLOCK_DIM_X)] = 1024,
    [A(MAX_BLOCK_DIM_Y)] = 1024,
    [A(MAX_BLOCK_DIM_Z)] = 64,
    [A(MAX_GRID_DIM_X)] = 2147483647,
    [A(MAX_GRID_DIM_Y)] = 65535,
    [A(MAX_GRID_DIM_Z)] = 65535,
    [A(MAX_SHARED_MEMORY_PER_BLOCK)] = 49152,
    [A(TOTAL_CONSTANT_MEMORY)] = 65536,
    [A(WARP_SIZE)] = 32,
    [A(MAX_PITCH)] = 2147483647,
    [A(MAX_REGISTERS_PER_BLOCK)] = 65536,
    [A(TEXTURE_ALIGNMENT)] = 512,
    [A(GPU_OVERLAP)] = 1,
    [A(CAN_MAP_HOST_MEMORY)] = 1,
    [A(MAXIMUM_TEXTURE1D_WIDTH)] = 131072,
    [A(MAXIMUM_TEXTURE2D_WIDTH)] = 131072,
    [A(MAXIMUM_TEXTURE2D_HEIGHT)] = 65536,
    [A(MAXIMUM_TEXTURE3D_WIDTH)] = 16384,
    [A(MAXIMUM_TEXTURE3D_HEIGHT)] = 16384,
    [A(MAXIMUM_TEXTURE3D_DEPTH)] = 16384,
    [A(MAXIMUM_TEXTURE2D_LAYERED_WIDTH)] = 32768,
    [A(MAXIMUM_TEXTURE2D_LAYERED_HEIGHT)] = 32768,
    [A(MAXIMUM_TEXTURE2D_LAYERED_LAYERS)] = 2048,
    [A(SURFACE_ALIGNMENT)] = 512,
    [A(CONCURRENT_KERNELS)] = 1,
    [A(ECC_ENABLED)] = 1,
    [A(L2_CACHE_SIZE)] = 4194304,
    [A(ASYNC_ENGINE_COUNT)] = 3,
    [A(UNIFIED_ADDRESSING)] = 1,
    [A(TEXTURE_PITCH_ALIGNMENT)] = 32,
    [A(MAXIMUM_TEXTURECUBEMAP_WIDTH)] = 32768,
    [A(MAXIMUM_TEXTURE1D_LINEAR_WIDTH)] = 268435456,
    [A(STREAM_PRIORITIES_SUPPORTED)] = 1,
    [A(GLOBAL_L1_CACHE_SUPPORTED)] = 1,
    [A(LOCAL_L1_CACHE_SUPPORTED)] = 1,
    [A(MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)] = 65536,
    [A(MAX_REGISTERS_PER_MULTIPROCESSOR)] = 65536,
    [A(MANAGED_MEMORY)] = 1,
    [A(SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO)] = 32,
    [A(CONCURRENT_MANAGED_ACCESS)] = 1,
    [A(COMPUTE_PREEMPTION_SUPPORTED)] = 1,
    [A(CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)] = 1,
    [A(CAN_USE_STREAM_MEM_OPS_V1)] = 1,
    [A(CAN_USE_64_BIT_STREAM_MEM_OPS_V1)] = 1,
    [A(CAN_USE_STREAM_WAIT_VALUE_NOR_V1)] = 1,
    [A(COOPERATIVE_LAUNCH)] = 1,
    [A(COOPERATIVE_MULTI_DEVICE_LAUNCH)] = 1,
    [A(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)] = 65536,
    [A(HOST_REGISTER_SUPPORTED)] = 1,
    [A(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)] = 1,
    [A(HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)] = 1,
    [A(MAX_BLOCKS_PER_MULTIPROCESSOR)] = 16,
    [A(GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)] = 1,
    [A(RESERVED_SHARED_MEMORY_PER_BLOCK)] = 0,
    [A(SPARSE_CUDA_ARRAY_SUPPORTED)] = 1,
    [A(READ_ONLY_HOST_REGISTER_SUPPORTED)] = 1,
    [A(TIMELINE_SEMAPHORE_INTEROP_SUPPORTED)] = 1,
    [A(MEMORY_POOLS_SUPPORTED)] = 1,
    [A(MEMPOOL_SUPPORTED_HANDLE_TYPES)] = 9,
    [A(DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED)] = 1,
    [A(CAN_USE_64_BIT_STREAM_MEM_OPS)] = 1,
    [A(CAN_USE_STREAM_WAIT_VALUE_NOR)] = 1,
    [A(IPC_EVENT_SUPPORTED)] = 1,
    [A(MEM_SYNC_DOMAIN_COUNT)] = 1,
    [A(UNIFIED_FUNCTION_POINTERS)] = 1,
    [A(MULTICAST_SUPPORTED)] = 1,
    [A(HOST_NUMA_ID)] = 0,
};

static int attribute(const struct sim_dom *m, CUdevice_attribute a) {
    switch (a) {
    case A(CLOCK_RATE):
        return (int)m->clock_khz;
    case A(MULTIPROCESSOR_COUNT):
        return (int)m->sms;
    case A(PCI_BUS_ID):
        return (int)m->pci_bus;
    case A(PCI_DEVICE_ID):
        return (int)m->pci_device;
    case A(PCI_DOMAIN_ID):
        return (int)m->pci_domain;
    case A(MEMORY_CLOCK_RATE):
        return (int)m->mem_clock_khz;
    case A(GLOBAL_MEMORY_BUS_WIDTH):
        return (int)m->bus_width;
    case A(MAX_THREADS_PER_MULTIPROCESSOR):
        return (int)m->threads_per_sm;
    case A(COMPUTE_CAPABILITY_MAJOR):
        return (int)m->cc_major;
    case A(COMPUTE_CAPABILITY_MINOR):
        return (int)m->cc_minor;
    case A(CLUSTER_LAUNCH):
    case A(TENSOR_MAP_ACCESS_SUPPORTED):
        return m->cc_major >= 9;
    case A(GPU_PCI_DEVICE_ID):
        return (int)m->pci_dev_id;
    case A(GPU_PCI_SUBSYSTEM_ID):
        return (int)m->pci_sub_id;
    default:
        return fixed[a];
    }
}

SIM_API(cuDeviceGetAttribute, (int *pi, CUdevice_attribute attrib, CUdevice dev),
        (pi, attrib, dev)) {
    struct cu_device *d;
    CU_TRY(cu_ready());
    CU_ARG(pi && attrib > 0 && attrib < A(MAX));
    CU_TRY(cu_device_of(dev, &d));
    *pi = attribute(&sim->dom[d->dom], attrib);
    return CUDA_SUCCESS;
}

SIM_API(cuDeviceCanAccessPeer, (int *can, CUdevice dev, CUdevice peer), (can, dev, peer)) {
    struct cu_device *d;
    CU_TRY(cu_ready());
    CU_ARG(can);
    CU_TRY(cu_device_of(dev, &d));
    CU_TRY(cu_device_of(peer, &d));
    *can = dev != peer;
    return CUDA_SUCCESS;
}

SIM_API(cuDeviceGetP2PAttribute,
        (int *value, CUdevice_P2PAttribute attrib, CUdevice src, CUdevice dst),
        (value, attrib, src, dst)) {
    struct cu_device *d;
    CU_TRY(cu_ready());
    CU_ARG(value && attrib >= CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK && attrib <= 5);
    CU_TRY(cu_device_of(src, &d));
    CU_TRY(cu_device_of(dst, &d));
    CU_CHECK(src != dst, CUDA_ERROR_INVALID_DEVICE);
    *value = attrib == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED;
    return CUDA_SUCCESS;
}

SIM_API(cuDeviceGetTexture1DLinearMaxWidth,
        (size_t *max, CUarray_format format, unsigned channels, CUdevice dev),
        (max, format, channels, dev)) {
    struct cu_device *d;
    (void)format;
    CU_TRY(cu_ready());
    CU_ARG(max && (channels == 1 || channels == 2 || channels == 4));
    CU_TRY(cu_device_of(dev, &d));
    *max = 268435456;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuDeviceGetExecAffinitySupport, (int *pi, CUexecAffinityType type, CUdevice dev),
            (pi, type, dev)) {
    struct cu_device *d;
    CU_TRY(cu_ready());
    CU_ARG(pi && type == CU_EXEC_AFFINITY_TYPE_SM_COUNT);
    CU_TRY(cu_device_of(dev, &d));
    *pi = 0; /* needs MPS */
    return CUDA_SUCCESS;
}

/* No interface of the private tables is simulated; cudart fails cleanly on this. */
SIM_API(cuGetExportTable, (const void **table, const CUuuid *id), (table, id)) {
    CU_ARG(table && id);
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}

/* Names that no driver has (yet): an interposer must leave what it does not know alone. */
SIM_EXPORT CUresult cuFoo_v9(void *a, void *b, void *c, void *d);
SIM_EXPORT CUresult cuBar_v9(void *a, void *b, void *c, void *d);
SIM_EXPORT CUresult cuMemAlloc_v9(CUdeviceptr *p, size_t bytes);

CUresult cuFoo_v9(void *a, void *b, void *c, void *d) {
    (void)b, (void)c, (void)d;
    sim_trace_leave("cuFoo_v9", 0);
    return a ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuBar_v9(void *a, void *b, void *c, void *d) {
    (void)a, (void)b, (void)c, (void)d;
    sim_trace_leave("cuBar_v9", 0);
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v9(CUdeviceptr *p, size_t bytes) {
    cu_lock();
    CUresult r = cuMemAlloc_v2_body(p, bytes);
    cu_unlock();
    sim_trace_leave("cuMemAlloc_v9", (long)r);
    return r;
}
