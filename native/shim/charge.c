#include "process.h"

/* Reserve, call, settle: the one shape of every charged call. */

CUresult charge(struct process *process, struct device *device, uint64_t bytes, int kind)
{
    if (UNLIKELY(process->mode != MODE_ON || device->index < 0))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (LIKELY(vgpu_charge(process->core, device->index, bytes, kind) == 0))
        return CUDA_SUCCESS;
    /* Memory that our own pools keep unused is not ours to be refused for. */
    if (pools_refresh(process, device, true) == 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    return vgpu_charge(process->core, device->index, bytes, kind) == 0 ? CUDA_SUCCESS
                                                                       : CUDA_ERROR_OUT_OF_MEMORY;
}

void charge_forced(struct process *process, struct device *device, uint64_t bytes, int kind)
{
    if (process->mode == MODE_ON && device->index >= 0 && bytes)
        vgpu_charge_forced(process->core, device->index, bytes, kind);
}

void give_back(struct process *process, struct device *device, uint64_t bytes, int kind)
{
    if (process->mode == MODE_ON && device->index >= 0 && bytes)
        vgpu_give_back(process->core, device->index, bytes, kind);
}

CUresult allocation_begin(struct allocation *a, struct process *process, uint64_t bytes)
{
    *a = (struct allocation){.process = process, .small = bytes <= MIB};
    CUresult result = process_current(&a->device, process);
    if (result != CUDA_SUCCESS)
        return result;
    a->charged = granules(bytes ? bytes : 1);
    operation_begin(a->device);
    result = charge(process, a->device, a->charged, VGPU_KIND_DATA);
    if (result != CUDA_SUCCESS)
        operation_end(a->device);
    return result;
}

/* Brings the charge to what the driver really gave. */
static CUresult allocation_adjust(struct allocation *a, uint64_t bytes)
{
    uint64_t real_bytes = granules(bytes);
    if (real_bytes <= a->charged) {
        give_back(a->process, a->device, a->charged - real_bytes, VGPU_KIND_DATA);
        a->charged = real_bytes;
        return CUDA_SUCCESS;
    }
    CUresult result = charge(a->process, a->device, real_bytes - a->charged, VGPU_KIND_DATA);
    if (result == CUDA_SUCCESS)
        a->charged = real_bytes;
    return result;
}

static CUresult allocation_enter(struct allocation *a, uint64_t address, uint64_t bytes)
{
    a->small = bytes <= MIB;
    if (!a->small && allocation_adjust(a, bytes) != CUDA_SUCCESS)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t block = address >> GRANULE_SHIFT;
    struct vgpu_entry entry = {.key = address,
                               .kind = ENTRY_POINTER,
                               .device = a->device->ordinal,
                               .bytes = a->small ? 0 : a->charged,
                               .aux = a->small ? block : 0};
    if (vgpu_ledger_put(a->process->ledger, &entry))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!a->small)
        return CUDA_SUCCESS;
    int first = vgpu_ledger_ref(a->process->ledger, ENTRY_BLOCK, block, entry.device, GRANULE);
    if (first < 0) {
        vgpu_ledger_take(a->process->ledger, ENTRY_POINTER, address, &entry);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    uint64_t excess = a->charged - (first ? GRANULE : 0);
    give_back(a->process, a->device, excess, VGPU_KIND_DATA);
    a->charged -= excess;
    return CUDA_SUCCESS;
}

CUresult allocation_end(struct allocation *a, CUresult result, uint64_t address, uint64_t bytes)
{
    CUresult answer = result;
    if (result == CUDA_SUCCESS)
        answer = allocation_enter(a, address, bytes);
    if (answer != CUDA_SUCCESS)
        give_back(a->process, a->device, a->charged, VGPU_KIND_DATA);
    operation_end(a->device);
    return answer;
}
