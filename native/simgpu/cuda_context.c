/* Contexts: primary, created, current. Each costs the model's context size. */
#include "sim_cuda.h"

#include <stdlib.h>
#include <string.h>

#define DEPTH 64

static _Thread_local struct {
    struct cu_ctx *at[DEPTH];
    int top;
} stack;

/* The handle of a green context leads to the primary one, where all its memory is. */
static CUresult resolve(struct cu_ctx *ctx, struct cu_ctx **out) {
    if (cu_handle_is(ctx, K_CONTEXT) && ctx->base)
        ctx = ctx->base;
    CU_CHECK(cu_handle_is(ctx, K_CONTEXT), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    *out = ctx;
    return CUDA_SUCCESS;
}

CUresult cu_current(struct cu_ctx **out) {
    CU_TRY(cu_ready());
    CU_CHECK(stack.top > 0, CUDA_ERROR_INVALID_CONTEXT);
    return resolve(stack.at[stack.top - 1], out);
}

CUresult cu_push(struct cu_ctx *ctx) {
    CU_CHECK(stack.top < DEPTH, CUDA_ERROR_OUT_OF_MEMORY);
    stack.at[stack.top++] = ctx;
    return CUDA_SUCCESS;
}

/* Percent of the multiprocessors that a client of MPS asked for. */
static unsigned mps_share(void) {
    const char *text = getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    int share = text ? atoi(text) : 100;
    return share > 0 && share < 100 ? (unsigned)share : 100;
}

CUresult cu_ctx_start(struct cu_ctx *ctx, int dev, unsigned flags) {
    uint32_t dom = cu_devs[dev].dom;
    size_t bytes = sim->dom[dom].ctx_bytes, lmem = cu_lmem_bytes(dom, 1024);
    unsigned share = mps_share();
    /* Measured on an H200: 516 MiB with all of them, 274 with a half, 179 with a quarter. */
    if (share < 100) {
        bytes = bytes * (180 + 7 * share) / 1000 / SIM_MIB * SIM_MIB;
        lmem = lmem * share / 100 / SIM_MIB * SIM_MIB;
    }
    CU_CHECK(cu_take(dom, bytes), CUDA_ERROR_OUT_OF_MEMORY);
    if (!cu_handle_add(ctx, K_CONTEXT)) {
        sim_give(dom, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memset(ctx, 0, sizeof *ctx);
    ctx->dom = dom;
    ctx->dev = dev;
    ctx->flags = flags;
    ctx->id = cu_next_id();
    ctx->charged = bytes - lmem;
    ctx->lmem_charged = lmem;
    ctx->limit[CU_LIMIT_STACK_SIZE] = 1024;
    ctx->limit[CU_LIMIT_PRINTF_FIFO_SIZE] = 8650752;
    ctx->limit[CU_LIMIT_MALLOC_HEAP_SIZE] = 8 * SIM_MIB;
    ctx->limit[CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = 2048;
    ctx->limit[CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 64;
    atomic_fetch_add(&sim->contexts[dom][sim_self], 1);
    CUresult result = CUDA_SUCCESS;
    library_context(ctx, &result);
    if (result != CUDA_SUCCESS)
        cu_ctx_stop(ctx);
    return result;
}

/* Objects may end others of their kind, so the search starts anew after each. */
static void end_objects(struct cu_ctx *ctx) {
    for (bool again = true; again;) {
        again = false;
        size_t at = 0;
        struct cu_obj *o;
        while (!again && (o = cu_handle_next(K_NONE, &at)))
            if (o->ctx == ctx) {
                o->destroy(o);
                again = true;
            }
    }
}

void cu_ctx_stop(struct cu_ctx *ctx) {
    end_objects(ctx);
    free_later_end(ctx);
    while (ctx->recs)
        cu_rec_free(ctx->recs);
    for (int i = 0; i < 2; i++)
        free(ctx->special[i]);
    cu_handle_del(ctx);
    sim_give(ctx->dom, ctx->charged + ctx->lmem_charged + ctx->runtime_charged + ctx->heap_charged +
                           ctx->green_charged + ctx->stream_charged + ctx->image_charged);
    atomic_fetch_sub(&sim->contexts[ctx->dom][sim_self], 1);
}

/* ---- primary ---- */

static bool active(struct cu_device *d) {
    return d->primary && cu_handle_is(d->primary, K_CONTEXT);
}

CUresult cu_primary(CUdevice dev, struct cu_ctx **out) {
    struct cu_device *d;
    CU_TRY(cu_device_of(dev, &d));
    if (!d->primary && !(d->primary = calloc(1, sizeof *d->primary)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!active(d)) {
        CU_TRY(cu_ctx_start(d->primary, dev, d->primary_flags));
        d->primary->primary = true;
        d->primary->api_version = 3020;
    }
    d->primary_refs++;
    *out = d->primary;
    return CUDA_SUCCESS;
}

void cu_primary_put(CUdevice dev) {
    struct cu_device *d = &cu_devs[dev];
    if (--d->primary_refs == 0 && active(d))
        cu_ctx_stop(d->primary);
}

SIM_API(cuDevicePrimaryCtxRetain, (CUcontext * pctx, CUdevice dev), (pctx, dev)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_ready());
    CU_ARG(pctx);
    CU_TRY(cu_primary(dev, &ctx));
    *pctx = (CUcontext)ctx;
    return CUDA_SUCCESS;
}

SIM_API(cuDevicePrimaryCtxRelease_v2, (CUdevice dev), (dev)) {
    struct cu_device *d;
    CU_TRY(cu_device_of(dev, &d));
    CU_CHECK(d->primary_refs > 0, CUDA_ERROR_INVALID_CONTEXT);
    cu_primary_put(dev);
    return CUDA_SUCCESS;
}
SIM_TWIN(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (CUdevice dev), (dev))

/* Measured: what was retained stays retained, and the old handle comes back with the next one. */
SIM_API(cuDevicePrimaryCtxReset_v2, (CUdevice dev), (dev)) {
    struct cu_device *d;
    CU_TRY(cu_device_of(dev, &d));
    if (active(d))
        cu_ctx_stop(d->primary);
    return CUDA_SUCCESS;
}
SIM_TWIN(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2, (CUdevice dev), (dev))

SIM_API(cuDevicePrimaryCtxSetFlags_v2, (CUdevice dev, unsigned flags), (dev, flags)) {
    struct cu_device *d;
    CU_TRY(cu_device_of(dev, &d));
    CU_ARG(!(flags & ~(unsigned)CU_CTX_FLAGS_MASK));
    d->primary_flags = flags;
    if (active(d))
        d->primary->flags = flags;
    return CUDA_SUCCESS;
}
SIM_TWIN(cuDevicePrimaryCtxSetFlags, cuDevicePrimaryCtxSetFlags_v2, (CUdevice dev, unsigned flags),
         (dev, flags))

SIM_API(cuDevicePrimaryCtxGetState, (CUdevice dev, unsigned *flags, int *on), (dev, flags, on)) {
    struct cu_device *d;
    CU_TRY(cu_device_of(dev, &d));
    CU_ARG(flags && on);
    *flags = d->primary_flags;
    *on = active(d);
    return CUDA_SUCCESS;
}

/* ---- created ---- */

static void destroy_ctx(void *p) {
    cu_ctx_stop(p);
    free(p);
}

static CUresult create(CUcontext *pctx, unsigned flags, CUdevice dev, unsigned api) {
    struct cu_device *d;
    CU_TRY(cu_ready());
    CU_ARG(pctx && !(flags & ~(unsigned)CU_CTX_FLAGS_MASK));
    CU_TRY(cu_device_of(dev, &d));
    struct cu_ctx *ctx = calloc(1, sizeof *ctx);
    CUresult result = ctx ? cu_ctx_start(ctx, dev, flags) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result) {
        free(ctx);
        return result;
    }
    ctx->obj.destroy = destroy_ctx;
    ctx->api_version = api;
    ctx->legacy_refs = 1;
    if ((result = cu_push(ctx))) {
        destroy_ctx(ctx);
        return result;
    }
    *pctx = (CUcontext)ctx;
    return CUDA_SUCCESS;
}

static bool v1_works(void) {
    const char *v = getenv("SIMGPU_V1");
    return v && *v == '1';
}

/* In any other context the 32-bit calls find no context. */
CUresult cu_v1(struct cu_ctx **out) {
    CU_TRY(cu_current(out));
    CU_CHECK((*out)->api_version < 3020 || v1_works(), CUDA_ERROR_INVALID_CONTEXT);
    return CUDA_SUCCESS;
}

SIM_API(cuCtxCreate, (CUcontext * pctx, unsigned flags, CUdevice dev), (pctx, flags, dev)) {
    CU_TRY(cu_ready());
    /* Measured: a card of more than 4 GiB takes no 32-bit context. SIMGPU_V1=1 imitates the
     * drivers that did. */
    CU_CHECK(v1_works(), CUDA_ERROR_OUT_OF_MEMORY);
    return create(pctx, flags, dev, 3010);
}

SIM_API(cuCtxCreate_v2, (CUcontext * pctx, unsigned flags, CUdevice dev), (pctx, flags, dev)) {
    return create(pctx, flags, dev, 3020);
}

SIM_API_NEW(cuCtxCreate_v3,
            (CUcontext * pctx, CUexecAffinityParam *params, int n, unsigned flags, CUdevice dev),
            (pctx, params, n, flags, dev)) {
    CU_TRY(cu_ready());
    CU_ARG(n >= 0 && (n == 0 || params));
    return create(pctx, flags, dev, 3020);
}

SIM_API_NEW(cuCtxCreate_v4,
            (CUcontext * pctx, CUctxCreateParams *params, unsigned flags, CUdevice dev),
            (pctx, params, flags, dev)) {
    (void)params; /* SM affinity and CIG cost no memory */
    return create(pctx, flags, dev, 3020);
}

static void drop_from_stack(struct cu_ctx *ctx) {
    if (stack.top && stack.at[stack.top - 1] == ctx)
        stack.top--;
}

SIM_API(cuCtxDestroy_v2, (CUcontext handle), (handle)) {
    struct cu_ctx *ctx = (struct cu_ctx *)handle;
    CU_TRY(cu_ready());
    CU_CHECK(cu_handle_is(ctx, K_CONTEXT) && !ctx->primary && !ctx->green,
             CUDA_ERROR_INVALID_CONTEXT);
    drop_from_stack(ctx);
    destroy_ctx(ctx);
    return CUDA_SUCCESS;
}
SIM_TWIN(cuCtxDestroy, cuCtxDestroy_v2, (CUcontext handle), (handle))

SIM_API(cuCtxAttach, (CUcontext * pctx, unsigned flags), (pctx, flags)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_ready());
    CU_ARG(pctx && flags == 0);
    CU_TRY(cu_current(&ctx));
    ctx->legacy_refs++;
    *pctx = (CUcontext)ctx;
    return CUDA_SUCCESS;
}

SIM_API(cuCtxDetach, (CUcontext handle), (handle)) {
    struct cu_ctx *ctx = (struct cu_ctx *)handle;
    CU_TRY(cu_ready());
    CU_CHECK(cu_handle_is(ctx, K_CONTEXT) && !ctx->primary, CUDA_ERROR_INVALID_CONTEXT);
    if (ctx->legacy_refs > 1) {
        ctx->legacy_refs--;
        return CUDA_SUCCESS;
    }
    return cuCtxDestroy_v2_body(handle);
}

/* ---- current ---- */

/* The handle of a primary context may be made current while that is not active. */
static bool known(struct cu_ctx *ctx) {
    for (int i = 0; i < cu_ndevs; i++)
        if (cu_devs[i].primary == ctx)
            return true;
    return cu_handle_is(ctx, K_CONTEXT);
}

SIM_API(cuCtxSetCurrent, (CUcontext handle), (handle)) {
    struct cu_ctx *ctx = (struct cu_ctx *)handle;
    CU_TRY(cu_ready());
    if (!ctx) {
        stack.top -= stack.top > 0;
        return CUDA_SUCCESS;
    }
    CU_CHECK(known(ctx), CUDA_ERROR_INVALID_CONTEXT);
    stack.top -= stack.top > 0;
    return cu_push(ctx);
}

SIM_API(cuCtxGetCurrent, (CUcontext * pctx), (pctx)) {
    CU_TRY(cu_ready());
    CU_ARG(pctx);
    *pctx = stack.top ? (CUcontext)stack.at[stack.top - 1] : NULL;
    return CUDA_SUCCESS;
}

SIM_API(cuCtxPushCurrent_v2, (CUcontext handle), (handle)) {
    struct cu_ctx *ctx = (struct cu_ctx *)handle;
    CU_TRY(cu_ready());
    CU_CHECK(known(ctx), CUDA_ERROR_INVALID_CONTEXT);
    return cu_push(ctx);
}
SIM_TWIN(cuCtxPushCurrent, cuCtxPushCurrent_v2, (CUcontext handle), (handle))

SIM_API(cuCtxPopCurrent_v2, (CUcontext * pctx), (pctx)) {
    CU_TRY(cu_ready());
    CU_CHECK(stack.top > 0, CUDA_ERROR_INVALID_CONTEXT);
    stack.top--;
    if (pctx)
        *pctx = (CUcontext)stack.at[stack.top];
    return CUDA_SUCCESS;
}
SIM_TWIN(cuCtxPopCurrent, cuCtxPopCurrent_v2, (CUcontext * pctx), (pctx))

SIM_API(cuCtxGetDevice, (CUdevice * device), (device)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    CU_ARG(device);
    *device = ctx->dev;
    return CUDA_SUCCESS;
}

/* NULL means the current context in the calls that were added in CUDA 13. */
CUresult cu_ctx_pick(CUcontext handle, struct cu_ctx **out) {
    if (!handle)
        return cu_current(out);
    CU_TRY(cu_ready());
    CU_CHECK(cu_handle_is(handle, K_CONTEXT), CUDA_ERROR_INVALID_CONTEXT);
    return resolve((struct cu_ctx *)handle, out);
}

SIM_API_NEW(cuCtxGetDevice_v2, (CUdevice * device, CUcontext handle), (device, handle)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_ctx_pick(handle, &ctx));
    CU_ARG(device);
    *device = ctx->dev;
    return CUDA_SUCCESS;
}

SIM_API(cuCtxGetApiVersion, (CUcontext handle, unsigned *version), (handle, version)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_ready());
    CU_ARG(version);
    CU_TRY(cu_ctx_pick(handle, &ctx));
    *version = ctx->api_version;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuCtxGetId, (CUcontext handle, unsigned long long *id), (handle, id)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_ready());
    CU_ARG(id);
    CU_TRY(cu_ctx_pick(handle, &ctx));
    *id = ctx->id;
    return CUDA_SUCCESS;
}

SIM_API(cuCtxGetFlags, (unsigned *flags), (flags)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    CU_ARG(flags);
    *flags = ctx->flags;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuCtxSetFlags, (unsigned flags), (flags)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    CU_ARG(!(flags & ~(unsigned)CU_CTX_FLAGS_MASK));
    ctx->flags = flags;
    return CUDA_SUCCESS;
}
