#include "freed.h"

/* Allocations at an address: plain, pitched, managed; and their frees. */

/* The driver answers a bad request itself: a refusal must not hide INVALID_VALUE. */
static bool is_bad(const void *out, uint64_t bytes) {
    return !out || bytes == 0;
}

CUresult cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize) {
    NEED_CUDA(cuMemAlloc_v2);
    struct process *process = enter();
    struct allocation a;
    if (!process || is_bad(dptr, bytesize))
        return real.cuMemAlloc_v2(dptr, bytesize);
    CUdeviceptr address = 0;
    CUresult result = allocation_begin(&a, process, bytesize);
    if (result != CUDA_SUCCESS)
        return result;
    CUresult granted = CALL_REAL(cuMemAlloc_v2, &address, bytesize);
    result = allocation_end(&a, granted, address, bytesize);
    if (granted == CUDA_SUCCESS && result != CUDA_SUCCESS)
        (void)CALL_REAL(cuMemFree_v2, address);
    if (result == CUDA_SUCCESS)
        *dptr = address;
    return result;
}

CUresult cuMemAlloc(CUdeviceptr_v1 *dptr, unsigned int bytesize) {
    NEED_CUDA(cuMemAlloc);
    struct process *process = enter();
    struct allocation a;
    if (!process || is_bad(dptr, bytesize))
        return real.cuMemAlloc(dptr, bytesize);
    CUdeviceptr_v1 address = 0;
    CUresult result = allocation_begin(&a, process, bytesize);
    if (result != CUDA_SUCCESS)
        return result;
    CUresult granted = CALL_REAL(cuMemAlloc, &address, bytesize);
    result = allocation_end(&a, granted, address, bytesize);
    if (granted == CUDA_SUCCESS && result != CUDA_SUCCESS)
        (void)CALL_REAL(cuMemFree, address);
    if (result == CUDA_SUCCESS)
        *dptr = address;
    return result;
}

/* Rows are aligned to this at least; the driver says the real pitch afterwards. */
#define PITCH_ALIGNMENT 512

static uint64_t pitched(uint64_t width, uint64_t height) {
    uint64_t pitch = (width + PITCH_ALIGNMENT - 1) / PITCH_ALIGNMENT * PITCH_ALIGNMENT, bytes;
    return __builtin_mul_overflow(pitch, height, &bytes) ? UINT64_MAX : bytes;
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
                            unsigned int ElementSizeBytes) {
    NEED_CUDA(cuMemAllocPitch_v2);
    struct process *process = enter();
    struct allocation a;
    uint64_t estimate = pitched(WidthInBytes, Height);
    if (!process || !pPitch || is_bad(dptr, estimate))
        return real.cuMemAllocPitch_v2(dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);
    CUdeviceptr address = 0;
    size_t pitch = 0;
    CUresult result = allocation_begin(&a, process, estimate);
    if (result != CUDA_SUCCESS)
        return result;
    CUresult granted =
        CALL_REAL(cuMemAllocPitch_v2, &address, &pitch, WidthInBytes, Height, ElementSizeBytes);
    result = allocation_end(&a, granted, address, pitch * Height);
    if (granted == CUDA_SUCCESS && result != CUDA_SUCCESS)
        (void)CALL_REAL(cuMemFree_v2, address);
    if (result == CUDA_SUCCESS) {
        *dptr = address;
        *pPitch = pitch;
    }
    return result;
}

CUresult cuMemAllocPitch(CUdeviceptr_v1 *dptr, unsigned int *pPitch, unsigned int WidthInBytes,
                         unsigned int Height, unsigned int ElementSizeBytes) {
    NEED_CUDA(cuMemAllocPitch);
    struct process *process = enter();
    struct allocation a;
    uint64_t estimate = pitched(WidthInBytes, Height);
    if (!process || !pPitch || is_bad(dptr, estimate))
        return real.cuMemAllocPitch(dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);
    CUdeviceptr_v1 address = 0;
    unsigned int pitch = 0;
    CUresult result = allocation_begin(&a, process, estimate);
    if (result != CUDA_SUCCESS)
        return result;
    CUresult granted =
        CALL_REAL(cuMemAllocPitch, &address, &pitch, WidthInBytes, Height, ElementSizeBytes);
    result = allocation_end(&a, granted, address, (uint64_t)pitch * Height);
    if (granted == CUDA_SUCCESS && result != CUDA_SUCCESS)
        (void)CALL_REAL(cuMemFree, address);
    if (result == CUDA_SUCCESS) {
        *dptr = address;
        *pPitch = pitch;
    }
    return result;
}

/* Charged in full and at once: pages of managed memory move in and out of the card unseen. */
CUresult cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags) {
    NEED_CUDA(cuMemAllocManaged);
    struct process *process = enter();
    struct device *device;
    if (!process || is_bad(dptr, bytesize))
        return real.cuMemAllocManaged(dptr, bytesize, flags);
    CUresult result = process_current(&device, process);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t charged = granules(bytesize);
    charging_begin(process, device);
    result = charge(process, device, charged, VGPU_KIND_DATA);
    if (result == CUDA_SUCCESS) {
        CUdeviceptr address = 0;
        invisible_add(device, (int64_t)charged);
        result = CALL_REAL(cuMemAllocManaged, &address, bytesize, flags);
        struct vgpu_entry entry = {.key = address,
                                   .kind = ENTRY_POINTER,
                                   .bytes = charged,
                                   .device = device->ordinal,
                                   .aux2 = context_current()};
        if (result == CUDA_SUCCESS && vgpu_ledger_put(process->ledger, &entry)) {
            (void)CALL_REAL(cuMemFree_v2, address);
            result = NO_MEMORY;
        }
        if (result == CUDA_SUCCESS) {
            *dptr = address;
        } else {
            invisible_add(device, -(int64_t)charged);
            give_back(process, device, charged, VGPU_KIND_DATA);
        }
    }
    operation_end(device);
    return result;
}

/* ---- frees -------------------------------------------------------------------------------- */

struct release {
    uint64_t address;
    struct vgpu_entry entry;
    struct device *device; /* NULL: not in the ledger */
    bool piece; /* `entry` is that of its block, and stays until the driver said success */
    CUstream stream;
    bool ordered; /* in stream order: the driver keeps the memory until that stream is done */
};

/* Takes the entry out before the driver call: the address may be another thread's at once. */
static void release_begin(struct release *r, struct process *process, uint64_t address) {
    r->address = address;
    int found = vgpu_ledger_take_or_get(process->ledger, ENTRY_POINTER, address, ENTRY_BLOCK,
                                        address >> GRANULE_SHIFT, &r->entry);
    r->device = found < 0 ? NULL : process_device(process, r->entry.device);
    r->piece = found == 1;
    if (r->device)
        operation_begin(r->device);
}

/* Gives the quota back after the driver said success; puts the entry back where it did not. */
static CUresult release_end(struct release *r, struct process *process, CUresult result) {
    if (!r->device) {
        pools_freed();
        return result;
    }
    if (result != CUDA_SUCCESS) {
        if (!r->piece)
            (void)vgpu_ledger_put(process->ledger, &r->entry);
    } else if (r->entry.aux) {
        if (shares(process) & SHARE_EXPORTED)
            shared_freed(process, r->address);
        if (r->ordered)
            freed_add(process, &r->entry, r->piece, r->stream);
        else
            give_back(process, r->device,
                      r->piece ? block_leave(process, r->entry.key)
                               : allocation_leave(process, &r->entry),
                      VGPU_KIND_DATA);
    } else {
        invisible_add(r->device, -(int64_t)r->entry.bytes);
        give_back(process, r->device, r->entry.bytes, VGPU_KIND_DATA);
    }
    operation_end(r->device);
    return result;
}

#define AT_ONCE {.ordered = false}
#define ORDERED(in) {.ordered = true, .stream = (in)}
#define FREE_BODY(symbol, how, address, ...)  \
    NEED_CUDA(symbol);                        \
    struct process *process = enter();        \
    struct release r = how;                   \
    if (!process || process->mode != MODE_ON) \
        return real.symbol(__VA_ARGS__);      \
    release_begin(&r, process, address);      \
    CUresult result = release_end(&r, process, CALL_REAL(symbol, __VA_ARGS__))

/* A pointer of a pool is not in the ledger: its pool is charged by what it reserves. This free
 * waits for it, so the pool may have shrunk at once; the other one does not. */
#define FREE_NOW_BODY(symbol, address)                                            \
    FREE_BODY(symbol, AT_ONCE, address, address);                                 \
    if (UNLIKELY(!r.device && __atomic_load_n(&pools_watched, __ATOMIC_RELAXED))) \
        pools_synchronized(process, false);                                       \
    return result

CUresult cuMemFree_v2(CUdeviceptr dptr) {
    FREE_NOW_BODY(cuMemFree_v2, dptr);
}

CUresult cuMemFree(CUdeviceptr_v1 dptr) {
    FREE_NOW_BODY(cuMemFree, dptr);
}

CUresult cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream) {
    FREE_BODY(cuMemFreeAsync, ORDERED(hStream), dptr, dptr, hStream);
    return result;
}

CUresult cuMemFreeAsync_ptsz(CUdeviceptr dptr, CUstream hStream) {
    FREE_BODY(cuMemFreeAsync_ptsz, ORDERED(hStream ? hStream : STREAM_PER_THREAD), dptr, dptr,
              hStream);
    return result;
}
