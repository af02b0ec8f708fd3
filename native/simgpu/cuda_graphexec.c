/* Executable graphs. Local memory is taken when one is instantiated or changed, and again at a
 * launch if the stack limit was lowered in between; graph memory at upload or launch. */
#include "sim_cuda.h"
#include "sim_graph.h"

#include <stdlib.h>
#include <string.h>

struct step {
    const struct cu_node *node; /* its handle, which may be gone */
    CUgraphNodeType type;
    struct cu_function *function;
    CUDA_HOST_NODE_PARAMS host;
    struct galloc *memory;
    bool freed_inside; /* of an allocation */
    bool disabled;
};

struct exec {
    struct cu_obj obj;
    struct step *step;
    size_t n;
    unsigned long long flags;
    uint64_t freed_need[SIM_DEVS]; /* bytes of what it frees itself */
    struct cu_graph *graph;        /* which counts us, if it still lives */
};

static void destroy(void *p) {
    struct exec *e = p;
    for (size_t i = 0; i < e->n; i++)
        if (e->step[i].memory)
            galloc_put(e->step[i].memory);
    if (cu_handle_is(e->graph, K_GRAPH))
        e->graph->execs--;
    free(e->step);
    cu_handle_del(e);
    free(e);
}

static size_t count(const struct cu_graph *g) {
    size_t n = g->n;
    for (size_t i = 0; i < g->n; i++)
        for (size_t j = 0; j < g->node[i]->n_inside; j++)
            n += count(g->node[i]->inside[j]);
    return n;
}

static bool frees(const struct cu_graph *g, const struct galloc *a) {
    for (size_t i = 0; i < g->n; i++) {
        if (g->node[i]->type == CU_GRAPH_NODE_TYPE_MEM_FREE && g->node[i]->memory == a)
            return true;
        for (size_t j = 0; j < g->node[i]->n_inside; j++)
            if (frees(g->node[i]->inside[j], a))
                return true;
    }
    return false;
}

static void flatten(struct exec *e, const struct cu_graph *g, const struct cu_graph *top) {
    for (size_t i = 0; i < g->n; i++) {
        struct cu_node *n = g->node[i];
        struct step *s = &e->step[e->n++];
        *s = (struct step){.node = n, .type = n->type};
        if (n->type == CU_GRAPH_NODE_TYPE_KERNEL)
            s->function = n->function;
        if (n->type == CU_GRAPH_NODE_TYPE_HOST)
            s->host = n->p.host;
        if (n->memory) {
            s->memory = n->memory;
            s->memory->refs++;
            s->freed_inside = n->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && frees(top, n->memory);
        }
        for (size_t j = 0; j < n->n_inside; j++)
            flatten(e, n->inside[j], top);
    }
}

static CUresult need_kernels(const struct exec *e) {
    for (size_t i = 0; i < e->n; i++) {
        struct cu_function *f = e->step[i].function;
        if (!f || e->step[i].disabled)
            continue;
        CU_CHECK(cu_handle_is(f, K_FUNCTION), CUDA_ERROR_INVALID_HANDLE);
        CU_TRY(cu_function_need(f));
    }
    return CUDA_SUCCESS;
}

/* Bytes that an upload or launch has to find; what is live already is there. */
static CUresult need_memory(const struct exec *e) {
    uint64_t need[SIM_DEVS];
    memcpy(need, e->freed_need, sizeof need);
    for (size_t i = 0; i < e->n; i++) {
        const struct step *s = &e->step[i];
        if (s->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && !s->freed_inside && !s->memory->live)
            need[s->memory->dev] += graph_page(s->memory->size);
    }
    for (int dev = 0; dev < cu_ndevs; dev++)
        if (need[dev])
            CU_TRY(graph_reserve(dev, need[dev]));
    return CUDA_SUCCESS;
}

static CUresult instantiate(CUgraphExec *out, CUgraph handle, unsigned long long flags) {
    struct cu_graph *g;
    CU_TRY(graph_find(handle, &g));
    CU_ARG(out && flags < 16);
    bool memory = graph_has_memory(g);
    CU_CHECK(!memory || g->execs == 0, CUDA_ERROR_NOT_SUPPORTED);
    struct exec *e = calloc(1, sizeof *e);
    CU_CHECK(e, CUDA_ERROR_OUT_OF_MEMORY);
    e->obj.destroy = destroy;
    e->flags = flags;
    e->step = calloc(count(g) + 1, sizeof *e->step);
    e->graph = memory ? g : NULL;
    if (!e->step || !cu_handle_add(e, K_EXEC)) {
        free(e->step);
        free(e);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    flatten(e, g, g);
    g->execs += memory;
    CUresult result = graph_footprint(g, e->freed_need);
    if (result == CUDA_SUCCESS)
        result = need_kernels(e);
    if (result == CUDA_SUCCESS && (flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD))
        result = need_memory(e);
    if (result != CUDA_SUCCESS) {
        destroy(e);
        return result;
    }
    *out = (CUgraphExec)e;
    return CUDA_SUCCESS;
}

SIM_API(cuGraphInstantiate,
        (CUgraphExec * out, CUgraph g, CUgraphNode *error, char *log, size_t size),
        (out, g, error, log, size)) {
    if (error)
        *error = NULL;
    if (log && size)
        *log = 0;
    return instantiate(out, g, 0);
}
SIM_TWIN(cuGraphInstantiate_v2, cuGraphInstantiate,
         (CUgraphExec * out, CUgraph g, CUgraphNode *error, char *log, size_t size),
         (out, g, error, log, size))

SIM_API_NEW(cuGraphInstantiateWithFlags, (CUgraphExec * out, CUgraph g, unsigned long long flags),
            (out, g, flags)) {
    CU_ARG(!(flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD));
    return instantiate(out, g, flags);
}

SIM_PAIR_NEW(cuGraphInstantiateWithParams,
             (CUgraphExec * out, CUgraph g, CUDA_GRAPH_INSTANTIATE_PARAMS *p), (out, g, p)) {
    CU_TRY(cu_ready());
    CU_ARG(p);
    p->hErrNode_out = NULL;
    CUresult result = instantiate(out, g, p->flags);
    p->result_out =
        result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
    return result;
}

static CUresult exec(CUgraphExec handle, struct exec **out) {
    CU_TRY(cu_ready());
    CU_ARG(cu_handle_is(handle, K_EXEC));
    *out = (struct exec *)handle;
    return CUDA_SUCCESS;
}

SIM_API(cuGraphExecDestroy, (CUgraphExec handle), (handle)) {
    struct exec *e;
    CU_TRY(exec(handle, &e));
    destroy(e);
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuGraphExecGetFlags, (CUgraphExec handle, cuuint64_t *flags), (handle, flags)) {
    struct exec *e;
    CU_TRY(exec(handle, &e));
    CU_ARG(flags);
    *flags = e->flags;
    return CUDA_SUCCESS;
}

SIM_PAIR(cuGraphUpload, (CUgraphExec handle, CUstream stream), (handle, stream)) {
    struct exec *e;
    struct cu_stream *s;
    CU_TRY(exec(handle, &e));
    CU_TRY(cu_stream(stream, &s));
    return need_memory(e);
}

/* An allocation that the graph does not free must be gone before the next launch. */
static CUresult check_unfreed(struct exec *e) {
    for (size_t i = 0; i < e->n; i++) {
        struct step *s = &e->step[i];
        if (s->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC || s->freed_inside || !s->memory->live)
            continue;
        CU_ARG(e->flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
        galloc_free(s->memory);
    }
    return CUDA_SUCCESS;
}

static void run(struct exec *e) {
    for (size_t i = 0; i < e->n; i++) {
        struct step *s = &e->step[i];
        if (s->disabled)
            continue;
        if (s->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && !s->freed_inside) {
            s->memory->live = true;
            cu_devs[s->memory->dev].graph_live += graph_page(s->memory->size);
        } else if (s->type == CU_GRAPH_NODE_TYPE_MEM_FREE && s->memory->live) {
            galloc_free(s->memory);
        } else if (s->type == CU_GRAPH_NODE_TYPE_KERNEL) {
            cu_count_launch();
        } else if (s->type == CU_GRAPH_NODE_TYPE_HOST && s->host.fn) {
            cu_unlock();
            s->host.fn(s->host.userData);
            cu_lock();
        }
    }
}

SIM_PAIR(cuGraphLaunch, (CUgraphExec handle, CUstream stream), (handle, stream)) {
    struct exec *e;
    struct cu_stream *s;
    struct cu_node *node;
    CU_TRY(exec(handle, &e));
    CU_TRY(cu_enqueue(stream, CU_GRAPH_NODE_TYPE_GRAPH, &s, &node));
    if (node)
        return CUDA_SUCCESS;
    CU_TRY(check_unfreed(e));
    CU_TRY(need_kernels(e));
    CU_TRY(need_memory(e));
    run(e);
    return CUDA_SUCCESS;
}

/* ---- changes ---- */

static CUresult step_of(CUgraphExec handle, CUgraphNode node, CUgraphNodeType type,
                        struct step **out) {
    struct exec *e;
    CU_TRY(exec(handle, &e));
    for (size_t i = 0; i < e->n; i++)
        if (e->step[i].node == (const struct cu_node *)node) {
            CU_ARG(e->step[i].type == type);
            *out = &e->step[i];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult set_kernel(CUgraphExec handle, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p) {
    struct step *s;
    struct cu_function *f;
    CU_TRY(step_of(handle, node, CU_GRAPH_NODE_TYPE_KERNEL, &s));
    CU_TRY(kernel_of(p, &f));
    CU_TRY(cu_function_need(f));
    s->function = f;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuGraphExecKernelNodeSetParams_v2,
            (CUgraphExec e, CUgraphNode n, const CUDA_KERNEL_NODE_PARAMS *p), (e, n, p)) {
    return set_kernel(e, n, p);
}

SIM_API(cuGraphExecKernelNodeSetParams,
        (CUgraphExec e, CUgraphNode n, const CUDA_KERNEL_NODE_PARAMS_v1 *p), (e, n, p)) {
    CUDA_KERNEL_NODE_PARAMS wide = {0};
    CU_TRY(cu_ready());
    CU_ARG(p);
    memcpy(&wide, p, sizeof *p);
    return set_kernel(e, n, &wide);
}

SIM_API(cuGraphExecMemcpyNodeSetParams,
        (CUgraphExec e, CUgraphNode n, const CUDA_MEMCPY3D *p, CUcontext ctx), (e, n, p, ctx)) {
    struct step *s;
    (void)ctx;
    CU_ARG(p);
    return step_of(e, n, CU_GRAPH_NODE_TYPE_MEMCPY, &s);
}

SIM_API(cuGraphExecMemsetNodeSetParams,
        (CUgraphExec e, CUgraphNode n, const CUDA_MEMSET_NODE_PARAMS *p, CUcontext ctx),
        (e, n, p, ctx)) {
    struct step *s;
    (void)ctx;
    CU_ARG(p);
    return step_of(e, n, CU_GRAPH_NODE_TYPE_MEMSET, &s);
}

SIM_API(cuGraphExecHostNodeSetParams,
        (CUgraphExec e, CUgraphNode n, const CUDA_HOST_NODE_PARAMS *p), (e, n, p)) {
    struct step *s;
    CU_ARG(p && p->fn);
    CU_TRY(step_of(e, n, CU_GRAPH_NODE_TYPE_HOST, &s));
    s->host = *p;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuGraphExecNodeSetParams, (CUgraphExec e, CUgraphNode n, CUgraphNodeParams *p),
            (e, n, p)) {
    struct step *s;
    CU_TRY(cu_ready());
    CU_ARG(p);
    if (p->type == CU_GRAPH_NODE_TYPE_KERNEL)
        return set_kernel(e, n, (const CUDA_KERNEL_NODE_PARAMS *)&p->kernel);
    CU_TRY(step_of(e, n, p->type, &s));
    CU_CHECK(!s->memory, CUDA_ERROR_NOT_SUPPORTED);
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuGraphNodeSetEnabled, (CUgraphExec e, CUgraphNode n, unsigned on), (e, n, on)) {
    struct step *s;
    CU_TRY(step_of(e, n, CU_GRAPH_NODE_TYPE_KERNEL, &s));
    s->disabled = !on;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuGraphNodeGetEnabled, (CUgraphExec e, CUgraphNode n, unsigned *on), (e, n, on)) {
    struct step *s;
    CU_TRY(step_of(e, n, CU_GRAPH_NODE_TYPE_KERNEL, &s));
    CU_ARG(on);
    *on = !s->disabled;
    return CUDA_SUCCESS;
}

/* The same topology, in the order of creation; takes nothing before the next launch. */
static CUresult update(CUgraphExec handle, CUgraph graph) {
    struct exec *e;
    struct cu_graph *g;
    CU_TRY(exec(handle, &e));
    CU_TRY(graph_find(graph, &g));
    CU_CHECK(!graph_has_memory(g) && count(g) == e->n, CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
    struct exec fresh = {.step = calloc(e->n + 1, sizeof *fresh.step)};
    CU_CHECK(fresh.step, CUDA_ERROR_OUT_OF_MEMORY);
    flatten(&fresh, g, g);
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < e->n; i++)
        if (fresh.step[i].type != e->step[i].type)
            result = CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    for (size_t i = 0; result == CUDA_SUCCESS && i < e->n; i++) {
        e->step[i].function = fresh.step[i].function;
        e->step[i].host = fresh.step[i].host;
    }
    free(fresh.step);
    return result;
}

SIM_API_NEW(cuGraphExecUpdate_v2, (CUgraphExec e, CUgraph g, CUgraphExecUpdateResultInfo *info),
            (e, g, info)) {
    CUresult result = update(e, g);
    if (info) {
        memset(info, 0, sizeof *info);
        if (result != CUDA_SUCCESS)
            info->result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    }
    return result;
}

SIM_API(cuGraphExecUpdate,
        (CUgraphExec e, CUgraph g, CUgraphNode *node, CUgraphExecUpdateResult *out),
        (e, g, node, out)) {
    CUresult result = update(e, g);
    if (node)
        *node = NULL;
    if (out)
        *out = result == CUDA_SUCCESS ? CU_GRAPH_EXEC_UPDATE_SUCCESS
                                      : CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    return result;
}
