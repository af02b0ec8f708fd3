/* Graphs: nodes and edges. */
#include "sim_cuda.h"
#include "sim_graph.h"

#include <stdlib.h>
#include <string.h>

CUresult graph_find(CUgraph handle, struct cu_graph **out) {
    CU_TRY(cu_ready());
    CU_ARG(cu_handle_is(handle, K_GRAPH));
    *out = (struct cu_graph *)handle;
    return CUDA_SUCCESS;
}

CUresult node_find(CUgraphNode handle, struct cu_node **out) {
    CU_TRY(cu_ready());
    CU_ARG(cu_handle_is(handle, K_NODE));
    *out = (struct cu_node *)handle;
    return CUDA_SUCCESS;
}

/* ---- life ---- */

void node_free(struct cu_node *n) {
    for (size_t i = 0; i < n->n_inside; i++)
        graph_free(n->inside[i]);
    free(n->inside);
    free(n->dep);
    if (n->memory)
        galloc_put(n->memory);
    cu_handle_del(n);
    free(n);
}

static void destroy_graph(void *p) {
    graph_free(p);
}

struct cu_graph *graph_new(void) {
    struct cu_graph *g = calloc(1, sizeof *g);
    if (!g || !cu_handle_add(g, K_GRAPH)) {
        free(g);
        return NULL;
    }
    g->obj.destroy = destroy_graph;
    return g;
}

void graph_free(struct cu_graph *g) {
    for (size_t i = 0; i < g->n; i++)
        node_free(g->node[i]);
    free(g->node);
    cu_handle_del(g);
    free(g);
}

static void destroy_node(void *p) {
    struct cu_node *n = p;
    struct cu_graph *g = n->graph;
    for (size_t i = 0; i < g->n; i++)
        if (g->node[i] == n) {
            memmove(g->node + i, g->node + i + 1, (g->n - i - 1) * sizeof(void *));
            g->n--;
            break;
        }
    for (size_t i = 0; i < g->n; i++) {
        struct cu_node *o = g->node[i];
        size_t kept = 0;
        for (size_t d = 0; d < o->n_deps; d++)
            if (o->dep[d] != n)
                o->dep[kept++] = o->dep[d];
        o->n_deps = kept;
    }
    node_free(n);
}

struct cu_node *node_new(struct cu_graph *g, CUgraphNodeType type, struct cu_node *const *deps,
                         size_t count) {
    if (g->n == g->cap) {
        size_t to = g->cap ? g->cap * 2 : 16;
        struct cu_node **grown = realloc(g->node, to * sizeof *grown);
        if (!grown)
            return NULL;
        g->node = grown;
        g->cap = to;
    }
    struct cu_node *n = calloc(1, sizeof *n);
    struct cu_node **dep = calloc(count + 1, sizeof *dep);
    if (!n || !dep || !cu_handle_add(n, K_NODE)) {
        free(n);
        free(dep);
        return NULL;
    }
    for (size_t i = 0; i < count; i++)
        dep[i] = deps[i];
    n->obj.destroy = destroy_node;
    n->graph = g;
    n->type = type;
    n->dep = dep;
    n->n_deps = count;
    g->node[g->n++] = n;
    return n;
}

CUresult node_add(CUgraphNode *out, CUgraph handle, const CUgraphNode *deps, size_t n,
                  CUgraphNodeType type, struct cu_node **node) {
    struct cu_graph *g;
    CU_TRY(graph_find(handle, &g));
    CU_ARG(out && (n == 0 || deps));
    for (size_t i = 0; i < n; i++)
        CU_ARG(cu_handle_is(deps[i], K_NODE) && ((struct cu_node *)deps[i])->graph == g);
    *node = node_new(g, type, (struct cu_node *const *)deps, n);
    CU_CHECK(*node, CUDA_ERROR_OUT_OF_MEMORY);
    *out = (CUgraphNode)*node;
    return CUDA_SUCCESS;
}

bool graph_has_memory(const struct cu_graph *g) {
    for (size_t i = 0; i < g->n; i++) {
        if (g->node[i]->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC ||
            g->node[i]->type == CU_GRAPH_NODE_TYPE_MEM_FREE)
            return true;
        for (size_t j = 0; j < g->node[i]->n_inside; j++)
            if (graph_has_memory(g->node[i]->inside[j]))
                return true;
    }
    return false;
}

/* Memory nodes are never copied: the callers refuse such graphs first. */
CUresult graph_copy(const struct cu_graph *from, struct cu_graph **out) {
    struct cu_graph *g = graph_new();
    CU_CHECK(g, CUDA_ERROR_OUT_OF_MEMORY);
    for (size_t i = 0; i < from->n; i++) {
        struct cu_node *o = from->node[i], *n = node_new(g, o->type, o->dep, o->n_deps);
        CUresult result = n ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        if (n) {
            n->p = o->p;
            n->function = o->function;
            n->inside = calloc(o->n_inside + 1, sizeof(void *));
        }
        for (size_t j = 0; n && n->inside && j < o->n_inside && result == CUDA_SUCCESS; j++) {
            result = graph_copy(o->inside[j], &n->inside[j]);
            n->n_inside += result == CUDA_SUCCESS;
        }
        /* Dependencies still name the original's nodes. */
        for (size_t d = 0; n && d < n->n_deps; d++)
            for (size_t j = 0; j < i; j++)
                if (from->node[j] == n->dep[d]) {
                    n->dep[d] = g->node[j];
                    break;
                }
        if (result != CUDA_SUCCESS) {
            graph_free(g);
            return result;
        }
    }
    *out = g;
    return CUDA_SUCCESS;
}

static bool search(struct cu_node *n, const struct cu_node *target, uint64_t mark) {
    if (n == target)
        return true;
    if (n->mark == mark)
        return false;
    n->mark = mark;
    for (size_t i = 0; i < n->n_deps; i++)
        if (search(n->dep[i], target, mark))
            return true;
    return false;
}

bool node_after(struct cu_node *later, struct cu_node *earlier) {
    return search(later, earlier, cu_next_id());
}

/* ---- API ---- */

SIM_API(cuGraphCreate, (CUgraph * out, unsigned flags), (out, flags)) {
    CU_TRY(cu_ready());
    CU_ARG(out && flags == 0);
    *out = (CUgraph)graph_new();
    CU_CHECK(*out, CUDA_ERROR_OUT_OF_MEMORY);
    return CUDA_SUCCESS;
}

SIM_API(cuGraphDestroy, (CUgraph handle), (handle)) {
    struct cu_graph *g;
    CU_TRY(graph_find(handle, &g));
    CU_ARG(!g->child);
    graph_free(g);
    return CUDA_SUCCESS;
}

SIM_API(cuGraphDestroyNode, (CUgraphNode handle), (handle)) {
    struct cu_node *n;
    CU_TRY(node_find(handle, &n));
    CU_CHECK(n->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC && n->type != CU_GRAPH_NODE_TYPE_MEM_FREE,
             CUDA_ERROR_NOT_SUPPORTED);
    destroy_node(n);
    return CUDA_SUCCESS;
}

SIM_API(cuGraphClone, (CUgraph * out, CUgraph handle), (out, handle)) {
    struct cu_graph *g, *copy;
    CU_TRY(graph_find(handle, &g));
    CU_ARG(out);
    CU_CHECK(!graph_has_memory(g), CUDA_ERROR_NOT_SUPPORTED);
    CU_TRY(graph_copy(g, &copy));
    *out = (CUgraph)copy;
    return CUDA_SUCCESS;
}

SIM_API(cuGraphNodeGetType, (CUgraphNode handle, CUgraphNodeType *type), (handle, type)) {
    struct cu_node *n;
    CU_TRY(node_find(handle, &n));
    CU_ARG(type);
    *type = n->type;
    return CUDA_SUCCESS;
}

/* Lists come as (array or NULL, count in and out). */
static CUresult put(CUgraphNode *out, size_t room, size_t *n, struct cu_node *node) {
    if (out && *n < room)
        out[*n] = (CUgraphNode)node;
    ++*n;
    return CUDA_SUCCESS;
}

static CUresult list(CUgraph handle, CUgraphNode *out, size_t *count, bool roots) {
    struct cu_graph *g;
    size_t n = 0;
    CU_TRY(graph_find(handle, &g));
    CU_ARG(count);
    for (size_t i = 0; i < g->n; i++)
        if (!roots || g->node[i]->n_deps == 0)
            put(out, *count, &n, g->node[i]);
    for (size_t i = n; out && i < *count; i++)
        out[i] = NULL;
    *count = n;
    return CUDA_SUCCESS;
}

SIM_API(cuGraphGetNodes, (CUgraph graph, CUgraphNode *out, size_t *count), (graph, out, count)) {
    return list(graph, out, count, false);
}

SIM_API(cuGraphGetRootNodes, (CUgraph graph, CUgraphNode *out, size_t *count),
        (graph, out, count)) {
    return list(graph, out, count, true);
}

static CUresult edges(CUgraph handle, CUgraphNode *from, CUgraphNode *to, size_t *count) {
    struct cu_graph *g;
    size_t n = 0;
    CU_TRY(graph_find(handle, &g));
    CU_ARG(count && !from == !to);
    for (size_t i = 0; i < g->n; i++)
        for (size_t d = 0; d < g->node[i]->n_deps; d++, n++)
            if (from && n < *count) {
                from[n] = (CUgraphNode)g->node[i]->dep[d];
                to[n] = (CUgraphNode)g->node[i];
            }
    *count = n;
    return CUDA_SUCCESS;
}

SIM_API(cuGraphGetEdges, (CUgraph g, CUgraphNode *from, CUgraphNode *to, size_t *count),
        (g, from, to, count)) {
    return edges(g, from, to, count);
}

SIM_API_NEW(cuGraphGetEdges_v2,
            (CUgraph g, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data, size_t *count),
            (g, from, to, data, count)) {
    CU_ARG(count);
    if (data)
        memset(data, 0, *count * sizeof *data);
    return edges(g, from, to, count);
}

static CUresult dependencies(CUgraphNode handle, CUgraphNode *out, size_t *count) {
    struct cu_node *node;
    size_t n = 0;
    CU_TRY(node_find(handle, &node));
    CU_ARG(count);
    for (size_t i = 0; i < node->n_deps; i++)
        put(out, *count, &n, node->dep[i]);
    *count = n;
    return CUDA_SUCCESS;
}

static CUresult dependents(CUgraphNode handle, CUgraphNode *out, size_t *count) {
    struct cu_node *node;
    size_t n = 0;
    CU_TRY(node_find(handle, &node));
    CU_ARG(count);
    for (size_t i = 0; i < node->graph->n; i++)
        for (size_t d = 0; d < node->graph->node[i]->n_deps; d++)
            if (node->graph->node[i]->dep[d] == node)
                put(out, *count, &n, node->graph->node[i]);
    *count = n;
    return CUDA_SUCCESS;
}

SIM_API(cuGraphNodeGetDependencies, (CUgraphNode n, CUgraphNode *out, size_t *count),
        (n, out, count)) {
    return dependencies(n, out, count);
}

SIM_API_NEW(cuGraphNodeGetDependencies_v2,
            (CUgraphNode n, CUgraphNode *out, CUgraphEdgeData *data, size_t *count),
            (n, out, data, count)) {
    (void)data;
    return dependencies(n, out, count);
}

SIM_API(cuGraphNodeGetDependentNodes, (CUgraphNode n, CUgraphNode *out, size_t *count),
        (n, out, count)) {
    return dependents(n, out, count);
}

SIM_API_NEW(cuGraphNodeGetDependentNodes_v2,
            (CUgraphNode n, CUgraphNode *out, CUgraphEdgeData *data, size_t *count),
            (n, out, data, count)) {
    (void)data;
    return dependents(n, out, count);
}

static CUresult link_nodes(CUgraph handle, const CUgraphNode *from, const CUgraphNode *to, size_t n,
                           bool add) {
    struct cu_graph *g;
    CU_TRY(graph_find(handle, &g));
    CU_ARG(n == 0 || (from && to));
    for (size_t i = 0; i < n; i++) {
        struct cu_node *a, *b;
        CU_TRY(node_find(from[i], &a));
        CU_TRY(node_find(to[i], &b));
        CU_ARG(a->graph == g && b->graph == g && a != b);
        size_t at = 0;
        while (at < b->n_deps && b->dep[at] != a)
            at++;
        CU_ARG(add == (at == b->n_deps));
        if (!add) {
            b->dep[at] = b->dep[--b->n_deps];
            continue;
        }
        struct cu_node **grown = realloc(b->dep, (b->n_deps + 1) * sizeof *grown);
        CU_CHECK(grown, CUDA_ERROR_OUT_OF_MEMORY);
        b->dep = grown;
        b->dep[b->n_deps++] = a;
    }
    return CUDA_SUCCESS;
}

SIM_API(cuGraphAddDependencies,
        (CUgraph g, const CUgraphNode *from, const CUgraphNode *to, size_t n), (g, from, to, n)) {
    return link_nodes(g, from, to, n, true);
}

SIM_API_NEW(cuGraphAddDependencies_v2,
            (CUgraph g, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *data,
             size_t n),
            (g, from, to, data, n)) {
    (void)data;
    return link_nodes(g, from, to, n, true);
}

SIM_API(cuGraphRemoveDependencies,
        (CUgraph g, const CUgraphNode *from, const CUgraphNode *to, size_t n), (g, from, to, n)) {
    return link_nodes(g, from, to, n, false);
}

SIM_API_NEW(cuGraphRemoveDependencies_v2,
            (CUgraph g, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *data,
             size_t n),
            (g, from, to, data, n)) {
    (void)data;
    return link_nodes(g, from, to, n, false);
}
