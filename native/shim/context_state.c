#define _GNU_SOURCE
#include <errno.h>
#include <sys/mman.h>

#include "contexts.h"
#include "freed.h"
#include "launch.h"
#include "vmm.h"

/* What belongs to a context: its limits, its streams, and what ends with it. */

/* ---- what ends with it ---------------------------------------------------------------------- */

#define FIRST_ROOM 65536

static bool doomed_add(struct doomed *d, const struct vgpu_entry *entry) {
    if ((d->count + 1) * sizeof *entry > d->room) {
        uint64_t room = d->room ? 2 * d->room : FIRST_ROOM;
        void *rows =
            d->room ? mremap(d->rows, d->room, room, MREMAP_MAYMOVE)
                    : mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (rows == MAP_FAILED)
            return false;
        d->rows = rows;
        d->room = room;
    }
    d->rows[d->count++] = *entry;
    return true;
}

static bool is_of(struct process *process, const struct vgpu_entry *entry,
                  const struct device *device, uint64_t context, bool primary) {
    struct vgpu_entry owner;
    if (entry->aux2 == context)
        return true;
    if (!primary || entry->device != device->ordinal)
        return false;
    bool known = !vgpu_ledger_get(process->ledger, ENTRY_CONTEXT, entry->aux2, &owner);
    return !known || owner.aux == 0;
}

static void doomed_take(struct doomed *d, struct process *process, struct device *device, int kind,
                        uint64_t context, bool primary) {
    uint64_t cursor = 0;
    struct vgpu_entry entry;
    while (vgpu_ledger_next(process->ledger, kind, &cursor, &entry) == 0) {
        if (!is_of(process, &entry, device, context, primary) ||
            vgpu_ledger_take(process->ledger, kind, entry.key, &entry))
            continue;
        /* The key may have become another context's between the two. */
        if (!is_of(process, &entry, device, context, primary) || !doomed_add(d, &entry))
            (void)vgpu_ledger_put(process->ledger, &entry);
    }
}

void doomed_begin(struct doomed *d, struct process *process, struct device *device,
                  uint64_t context, bool primary) {
    static const int kinds[] = {ENTRY_POINTER, ENTRY_BLOCK, ENTRY_FREED,
                                ENTRY_LATER,   ENTRY_ARRAY, ENTRY_MODULE};
    *d = (struct doomed){.count = 0};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        doomed_take(d, process, device, kinds[i], context, primary);
}

/* Bytes of data go back; those that were only estimated are returned. */
static uint64_t doomed_give_back(struct doomed *d, struct process *process, struct device *device) {
    uint64_t data = 0, managed = 0, estimates = 0;
    for (uint64_t i = 0; i < d->count; i++) {
        const struct vgpu_entry *entry = &d->rows[i];
        if (entry->kind == ENTRY_POINTER && !entry->aux)
            managed += entry->bytes;
        else if (entry->kind == ENTRY_POINTER || entry->kind == ENTRY_BLOCK)
            data += entry->bytes; /* the blocks at its edges are entries too */
        else if (entry->kind == ENTRY_LATER || entry->kind == ENTRY_FREED)
            data += entry->kind == ENTRY_FREED ? entry->bytes : 0;
        else if (entry->kind == ENTRY_MODULE)
            estimates += entry->bytes;
        else if (entry->bytes || entry->aux)
            data += entry->bytes, estimates += entry->aux;
        else
            vmm_array_gone(process, entry->key); /* its tiles lie in memory created apart */
    }
    if (managed)
        invisible_add(device, -(int64_t)managed);
    give_back(process, device, data + managed, VGPU_KIND_DATA);
    return estimates;
}

/* A block may have got pieces meanwhile. */
static void put_back(struct process *process, const struct vgpu_entry *entry) {
    struct vgpu_entry now;
    if (vgpu_ledger_put(process->ledger, entry) && entry->kind == ENTRY_BLOCK &&
        vgpu_ledger_add(process->ledger, ENTRY_BLOCK, entry->key, (int64_t)entry->aux, 0, &now) ==
            0)
        give_back(process, process_device(process, entry->device), entry->bytes, VGPU_KIND_DATA);
}

uint64_t doomed_end(struct doomed *d, struct process *process, struct device *device, bool dead) {
    uint64_t estimates = 0;
    if (dead)
        estimates = doomed_give_back(d, process, device);
    else
        for (uint64_t i = 0; i < d->count; i++)
            put_back(process, &d->rows[i]);
    if (d->room)
        munmap(d->rows, d->room);
    return estimates;
}

/* ---- limits --------------------------------------------------------------------------------- */

static uint64_t limit_now(CUlimit limit, uint64_t otherwise) {
    size_t value = 0;
    if (!real.cuCtxGetLimit || CALL_REAL(cuCtxGetLimit, &value, limit) != CUDA_SUCCESS)
        return otherwise;
    return value;
}

/* The frames of a context are as large as its stack limit or its greediest kernel says. */
static void frames_are(struct process *process, const struct vgpu_entry *context) {
    struct vgpu_entry entry;
    uint64_t now = limit_now(CU_LIMIT_STACK_SIZE, context->aux2);
    (void)vgpu_ledger_add(process->ledger, ENTRY_CONTEXT, context->key, 0,
                          (int64_t)(now - context->aux2), &entry);
    local_review(process);
}

static CUresult stack_lower(struct taking *t, size_t value, uint64_t change) {
    CUresult result = CALL_REAL(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, value);
    taking_keep(t, result);
    if (result == CUDA_SUCCESS)
        settle_less(t->process, t->device, change);
    return result;
}

static CUresult stack_raise(struct taking *t, size_t value, size_t old) {
    CUresult granted = CALL_REAL(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, value);
    CUresult result = taking_end(t, granted, false);
    if (granted == CUDA_SUCCESS && result != CUDA_SUCCESS) {
        (void)CALL_REAL(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, old);
        taking_undone(t);
    }
    return result;
}

static CUresult stack_limit(struct process *process, struct device *device, size_t value) {
    struct vgpu_entry context;
    struct taking t;
    if (local_context(process, device, context_current(), &context))
        return real.cuCtxSetLimit(CU_LIMIT_STACK_SIZE, value);
    uint64_t old = limit_now(CU_LIMIT_STACK_SIZE, context.aux2);
    uint64_t change = local_bytes(device, old, value);
    CUresult result = taking_begin(&t, process, device, value > old ? change : 0);
    if (result != CUDA_SUCCESS)
        return result;
    result = value > old ? stack_raise(&t, value, old) : stack_lower(&t, value, change);
    if (result == CUDA_SUCCESS)
        frames_are(process, &context);
    return result;
}

void pending_give_back(struct process *process, struct device *device, uint64_t bytes) {
    lock_take(&process->settle_lock);
    uint64_t part = bytes < device->pending ? bytes : device->pending;
    device->pending -= part;
    give_back(process, device, part, VGPU_KIND_CONTEXT);
    lock_leave(&process->settle_lock);
}

static CUresult pending_charge(struct process *process, struct device *device, uint64_t bytes) {
    CUresult result = charge(process, device, bytes, VGPU_KIND_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    lock_take(&process->settle_lock);
    device->pending += bytes;
    lock_leave(&process->settle_lock);
    return CUDA_SUCCESS;
}

static void ahead_add(struct process *process, struct device *device, int64_t bytes) {
    struct vgpu_entry entry = {
        .key = context_current(), .kind = ENTRY_AHEAD, .device = device->ordinal};
    (void)vgpu_ledger_put(process->ledger, &entry);
    (void)vgpu_ledger_add(process->ledger, ENTRY_AHEAD, entry.key, bytes, 0, &entry);
}

/* The heap comes with the first launch of a kernel that uses it, when nothing can be refused any
 * more: what is above the present size is charged now. */
static CUresult heap_limit(struct process *process, struct device *device, size_t value) {
    uint64_t old = limit_now(CU_LIMIT_MALLOC_HEAP_SIZE, value);
    uint64_t more = value > old ? value - old : 0;
    struct vgpu_entry ahead = {.aux = 0};
    charging_begin(process, device);
    CUresult result = more ? pending_charge(process, device, more) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS) {
        result = CALL_REAL(cuCtxSetLimit, CU_LIMIT_MALLOC_HEAP_SIZE, value);
        if (result != CUDA_SUCCESS && more)
            pending_give_back(process, device, more);
        else if (result == CUDA_SUCCESS && more)
            ahead_add(process, device, (int64_t)more);
    }
    if (result == CUDA_SUCCESS && value < old &&
        vgpu_ledger_get(process->ledger, ENTRY_AHEAD, context_current(), &ahead) == 0) {
        uint64_t less = old - value < ahead.aux ? old - value : ahead.aux;
        pending_give_back(process, device, less);
        ahead_add(process, device, -(int64_t)less);
    }
    operation_end(device);
    return result;
}

/* The printf FIFO is no device memory, and other limits take none. */
CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    NEED_CUDA(cuCtxSetLimit);
    struct process *process = enter();
    struct device *device;
    if (!process || (limit != CU_LIMIT_STACK_SIZE && limit != CU_LIMIT_MALLOC_HEAP_SIZE))
        return real.cuCtxSetLimit(limit, value);
    CUresult result = process_current(&device, process);
    if (result != CUDA_SUCCESS)
        return result;
    if (process->mode != MODE_ON)
        return CUDA_ERROR_OUT_OF_MEMORY;
    return limit == CU_LIMIT_STACK_SIZE ? stack_limit(process, device, value)
                                        : heap_limit(process, device, value);
}

/* ---- streams -------------------------------------------------------------------------------- */

/* Measured: 2 MiB about every fourth, 34 MiB for 64; kept for the next when one is destroyed. So
 * each may bring a block; where no settle corrects that, the mean must do. */
#define STREAM_MEAN (544 * UINT64_C(1024))
/* Charged so since a settle: then one is due. */
#define STREAM_SETTLE 8

static uint64_t stream_bytes(struct process *process) {
    bool unsettled = process->core && __atomic_load_n(&vgpu_core_ext(process->core)->state,
                                                      __ATOMIC_RELAXED) == VGPU_STATE_UNSETTLED;
    return unsettled ? STREAM_MEAN : GRANULE;
}

struct stream {
    struct taking taking;
    CUstream handle;
    bool more;  /* than there ever were at a time */
    bool apart; /* what destroyed ones left may lie in another context */
};

static CUresult stream_begin(struct stream *s, struct process *process, struct device *device) {
    uint32_t live = __atomic_add_fetch(&process->streams, 1, __ATOMIC_RELAXED);
    s->handle = NULL;
    s->more = live > __atomic_load_n(&device->streams, __ATOMIC_RELAXED);
    s->apart = !s->more && __atomic_load_n(&device->contexts, __ATOMIC_RELAXED) > 1;
    CUresult result =
        taking_begin(&s->taking, process, device, s->more || s->apart ? stream_bytes(process) : 0);
    if (result != CUDA_SUCCESS)
        __atomic_fetch_sub(&process->streams, 1, __ATOMIC_RELAXED);
    return result;
}

static CUresult stream_end(struct stream *s, CUstream *out, CUresult granted) {
    struct device *device = s->taking.device;
    CUresult result = granted;
    bool due = s->apart;
    if (s->more && granted == CUDA_SUCCESS) {
        __atomic_fetch_add(&device->streams, 1, __ATOMIC_RELAXED);
        due = __atomic_add_fetch(&device->streams_guessed, 1, __ATOMIC_RELAXED) >= STREAM_SETTLE;
    }
    if (due)
        result = taking_end(&s->taking, granted, false);
    else
        taking_keep(&s->taking, granted);
    if (s->more && !due)
        launch_watch(LAUNCH_UNSETTLED);
    if (granted == CUDA_SUCCESS && result != CUDA_SUCCESS) {
        if (real.cuStreamDestroy_v2)
            (void)CALL_REAL(cuStreamDestroy_v2, s->handle);
        taking_undone(&s->taking);
    }
    if (result != CUDA_SUCCESS)
        __atomic_fetch_sub(&s->taking.process->streams, 1, __ATOMIC_RELAXED);
    else
        *out = s->handle;
    return result;
}

#define STREAM_BODY(symbol, out, find, ...)         \
    NEED_CUDA(symbol);                              \
    struct process *process = enter();              \
    struct device *device;                          \
    struct stream s;                                \
    if (!process || !(out))                         \
        return real.symbol(out, __VA_ARGS__);       \
    CUresult result = find;                         \
    if (result == CUDA_SUCCESS)                     \
        result = stream_begin(&s, process, device); \
    if (result != CUDA_SUCCESS)                     \
        return result;                              \
    return stream_end(&s, out, CALL_REAL(symbol, &s.handle, __VA_ARGS__))

CUresult cuStreamCreate(CUstream *phStream, unsigned int Flags) {
    STREAM_BODY(cuStreamCreate, phStream, process_current(&device, process), Flags);
}

CUresult cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority) {
    STREAM_BODY(cuStreamCreateWithPriority, phStream, process_current(&device, process), flags,
                priority);
}

static CUresult green_device(struct device **device, struct process *process, CUgreenCtx green) {
    struct vgpu_entry entry;
    if (process->mode != MODE_ON ||
        vgpu_ledger_get(process->ledger, ENTRY_GREEN, key_of(green), &entry))
        return process_current(device, process);
    *device = process_device(process, entry.device);
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxStreamCreate(CUstream *phStream, CUgreenCtx greenCtx, unsigned int flags,
                                int priority) {
    STREAM_BODY(cuGreenCtxStreamCreate, phStream, green_device(&device, process, greenCtx),
                greenCtx, flags, priority);
}

static void stream_gone(struct process *process, uint32_t count) {
    uint32_t live = __atomic_load_n(&process->streams, __ATOMIC_RELAXED);
    while (live &&
           !__atomic_compare_exchange_n(&process->streams, &live, live > count ? live - count : 0,
                                        true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

void streams_forget(struct process *process, struct device *device, bool last) {
    uint32_t most = __atomic_exchange_n(&device->streams, 0, __ATOMIC_RELAXED);
    if (last)
        stream_gone(process, most);
}

#define STREAM_DESTROY_BODY(symbol, stream)      \
    NEED_CUDA(symbol);                           \
    struct process *process = enter();           \
    if (!process || process->mode != MODE_ON)    \
        return real.symbol(stream);              \
    freed_stream_ends(process, stream);          \
    CUresult result = CALL_REAL(symbol, stream); \
    if (result == CUDA_SUCCESS)                  \
        stream_gone(process, 1);                 \
    return result

CUresult cuStreamDestroy(CUstream hStream) {
    STREAM_DESTROY_BODY(cuStreamDestroy, hStream);
}

CUresult cuStreamDestroy_v2(CUstream hStream) {
    STREAM_DESTROY_BODY(cuStreamDestroy_v2, hStream);
}
