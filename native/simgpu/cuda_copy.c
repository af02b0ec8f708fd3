/* Copies and fills. No bytes move: device memory has no contents here. Pointers are checked, and
 * managed pages come to the device. */
#include "sim_cuda.h"

#define SYNC(name, params, args)              \
    CUresult name##_body params;              \
    SIM_TWIN(name##_ptds, name, params, args) \
    SIM_API(name, params, args)

/* The 32-bit form first looks for a context of its own kind. */
#define OLD(name, params, args, call) \
    SIM_API(name, params, args) {     \
        struct cu_ctx *ctx;           \
        CU_TRY(cu_v1(&ctx));          \
        return call;                  \
    }

static CUresult here(void) {
    struct cu_ctx *ctx;
    return cu_current(&ctx);
}

static CUresult queue(CUstream stream, CUgraphNodeType type) {
    struct cu_stream *s;
    struct cu_node *node;
    return cu_enqueue(stream, type, &s, &node);
}

static CUresult device(CUdeviceptr p, size_t bytes) {
    CU_ARG(bytes == 0 || cu_range_ok(p, bytes));
    cu_touch(p, bytes, true);
    return CUDA_SUCCESS;
}

/* A unified address that is none of ours is pageable memory of the host. */
static CUresult any(CUdeviceptr p, size_t bytes) {
    CU_ARG(bytes == 0 || p);
    return va_find(p) ? device(p, bytes) : CUDA_SUCCESS;
}

static CUresult host(const void *p, size_t bytes) {
    CU_ARG(bytes == 0 || p);
    return CUDA_SUCCESS;
}

static CUresult array(CUarray a) {
    CU_CHECK(cu_handle_is(a, K_ARRAY), CUDA_ERROR_INVALID_HANDLE);
    return CUDA_SUCCESS;
}

static CUresult both(CUresult a, CUresult b) {
    return a != CUDA_SUCCESS ? a : b;
}

static CUresult both_here(CUresult a, CUresult b) {
    CU_TRY(here());
    return both(a, b);
}

/* ---- linear ---- */

SYNC(cuMemcpy, (CUdeviceptr dst, CUdeviceptr src, size_t n), (dst, src, n)) {
    return both_here(any(dst, n), any(src, n));
}

SYNC(cuMemcpyPeer, (CUdeviceptr dst, CUcontext to, CUdeviceptr src, CUcontext from, size_t n),
     (dst, to, src, from, n)) {
    CU_TRY(here());
    CU_CHECK(cu_handle_is(to, K_CONTEXT) && cu_handle_is(from, K_CONTEXT),
             CUDA_ERROR_INVALID_CONTEXT);
    return both(device(dst, n), device(src, n));
}

SYNC(cuMemcpyHtoD_v2, (CUdeviceptr dst, const void *src, size_t n), (dst, src, n)) {
    return both_here(device(dst, n), host(src, n));
}

SYNC(cuMemcpyDtoH_v2, (void *dst, CUdeviceptr src, size_t n), (dst, src, n)) {
    return both_here(host(dst, n), device(src, n));
}

SYNC(cuMemcpyDtoD_v2, (CUdeviceptr dst, CUdeviceptr src, size_t n), (dst, src, n)) {
    return both_here(device(dst, n), device(src, n));
}

SYNC(cuMemcpyDtoA_v2, (CUarray dst, size_t at, CUdeviceptr src, size_t n), (dst, at, src, n)) {
    (void)at;
    return both_here(array(dst), device(src, n));
}

SYNC(cuMemcpyAtoD_v2, (CUdeviceptr dst, CUarray src, size_t at, size_t n), (dst, src, at, n)) {
    (void)at;
    return both_here(device(dst, n), array(src));
}

SYNC(cuMemcpyHtoA_v2, (CUarray dst, size_t at, const void *src, size_t n), (dst, at, src, n)) {
    (void)at;
    return both_here(array(dst), host(src, n));
}

SYNC(cuMemcpyAtoH_v2, (void *dst, CUarray src, size_t at, size_t n), (dst, src, at, n)) {
    (void)at;
    return both_here(host(dst, n), array(src));
}

SYNC(cuMemcpyAtoA_v2, (CUarray dst, size_t to, CUarray src, size_t at, size_t n),
     (dst, to, src, at, n)) {
    (void)to, (void)at, (void)n;
    return both_here(array(dst), array(src));
}

SIM_PAIR(cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s),
         (dst, src, n, s)) {
    CU_TRY(queue(s, CU_GRAPH_NODE_TYPE_MEMCPY));
    return both(any(dst, n), any(src, n));
}

SIM_PAIR(cuMemcpyPeerAsync,
         (CUdeviceptr dst, CUcontext to, CUdeviceptr src, CUcontext from, size_t n, CUstream s),
         (dst, to, src, from, n, s)) {
    CU_TRY(queue(s, CU_GRAPH_NODE_TYPE_MEMCPY));
    CU_CHECK(cu_handle_is(to, K_CONTEXT) && cu_handle_is(from, K_CONTEXT),
             CUDA_ERROR_INVALID_CONTEXT);
    return both(device(dst, n), device(src, n));
}

SIM_PAIR(cuMemcpyHtoDAsync_v2, (CUdeviceptr dst, const void *src, size_t n, CUstream s),
         (dst, src, n, s)) {
    CU_TRY(queue(s, CU_GRAPH_NODE_TYPE_MEMCPY));
    return both(device(dst, n), host(src, n));
}

SIM_PAIR(cuMemcpyDtoHAsync_v2, (void *dst, CUdeviceptr src, size_t n, CUstream s),
         (dst, src, n, s)) {
    CU_TRY(queue(s, CU_GRAPH_NODE_TYPE_MEMCPY));
    return both(host(dst, n), device(src, n));
}

SIM_PAIR(cuMemcpyDtoDAsync_v2, (CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s),
         (dst, src, n, s)) {
    CU_TRY(queue(s, CU_GRAPH_NODE_TYPE_MEMCPY));
    return both(device(dst, n), device(src, n));
}

SIM_PAIR(cuMemcpyHtoAAsync_v2, (CUarray dst, size_t at, const void *src, size_t n, CUstream s),
         (dst, at, src, n, s)) {
    (void)at;
    CU_TRY(queue(s, CU_GRAPH_NODE_TYPE_MEMCPY));
    return both(array(dst), host(src, n));
}

SIM_PAIR(cuMemcpyAtoHAsync_v2, (void *dst, CUarray src, size_t at, size_t n, CUstream s),
         (dst, src, at, n, s)) {
    (void)at;
    CU_TRY(queue(s, CU_GRAPH_NODE_TYPE_MEMCPY));
    return both(host(dst, n), array(src));
}

OLD(cuMemcpyHtoD, (CUdeviceptr_v1 dst, const void *src, unsigned n), (dst, src, n),
    cuMemcpyHtoD_v2_body(dst, src, n))
OLD(cuMemcpyDtoH, (void *dst, CUdeviceptr_v1 src, unsigned n), (dst, src, n),
    cuMemcpyDtoH_v2_body(dst, src, n))
OLD(cuMemcpyDtoD, (CUdeviceptr_v1 dst, CUdeviceptr_v1 src, unsigned n), (dst, src, n),
    cuMemcpyDtoD_v2_body(dst, src, n))
OLD(cuMemcpyDtoA, (CUarray dst, unsigned at, CUdeviceptr_v1 src, unsigned n), (dst, at, src, n),
    cuMemcpyDtoA_v2_body(dst, at, src, n))
OLD(cuMemcpyAtoD, (CUdeviceptr_v1 dst, CUarray src, unsigned at, unsigned n), (dst, src, at, n),
    cuMemcpyAtoD_v2_body(dst, src, at, n))
OLD(cuMemcpyHtoA, (CUarray dst, unsigned at, const void *src, unsigned n), (dst, at, src, n),
    cuMemcpyHtoA_v2_body(dst, at, src, n))
OLD(cuMemcpyAtoH, (void *dst, CUarray src, unsigned at, unsigned n), (dst, src, at, n),
    cuMemcpyAtoH_v2_body(dst, src, at, n))
OLD(cuMemcpyAtoA, (CUarray dst, unsigned to, CUarray src, unsigned at, unsigned n),
    (dst, to, src, at, n), cuMemcpyAtoA_v2_body(dst, to, src, at, n))
OLD(cuMemcpyHtoDAsync, (CUdeviceptr_v1 dst, const void *src, unsigned n, CUstream s),
    (dst, src, n, s), cuMemcpyHtoDAsync_v2_body(dst, src, n, s))
OLD(cuMemcpyDtoHAsync, (void *dst, CUdeviceptr_v1 src, unsigned n, CUstream s), (dst, src, n, s),
    cuMemcpyDtoHAsync_v2_body(dst, src, n, s))
OLD(cuMemcpyDtoDAsync, (CUdeviceptr_v1 dst, CUdeviceptr_v1 src, unsigned n, CUstream s),
    (dst, src, n, s), cuMemcpyDtoDAsync_v2_body(dst, src, n, s))
OLD(cuMemcpyHtoAAsync, (CUarray dst, unsigned at, const void *src, unsigned n, CUstream s),
    (dst, at, src, n, s), cuMemcpyHtoAAsync_v2_body(dst, at, src, n, s))
OLD(cuMemcpyAtoHAsync, (void *dst, CUarray src, unsigned at, unsigned n, CUstream s),
    (dst, src, at, n, s), cuMemcpyAtoHAsync_v2_body(dst, src, at, n, s))

/* ---- 2D and 3D: the descriptor is looked at as far as its pointers go ---- */

static CUresult plane(CUmemorytype type, const void *h, CUdeviceptr d, CUarray a) {
    switch (type) {
    case CU_MEMORYTYPE_HOST:
        return host(h, 1);
    case CU_MEMORYTYPE_DEVICE:
        return device(d, 1);
    case CU_MEMORYTYPE_ARRAY:
        return array(a);
    case CU_MEMORYTYPE_UNIFIED:
        return any(d, 1);
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

#define PLANES(c)                                                                \
    both(plane((c)->srcMemoryType, (c)->srcHost, (c)->srcDevice, (c)->srcArray), \
         plane((c)->dstMemoryType, (c)->dstHost, (c)->dstDevice, (c)->dstArray))
#define SHAPED(name, type)             \
    SYNC(name, (const type *c), (c)) { \
        CU_TRY(here());                \
        CU_ARG(c);                     \
        return PLANES(c);              \
    }
#define SHAPED_ASYNC(name, type)                          \
    SIM_PAIR(name, (const type *c, CUstream s), (c, s)) { \
        CU_TRY(queue(s, CU_GRAPH_NODE_TYPE_MEMCPY));      \
        CU_ARG(c);                                        \
        return PLANES(c);                                 \
    }
SHAPED(cuMemcpy2D_v2, CUDA_MEMCPY2D)
SHAPED(cuMemcpy2DUnaligned_v2, CUDA_MEMCPY2D)
SHAPED(cuMemcpy3D_v2, CUDA_MEMCPY3D)
SHAPED(cuMemcpy3DPeer, CUDA_MEMCPY3D_PEER)
SHAPED_ASYNC(cuMemcpy2DAsync_v2, CUDA_MEMCPY2D)
SHAPED_ASYNC(cuMemcpy3DAsync_v2, CUDA_MEMCPY3D)
SHAPED_ASYNC(cuMemcpy3DPeerAsync, CUDA_MEMCPY3D_PEER)

static CUresult old_queue(CUstream s) {
    return queue(s, CU_GRAPH_NODE_TYPE_MEMCPY);
}
OLD(cuMemcpy2D, (const CUDA_MEMCPY2D_v1 *c), (c), c ? PLANES(c) : CUDA_ERROR_INVALID_VALUE)
OLD(cuMemcpy2DUnaligned, (const CUDA_MEMCPY2D_v1 *c), (c), c ? PLANES(c) : CUDA_ERROR_INVALID_VALUE)
OLD(cuMemcpy3D, (const CUDA_MEMCPY3D_v1 *c), (c), c ? PLANES(c) : CUDA_ERROR_INVALID_VALUE)
OLD(cuMemcpy2DAsync, (const CUDA_MEMCPY2D_v1 *c, CUstream s), (c, s),
    c ? both(old_queue(s), PLANES(c)) : CUDA_ERROR_INVALID_VALUE)
OLD(cuMemcpy3DAsync, (const CUDA_MEMCPY3D_v1 *c, CUstream s), (c, s),
    c ? both(old_queue(s), PLANES(c)) : CUDA_ERROR_INVALID_VALUE)

/* ---- batches ---- */

static CUresult copies(CUdeviceptr *dst, CUdeviceptr *src, size_t *n, size_t count, CUstream s) {
    CU_TRY(queue(s, CU_GRAPH_NODE_TYPE_MEMCPY));
    CU_ARG(dst && src && n && count);
    for (size_t i = 0; i < count; i++)
        CU_TRY(both(any(dst[i], n[i]), any(src[i], n[i])));
    return CUDA_SUCCESS;
}

SIM_PAIR_NEW(cuMemcpyBatchAsync_v2,
             (CUdeviceptr * dst, CUdeviceptr *src, size_t *n, size_t count,
              CUmemcpyAttributes *attrs, size_t *index, size_t n_attrs, CUstream s),
             (dst, src, n, count, attrs, index, n_attrs, s)) {
    (void)attrs, (void)index, (void)n_attrs;
    return copies(dst, src, n, count, s);
}

SIM_PAIR_NEW(cuMemcpyBatchAsync,
             (CUdeviceptr * dst, CUdeviceptr *src, size_t *n, size_t count,
              CUmemcpyAttributes *attrs, size_t *index, size_t n_attrs, size_t *failed, CUstream s),
             (dst, src, n, count, attrs, index, n_attrs, failed, s)) {
    (void)attrs, (void)index, (void)n_attrs, (void)failed;
    return copies(dst, src, n, count, s);
}

SIM_PAIR_NEW(cuMemcpy3DBatchAsync_v2,
             (size_t n, CUDA_MEMCPY3D_BATCH_OP *ops, unsigned long long flags, CUstream s),
             (n, ops, flags, s)) {
    CU_TRY(queue(s, CU_GRAPH_NODE_TYPE_MEMCPY));
    CU_ARG(n && ops && flags == 0);
    return CUDA_SUCCESS;
}

SIM_PAIR_NEW(cuMemcpy3DBatchAsync,
             (size_t n, CUDA_MEMCPY3D_BATCH_OP *ops, size_t *failed, unsigned long long flags,
              CUstream s),
             (n, ops, failed, flags, s)) {
    (void)failed;
    CU_TRY(queue(s, CU_GRAPH_NODE_TYPE_MEMCPY));
    CU_ARG(n && ops && flags == 0);
    return CUDA_SUCCESS;
}

/* ---- fills ---- */

#define FILL(bits, type, bytes)                                                                \
    SYNC(cuMemsetD##bits##_v2, (CUdeviceptr p, type v, size_t n), (p, v, n)) {                 \
        (void)v;                                                                               \
        CU_TRY(here());                                                                        \
        return device(p, n * bytes);                                                           \
    }                                                                                          \
    SYNC(cuMemsetD2D##bits##_v2, (CUdeviceptr p, size_t pitch, type v, size_t w, size_t h),    \
         (p, pitch, v, w, h)) {                                                                \
        (void)v;                                                                               \
        CU_TRY(here());                                                                        \
        return w && h ? device(p, pitch * (h - 1) + w * bytes) : CUDA_SUCCESS;                 \
    }                                                                                          \
    SIM_PAIR(cuMemsetD##bits##Async, (CUdeviceptr p, type v, size_t n, CUstream s),            \
             (p, v, n, s)) {                                                                   \
        (void)v;                                                                               \
        CU_TRY(queue(s, CU_GRAPH_NODE_TYPE_MEMSET));                                           \
        return device(p, n * bytes);                                                           \
    }                                                                                          \
    SIM_PAIR(cuMemsetD2D##bits##Async,                                                         \
             (CUdeviceptr p, size_t pitch, type v, size_t w, size_t h, CUstream s),            \
             (p, pitch, v, w, h, s)) {                                                         \
        (void)v;                                                                               \
        CU_TRY(queue(s, CU_GRAPH_NODE_TYPE_MEMSET));                                           \
        return w && h ? device(p, pitch * (h - 1) + w * bytes) : CUDA_SUCCESS;                 \
    }                                                                                          \
    OLD(cuMemsetD##bits, (CUdeviceptr_v1 p, type v, unsigned n), (p, v, n),                    \
        cuMemsetD##bits##_v2_body(p, v, n))                                                    \
    OLD(cuMemsetD2D##bits, (CUdeviceptr_v1 p, unsigned pitch, type v, unsigned w, unsigned h), \
        (p, pitch, v, w, h), cuMemsetD2D##bits##_v2_body(p, pitch, v, w, h))

FILL(8, unsigned char, 1)
FILL(16, unsigned short, 2)
FILL(32, unsigned, 4)
