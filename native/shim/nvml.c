#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "neighbours.h"

/* What NVML shows of memory and of its users: the quota instead of the card, and this container's
 * processes alone. The driver is asked first, so its errors stay its own. These bodies only look: a
 * process that never computes gets no slot, and makes no region. */

#define NO_INSTANCE 0xFFFFFFFFu
/* Rows we ask the driver for; far above the processes of one machine. */
#define ROWS_MAX 4096

/* A quota as it applies to one NVML handle. */
struct view {
    struct process *process;
    int index;   /* in the region, or NVML's own where the region does not list the device */
    bool listed; /* the region knows the device: there may be charges */
    uint64_t limit;
};

static int slot_count(struct process *process) {
    return process->core ? (int)slots_used(process) : 0;
}

/* What an earlier run of the container recorded is no limit of ours; a slot's holder wiped it. */
static bool is_recorded_now(struct process *process) {
    int count = slot_count(process);
    if (process->ledger || vgpu_core_ext(process->core)->instance == process->instance)
        return true;
    for (int slot = 0; slot < count; slot++)
        if (vgpu_core_region(process->core)->procs[slot].pid &&
            vgpu_core_slot_live(process->core, slot))
            return true;
    return false;
}

static int find_listed(struct process *process, nvmlDevice_t device) {
    char uuid[VGPU_UUID_LEN] = "";
    if (!process->core || !real.nvmlDeviceGetUUID ||
        CALL_REAL(nvmlDeviceGetUUID, device, uuid, sizeof uuid) != NVML_SUCCESS)
        return -1;
    return vgpu_core_device(process->core, uuid, 0);
}

/* False when no limit is in force for the device: the driver's own figures are shown. */
static bool view_get(struct view *view, nvmlDevice_t device) {
    struct process *process = process_get(false);
    unsigned int number = VGPU_MAX_DEVICES;
    if (process->mode == MODE_OFF)
        return false;
    *view = (struct view){.process = process, .index = find_listed(process, device)};
    view->listed = view->index >= 0;
    if (!view->listed && real.nvmlDeviceGetIndex &&
        CALL_REAL(nvmlDeviceGetIndex, device, &number) == NVML_SUCCESS && number < VGPU_MAX_DEVICES)
        view->index = (int)number;
    if (view->index < 0)
        return false;
    view->limit = process->limit[view->index];
    uint64_t found = view->listed ? vgpu_core_limit(process->core, view->index) : 0;
    if (found && is_recorded_now(process) && (!view->limit || found < view->limit))
        view->limit = found;
    return view->limit != 0;
}

/* ---- this container's processes ------------------------------------------------------------- */

static uint64_t own_namespace(void) {
    struct stat found;
    return stat("/proc/self/ns/pid", &found) ? 0 : (uint64_t)found.st_ino;
}

/* The slot's process id where it means a process of our own PID namespace, else 0. */
static unsigned int slot_pid(struct process *process, int slot, uint64_t space) {
    uint64_t theirs = vgpu_core_ext(process->core)->info[slot].pid_ns;
    int32_t pid =
        __atomic_load_n(&vgpu_core_region(process->core)->procs[slot].pid, __ATOMIC_RELAXED);
    return pid > 0 && (!theirs || !space || theirs == space) ? (unsigned int)pid : 0;
}

static bool is_own(struct process *process, unsigned int pid, uint64_t space) {
    int count = slot_count(process);
    for (int slot = 0; slot < count; slot++)
        if (slot_pid(process, slot, space) == pid)
            return pid != 0;
    return false;
}

/* Bytes of a live process. Who holds a slot has the dead swept away; a mere looker asks for
 * each. */
static uint64_t slot_bytes(const struct view *view, int slot) {
    vgpu_core *core = view->process->core;
    uint64_t bytes = vgpu_used_slot(core, slot, view->index);
    return bytes && (view->process->ledger || vgpu_core_slot_live(core, slot)) ? bytes : 0;
}

static uint64_t used_of(const struct view *view) {
    struct process *process = view->process;
    if (!view->listed)
        return 0;
    for (int i = 0; process->mode == MODE_ON && process->ledger && i < MAX_ORDINALS; i++)
        if (__atomic_load_n(&process->devices[i].index, __ATOMIC_ACQUIRE) == view->index) {
            settle_asked(process, &process->devices[i]);
            pools_refresh(process, &process->devices[i], false);
        }
    uint64_t used = vgpu_used(process->core, view->index), dead = 0;
    if (process->ledger)
        return used;
    for (int slot = slot_count(process) - 1; slot >= 0; slot--)
        if (!slot_bytes(view, slot))
            dead += vgpu_used_slot(process->core, slot, view->index);
    return used > dead ? used - dead : 0;
}

/* ---- memory -------------------------------------------------------------------------------- */

/* total = the quota, free = what this container may still really take. Where others leave less
 * than that on the card, version 2 calls the difference reserved, so that its sum holds. */
static void limit_figures(const struct view *view, nvmlMemory_v2_t *m) {
    uint64_t used = used_of(view);
    if (view->limit < m->total)
        m->total = view->limit;
    uint64_t left = used < m->total ? m->total - used : 0;
    m->used = used;
    m->free = left < m->free ? left : m->free;
    m->reserved = left - m->free;
}

static void limit_memory(nvmlDevice_t device, nvmlMemory_t *memory) {
    struct view view;
    if (!memory || memory->total == 0 || !view_get(&view, device))
        return;
    nvmlMemory_v2_t m = {.total = memory->total, .free = memory->free};
    limit_figures(&view, &m);
    *memory = (nvmlMemory_t){.total = m.total, .free = m.free, .used = m.used};
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    NEED_NVML(nvmlDeviceGetMemoryInfo);
    if (inside)
        return real.nvmlDeviceGetMemoryInfo(device, memory);
    nvmlReturn_t result = CALL_REAL(nvmlDeviceGetMemoryInfo, device, memory);
    if (result == NVML_SUCCESS)
        limit_memory(device, memory);
    return result;
}

nvmlReturn_t nvmlDeviceGetConfComputeProtectedMemoryUsage(nvmlDevice_t device,
                                                          nvmlMemory_t *memory) {
    NEED_NVML(nvmlDeviceGetConfComputeProtectedMemoryUsage);
    if (inside)
        return real.nvmlDeviceGetConfComputeProtectedMemoryUsage(device, memory);
    nvmlReturn_t result = CALL_REAL(nvmlDeviceGetConfComputeProtectedMemoryUsage, device, memory);
    if (result == NVML_SUCCESS)
        limit_memory(device, memory);
    return result;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    NEED_NVML(nvmlDeviceGetMemoryInfo_v2);
    struct view view;
    if (inside)
        return real.nvmlDeviceGetMemoryInfo_v2(device, memory);
    nvmlReturn_t result = CALL_REAL(nvmlDeviceGetMemoryInfo_v2, device, memory);
    if (result == NVML_SUCCESS && memory && view_get(&view, device))
        limit_figures(&view, memory);
    return result;
}

/* ---- process lists ------------------------------------------------------------------------- */

/* Which of the driver's lists, in which of its two row layouts. */
struct query {
    nvmlReturn_t (*v1)(nvmlDevice_t, unsigned int *, nvmlProcessInfo_v1_t *);
    nvmlReturn_t (*v2)(nvmlDevice_t, unsigned int *, nvmlProcessInfo_t *);
    bool computing; /* the slots are the list; else the driver's list, ours alone */
};

/* Work space of one call, beside the program's stack and allocator. */
struct rows {
    unsigned int count;
    nvmlProcessDetail_v1_t row[ROWS_MAX];
    nvmlProcessDetail_v1_t listed[ROWS_MAX]; /* the driver's, in any layout */
};

static struct rows *rows_new(void) {
    struct rows *rows =
        mmap(NULL, sizeof *rows, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return rows == MAP_FAILED ? NULL : rows;
}

/* The driver's list into rows->row. */
static nvmlReturn_t ask(struct rows *rows, const struct query *query, nvmlDevice_t device) {
    nvmlProcessInfo_v1_t *v1 = (nvmlProcessInfo_v1_t *)(void *)rows->listed;
    nvmlProcessInfo_t *v2 = (nvmlProcessInfo_t *)(void *)rows->listed;
    rows->count = ROWS_MAX;
    inside++;
    nvmlReturn_t result =
        query->v1 ? query->v1(device, &rows->count, v1) : query->v2(device, &rows->count, v2);
    inside--;
    if (result != NVML_SUCCESS)
        return result;
    for (unsigned int i = 0; i < rows->count; i++) {
        if (query->v1)
            rows->row[i] = (nvmlProcessDetail_v1_t){v1[i].pid, v1[i].usedGpuMemory, NO_INSTANCE,
                                                    NO_INSTANCE, 0};
        else
            rows->row[i] = (nvmlProcessDetail_v1_t){
                v2[i].pid, v2[i].usedGpuMemory, v2[i].gpuInstanceId, v2[i].computeInstanceId, 0};
    }
    return result;
}

static void keep_own(struct rows *rows, struct process *process) {
    uint64_t space = own_namespace();
    unsigned int kept = 0;
    for (unsigned int i = 0; i < rows->count; i++)
        if (is_own(process, rows->row[i].pid, space))
            rows->row[kept++] = rows->row[i];
    rows->count = kept;
}

/* The slots with memory on the device; the driver's row of a process lends its instance ids. */
static void list_slots(struct rows *rows, const struct view *view) {
    unsigned int known = rows->count, count = 0;
    uint64_t space = own_namespace();
    int slots = view->listed ? slot_count(view->process) : 0;
    memcpy(rows->listed, rows->row, known * sizeof *rows->row);
    if (slots && view->process->ledger)
        vgpu_core_sweep(view->process->core, 1);
    for (int slot = 0; slot < slots; slot++) {
        unsigned int pid = slot_pid(view->process, slot, space);
        uint64_t bytes = pid ? slot_bytes(view, slot) : 0;
        if (!bytes)
            continue;
        nvmlProcessDetail_v1_t row = {pid, bytes, NO_INSTANCE, NO_INSTANCE, 0};
        for (unsigned int i = 0; i < known; i++)
            if (rows->listed[i].pid == pid)
                row = rows->listed[i];
        row.usedGpuMemory = bytes;
        rows->row[count++] = row;
    }
    rows->count = count;
}

/* The driver's protocol: the count goes in as room and comes out as need. */
static nvmlReturn_t answer(const struct rows *rows, const struct query *query, unsigned int *count,
                           void *infos) {
    nvmlProcessInfo_v1_t *v1 = infos;
    nvmlProcessInfo_t *v2 = infos;
    unsigned int room = *count;
    *count = rows->count;
    if (room < rows->count)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    if (rows->count && !infos)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned int i = 0; i < rows->count; i++) {
        const nvmlProcessDetail_v1_t *row = &rows->row[i];
        if (query->v1)
            v1[i] = (nvmlProcessInfo_v1_t){row->pid, row->usedGpuMemory};
        else
            v2[i] = (nvmlProcessInfo_t){row->pid, row->usedGpuMemory, row->gpuInstanceId,
                                        row->computeInstanceId};
    }
    return NVML_SUCCESS;
}

static nvmlReturn_t pass(const struct query *query, nvmlDevice_t device, unsigned int *count,
                         void *infos) {
    return query->v1 ? query->v1(device, count, infos) : query->v2(device, count, infos);
}

static nvmlReturn_t list(const struct query *query, nvmlDevice_t device, unsigned int *count,
                         void *infos) {
    struct view view;
    struct rows *rows;
    if (inside || !count || process_get(false)->mode == MODE_OFF || !(rows = rows_new()))
        return pass(query, device, count, infos);
    nvmlReturn_t result = ask(rows, query, device);
    if (result == NVML_SUCCESS && !view_get(&view, device)) {
        result = pass(query, device, count, infos);
    } else if (result == NVML_SUCCESS) {
        if (query->computing)
            list_slots(rows, &view);
        else
            keep_own(rows, view.process);
        result = answer(rows, query, count, infos);
    }
    munmap(rows, sizeof *rows);
    return result;
}

#define LIST(symbol, version, row_type, is_computing)                                    \
    nvmlReturn_t symbol(nvmlDevice_t device, unsigned int *infoCount, row_type *infos) { \
        NEED_NVML(symbol);                                                               \
        struct query query = {.version = real.symbol, .computing = is_computing};        \
        return list(&query, device, infoCount, infos);                                   \
    }
LIST(nvmlDeviceGetComputeRunningProcesses, v1, nvmlProcessInfo_v1_t, true)
LIST(nvmlDeviceGetComputeRunningProcesses_v2, v2, nvmlProcessInfo_v2_t, true)
LIST(nvmlDeviceGetComputeRunningProcesses_v3, v2, nvmlProcessInfo_t, true)
LIST(nvmlDeviceGetGraphicsRunningProcesses, v1, nvmlProcessInfo_v1_t, false)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, v2, nvmlProcessInfo_v2_t, false)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, v2, nvmlProcessInfo_t, false)
LIST(nvmlDeviceGetMPSComputeRunningProcesses, v1, nvmlProcessInfo_v1_t, false)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, v2, nvmlProcessInfo_v2_t, false)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, v2, nvmlProcessInfo_t, false)

static nvmlReturn_t detail_list(struct rows *rows, nvmlDevice_t device,
                                nvmlProcessDetailList_t *plist) {
    struct view view;
    nvmlProcessDetailList_t all = *plist;
    all.numProcArrayEntries = ROWS_MAX;
    all.procArray = rows->row;
    nvmlReturn_t result = CALL_REAL(nvmlDeviceGetRunningProcessDetailList, device, &all);
    if (result != NVML_SUCCESS)
        return result;
    if (!view_get(&view, device))
        return real.nvmlDeviceGetRunningProcessDetailList(device, plist);
    rows->count = all.numProcArrayEntries < ROWS_MAX ? all.numProcArrayEntries : ROWS_MAX;
    if (plist->mode == 0)
        list_slots(rows, &view);
    else
        keep_own(rows, view.process);
    unsigned int room = plist->numProcArrayEntries;
    plist->numProcArrayEntries = rows->count;
    if (rows->count > room || (rows->count && !plist->procArray))
        return NVML_ERROR_INSUFFICIENT_SIZE;
    if (rows->count)
        memcpy(plist->procArray, rows->row, rows->count * sizeof *rows->row);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device,
                                                   nvmlProcessDetailList_t *plist) {
    NEED_NVML(nvmlDeviceGetRunningProcessDetailList);
    struct rows *rows;
    if (inside || !plist || process_get(false)->mode == MODE_OFF || !(rows = rows_new()))
        return real.nvmlDeviceGetRunningProcessDetailList(device, plist);
    nvmlReturn_t result = detail_list(rows, device, plist);
    munmap(rows, sizeof *rows);
    return result;
}

/* ---- utilisation by process ---------------------------------------------------------------- */

/* Moves the samples of our processes to the front; how many they are. */
#define KEEP_OWN_SAMPLES(view, samples, count)                     \
    __extension__({                                                \
        uint64_t space_ = own_namespace();                         \
        unsigned int kept_ = 0;                                    \
        for (unsigned int i_ = 0; i_ < (count); i_++)              \
            if (is_own((view).process, (samples)[i_].pid, space_)) \
                (samples)[kept_++] = (samples)[i_];                \
        kept_;                                                     \
    })

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device,
                                             nvmlProcessUtilizationSample_t *utilization,
                                             unsigned int *processSamplesCount,
                                             unsigned long long lastSeenTimeStamp) {
    NEED_NVML(nvmlDeviceGetProcessUtilization);
    struct view view;
    if (inside)
        return real.nvmlDeviceGetProcessUtilization(device, utilization, processSamplesCount,
                                                    lastSeenTimeStamp);
    nvmlReturn_t result = CALL_REAL(nvmlDeviceGetProcessUtilization, device, utilization,
                                    processSamplesCount, lastSeenTimeStamp);
    if (result != NVML_SUCCESS || !utilization || !processSamplesCount || !view_get(&view, device))
        return result;
    *processSamplesCount = KEEP_OWN_SAMPLES(view, utilization, *processSamplesCount);
    return *processSamplesCount ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t
nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device,
                                      nvmlProcessesUtilizationInfo_t *procesesUtilInfo) {
    NEED_NVML(nvmlDeviceGetProcessesUtilizationInfo);
    struct view view;
    nvmlProcessesUtilizationInfo_t *info = procesesUtilInfo;
    if (inside)
        return real.nvmlDeviceGetProcessesUtilizationInfo(device, info);
    nvmlReturn_t result = CALL_REAL(nvmlDeviceGetProcessesUtilizationInfo, device, info);
    if (result != NVML_SUCCESS || !info || !info->procUtilArray || !view_get(&view, device))
        return result;
    info->processSamplesCount =
        KEEP_OWN_SAMPLES(view, info->procUtilArray, info->processSamplesCount);
    return info->processSamplesCount ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}
