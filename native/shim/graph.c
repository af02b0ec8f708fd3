#include "graph.h"

#include <sys/mman.h>

/* Reads what a graph will take. */

#define DEPTH_MAX 32

static struct graph_part *part_of(struct graph_plan *plan, CUdevice ordinal) {
    for (int i = 0; i < plan->parts; i++)
        if (plan->part[i].device->ordinal == ordinal)
            return &plan->part[i];
    struct device *device = process_device(plan->process, ordinal);
    struct pool *pool = device ? pool_graph(plan->process, device) : NULL;
    if (!pool)
        return NULL;
    struct graph_part *part = &plan->part[plan->parts++];
    *part = (struct graph_part){.device = device, .pool = pool};
    return part;
}

static CUresult add_alloc(struct graph_plan *plan, CUgraphNode node) {
    CUDA_MEM_ALLOC_NODE_PARAMS params = {0};
    if (!real.cuGraphMemAllocNodeGetParams)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult result = CALL_REAL(cuGraphMemAllocNodeGetParams, node, &params);
    if (result != CUDA_SUCCESS || params.poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return result;
    struct graph_part *part = part_of(plan, params.poolProps.location.id);
    if (!part)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t bytes = pool_steps(params.bytesize);
    part->bytes = part->bytes > UINT64_MAX - bytes ? UINT64_MAX : part->bytes + bytes;
    part->largest = bytes > part->largest ? bytes : part->largest;
    plan->live++;
    return CUDA_SUCCESS;
}

void graph_plan_kernel(struct graph_plan *plan, CUfunction function, CUkernel kernel,
                       CUcontext context) {
    if (!function)
        function = (CUfunction)(void *)kernel;
    uint64_t need = launch_local_need(plan->process, function);
    if (need <= LOCAL_DEFAULT)
        return;
    uint64_t key = context ? key_of(context) : context_current();
    int i = 0;
    while (i < plan->locals && plan->local[i].context != key)
        i++;
    if (i == GRAPH_CONTEXTS_MAX)
        return; /* left to what the next settle of that device finds */
    if (i == plan->locals)
        plan->local[plan->locals++] = (struct graph_local){.context = key};
    if (need > plan->local[i].need)
        plan->local[i].need = need;
}

static CUresult add_kernel(struct graph_plan *plan, CUgraphNode node) {
    CUDA_KERNEL_NODE_PARAMS params = {0};
    if (!real.cuGraphKernelNodeGetParams_v2)
        return CUDA_SUCCESS; /* a driver without contexts in nodes: the launch's settle sees it */
    CUresult result = CALL_REAL(cuGraphKernelNodeGetParams_v2, node, &params);
    if (result != CUDA_SUCCESS)
        return result;
    plan->lazy |= params.kern != NULL;
    graph_plan_kernel(plan, params.func, params.kern, params.ctx);
    return result;
}

static CUresult add_graph(struct graph_plan *plan, CUgraph graph, int depth);

static CUresult add_node(struct graph_plan *plan, CUgraphNode node, int depth) {
    CUgraphNodeType type = CU_GRAPH_NODE_TYPE_KERNEL;
    CUgraph child = NULL;
    CUresult result = CALL_REAL(cuGraphNodeGetType, node, &type);
    if (result != CUDA_SUCCESS)
        return result;
    switch ((int)type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return add_kernel(plan, node);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        return add_alloc(plan, node);
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        plan->live--;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_GRAPH:
        result = CALL_REAL(cuGraphChildGraphNodeGetGraph, node, &child);
        return result == CUDA_SUCCESS ? add_graph(plan, child, depth + 1) : result;
    default:
        return CUDA_SUCCESS;
    }
}

static CUresult add_graph(struct graph_plan *plan, CUgraph graph, int depth) {
    size_t count = 0;
    CUresult result = CALL_REAL(cuGraphGetNodes, graph, NULL, &count);
    if (result != CUDA_SUCCESS || count == 0 || depth > DEPTH_MAX)
        return result;
    size_t size = count * sizeof(CUgraphNode);
    CUgraphNode *nodes =
        mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (nodes == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    result = CALL_REAL(cuGraphGetNodes, graph, nodes, &count);
    for (size_t i = 0; result == CUDA_SUCCESS && i < count; i++)
        result = add_node(plan, nodes[i], depth);
    munmap(nodes, size);
    plan->nodes += count;
    return result;
}

CUresult graph_read(struct graph_plan *plan, struct process *process, CUgraph graph) {
    plan->process = process;
    plan->nodes = 0;
    plan->tight = plan->lazy = false;
    plan->live = plan->parts = plan->locals = 0;
    if (!graph || !real.cuGraphGetNodes || !real.cuGraphNodeGetType ||
        !real.cuGraphChildGraphNodeGetGraph)
        return CUDA_SUCCESS; /* an old driver, without memory nodes */
    CUresult result = add_graph(plan, graph, 0);
    for (int i = 0; i < plan->parts; i++)
        plan->part[i].keeps = plan->live > 0;
    return result;
}

/* ---- local memory ------------------------------------------------------------------------------ */

CUresult graph_local_begin(struct graph_plan *plan) {
    for (int i = 0; i < plan->locals; i++) {
        struct graph_local *local = &plan->local[i];
        struct device *device = context_device(plan->process, local->context);
        local->growth = (struct local_growth){.step = 0};
        if (!device)
            continue;
        CUresult result =
            local_begin(&local->growth, plan->process, device, local->context, local->need);
        if (result == CUDA_SUCCESS)
            continue;
        while (i-- > 0)
            (void)local_end(&plan->local[i].growth, result);
        return result;
    }
    return CUDA_SUCCESS;
}

void graph_local_end(struct graph_plan *plan, CUresult result) {
    for (int i = 0; i < plan->locals; i++)
        (void)local_end(&plan->local[i].growth, result);
}
