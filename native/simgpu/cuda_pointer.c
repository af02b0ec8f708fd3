/* What a pointer is. */
#include "sim_cuda.h"

#include <string.h>

struct view {
    struct cu_rec *rec;
    CUdeviceptr base;
    size_t size;
    bool found;
};

static struct view look(CUdeviceptr p) {
    struct view v = {.rec = va_find(p)};
    v.found = v.rec && !freed_already(p) && cu_whole(p, &v.base, &v.size);
    return v;
}

static int ordinal(const struct view *v) {
    return v->rec->kind == R_HOST && v->rec->ctx ? v->rec->ctx->dev : cu_dev_of_dom(v->rec->dom);
}

static struct cu_pool *pool_handle(const struct view *v) {
    if (v->rec->kind == R_IPC && v->rec->flags)
        return v->rec->data;
    return pool_of(v->rec);
}

#define PUT(type, value)                            \
    do {                                            \
        type put_value = (value);                   \
        memcpy(data, &put_value, sizeof put_value); \
        return CUDA_SUCCESS;                        \
    } while (0)
#define P(name) CU_POINTER_ATTRIBUTE_##name

static CUresult owner(void *data, const struct view *v) {
    struct cu_ctx *ctx = v->rec->ctx;
    if (!ctx)
        ctx = cu_devs[ordinal(v) < 0 ? 0 : ordinal(v)].primary;
    PUT(CUcontext, (CUcontext)ctx);
}

static CUresult attribute(void *data, CUpointer_attribute attr, CUdeviceptr p,
                          const struct view *v) {
    bool host = v->rec->kind == R_HOST, managed = v->rec->kind == R_MANAGED;
    switch (attr) {
    case P(CONTEXT):
        CU_ARG(v->rec->kind != R_RESERVED);
        return owner(data, v);
    case P(MEMORY_TYPE):
        PUT(unsigned, host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE);
    case P(DEVICE_POINTER):
        PUT(CUdeviceptr, p);
    case P(HOST_POINTER):
        CU_ARG(host || managed);
        PUT(CUdeviceptr, p);
    case P(SYNC_MEMOPS):
        PUT(unsigned, 0);
    case P(BUFFER_ID):
    case P(MEMORY_BLOCK_ID):
        PUT(unsigned long long, v->rec->id);
    case P(IS_MANAGED):
        PUT(unsigned, managed);
    case P(DEVICE_ORDINAL):
        PUT(int, ordinal(v));
    case P(IS_LEGACY_CUDA_IPC_CAPABLE):
        PUT(int, v->rec->kind == R_ALLOC || v->rec->kind == R_BLOCK);
    case P(RANGE_START_ADDR):
    case P(MAPPING_BASE_ADDR):
        PUT(CUdeviceptr, v->base);
    case P(RANGE_SIZE):
    case P(MAPPING_SIZE):
        PUT(size_t, v->size);
    case P(MAPPED):
        PUT(int, 1);
    case P(ALLOWED_HANDLE_TYPES):
        PUT(unsigned long long,
            v->rec->kind == R_RESERVED ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0);
    case P(IS_GPU_DIRECT_RDMA_CAPABLE):
        PUT(int, !host);
    case P(ACCESS_FLAGS):
        PUT(int, 3);
    case P(MEMPOOL_HANDLE):
        PUT(CUmemoryPool, (CUmemoryPool)pool_handle(v));
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

SIM_API(cuPointerGetAttribute, (void *data, CUpointer_attribute attr, CUdeviceptr p),
        (data, attr, p)) {
    CU_TRY(cu_ready());
    CU_ARG(data);
    struct view v = look(p);
    CU_ARG(v.found);
    return attribute(data, attr, p, &v);
}

/* Unknown pointers are no error here: each answer is then empty. */
SIM_API(cuPointerGetAttributes,
        (unsigned n, CUpointer_attribute *attrs, void **data, CUdeviceptr p), (n, attrs, data, p)) {
    CU_TRY(cu_ready());
    CU_ARG(n && attrs && data);
    struct view v = look(p);
    for (unsigned i = 0; i < n; i++) {
        if (v.found && attribute(data[i], attrs[i], p, &v) == CUDA_SUCCESS)
            continue;
        switch (attrs[i]) {
        case P(CONTEXT):
        case P(DEVICE_POINTER):
        case P(HOST_POINTER):
        case P(BUFFER_ID):
        case P(RANGE_START_ADDR):
        case P(RANGE_SIZE):
        case P(MEMPOOL_HANDLE):
        case P(MAPPING_SIZE):
        case P(MAPPING_BASE_ADDR):
        case P(MEMORY_BLOCK_ID):
            memset(data[i], 0, 8);
            break;
        case P(DEVICE_ORDINAL):
            *(int *)data[i] = -2;
            break;
        default:
            memset(data[i], 0, 4);
        }
    }
    return CUDA_SUCCESS;
}

SIM_API(cuPointerSetAttribute, (const void *value, CUpointer_attribute attr, CUdeviceptr p),
        (value, attr, p)) {
    CU_TRY(cu_ready());
    CU_ARG(value && attr == P(SYNC_MEMOPS) && look(p).found);
    return CUDA_SUCCESS;
}
