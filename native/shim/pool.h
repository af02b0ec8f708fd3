#pragma once
#include "process.h"

/* What the pools of this process hold. The driver reports one true figure a pool, the bytes it
 * RESERVES; the charge follows that figure. Graph memory of a device is one more pool. */

/* Growth comes in steps of this: measured for 1 byte to 1 GiB, empty pools and others. */
#define POOL_STEP (32 * MIB)

enum pool_kind {
    POOL_PLAIN,
    POOL_MANAGED, /* NVML does not count it for a process */
    POOL_GRAPH,   /* memory nodes of the graphs of a device */
};

/* A record is never unmapped, only used again: whoever still looks at one reads valid memory. */
struct pool {
    struct process *process; /* whose; a forked child has none of its parent's */
    struct device *device;   /* NULL: takes no device memory of ours (host, imported) */
    CUmemoryPool handle;     /* NULL: the record is free */
    enum pool_kind kind;
    struct pool *next;
    /* Under pool_lock: */
    uint64_t charged; /* what it was last seen to reserve */
    uint64_t credits; /* charged ahead by calls in flight, beside `charged` */
    uint32_t holders; /* refreshes in flight: destruction waits for them */
    bool dying;
};

/* Whole steps; UINT64_MAX for what no card has. */
static inline uint64_t pool_steps(uint64_t bytes) {
    return bytes > UINT64_MAX - POOL_STEP ? UINT64_MAX
                                          : (bytes + POOL_STEP - 1) & ~(uint64_t)(POOL_STEP - 1);
}

/* The record of a pool that the program named; *pool stays NULL when the driver does not know it. */
CUresult pool_find(struct pool **pool, struct process *process, CUmemoryPool handle);
/* The pool that cuMemAllocAsync takes from on this device. */
CUresult pool_current(struct pool **pool, struct process *process, struct device *device);
/* The graph memory of a device; NULL without memory for a record. */
struct pool *pool_graph(struct process *process, struct device *device);
/* The record of a new pool; NULL without memory for it. */
struct pool *pool_add(struct process *process, CUmemoryPool handle, struct device *device,
                      enum pool_kind kind);
/* No refresh looks at it any more; pool_forget or pool_revive follows. */
void pool_retire(struct pool *pool);
void pool_revive(struct pool *pool);
/* Frees the record; answers what was still charged. */
uint64_t pool_forget(struct pool *pool);
/* The current pool of some device may be another one now. */
void pools_changed(struct process *process);

CUresult pool_reserved(const struct pool *pool, uint64_t *bytes);
/* Reserved and in no use, as far as the driver tells. */
uint64_t pool_unused(const struct pool *pool);
void pool_trim(struct pool *pool);

/* Whether a charge would pass now: a look, no promise. */
bool pool_fits(const struct pool *pool, uint64_t bytes);
/* Charges ahead of a call; CUDA_ERROR_OUT_OF_MEMORY when refused. */
CUresult pool_announce(struct pool *pool, uint64_t bytes);
/* After the call: charges what the pool grew, gives back what was charged ahead in excess. When
 * that does not fit, *credit stays charged, the caller undoes its call and settles by force. */
CUresult pool_settle(struct pool *pool, uint64_t *credit, bool force);

/* Why a synchronisation may have given memory back; 0 = it is a tail jump. */
enum pools_watch {
    POOLS_CHARGED = 1,   /* some pool is charged */
    POOLS_BURIED = 2,    /* memory of a destroyed pool is still charged */
    POOLS_FREED = 4,     /* and something of it may have been freed */
    POOLS_OVER = 8,      /* a busy stream kept what a refused request took past the limit */
    POOLS_DEFERRED = 16, /* a stream keeps what was freed in it (freed.h) */
};
extern uint32_t pools_watched;
/* The driver may just have given unused memory of pools back. `all`: of the whole current context. */
void pools_synchronized(struct process *process, bool all);
/* Counts what live pointers keep of a destroyed pool as what a settle finds. */
void pools_bury(struct process *process, struct device *device, uint64_t bytes);
/* A pointer that is not in the ledger was freed. */
static inline void pools_freed(void) {
    if (UNLIKELY(__atomic_load_n(&pools_watched, __ATOMIC_RELAXED) & POOLS_BURIED))
        __atomic_fetch_or(&pools_watched, POOLS_FREED, __ATOMIC_RELAXED);
}
