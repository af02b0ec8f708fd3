#include "process.h"

/* Memory that processes of the container give each other is charged to its maker. Once the maker is gone
 * the driver counts it for who still has it open, and so do we: see settle_ghosts. */

void shared_mark(struct process *process, bool exported) {
    uint32_t *flags = &vgpu_core_ext(process->core)->flags;
    if (exported)
        __atomic_fetch_or(&process->shares, SHARE_EXPORTED, __ATOMIC_RELAXED);
    if (!(__atomic_load_n(flags, __ATOMIC_RELAXED) & VGPU_FLAG_SHARED))
        __atomic_fetch_or(flags, VGPU_FLAG_SHARED, __ATOMIC_RELAXED);
}

void shared_freed(struct process *process, uint64_t address) {
    struct vgpu_entry entry;
    if (vgpu_ledger_take(process->ledger, ENTRY_SHARED, address, &entry) == 0)
        vgpu_core_stir(process->core);
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr) {
    NEED_CUDA(cuIpcGetMemHandle);
    struct process *process = enter();
    if (!process || process->mode != MODE_ON)
        return real.cuIpcGetMemHandle(pHandle, dptr);
    CUresult result = CALL_REAL(cuIpcGetMemHandle, pHandle, dptr);
    if (result != CUDA_SUCCESS)
        return result;
    CUdeviceptr base = dptr;
    if (real.cuMemGetAddressRange_v2)
        (void)CALL_REAL(cuMemGetAddressRange_v2, &base, NULL, dptr);
    struct vgpu_entry entry = {.key = base, .kind = ENTRY_SHARED};
    (void)vgpu_ledger_put(process->ledger, &entry);
    shared_mark(process, true);
    return result;
}

#define OPEN_BODY(symbol)                                      \
    NEED_CUDA(symbol);                                         \
    struct process *process = enter();                         \
    if (!process || process->mode != MODE_ON)                  \
        return real.symbol(pdptr, handle, Flags);              \
    CUresult result = CALL_REAL(symbol, pdptr, handle, Flags); \
    if (result == CUDA_SUCCESS)                                \
        shared_mark(process, false);                           \
    return result

CUresult cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags) {
    OPEN_BODY(cuIpcOpenMemHandle);
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags) {
    OPEN_BODY(cuIpcOpenMemHandle_v2);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr dptr) {
    NEED_CUDA(cuIpcCloseMemHandle);
    struct process *process = enter();
    if (!process || process->mode != MODE_ON)
        return real.cuIpcCloseMemHandle(dptr);
    struct device *device;
    CUresult result = CALL_REAL(cuIpcCloseMemHandle, dptr);
    if (result == CUDA_SUCCESS && (shares(process) & SHARE_ADOPTED)) {
        vgpu_core_stir(process->core);
        if (process_current(&device, process) == CUDA_SUCCESS)
            (void)settle(process, device, true);
    }
    return result;
}
