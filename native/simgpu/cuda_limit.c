/* Limits of a context, and the memory they move. */
#include "sim_cuda.h"

/* Measured on the H200: whole granules of what exceeds a first 1.5 MiB. */
size_t cu_lmem_bytes(uint32_t dom, size_t per_thread) {
    size_t all = per_thread * sim->dom[dom].sms * sim->dom[dom].threads_per_sm;
    size_t spared = 3 * SIM_MIB / 2;
    return all > spared ? cu_physical(all - spared) : 0;
}

static CUresult set_lmem(struct cu_ctx *ctx, size_t per_thread) {
    size_t want = cu_lmem_bytes(ctx->dom, per_thread);
    if (want > ctx->lmem_charged)
        CU_CHECK(cu_take(ctx->dom, want - ctx->lmem_charged), CUDA_ERROR_OUT_OF_MEMORY);
    else
        sim_give(ctx->dom, ctx->lmem_charged - want);
    ctx->lmem_charged = want;
    ctx->limit[CU_LIMIT_STACK_SIZE] = per_thread;
    return CUDA_SUCCESS;
}

/* A kernel's local size raises the stack limit, and nothing but the limit lowers it again. */
CUresult cu_lmem_need(struct cu_ctx *ctx, size_t per_thread) {
    per_thread = (per_thread + 15) & ~(size_t)15;
    return per_thread > ctx->limit[CU_LIMIT_STACK_SIZE] ? set_lmem(ctx, per_thread) : CUDA_SUCCESS;
}

/* The H200's figures, scaled by threads. */
static size_t scaled(const struct cu_ctx *ctx, uint64_t mib) {
    uint64_t threads = (uint64_t)sim->dom[ctx->dom].sms * sim->dom[ctx->dom].threads_per_sm;
    return cu_physical(mib * SIM_MIB * threads / (132 * 2048));
}

static CUresult add(struct cu_ctx *ctx, size_t *charged, size_t bytes) {
    CU_CHECK(cu_take(ctx->dom, bytes), CUDA_ERROR_OUT_OF_MEMORY);
    *charged += bytes;
    return CUDA_SUCCESS;
}

/* Loading a module that uses printf or malloc: 64 and 138 MiB alone, 140 together, whatever the
 * limits; kept until the context ends. */
CUresult cu_runtime_need(struct cu_ctx *ctx, bool uses_printf, bool uses_heap) {
    if (uses_heap && !ctx->has_heap) {
        CU_TRY(add(ctx, &ctx->runtime_charged, scaled(ctx, ctx->has_printf ? 76 : 138)));
        ctx->has_heap = true;
    }
    if (uses_printf && !ctx->has_printf) {
        CU_TRY(add(ctx, &ctx->runtime_charged, scaled(ctx, ctx->has_heap ? 2 : 64)));
        ctx->has_printf = true;
    }
    return CUDA_SUCCESS;
}

/* The first launch of a kernel that uses malloc makes the heap. */
CUresult cu_heap_need(struct cu_ctx *ctx) {
    size_t heap = ctx->limit[CU_LIMIT_MALLOC_HEAP_SIZE];
    if (ctx->heap_charged)
        return CUDA_SUCCESS;
    return add(ctx, &ctx->heap_charged,
               cu_physical(heap < 4 * SIM_MIB ? 4 * SIM_MIB : heap) + SIM_GRANULE);
}

SIM_API(cuCtxSetLimit, (CUlimit limit, size_t value), (limit, value)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    switch (limit) {
    case CU_LIMIT_STACK_SIZE:
        CU_ARG(value <= 512 * 1024);
        CU_TRY(cu_unsafe());
        return set_lmem(ctx, (value + 15) & ~(size_t)15);
    case CU_LIMIT_PRINTF_FIFO_SIZE:
        CU_ARG(!ctx->has_printf);
        break;
    case CU_LIMIT_MALLOC_HEAP_SIZE:
        CU_ARG(!ctx->heap_charged);
        break;
    case CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT:
    case CU_LIMIT_MAX_L2_FETCH_GRANULARITY:
    case CU_LIMIT_PERSISTING_L2_CACHE_SIZE:
        break;
    case CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH:
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    ctx->limit[limit] = value;
    return CUDA_SUCCESS;
}

SIM_API(cuCtxGetLimit, (size_t *pvalue, CUlimit limit), (pvalue, limit)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    CU_ARG(pvalue && limit < CU_LIMIT_MAX);
    CU_CHECK(limit != CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH, CUDA_ERROR_UNSUPPORTED_LIMIT);
    *pvalue = ctx->limit[limit];
    return CUDA_SUCCESS;
}

/* ---- settings that cost nothing ---- */

SIM_API(cuCtxGetCacheConfig, (CUfunc_cache * config), (config)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    CU_ARG(config);
    *config = ctx->cache;
    return CUDA_SUCCESS;
}

SIM_API(cuCtxSetCacheConfig, (CUfunc_cache config), (config)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    ctx->cache = config;
    return CUDA_SUCCESS;
}

SIM_API(cuCtxGetSharedMemConfig, (CUsharedconfig * config), (config)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    CU_ARG(config);
    *config = ctx->shared_config;
    return CUDA_SUCCESS;
}

SIM_API(cuCtxSetSharedMemConfig, (CUsharedconfig config), (config)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    ctx->shared_config = config;
    return CUDA_SUCCESS;
}

SIM_API(cuCtxGetStreamPriorityRange, (int *least, int *greatest), (least, greatest)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}

SIM_API(cuCtxResetPersistingL2Cache, (void), ()) {
    struct cu_ctx *ctx;
    return cu_current(&ctx);
}

SIM_API_NEW(cuCtxGetExecAffinity, (CUexecAffinityParam * param, CUexecAffinityType type),
            (param, type)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    CU_ARG(param && type == CU_EXEC_AFFINITY_TYPE_SM_COUNT);
    param->type = type;
    param->param.smCount.val = sim->dom[ctx->dom].sms;
    return CUDA_SUCCESS;
}

SIM_API(cuCtxEnablePeerAccess, (CUcontext peer, unsigned flags), (peer, flags)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    CU_ARG(flags == 0);
    CU_CHECK(cu_handle_is(peer, K_CONTEXT) && (struct cu_ctx *)peer != ctx,
             CUDA_ERROR_INVALID_CONTEXT);
    return CUDA_SUCCESS;
}

SIM_API(cuCtxDisablePeerAccess, (CUcontext peer), (peer)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    CU_CHECK(cu_handle_is(peer, K_CONTEXT), CUDA_ERROR_INVALID_CONTEXT);
    return CUDA_SUCCESS;
}
