#include "freed.h"

/* Stream-ordered allocations and the pools they come from. */

/* Handles up to CU_STREAM_PER_THREAD name the current context's own streams. */

/* ---- whose memory ------------------------------------------------------------------------------ */

/* cuStreamGetDevice would end a capture of that stream, cuStreamGetCtx does not. */
static CUresult stream_device(struct device **device, struct process *process, CUstream stream) {
    CUcontext context = NULL;
    CUdevice ordinal = -1;
    struct vgpu_entry entry;
    if (LIKELY(process->visible == 1)) {
        *device = process_device(process, 0);
        return *device ? CUDA_SUCCESS : NO_MEMORY;
    }
    if ((uintptr_t)stream <= (uintptr_t)STREAM_PER_THREAD || !real.cuStreamGetCtx)
        return process_current(device, process);
    CUresult result = CALL_REAL(cuStreamGetCtx, stream, &context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!vgpu_ledger_get(process->ledger, ENTRY_CONTEXT, key_of(context), &entry))
        ordinal = entry.device;
    else if (real.cuCtxGetDevice_v2)
        result = CALL_REAL(cuCtxGetDevice_v2, &ordinal, context);
    else
        return process_current(device, process);
    *device = process_device(process, ordinal);
    return result == CUDA_SUCCESS && !*device ? NO_MEMORY : result;
}

static CUresult stream_pool(struct pool **pool, struct process *process, CUstream stream) {
    struct device *device = NULL;
    CUresult result = stream_device(&device, process, stream);
    return result == CUDA_SUCCESS ? pool_current(pool, process, device) : result;
}

/* A capture makes a node of the request and takes nothing. */
static bool is_capturing(CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return real.cuStreamIsCapturing &&
           CALL_REAL(cuStreamIsCapturing, stream, &status) == CUDA_SUCCESS &&
           status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* ---- one request --------------------------------------------------------------------------------- */

struct request {
    struct process *process;
    struct pool *pool;
    uint64_t bytes;
    uint64_t credit;
    CUstream stream;
    bool last;  /* charged ahead for the worst: no further try */
    bool tight; /* there was no room for the worst */
};

/* The quota has no room for the worst growth. What the pool holds unused may still do: then only the
 * rest is charged ahead, and the call undone should the driver not have used it. */
static CUresult begin_tight(struct request *r, uint64_t worst) {
    uint64_t unused = pool_unused(r->pool);
    uint64_t least = r->bytes > unused ? pool_steps(r->bytes - unused) : 0;
    if (least < worst && pool_fits(r->pool, least)) {
        if (least == 0)
            return CUDA_SUCCESS;
        if (pool_announce(r->pool, least) == CUDA_SUCCESS) {
            r->credit = least;
            return CUDA_SUCCESS;
        }
    }
    r->tight = false;
    if (is_capturing(r->stream))
        return CUDA_SUCCESS;
    r->last = true;
    r->credit = worst;
    return pool_announce(r->pool, worst);
}

/* Room that is left to others who may be taking a step right now, unseen: four threads in each
 * process. */
static uint64_t margin(const struct request *r) {
    uint64_t operations = __atomic_load_n(&r->pool->device->operations, __ATOMIC_RELAXED);
    uint64_t own = (uint32_t)operations - (uint32_t)(operations >> 32);
    uint32_t others =
        __atomic_load_n(&vgpu_core_ext(r->process->core)->slot_high, __ATOMIC_RELAXED);
    return (own + 4 * (uint64_t)others) * POOL_STEP;
}

/* A step is small and rarely taken: with room enough it is charged when it is there, and undone should
 * it not fit. Everything else is charged ahead. */
static CUresult request_begin(struct request *r) {
    struct device *device = r->pool->device;
    uint64_t worst = pool_steps(r->bytes);
    uint64_t limit = process_limit(r->process, device);
    CUresult result = device->index < 0 ? NO_MEMORY : CUDA_SUCCESS;
    r->credit = 0;
    r->tight = false;
    charging_begin(r->process, device);
    if (result == CUDA_SUCCESS && limit &&
        (r->last || worst > POOL_STEP || !pool_fits(r->pool, worst + margin(r)))) {
        if (r->last || pool_fits(r->pool, worst)) {
            r->last = true;
            r->credit = worst;
            result = pool_announce(r->pool, worst);
        } else {
            r->tight = true;
            result = begin_tight(r, worst);
        }
    }
    if (result != CUDA_SUCCESS)
        operation_end(device);
    return result;
}

/* Takes the driver's result. An answer other than that result: the caller frees what it got and
 * calls request_undone. */
static CUresult request_end(struct request *r, CUresult result) {
    uint64_t reserved = 0;
    if (LIKELY(result == CUDA_SUCCESS && r->credit == 0 && !r->tight &&
               pool_reserved(r->pool, &reserved) == CUDA_SUCCESS &&
               reserved == __atomic_load_n(&r->pool->charged, __ATOMIC_ACQUIRE))) {
        operation_end(r->pool->device);
        return result;
    }
    CUresult answer = pool_settle(r->pool, &r->credit, result != CUDA_SUCCESS);
    /* It may lie in what another thread is about to give back. */
    if (r->tight && answer == CUDA_SUCCESS && !pool_fits(r->pool, 0))
        answer = NO_MEMORY;
    if (result != CUDA_SUCCESS || answer == CUDA_SUCCESS)
        operation_end(r->pool->device);
    return result != CUDA_SUCCESS ? result : answer;
}

/* The pointer was freed again, which takes effect at a synchronisation only: one that would wait is
 * not ours to make, so what a busy stream keeps stays charged until the program synchronises.
 * True: once more, charged ahead. */
static bool request_undone(struct request *r, CUresult answer) {
    bool again = !r->last && answer == NO_MEMORY;
    (void)stream_finish(r->stream);
    pool_trim(r->pool);
    (void)pool_settle(r->pool, &r->credit, true);
    operation_end(r->pool->device);
    if (!pool_fits(r->pool, 0))
        __atomic_fetch_or(&pools_watched, POOLS_OVER, __ATOMIC_RELEASE);
    r->last = true;
    return again;
}

#define ALLOC_BODY(symbol, free_symbol, capture_stream, find, ...)                        \
    NEED_CUDA(symbol);                                                                    \
    struct request r = {.process = enter(), .bytes = bytesize, .stream = capture_stream}; \
    if (!r.process || !dptr || bytesize == 0)                                             \
        return real.symbol(dptr, __VA_ARGS__);                                            \
    if (r.process->mode != MODE_ON)                                                       \
        return NO_MEMORY;                                                                 \
    CUresult result = find, granted;                                                      \
    if (result != CUDA_SUCCESS)                                                           \
        return result;                                                                    \
    if (!r.pool || !r.pool->device)                                                       \
        return real.symbol(dptr, __VA_ARGS__);                                            \
    CUdeviceptr address;                                                                  \
    bool again;                                                                           \
    do {                                                                                  \
        address = 0;                                                                      \
        again = false;                                                                    \
        result = request_begin(&r);                                                       \
        if (result != CUDA_SUCCESS)                                                       \
            return result;                                                                \
        granted = CALL_REAL(symbol, &address, __VA_ARGS__);                               \
        result = request_end(&r, granted);                                                \
        if (UNLIKELY(granted == CUDA_SUCCESS && result != CUDA_SUCCESS)) {                \
            (void)CALL_REAL(free_symbol, address, hStream);                               \
            again = request_undone(&r, result);                                           \
        }                                                                                 \
    } while (UNLIKELY(again));                                                            \
    if (result == CUDA_SUCCESS)                                                           \
        *dptr = address;                                                                  \
    return result

CUresult cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream) {
    ALLOC_BODY(cuMemAllocAsync, cuMemFreeAsync, hStream, stream_pool(&r.pool, r.process, hStream),
               bytesize, hStream);
}

CUresult cuMemAllocAsync_ptsz(CUdeviceptr *dptr, size_t bytesize, CUstream hStream) {
    ALLOC_BODY(cuMemAllocAsync_ptsz, cuMemFreeAsync_ptsz, hStream ? hStream : STREAM_PER_THREAD,
               stream_pool(&r.pool, r.process, hStream), bytesize, hStream);
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool,
                                 CUstream hStream) {
    ALLOC_BODY(cuMemAllocFromPoolAsync, cuMemFreeAsync, hStream,
               pool_find(&r.pool, r.process, pool), bytesize, pool, hStream);
}

CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool,
                                      CUstream hStream) {
    ALLOC_BODY(cuMemAllocFromPoolAsync_ptsz, cuMemFreeAsync_ptsz,
               hStream ? hStream : STREAM_PER_THREAD, pool_find(&r.pool, r.process, pool), bytesize,
               pool, hStream);
}

/* ---- pools ------------------------------------------------------------------------------------ */

/* Managed memory without a home counts on the device the program is at work on. */
static CUresult pool_home(struct device **device, struct process *process,
                          const CUmemPoolProps *props) {
    *device = NULL;
    if (props->location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        *device = process_device(process, props->location.id);
    } else if (props->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED) {
        CUresult result = process_current(device, process);
        *device = result == CUDA_SUCCESS ? *device : process_device(process, 0);
    } else {
        return CUDA_SUCCESS;
    }
    return *device ? CUDA_SUCCESS : NO_MEMORY;
}

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps) {
    NEED_CUDA(cuMemPoolCreate);
    struct process *process = enter();
    if (!process || process->mode != MODE_ON || !pool || !poolProps)
        return real.cuMemPoolCreate(pool, poolProps);
    CUmemoryPool made = NULL;
    struct device *device;
    CUresult result = CALL_REAL(cuMemPoolCreate, &made, poolProps);
    if (result != CUDA_SUCCESS)
        return result;
    result = pool_home(&device, process, poolProps);
    if (result == CUDA_SUCCESS &&
        pool_add(process, made, device,
                 poolProps->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED ? POOL_MANAGED
                                                                        : POOL_PLAIN)) {
        *pool = made;
        return CUDA_SUCCESS;
    }
    (void)CALL_REAL(cuMemPoolDestroy, made);
    return NO_MEMORY;
}

/* Live pointers keep their part of a destroyed pool, which no attribute tells any more. */
static void pool_end(struct process *process, struct pool *pool, uint64_t kept) {
    struct device *device = pool->device;
    bool managed = pool->kind == POOL_MANAGED;
    uint64_t gone = pool_forget(pool) - kept;
    if (!device)
        return;
    if (managed)
        invisible_add(device, -(int64_t)gone);
    give_back(process, device, gone, VGPU_KIND_DATA);
    if (kept && !managed)
        pools_bury(process, device, kept);
}

CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    NEED_CUDA(cuMemPoolDestroy);
    struct process *process = enter();
    struct pool *record = NULL;
    if (!process || process->mode != MODE_ON || pool_find(&record, process, pool) || !record)
        return real.cuMemPoolDestroy(pool);
    uint64_t kept = 0, credit = 0;
    struct device *device = record->device;
    pool_retire(record);
    if (device) {
        operation_begin(device);
        if (pool_unused(record))
            pool_trim(record);
        (void)pool_settle(record, &credit, true);
        kept = record->charged;
    }
    CUresult result = CALL_REAL(cuMemPoolDestroy, pool);
    if (result == CUDA_SUCCESS) {
        pools_changed(process);
        pool_end(process, record, kept);
    } else {
        pool_revive(record);
    }
    if (device)
        operation_end(device);
    return result;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep) {
    NEED_CUDA(cuMemPoolTrimTo);
    struct process *process = enter();
    struct pool *record = NULL;
    uint64_t credit = 0;
    if (!process || process->mode != MODE_ON || pool_find(&record, process, pool) || !record ||
        !record->device)
        return real.cuMemPoolTrimTo(pool, minBytesToKeep);
    operation_begin(record->device);
    CUresult result = CALL_REAL(cuMemPoolTrimTo, pool, minBytesToKeep);
    (void)pool_settle(record, &credit, true);
    operation_end(record->device);
    return result;
}

CUresult cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool) {
    NEED_CUDA(cuDeviceSetMemPool);
    struct process *process = enter();
    if (!process)
        return real.cuDeviceSetMemPool(dev, pool);
    CUresult result = CALL_REAL(cuDeviceSetMemPool, dev, pool);
    pools_changed(process);
    return result;
}

CUresult cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool) {
    NEED_CUDA(cuMemSetMemPool);
    struct process *process = enter();
    if (!process)
        return real.cuMemSetMemPool(location, type, pool);
    CUresult result = CALL_REAL(cuMemSetMemPool, location, type, pool);
    pools_changed(process);
    return result;
}

/* The exporter is charged for what it shares; nothing can be allocated from an imported pool. */
CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *pool_out, void *handle,
                                            CUmemAllocationHandleType handleType,
                                            unsigned long long flags) {
    NEED_CUDA(cuMemPoolImportFromShareableHandle);
    struct process *process = enter();
    if (!process || process->mode != MODE_ON || !pool_out)
        return real.cuMemPoolImportFromShareableHandle(pool_out, handle, handleType, flags);
    CUresult result =
        CALL_REAL(cuMemPoolImportFromShareableHandle, pool_out, handle, handleType, flags);
    if (result == CUDA_SUCCESS)
        (void)pool_add(process, *pool_out, NULL, POOL_PLAIN);
    return result;
}
