#include <errno.h>

#include "contexts.h"
#include "launch.h"

/* Primary contexts, and the green ones that share theirs. The references are the driver's own
 * count; ours only tells when a sweep is due, and the driver's state decides. */

/* Measured: what a green context adds to its primary. */
#define GREEN_FIRST (6 * MIB)
#define GREEN_NEXT (4 * MIB)

/* ---- primary -------------------------------------------------------------------------------- */

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

/* Enters a context that is there already. */
static void adopt(struct process *process, struct device *device, CUcontext context) {
    uint64_t estimate = estimate_context(process, device);
    __atomic_fetch_add(&device->contexts, 1, __ATOMIC_ACQ_REL);
    __atomic_fetch_add(&device->births, 2, __ATOMIC_ACQ_REL); /* not measured alone */
    context_enter(process, device, context, estimate);
    if (settle(process, device, true))
        estimate_forced(process, device, estimate);
}

static void release_primary(CUdevice dev) {
    if (real.cuDevicePrimaryCtxRelease_v2)
        (void)CALL_REAL(cuDevicePrimaryCtxRelease_v2, dev);
    else if (real.cuDevicePrimaryCtxRelease)
        (void)CALL_REAL(cuDevicePrimaryCtxRelease, dev);
}

static void adopt_current(struct process *process, struct device *device) {
    struct vgpu_entry primary;
    CUcontext context = NULL;
    CUdevice dev = device->ordinal;
    uint64_t current = context_current();
    bool known = vgpu_ledger_get(process->ledger, ENTRY_PRIMARY, (uint64_t)dev, &primary) == 0;
    if (context_primary_active(dev) == 1 && real.cuDevicePrimaryCtxRetain &&
        CALL_REAL(cuDevicePrimaryCtxRetain, &context, dev) == CUDA_SUCCESS) {
        release_primary(dev);
        adopt(process, device, context);
        if (!known)
            (void)primary_count(process, device, context, 1);
    } else if (current && !(known && primary.aux2 == current)) {
        adopt(process, device, (CUcontext)(uintptr_t)current);
    }
}

void context_adopt(struct process *process, struct device *device) {
    if (process->mode != MODE_ON || device->index < 0)
        return;
    lock_take(&device->context_lock);
    if (__atomic_load_n(&device->contexts, __ATOMIC_ACQUIRE) == 0)
        adopt_current(process, device);
    lock_leave(&device->context_lock);
}

static CUresult retain_first(struct process *process, struct device *device, CUcontext *out) {
    struct taking t;
    CUcontext context = NULL;
    CUresult result = birth_begin(&t, process, device, estimate_context(process, device));
    if (result != CUDA_SUCCESS)
        return result;
    CUresult granted = CALL_REAL(cuDevicePrimaryCtxRetain, &context, device->ordinal);
    result = birth_end(&t, granted);
    if (granted == CUDA_SUCCESS && result != CUDA_SUCCESS) {
        release_primary(device->ordinal);
        taking_undone(&t);
    }
    if (result != CUDA_SUCCESS) {
        birth_failed(device);
        return result;
    }
    context_enter(process, device, context, t.bytes);
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
    if (!known)
        adopt(process, device, context);
    *out = context;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev) {
    NEED_CUDA(cuDevicePrimaryCtxRetain);
    struct process *process = enter();
    if (!process || !pctx || context_hopeless(dev))
        return real.cuDevicePrimaryCtxRetain(pctx, dev);
    struct device *device = process_device(process, dev);
    if (!device || process->mode != MODE_ON)
        return CUDA_ERROR_OUT_OF_MEMORY;
    lock_take(&device->context_lock);
    int active = context_primary_active(dev);
    if (active < 0)
        active = primary_known(process, device);
    CUresult result =
        active ? retain_more(process, device, pctx) : retain_first(process, device, pctx);
    lock_leave(&device->context_lock);
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
    lock_take(&device->context_lock);
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
    int active = result == CUDA_SUCCESS ? context_primary_active(e->device->ordinal) : 1;
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
        context_death(&e->doomed, e->process, e->device, &context);
    }
    lock_leave(&e->device->context_lock);
    return result;
}

#define ENDING_BODY(symbol, dev, step)                                 \
    NEED_CUDA(symbol);                                                 \
    struct process *process = enter();                                 \
    struct ending e;                                                   \
    if (!process || process->mode != MODE_ON || context_hopeless(dev)) \
        return real.symbol(dev);                                       \
    struct device *device = process_device(process, dev);              \
    if (!device)                                                       \
        return real.symbol(dev);                                       \
    ending_begin(&e, process, device, step);                           \
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
    release_primary(device->ordinal);
    context_enter(process, device, context, bytes);
    (void)primary_count(process, device, context, 1);
}

static CUresult green_create(struct process *process, struct device *device, CUgreenCtx *out,
                             CUdevResourceDesc desc, unsigned int flags) {
    struct taking t;
    CUgreenCtx green = NULL;
    bool first = !primary_known(process, device);
    uint64_t bytes = first ? estimate_context(process, device) + GREEN_FIRST : GREEN_NEXT;
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
    if (!process || !phCtx || context_hopeless(dev))
        return real.cuGreenCtxCreate(phCtx, desc, dev, flags);
    struct device *device = process_device(process, dev);
    if (!device || process->mode != MODE_ON)
        return CUDA_ERROR_OUT_OF_MEMORY;
    lock_take(&device->context_lock);
    CUresult result = green_create(process, device, phCtx, desc, flags);
    lock_leave(&device->context_lock);
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
