#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "authority.h"

/* The pointer to the record lies in a page that the kernel empties in a child (MADV_WIPEONFORK), so a
 * child, however made, finds nothing and starts anew; no fork handler, no lock that could be
 * held at the fork. Kernels before 4.14 compare the process id instead. */
struct anchor {
    struct process *process;
    int32_t starting;
    int32_t pid; /* of the maker, where the page cannot be wiped; else 0 */
};

static struct anchor *anchor_page;

static struct anchor *anchor_get(void) {
    struct anchor *anchor = __atomic_load_n(&anchor_page, __ATOMIC_ACQUIRE);
    if (LIKELY(anchor))
        return anchor;
    size_t size = (size_t)sysconf(_SC_PAGESIZE);
    anchor = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (anchor == MAP_FAILED)
        return NULL;
    if (madvise(anchor, size, MADV_WIPEONFORK))
        anchor->pid = (int32_t)getpid();
    struct anchor *none = NULL;
    if (!__atomic_compare_exchange_n(&anchor_page, &none, anchor, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE)) {
        munmap(anchor, size);
        anchor = none;
    }
    return anchor;
}

void log_line(enum log_level level, const char *format, ...) {
    const char *value = getenv("LIBCUDA_LOG_LEVEL");
    int allowed = value && *value >= '0' && *value <= '9' ? atoi(value) : LOG_WARNING;
    if ((int)level > allowed)
        return;
    char line[512];
    int length = snprintf(line, sizeof line, "isolator[%d]: ", (int)getpid());
    va_list list;
    va_start(list, format);
    vsnprintf(line + length, sizeof line - (size_t)length - 1, format, list);
    va_end(list);
    length = (int)strlen(line);
    line[length++] = '\n';
    /* Neither a reader that is gone (SIGPIPE) nor one that is slow may be felt by the program. */
    struct pollfd out = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&out, 1, 0) == 1 && out.revents == POLLOUT)
        (void)!write(STDERR_FILENO, line, (size_t)length);
}

/* ---- start ------------------------------------------------------------------------------ */

static const char *reason_of(int error) {
    switch (error) {
    case ENODATA:
        return "no memory limit is set where one is required";
    case EINVAL:
        return "the memory limit is malformed, zero or under 64 MiB";
    case ERANGE:
        return "the memory limit is too large";
    case EBADF:
        return "the region file is not one of ours; remove it";
    case EPROTO:
        return "the region file has another version and is in use; delete the pod, so that a new "
               "one is made";
    case EUSERS:
        return "the region has no free slot: 1,024 processes are live";
    case E2BIG:
        return "more than 16 devices are visible; set CUDA_VISIBLE_DEVICES";
    default:
        return "the region file cannot be used";
    }
}

void process_refuse(struct process *process, int error, const char *source) {
    process->mode = MODE_REFUSED;
    process->error = error;
    if (process->core) {
        struct vgpu_ext *ext = vgpu_core_ext(process->core);
        __atomic_store_n(&ext->state, VGPU_STATE_REFUSED, __ATOMIC_RELAXED);
        __atomic_store_n(&ext->refuse_reason, (uint32_t)error, __ATOMIC_RELAXED);
    }
    log_line(LOG_ERROR, "CUDA is refused: %s (%s: %s)", reason_of(error), source, strerror(error));
}

/* Opens the region where `a` says. 0, or -errno with the path that failed last in a->path. */
static int region_open(struct process *process, struct authority *a, bool claim) {
    int mode = claim ? VGPU_OPEN_CREATE : VGPU_OPEN_READ;
    if (!a->path[0])
        return -ENAMETOOLONG;
    int error = vgpu_core_open(&process->core, a->path, mode, a->instance);
    if (error && a->fallback[0] && (claim || error == -ENOENT)) {
        int second = vgpu_core_open(&process->core, a->fallback, mode, a->instance);
        if (!second)
            strcpy(a->path, a->fallback);
        error = second ? error : 0;
    }
    memcpy(process->path, a->path, sizeof process->path);
    process->other_path = a->fallback[0] && strcmp(a->path, a->fallback) != 0;
    return error;
}

static bool recorded_limit(const struct process *process) {
    const struct vgpu_hami_region *region = vgpu_core_region(process->core);
    if (vgpu_core_ext(process->core)->instance != process->instance)
        return false;
    for (int i = 0; i < VGPU_MAX_DEVICES; i++)
        if (region->limit[i])
            return true;
    return false;
}

static void report_sm_limit(struct process *process, const struct authority *a) {
    struct vgpu_hami_region *region = vgpu_core_region(process->core);
    for (int i = 0; i < VGPU_MAX_DEVICES; i++)
        if (a->sm[i])
            region->sm_limit[i] = a->sm[i];
    uint32_t before = __atomic_fetch_or(&vgpu_core_ext(process->core)->flags,
                                        VGPU_FLAG_SM_UNENFORCED, __ATOMIC_RELAXED);
    if (!(before & VGPU_FLAG_SM_UNENFORCED))
        log_line(LOG_WARNING, "CUDA_DEVICE_SM_LIMIT is recorded but not enforced");
}

static void attach(struct process *process, struct authority *a, bool claim) {
    bool limited = a->asked || a->required;
    int error = region_open(process, a, claim && limited);
    if (!limited) {
        /* Nobody asks for a quota, unless an earlier process of this container recorded one. */
        if (error || !recorded_limit(process)) {
            if (process->core)
                vgpu_core_close(process->core);
            process->core = NULL;
            process->mode = MODE_OFF;
            return;
        }
        vgpu_core_close(process->core);
        process->core = NULL;
        error = region_open(process, a, claim);
    }
    process->mode = MODE_ON;
    if (!error && claim)
        error = vgpu_core_claim(process->core);
    if (claim && a->error)
        process_refuse(process, a->error, a->source);
    else if (claim && error)
        process_refuse(process, -error, a->path);
    if (process->core && a->sm_limit)
        report_sm_limit(process, a);
}

static struct process *process_make(void) {
    struct process *process =
        mmap(NULL, sizeof *process, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (process == MAP_FAILED)
        return NULL;
    for (int i = 0; i < MAX_ORDINALS; i++) {
        process->devices[i].ordinal = i;
        process->devices[i].index = DEVICE_UNKNOWN;
    }
    return process;
}

/* Without memory for a record nothing can be charged, so nothing may be granted. */
static struct process no_memory = {.mode = MODE_REFUSED, .error = ENOMEM};

/* A record that only looked is replaced, not changed: other threads may be reading it. */
static struct process *process_start(bool claim) {
    struct authority authority;
    struct process *process = process_make();
    if (!process)
        return &no_memory;
    authority_read(&authority);
    process->instance = authority.instance;
    process->per_device = authority.per_device;
    process->required = authority.required;
    memcpy(process->limit, authority.limit, sizeof process->limit);
    if (claim && vgpu_ledger_new(&process->ledger))
        return &no_memory;
    attach(process, &authority, claim);
    return process;
}

static bool is_complete(const struct process *process, bool claim) {
    if (!process)
        return false;
    /* One that looked before there was a region looks again. */
    return process->mode != MODE_ON || (claim ? process->ledger != NULL : process->core != NULL);
}

/* A looker that found no region: is there one now? In place, for it may ask for days on end. */
static void look_again(struct process *process) {
    vgpu_core *core = NULL;
    const char *other = process->other_path ? FALLBACK_CACHE : "";
    if (vgpu_core_open(&core, process->path, VGPU_OPEN_READ, process->instance) &&
        vgpu_core_open(&core, other, VGPU_OPEN_READ, process->instance))
        return;
    __atomic_store_n(&process->core, core, __ATOMIC_RELEASE);
}

/* A want of descriptors or memory, or a stopped neighbour, may be over: the next cuInit looks again. */
static bool may_pass(int error) {
    return error == EMFILE || error == ENFILE || error == ENOMEM || error == EBUSY ||
           error == EINTR || error == EAGAIN || error == ENOSPC;
}

struct process *process_get_again(struct process *process) {
    struct anchor *anchor = anchor_get();
    if (!anchor || process->mode != MODE_REFUSED || !may_pass(process->error))
        return process;
    /* The old record stays where other threads may read it. */
    (void)__atomic_compare_exchange_n(&anchor->process, &process, NULL, false, __ATOMIC_ACQ_REL,
                                      __ATOMIC_ACQUIRE);
    return process_get(true);
}

struct process *process_get(bool claim) {
    struct anchor *anchor = anchor_get();
    if (!anchor)
        return &no_memory;
    if (UNLIKELY(anchor->pid) && anchor->pid != (int32_t)getpid())
        *anchor = (struct anchor){.pid = (int32_t)getpid()};
    struct process *process = __atomic_load_n(&anchor->process, __ATOMIC_ACQUIRE);
    if (LIKELY(is_complete(process, claim)))
        return process;
    while (__atomic_exchange_n(&anchor->starting, 1, __ATOMIC_ACQUIRE))
        sched_yield();
    process = __atomic_load_n(&anchor->process, __ATOMIC_ACQUIRE);
    if (!is_complete(process, claim)) {
        inside++;
        if (process && !claim)
            look_again(process);
        else
            process = process_start(claim);
        inside--;
        __atomic_store_n(&anchor->process, process, __ATOMIC_RELEASE);
    }
    __atomic_store_n(&anchor->starting, 0, __ATOMIC_RELEASE);
    return process;
}

/* ---- devices ----------------------------------------------------------------------------- */

static void format_uuid(char *text, size_t size, const char *prefix, const CUuuid *uuid) {
    const unsigned char *b = (const unsigned char *)uuid->bytes;
    snprintf(text, size, "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
             prefix, b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11],
             b[12], b[13], b[14], b[15]);
}

static CUresult read_uuid(CUuuid *uuid, bool *instance, CUdevice ordinal) {
    CUuuid card;
    CUresult result = CUDA_ERROR_NOT_FOUND;
    *instance = false;
    if (real.cuDeviceGetUuid_v2)
        result = CALL_REAL(cuDeviceGetUuid_v2, uuid, ordinal);
    else if (real.cuDeviceGetUuid)
        result = CALL_REAL(cuDeviceGetUuid, uuid, ordinal);
    /* Version 2 names a MIG instance, the first its card. */
    if (result == CUDA_SUCCESS && real.cuDeviceGetUuid_v2 && real.cuDeviceGetUuid &&
        CALL_REAL(cuDeviceGetUuid, &card, ordinal) == CUDA_SUCCESS)
        *instance = memcmp(&card, uuid, sizeof card) != 0;
    return result;
}

/* By the string NVML has for the device; else one of the reasons of struct device. */
static int region_index(struct process *process, CUdevice ordinal) {
    CUuuid uuid;
    bool instance;
    char text[VGPU_UUID_LEN];
    if (read_uuid(&uuid, &instance, ordinal) != CUDA_SUCCESS)
        return DEVICE_UNKNOWN;
    format_uuid(text, sizeof text, instance ? "MIG" : "GPU", &uuid);
    int index = vgpu_core_device(process->core, text, 1);
    if (index >= 0)
        return index;
    return index == -ENOSPC ? DEVICE_NO_PLACE : DEVICE_LATER;
}

/* Limits by device and HAMi's readers number devices as NVML does. With one device, and no
 * variable that hides others, there is only one order. */
static void device_order(struct process *process) {
    int count = 0;
    if (vgpu_core_region(process->core)->device_num)
        return;
    if (real.cuDeviceGetCount)
        (void)CALL_REAL(cuDeviceGetCount, &count);
    if (count > 1 || process->per_device || getenv("CUDA_VISIBLE_DEVICES"))
        settle_device_order(process);
}

/* The limits of all devices are recorded: a process without our environment may use another one. */
static void adopt_limit(struct process *process, int index, uint64_t total) {
    uint64_t own = process->limit[index];
    if (own && total && own > total)
        own = total;
    vgpu_core_set_limit(process->core, index, own);
    if (own)
        vgpu_core_record_limit(process->core, index, own);
    uint64_t held = vgpu_core_limit(process->core, index);
    if (held < own)
        log_line(LOG_WARNING,
                 "a limit of %llu MiB was asked for, but %llu MiB are recorded in %s and hold",
                 (unsigned long long)(own / MIB), (unsigned long long)(held / MIB), process->path);
    for (int i = 0; i < VGPU_MAX_DEVICES; i++)
        if (i != index && process->limit[i])
            vgpu_core_record_limit(process->core, i, process->limit[i]);
}

static void device_start(struct process *process, struct device *device) {
    size_t total = 0;
    int processors = 0, threads = 0;
    if (real.cuDeviceTotalMem_v2)
        (void)CALL_REAL(cuDeviceTotalMem_v2, &total, device->ordinal);
    if (real.cuDeviceGetAttribute) {
        (void)CALL_REAL(cuDeviceGetAttribute, &processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                        device->ordinal);
        (void)CALL_REAL(cuDeviceGetAttribute, &threads,
                        CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device->ordinal);
    }
    device->total = total;
    device->multiprocessors = processors > 0 ? (unsigned)processors : 0;
    device->local_slots = (uint64_t)device->multiprocessors * (threads > 0 ? (uint64_t)threads : 0);
    int index = DEVICE_NO_PLACE;
    if (process->core) {
        device_order(process);
        index = region_index(process, device->ordinal);
    }
    if (index == DEVICE_UNKNOWN)
        return;
    if (index >= 0)
        adopt_limit(process, index, total);
    if (index == DEVICE_NO_PLACE && process->mode == MODE_ON)
        log_line(LOG_ERROR,
                 "device %d has no place in the region (%d devices at most): memory on it "
                 "is refused",
                 device->ordinal, VGPU_MAX_DEVICES);
    __atomic_store_n(&device->index, index, __ATOMIC_RELEASE);
    if (index >= 0 && vgpu_core_is_creator(process->core))
        (void)settle_ghosts(process, device);
}

static bool is_open(const struct device *device) {
    int index = __atomic_load_n(&device->index, __ATOMIC_ACQUIRE);
    return index == DEVICE_UNKNOWN || index == DEVICE_LATER;
}

struct device *process_device(struct process *process, CUdevice ordinal) {
    if (ordinal < 0 || ordinal >= MAX_ORDINALS)
        return NULL;
    struct device *device = &process->devices[ordinal];
    if (UNLIKELY(is_open(device))) {
        lock_take(&process->device_lock);
        if (is_open(device))
            device_start(process, device);
        lock_leave(&process->device_lock);
        if (__atomic_load_n(&device->index, __ATOMIC_ACQUIRE) == DEVICE_UNKNOWN)
            return NULL;
    }
    return device;
}

CUresult process_current(struct device **device, struct process *process) {
    CUdevice ordinal = -1;
    CUresult result = CALL_REAL(cuCtxGetDevice, &ordinal);
    if (result != CUDA_SUCCESS)
        return result;
    *device = process_device(process, ordinal);
    if (!*device)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (UNLIKELY(__atomic_load_n(&(*device)->contexts, __ATOMIC_RELAXED) == 0))
        context_adopt(process, *device);
    return CUDA_SUCCESS;
}

uint64_t process_limit(struct process *process, struct device *device) {
    if (process->mode != MODE_ON || !process->core || device->index < 0)
        return 0;
    uint64_t limit = vgpu_core_limit(process->core, device->index);
    return limit && device->total && limit > device->total ? device->total : limit;
}
