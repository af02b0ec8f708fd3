#include "graph.h"

/* Executable graphs that are changed: a kernel with more local memory takes it when its node is set,
 * after an update of the whole graph at the next launch. */

#define HAS_REASON \
    (__atomic_load_n(&launch_reasons, __ATOMIC_RELAXED) & (LAUNCH_LOCAL | LAUNCH_GRAPH))

/* Memory nodes cannot be changed, so kernels are all there is to look at. */
#define SET_BODY(symbol, function, kernel, context, ...)        \
    if (LIKELY(!HAS_REASON && real.symbol))                     \
        return real.symbol(__VA_ARGS__);                        \
    NEED_CUDA(symbol);                                          \
    struct process *process = enter();                          \
    struct graph_plan plan = {.process = process, .locals = 0}; \
    if (!process || process->mode != MODE_ON || !nodeParams)    \
        return real.symbol(__VA_ARGS__);                        \
    graph_plan_kernel(&plan, function, kernel, context);        \
    CUresult result = graph_local_begin(&plan);                 \
    if (result != CUDA_SUCCESS)                                 \
        return result;                                          \
    result = CALL_REAL(symbol, __VA_ARGS__);                    \
    if (result == CUDA_SUCCESS)                                 \
        (void)exec_note_local(&plan, hGraphExec);               \
    graph_local_end(&plan, result);                             \
    return result

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                        const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams) {
    SET_BODY(cuGraphExecKernelNodeSetParams, nodeParams->func, NULL, NULL, hGraphExec, hNode,
             nodeParams);
}

CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec hGraphExec, CUgraphNode hNode,
                                           const CUDA_KERNEL_NODE_PARAMS *nodeParams) {
    SET_BODY(cuGraphExecKernelNodeSetParams_v2, nodeParams->func, nodeParams->kern, nodeParams->ctx,
             hGraphExec, hNode, nodeParams);
}

CUresult cuGraphExecNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
                                  CUgraphNodeParams *nodeParams) {
    if (nodeParams && nodeParams->type != CU_GRAPH_NODE_TYPE_KERNEL) {
        NEED_CUDA(cuGraphExecNodeSetParams);
        return real.cuGraphExecNodeSetParams(hGraphExec, hNode, nodeParams);
    }
    SET_BODY(cuGraphExecNodeSetParams, nodeParams->kernel.func, nodeParams->kernel.kern,
             nodeParams->kernel.ctx, hGraphExec, hNode, nodeParams);
}

#define UPDATE_BODY(symbol, ...)                                                      \
    if (LIKELY(!HAS_REASON && real.symbol))                                           \
        return real.symbol(hGraphExec, hGraph, __VA_ARGS__);                          \
    NEED_CUDA(symbol);                                                                \
    struct process *process = enter();                                                \
    if (!process || process->mode != MODE_ON)                                         \
        return real.symbol(hGraphExec, hGraph, __VA_ARGS__);                          \
    CUresult result = CALL_REAL(symbol, hGraphExec, hGraph, __VA_ARGS__);             \
    struct graph_plan plan;                                                           \
    if (result == CUDA_SUCCESS && graph_read(&plan, process, hGraph) == CUDA_SUCCESS) \
        (void)exec_note_local(&plan, hGraphExec);                                     \
    return result

CUresult cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out,
                           CUgraphExecUpdateResult *updateResult_out) {
    UPDATE_BODY(cuGraphExecUpdate, hErrorNode_out, updateResult_out);
}

CUresult cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph,
                              CUgraphExecUpdateResultInfo *resultInfo) {
    UPDATE_BODY(cuGraphExecUpdate_v2, resultInfo);
}
