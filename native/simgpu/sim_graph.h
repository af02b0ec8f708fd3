/* Inside of graphs, for the cuda_graph*.c files. */
#pragma once

#include "sim_cuda.h"

#define GRAPH_PAGE (32 * SIM_MIB)

/* An allocation of a memory node. It outlives node and graph while it is live. */
struct galloc {
    struct cu_rec *rec;
    size_t size;
    int dev;
    int refs;  /* nodes and executables */
    bool live; /* launched, and not freed inside of its graph */
};

struct cu_node {
    struct cu_obj obj;
    struct cu_graph *graph;
    CUgraphNodeType type;
    struct cu_node **dep;
    size_t n_deps;
    union {
        CUDA_KERNEL_NODE_PARAMS kernel;
        CUDA_MEMCPY3D memcpy;
        CUDA_MEMSET_NODE_PARAMS memset;
        CUDA_HOST_NODE_PARAMS host;
        CUevent event;
        CUDA_MEM_ALLOC_NODE_PARAMS alloc;
        CUdeviceptr free;
    } p;
    struct cu_function *function;
    struct galloc *memory;    /* of alloc and free nodes */
    struct cu_graph **inside; /* child graph, bodies of a conditional */
    size_t n_inside;
    uint64_t mark; /* for searches */
};

struct cu_graph {
    struct cu_obj obj;
    struct cu_node **node;
    size_t n, cap;
    int execs; /* with memory nodes there may be one */
    bool child;
};

bool graph_has_memory(const struct cu_graph *g);
CUresult graph_find(CUgraph handle, struct cu_graph **out);
CUresult node_find(CUgraphNode handle, struct cu_node **out);
CUresult node_add(CUgraphNode *out, CUgraph graph, const CUgraphNode *deps, size_t n,
                  CUgraphNodeType type, struct cu_node **node);
void node_free(struct cu_node *n);
CUresult graph_copy(const struct cu_graph *from, struct cu_graph **out);
bool node_after(struct cu_node *later, struct cu_node *earlier);
CUresult kernel_of(const CUDA_KERNEL_NODE_PARAMS *p, struct cu_function **out);

/* cuda_graphmem.c */
void galloc_put(struct galloc *a);
void galloc_free(struct galloc *a);
size_t graph_page(size_t bytes);
/* What the executable needs: bytes of allocations that it frees itself, per device. */
CUresult graph_footprint(struct cu_graph *g, uint64_t *per_dev);
CUresult graph_reserve(int dev, uint64_t need);
