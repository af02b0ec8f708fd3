#include "freed.h"

/* Memory of cuMemAlloc that was freed in stream order. The driver keeps it until that stream is
 * synchronised, and so does its charge; measured: neither idling, nor queries, nor other
 * allocations give it back. */

#define STREAMS_MAX 32

/* The bytes are in the ledger's ENTRY_FREED, where they end with their context. Under pool_lock. */
static struct freed {
    CUstream stream;
    uint64_t key; /* 0: free */
    uint64_t context;
    uint32_t holders; /* flushes in flight: the stream's end waits for them */
} table[STREAMS_MAX];
static struct process *owner;

/* Names a stream: a handle, a thread's own one, or a context's. */
static uint64_t row_key(CUstream stream, uint64_t context) {
    if (stream == STREAM_PER_THREAD)
        return (uint64_t)(uintptr_t)&inside;
    return (uintptr_t)stream < (uintptr_t)STREAM_PER_THREAD ? context : key_of(stream);
}

/* Under pool_lock; a parent process's table is not ours. */
static struct freed *find(struct process *process, uint64_t key) {
    if (owner != process) {
        for (int i = 0; i < STREAMS_MAX; i++)
            table[i] = (struct freed){.key = 0};
        owner = process;
    }
    for (int i = 0; i < STREAMS_MAX; i++)
        if (table[i].key == key)
            return &table[i];
    return NULL;
}

/* Adds to what a stream keeps; false without room. The null stream and a thread's own are those of the
 * context that is current, not of the memory's; but it is with its own context that memory ends. */
static bool add(struct process *process, const struct vgpu_entry *memory, CUstream stream,
                uint64_t bytes, uint64_t context) {
    uint64_t key = row_key(stream, context);
    struct vgpu_entry entry = {
        .key = key, .kind = ENTRY_FREED, .device = memory->device, .aux2 = memory->aux2};
    struct freed *row = find(process, key);
    if (!row)
        row = find(process, 0);
    if (!row)
        return false;
    if (vgpu_ledger_get(process->ledger, ENTRY_FREED, key, &entry) == 0 &&
        (entry.device != memory->device || entry.aux2 != memory->aux2))
        return false;
    (void)vgpu_ledger_take(process->ledger, ENTRY_FREED, key, &entry);
    entry.bytes += bytes;
    if (vgpu_ledger_put(process->ledger, &entry))
        return false;
    *row =
        (struct freed){.stream = stream, .key = key, .context = context, .holders = row->holders};
    return true;
}

void freed_add(struct process *process, const struct vgpu_entry *memory, CUstream stream,
               uint64_t bytes) {
    struct device *device = process_device(process, memory->device);
    if (bytes == 0)
        return;
    uint64_t context = context_current();
    lock_take(&process->pool_lock);
    bool added = add(process, memory, stream, bytes, context);
    lock_leave(&process->pool_lock);
    if (added)
        __atomic_fetch_or(&pools_watched, POOLS_DEFERRED, __ATOMIC_RELEASE);
    else
        pools_bury(process, device, bytes);
}

/* ---- what has come back ------------------------------------------------------------------------- */

bool stream_finish(CUstream stream) {
    if (!real.cuStreamQuery || !real.cuStreamSynchronize || stream_may_capture(stream))
        return false;
    CUstreamCaptureMode mode = capture_relax();
    bool done = CALL_REAL(cuStreamQuery, stream) == CUDA_SUCCESS &&
                CALL_REAL(cuStreamSynchronize, stream) == CUDA_SUCCESS;
    capture_restore(mode);
    return done;
}

/* A context's and a thread's own stream can be asked from there only. */
static bool is_done(const struct freed *row, bool all) {
    if (all && row->context == context_current())
        return true;
    if (row->stream == STREAM_PER_THREAD && row->key != row_key(row->stream, 0))
        return false;
    if ((uintptr_t)row->stream <= (uintptr_t)STREAM_PER_THREAD && row->context != context_current())
        return false;
    return stream_finish(row->stream);
}

static bool hold(struct process *process, int i, struct freed *row, struct vgpu_entry *entry) {
    struct vgpu_entry none = {.bytes = 0};
    lock_take(&process->pool_lock);
    bool known = owner == process && table[i].key;
    if (known && vgpu_ledger_get(process->ledger, ENTRY_FREED, table[i].key, &none)) {
        if (table[i].holders == 0)
            table[i].key = 0; /* it went with its context */
        known = false;
    }
    table[i].holders += known;
    *row = table[i];
    *entry = none;
    lock_leave(&process->pool_lock);
    return known;
}

/* `bytes` of the stream have come back: those that were freed before it was asked. */
static uint64_t leave(struct process *process, int i, uint64_t key, uint64_t bytes) {
    struct vgpu_entry entry;
    uint64_t part = 0;
    lock_take(&process->pool_lock);
    table[i].holders--;
    if (bytes && !vgpu_ledger_take(process->ledger, ENTRY_FREED, key, &entry)) {
        part = bytes < entry.bytes ? bytes : entry.bytes;
        entry.bytes -= part;
        if (entry.bytes)
            (void)vgpu_ledger_put(process->ledger, &entry);
        else if (table[i].holders == 0)
            table[i].key = 0;
        give_back(process, process_device(process, entry.device), part, VGPU_KIND_DATA);
    }
    lock_leave(&process->pool_lock);
    return part;
}

static bool settled_meanwhile;

uint64_t freed_bytes(struct process *process, struct device *device) {
    uint64_t cursor = 0, bytes = 0;
    struct vgpu_entry entry;
    if (!(__atomic_load_n(&pools_watched, __ATOMIC_ACQUIRE) & POOLS_DEFERRED))
        return 0;
    while (vgpu_ledger_next(process->ledger, ENTRY_FREED, &cursor, &entry) == 0)
        bytes += entry.device == device->ordinal ? entry.bytes : 0;
    if (bytes)
        __atomic_store_n(&settled_meanwhile, true, __ATOMIC_RELEASE);
    return bytes;
}

uint64_t freed_flush(struct process *process, bool all) {
    uint64_t back = 0;
    bool left = false;
    if (!(__atomic_fetch_and(&pools_watched, ~(uint32_t)POOLS_DEFERRED, __ATOMIC_SEQ_CST) &
          POOLS_DEFERRED))
        return 0;
    for (int i = 0; i < STREAMS_MAX; i++) {
        struct freed row;
        struct vgpu_entry entry;
        if (!hold(process, i, &row, &entry))
            continue;
        bool done = is_done(&row, all);
        back += leave(process, i, row.key, done ? entry.bytes : 0);
        left |= !done;
    }
    if (left)
        __atomic_fetch_or(&pools_watched, POOLS_DEFERRED, __ATOMIC_RELEASE);
    if (back && __atomic_exchange_n(&settled_meanwhile, false, __ATOMIC_ACQ_REL))
        launch_watch(LAUNCH_UNSETTLED);
    return back;
}

void freed_stream_ends(struct process *process, CUstream stream) {
    uint64_t key = row_key(stream, context_current());
    struct vgpu_entry entry = {.bytes = 0};
    if (!(__atomic_load_n(&pools_watched, __ATOMIC_ACQUIRE) & POOLS_DEFERRED))
        return;
    (void)freed_flush(process, false);
    lock_take(&process->pool_lock);
    struct freed *row = key ? find(process, key) : NULL;
    while (row && row->holders) {
        lock_leave(&process->pool_lock);
        sched_yield();
        lock_take(&process->pool_lock);
    }
    if (row && row->key == key) {
        row->key = 0;
        (void)vgpu_ledger_take(process->ledger, ENTRY_FREED, key, &entry);
    }
    lock_leave(&process->pool_lock);
    if (entry.bytes) {
        pools_bury(process, process_device(process, entry.device), entry.bytes);
        pools_freed();
    }
}
