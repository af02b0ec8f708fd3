#define _GNU_SOURCE
#include "freed.h"

#include <errno.h>
#include <sched.h>
#include <sys/mman.h>

/* Records of pools and the arithmetic of their charge. */

#define CHUNK_BYTES 4096
/* Synchronisations of other streams that may come before that of the one which keeps a destroyed pool's
 * memory. */
#define BURIED_LOOKS 16

/* Appended to, never taken from; valid only for its owner. */
static struct {
    struct process *owner;
    struct pool *first;
    struct pool *chunk; /* its first `spare` records were never used */
    size_t spare;
    struct pool *current[MAX_ORDINALS]; /* NULL: ask the driver */
    struct pool *graph[MAX_ORDINALS];
    uint32_t generation;           /* of `current` */
    uint64_t buried[MAX_ORDINALS]; /* of destroyed pools, in the device's `other` */
    uint32_t looks;                /* synchronisations that still look for what became of that */
} pools;

uint32_t pools_watched;

static bool owned(const struct process *process) {
    return __atomic_load_n(&pools.owner, __ATOMIC_ACQUIRE) == process;
}

static void lock(struct process *process) {
    lock_take(&process->pool_lock);
}

static void unlock(struct process *process) {
    lock_leave(&process->pool_lock);
}

/* ---- records ------------------------------------------------------------------------------- */

/* Under pool_lock. What a parent process left behind is forgotten. */
static void own(struct process *process) {
    if (owned(process))
        return;
    pools.first = NULL;
    pools.spare = 0;
    for (int i = 0; i < MAX_ORDINALS; i++)
        pools.current[i] = pools.graph[i] = NULL, pools.buried[i] = 0;
    __atomic_store_n(&pools.owner, process, __ATOMIC_RELEASE);
}

/* Under pool_lock. A new record comes into the list once it is filled. */
static struct pool *record_take(void) {
    for (struct pool *pool = pools.first; pool; pool = pool->next)
        if (!pool->handle)
            return pool;
    if (pools.spare == 0) {
        void *chunk =
            mmap(NULL, CHUNK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (chunk == MAP_FAILED)
            return NULL;
        pools.chunk = chunk;
        pools.spare = CHUNK_BYTES / sizeof *pools.chunk;
    }
    return &pools.chunk[--pools.spare];
}

static struct pool *record_start(struct process *process, CUmemoryPool handle,
                                 struct device *device, enum pool_kind kind) {
    struct pool *pool = record_take();
    if (!pool)
        return NULL;
    bool listed = pool->process != NULL;
    pool->process = process;
    pool->device = device;
    pool->kind = kind;
    __atomic_store_n(&pool->charged, 0, __ATOMIC_RELAXED);
    pool->credits = 0;
    pool->holders = 0;
    pool->dying = false;
    __atomic_store_n(&pool->handle, handle, __ATOMIC_RELEASE);
    if (!listed) {
        pool->next = pools.first;
        __atomic_store_n(&pools.first, pool, __ATOMIC_RELEASE);
    }
    return pool;
}

static struct pool *record_of(struct process *process, CUmemoryPool handle) {
    struct vgpu_entry entry;
    if (vgpu_ledger_get(process->ledger, ENTRY_POOL, key_of(handle), &entry))
        return NULL;
    return (struct pool *)(uintptr_t)entry.aux; /* NOLINT: our own record */
}

struct pool *pool_add(struct process *process, CUmemoryPool handle, struct device *device,
                      enum pool_kind kind) {
    lock(process);
    own(process);
    struct pool *pool = record_of(process, handle);
    if (!pool && (pool = record_start(process, handle, device, kind))) {
        struct vgpu_entry entry = {.key = key_of(handle),
                                   .kind = ENTRY_POOL,
                                   .device = device ? device->ordinal : -1,
                                   .aux = key_of(pool)};
        if (vgpu_ledger_put(process->ledger, &entry)) {
            pool->handle = NULL;
            pool = NULL;
        }
    }
    unlock(process);
    return pool;
}

struct pool *pool_graph(struct process *process, struct device *device) {
    struct pool **place = &pools.graph[device->ordinal];
    struct pool *pool = owned(process) ? __atomic_load_n(place, __ATOMIC_ACQUIRE) : NULL;
    if (pool)
        return pool;
    lock(process);
    own(process);
    if (!*place)
        /* Any handle that is not NULL: the driver names this memory by its device. */
        __atomic_store_n(place,
                         record_start(process, (CUmemoryPool)(void *)device, device, POOL_GRAPH),
                         __ATOMIC_RELEASE);
    pool = *place;
    unlock(process);
    return pool;
}

void pools_changed(struct process *process) {
    lock(process);
    own(process);
    __atomic_fetch_add(&pools.generation, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < MAX_ORDINALS; i++)
        __atomic_store_n(&pools.current[i], NULL, __ATOMIC_RELEASE);
    unlock(process);
}

void pool_retire(struct pool *pool) {
    struct process *process = pool->process;
    struct vgpu_entry entry;
    lock(process);
    pool->dying = true;
    (void)vgpu_ledger_take(process->ledger, ENTRY_POOL, key_of(pool->handle), &entry);
    while (pool->holders) {
        unlock(process);
        sched_yield();
        lock(process);
    }
    unlock(process);
}

void pool_revive(struct pool *pool) {
    struct process *process = pool->process;
    struct vgpu_entry entry = {.key = key_of(pool->handle),
                               .kind = ENTRY_POOL,
                               .device = pool->device ? pool->device->ordinal : -1,
                               .aux = key_of(pool)};
    lock(process);
    pool->dying = false;
    (void)vgpu_ledger_put(process->ledger, &entry);
    unlock(process);
}

uint64_t pool_forget(struct pool *pool) {
    struct process *process = pool->process;
    lock(process);
    uint64_t charged = pool->charged;
    __atomic_store_n(&pool->charged, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&pool->handle, NULL, __ATOMIC_RELEASE);
    unlock(process);
    return charged;
}

/* ---- which pool ------------------------------------------------------------------------------ */

static bool is_pool_of(CUmemoryPool handle, CUdevice ordinal) {
    CUmemoryPool found = NULL;
    if (real.cuDeviceGetDefaultMemPool &&
        CALL_REAL(cuDeviceGetDefaultMemPool, &found, ordinal) == CUDA_SUCCESS && found == handle)
        return true;
    return real.cuDeviceGetMemPool &&
           CALL_REAL(cuDeviceGetMemPool, &found, ordinal) == CUDA_SUCCESS && found == handle;
}

static bool is_default_of(CUmemoryPool handle, CUmemLocationType where, int id,
                          CUmemAllocationType type) {
    CUmemoryPool found = NULL;
    CUmemLocation location = {.type = where, .id = id};
    return real.cuMemGetDefaultMemPool &&
           CALL_REAL(cuMemGetDefaultMemPool, &found, &location, type) == CUDA_SUCCESS &&
           found == handle;
}

/* A pool that the driver made itself. *kind and *device (NULL: host memory) of it. */
static bool identify(struct process *process, CUmemoryPool handle, struct device **device,
                     enum pool_kind *kind) {
    int count = process->visible;
    if (!count && real.cuDeviceGetCount)
        (void)CALL_REAL(cuDeviceGetCount, &count);
    for (int i = 0; i < count; i++) {
        bool managed = false;
        if (!is_pool_of(handle, i) && !(managed = is_default_of(handle, CU_MEM_LOCATION_TYPE_DEVICE,
                                                                i, CU_MEM_ALLOCATION_TYPE_MANAGED)))
            continue;
        *kind = managed ? POOL_MANAGED : POOL_PLAIN;
        *device = process_device(process, i);
        return *device != NULL;
    }
    *device = NULL;
    *kind = POOL_PLAIN;
    if (is_default_of(handle, CU_MEM_LOCATION_TYPE_HOST, 0, CU_MEM_ALLOCATION_TYPE_PINNED) ||
        is_default_of(handle, CU_MEM_LOCATION_TYPE_HOST_NUMA, 0, CU_MEM_ALLOCATION_TYPE_PINNED))
        return true;
    /* Any other one: managed memory without a home, or one of a kind we do not know. */
    *kind = is_default_of(handle, CU_MEM_LOCATION_TYPE_NONE, 0, CU_MEM_ALLOCATION_TYPE_MANAGED)
                ? POOL_MANAGED
                : POOL_PLAIN;
    return process_current(device, process) == CUDA_SUCCESS;
}

CUresult pool_find(struct pool **pool, struct process *process, CUmemoryPool handle) {
    struct device *device = NULL;
    enum pool_kind kind = POOL_PLAIN;
    uint64_t bytes = 0;
    *pool = record_of(process, handle);
    if (LIKELY(*pool != NULL))
        return CUDA_SUCCESS;
    struct pool unknown = {.handle = handle};
    CUstreamCaptureMode mode = capture_relax();
    bool known = handle && pool_reserved(&unknown, &bytes) == CUDA_SUCCESS &&
                 identify(process, handle, &device, &kind);
    capture_restore(mode);
    if (!known)
        return CUDA_SUCCESS;
    *pool = pool_add(process, handle, device, kind);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult pool_current(struct pool **pool, struct process *process, struct device *device) {
    struct pool **place = &pools.current[device->ordinal];
    *pool = owned(process) ? __atomic_load_n(place, __ATOMIC_ACQUIRE) : NULL;
    if (LIKELY(*pool != NULL))
        return CUDA_SUCCESS;
    uint32_t generation = __atomic_load_n(&pools.generation, __ATOMIC_ACQUIRE);
    CUmemoryPool handle = NULL;
    if (!real.cuDeviceGetMemPool)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult result = CALL_REAL(cuDeviceGetMemPool, &handle, device->ordinal);
    if (result != CUDA_SUCCESS)
        return result;
    *pool = pool_add(process, handle, device, POOL_PLAIN);
    if (!*pool)
        return CUDA_ERROR_OUT_OF_MEMORY;
    lock(process);
    if (pools.generation == generation)
        __atomic_store_n(place, *pool, __ATOMIC_RELEASE);
    unlock(process);
    return CUDA_SUCCESS;
}

/* ---- what the driver says -------------------------------------------------------------------- */

static CUresult attribute(const struct pool *pool, bool reserved, uint64_t *bytes) {
    if (pool->kind == POOL_GRAPH)
        return CALL_REAL(cuDeviceGetGraphMemAttribute, pool->device->ordinal,
                         reserved ? CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT
                                  : CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT,
                         bytes);
    CUstreamCaptureMode mode = capture_relax();
    CUresult result = CALL_REAL(
        cuMemPoolGetAttribute, pool->handle,
        reserved ? CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT : CU_MEMPOOL_ATTR_USED_MEM_CURRENT, bytes);
    capture_restore(mode);
    return result;
}

CUresult pool_reserved(const struct pool *pool, uint64_t *bytes) {
    if (UNLIKELY(pool->kind == POOL_GRAPH ? !real.cuDeviceGetGraphMemAttribute
                                          : !real.cuMemPoolGetAttribute))
        return CUDA_ERROR_NOT_SUPPORTED;
    return attribute(pool, true, bytes);
}

uint64_t pool_unused(const struct pool *pool) {
    uint64_t reserved = 0, used = 0;
    if (pool_reserved(pool, &reserved) != CUDA_SUCCESS ||
        attribute(pool, false, &used) != CUDA_SUCCESS)
        return 0;
    return reserved > used ? reserved - used : 0;
}

/* The driver counts graph memory as used also after its graph freed it, so only a try tells. */
static void trim_graph(struct pool *pool) {
    uint64_t before = 0, after = 0;
    if (!real.cuDeviceGraphMemTrim || pool_reserved(pool, &before) != CUDA_SUCCESS || before == 0)
        return;
    (void)CALL_REAL(cuDeviceGraphMemTrim, pool->device->ordinal);
    if (pool_reserved(pool, &after) != CUDA_SUCCESS || after < before)
        __atomic_fetch_add(&pool->device->trims, 1, __ATOMIC_ACQ_REL);
}

void pool_trim(struct pool *pool) {
    CUstreamCaptureMode mode = capture_relax();
    if (pool->kind == POOL_GRAPH)
        trim_graph(pool);
    else
        (void)CALL_REAL(cuMemPoolTrimTo, pool->handle, 0);
    capture_restore(mode);
}

/* ---- the charge -------------------------------------------------------------------------------- */

/* Under pool_lock. */
static void set_charged(struct pool *pool, uint64_t bytes) {
    if (pool->kind == POOL_MANAGED)
        invisible_add(pool->device, (int64_t)(bytes - pool->charged));
    if (pool->kind == POOL_GRAPH)
        pool->device->graph = bytes;
    else if (bytes)
        __atomic_fetch_or(&pools_watched, POOLS_CHARGED, __ATOMIC_RELEASE);
    __atomic_store_n(&pool->charged, bytes, __ATOMIC_RELEASE);
}

/* Graph memory that was uploaded and not launched yet would be trimmed by a refusal. */
CUresult pool_announce(struct pool *pool, uint64_t bytes) {
    struct process *process = pool->process;
    CUresult result = CUDA_SUCCESS;
    if (pool->kind != POOL_GRAPH) {
        result = charge(process, pool->device, bytes, VGPU_KIND_DATA);
    } else if (!charge_once(process, pool->device, bytes, VGPU_KIND_DATA)) {
        vgpu_refused(process->core, pool->device->index, bytes);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result == CUDA_SUCCESS) {
        lock(process);
        pool->credits += bytes;
        unlock(process);
    }
    return result;
}

bool pool_fits(const struct pool *pool, uint64_t bytes) {
    struct process *process = pool->process;
    uint64_t limit = process_limit(process, pool->device);
    int index = pool->device->index;
    return limit == 0 ||
           (bytes <= limit && (vgpu_used_roughly(process->core, index) <= limit - bytes ||
                               vgpu_used(process->core, index) <= limit - bytes));
}

/* Under pool_lock. Growth is first taken for that of the calls which charged ahead; what they
 * cannot have caused is answered, and nothing changed, unless `force`. */
static CUresult settle_locked(struct pool *pool, uint64_t credit, bool force, uint64_t *excess) {
    uint64_t reserved = 0;
    CUresult result = pool_reserved(pool, &reserved);
    if (result != CUDA_SUCCESS) {
        if (!credit && !force)
            return result;
        reserved = pool->charged + credit; /* until somebody can read it */
    }
    uint64_t growth = reserved > pool->charged ? reserved - pool->charged : 0;
    uint64_t ahead = growth < credit ? growth : credit;
    uint64_t others = pool->credits - credit;
    *excess = growth - ahead > others ? growth - ahead - others : 0;
    if (*excess && !force)
        return CUDA_SUCCESS;
    uint64_t back = credit - ahead;
    if (reserved < pool->charged)
        back += pool->charged - reserved;
    set_charged(pool, growth ? pool->charged + ahead + *excess : reserved);
    pool->credits = others;
    charge_forced(pool->process, pool->device, *excess, VGPU_KIND_DATA);
    give_back(pool->process, pool->device, back, VGPU_KIND_DATA);
    *excess = 0;
    return CUDA_SUCCESS;
}

CUresult pool_settle(struct pool *pool, uint64_t *credit, bool force) {
    for (;;) {
        uint64_t excess = 0;
        lock(pool->process);
        CUresult result = settle_locked(pool, *credit, force, &excess);
        unlock(pool->process);
        if (result == CUDA_SUCCESS && excess == 0)
            *credit = 0;
        if (result != CUDA_SUCCESS || excess == 0)
            return result;
        result = pool_announce(pool, excess);
        if (result != CUDA_SUCCESS)
            return result;
        *credit += excess;
    }
}

/* ---- refreshing -------------------------------------------------------------------------------- */

/* Of that device, or (NULL) of any. Until it is let go the record is this pool's. */
static bool hold(struct process *process, const struct device *device, struct pool *pool) {
    if (!__atomic_load_n(&pool->handle, __ATOMIC_ACQUIRE))
        return false;
    lock(process);
    bool held =
        pool->handle && (device ? pool->device == device : pool->device != NULL) && !pool->dying;
    pool->holders += held;
    unlock(process);
    return held;
}

static void let_go(struct process *process, struct pool *pool) {
    lock(process);
    pool->holders--;
    unlock(process);
}

/* Growth that nobody charged is seen only while no call is in flight: those charge their own. */
static uint64_t refresh_held(struct process *process, struct pool *pool) {
    uint64_t reserved = 0, back = 0;
    lock(process);
    uint64_t operations = __atomic_load_n(&pool->device->operations, __ATOMIC_ACQUIRE);
    bool quiet = (uint32_t)operations == (uint32_t)(operations >> 32);
    if (pool_reserved(pool, &reserved) == CUDA_SUCCESS) {
        if (reserved < pool->charged) {
            back = pool->charged - reserved;
            set_charged(pool, reserved);
            give_back(process, pool->device, back, VGPU_KIND_DATA);
        } else if (quiet && !pool->credits && reserved > pool->charged) {
            charge_forced(process, pool->device, reserved - pool->charged, VGPU_KIND_DATA);
            set_charged(pool, reserved);
        }
    }
    unlock(process);
    return back;
}

uint64_t pools_refresh(struct process *process, struct device *device, bool trim) {
    uint64_t back = 0;
    if (trim && __atomic_load_n(&pools_watched, __ATOMIC_ACQUIRE) & POOLS_DEFERRED)
        back = freed_flush(process, false);
    if (LIKELY(!owned(process)) || process->mode != MODE_ON)
        return back;
    struct pool *pool = __atomic_load_n(&pools.first, __ATOMIC_ACQUIRE);
    for (; pool; pool = pool->next) {
        /* A trim is for what can be given back. */
        if (trim && !__atomic_load_n(&pool->charged, __ATOMIC_RELAXED))
            continue;
        if (!hold(process, device, pool))
            continue;
        if (trim && (pool->kind == POOL_GRAPH || pool_unused(pool)))
            pool_trim(pool);
        back += refresh_held(process, pool);
        let_go(process, pool);
    }
    return back;
}

void pools_bury(struct process *process, struct device *device, uint64_t bytes) {
    charge_forced(process, device, bytes, VGPU_KIND_CONTEXT);
    give_back(process, device, bytes, VGPU_KIND_DATA);
    lock_take(&process->settle_lock);
    device->other += bytes;
    lock_leave(&process->settle_lock);
    lock(process);
    pools.buried[device->ordinal] += bytes;
    /* It may have been freed already, in a stream that is not done. */
    pools.looks = BURIED_LOOKS;
    __atomic_fetch_or(&pools_watched, POOLS_BURIED | POOLS_FREED, __ATOMIC_RELEASE);
    unlock(process);
}

/* Only the driver's own figure tells what became of it. */
static void settle_buried(struct process *process) {
    uint64_t left = 0;
    for (int i = 0; i < MAX_ORDINALS; i++) {
        struct device *device = &process->devices[i];
        uint64_t gone = 0;
        lock(process);
        bool none = pools.buried[i] == 0;
        unlock(process);
        if (none)
            continue;
        int result = settle_gone(process, device, &gone);
        lock(process);
        if (result == -ENODATA)
            gone = pools.buried[i]; /* the estimate stays for good */
        pools.buried[i] -= gone < pools.buried[i] ? gone : pools.buried[i];
        left += pools.buried[i];
        unlock(process);
    }
    lock(process);
    left = 0;
    for (int i = 0; i < MAX_ORDINALS; i++)
        left += pools.buried[i] = pools.looks ? pools.buried[i] : 0;
    if (left == 0)
        __atomic_fetch_and(&pools_watched, ~(uint32_t)POOLS_BURIED, __ATOMIC_RELEASE);
    else if (pools.looks--)
        __atomic_fetch_or(&pools_watched, POOLS_FREED, __ATOMIC_RELEASE);
    unlock(process);
}

static void synchronized_held(struct process *process, struct pool *pool, uint32_t why) {
    if ((why & POOLS_OVER) && !pool_fits(pool, 0) && pool_unused(pool))
        pool_trim(pool);
    (void)refresh_held(process, pool);
    if (__atomic_load_n(&pool->charged, __ATOMIC_ACQUIRE))
        __atomic_fetch_or(&pools_watched, POOLS_CHARGED, __ATOMIC_RELEASE);
    if ((why & POOLS_OVER) && !pool_fits(pool, 0))
        __atomic_fetch_or(&pools_watched, POOLS_OVER, __ATOMIC_RELEASE);
}

/* The flags go down before the look: who charges meanwhile raises them again. */
void pools_synchronized(struct process *process, bool all) {
    if (process->mode != MODE_ON)
        return;
    (void)freed_flush(process, all);
    if (!owned(process))
        return;
    uint32_t why = __atomic_fetch_and(&pools_watched, (uint32_t)(POOLS_BURIED | POOLS_DEFERRED),
                                      __ATOMIC_SEQ_CST);
    struct pool *pool = __atomic_load_n(&pools.first, __ATOMIC_ACQUIRE);
    for (; pool; pool = pool->next) {
        if (!__atomic_load_n(&pool->charged, __ATOMIC_ACQUIRE) || !hold(process, NULL, pool))
            continue;
        if (pool->kind != POOL_GRAPH)
            synchronized_held(process, pool, why);
        let_go(process, pool);
    }
    if ((why & POOLS_FREED) && (why & POOLS_BURIED))
        settle_buried(process);
}
