/* Green contexts: SM resources over the primary context, which holds their memory. Measured on the
 * H200: 6 MiB for the first, 4 for each further one, kept until the primary context ends. */
#include "sim_cuda.h"

#include <stdlib.h>
#include <string.h>

struct cu_green {
    struct cu_obj obj;
    struct cu_ctx *handle; /* what cuCtxFromGreenCtx gives */
    int dev;
    CUdevResource sm;
    unsigned long long id;
};

struct desc {
    CUdevResource resource;
};

SIM_API_NEW(cuDeviceGetDevResource, (CUdevice dev, CUdevResource *out, CUdevResourceType type),
            (dev, out, type)) {
    struct cu_device *d;
    CU_TRY(cu_device_of(dev, &d));
    CU_ARG(out);
    CU_CHECK(type == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
    memset(out, 0, sizeof *out);
    out->type = type;
    out->sm.smCount = sim->dom[d->dom].sms;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuCtxGetDevResource, (CUcontext handle, CUdevResource *out, CUdevResourceType type),
            (handle, out, type)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_ctx_pick(handle, &ctx));
    return cuDeviceGetDevResource_body(ctx->dev, out, type);
}

SIM_API_NEW(cuDevSmResourceSplitByCount,
            (CUdevResource * out, unsigned *groups, const CUdevResource *in, CUdevResource *rest,
             unsigned flags, unsigned least),
            (out, groups, in, rest, flags, least)) {
    (void)flags;
    CU_TRY(cu_ready());
    CU_ARG(groups && in && least && in->type == CU_DEV_RESOURCE_TYPE_SM);
    unsigned each = (least + 7) / 8 * 8, fit = in->sm.smCount / each;
    unsigned n = out && *groups < fit ? *groups : fit;
    CU_CHECK(n, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    for (unsigned i = 0; out && i < n; i++) {
        out[i] = *in;
        out[i].sm.smCount = each;
    }
    if (rest) {
        *rest = *in;
        rest->sm.smCount = in->sm.smCount - n * each;
    }
    *groups = n;
    return CUDA_SUCCESS;
}

/* Descriptors have no destructor in the API; one is kept per call, as the driver does. */
SIM_API_NEW(cuDevResourceGenerateDesc,
            (CUdevResourceDesc * out, CUdevResource *resources, unsigned n), (out, resources, n)) {
    static struct desc *made[64];
    static unsigned next;
    CU_TRY(cu_ready());
    CU_ARG(out && resources && n == 1 && resources[0].type == CU_DEV_RESOURCE_TYPE_SM);
    struct desc **d = &made[next++ % 64];
    if (!*d && !(*d = calloc(1, sizeof **d)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    (*d)->resource = resources[0];
    *out = (CUdevResourceDesc)*d;
    return CUDA_SUCCESS;
}

static void destroy(void *p) {
    struct cu_green *g = p;
    cu_handle_del(g->handle);
    cu_handle_del(g);
    free(g->handle);
    cu_primary_put(g->dev);
    free(g);
}

SIM_API_NEW(cuGreenCtxCreate,
            (CUgreenCtx * out, CUdevResourceDesc desc, CUdevice dev, unsigned flags),
            (out, desc, dev, flags)) {
    struct cu_ctx *primary;
    CU_TRY(cu_ready());
    CU_ARG(out && desc && flags == CU_GREEN_CTX_DEFAULT_STREAM);
    CU_TRY(cu_primary(dev, &primary));
    size_t more = (primary->green_charged ? 4 : 6) * SIM_MIB;
    struct cu_green *g = calloc(1, sizeof *g);
    struct cu_ctx *handle = calloc(1, sizeof *handle);
    if (!g || !handle || !cu_take(primary->dom, more)) {
        free(g);
        free(handle);
        cu_primary_put(dev);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    primary->green_charged += more;
    g->obj.destroy = destroy;
    g->handle = handle;
    g->dev = dev;
    g->sm = ((struct desc *)desc)->resource;
    g->id = cu_next_id();
    handle->base = primary;
    handle->green = g;
    handle->dev = dev;
    handle->dom = primary->dom;
    handle->api_version = 3020;
    if (!cu_handle_add(g, K_GREEN) || !cu_handle_add(handle, K_CONTEXT)) {
        destroy(g);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = (CUgreenCtx)g;
    return CUDA_SUCCESS;
}

static CUresult green(CUgreenCtx handle, struct cu_green **out) {
    CU_TRY(cu_ready());
    CU_CHECK(cu_handle_is(handle, K_GREEN), CUDA_ERROR_INVALID_HANDLE);
    *out = (struct cu_green *)handle;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuGreenCtxDestroy, (CUgreenCtx handle), (handle)) {
    struct cu_green *g;
    CU_TRY(green(handle, &g));
    destroy(g);
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuCtxFromGreenCtx, (CUcontext * out, CUgreenCtx handle), (out, handle)) {
    struct cu_green *g;
    CU_TRY(green(handle, &g));
    CU_ARG(out);
    *out = (CUcontext)g->handle;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuGreenCtxGetDevResource,
            (CUgreenCtx handle, CUdevResource *out, CUdevResourceType type), (handle, out, type)) {
    struct cu_green *g;
    CU_TRY(green(handle, &g));
    CU_ARG(out);
    CU_CHECK(type == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
    *out = g->sm;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuGreenCtxGetId, (CUgreenCtx handle, unsigned long long *id), (handle, id)) {
    struct cu_green *g;
    CU_TRY(green(handle, &g));
    CU_ARG(id);
    *id = g->id;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuGreenCtxRecordEvent, (CUgreenCtx handle, CUevent event), (handle, event)) {
    struct cu_green *g;
    CU_TRY(green(handle, &g));
    CU_CHECK(cu_handle_is(event, K_EVENT), CUDA_ERROR_INVALID_HANDLE);
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuGreenCtxWaitEvent, (CUgreenCtx handle, CUevent event), (handle, event)) {
    struct cu_green *g;
    CU_TRY(green(handle, &g));
    CU_CHECK(cu_handle_is(event, K_EVENT), CUDA_ERROR_INVALID_HANDLE);
    return CUDA_SUCCESS;
}
