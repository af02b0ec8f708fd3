/* cuMemAlloc and its relatives; records of address ranges. */
#include "sim_cuda.h"

#include <stdlib.h>
#include <string.h>

size_t cu_physical(size_t bytes) {
    return (bytes + SIM_GRANULE - 1) & ~(size_t)(SIM_GRANULE - 1);
}

struct cu_rec *cu_rec_new(enum rec_kind kind, uint32_t dom, size_t size) {
    struct cu_rec *rec = calloc(1, sizeof *rec);
    if (rec) {
        rec->kind = kind;
        rec->dom = dom;
        rec->size = size;
        rec->shared = -1;
        rec->id = cu_next_id();
    }
    return rec;
}

void cu_rec_link(struct cu_ctx *ctx, struct cu_rec *rec) {
    rec->ctx = ctx;
    rec->prev = NULL;
    rec->next = ctx->recs;
    if (rec->next)
        rec->next->prev = rec;
    ctx->recs = rec;
}

void cu_rec_free(struct cu_rec *rec) {
    if (rec->ctx) {
        if (rec->prev)
            rec->prev->next = rec->next;
        else
            rec->ctx->recs = rec->next;
        if (rec->next)
            rec->next->prev = rec->prev;
    }
    if (rec->kind == R_BLOCK)
        block_drop(rec);
    if (rec->kind == R_CHUNK)
        pool_span_free(rec);
    if (rec->kind == R_IPC && !rec->flags)
        free(rec->data);
    if (rec->kind == R_HOST || rec->kind == R_MANAGED)
        cu_host_release(rec);
    else
        va_put(rec);
    if (rec->shared >= 0)
        sim_drop(rec->shared);
    else if (rec->physical)
        sim_give(rec->dom, rec->physical);
    free(rec);
}

/* Whole granules in an address range of its own. */
struct cu_rec *cu_rec_take(enum rec_kind kind, struct cu_ctx *ctx, size_t bytes, bool low) {
    struct cu_rec *rec = cu_rec_new(kind, ctx->dom, bytes);
    size_t physical = cu_physical(bytes);
    if (!rec || physical < bytes || !cu_take(ctx->dom, physical)) {
        free(rec);
        return NULL;
    }
    if (!(low ? va_take_low(rec, bytes) : va_take(rec, bytes))) {
        sim_give(ctx->dom, physical);
        free(rec);
        return NULL;
    }
    rec->physical = physical;
    cu_rec_link(ctx, rec);
    return rec;
}

CUresult cu_alloc(struct cu_ctx *ctx, size_t bytes, bool low, CUdeviceptr *out) {
    if (bytes <= PIECE_MAX && !low)
        return block_alloc(ctx, 0, bytes, out);
    struct cu_rec *rec = cu_rec_take(R_ALLOC, ctx, bytes, low);
    CU_CHECK(rec, CUDA_ERROR_OUT_OF_MEMORY);
    *out = rec->base;
    return CUDA_SUCCESS;
}

CUresult cu_free(CUdeviceptr p) {
    struct cu_rec *rec = va_find(p);
    CU_ARG(rec && !freed_already(p));
    switch (rec->kind) {
    case R_BLOCK:
        return block_free(rec, p) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case R_CHUNK:
        return pool_free(rec, p, 0, true);
    case R_GRAPH:
        CU_ARG(p == rec->base);
        return graph_ptr_free(rec);
    case R_ALLOC:
    case R_EXTERNAL:
    case R_MANAGED:
        CU_ARG(p == rec->base);
        cu_rec_free(rec);
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

SIM_API(cuMemAlloc_v2, (CUdeviceptr * dptr, size_t bytesize), (dptr, bytesize)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    CU_ARG(dptr && bytesize);
    CU_TRY(cu_unsafe());
    return cu_alloc(ctx, bytesize, false, dptr);
}

/* The 32-bit calls of CUDA 2 and 3 keep to addresses that fit. */
SIM_API(cuMemAlloc, (CUdeviceptr_v1 * dptr, unsigned bytesize), (dptr, bytesize)) {
    struct cu_ctx *ctx;
    CUdeviceptr p;
    CU_TRY(cu_v1(&ctx));
    CU_ARG(dptr && bytesize);
    CU_TRY(cu_alloc(ctx, bytesize, true, &p));
    *dptr = (CUdeviceptr_v1)p;
    return CUDA_SUCCESS;
}

/* Measured: works without a current context, not with one that is gone. */
SIM_API(cuMemFree_v2, (CUdeviceptr dptr), (dptr)) {
    struct cu_ctx *ctx;
    CUresult r = cu_current(&ctx);
    CU_CHECK(r == CUDA_SUCCESS || r == CUDA_ERROR_INVALID_CONTEXT, r);
    if (!dptr)
        return CUDA_SUCCESS;
    CU_TRY(cu_unsafe());
    return cu_free(dptr);
}

SIM_API(cuMemFree, (CUdeviceptr_v1 dptr), (dptr)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_ready());
    CU_CHECK(cu_v1(&ctx) == CUDA_SUCCESS, CUDA_ERROR_UNKNOWN);
    return dptr ? cu_free(dptr) : CUDA_SUCCESS;
}

static CUresult pitched(size_t width, size_t height, unsigned element, bool low, CUdeviceptr *dptr,
                        size_t *pitch) {
    struct cu_ctx *ctx;
    CU_TRY(low ? cu_v1(&ctx) : cu_current(&ctx));
    CU_ARG(width && height && (element == 4 || element == 8 || element == 16));
    size_t row = (width + 511) & ~(size_t)511, bytes;
    CU_CHECK(row >= width && !__builtin_mul_overflow(row, height, &bytes),
             CUDA_ERROR_OUT_OF_MEMORY);
    CU_TRY(cu_unsafe());
    CU_TRY(cu_alloc(ctx, bytes, low, dptr));
    *pitch = row;
    return CUDA_SUCCESS;
}

SIM_API(cuMemAllocPitch_v2,
        (CUdeviceptr * dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
         unsigned ElementSizeBytes),
        (dptr, pPitch, WidthInBytes, Height, ElementSizeBytes)) {
    CU_TRY(cu_ready());
    CU_ARG(dptr && pPitch);
    return pitched(WidthInBytes, Height, ElementSizeBytes, false, dptr, pPitch);
}

SIM_API(cuMemAllocPitch,
        (CUdeviceptr_v1 * dptr, unsigned *pPitch, unsigned WidthInBytes, unsigned Height,
         unsigned ElementSizeBytes),
        (dptr, pPitch, WidthInBytes, Height, ElementSizeBytes)) {
    CUdeviceptr p;
    size_t pitch;
    CU_TRY(cu_ready());
    CU_ARG(dptr && pPitch);
    CU_TRY(pitched(WidthInBytes, Height, ElementSizeBytes, true, &p, &pitch));
    *dptr = (CUdeviceptr_v1)p;
    *pPitch = (unsigned)pitch;
    return CUDA_SUCCESS;
}

static CUresult info(struct cu_ctx *ctx, uint64_t *free_bytes, uint64_t *total) {
    sim_sweep();
    uint64_t used = sim_dom_used(ctx->dom);
    *total = sim->dom[ctx->dom].cuda_total;
    *free_bytes = used < *total ? *total - used : 0;
    return CUDA_SUCCESS;
}

SIM_API(cuMemGetInfo_v2, (size_t *free, size_t *total), (free, total)) {
    struct cu_ctx *ctx;
    uint64_t f, t;
    CU_TRY(cu_current(&ctx));
    CU_ARG(free && total);
    CU_TRY(info(ctx, &f, &t));
    *free = f;
    *total = t;
    return CUDA_SUCCESS;
}

static unsigned clamp32(uint64_t v) {
    return v > 0xffffffffu ? 0xffffffffu : (unsigned)v;
}

SIM_API(cuMemGetInfo, (unsigned *free, unsigned *total), (free, total)) {
    struct cu_ctx *ctx;
    uint64_t f, t;
    CU_TRY(cu_v1(&ctx));
    CU_ARG(free && total);
    CU_TRY(info(ctx, &f, &t));
    *free = clamp32(f);
    *total = clamp32(t);
    return CUDA_SUCCESS;
}

SIM_API(cuDeviceTotalMem_v2, (size_t *bytes, CUdevice dev), (bytes, dev)) {
    struct cu_device *d;
    CU_TRY(cu_ready());
    CU_ARG(bytes);
    CU_TRY(cu_device_of(dev, &d));
    *bytes = sim->dom[d->dom].cuda_total;
    return CUDA_SUCCESS;
}

SIM_API(cuDeviceTotalMem, (unsigned *bytes, CUdevice dev), (bytes, dev)) {
    struct cu_device *d;
    CU_TRY(cu_ready());
    CU_ARG(bytes);
    CU_TRY(cu_device_of(dev, &d));
    *bytes = clamp32(sim->dom[d->dom].cuda_total);
    return CUDA_SUCCESS;
}

bool cu_whole(CUdeviceptr p, CUdeviceptr *base, size_t *size) {
    struct cu_rec *rec = va_find(p);
    if (!rec)
        return false;
    if (rec->kind == R_BLOCK)
        return block_piece(rec, p, base, size);
    if (rec->kind == R_CHUNK)
        return pool_piece(rec, p, base, size);
    if (rec->kind == R_RESERVED)
        return vmm_piece(rec, p, base, size);
    if (rec->kind == R_GRAPH && !graph_ptr_live(rec))
        return false;
    *base = rec->base;
    *size = rec->size;
    return true;
}

bool cu_range_ok(CUdeviceptr p, size_t bytes) {
    CUdeviceptr base;
    size_t size;
    if (!p || !cu_whole(p, &base, &size))
        return false;
    return bytes <= size && p - base <= size - bytes;
}

SIM_API(cuMemGetAddressRange_v2, (CUdeviceptr * pbase, size_t *psize, CUdeviceptr dptr),
        (pbase, psize, dptr)) {
    struct cu_ctx *ctx;
    CUdeviceptr base;
    size_t size;
    CU_TRY(cu_current(&ctx));
    CU_CHECK(cu_whole(dptr, &base, &size), CUDA_ERROR_NOT_FOUND);
    if (pbase)
        *pbase = base;
    if (psize)
        *psize = size;
    return CUDA_SUCCESS;
}

SIM_API(cuMemGetAddressRange, (CUdeviceptr_v1 * pbase, unsigned *psize, CUdeviceptr_v1 dptr),
        (pbase, psize, dptr)) {
    CUdeviceptr base;
    size_t size;
    CU_TRY(cuMemGetAddressRange_v2_body(&base, &size, dptr));
    if (pbase)
        *pbase = (CUdeviceptr_v1)base;
    if (psize)
        *psize = (unsigned)size;
    return CUDA_SUCCESS;
}
