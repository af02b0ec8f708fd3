/* The API of pools: making, attributes, sharing, and allocation in stream order. */
#include "sim_cuda.h"
#include "sim_pool.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct cu_pool *all;

struct cu_pool *pool_list(void) {
    return all;
}

void pool_unregister(struct cu_pool *p) {
    for (struct cu_pool **at = &all; *at; at = &(*at)->next)
        if (*at == p) {
            *at = p->next;
            break;
        }
    cu_handle_del(p);
}

static struct cu_pool *pool_new(int dev, uint32_t dom) {
    struct cu_pool *p = calloc(1, sizeof *p);
    if (!p || !cu_handle_add(p, K_POOL)) {
        free(p);
        return NULL;
    }
    p->dev = dev;
    p->dom = dom;
    p->shared = -1;
    p->location = CU_MEM_LOCATION_TYPE_DEVICE;
    p->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    for (int i = 0; i < 3; i++)
        p->reuse[i] = 1;
    p->next = all;
    all = p;
    return p;
}

CUresult pool_default(int dev, struct cu_pool **out) {
    struct cu_device *d = &cu_devs[dev];
    if (!d->default_pool) {
        d->default_pool = pool_new(dev, d->dom);
        CU_CHECK(d->default_pool, CUDA_ERROR_OUT_OF_MEMORY);
        d->default_pool->is_default = true;
    }
    *out = d->default_pool;
    return CUDA_SUCCESS;
}

static CUresult current_pool(int dev, struct cu_pool **out) {
    if (cu_devs[dev].current_pool) {
        *out = cu_devs[dev].current_pool;
        return CUDA_SUCCESS;
    }
    return pool_default(dev, out);
}

static CUresult pool(CUmemoryPool handle, struct cu_pool **out) {
    CU_TRY(cu_ready());
    *out = (struct cu_pool *)handle;
    CU_ARG(cu_handle_is(handle, K_POOL) && !(*out)->destroyed);
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuMemPoolCreate, (CUmemoryPool * out, const CUmemPoolProps *props), (out, props)) {
    CU_TRY(cu_ready());
    CU_ARG(out && props);
    CU_ARG(props->allocType == CU_MEM_ALLOCATION_TYPE_PINNED ||
           props->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED);
    CU_TRY(cu_unsafe());
    bool device = props->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    int dev = device ? props->location.id : 0;
    struct cu_device *d;
    CU_ARG(props->location.type >= CU_MEM_LOCATION_TYPE_DEVICE &&
           props->location.type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT);
    CU_TRY(cu_device_of(dev, &d));
    struct cu_pool *p = pool_new(dev, d->dom);
    CU_CHECK(p, CUDA_ERROR_OUT_OF_MEMORY);
    p->type = props->allocType;
    /* Managed pages are no device memory until touched, which a pool of them never is here. */
    p->location = p->type == CU_MEM_ALLOCATION_TYPE_MANAGED ? CU_MEM_LOCATION_TYPE_HOST
                                                            : (int)props->location.type;
    p->handles = props->handleTypes;
    p->max = (props->maxSize + POOL_PAGE - 1) / POOL_PAGE * POOL_PAGE;
    *out = (CUmemoryPool)p;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuMemPoolDestroy, (CUmemoryPool handle), (handle)) {
    struct cu_pool *p;
    CU_TRY(pool(handle, &p));
    CU_ARG(!p->is_default);
    for (int i = 0; i < cu_ndevs; i++)
        if (cu_devs[i].current_pool == p)
            cu_devs[i].current_pool = NULL;
    p->destroyed = true;
    /* Measured: what was freed in a stream that is not done stays until it is. */
    if (p->live == 0 && !p->n_freed_on && !p->freed_on_many)
        pool_end(p);
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuMemPoolTrimTo, (CUmemoryPool handle, size_t keep), (handle, keep)) {
    struct cu_pool *p;
    CU_TRY(pool(handle, &p));
    CU_ARG(!p->imported);
    CU_TRY(cu_unsafe());
    pool_trim(p, keep);
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuMemPoolGetAttribute, (CUmemoryPool handle, CUmemPool_attribute attr, void *value),
            (handle, attr, value)) {
    struct cu_pool *p;
    CU_TRY(pool(handle, &p));
    CU_ARG(value && !p->imported);
    CU_TRY(cu_unsafe());
    switch (attr) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        *(int *)value = p->reuse[attr - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES];
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        *(cuuint64_t *)value = p->threshold;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        *(cuuint64_t *)value = p->reserved;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        *(cuuint64_t *)value = p->reserved_high;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        *(cuuint64_t *)value = p->used;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        *(cuuint64_t *)value = p->used_high;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

SIM_API_NEW(cuMemPoolSetAttribute, (CUmemoryPool handle, CUmemPool_attribute attr, void *value),
            (handle, attr, value)) {
    struct cu_pool *p;
    CU_TRY(pool(handle, &p));
    CU_ARG(value && !p->imported);
    switch (attr) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        p->reuse[attr - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] = *(int *)value;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        p->threshold = *(cuuint64_t *)value;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        CU_ARG(*(cuuint64_t *)value == 0);
        p->reserved_high = p->reserved;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        CU_ARG(*(cuuint64_t *)value == 0);
        p->used_high = p->used;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

SIM_API_NEW(cuMemPoolSetAccess, (CUmemoryPool handle, const CUmemAccessDesc *map, size_t n),
            (handle, map, n)) {
    struct cu_pool *p;
    CU_TRY(pool(handle, &p));
    CU_ARG(n == 0 || map);
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuMemPoolGetAccess,
            (CUmemAccess_flags * flags, CUmemoryPool handle, CUmemLocation *where),
            (flags, handle, where)) {
    struct cu_pool *p;
    CU_TRY(pool(handle, &p));
    CU_ARG(flags && where);
    *flags = where->type == CU_MEM_LOCATION_TYPE_DEVICE && where->id == p->dev
                 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                 : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
}

/* ---- which pool a device uses ---- */

SIM_API_NEW(cuDeviceGetDefaultMemPool, (CUmemoryPool * out, CUdevice dev), (out, dev)) {
    struct cu_device *d;
    struct cu_pool *p;
    CU_TRY(cu_device_of(dev, &d));
    CU_ARG(out);
    CU_TRY(pool_default(dev, &p));
    *out = (CUmemoryPool)p;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuDeviceGetMemPool, (CUmemoryPool * out, CUdevice dev), (out, dev)) {
    struct cu_device *d;
    struct cu_pool *p;
    CU_TRY(cu_device_of(dev, &d));
    CU_ARG(out);
    CU_TRY(current_pool(dev, &p));
    *out = (CUmemoryPool)p;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuDeviceSetMemPool, (CUdevice dev, CUmemoryPool handle), (dev, handle)) {
    struct cu_device *d;
    struct cu_pool *p;
    CU_TRY(cu_device_of(dev, &d));
    CU_TRY(pool(handle, &p));
    CU_ARG(p->dev == dev && !p->imported);
    d->current_pool = p;
    return CUDA_SUCCESS;
}

static CUresult by_location(CUmemoryPool *out, CUmemLocation *where, CUmemAllocationType type,
                            bool current) {
    struct cu_device *d;
    struct cu_pool *p;
    CU_TRY(cu_ready());
    CU_ARG(out && where);
    CU_ARG(type == CU_MEM_ALLOCATION_TYPE_PINNED || type == CU_MEM_ALLOCATION_TYPE_MANAGED);
    static struct cu_pool *other[2]; /* host and managed memory: one default pool each */
    if (where->type == CU_MEM_LOCATION_TYPE_DEVICE && type == CU_MEM_ALLOCATION_TYPE_PINNED) {
        CU_TRY(cu_device_of(where->id, &d));
        CU_TRY(current ? current_pool(where->id, &p) : pool_default(where->id, &p));
    } else {
        struct cu_pool **slot = &other[type == CU_MEM_ALLOCATION_TYPE_MANAGED];
        if (!*slot) {
            *slot = pool_new(0, cu_devs[0].dom);
            CU_CHECK(*slot, CUDA_ERROR_OUT_OF_MEMORY);
            (*slot)->location = CU_MEM_LOCATION_TYPE_HOST;
            (*slot)->type = type;
            (*slot)->is_default = true;
        }
        p = *slot;
    }
    *out = (CUmemoryPool)p;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuMemGetDefaultMemPool,
            (CUmemoryPool * out, CUmemLocation *where, CUmemAllocationType type),
            (out, where, type)) {
    return by_location(out, where, type, false);
}

SIM_API_NEW(cuMemGetMemPool, (CUmemoryPool * out, CUmemLocation *where, CUmemAllocationType type),
            (out, where, type)) {
    return by_location(out, where, type, true);
}

SIM_API_NEW(cuMemSetMemPool, (CUmemLocation * where, CUmemAllocationType type, CUmemoryPool handle),
            (where, type, handle)) {
    struct cu_pool *p;
    CU_TRY(pool(handle, &p));
    CU_ARG(where && p->type == type);
    if (where->type == CU_MEM_LOCATION_TYPE_DEVICE && type == CU_MEM_ALLOCATION_TYPE_PINNED) {
        struct cu_device *d;
        CU_TRY(cu_device_of(where->id, &d));
        CU_ARG(p->dev == where->id);
        d->current_pool = p;
    }
    return CUDA_SUCCESS;
}

/* ---- allocation ---- */

static CUresult alloc_async(CUdeviceptr *out, size_t bytes, struct cu_pool *p, CUstream stream) {
    struct cu_stream *s;
    struct cu_node *node;
    CU_TRY(cu_stream(stream, &s));
    CU_ARG(out);
    if (s->capture) {
        CU_TRY(cu_enqueue(stream, CU_GRAPH_NODE_TYPE_MEM_ALLOC, &s, &node));
        return graph_alloc_node(node, bytes, p ? p->dev : s->ctx->dev, out);
    }
    CU_TRY(cu_enqueue(stream, CU_GRAPH_NODE_TYPE_EMPTY, &s, &node));
    CU_TRY(cu_unsafe());
    if (!bytes) {
        *out = 0;
        return CUDA_SUCCESS;
    }
    if (!p)
        CU_TRY(current_pool(s->ctx->dev, &p));
    return pool_alloc(p, bytes, out);
}

SIM_PAIR_NEW(cuMemAllocAsync, (CUdeviceptr * out, size_t bytes, CUstream stream),
             (out, bytes, stream)) {
    return alloc_async(out, bytes, NULL, stream);
}

SIM_PAIR_NEW(cuMemAllocFromPoolAsync,
             (CUdeviceptr * out, size_t bytes, CUmemoryPool handle, CUstream stream),
             (out, bytes, handle, stream)) {
    struct cu_pool *p;
    CU_TRY(pool(handle, &p));
    CU_ARG(!p->imported);
    return alloc_async(out, bytes, p, stream);
}

static CUresult free_async(CUdeviceptr at, CUstream stream) {
    struct cu_stream *s;
    struct cu_node *node;
    CU_TRY(cu_stream(stream, &s));
    if (!at)
        return CUDA_SUCCESS;
    struct cu_rec *rec = va_find(at);
    if (s->capture) {
        CU_TRY(cu_enqueue(stream, CU_GRAPH_NODE_TYPE_MEM_FREE, &s, &node));
        return graph_free_node(node, at);
    }
    CU_TRY(cu_enqueue(stream, CU_GRAPH_NODE_TYPE_EMPTY, &s, &node));
    CU_ARG(rec && !freed_already(at));
    if (rec->kind == R_CHUNK)
        return pool_free(rec, at, s->id, false);
    if (rec->kind == R_GRAPH)
        return graph_ptr_free(rec);
    if (rec->kind == R_IPC && rec->flags) { /* a pointer of an imported pool */
        CU_ARG(at == rec->base);
        ((struct cu_pool *)rec->data)->live--;
        cu_rec_free(rec);
        return CUDA_SUCCESS;
    }
    CU_ARG(rec->kind == R_ALLOC || rec->kind == R_BLOCK);
    return free_later(at, s);
}

SIM_PAIR_NEW(cuMemFreeAsync, (CUdeviceptr at, CUstream stream), (at, stream)) {
    return free_async(at, stream);
}

/* ---- sharing ---- */

#define PTR_MAGIC 0x7470534dull

struct ptr_data {
    uint64_t magic, gen, at, size;
    int32_t shared;
};

SIM_API_NEW(cuMemPoolExportToShareableHandle,
            (void *out, CUmemoryPool handle, CUmemAllocationHandleType type,
             unsigned long long flags),
            (out, handle, type, flags)) {
    struct cu_pool *p;
    CU_TRY(pool(handle, &p));
    CU_ARG(out && flags == 0 && !p->imported && type != CU_MEM_HANDLE_TYPE_NONE);
    CU_ARG(p->handles & type);
    CU_CHECK(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
    if (p->shared < 0)
        p->shared = sim_share(p->dom, p->reserved, SIM_SHARED_POOL);
    CU_CHECK(p->shared >= 0, CUDA_ERROR_OUT_OF_MEMORY);
    int fd = sim_share_fd(p->shared);
    CU_CHECK(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)out = fd;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuMemPoolImportFromShareableHandle,
            (CUmemoryPool * out, void *handle, CUmemAllocationHandleType type,
             unsigned long long flags),
            (out, handle, type, flags)) {
    CU_TRY(cu_ready());
    CU_ARG(out && flags == 0 && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    int index = sim_share_from_fd((int)(intptr_t)handle);
    CU_ARG(index >= 0 && sim->shared[index].kind == SIM_SHARED_POOL);
    int dev = cu_dev_of_dom(sim->shared[index].dom);
    CU_CHECK(dev >= 0, CUDA_ERROR_INVALID_DEVICE);
    CU_ARG(sim_hold(index, 0));
    struct cu_pool *p = pool_new(dev, sim->shared[index].dom);
    if (!p) {
        sim_drop(index);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    p->imported = true;
    p->shared = index;
    *out = (CUmemoryPool)p;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuMemPoolExportPointer, (CUmemPoolPtrExportData * out, CUdeviceptr at), (out, at)) {
    CU_TRY(cu_ready());
    struct cu_rec *rec = va_find(at);
    CU_ARG(out && rec && rec->kind == R_CHUNK && pool_of(rec)->shared >= 0);
    CUdeviceptr base;
    size_t size;
    CU_ARG(pool_piece(rec, at, &base, &size) && base == at);
    int shared = pool_of(rec)->shared;
    struct ptr_data d = {PTR_MAGIC, atomic_load(&sim->shared[shared].gen), at, size, shared};
    memset(out, 0, sizeof *out);
    memcpy(out, &d, sizeof d);
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuMemPoolImportPointer,
            (CUdeviceptr * out, CUmemoryPool handle, CUmemPoolPtrExportData *data),
            (out, handle, data)) {
    struct cu_pool *p;
    struct ptr_data d;
    CU_TRY(pool(handle, &p));
    CU_ARG(out && data && p->imported);
    memcpy(&d, data, sizeof d);
    CU_ARG(d.magic == PTR_MAGIC && d.shared == p->shared &&
           d.gen == atomic_load(&sim->shared[p->shared].gen));
    size_t at = 0;
    struct cu_rec *rec;
    while ((rec = va_next(&at)))
        if (rec->kind == R_IPC && rec->flags && rec->data == p && rec->id == d.at) {
            *out = rec->base;
            return CUDA_SUCCESS;
        }
    rec = cu_rec_new(R_IPC, p->dom, d.size);
    if (!rec || !va_take(rec, d.size)) {
        free(rec);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    rec->flags = 1;
    rec->id = d.at;
    rec->data = p;
    p->live++;
    *out = rec->base;
    return CUDA_SUCCESS;
}
