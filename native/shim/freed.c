#include "freed.h"

/* Memory of cuMemAlloc that was freed in stream order. The driver keeps it until that stream is
 * synchronised, and so does its charge; measured: neither idling, nor queries, nor other
 * allocations give it back. */

#define STREAMS_MAX 32
#define TURN_BITS 26
#define TURNS (1u << TURN_BITS)

/* Whole blocks are summed up in the ledger's ENTRY_FREED; of a block with other pieces the reference
 * stays, as an ENTRY_LATER. Both end with their context. Under pool_lock. */
static struct freed {
    CUstream stream;
    uint64_t key; /* 0: free */
    uint64_t context;
    uint32_t holders; /* flushes in flight: the stream's end waits for them */
    uint64_t added;   /* whole blocks ever freed in it, bytes */
    uint64_t given;   /* and given back */
    uint32_t turn;    /* what was freed before a flush began carries a lower number */
    bool turned;      /* something carries this one */
    bool later;       /* there may be entries of that kind */
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

/* ---- pieces of blocks ------------------------------------------------------------------------ */

static uint32_t tag_of(const struct freed *row, uint32_t turn) {
    return (uint32_t)(row - table) << TURN_BITS | turn % TURNS;
}

/* Under pool_lock: the piece's reference stays until the stream is done. */
static bool later_add(struct process *process, struct freed *row, uint64_t block,
                      const struct vgpu_entry *memory) {
    uint64_t tag = tag_of(row, row->turn);
    struct vgpu_entry entry = {.key = block << 32 ^ tag,
                               .kind = ENTRY_LATER,
                               .device = memory->device,
                               .bytes = block,
                               .aux = 1 | tag << 32,
                               .aux2 = memory->aux2};
    row->later = row->turned = true;
    return vgpu_ledger_add(process->ledger, ENTRY_LATER, entry.key, 1, 0, &entry) == 0 ||
           vgpu_ledger_put(process->ledger, &entry) == 0;
}

/* Under pool_lock: lets go of the pieces that were freed in the stream up to a turn. Bytes of blocks
 * whose last they were. */
static uint64_t later_leave(struct process *process, struct freed *row, uint32_t turn) {
    uint64_t cursor = 0, bytes = 0;
    struct vgpu_entry entry;
    if (!row->later)
        return 0;
    row->later = false;
    while (vgpu_ledger_next(process->ledger, ENTRY_LATER, &cursor, &entry) == 0) {
        uint32_t tag = (uint32_t)(entry.aux >> 32);
        if (tag >> TURN_BITS != (uint32_t)(row - table))
            continue;
        if ((turn - tag) % TURNS >= TURNS / 2) {
            row->later = true; /* freed since */
        } else if (vgpu_ledger_take(process->ledger, ENTRY_LATER, entry.key, &entry) == 0) {
            for (uint32_t pieces = (uint32_t)entry.aux; pieces; pieces--)
                bytes += block_leave(process, entry.bytes);
        }
    }
    return bytes;
}

/* ---- what a stream keeps --------------------------------------------------------------------- */

/* The row that may keep this memory; NULL without room. The null stream and a thread's own are those
 * of the context that is current, not of the memory's; but it is with its own context that memory ends. */
static struct freed *row_for(struct process *process, const struct vgpu_entry *memory,
                             CUstream stream, uint64_t context) {
    struct vgpu_entry entry;
    uint64_t key = row_key(stream, context);
    struct freed *row = find(process, key);
    if (row && vgpu_ledger_get(process->ledger, ENTRY_FREED, key, &entry) == 0)
        return entry.device == memory->device && entry.aux2 == memory->aux2 ? row : NULL;
    if (!row && !(row = find(process, 0)))
        return NULL;
    entry = (struct vgpu_entry){
        .key = key, .kind = ENTRY_FREED, .device = memory->device, .aux2 = memory->aux2};
    if (vgpu_ledger_put(process->ledger, &entry))
        return NULL;
    row->stream = stream;
    row->key = key;
    row->context = context;
    row->added = row->given = 0;
    return row;
}

static void bytes_add(struct process *process, uint64_t key, uint64_t bytes) {
    struct vgpu_entry entry;
    if (vgpu_ledger_take(process->ledger, ENTRY_FREED, key, &entry))
        return;
    entry.bytes += bytes;
    (void)vgpu_ledger_put(process->ledger, &entry);
}

/* Bytes that could not be kept. */
static uint64_t add(struct process *process, const struct vgpu_entry *memory, bool piece,
                    CUstream stream, uint64_t context) {
    uint64_t blocks[2] = {memory->key}, lost = 0;
    int edges = piece ? 1 : allocation_blocks(memory, blocks);
    uint64_t whole = piece ? 0 : memory->bytes;
    struct freed *row = row_for(process, memory, stream, context);
    for (int i = 0; i < edges; i++)
        if (!row || !later_add(process, row, blocks[i], memory))
            lost += block_leave(process, blocks[i]);
    if (row && whole) {
        bytes_add(process, row->key, whole);
        row->added += whole;
    }
    return row ? lost : lost + whole;
}

void freed_add(struct process *process, const struct vgpu_entry *memory, bool piece,
               CUstream stream) {
    struct device *device = process_device(process, memory->device);
    uint64_t context = context_current();
    lock_take(&process->pool_lock);
    uint64_t lost = add(process, memory, piece, stream, context);
    lock_leave(&process->pool_lock);
    __atomic_fetch_or(&pools_watched, POOLS_DEFERRED, __ATOMIC_RELEASE);
    if (lost)
        pools_bury(process, device, lost);
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

static bool hold(struct process *process, int i, struct freed *row) {
    struct vgpu_entry entry;
    lock_take(&process->pool_lock);
    bool known = owner == process && table[i].key;
    if (known && vgpu_ledger_get(process->ledger, ENTRY_FREED, table[i].key, &entry)) {
        if (table[i].holders == 0)
            table[i].key = 0; /* it went with its context */
        known = false;
    }
    table[i].holders += known;
    *row = table[i];
    if (known && table[i].turned) {
        table[i].turned = false;
        table[i].turn++;
    }
    lock_leave(&process->pool_lock);
    return known;
}

/* With `done`, what was freed in the stream before it was asked has come back. */
static uint64_t leave(struct process *process, int i, const struct freed *row, bool done) {
    struct vgpu_entry entry;
    uint64_t part = 0;
    lock_take(&process->pool_lock);
    table[i].holders--;
    if (done && !vgpu_ledger_take(process->ledger, ENTRY_FREED, row->key, &entry)) {
        part = row->added > table[i].given ? row->added - table[i].given : 0;
        part = part < entry.bytes ? part : entry.bytes;
        table[i].given += part;
        entry.bytes -= part;
        part += later_leave(process, &table[i], row->turn);
        if (entry.bytes || table[i].later || table[i].holders)
            (void)vgpu_ledger_put(process->ledger, &entry);
        else
            table[i].key = 0;
        give_back(process, process_device(process, entry.device), part, VGPU_KIND_DATA);
    }
    if (table[i].later)
        __atomic_fetch_or(&pools_watched, POOLS_DEFERRED, __ATOMIC_RELEASE);
    lock_leave(&process->pool_lock);
    return part;
}

static bool settled_meanwhile;

/* The block of these pieces, where it has no others. */
static uint64_t later_bytes(struct process *process, const struct vgpu_entry *later) {
    struct vgpu_entry block;
    return vgpu_ledger_get(process->ledger, ENTRY_BLOCK, later->bytes, &block) == 0 &&
                   block.aux <= (uint32_t)later->aux
               ? GRANULE
               : 0;
}

uint64_t freed_bytes(struct process *process, struct device *device) {
    uint64_t cursor = 0, bytes = 0;
    bool any = false;
    struct vgpu_entry entry;
    if (!(__atomic_load_n(&pools_watched, __ATOMIC_ACQUIRE) & POOLS_DEFERRED))
        return 0;
    while (vgpu_ledger_next(process->ledger, ENTRY_FREED, &cursor, &entry) == 0)
        bytes += entry.device == device->ordinal ? entry.bytes : 0;
    cursor = 0;
    while (vgpu_ledger_next(process->ledger, ENTRY_LATER, &cursor, &entry) == 0)
        any = true, bytes += entry.device == device->ordinal ? later_bytes(process, &entry) : 0;
    if (bytes || any)
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
        if (!hold(process, i, &row))
            continue;
        bool done = is_done(&row, all);
        back += leave(process, i, &row, done);
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
    if (row && row->key == key && vgpu_ledger_take(process->ledger, ENTRY_FREED, key, &entry) == 0)
        entry.bytes += later_leave(process, row, row->turn);
    if (row && row->key == key)
        row->key = 0;
    lock_leave(&process->pool_lock);
    if (entry.bytes) {
        pools_bury(process, process_device(process, entry.device), entry.bytes);
        pools_freed();
    }
}
