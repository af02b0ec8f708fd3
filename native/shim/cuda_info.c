#include <errno.h>

#include "process.h"

/* Start, and the sizes a program is shown. */

CUresult cuInit(unsigned int Flags) {
    NEED_CUDA(cuInit);
    struct process *process = enter();
    if (!process)
        return real.cuInit(Flags);
    static int asked;
    if (UNLIKELY(process->mode == MODE_REFUSED) && __atomic_exchange_n(&asked, 1, __ATOMIC_RELAXED))
        process = process_get_again(process);
    if (process->mode == MODE_REFUSED)
        return CUDA_ERROR_NOT_PERMITTED;
    CUresult result = CALL_REAL(cuInit, Flags);
    int count = 0;
    if (result != CUDA_SUCCESS || process->visible || !real.cuDeviceGetCount ||
        CALL_REAL(cuDeviceGetCount, &count) != CUDA_SUCCESS)
        return result;
    process->visible = count;
    if (count <= VGPU_MAX_DEVICES)
        return result;
    process_refuse(process, E2BIG, "cuDeviceGetCount");
    return CUDA_ERROR_NOT_PERMITTED;
}

/* total = the limit; free = what this container may still really take, so never more than the
 * card has left for anybody. */
static CUresult limited_info(struct process *process, uint64_t *free, uint64_t *total) {
    struct device *device;
    CUresult result = process_current(&device, process);
    uint64_t limit = result == CUDA_SUCCESS ? process_limit(process, device) : 0;
    if (limit == 0)
        return result;
    settle_asked(process, device);
    pools_refresh(process, device, false);
    uint64_t used = vgpu_used(process->core, device->index);
    uint64_t left = used < limit ? limit - used : 0;
    if (limit < *total)
        *total = limit;
    if (left < *free)
        *free = left;
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
    NEED_CUDA(cuMemGetInfo_v2);
    struct process *process = enter();
    size_t real_free = 0, real_total = 0;
    if (!process)
        return real.cuMemGetInfo_v2(free, total);
    CUresult result =
        CALL_REAL(cuMemGetInfo_v2, free ? &real_free : NULL, total ? &real_total : NULL);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t shown_free = real_free, shown_total = total ? real_total : UINT64_MAX;
    result = limited_info(process, &shown_free, &shown_total);
    if (result != CUDA_SUCCESS)
        return result;
    if (free)
        *free = shown_free;
    if (total)
        *total = shown_total;
    return result;
}

CUresult cuMemGetInfo(unsigned int *free, unsigned int *total) {
    NEED_CUDA(cuMemGetInfo);
    struct process *process = enter();
    if (!process)
        return real.cuMemGetInfo(free, total);
    CUresult result = CALL_REAL(cuMemGetInfo, free, total);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t shown_free = free ? *free : 0, shown_total = total ? *total : UINT64_MAX;
    result = limited_info(process, &shown_free, &shown_total);
    if (result != CUDA_SUCCESS)
        return result;
    if (free)
        *free = (unsigned int)shown_free;
    if (total)
        *total = (unsigned int)shown_total;
    return result;
}

static uint64_t limited_total(struct process *process, CUdevice ordinal, uint64_t total) {
    struct device *device = process_device(process, ordinal);
    uint64_t limit = device ? process_limit(process, device) : 0;
    return limit && limit < total ? limit : total;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev) {
    NEED_CUDA(cuDeviceTotalMem_v2);
    struct process *process = enter();
    if (!process)
        return real.cuDeviceTotalMem_v2(bytes, dev);
    CUresult result = CALL_REAL(cuDeviceTotalMem_v2, bytes, dev);
    if (result == CUDA_SUCCESS && bytes)
        *bytes = limited_total(process, dev, *bytes);
    return result;
}

CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice dev) {
    NEED_CUDA(cuDeviceTotalMem);
    struct process *process = enter();
    if (!process)
        return real.cuDeviceTotalMem(bytes, dev);
    CUresult result = CALL_REAL(cuDeviceTotalMem, bytes, dev);
    if (result == CUDA_SUCCESS && bytes)
        *bytes = (unsigned int)limited_total(process, dev, *bytes);
    return result;
}
