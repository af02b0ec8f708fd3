/* Inside of a pool, for cuda_pool.c and cuda_poolapi.c. */
#pragma once

#include "sim_cuda.h"

#define POOL_PAGE (32 * SIM_MIB)
#define POOL_STREAMS 16

/* A run of addresses, allocated or free; neighbours are linked. */
struct segment {
    struct span *span;
    CUdeviceptr at;
    uint64_t size, asked, id;
    bool used;
    struct segment *prev, *next, *free_prev, *free_next;
};

struct span {
    struct cu_pool *pool;
    struct cu_rec *rec;
    struct span *next;
    struct segment *first, *free;
    uint64_t pages;
    struct {
        bool backed;
        uint32_t users; /* allocations that touch the page */
    } page[];
};

struct cu_pool {
    struct cu_obj obj;
    struct cu_pool *next;
    uint32_t dom;
    int dev;
    int location; /* CUmemLocationType */
    CUmemAllocationType type;
    CUmemAllocationHandleType handles;
    bool is_default, destroyed, imported;
    int shared; /* its object once exported or imported, else -1 */
    uint64_t threshold, max, reserved, reserved_high, used, used_high;
    long live;
    int reuse[3]; /* the three reuse attributes */
    uint64_t freed_on[POOL_STREAMS];
    int n_freed_on;
    bool freed_on_many;
    struct span *spans;
};

struct cu_pool *pool_list(void);
void pool_unregister(struct cu_pool *p);
void pool_end(struct cu_pool *p);
bool pool_trim(struct cu_pool *p, uint64_t keep);
