/* Page-locked and managed memory: real memory of the host. Managed pages count on the device once
 * something puts them there (memset, copy, prefetch), and never in the process's own figure. */
#define _GNU_SOURCE
#include "sim_cuda.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define OURS 1u /* the memory is unmapped when freed; otherwise only registered */

struct pages {
    size_t n, resident;
    uint8_t on_device[];
};

static bool map_host(struct cu_rec *rec) {
    void *p = mmap(NULL, rec->size, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return false;
    rec->base = (CUdeviceptr)(uintptr_t)p;
    rec->flags = OURS;
    return true;
}

static CUresult host_new(struct cu_ctx *ctx, enum rec_kind kind, size_t bytes, void *existing,
                         struct cu_rec **out) {
    struct cu_rec *rec = cu_rec_new(kind, ctx->dom, bytes);
    CU_CHECK(rec, CUDA_ERROR_OUT_OF_MEMORY);
    rec->base = (CUdeviceptr)(uintptr_t)existing;
    if (!existing && !map_host(rec)) {
        free(rec);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    va_host_add(rec);
    cu_rec_link(ctx, rec);
    *out = rec;
    return CUDA_SUCCESS;
}

void cu_host_release(struct cu_rec *rec) {
    va_host_del(rec);
    if (rec->kind == R_MANAGED) {
        struct pages *pages = rec->data;
        sim_give_managed(rec->dom, pages->resident * SIM_GRANULE);
        free(pages);
    }
    if (rec->flags & OURS)
        munmap((void *)(uintptr_t)rec->base, rec->size);
}

static CUresult host_alloc(void **pp, size_t bytes) {
    struct cu_ctx *ctx;
    struct cu_rec *rec;
    CU_TRY(cu_current(&ctx));
    CU_ARG(pp && bytes);
    CU_TRY(cu_unsafe());
    CU_TRY(host_new(ctx, R_HOST, bytes, NULL, &rec));
    *pp = (void *)(uintptr_t)rec->base;
    return CUDA_SUCCESS;
}

SIM_API(cuMemAllocHost_v2, (void **pp, size_t bytes), (pp, bytes)) {
    return host_alloc(pp, bytes);
}

SIM_API(cuMemAllocHost, (void **pp, unsigned bytes), (pp, bytes)) {
    return host_alloc(pp, bytes);
}

SIM_API(cuMemHostAlloc, (void **pp, size_t bytes, unsigned flags), (pp, bytes, flags)) {
    CU_TRY(cu_ready());
    CU_ARG(flags <= 7);
    return host_alloc(pp, bytes);
}

static struct cu_rec *host_at(const void *p) {
    struct cu_rec *rec = va_find((CUdeviceptr)(uintptr_t)p);
    return rec && rec->kind == R_HOST ? rec : NULL;
}

SIM_API(cuMemFreeHost, (void *p), (p)) {
    CU_TRY(cu_ready());
    struct cu_rec *rec = host_at(p);
    CU_ARG(rec && (rec->flags & OURS) && rec->base == (CUdeviceptr)(uintptr_t)p);
    cu_rec_free(rec);
    return CUDA_SUCCESS;
}

SIM_API(cuMemHostRegister_v2, (void *p, size_t bytes, unsigned flags), (p, bytes, flags)) {
    struct cu_ctx *ctx;
    struct cu_rec *rec;
    CU_TRY(cu_current(&ctx));
    CU_ARG(p && bytes && flags <= 15);
    CU_CHECK(!host_at(p), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    return host_new(ctx, R_HOST, bytes, p, &rec);
}
SIM_TWIN(cuMemHostRegister, cuMemHostRegister_v2, (void *p, size_t bytes, unsigned flags),
         (p, bytes, flags))

SIM_API(cuMemHostUnregister, (void *p), (p)) {
    CU_TRY(cu_ready());
    struct cu_rec *rec = host_at(p);
    CU_CHECK(rec && !(rec->flags & OURS), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    cu_rec_free(rec);
    return CUDA_SUCCESS;
}

SIM_API(cuMemHostGetDevicePointer_v2, (CUdeviceptr * out, void *p, unsigned flags),
        (out, p, flags)) {
    CU_TRY(cu_ready());
    CU_ARG(out && flags == 0 && host_at(p));
    *out = (CUdeviceptr)(uintptr_t)p;
    return CUDA_SUCCESS;
}

SIM_API(cuMemHostGetDevicePointer, (CUdeviceptr_v1 * out, void *p, unsigned flags),
        (out, p, flags)) {
    CUdeviceptr q;
    CU_ARG(out);
    CU_TRY(cuMemHostGetDevicePointer_v2_body(&q, p, flags));
    CU_CHECK(q <= 0xffffffffu, CUDA_ERROR_INVALID_VALUE);
    *out = (CUdeviceptr_v1)q;
    return CUDA_SUCCESS;
}

SIM_API(cuMemHostGetFlags, (unsigned *flags, void *p), (flags, p)) {
    CU_TRY(cu_ready());
    CU_ARG(flags && host_at(p));
    *flags = CU_MEMHOSTALLOC_DEVICEMAP;
    return CUDA_SUCCESS;
}

/* ---- managed ---- */

SIM_API(cuMemAllocManaged, (CUdeviceptr * out, size_t bytes, unsigned flags), (out, bytes, flags)) {
    struct cu_ctx *ctx;
    struct cu_rec *rec;
    CU_TRY(cu_current(&ctx));
    CU_ARG(out && bytes && (flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST));
    CU_TRY(cu_unsafe());
    size_t n = cu_physical(bytes) / SIM_GRANULE;
    struct pages *pages = n ? calloc(1, sizeof *pages + n) : NULL;
    CU_CHECK(pages, CUDA_ERROR_OUT_OF_MEMORY);
    CUresult result = host_new(ctx, R_MANAGED, bytes, NULL, &rec);
    if (result != CUDA_SUCCESS) {
        free(pages);
        return result;
    }
    pages->n = n;
    rec->data = pages;
    *out = rec->base;
    return CUDA_SUCCESS;
}

/* A page that finds no room stays where it is: UVM oversubscribes, it does not fail. */
void cu_touch(CUdeviceptr p, size_t bytes, bool to_device) {
    struct cu_rec *rec = va_find(p);
    if (!rec || rec->kind != R_MANAGED || !bytes)
        return;
    struct pages *pages = rec->data;
    size_t from = (p - rec->base) / SIM_GRANULE, to = (p - rec->base + bytes - 1) / SIM_GRANULE;
    for (size_t i = from; i <= to && i < pages->n; i++) {
        if (pages->on_device[i] == to_device)
            continue;
        if (!to_device)
            sim_give_managed(rec->dom, SIM_GRANULE);
        else if (!sim_take_managed(rec->dom, SIM_GRANULE))
            return;
        pages->on_device[i] = to_device;
        pages->resident += to_device ? 1 : (size_t)-1;
    }
}

static CUresult prefetch(CUdeviceptr p, size_t bytes, bool to_device, CUstream stream) {
    struct cu_stream *s;
    struct cu_node *node;
    CU_TRY(cu_enqueue(stream, CU_GRAPH_NODE_TYPE_EMPTY, &s, &node));
    struct cu_rec *rec = va_find(p);
    CU_ARG(rec && rec->kind == R_MANAGED && cu_range_ok(p, bytes));
    cu_touch(p, bytes, to_device);
    return CUDA_SUCCESS;
}

SIM_PAIR(cuMemPrefetchAsync, (CUdeviceptr p, size_t bytes, CUdevice dst, CUstream stream),
         (p, bytes, dst, stream)) {
    struct cu_device *d;
    if (dst != CU_DEVICE_CPU)
        CU_TRY(cu_device_of(dst, &d));
    return prefetch(p, bytes, dst != CU_DEVICE_CPU, stream);
}

SIM_PAIR_NEW(cuMemPrefetchAsync_v2,
             (CUdeviceptr p, size_t bytes, CUmemLocation where, unsigned flags, CUstream stream),
             (p, bytes, where, flags, stream)) {
    struct cu_device *d;
    CU_TRY(cu_ready());
    CU_ARG(flags == 0);
    if (where.type == CU_MEM_LOCATION_TYPE_DEVICE)
        CU_TRY(cu_device_of(where.id, &d));
    return prefetch(p, bytes, where.type == CU_MEM_LOCATION_TYPE_DEVICE, stream);
}

static CUresult batch(CUdeviceptr *p, size_t *bytes, size_t n, const CUmemLocation *where,
                      const size_t *index, size_t n_where, CUstream stream) {
    CU_TRY(cu_ready());
    CU_ARG(p && bytes && n && where && index && n_where);
    for (size_t i = 0; i < n; i++) {
        size_t w = 0;
        while (w + 1 < n_where && index[w + 1] <= i)
            w++;
        CU_TRY(prefetch(p[i], bytes[i], where[w].type == CU_MEM_LOCATION_TYPE_DEVICE, stream));
    }
    return CUDA_SUCCESS;
}

SIM_PAIR_NEW(cuMemPrefetchBatchAsync,
             (CUdeviceptr * p, size_t *bytes, size_t n, CUmemLocation *where, size_t *index,
              size_t n_where, unsigned long long flags, CUstream stream),
             (p, bytes, n, where, index, n_where, flags, stream)) {
    (void)flags;
    return batch(p, bytes, n, where, index, n_where, stream);
}

SIM_PAIR_NEW(cuMemDiscardAndPrefetchBatchAsync,
             (CUdeviceptr * p, size_t *bytes, size_t n, CUmemLocation *where, size_t *index,
              size_t n_where, unsigned long long flags, CUstream stream),
             (p, bytes, n, where, index, n_where, flags, stream)) {
    (void)flags;
    return batch(p, bytes, n, where, index, n_where, stream);
}

SIM_PAIR_NEW(cuMemDiscardBatchAsync,
             (CUdeviceptr * p, size_t *bytes, size_t n, unsigned long long flags, CUstream stream),
             (p, bytes, n, flags, stream)) {
    struct cu_stream *s;
    CU_ARG(p && bytes && n && flags == 0);
    CU_TRY(cu_stream(stream, &s));
    for (size_t i = 0; i < n; i++)
        CU_ARG(cu_range_ok(p[i], bytes[i]));
    return CUDA_SUCCESS;
}

static CUresult advise(CUdeviceptr p, size_t bytes) {
    CU_TRY(cu_ready());
    struct cu_rec *rec = va_find(p);
    CU_ARG(rec && rec->kind == R_MANAGED && cu_range_ok(p, bytes));
    return CUDA_SUCCESS;
}

SIM_API(cuMemAdvise, (CUdeviceptr p, size_t bytes, CUmem_advise advice, CUdevice dev),
        (p, bytes, advice, dev)) {
    (void)advice, (void)dev;
    return advise(p, bytes);
}

SIM_API_NEW(cuMemAdvise_v2, (CUdeviceptr p, size_t bytes, CUmem_advise advice, CUmemLocation where),
            (p, bytes, advice, where)) {
    (void)advice, (void)where;
    return advise(p, bytes);
}

SIM_API(cuMemRangeGetAttribute,
        (void *data, size_t size, CUmem_range_attribute attr, CUdeviceptr p, size_t bytes),
        (data, size, attr, p, bytes)) {
    (void)attr;
    CU_ARG(data && size);
    CU_TRY(advise(p, bytes));
    memset(data, 0, size);
    return CUDA_SUCCESS;
}

SIM_API(cuMemRangeGetAttributes,
        (void **data, size_t *sizes, CUmem_range_attribute *attrs, size_t n, CUdeviceptr p,
         size_t bytes),
        (data, sizes, attrs, n, p, bytes)) {
    CU_ARG(data && sizes && attrs && n);
    CU_TRY(advise(p, bytes));
    for (size_t i = 0; i < n; i++)
        memset(data[i], 0, sizes[i]);
    return CUDA_SUCCESS;
}
