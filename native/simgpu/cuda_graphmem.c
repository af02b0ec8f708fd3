/* Memory nodes. Nothing is taken until an executable is uploaded or launched; then the device's
 * graph memory grows in 32 MiB steps, and only cuDeviceGraphMemTrim gives it back. Allocations
 * that a graph frees itself share their bytes with those of other graphs. */
#include "sim_cuda.h"
#include "sim_graph.h"

#include <stdlib.h>
#include <string.h>

#define OWN_PAGES (128 * SIM_MIB) /* from here on an allocation shares no page */

size_t graph_page(size_t bytes) {
    return (bytes + GRAPH_PAGE - 1) / GRAPH_PAGE * GRAPH_PAGE;
}

void galloc_put(struct galloc *a) {
    if (--a->refs > 0 || a->live)
        return;
    cu_rec_free(a->rec);
    free(a);
}

/* The address is given up; the bytes stay with the device's graph memory. */
void galloc_free(struct galloc *a) {
    a->live = false;
    cu_devs[a->dev].graph_live -= graph_page(a->size);
    if (a->refs == 0) {
        cu_rec_free(a->rec);
        free(a);
    }
}

CUresult graph_alloc_node(struct cu_node *n, size_t bytes, int dev, CUdeviceptr *out) {
    struct cu_device *d;
    CU_TRY(cu_device_of(dev, &d));
    CU_ARG(bytes);
    struct galloc *a = calloc(1, sizeof *a);
    struct cu_rec *rec = cu_rec_new(R_GRAPH, d->dom, bytes);
    if (!a || !rec || !va_take(rec, bytes)) {
        free(a);
        free(rec);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *a = (struct galloc){.rec = rec, .size = bytes, .dev = dev, .refs = 1};
    rec->data = a;
    n->memory = a;
    n->p.alloc.bytesize = bytes;
    n->p.alloc.dptr = rec->base;
    n->p.alloc.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    n->p.alloc.poolProps.location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = dev};
    *out = rec->base;
    return CUDA_SUCCESS;
}

CUresult graph_free_node(struct cu_node *n, CUdeviceptr p) {
    struct cu_rec *rec = va_find(p);
    CU_ARG(rec && rec->kind == R_GRAPH && rec->base == p);
    n->p.free = p;
    n->memory = rec->data;
    n->memory->refs++;
    return CUDA_SUCCESS;
}

CUresult graph_ptr_free(struct cu_rec *rec) {
    struct galloc *a = rec->data;
    CU_ARG(a->live);
    galloc_free(a);
    return CUDA_SUCCESS;
}

bool graph_ptr_live(const struct cu_rec *rec) {
    return ((struct galloc *)rec->data)->live;
}

/* ---- what an executable takes ---- */

static struct cu_node *freed_by(const struct cu_graph *g, const struct galloc *a) {
    for (size_t i = 0; i < g->n; i++)
        if (g->node[i]->type == CU_GRAPH_NODE_TYPE_MEM_FREE && g->node[i]->memory == a)
            return g->node[i];
    return NULL;
}

struct place {
    struct cu_node *alloc, *freed;
    size_t size;
    bool taken; /* its pages have been handed on */
};

/* A later allocation takes the place of one whose free it depends on, if that is large enough;
 * measured for 200 and 300 MiB in both orders, and for many small ones. */
static size_t place(struct place *done, size_t n, struct place *p, size_t *packed) {
    size_t live = p->size;
    for (size_t i = 0; i < n; i++) {
        bool over = node_after(p->alloc, done[i].freed);
        if (p->size >= OWN_PAGES) {
            if (over && !done[i].taken && done[i].size >= OWN_PAGES &&
                graph_page(done[i].size) >= graph_page(p->size)) {
                done[i].taken = true;
                p->size = done[i].size;
                return 0;
            }
        } else if (!over && done[i].size < OWN_PAGES) {
            live += done[i].size;
        }
    }
    if (p->size >= OWN_PAGES)
        return graph_page(p->size);
    if (live > *packed)
        *packed = live;
    return 0;
}

CUresult graph_footprint(struct cu_graph *g, uint64_t *per_dev) {
    struct place *done = calloc(g->n + 1, sizeof *done);
    CU_CHECK(done, CUDA_ERROR_OUT_OF_MEMORY);
    for (int dev = 0; dev < cu_ndevs; dev++) {
        size_t n = 0, packed = 0;
        for (size_t i = 0; i < g->n; i++) {
            struct cu_node *a = g->node[i];
            if (a->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC || a->memory->dev != dev)
                continue;
            struct cu_node *f = freed_by(g, a->memory);
            if (!f)
                continue;
            done[n] = (struct place){a, f, a->memory->size, false};
            per_dev[dev] += place(done, n, &done[n], &packed);
            n++;
        }
        per_dev[dev] += graph_page(packed);
    }
    free(done);
    for (size_t i = 0; i < g->n; i++)
        for (size_t j = 0; j < g->node[i]->n_inside; j++)
            CU_TRY(graph_footprint(g->node[i]->inside[j], per_dev));
    return CUDA_SUCCESS;
}

/* Makes sure that `need` bytes are there beside the live ones. */
CUresult graph_reserve(int dev, uint64_t need) {
    struct cu_device *d = &cu_devs[dev];
    uint64_t want = d->graph_live + need;
    if (want > d->graph_reserved) {
        CU_CHECK(cu_take(d->dom, want - d->graph_reserved), CUDA_ERROR_OUT_OF_MEMORY);
        d->graph_reserved = want;
    }
    if (d->graph_reserved > d->graph_high)
        d->graph_high = d->graph_reserved;
    return CUDA_SUCCESS;
}

/* ---- API ---- */

SIM_API_NEW(cuGraphAddMemAllocNode,
            (CUgraphNode * out, CUgraph g, const CUgraphNode *deps, size_t n,
             CUDA_MEM_ALLOC_NODE_PARAMS *p),
            (out, g, deps, n, p)) {
    struct cu_node *node;
    CU_TRY(cu_ready());
    CU_ARG(p && p->bytesize && p->poolProps.allocType == CU_MEM_ALLOCATION_TYPE_PINNED &&
           p->poolProps.location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
           p->poolProps.handleTypes == CU_MEM_HANDLE_TYPE_NONE);
    CU_CHECK(p->poolProps.location.id >= 0 && p->poolProps.location.id < cu_ndevs,
             CUDA_ERROR_INVALID_DEVICE);
    CU_TRY(node_add(out, g, deps, n, CU_GRAPH_NODE_TYPE_MEM_ALLOC, &node));
    node->p.alloc = *p;
    return graph_alloc_node(node, p->bytesize, p->poolProps.location.id, &p->dptr);
}

SIM_API_NEW(cuGraphMemAllocNodeGetParams, (CUgraphNode handle, CUDA_MEM_ALLOC_NODE_PARAMS *p),
            (handle, p)) {
    struct cu_node *n;
    CU_TRY(node_find(handle, &n));
    CU_ARG(p && n->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC);
    *p = n->p.alloc;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuGraphAddMemFreeNode,
            (CUgraphNode * out, CUgraph g, const CUgraphNode *deps, size_t n, CUdeviceptr p),
            (out, g, deps, n, p)) {
    struct cu_node *node;
    CU_TRY(cu_ready());
    struct cu_rec *rec = va_find(p);
    CU_ARG(rec && rec->kind == R_GRAPH && rec->base == p);
    CU_TRY(node_add(out, g, deps, n, CU_GRAPH_NODE_TYPE_MEM_FREE, &node));
    return graph_free_node(node, p);
}

SIM_API_NEW(cuGraphMemFreeNodeGetParams, (CUgraphNode handle, CUdeviceptr *p), (handle, p)) {
    struct cu_node *n;
    CU_TRY(node_find(handle, &n));
    CU_ARG(p && n->type == CU_GRAPH_NODE_TYPE_MEM_FREE);
    *p = n->p.free;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuDeviceGraphMemTrim, (CUdevice dev), (dev)) {
    struct cu_device *d;
    CU_TRY(cu_device_of(dev, &d));
    sim_give(d->dom, d->graph_reserved - d->graph_live);
    d->graph_reserved = d->graph_live;
    return CUDA_SUCCESS;
}

/* Measured: the used figure stays with the reserved one until the memory is trimmed. */
SIM_API_NEW(cuDeviceGetGraphMemAttribute, (CUdevice dev, CUgraphMem_attribute attr, void *value),
            (dev, attr, value)) {
    struct cu_device *d;
    CU_TRY(cu_device_of(dev, &d));
    CU_ARG(value && attr <= CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH);
    bool high =
        attr == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH || attr == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH;
    *(cuuint64_t *)value = high ? d->graph_high : d->graph_reserved;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuDeviceSetGraphMemAttribute, (CUdevice dev, CUgraphMem_attribute attr, void *value),
            (dev, attr, value)) {
    struct cu_device *d;
    CU_TRY(cu_device_of(dev, &d));
    CU_ARG(
        value && *(cuuint64_t *)value == 0 &&
        (attr == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH || attr == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH));
    d->graph_high = d->graph_reserved;
    return CUDA_SUCCESS;
}
