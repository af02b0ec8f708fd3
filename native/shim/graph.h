#pragma once
#include "launch.h"
#include "pool.h"

/* What a graph takes when it is instantiated, uploaded or launched. */

#define GRAPH_CONTEXTS_MAX 8

/* Its memory nodes on one device. */
struct graph_part {
    struct device *device;
    struct pool *pool;
    uint64_t bytes;   /* were no node to use again what another one freed */
    uint64_t largest; /* one of them */
    uint64_t credit;
    uint64_t trims;
    bool tight; /* not charged ahead: less than `bytes` may do, only the driver knows */
    bool keeps; /* more is allocated than freed: others may have to take anew */
};

/* Local memory of its kernels in one context. */
struct graph_local {
    uint64_t context;
    uint64_t need; /* bytes per thread */
    struct local_growth growth;
};

struct graph_plan {
    struct process *process;
    size_t nodes;
    bool tight;
    bool lazy; /* names kernels of libraries that adding their nodes may have loaded */
    int live;  /* allocations less frees */
    int parts, locals;
    struct graph_part part[MAX_ORDINALS];
    struct graph_local local[GRAPH_CONTEXTS_MAX];
};

/* Walks a graph; the driver's error where it does not answer. */
CUresult graph_read(struct graph_plan *plan, struct process *process, CUgraph graph);
/* Adds one kernel, given as CUfunction or CUkernel; NULL context: the current one. */
void graph_plan_kernel(struct graph_plan *plan, CUfunction function, CUkernel kernel,
                       CUcontext context);

/* Charges for local memory; CUDA_SUCCESS: call the driver, then graph_local_end. */
CUresult graph_local_begin(struct graph_plan *plan);
void graph_local_end(struct graph_plan *plan, CUresult result);

/* The largest need of an executable graph's kernels, charged again at each launch. */
CUresult exec_note_local(const struct graph_plan *plan, CUgraphExec exec);
