#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "freed.h"
#include "neighbours.h"

/* What the driver takes without saying how much: contexts, images, stacks, local memory. An estimate is
 * charged before the call; after it NVML's figure for this process, less what the ledger tracks,
 * is the truth. */

#define PROCESSES_MAX 4096
/* At most so often is what is charged for others looked at again before a refusal. */
#define GHOST_EVERY_NS UINT64_C(50000000)
/* Measured: 3.9 MiB a multiprocessor on an H200, 2.6 on a T4. */
#define CONTEXT_PER_MULTIPROCESSOR (4 * MIB)

struct listed {
    nvmlProcessInfo_t *rows;
    unsigned int count;
    uint64_t *granted; /* by slot, just before the list was made */
    /* Words of the region then: what others found since must not be undone. */
    uint64_t ghost, estimated;
    uint32_t stirred;
};

#define ROWS_BYTES (PROCESSES_MAX * sizeof(nvmlProcessInfo_t))
#define LISTED_BYTES (ROWS_BYTES + VGPU_MAX_SLOTS * sizeof(uint64_t))

static bool nvml_start(void) {
    /* The process id, negative where it does not work: a child inherits the word but not the
     * library's state. */
    static int known;
    int self = (int)getpid(), seen = __atomic_load_n(&known, __ATOMIC_ACQUIRE);
    if (seen == self || seen == -self)
        return seen == self;
    bool works = false;
    if (driver_find(LIBRARY_NVML, true) == 0 && real.nvmlInit_v2)
        works = CALL_REAL(nvmlInit_v2) == NVML_SUCCESS;
    __atomic_store_n(&known, works ? self : -self, __ATOMIC_RELEASE);
    return works;
}

static int nvml_device(struct process *process, struct device *device, nvmlDevice_t *handle) {
    if (!nvml_start() || !real.nvmlDeviceGetHandleByUUID)
        return -ENODATA;
    *handle = __atomic_load_n(&device->nvml, __ATOMIC_ACQUIRE);
    if (*handle)
        return 0;
    const char *uuid = vgpu_core_region(process->core)->uuids[device->index];
    if (CALL_REAL(nvmlDeviceGetHandleByUUID, uuid, handle) != NVML_SUCCESS)
        return -ENODATA;
    __atomic_store_n(&device->nvml, *handle, __ATOMIC_RELEASE);
    return 0;
}

static bool read_rows(nvmlDevice_t handle, struct listed *list) {
    list->count = PROCESSES_MAX;
    if (real.nvmlDeviceGetComputeRunningProcesses_v3)
        return CALL_REAL(nvmlDeviceGetComputeRunningProcesses_v3, handle, &list->count,
                         list->rows) == NVML_SUCCESS;
    return real.nvmlDeviceGetComputeRunningProcesses_v2 &&
           CALL_REAL(nvmlDeviceGetComputeRunningProcesses_v2, handle, &list->count, list->rows) ==
               NVML_SUCCESS;
}

static bool has_row(const struct listed *list, unsigned int pid) {
    for (unsigned int i = 0; i < list->count && i < PROCESSES_MAX; i++)
        if (list->rows[i].pid == pid)
            return true;
    return false;
}

/* Older drivers list ids of the host: they mean nobody in a PID namespace of its own, where ours means
 * somebody else. One that only ended just now is not in a second list. */
static void check_ids(struct process *process, const struct device *device, struct listed *list) {
    unsigned int stranger = 0;
    if (process->known_ids || !list->count)
        return;
    if (neighbours_hidden())
        for (unsigned int i = 0; !stranger && i < list->count && i < PROCESSES_MAX; i++)
            if (neighbour_is_stranger((long)list->rows[i].pid))
                stranger = list->rows[i].pid;
    if (stranger && read_rows(device->nvml, list) && has_row(list, stranger))
        process->foreign_ids = true;
    process->known_ids = __atomic_load_n(&device->contexts, __ATOMIC_ACQUIRE) &&
                         has_row(list, (unsigned int)getpid());
}

static void list_free(struct listed *list) {
    munmap(list->rows, LISTED_BYTES);
}

static int list_processes(struct process *process, struct device *device, struct listed *list) {
    nvmlDevice_t handle;
    if (process->foreign_ids || nvml_device(process, device, &handle))
        return -ENODATA;
    char *room =
        mmap(NULL, LISTED_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED)
        return -ENODATA;
    list->rows = (nvmlProcessInfo_t *)(void *)room;
    list->granted = (uint64_t *)(void *)(room + ROWS_BYTES);
    const struct vgpu_ext *ext = vgpu_core_ext(process->core);
    list->ghost = __atomic_load_n(&ext->ghost[device->index], __ATOMIC_SEQ_CST);
    list->estimated = __atomic_load_n(&ext->estimated, __ATOMIC_SEQ_CST);
    list->stirred = __atomic_load_n(&ext->stirred, __ATOMIC_SEQ_CST);
    for (uint32_t i = 0; i < slots_used(process); i++)
        list->granted[i] = vgpu_used_slot(process->core, (int)i, device->index);
    if (read_rows(handle, list)) {
        check_ids(process, device, list);
        if (!process->foreign_ids)
            return 0;
    }
    list_free(list);
    return -ENODATA;
}

/* What a process with a slot holds beyond its charge: memory whose maker is gone, or a context that is
 * larger than its estimate. */
static uint64_t excess(struct process *process, struct device *device, const struct listed *list,
                       int slot, uint64_t own) {
    uint64_t granted = vgpu_used_slot(process->core, slot, device->index);
    if (granted < list->granted[slot])
        granted = list->granted[slot];
    return own > granted ? own - granted : 0;
}

/* More is always told. Less only where nothing moved since the list was begun, and while others may count
 * our own context among the ghosts not at all. */
static void ghost_set(struct vgpu_ext *ext, const struct device *device, const struct listed *list,
                      uint64_t bytes) {
    uint64_t *word = &ext->ghost[device->index], seen = list->ghost;
    bool still = !__atomic_load_n(&device->estimated, __ATOMIC_ACQUIRE) &&
                 list->estimated == __atomic_load_n(&ext->estimated, __ATOMIC_SEQ_CST) &&
                 list->stirred == __atomic_load_n(&ext->stirred, __ATOMIC_SEQ_CST);
    if (bytes < seen && !still)
        return;
    while (!__atomic_compare_exchange_n(word, &seen, bytes, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST) &&
           seen < bytes)
        ;
}

/* Our own excess is no ghost: a settle charges it. */
static void count_ghosts(struct process *process, struct device *device,
                         const struct listed *list) {
    struct vgpu_ext *ext = vgpu_core_ext(process->core);
    bool beyond = (__atomic_load_n(&ext->flags, __ATOMIC_RELAXED) & VGPU_FLAG_SHARED) ||
                  __atomic_load_n(&ext->estimated, __ATOMIC_RELAXED);
    uint64_t bytes = 0;
    long self = getpid();
    for (unsigned int i = 0; i < list->count && i < PROCESSES_MAX; i++) {
        long pid = (long)list->rows[i].pid;
        uint64_t own = list->rows[i].usedGpuMemory;
        if (pid == self)
            continue;
        int slot = neighbour_slot(process, pid);
        if (slot >= 0)
            bytes += beyond ? excess(process, device, list, slot, own) : 0;
        else if (neighbour_is_ours(process, pid))
            bytes += own;
    }
    ghost_set(ext, device, list, bytes);
}

bool settle_ghosts(struct process *process, struct device *device) {
    struct listed list;
    if (process->mode != MODE_ON || device->index < 0 || list_processes(process, device, &list))
        return false;
    count_ghosts(process, device, &list);
    list_free(&list);
    return true;
}

static uint64_t coarse_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

bool settle_ghosts_again(struct process *process, struct device *device) {
    uint64_t *ghost = &vgpu_core_ext(process->core)->ghost[device->index];
    uint64_t before = __atomic_load_n(ghost, __ATOMIC_RELAXED), now;
    if (LIKELY(before == 0))
        return false;
    now = coarse_now();
    if (now - __atomic_load_n(&device->counted_ns, __ATOMIC_RELAXED) < GHOST_EVERY_NS)
        return false;
    __atomic_store_n(&device->counted_ns, now, __ATOMIC_RELAXED);
    (void)settle_ghosts(process, device);
    return __atomic_load_n(ghost, __ATOMIC_RELAXED) < before;
}

/* ---- the figure --------------------------------------------------------------------------- */

/* NVML's bytes of this process. */
static int own_figure(struct process *process, struct device *device, struct listed *list,
                      uint64_t *own) {
    int result = -ENODATA;
    if (list_processes(process, device, list))
        return -ENODATA;
    for (unsigned int i = 0; i < list->count && i < PROCESSES_MAX; i++) {
        if (list->rows[i].pid != (unsigned int)getpid())
            continue;
        *own = list->rows[i].usedGpuMemory;
        result = 0;
    }
    if (result)
        list_free(list);
    return result;
}

static bool quiet(uint64_t operations) {
    return (uint32_t)operations == (uint32_t)(operations >> 32);
}

/* One reading in a moment when nothing of this process changes on the device; with its list. */
static int read_beyond_ledger(struct process *process, struct device *device, struct listed *list,
                              uint64_t *beyond) {
    uint64_t own = 0;
    for (int tries = 0; tries < 16; tries++, sched_yield()) {
        uint64_t operations = __atomic_load_n(&device->operations, __ATOMIC_ACQUIRE);
        if (!quiet(operations))
            continue;
        pools_refresh(process, device, false);
        uint64_t granted = vgpu_used_own(process->core, device->index);
        if (own_figure(process, device, list, &own))
            return -ENODATA;
        if (pools_refresh(process, device, false) ||
            __atomic_load_n(&device->operations, __ATOMIC_ACQUIRE) != operations) {
            list_free(list);
            continue;
        }
        /* What was freed in stream order may be gone already: rather too much than too little. */
        uint64_t beside = device->other + device->pending + freed_bytes(process, device) +
                          __atomic_load_n(&device->invisible, __ATOMIC_RELAXED);
        uint64_t tracked = granted > beside ? granted - beside : 0;
        *beyond = own > tracked ? own - tracked : 0;
        return 0;
    }
    return -EAGAIN;
}

static void set_state(struct process *process, enum vgpu_enforcement state) {
    uint32_t *word = &vgpu_core_ext(process->core)->state;
    if (__atomic_load_n(word, __ATOMIC_RELAXED) != (uint32_t)state)
        __atomic_store_n(word, (uint32_t)state, __ATOMIC_RELAXED);
}

/* What a lone first context was found to take is what later processes charge for theirs. */
static void context_found(struct process *process, struct device *device) {
    struct vgpu_ext *ext = vgpu_core_ext(process->core);
    uint64_t *word = &ext->context_bytes[device->index];
    if (!device->estimated)
        return;
    __atomic_store_n(&device->estimated, false, __ATOMIC_RELEASE);
    /* Memory that a process gave to this one and is gone would be taken for the context's. */
    bool shared = __atomic_load_n(&ext->flags, __ATOMIC_RELAXED) & VGPU_FLAG_SHARED &&
                  __atomic_load_n(word, __ATOMIC_RELAXED);
    if (!shared && __atomic_load_n(&device->births, __ATOMIC_ACQUIRE) == 1 && device->other &&
        __atomic_load_n(word, __ATOMIC_RELAXED) != device->other)
        __atomic_store_n(word, device->other, __ATOMIC_RELAXED);
}

static int settle_to(struct process *process, struct device *device, uint64_t beyond, bool force) {
    if (beyond < device->other) {
        give_back(process, device, device->other - beyond, VGPU_KIND_CONTEXT);
        device->other = beyond;
        return 0;
    }
    uint64_t growth = beyond - device->other;
    if (device->pending && growth >= device->pending) {
        /* What was charged ahead has come. */
        device->other += device->pending;
        growth -= device->pending;
        device->pending = 0;
    }
    if (growth == 0)
        return 0;
    if (force)
        charge_forced(process, device, growth, VGPU_KIND_CONTEXT);
    else if (charge(process, device, growth, VGPU_KIND_CONTEXT) != CUDA_SUCCESS)
        return -ENOMEM;
    device->other += growth;
    return 0;
}

/* The ghosts last: what others counted there for us is charged by then. */
static int settle_locked(struct process *process, struct device *device, bool force) {
    struct listed list;
    uint64_t beyond = 0;
    int result = read_beyond_ledger(process, device, &list, &beyond);
    if (result) {
        if (result == -ENODATA) {
            set_state(process, VGPU_STATE_UNSETTLED);
            __atomic_store_n(&device->estimated, false, __ATOMIC_RELEASE);
        }
        return result;
    }
    set_state(process, VGPU_STATE_ENFORCED);
    __atomic_store_n(&device->streams_guessed, 0, __ATOMIC_RELAXED);
    result = settle_to(process, device, beyond, force);
    if (result == 0) {
        context_found(process, device);
        count_ghosts(process, device, &list);
    }
    list_free(&list);
    return result;
}

static int settle_with(struct process *process, struct device *device, bool force, uint64_t *gone) {
    if (process->mode != MODE_ON || device->index < 0)
        return 0;
    lock_take(&process->settle_lock);
    uint64_t before = device->other;
    int result = settle_locked(process, device, force);
    *gone = before > device->other ? before - device->other : 0;
    lock_leave(&process->settle_lock);
    return result;
}

int settle(struct process *process, struct device *device, bool force) {
    uint64_t gone;
    return settle_with(process, device, force, &gone);
}

int settle_gone(struct process *process, struct device *device, uint64_t *gone) {
    return settle_with(process, device, true, gone);
}

/* ---- a context by estimate ------------------------------------------------------------------ */

static uint64_t context_by_table(const struct device *device) {
    return CONTEXT_PER_MULTIPROCESSOR * (device->multiprocessors ? device->multiprocessors : 32);
}

/* Room for a context of each process beside what is charged: a record may be as wrong as that. */
static bool is_ample(struct process *process, struct device *device) {
    uint64_t limit = process_limit(process, device);
    uint64_t margin = context_by_table(device) * slots_used(process);
    return !limit ||
           (margin <= limit && vgpu_used_roughly(process->core, device->index) <= limit - margin);
}

/* How large a context is depends on more than the card (measured: 274 MiB instead of 518 for a client of
 * MPS with half the multiprocessors), so a recorded size is no certainty. Told first, then looked: of this
 * process and one that charges meanwhile, one sees the other. */
bool settle_later(struct process *process, struct device *device) {
    struct vgpu_ext *ext = vgpu_core_ext(process->core);
    uint32_t unknown = VGPU_STATE_UNKNOWN;
    __atomic_store_n(&device->estimated, true, __ATOMIC_RELEASE);
    if (!__atomic_load_n(&ext->context_bytes[device->index], __ATOMIC_RELAXED))
        return false;
    __atomic_fetch_add(&ext->estimated, 1, __ATOMIC_SEQ_CST);
    if (!is_ample(process, device))
        return false;
    (void)__atomic_compare_exchange_n(&ext->state, &unknown, VGPU_STATE_ENFORCED, false,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return true;
}

/* Memory that changed hands since charging_begin looked may be of any size, a context only so large. */
bool settle_neighbours(struct process *process, struct device *device) {
    const struct vgpu_ext *ext = vgpu_core_ext(process->core);
    uint64_t now = __atomic_load_n(&ext->estimated, __ATOMIC_SEQ_CST);
    uint64_t limit = process_limit(process, device);
    bool stirred = (__atomic_load_n(&ext->flags, __ATOMIC_RELAXED) & VGPU_FLAG_SHARED) &&
                   __atomic_load_n(&ext->stirred, __ATOMIC_SEQ_CST) !=
                       __atomic_load_n(&device->stirred, __ATOMIC_RELAXED);
    if (!stirred &&
        (now == __atomic_load_n(&device->estimates, __ATOMIC_RELAXED) || is_ample(process, device)))
        return true;
    (void)vgpu_core_sweep(process->core, 0);
    if (settle_ghosts(process, device) || process->foreign_ids)
        __atomic_store_n(&device->estimates, now, __ATOMIC_RELAXED);
    return !limit || vgpu_used_roughly(process->core, device->index) <= limit;
}

/* The dead are looked for here, so that the charge that follows finds none: it could not settle. */
void settle_shared(struct process *process, struct device *device) {
    if (device->index < 0)
        return;
    (void)vgpu_core_sweep(process->core, 0);
    uint32_t now = __atomic_load_n(&vgpu_core_ext(process->core)->stirred, __ATOMIC_ACQUIRE);
    if (LIKELY(now == __atomic_load_n(&device->stirred, __ATOMIC_RELAXED)))
        return;
    uint64_t before = device->other;
    int result = settle(process, device, true);
    if (device->other > before)
        __atomic_fetch_or(&process->shares, SHARE_ADOPTED, __ATOMIC_RELAXED);
    if (result == -ENODATA)
        (void)settle_ghosts(process, device);
    if (result != -EAGAIN)
        __atomic_store_n(&device->stirred, now, __ATOMIC_RELAXED);
}

/* ---- estimates ------------------------------------------------------------------------------ */

CUresult estimate_charge(struct process *process, struct device *device, uint64_t bytes) {
    CUresult result = charge(process, device, bytes, VGPU_KIND_CONTEXT);
    if (result == CUDA_SUCCESS) {
        lock_take(&process->settle_lock);
        device->other += bytes;
        lock_leave(&process->settle_lock);
    }
    return result;
}

void estimate_give_back(struct process *process, struct device *device, uint64_t bytes) {
    lock_take(&process->settle_lock);
    uint64_t part = bytes < device->other ? bytes : device->other;
    device->other -= part;
    give_back(process, device, part, VGPU_KIND_CONTEXT);
    lock_leave(&process->settle_lock);
}

/* How long a call that is about to be refused waits for a moment to settle in. */
#define PATIENCE 20
#define PATIENCE_US 250

CUresult taking_begin(struct taking *t, struct process *process, struct device *device,
                      uint64_t bytes) {
    *t = (struct taking){process, device, bytes};
    if (process->mode != MODE_ON)
        return CUDA_ERROR_OUT_OF_MEMORY;
    charging_begin(process, device);
    if (bytes == 0 || estimate_charge(process, device, bytes) == CUDA_SUCCESS)
        return CUDA_SUCCESS;
    operation_end(device);
    /* Earlier estimates may have been too high. */
    for (int tries = 0; settle(process, device, true) == -EAGAIN && tries < PATIENCE; tries++)
        usleep(PATIENCE_US);
    operation_begin(device);
    if (estimate_charge(process, device, bytes) == CUDA_SUCCESS)
        return CUDA_SUCCESS;
    operation_end(device);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

void taking_keep(struct taking *t, CUresult result) {
    operation_end(t->device);
    if (result != CUDA_SUCCESS && t->bytes)
        estimate_give_back(t->process, t->device, t->bytes);
}

CUresult taking_end(struct taking *t, CUresult result, bool force) {
    taking_keep(t, result);
    if (result != CUDA_SUCCESS)
        return result;
    int settled = settle(t->process, t->device, force);
    if (settled == -EAGAIN)
        launch_watch(LAUNCH_UNSETTLED);
    if (settled != -ENOMEM)
        return CUDA_SUCCESS;
    operation_begin(t->device);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

void taking_undone(struct taking *t) {
    operation_end(t->device);
    if (settle(t->process, t->device, true))
        estimate_give_back(t->process, t->device, t->bytes);
}

void estimate_forced(struct process *process, struct device *device, uint64_t bytes) {
    lock_take(&process->settle_lock);
    charge_forced(process, device, bytes, VGPU_KIND_CONTEXT);
    device->other += bytes;
    lock_leave(&process->settle_lock);
}

bool estimate_clear(struct process *process, struct device *device) {
    lock_take(&process->settle_lock);
    bool none = __atomic_load_n(&device->contexts, __ATOMIC_ACQUIRE) == 0;
    if (none) {
        give_back(process, device, device->other + device->pending, VGPU_KIND_CONTEXT);
        device->other = 0;
        device->pending = 0;
        __atomic_store_n(&device->estimated, false, __ATOMIC_RELEASE);
    }
    lock_leave(&process->settle_lock);
    return none;
}

void settle_less(struct process *process, struct device *device, uint64_t bytes) {
    int settled = settle(process, device, true);
    for (int tries = 0; settled == -EAGAIN && tries < PATIENCE; tries++) {
        usleep(PATIENCE_US);
        settled = settle(process, device, true);
    }
    if (settled)
        estimate_give_back(process, device, bytes);
    if (settled == -EAGAIN)
        launch_watch(LAUNCH_UNSETTLED);
}

uint64_t estimate_context(struct process *process, struct device *device) {
    uint64_t known = 0;
    if (process->mode == MODE_ON && device->index >= 0)
        known = __atomic_load_n(&vgpu_core_ext(process->core)->context_bytes[device->index],
                                __ATOMIC_RELAXED);
    if (known && known < device->total)
        return known;
    return context_by_table(device);
}

/* ---- order of devices ----------------------------------------------------------------------- */

void settle_device_order(struct process *process) {
    unsigned int count = 0;
    if (!nvml_start() || !real.nvmlDeviceGetCount_v2 || !real.nvmlDeviceGetHandleByIndex_v2 ||
        !real.nvmlDeviceGetUUID || CALL_REAL(nvmlDeviceGetCount_v2, &count) != NVML_SUCCESS)
        return;
    if (count > VGPU_MAX_DEVICES) /* not all have a place: it goes to those that are visible */
        return;
    for (unsigned int i = 0; i < count; i++) {
        nvmlDevice_t handle;
        char uuid[VGPU_UUID_LEN] = "";
        if (CALL_REAL(nvmlDeviceGetHandleByIndex_v2, i, &handle) == NVML_SUCCESS &&
            CALL_REAL(nvmlDeviceGetUUID, handle, uuid, sizeof uuid) == NVML_SUCCESS)
            (void)vgpu_core_device(process->core, uuid, 1);
    }
}
