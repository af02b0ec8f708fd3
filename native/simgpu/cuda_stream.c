/* Streams. All work is done the moment it is put in, so a stream only orders give-backs: what was
 * freed on it goes back when it is synchronised. */
#include "sim_cuda.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static struct {
    CUdeviceptr p;
    uint64_t stream;
} *later;
static size_t n_later, cap_later;

/* Measured on the H200: stream 2 and each fourth after it takes 2 MiB, as does 36 and each
 * thirty-second; they are kept for new streams until the context ends. */
static size_t cost(long n) {
    size_t steps = n < 2 ? 0 : (size_t)(n - 2) / 4 + 1;
    steps += n < 36 ? 0 : (size_t)(n - 36) / 32 + 1;
    return steps * SIM_GRANULE;
}

static CUresult count_stream(struct cu_ctx *ctx) {
    long n = ctx->streams + 1;
    if (n > ctx->streams_high) {
        size_t more = cost(n) - cost(ctx->streams_high);
        CU_CHECK(cu_take(ctx->dom, more), CUDA_ERROR_OUT_OF_MEMORY);
        ctx->stream_charged += more;
        ctx->streams_high = n;
    }
    ctx->streams = n;
    return CUDA_SUCCESS;
}

static void destroy(void *p) {
    struct cu_stream *s = p;
    capture_leave(s);
    s->ctx->streams--;
    cu_handle_del(s);
    free(s);
}

static CUresult create(struct cu_ctx *ctx, CUstream *out, unsigned flags, int priority,
                       struct cu_green *green) {
    CU_TRY(count_stream(ctx));
    struct cu_stream *s = calloc(1, sizeof *s);
    if (!s || !cu_handle_add(s, K_STREAM)) {
        free(s);
        ctx->streams--;
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    s->obj = (struct cu_obj){ctx, destroy};
    s->ctx = ctx;
    s->flags = flags;
    s->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    s->id = cu_next_id();
    s->green = green;
    *out = (CUstream)s;
    return CUDA_SUCCESS;
}

CUresult cu_stream(CUstream handle, struct cu_stream **out) {
    CU_TRY(cu_ready());
    if (handle == NULL || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        struct cu_ctx *ctx;
        CU_TRY(cu_current(&ctx));
        struct cu_stream **s = &ctx->special[handle == CU_STREAM_PER_THREAD];
        if (!*s) {
            *s = calloc(1, sizeof **s);
            CU_CHECK(*s, CUDA_ERROR_OUT_OF_MEMORY);
            **s = (struct cu_stream){.ctx = ctx, .id = cu_next_id(), .special = true};
        }
        *out = *s;
        return CUDA_SUCCESS;
    }
    CU_CHECK(cu_handle_is(handle, K_STREAM), CUDA_ERROR_INVALID_HANDLE);
    *out = (struct cu_stream *)handle;
    return CUDA_SUCCESS;
}

uint64_t cu_thread(void) {
    return (uint64_t)pthread_self();
}

/* ---- give-backs ---- */

/* cuMemFreeAsync of plain memory: the address is dead at once, the bytes go back with the stream. */
CUresult free_later(CUdeviceptr p, struct cu_stream *s) {
    CUdeviceptr base;
    size_t size;
    CU_ARG(!freed_already(p) && cu_whole(p, &base, &size) && base == p);
    if (n_later == cap_later) {
        size_t to = cap_later ? cap_later * 2 : 64;
        void *grown = realloc(later, to * sizeof *later);
        CU_CHECK(grown, CUDA_ERROR_OUT_OF_MEMORY);
        later = grown;
        cap_later = to;
    }
    later[n_later].p = p;
    later[n_later++].stream = s->id;
    return CUDA_SUCCESS;
}

bool freed_already(CUdeviceptr p) {
    for (size_t i = 0; i < n_later; i++)
        if (later[i].p == p)
            return true;
    return false;
}

void free_later_end(struct cu_ctx *ctx) {
    for (size_t i = 0; i < n_later;) {
        const struct cu_rec *rec = va_find(later[i].p);
        if (rec && rec->ctx == ctx)
            later[i] = later[--n_later];
        else
            i++;
    }
}

void cu_synced(uint64_t stream_id) {
    for (size_t i = 0; i < n_later;) {
        if (stream_id && later[i].stream != stream_id) {
            i++;
            continue;
        }
        CUdeviceptr p = later[i].p;
        later[i] = later[--n_later];
        cu_free(p);
    }
    pool_synced(stream_id);
}

/* ---- API ---- */

SIM_API(cuStreamCreate, (CUstream * out, unsigned flags), (out, flags)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    CU_ARG(out && flags <= CU_STREAM_NON_BLOCKING);
    return create(ctx, out, flags, 0, NULL);
}

SIM_API(cuStreamCreateWithPriority, (CUstream * out, unsigned flags, int priority),
        (out, flags, priority)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    CU_ARG(out && flags <= CU_STREAM_NON_BLOCKING);
    return create(ctx, out, flags, priority, NULL);
}

SIM_API_NEW(cuGreenCtxStreamCreate,
            (CUstream * out, CUgreenCtx green, unsigned flags, int priority),
            (out, green, flags, priority)) {
    CU_TRY(cu_ready());
    CU_ARG(out && flags == CU_STREAM_NON_BLOCKING);
    CU_CHECK(cu_handle_is(green, K_GREEN), CUDA_ERROR_INVALID_HANDLE);
    struct cu_ctx *handle = *(struct cu_ctx **)((char *)green + sizeof(struct cu_obj));
    return create(handle->base, out, flags, priority, (struct cu_green *)green);
}

SIM_API(cuStreamDestroy_v2, (CUstream handle), (handle)) {
    CU_TRY(cu_ready());
    CU_CHECK(cu_handle_is(handle, K_STREAM), CUDA_ERROR_INVALID_HANDLE);
    destroy(handle);
    return CUDA_SUCCESS;
}
SIM_TWIN(cuStreamDestroy, cuStreamDestroy_v2, (CUstream handle), (handle))

SIM_PAIR(cuStreamSynchronize, (CUstream handle), (handle)) {
    struct cu_stream *s;
    CU_TRY(cu_stream(handle, &s));
    if (s->capture) {
        cu_spoil(s->capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    cu_synced(s->id);
    return CUDA_SUCCESS;
}

SIM_PAIR(cuStreamQuery, (CUstream handle), (handle)) {
    struct cu_stream *s;
    CU_TRY(cu_stream(handle, &s));
    if (s->capture) {
        cu_spoil(s->capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return CUDA_SUCCESS;
}

SIM_API(cuCtxSynchronize, (void), ()) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    CU_TRY(cu_unsafe());
    cu_synced(0);
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuCtxSynchronize_v2, (CUcontext handle), (handle)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_ctx_pick(handle, &ctx));
    CU_TRY(cu_unsafe());
    cu_synced(0);
    return CUDA_SUCCESS;
}

SIM_PAIR(cuStreamGetFlags, (CUstream handle, unsigned *flags), (handle, flags)) {
    struct cu_stream *s;
    CU_TRY(cu_stream(handle, &s));
    CU_ARG(flags);
    *flags = s->flags;
    return CUDA_SUCCESS;
}

SIM_PAIR(cuStreamGetPriority, (CUstream handle, int *priority), (handle, priority)) {
    struct cu_stream *s;
    CU_TRY(cu_stream(handle, &s));
    CU_ARG(priority);
    *priority = s->priority;
    return CUDA_SUCCESS;
}

SIM_PAIR_NEW(cuStreamGetId, (CUstream handle, unsigned long long *id), (handle, id)) {
    struct cu_stream *s;
    CU_TRY(cu_stream(handle, &s));
    CU_ARG(id);
    *id = s->id;
    return CUDA_SUCCESS;
}

/* Measured: spoils the capture it is asked about, in each mode. */
SIM_PAIR_NEW(cuStreamGetDevice, (CUstream handle, CUdevice *device), (handle, device)) {
    struct cu_stream *s;
    CU_TRY(cu_stream(handle, &s));
    CU_ARG(device);
    if (s->capture) {
        cu_spoil(s->capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    *device = s->ctx->dev;
    return CUDA_SUCCESS;
}

SIM_PAIR(cuStreamGetCtx, (CUstream handle, CUcontext *ctx), (handle, ctx)) {
    struct cu_stream *s;
    CU_TRY(cu_stream(handle, &s));
    CU_ARG(ctx);
    *ctx = (CUcontext)s->ctx;
    return CUDA_SUCCESS;
}

SIM_PAIR_NEW(cuStreamGetCtx_v2, (CUstream handle, CUcontext *ctx, CUgreenCtx *green),
             (handle, ctx, green)) {
    struct cu_stream *s;
    CU_TRY(cu_stream(handle, &s));
    CU_ARG(ctx && green);
    *ctx = s->green ? NULL : (CUcontext)s->ctx;
    *green = (CUgreenCtx)s->green;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuStreamGetGreenCtx, (CUstream handle, CUgreenCtx *green), (handle, green)) {
    struct cu_stream *s;
    CU_TRY(cu_stream(handle, &s));
    CU_ARG(green);
    *green = (CUgreenCtx)s->green;
    return CUDA_SUCCESS;
}

SIM_PAIR(cuStreamCopyAttributes, (CUstream dst, CUstream src), (dst, src)) {
    struct cu_stream *s;
    CU_TRY(cu_stream(dst, &s));
    return cu_stream(src, &s);
}

SIM_PAIR(cuStreamGetAttribute, (CUstream handle, CUstreamAttrID attr, CUstreamAttrValue *value),
         (handle, attr, value)) {
    struct cu_stream *s;
    CU_TRY(cu_stream(handle, &s));
    CU_ARG(value);
    memset(value, 0, sizeof *value);
    if (attr == CU_LAUNCH_ATTRIBUTE_PRIORITY)
        value->priority = s->priority;
    return CUDA_SUCCESS;
}

SIM_PAIR(cuStreamSetAttribute,
         (CUstream handle, CUstreamAttrID attr, const CUstreamAttrValue *value),
         (handle, attr, value)) {
    struct cu_stream *s;
    (void)attr;
    CU_TRY(cu_stream(handle, &s));
    CU_ARG(value);
    return CUDA_SUCCESS;
}

SIM_PAIR(cuStreamAttachMemAsync, (CUstream handle, CUdeviceptr p, size_t length, unsigned flags),
         (handle, p, length, flags)) {
    struct cu_stream *s;
    struct cu_node *node;
    (void)length, (void)flags;
    CU_TRY(cu_enqueue(handle, CU_GRAPH_NODE_TYPE_EMPTY, &s, &node));
    struct cu_rec *rec = va_find(p);
    CU_ARG(rec && rec->kind == R_MANAGED);
    return CUDA_SUCCESS;
}

/* Host functions run at once, without our lock. */
SIM_PAIR(cuLaunchHostFunc, (CUstream handle, CUhostFn fn, void *data), (handle, fn, data)) {
    struct cu_stream *s;
    struct cu_node *node;
    CU_TRY(cu_ready());
    CU_ARG(fn);
    CU_TRY(cu_enqueue(handle, CU_GRAPH_NODE_TYPE_HOST, &s, &node));
    if (!node) {
        cu_unlock();
        fn(data);
        cu_lock();
    }
    return CUDA_SUCCESS;
}

SIM_PAIR(cuStreamAddCallback,
         (CUstream handle, CUstreamCallback callback, void *data, unsigned flags),
         (handle, callback, data, flags)) {
    struct cu_stream *s;
    CU_TRY(cu_stream(handle, &s));
    CU_ARG(callback && flags == 0);
    if (s->capture) {
        cu_spoil(s->capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    cu_unlock();
    callback(handle, CUDA_SUCCESS, data);
    cu_lock();
    return CUDA_SUCCESS;
}
