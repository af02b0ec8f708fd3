/* Graph nodes by kind: adding, reading, changing. */
#include "sim_cuda.h"
#include "sim_graph.h"

#include <stdlib.h>
#include <string.h>

/* ---- kernels ---- */

CUresult kernel_of(const CUDA_KERNEL_NODE_PARAMS *p, struct cu_function **out) {
    struct cu_ctx *ctx;
    CU_ARG(p && (p->func || p->kern) && !(p->kernelParams && p->extra));
    CU_ARG(p->gridDimX && p->gridDimY && p->gridDimZ && p->blockDimX && p->blockDimY &&
           p->blockDimZ);
    if (p->func && cu_handle_is(p->func, K_FUNCTION)) {
        *out = (struct cu_function *)p->func;
        return CUDA_SUCCESS;
    }
    CU_TRY(p->ctx ? cu_ctx_pick(p->ctx, &ctx) : cu_current(&ctx));
    return cu_function_of(p->func ? (void *)p->func : (void *)p->kern, ctx, out);
}

void node_set_function(struct cu_node *n, struct cu_function *f) {
    n->function = f;
    n->p.kernel.func = (CUfunction)f;
}

static CUresult set_kernel(struct cu_node *n, const CUDA_KERNEL_NODE_PARAMS *p) {
    struct cu_function *f;
    CU_TRY(kernel_of(p, &f));
    n->p.kernel = *p;
    n->function = f;
    return CUDA_SUCCESS;
}

static CUresult add_kernel(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t n,
                           const CUDA_KERNEL_NODE_PARAMS *p) {
    struct cu_node *node;
    struct cu_function *f;
    CU_TRY(cu_ready());
    CU_TRY(kernel_of(p, &f));
    CU_TRY(node_add(out, g, deps, n, CU_GRAPH_NODE_TYPE_KERNEL, &node));
    return set_kernel(node, p);
}

static CUDA_KERNEL_NODE_PARAMS widen(const CUDA_KERNEL_NODE_PARAMS_v1 *p) {
    CUDA_KERNEL_NODE_PARAMS wide = {0};
    memcpy(&wide, p, sizeof *p); /* the newer struct starts with the older one */
    return wide;
}

SIM_API_NEW(cuGraphAddKernelNode_v2,
            (CUgraphNode * out, CUgraph g, const CUgraphNode *deps, size_t n,
             const CUDA_KERNEL_NODE_PARAMS *p),
            (out, g, deps, n, p)) {
    return add_kernel(out, g, deps, n, p);
}

SIM_API(cuGraphAddKernelNode,
        (CUgraphNode * out, CUgraph g, const CUgraphNode *deps, size_t n,
         const CUDA_KERNEL_NODE_PARAMS_v1 *p),
        (out, g, deps, n, p)) {
    CU_TRY(cu_ready());
    CU_ARG(p);
    CUDA_KERNEL_NODE_PARAMS wide = widen(p);
    return add_kernel(out, g, deps, n, &wide);
}

static CUresult typed(CUgraphNode handle, CUgraphNodeType type, struct cu_node **out) {
    CU_TRY(node_find(handle, out));
    CU_ARG((*out)->type == type);
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuGraphKernelNodeGetParams_v2, (CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS *p),
            (handle, p)) {
    struct cu_node *n;
    CU_TRY(typed(handle, CU_GRAPH_NODE_TYPE_KERNEL, &n));
    CU_ARG(p);
    *p = n->p.kernel;
    return CUDA_SUCCESS;
}

SIM_API(cuGraphKernelNodeGetParams, (CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS_v1 *p),
        (handle, p)) {
    struct cu_node *n;
    CU_TRY(typed(handle, CU_GRAPH_NODE_TYPE_KERNEL, &n));
    CU_ARG(p);
    memcpy(p, &n->p.kernel, sizeof *p);
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuGraphKernelNodeSetParams_v2, (CUgraphNode handle, const CUDA_KERNEL_NODE_PARAMS *p),
            (handle, p)) {
    struct cu_node *n;
    CU_TRY(typed(handle, CU_GRAPH_NODE_TYPE_KERNEL, &n));
    return set_kernel(n, p);
}

SIM_API(cuGraphKernelNodeSetParams, (CUgraphNode handle, const CUDA_KERNEL_NODE_PARAMS_v1 *p),
        (handle, p)) {
    struct cu_node *n;
    CU_TRY(typed(handle, CU_GRAPH_NODE_TYPE_KERNEL, &n));
    CU_ARG(p);
    CUDA_KERNEL_NODE_PARAMS wide = widen(p);
    return set_kernel(n, &wide);
}

/* ---- nodes that take no memory ---- */

#define PLAIN(name, kind, type, field)                                                       \
    SIM_API(name,                                                                            \
            (CUgraphNode * out, CUgraph g, const CUgraphNode *deps, size_t n, const type *p, \
             CUcontext ctx),                                                                 \
            (out, g, deps, n, p, ctx)) {                                                     \
        struct cu_node *node;                                                                \
        struct cu_ctx *c;                                                                    \
        CU_TRY(cu_ready());                                                                  \
        CU_ARG(p);                                                                           \
        CU_TRY(cu_ctx_pick(ctx, &c));                                                        \
        CU_TRY(node_add(out, g, deps, n, kind, &node));                                      \
        node->p.field = *p;                                                                  \
        return CUDA_SUCCESS;                                                                 \
    }
PLAIN(cuGraphAddMemcpyNode, CU_GRAPH_NODE_TYPE_MEMCPY, CUDA_MEMCPY3D, memcpy)
PLAIN(cuGraphAddMemsetNode, CU_GRAPH_NODE_TYPE_MEMSET, CUDA_MEMSET_NODE_PARAMS, memset)

SIM_API(cuGraphAddHostNode,
        (CUgraphNode * out, CUgraph g, const CUgraphNode *deps, size_t n,
         const CUDA_HOST_NODE_PARAMS *p),
        (out, g, deps, n, p)) {
    struct cu_node *node;
    CU_TRY(cu_ready());
    CU_ARG(p && p->fn);
    CU_TRY(node_add(out, g, deps, n, CU_GRAPH_NODE_TYPE_HOST, &node));
    node->p.host = *p;
    return CUDA_SUCCESS;
}

SIM_API(cuGraphAddEmptyNode, (CUgraphNode * out, CUgraph g, const CUgraphNode *deps, size_t n),
        (out, g, deps, n)) {
    struct cu_node *node;
    return node_add(out, g, deps, n, CU_GRAPH_NODE_TYPE_EMPTY, &node);
}

#define GET_SET(get, set, kind, type, field)                         \
    SIM_API(get, (CUgraphNode handle, type * p), (handle, p)) {      \
        struct cu_node *n;                                           \
        CU_TRY(typed(handle, kind, &n));                             \
        CU_ARG(p);                                                   \
        *p = n->p.field;                                             \
        return CUDA_SUCCESS;                                         \
    }                                                                \
    SIM_API(set, (CUgraphNode handle, const type *p), (handle, p)) { \
        struct cu_node *n;                                           \
        CU_TRY(typed(handle, kind, &n));                             \
        CU_ARG(p);                                                   \
        n->p.field = *p;                                             \
        return CUDA_SUCCESS;                                         \
    }
GET_SET(cuGraphMemcpyNodeGetParams, cuGraphMemcpyNodeSetParams, CU_GRAPH_NODE_TYPE_MEMCPY,
        CUDA_MEMCPY3D, memcpy)
GET_SET(cuGraphMemsetNodeGetParams, cuGraphMemsetNodeSetParams, CU_GRAPH_NODE_TYPE_MEMSET,
        CUDA_MEMSET_NODE_PARAMS, memset)
GET_SET(cuGraphHostNodeGetParams, cuGraphHostNodeSetParams, CU_GRAPH_NODE_TYPE_HOST,
        CUDA_HOST_NODE_PARAMS, host)

#define EVENT_NODE(api, add, get, set, kind)                                                   \
    api(add, (CUgraphNode * out, CUgraph g, const CUgraphNode *deps, size_t n, CUevent event), \
        (out, g, deps, n, event)) {                                                            \
        struct cu_node *node;                                                                  \
        CU_TRY(cu_ready());                                                                    \
        CU_CHECK(cu_handle_is(event, K_EVENT), CUDA_ERROR_INVALID_HANDLE);                     \
        CU_TRY(node_add(out, g, deps, n, kind, &node));                                        \
        node->p.event = event;                                                                 \
        return CUDA_SUCCESS;                                                                   \
    }                                                                                          \
    api(get, (CUgraphNode handle, CUevent * event), (handle, event)) {                         \
        struct cu_node *n;                                                                     \
        CU_TRY(typed(handle, kind, &n));                                                       \
        CU_ARG(event);                                                                         \
        *event = n->p.event;                                                                   \
        return CUDA_SUCCESS;                                                                   \
    }                                                                                          \
    api(set, (CUgraphNode handle, CUevent event), (handle, event)) {                           \
        struct cu_node *n;                                                                     \
        CU_TRY(typed(handle, kind, &n));                                                       \
        CU_CHECK(cu_handle_is(event, K_EVENT), CUDA_ERROR_INVALID_HANDLE);                     \
        n->p.event = event;                                                                    \
        return CUDA_SUCCESS;                                                                   \
    }
EVENT_NODE(SIM_API, cuGraphAddEventRecordNode, cuGraphEventRecordNodeGetEvent,
           cuGraphEventRecordNodeSetEvent, CU_GRAPH_NODE_TYPE_EVENT_RECORD)
EVENT_NODE(SIM_API, cuGraphAddEventWaitNode, cuGraphEventWaitNodeGetEvent,
           cuGraphEventWaitNodeSetEvent, CU_GRAPH_NODE_TYPE_WAIT_EVENT)

/* ---- child graphs ---- */

/* A graph with memory nodes can be moved into the parent, but not copied. */
static CUresult add_child(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t n,
                          CUgraph child, bool move) {
    struct cu_graph *from, *copy;
    struct cu_node *node;
    CU_TRY(graph_find(child, &from));
    CU_ARG(child != g && !from->child);
    CU_CHECK(move || !graph_has_memory(from), CUDA_ERROR_NOT_SUPPORTED);
    CU_TRY(node_add(out, g, deps, n, CU_GRAPH_NODE_TYPE_GRAPH, &node));
    node->inside = calloc(1, sizeof(void *));
    CU_CHECK(node->inside, CUDA_ERROR_OUT_OF_MEMORY);
    copy = from;
    if (!move)
        CU_TRY(graph_copy(from, &copy));
    copy->child = true;
    node->inside[0] = copy;
    node->n_inside = 1;
    return CUDA_SUCCESS;
}

SIM_API(cuGraphAddChildGraphNode,
        (CUgraphNode * out, CUgraph g, const CUgraphNode *deps, size_t n, CUgraph child),
        (out, g, deps, n, child)) {
    return add_child(out, g, deps, n, child, false);
}

SIM_API(cuGraphChildGraphNodeGetGraph, (CUgraphNode handle, CUgraph *out), (handle, out)) {
    struct cu_node *n;
    CU_TRY(typed(handle, CU_GRAPH_NODE_TYPE_GRAPH, &n));
    CU_ARG(out);
    *out = (CUgraph)n->inside[0];
    return CUDA_SUCCESS;
}

/* ---- any kind ---- */

SIM_API_NEW(cuGraphConditionalHandleCreate,
            (CUgraphConditionalHandle * out, CUgraph handle, CUcontext ctx, unsigned value,
             unsigned flags),
            (out, handle, ctx, value, flags)) {
    struct cu_graph *g;
    (void)ctx, (void)value, (void)flags;
    CU_TRY(graph_find(handle, &g));
    CU_ARG(out);
    *out = cu_next_id();
    return CUDA_SUCCESS;
}

static CUresult add_conditional(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t n,
                                CUDA_CONDITIONAL_NODE_PARAMS *p) {
    struct cu_node *node;
    CU_ARG(p->handle && p->size >= 1 && p->size <= 64);
    CU_TRY(node_add(out, g, deps, n, CU_GRAPH_NODE_TYPE_CONDITIONAL, &node));
    node->inside = calloc(p->size, sizeof(void *));
    CU_CHECK(node->inside, CUDA_ERROR_OUT_OF_MEMORY);
    for (unsigned i = 0; i < p->size; i++) {
        node->inside[i] = graph_new();
        CU_CHECK(node->inside[i], CUDA_ERROR_OUT_OF_MEMORY);
        node->inside[i]->child = true;
        node->n_inside++;
    }
    p->phGraph_out = (CUgraph *)node->inside;
    return CUDA_SUCCESS;
}

static CUresult add_any(CUgraphNode *out, CUgraph g, const CUgraphNode *deps, size_t n,
                        CUgraphNodeParams *p) {
    struct cu_node *node;
    CU_TRY(cu_ready());
    CU_ARG(p);
    switch (p->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return add_kernel(out, g, deps, n, (const CUDA_KERNEL_NODE_PARAMS *)&p->kernel);
    case CU_GRAPH_NODE_TYPE_GRAPH:
        return add_child(out, g, deps, n, p->graph.graph,
                         p->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        CU_ARG(p->alloc.poolProps.location.type == CU_MEM_LOCATION_TYPE_DEVICE);
        CU_ARG(p->alloc.bytesize);
        CU_TRY(node_add(out, g, deps, n, p->type, &node));
        memcpy(&node->p.alloc, &p->alloc, sizeof node->p.alloc);
        CU_TRY(graph_alloc_node(node, p->alloc.bytesize, p->alloc.poolProps.location.id,
                                &p->alloc.dptr));
        node->p.alloc.dptr = p->alloc.dptr;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        CU_TRY(node_add(out, g, deps, n, p->type, &node));
        return graph_free_node(node, p->free.dptr);
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
        return add_conditional(out, g, deps, n, &p->conditional);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        CU_TRY(node_add(out, g, deps, n, p->type, &node));
        node->p.memcpy = p->memcpy.copyParams;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_HOST:
        CU_ARG(p->host.fn);
        /* fall through */
    default:
        CU_ARG(p->type <= CU_GRAPH_NODE_TYPE_BATCH_MEM_OP);
        return node_add(out, g, deps, n, p->type, &node);
    }
}

SIM_API_NEW(cuGraphAddNode,
            (CUgraphNode * out, CUgraph g, const CUgraphNode *deps, size_t n, CUgraphNodeParams *p),
            (out, g, deps, n, p)) {
    return add_any(out, g, deps, n, p);
}

SIM_API_NEW(cuGraphAddNode_v2,
            (CUgraphNode * out, CUgraph g, const CUgraphNode *deps, const CUgraphEdgeData *edges,
             size_t n, CUgraphNodeParams *p),
            (out, g, deps, edges, n, p)) {
    (void)edges;
    return add_any(out, g, deps, n, p);
}

SIM_API_NEW(cuGraphNodeSetParams, (CUgraphNode handle, CUgraphNodeParams *p), (handle, p)) {
    struct cu_node *n;
    CU_TRY(node_find(handle, &n));
    CU_ARG(p && p->type == n->type);
    if (n->type == CU_GRAPH_NODE_TYPE_KERNEL)
        return set_kernel(n, (const CUDA_KERNEL_NODE_PARAMS *)&p->kernel);
    CU_CHECK(n->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC && n->type != CU_GRAPH_NODE_TYPE_MEM_FREE,
             CUDA_ERROR_NOT_SUPPORTED);
    return CUDA_SUCCESS;
}
