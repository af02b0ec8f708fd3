#include "contexts.h"
#include "launch.h"

/* One context's life, of whatever kind: charged before it is made, entered, given back when it is
 * gone. */

bool context_hopeless(CUdevice dev) {
    int value;
    if (!real.cuDeviceGetAttribute)
        return false;
    CUresult result =
        CALL_REAL(cuDeviceGetAttribute, &value, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, dev);
    return result == CUDA_ERROR_NOT_INITIALIZED || result == CUDA_ERROR_DEINITIALIZED ||
           result == CUDA_ERROR_NO_DEVICE || result == CUDA_ERROR_INVALID_DEVICE;
}

int context_primary_active(CUdevice dev) {
    unsigned int flags;
    int active = 0;
    if (!real.cuDevicePrimaryCtxGetState ||
        CALL_REAL(cuDevicePrimaryCtxGetState, dev, &flags, &active) != CUDA_SUCCESS)
        return -1;
    return active != 0;
}

static bool is_measured(struct process *process, const struct device *device) {
    return device->index >= 0 &&
           __atomic_load_n(&vgpu_core_ext(process->core)->context_bytes[device->index],
                           __ATOMIC_RELAXED) != 0;
}

CUresult birth_begin(struct taking *t, struct process *process, struct device *device,
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

/* Libraries that were loaded before, eagerly, come with the first context: what is in them is not for
 * later, nor for the record. */
CUresult birth_end(struct taking *t, CUresult result) {
    uint64_t cursor = 0;
    struct vgpu_entry entry;
    if (result == CUDA_SUCCESS && __atomic_load_n(&t->device->births, __ATOMIC_ACQUIRE) == 1 &&
        vgpu_ledger_next(t->process->ledger, ENTRY_LIBRARY, &cursor, &entry) &&
        settle_later(t->process, t->device)) {
        taking_keep(t, result);
        return result;
    }
    return taking_end(t, result, false);
}

void birth_failed(struct device *device) {
    if (__atomic_fetch_sub(&device->contexts, 1, __ATOMIC_ACQ_REL) == 1)
        __atomic_store_n(&device->estimated, false, __ATOMIC_RELEASE);
}

void context_enter(struct process *process, struct device *device, CUcontext context,
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

void context_death(struct doomed *d, struct process *process, struct device *device,
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
    streams_forget(process, device, last);
    if (last && estimate_clear(process, device))
        launch_watch(LAUNCH_UNSETTLED);
    else
        settle_less(process, device, estimates);
}
