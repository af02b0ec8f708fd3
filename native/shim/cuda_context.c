#include <errno.h>

#include "contexts.h"
#include "launch.h"

/* Making and ending contexts, primary, created and green. The primary context is the driver's own
 * count; ours only tells when a sweep is due, and the driver's state decides. */

static uint64_t key_of(const void *handle) {
    return (uint64_t)(uintptr_t)handle;
}

/* Measured: what a green context adds to its primary. */
#define GREEN_FIRST (6 * MIB)
#define GREEN_NEXT (4 * MIB)

/* The driver is going to say so itself: not initialised, no such device. */
static bool is_hopeless(CUdevice dev) {
    int value;
    if (!real.cuDeviceGetAttribute)
        return false;
    CUresult result =
        CALL_REAL(cuDeviceGetAttribute, &value, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, dev);
    return result == CUDA_ERROR_NOT_INITIALIZED || result == CUDA_ERROR_DEINITIALIZED ||
           result == CUDA_ERROR_NO_DEVICE || result == CUDA_ERROR_INVALID_DEVICE;
}

/* Under context_lock. */
static void meet(struct process *process, struct device *device) {
    if (!device->met)
        settle_foreign(process, device);
    device->met = true;
}

static bool is_measured(struct process *process, const struct device *device) {
    return device->index >= 0 &&
           __atomic_load_n(&vgpu_core_ext(process->core)->context_bytes[device->index],
                           __ATOMIC_RELAXED) != 0;
}

/* ---- one new context ------------------------------------------------------------------------ */

static CUresult birth_begin(struct taking *t, struct process *process, struct device *device,
                            uint64_t bytes) {
    __atomic_fetch_add(&device->births, 1, __ATOMIC_ACQ_REL);
    __atomic_fetch_add(&device->contexts, 1, __ATOMIC_ACQ_REL);
    CUresult result = taking_begin(t, process, device, bytes);
    /* Where nobody has measured one, the estimate is high: a small quota may hold one all the
     * same, and what turns out not to fit is undone. */
    if (result != CUDA_SUCCESS && process->mode == MODE_ON && !is_measured(process, device))
        result = taking_begin(t, process, device, bytes / 2);
    if (result != CUDA_SUCCESS)
        __atomic_fetch_sub(&device->contexts, 1, __ATOMIC_ACQ_REL);
    return result;
}

static void birth_failed(struct device *device) {
    __atomic_fetch_sub(&device->contexts, 1, __ATOMIC_ACQ_REL);
}

/* The size of a lone first context is what later processes charge for theirs. Libraries that were
 * loaded before, eagerly, would be in it. */
static void record_size(struct process *process, struct device *device) {
    uint64_t cursor = 0;
    struct vgpu_entry entry;
    uint64_t *word = &vgpu_core_ext(process->core)->context_bytes[device->index];
    if (__atomic_load_n(&device->births, __ATOMIC_ACQUIRE) != 1 ||
        __atomic_load_n(&device->contexts, __ATOMIC_ACQUIRE) != 1 ||
        vgpu_ledger_next(process->ledger, ENTRY_LIBRARY, &cursor, &entry) == 0 ||
        settle(process, device, true))
        return;
    uint64_t other = __atomic_load_n(&device->other, __ATOMIC_ACQUIRE);
    if (__atomic_load_n(&device->births, __ATOMIC_ACQUIRE) == 1 && other &&
        __atomic_load_n(word, __ATOMIC_RELAXED) != other)
        __atomic_store_n(word, other, __ATOMIC_RELAXED);
}

static void enter_context(struct process *process, struct device *device, CUcontext context,
                          uint64_t bytes) {
    struct vgpu_entry stale, entry = {.key = key_of(context),
                                      .kind = ENTRY_CONTEXT,
                                      .device = device->ordinal,
                                      .bytes = bytes,
                                      .aux = 1,
                                      .aux2 = LOCAL_DEFAULT};
    uint64_t cursor = 0;
    (void)vgpu_ledger_take(process->ledger, ENTRY_CONTEXT, entry.key, &stale);
    (void)vgpu_ledger_put(process->ledger, &entry);
    local_review(process);
    /* Kernels that were looked up before load their libraries here anew. */
    if (vgpu_ledger_next(process->ledger, ENTRY_LIBRARY, &cursor, &stale) == 0)
        launch_watch_lazy();
}

/* ---- the end of one ------------------------------------------------------------------------- */

/* What the context itself is charged with by now: the estimate, or what was measured since. */
static uint64_t context_bytes(struct process *process, struct device *device, uint64_t estimate) {
    uint64_t measured = estimate_context(process, device);
    return is_measured(process, device) && measured < estimate ? measured : estimate;
}

/* Gives back all that is known to have been in a context that the driver ended. */
static void death(struct doomed *d, struct process *process, struct device *device,
                  const struct vgpu_entry *context) {
    struct vgpu_entry ahead = {.aux = 0};
    uint64_t estimates = context_bytes(process, device, context->bytes);
    estimates += doomed_end(d, process, device, true) + modules_forget(process, context->key);
    if (context->aux2 > LOCAL_DEFAULT)
        estimates += local_bytes(device, LOCAL_DEFAULT, context->aux2);
    (void)vgpu_ledger_take(process->ledger, ENTRY_AHEAD, context->key, &ahead);
    pending_give_back(process, device, ahead.aux);
    bool last = __atomic_fetch_sub(&device->contexts, 1, __ATOMIC_ACQ_REL) == 1;
    operation_end(device);
    local_review(process);
    if (last)
        streams_forget(process, device);
    if (last && estimate_clear(process, device))
        launch_watch(LAUNCH_UNSETTLED);
    else
        settle_less(process, device, estimates);
}

/* ---- primary -------------------------------------------------------------------------------- */

/* 1 active, 0 not, -1 the driver does not say. */
static int primary_active(CUdevice dev) {
    unsigned int flags;
    int active = 0;
    if (!real.cuDevicePrimaryCtxGetState ||
        CALL_REAL(cuDevicePrimaryCtxGetState, dev, &flags, &active) != CUDA_SUCCESS)
        return -1;
    return active != 0;
}

static int primary_entry(struct process *process, const struct device *device,
                         struct vgpu_entry *primary, struct vgpu_entry *context) {
    if (vgpu_ledger_get(process->ledger, ENTRY_PRIMARY, (uint64_t)device->ordinal, primary))
        return -ENOENT;
    return vgpu_ledger_get(process->ledger, ENTRY_CONTEXT, primary->aux2, context);
}

/* Counts a reference in or out, entering the primary context when it is new. */
static uint64_t primary_count(struct process *process, struct device *device, CUcontext context,
                              int step) {
    struct vgpu_entry entry;
    uint64_t key = (uint64_t)device->ordinal;
    if (vgpu_ledger_add(process->ledger, ENTRY_PRIMARY, key, step, 0, &entry) == 0) {
        if (context && entry.aux2 != key_of(context))
            (void)vgpu_ledger_add(process->ledger, ENTRY_PRIMARY, key, 0,
                                  (int64_t)(key_of(context) - entry.aux2), &entry);
        return entry.aux;
    }
    entry = (struct vgpu_entry){.key = key,
                                .kind = ENTRY_PRIMARY,
                                .device = device->ordinal,
                                .aux = (uint64_t)step,
                                .aux2 = key_of(context)};
    if (step > 0)
        (void)vgpu_ledger_put(process->ledger, &entry);
    return entry.aux;
}

static bool primary_known(struct process *process, const struct device *device) {
    struct vgpu_entry primary, context;
    return primary_entry(process, device, &primary, &context) == 0;
}

static CUresult retain_first(struct process *process, struct device *device, CUcontext *out) {
    struct taking t;
    CUcontext context = NULL;
    meet(process, device);
    CUresult result = birth_begin(&t, process, device, estimate_context(process, device));
    if (result != CUDA_SUCCESS)
        return result;
    CUresult granted = CALL_REAL(cuDevicePrimaryCtxRetain, &context, device->ordinal);
    result = taking_end(&t, granted, false);
    if (granted == CUDA_SUCCESS && result != CUDA_SUCCESS) {
        if (real.cuDevicePrimaryCtxRelease_v2)
            (void)CALL_REAL(cuDevicePrimaryCtxRelease_v2, device->ordinal);
        else if (real.cuDevicePrimaryCtxRelease)
            (void)CALL_REAL(cuDevicePrimaryCtxRelease, device->ordinal);
        taking_undone(&t);
    }
    if (result != CUDA_SUCCESS) {
        birth_failed(device);
        return result;
    }
    record_size(process, device);
    enter_context(process, device, context, t.bytes);
    (void)primary_count(process, device, context, 1);
    *out = context;
    return CUDA_SUCCESS;
}

/* It is active. Where we did not see it begin, it is charged now, as found. */
static CUresult retain_more(struct process *process, struct device *device, CUcontext *out) {
    CUcontext context = NULL;
    CUresult result = CALL_REAL(cuDevicePrimaryCtxRetain, &context, device->ordinal);
    if (result != CUDA_SUCCESS)
        return result;
    bool known = primary_known(process, device);
    (void)primary_count(process, device, context, 1);
    if (!known) {
        __atomic_fetch_add(&device->contexts, 1, __ATOMIC_ACQ_REL);
        enter_context(process, device, context, 0);
        (void)settle(process, device, true);
    }
    *out = context;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev) {
    NEED_CUDA(cuDevicePrimaryCtxRetain);
    struct process *process = enter();
    if (!process || !pctx || is_hopeless(dev))
        return real.cuDevicePrimaryCtxRetain(pctx, dev);
    struct device *device = process_device(process, dev);
    if (!device || process->mode != MODE_ON)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&device->context_lock);
    int active = primary_active(dev);
    if (active < 0)
        active = primary_known(process, device);
    CUresult result =
        active ? retain_more(process, device, pctx) : retain_first(process, device, pctx);
    pthread_mutex_unlock(&device->context_lock);
    return result;
}

/* Around a call that may end the primary context. `due`: by our count it does. */
struct ending {
    struct process *process;
    struct device *device;
    struct vgpu_entry context; /* key 0: not active, as far as we know */
    struct doomed doomed;
    bool swept;
};

static void ending_begin(struct ending *e, struct process *process, struct device *device,
                         int step) {
    struct vgpu_entry primary;
    *e = (struct ending){.process = process, .device = device};
    pthread_mutex_lock(&device->context_lock);
    operation_begin(device);
    if (primary_entry(process, device, &primary, &e->context)) {
        e->context.key = 0;
        return;
    }
    /* A reset ends it whatever the count. */
    e->swept = step == 0 || primary.aux <= 1;
    if (e->swept)
        doomed_begin(&e->doomed, process, device, e->context.key, true);
}

static CUresult ending_end(struct ending *e, CUresult result, int step) {
    struct vgpu_entry context;
    uint64_t left = 1;
    if (result == CUDA_SUCCESS && step)
        left = primary_count(e->process, e->device, NULL, step);
    int active = result == CUDA_SUCCESS ? primary_active(e->device->ordinal) : 1;
    if (active < 0)
        active = step && left > 0;
    if (!e->context.key || active) {
        if (e->swept)
            (void)doomed_end(&e->doomed, e->process, e->device, false);
        operation_end(e->device);
    } else {
        if (!e->swept)
            doomed_begin(&e->doomed, e->process, e->device, e->context.key, true);
        if (vgpu_ledger_take(e->process->ledger, ENTRY_CONTEXT, e->context.key, &context))
            context = e->context;
        death(&e->doomed, e->process, e->device, &context);
    }
    pthread_mutex_unlock(&e->device->context_lock);
    return result;
}

#define ENDING_BODY(symbol, dev, step)                            \
    NEED_CUDA(symbol);                                            \
    struct process *process = enter();                            \
    struct ending e;                                              \
    if (!process || process->mode != MODE_ON || is_hopeless(dev)) \
        return real.symbol(dev);                                  \
    struct device *device = process_device(process, dev);         \
    if (!device)                                                  \
        return real.symbol(dev);                                  \
    ending_begin(&e, process, device, step);                      \
    return ending_end(&e, CALL_REAL(symbol, dev), step)

CUresult cuDevicePrimaryCtxRelease(CUdevice dev) {
    ENDING_BODY(cuDevicePrimaryCtxRelease, dev, -1);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
    ENDING_BODY(cuDevicePrimaryCtxRelease_v2, dev, -1);
}

CUresult cuDevicePrimaryCtxReset(CUdevice dev) {
    ENDING_BODY(cuDevicePrimaryCtxReset, dev, 0);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev) {
    ENDING_BODY(cuDevicePrimaryCtxReset_v2, dev, 0);
}

/* ---- created -------------------------------------------------------------------------------- */

struct creation {
    struct taking taking;
    CUcontext context;
};

static CUresult creation_begin(struct creation *c, struct process *process, CUdevice dev) {
    struct device *device = process_device(process, dev);
    c->context = NULL;
    if (!device || process->mode != MODE_ON)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&device->context_lock);
    meet(process, device);
    pthread_mutex_unlock(&device->context_lock);
    return birth_begin(&c->taking, process, device, estimate_context(process, device));
}

static CUresult creation_end(struct creation *c, CUcontext *out, CUresult granted) {
    struct process *process = c->taking.process;
    struct device *device = c->taking.device;
    CUresult result = taking_end(&c->taking, granted, false);
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
    record_size(process, device);
    enter_context(process, device, c->context, c->taking.bytes);
    *out = c->context;
    return CUDA_SUCCESS;
}

#define CREATE_BODY(symbol, out, dev, ...)              \
    NEED_CUDA(symbol);                                  \
    struct process *process = enter();                  \
    struct creation c;                                  \
    if (!process || !(out) || is_hopeless(dev))         \
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
        death(&d->doomed, d->process, d->device, &d->context);
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

/* ---- green ---------------------------------------------------------------------------------- */

/* A green context retains the primary, which it may have to make. */
static void green_primary(struct process *process, struct device *device, uint64_t bytes) {
    CUcontext context = NULL;
    if (primary_known(process, device)) {
        (void)primary_count(process, device, NULL, 1);
        return;
    }
    if (!real.cuDevicePrimaryCtxRetain ||
        CALL_REAL(cuDevicePrimaryCtxRetain, &context, device->ordinal) != CUDA_SUCCESS)
        return;
    (void)CALL_REAL(cuDevicePrimaryCtxRelease_v2, device->ordinal);
    enter_context(process, device, context, bytes);
    (void)primary_count(process, device, context, 1);
}

static CUresult green_create(struct process *process, struct device *device, CUgreenCtx *out,
                             CUdevResourceDesc desc, unsigned int flags) {
    struct taking t;
    CUgreenCtx green = NULL;
    bool first = !primary_known(process, device);
    uint64_t bytes = first ? estimate_context(process, device) + GREEN_FIRST : GREEN_NEXT;
    meet(process, device);
    CUresult result =
        first ? birth_begin(&t, process, device, bytes) : taking_begin(&t, process, device, bytes);
    if (result != CUDA_SUCCESS)
        return result;
    CUresult granted = CALL_REAL(cuGreenCtxCreate, &green, desc, device->ordinal, flags);
    result = taking_end(&t, granted, false);
    if (granted == CUDA_SUCCESS && result != CUDA_SUCCESS) {
        (void)CALL_REAL(cuGreenCtxDestroy, green);
        taking_undone(&t);
    }
    if (result != CUDA_SUCCESS) {
        if (first)
            birth_failed(device);
        return result;
    }
    green_primary(process, device, first ? bytes : 0);
    struct vgpu_entry entry = {.key = key_of(green),
                               .kind = ENTRY_GREEN,
                               .device = device->ordinal,
                               .bytes = first ? 0 : bytes};
    (void)vgpu_ledger_put(process->ledger, &entry);
    *out = green;
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxCreate(CUgreenCtx *phCtx, CUdevResourceDesc desc, CUdevice dev,
                          unsigned int flags) {
    NEED_CUDA(cuGreenCtxCreate);
    struct process *process = enter();
    if (!process || !phCtx || is_hopeless(dev))
        return real.cuGreenCtxCreate(phCtx, desc, dev, flags);
    struct device *device = process_device(process, dev);
    if (!device || process->mode != MODE_ON)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&device->context_lock);
    CUresult result = green_create(process, device, phCtx, desc, flags);
    pthread_mutex_unlock(&device->context_lock);
    return result;
}

CUresult cuGreenCtxDestroy(CUgreenCtx hCtx) {
    NEED_CUDA(cuGreenCtxDestroy);
    struct process *process = enter();
    struct vgpu_entry green, context;
    struct ending e;
    if (!process || process->mode != MODE_ON ||
        vgpu_ledger_take(process->ledger, ENTRY_GREEN, key_of(hCtx), &green))
        return real.cuGreenCtxDestroy(hCtx);
    struct device *device = process_device(process, green.device);
    ending_begin(&e, process, device, -1);
    CUresult result = ending_end(&e, CALL_REAL(cuGreenCtxDestroy, hCtx), -1);
    if (result != CUDA_SUCCESS) {
        (void)vgpu_ledger_put(process->ledger, &green);
        return result;
    }
    if (green.aux)
        (void)vgpu_ledger_take(process->ledger, ENTRY_CONTEXT, green.aux, &context);
    if (primary_known(process, device))
        settle_less(process, device, green.bytes);
    return result;
}

CUresult cuCtxFromGreenCtx(CUcontext *pContext, CUgreenCtx hCtx) {
    NEED_CUDA(cuCtxFromGreenCtx);
    struct process *process = enter();
    struct vgpu_entry green;
    if (!process || process->mode != MODE_ON)
        return real.cuCtxFromGreenCtx(pContext, hCtx);
    CUresult result = CALL_REAL(cuCtxFromGreenCtx, pContext, hCtx);
    if (result != CUDA_SUCCESS ||
        vgpu_ledger_get(process->ledger, ENTRY_GREEN, key_of(hCtx), &green))
        return result;
    struct vgpu_entry entry = {
        .key = key_of(*pContext), .kind = ENTRY_CONTEXT, .device = green.device};
    if (vgpu_ledger_put(process->ledger, &entry) == 0)
        (void)vgpu_ledger_add(process->ledger, ENTRY_GREEN, green.key, (int64_t)entry.key, 0,
                              &green);
    return result;
}
