#include "contexts.h"
#include "launch.h"

/* Contexts that the program creates, and ends or detaches from. */

struct creation {
    struct taking taking;
    CUcontext context;
};

static CUresult creation_begin(struct creation *c, struct process *process, CUdevice dev) {
    struct device *device = process_device(process, dev);
    c->context = NULL;
    if (!device || process->mode != MODE_ON)
        return CUDA_ERROR_OUT_OF_MEMORY;
    return birth_begin(&c->taking, process, device, estimate_context(process, device));
}

static CUresult creation_end(struct creation *c, CUcontext *out, CUresult granted) {
    struct process *process = c->taking.process;
    struct device *device = c->taking.device;
    CUresult result = birth_end(&c->taking, granted);
    if (granted == CUDA_SUCCESS && result != CUDA_SUCCESS) {
        if (real.cuCtxDestroy_v2)
            (void)CALL_REAL(cuCtxDestroy_v2, c->context);
        else if (real.cuCtxDestroy)
            (void)CALL_REAL(cuCtxDestroy, c->context);
        taking_undone(&c->taking);
    }
    if (result != CUDA_SUCCESS) {
        birth_failed(device);
        return result;
    }
    context_enter(process, device, c->context, c->taking.bytes);
    *out = c->context;
    return CUDA_SUCCESS;
}

#define CREATE_BODY(symbol, out, dev, ...)              \
    NEED_CUDA(symbol);                                  \
    struct process *process = enter();                  \
    struct creation c;                                  \
    if (!process || !(out) || context_hopeless(dev))    \
        return real.symbol(out, __VA_ARGS__);           \
    CUresult result = creation_begin(&c, process, dev); \
    if (result != CUDA_SUCCESS)                         \
        return result;                                  \
    return creation_end(&c, out, CALL_REAL(symbol, &c.context, __VA_ARGS__))

CUresult cuCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev) {
    CREATE_BODY(cuCtxCreate, pctx, dev, flags, dev);
}

CUresult cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev) {
    CREATE_BODY(cuCtxCreate_v2, pctx, dev, flags, dev);
}

CUresult cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams,
                        unsigned int flags, CUdevice dev) {
    CREATE_BODY(cuCtxCreate_v3, pctx, dev, paramsArray, numParams, flags, dev);
}

CUresult cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags,
                        CUdevice dev) {
    CREATE_BODY(cuCtxCreate_v4, pctx, dev, ctxCreateParams, flags, dev);
}

CUresult cuGLCtxCreate(CUcontext *pCtx, unsigned int Flags, CUdevice device) {
    CREATE_BODY(cuGLCtxCreate, pCtx, device, Flags, device);
}

CUresult cuGLCtxCreate_v2(CUcontext *pCtx, unsigned int Flags, CUdevice device) {
    CREATE_BODY(cuGLCtxCreate_v2, pCtx, device, Flags, device);
}

CUresult cuVDPAUCtxCreate(CUcontext *pCtx, unsigned int flags, CUdevice device, VdpDevice vdpDevice,
                          VdpGetProcAddress *vdpGetProcAddress) {
    CREATE_BODY(cuVDPAUCtxCreate, pCtx, device, flags, device, vdpDevice, vdpGetProcAddress);
}

CUresult cuVDPAUCtxCreate_v2(CUcontext *pCtx, unsigned int flags, CUdevice device,
                             VdpDevice vdpDevice, VdpGetProcAddress *vdpGetProcAddress) {
    CREATE_BODY(cuVDPAUCtxCreate_v2, pCtx, device, flags, device, vdpDevice, vdpGetProcAddress);
}

/* Around the call that ends a created context; its entry is out of the ledger meanwhile. */
struct destruction {
    struct process *process;
    struct device *device; /* NULL: not ours to count */
    struct vgpu_entry context;
    struct doomed doomed;
};

static void destruction_begin(struct destruction *d, struct process *process, CUcontext context) {
    *d = (struct destruction){.process = process};
    if (vgpu_ledger_take(process->ledger, ENTRY_CONTEXT, key_of(context), &d->context))
        return;
    d->device = process_device(process, d->context.device);
    operation_begin(d->device);
    doomed_begin(&d->doomed, process, d->device, d->context.key, false);
}

static CUresult destruction_end(struct destruction *d, CUresult result) {
    if (!d->device)
        return result;
    if (result == CUDA_SUCCESS) {
        context_death(&d->doomed, d->process, d->device, &d->context);
        return result;
    }
    (void)doomed_end(&d->doomed, d->process, d->device, false);
    (void)vgpu_ledger_put(d->process->ledger, &d->context);
    operation_end(d->device);
    return result;
}

#define DESTROY_BODY(symbol, ctx)             \
    NEED_CUDA(symbol);                        \
    struct process *process = enter();        \
    struct destruction d;                     \
    if (!process || process->mode != MODE_ON) \
        return real.symbol(ctx);              \
    destruction_begin(&d, process, ctx);      \
    return destruction_end(&d, CALL_REAL(symbol, ctx))

CUresult cuCtxDestroy(CUcontext ctx) {
    DESTROY_BODY(cuCtxDestroy, ctx);
}

CUresult cuCtxDestroy_v2(CUcontext ctx) {
    DESTROY_BODY(cuCtxDestroy_v2, ctx);
}

CUresult cuCtxAttach(CUcontext *pctx, unsigned int flags) {
    NEED_CUDA(cuCtxAttach);
    struct process *process = enter();
    struct vgpu_entry entry;
    if (!process || process->mode != MODE_ON)
        return real.cuCtxAttach(pctx, flags);
    CUresult result = CALL_REAL(cuCtxAttach, pctx, flags);
    if (result == CUDA_SUCCESS)
        (void)vgpu_ledger_add(process->ledger, ENTRY_CONTEXT, key_of(*pctx), 1, 0, &entry);
    return result;
}

/* The last detach destroys. */
CUresult cuCtxDetach(CUcontext ctx) {
    NEED_CUDA(cuCtxDetach);
    struct process *process = enter();
    struct vgpu_entry entry = {.aux = 0};
    struct destruction d;
    if (!process || process->mode != MODE_ON)
        return real.cuCtxDetach(ctx);
    if (vgpu_ledger_get(process->ledger, ENTRY_CONTEXT, key_of(ctx), &entry) || entry.aux <= 1) {
        destruction_begin(&d, process, ctx);
        return destruction_end(&d, CALL_REAL(cuCtxDetach, ctx));
    }
    (void)vgpu_ledger_add(process->ledger, ENTRY_CONTEXT, entry.key, -1, 0, &entry);
    CUresult result = CALL_REAL(cuCtxDetach, ctx);
    if (result != CUDA_SUCCESS)
        (void)vgpu_ledger_add(process->ledger, ENTRY_CONTEXT, entry.key, 1, 0, &entry);
    return result;
}
