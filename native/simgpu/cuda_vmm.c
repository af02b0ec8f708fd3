/* Virtual memory management: physical handles, address ranges, mappings, multicast objects.
 * Memory lives until its last handle is released and its last mapping undone. */
#include "sim_cuda.h"

#include <stdlib.h>
#include <string.h>

struct vmm;

/* Memory bound to a multicast object, which holds it as a mapping does. */
struct binding {
    struct binding *next;
    struct vmm *v;
    size_t offset;
    CUdevice dev;
};

struct vmm {
    struct cu_obj obj;
    struct binding *bound; /* to this multicast object */
    uint32_t dom;
    size_t size;
    bool device; /* on a device; memory of the host is never charged */
    bool multicast;
    int refs, maps;
    int shared;
    CUmemAllocationProp prop;
};

struct mapping {
    CUdeviceptr at;
    size_t size;
    struct vmm *v;
    CUmemAccess_flags access;
};

struct range {
    struct mapping *map; /* sorted */
    size_t n, cap;
};

static void unbind(struct vmm *m, CUdevice dev, size_t offset, size_t size);

static void maybe_free(struct vmm *v) {
    if (v->refs || v->maps)
        return;
    unbind(v, -1, 0, SIZE_MAX);
    if (v->shared >= 0)
        sim_drop(v->shared);
    else if (v->device)
        sim_give(v->dom, v->size);
    free(v);
}

static CUresult bind(struct vmm *m, struct vmm *v, size_t offset) {
    struct binding *b = malloc(sizeof *b);
    CU_CHECK(b, CUDA_ERROR_OUT_OF_MEMORY);
    *b = (struct binding){m->bound, v, offset, v->prop.location.id};
    m->bound = b;
    v->maps++;
    return CUDA_SUCCESS;
}

/* What starts in the range; of every device with -1. */
static void unbind(struct vmm *m, CUdevice dev, size_t offset, size_t size) {
    for (struct binding **at = &m->bound; *at;) {
        struct binding *b = *at;
        if ((dev != -1 && b->dev != dev) || b->offset - offset >= size) {
            at = &b->next;
            continue;
        }
        *at = b->next;
        b->v->maps--;
        maybe_free(b->v);
        free(b);
    }
}

static CUresult vmm(CUmemGenericAllocationHandle handle, struct vmm **out) {
    CU_TRY(cu_ready());
    *out = (struct vmm *)(uintptr_t)handle;
    CU_ARG(cu_handle_is(*out, K_HANDLE));
    return CUDA_SUCCESS;
}

static CUresult publish(struct vmm *v, CUmemGenericAllocationHandle *out) {
    if (!cu_handle_add(v, K_HANDLE))
        return CUDA_ERROR_OUT_OF_MEMORY;
    v->refs = 1;
    *out = (CUmemGenericAllocationHandle)(uintptr_t)v;
    return CUDA_SUCCESS;
}

static CUresult location(const CUmemAllocationProp *prop, struct vmm *v) {
    struct cu_device *d;
    CU_ARG(prop && prop->type == CU_MEM_ALLOCATION_TYPE_PINNED);
    switch (prop->location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        CU_TRY(cu_device_of(prop->location.id, &d));
        v->dom = d->dom;
        v->device = true;
        return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

SIM_API(cuMemCreate,
        (CUmemGenericAllocationHandle * out, size_t size, const CUmemAllocationProp *prop,
         unsigned long long flags),
        (out, size, prop, flags)) {
    struct vmm tmp = {.size = size, .shared = -1};
    CU_TRY(cu_ready());
    CU_ARG(out && flags == 0 && size && size % SIM_GRANULE == 0);
    CU_TRY(location(prop, &tmp));
    CU_CHECK(!tmp.device || cu_take(tmp.dom, size), CUDA_ERROR_OUT_OF_MEMORY);
    tmp.prop = *prop;
    struct vmm *v = malloc(sizeof *v);
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (v) {
        *v = tmp;
        result = publish(v, out);
    }
    if (result != CUDA_SUCCESS) {
        free(v);
        if (tmp.device)
            sim_give(tmp.dom, size);
    }
    return result;
}

SIM_API(cuMemRelease, (CUmemGenericAllocationHandle handle), (handle)) {
    struct vmm *v;
    CU_TRY(vmm(handle, &v));
    if (--v->refs == 0)
        cu_handle_del(v);
    maybe_free(v);
    return CUDA_SUCCESS;
}

/* ---- addresses ---- */

SIM_API(cuMemAddressReserve,
        (CUdeviceptr * out, size_t size, size_t alignment, CUdeviceptr addr,
         unsigned long long flags),
        (out, size, alignment, addr, flags)) {
    (void)addr; /* a hint */
    CU_TRY(cu_ready());
    CU_ARG(out && flags == 0 && size && size % SIM_GRANULE == 0);
    CU_ARG((alignment & (alignment - 1)) == 0);
    struct cu_rec *rec = cu_rec_new(R_RESERVED, 0, size);
    struct range *r = calloc(1, sizeof *r);
    /* Slots are aligned to their size, so a larger alignment is a larger slot. */
    if (!rec || !r || !va_take(rec, size > alignment ? size : alignment)) {
        free(rec);
        free(r);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    rec->data = r;
    *out = rec->base;
    return CUDA_SUCCESS;
}

static struct range *range_at(CUdeviceptr p, size_t size, struct cu_rec **out) {
    struct cu_rec *rec = va_find(p);
    if (!rec || rec->kind != R_RESERVED || size > rec->size || p - rec->base > rec->size - size)
        return NULL;
    *out = rec;
    return rec->data;
}

SIM_API(cuMemAddressFree, (CUdeviceptr p, size_t size), (p, size)) {
    struct cu_rec *rec;
    CU_TRY(cu_ready());
    struct range *r = range_at(p, size, &rec);
    CU_ARG(r && p == rec->base && size == rec->size && r->n == 0);
    free(r->map);
    free(r);
    cu_rec_free(rec);
    return CUDA_SUCCESS;
}

/* First mapping that ends behind p. */
static size_t first_after(const struct range *r, CUdeviceptr p) {
    size_t lo = 0, hi = r->n;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (r->map[mid].at + r->map[mid].size <= p)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

SIM_API(cuMemMap,
        (CUdeviceptr p, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
         unsigned long long flags),
        (p, size, offset, handle, flags)) {
    struct cu_rec *rec;
    struct vmm *v;
    CU_TRY(cu_ready());
    CU_ARG(flags == 0 && size && size % SIM_GRANULE == 0 && p % SIM_GRANULE == 0);
    CU_TRY(vmm(handle, &v));
    CU_CHECK(offset == 0, CUDA_ERROR_NOT_SUPPORTED); /* measured */
    CU_ARG(size <= v->size);
    struct range *r = range_at(p, size, &rec);
    CU_ARG(r);
    size_t i = first_after(r, p);
    CU_ARG(i == r->n || r->map[i].at >= p + size);
    if (r->n == r->cap) {
        size_t to = r->cap ? r->cap * 2 : 8;
        struct mapping *grown = realloc(r->map, to * sizeof *grown);
        CU_CHECK(grown, CUDA_ERROR_OUT_OF_MEMORY);
        r->map = grown;
        r->cap = to;
    }
    memmove(r->map + i + 1, r->map + i, (r->n - i) * sizeof *r->map);
    r->map[i] = (struct mapping){p, size, v, CU_MEM_ACCESS_FLAGS_PROT_NONE};
    r->n++;
    v->maps++;
    return CUDA_SUCCESS;
}

/* Mappings [*from, *to) if they are whole and inside of the range; *gap tells of holes. */
static bool covered(const struct range *r, CUdeviceptr p, size_t size, size_t *from, size_t *to,
                    bool *gap) {
    CUdeviceptr at = p;
    *from = *to = first_after(r, p);
    *gap = false;
    for (; *to < r->n && r->map[*to].at < p + size; ++*to) {
        const struct mapping *m = &r->map[*to];
        if (m->at < p || m->at + m->size > p + size)
            return false;
        *gap |= m->at != at;
        at = m->at + m->size;
    }
    *gap |= at != p + size;
    return *to > *from;
}

SIM_API(cuMemUnmap, (CUdeviceptr p, size_t size), (p, size)) {
    struct cu_rec *rec;
    size_t from, to;
    bool gap;
    CU_TRY(cu_ready());
    struct range *r = range_at(p, size, &rec);
    CU_ARG(r && size && covered(r, p, size, &from, &to, &gap));
    for (size_t i = from; i < to; i++) {
        struct vmm *v = r->map[i].v;
        v->maps--;
        maybe_free(v);
    }
    memmove(r->map + from, r->map + to, (r->n - to) * sizeof *r->map);
    r->n -= to - from;
    return CUDA_SUCCESS;
}

SIM_API(cuMemSetAccess, (CUdeviceptr p, size_t size, const CUmemAccessDesc *desc, size_t count),
        (p, size, desc, count)) {
    struct cu_rec *rec;
    size_t from, to;
    bool gap;
    CU_TRY(cu_ready());
    CU_ARG(desc && count);
    struct range *r = range_at(p, size, &rec);
    CU_ARG(r && covered(r, p, size, &from, &to, &gap) && !gap);
    for (size_t i = from; i < to; i++)
        r->map[i].access = desc[0].flags;
    return CUDA_SUCCESS;
}

static struct mapping *mapping_at(struct cu_rec *rec, CUdeviceptr p) {
    struct range *r = rec->data;
    size_t i = first_after(r, p);
    return i < r->n && r->map[i].at <= p ? &r->map[i] : NULL;
}

bool vmm_piece(struct cu_rec *rec, CUdeviceptr p, CUdeviceptr *base, size_t *size) {
    struct mapping *m = mapping_at(rec, p);
    if (!m)
        return false;
    *base = m->at;
    *size = m->size;
    return true;
}

SIM_API(cuMemGetAccess, (unsigned long long *flags, const CUmemLocation *where, CUdeviceptr p),
        (flags, where, p)) {
    CU_TRY(cu_ready());
    CU_ARG(flags && where);
    struct cu_rec *rec = va_find(p);
    struct mapping *m = rec && rec->kind == R_RESERVED ? mapping_at(rec, p) : NULL;
    CU_ARG(m);
    *flags = m->access;
    return CUDA_SUCCESS;
}

SIM_API(cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle * out, void *addr),
        (out, addr)) {
    CU_TRY(cu_ready());
    CU_ARG(out);
    CUdeviceptr p = (CUdeviceptr)(uintptr_t)addr;
    struct cu_rec *rec = va_find(p);
    struct mapping *m = rec && rec->kind == R_RESERVED ? mapping_at(rec, p) : NULL;
    CU_ARG(m);
    if (m->v->refs == 0 && !cu_handle_add(m->v, K_HANDLE))
        return CUDA_ERROR_OUT_OF_MEMORY;
    m->v->refs++;
    *out = (CUmemGenericAllocationHandle)(uintptr_t)m->v;
    return CUDA_SUCCESS;
}

SIM_API(cuMemGetAllocationGranularity,
        (size_t *granularity, const CUmemAllocationProp *prop,
         CUmemAllocationGranularity_flags option),
        (granularity, prop, option)) {
    struct vmm tmp = {0};
    (void)option;
    CU_TRY(cu_ready());
    CU_ARG(granularity);
    CU_TRY(location(prop, &tmp));
    *granularity = SIM_GRANULE;
    return CUDA_SUCCESS;
}

SIM_API(cuMemGetAllocationPropertiesFromHandle,
        (CUmemAllocationProp * prop, CUmemGenericAllocationHandle handle), (prop, handle)) {
    struct vmm *v;
    CU_TRY(vmm(handle, &v));
    CU_ARG(prop);
    *prop = v->prop;
    return CUDA_SUCCESS;
}

/* ---- sharing ---- */

SIM_API(cuMemExportToShareableHandle,
        (void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
         unsigned long long flags),
        (out, handle, type, flags)) {
    struct vmm *v;
    CU_TRY(vmm(handle, &v));
    CU_ARG(out && flags == 0 && v->device && !v->multicast);
    CU_ARG(type != CU_MEM_HANDLE_TYPE_NONE && (v->prop.requestedHandleTypes & type));
    CU_CHECK(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
    if (v->shared < 0)
        v->shared = sim_share(v->dom, v->size, SIM_SHARED_VMM);
    CU_CHECK(v->shared >= 0, CUDA_ERROR_OUT_OF_MEMORY);
    int fd = sim_share_fd(v->shared);
    CU_CHECK(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)out = fd;
    return CUDA_SUCCESS;
}

/* Measured: each import is a handle of its own. */
SIM_API(cuMemImportFromShareableHandle,
        (CUmemGenericAllocationHandle * out, void *handle, CUmemAllocationHandleType type),
        (out, handle, type)) {
    CU_TRY(cu_ready());
    CU_ARG(out && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    int index = sim_share_from_fd((int)(intptr_t)handle);
    CU_ARG(index >= 0 && sim->shared[index].kind == SIM_SHARED_VMM);
    int dev = cu_dev_of_dom(sim->shared[index].dom);
    CU_CHECK(dev >= 0, CUDA_ERROR_INVALID_DEVICE);
    CU_ARG(sim_hold(index, 0));
    struct vmm *v = calloc(1, sizeof *v);
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (v) {
        *v = (struct vmm){.dom = sim->shared[index].dom,
                          .size = atomic_load(&sim->shared[index].bytes),
                          .device = true,
                          .shared = index};
        v->prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        v->prop.location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = dev};
        v->prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        result = publish(v, out);
    }
    if (result != CUDA_SUCCESS) {
        free(v);
        sim_drop(index);
    }
    return result;
}

/* ---- multicast: an address range over the memory of several devices, no memory of its own ---- */

SIM_API_NEW(cuMulticastCreate,
            (CUmemGenericAllocationHandle * out, const CUmulticastObjectProp *prop), (out, prop)) {
    CU_TRY(cu_ready());
    CU_ARG(out && prop && prop->size && prop->size % SIM_GRANULE == 0 && prop->flags == 0);
    CU_ARG(prop->numDevices >= 1 && prop->numDevices <= (unsigned)cu_ndevs);
    struct vmm *v = calloc(1, sizeof *v);
    CU_CHECK(v, CUDA_ERROR_OUT_OF_MEMORY);
    *v = (struct vmm){.size = prop->size, .multicast = true, .shared = -1};
    CUresult result = publish(v, out);
    if (result != CUDA_SUCCESS)
        free(v);
    return result;
}

static CUresult multicast(CUmemGenericAllocationHandle handle, struct vmm **out) {
    CU_TRY(vmm(handle, out));
    CU_ARG((*out)->multicast);
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuMulticastAddDevice, (CUmemGenericAllocationHandle handle, CUdevice dev),
            (handle, dev)) {
    struct vmm *v;
    struct cu_device *d;
    CU_TRY(multicast(handle, &v));
    return cu_device_of(dev, &d);
}

SIM_API_NEW(cuMulticastBindMem,
            (CUmemGenericAllocationHandle handle, size_t offset, CUmemGenericAllocationHandle mem,
             size_t mem_offset, size_t size, unsigned long long flags),
            (handle, offset, mem, mem_offset, size, flags)) {
    struct vmm *m, *v;
    CU_TRY(multicast(handle, &m));
    CU_TRY(vmm(mem, &v));
    CU_ARG(flags == 0 && size && size <= m->size && offset <= m->size - size);
    CU_ARG(!v->multicast && size <= v->size && mem_offset <= v->size - size);
    return bind(m, v, offset);
}

SIM_API_NEW(cuMulticastBindAddr,
            (CUmemGenericAllocationHandle handle, size_t offset, CUdeviceptr p, size_t size,
             unsigned long long flags),
            (handle, offset, p, size, flags)) {
    struct vmm *m;
    CU_TRY(multicast(handle, &m));
    CU_ARG(flags == 0 && size && size <= m->size && offset <= m->size - size);
    CU_ARG(cu_range_ok(p, size));
    struct cu_rec *rec = va_find(p);
    struct mapping *at = rec && rec->kind == R_RESERVED ? mapping_at(rec, p) : NULL;
    CU_ARG(at);
    return bind(m, at->v, offset);
}

SIM_API_NEW(cuMulticastUnbind,
            (CUmemGenericAllocationHandle handle, CUdevice dev, size_t offset, size_t size),
            (handle, dev, offset, size)) {
    struct vmm *m;
    struct cu_device *d;
    CU_TRY(multicast(handle, &m));
    CU_TRY(cu_device_of(dev, &d));
    CU_ARG(size && size <= m->size && offset <= m->size - size);
    unbind(m, dev, offset, size);
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuMulticastGetGranularity,
            (size_t *granularity, const CUmulticastObjectProp *prop,
             CUmulticastGranularity_flags option),
            (granularity, prop, option)) {
    (void)option;
    CU_TRY(cu_ready());
    CU_ARG(granularity && prop);
    *granularity = SIM_GRANULE;
    return CUDA_SUCCESS;
}
