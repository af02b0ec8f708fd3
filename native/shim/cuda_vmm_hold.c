#include "vmm.h"

/* What holds physical memory besides handles and mappings: tiles of sparse arrays, and multicast
 * bindings. */

/* ---- tiles of sparse arrays ------------------------------------------------------------------ */

/* A tile holds the memory from the call that maps it to the call that unmaps it, maps it anew or
 * destroys the array. The unmapping itself runs later, in stream order; until then the handle
 * is commonly still there. */

static uint64_t tile_resource(const CUarrayMapInfo *info) {
    return info->resourceType == CU_RESOURCE_TYPE_ARRAY ? key_of(info->resource.array)
                                                        : key_of(info->resource.mipmap);
}

static uint64_t tile_key(const CUarrayMapInfo *info) {
    uint64_t key = mix(tile_resource(info), (uint64_t)info->subresourceType + 1);
    if (info->subresourceType == CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL) {
        key = mix(key, (uint64_t)info->subresource.sparseLevel.level << 32 |
                           info->subresource.sparseLevel.layer);
        key = mix(key, (uint64_t)info->subresource.sparseLevel.offsetX << 32 |
                           info->subresource.sparseLevel.offsetY);
        return mix(key, info->subresource.sparseLevel.offsetZ);
    }
    return mix(mix(key, info->subresource.miptail.layer), info->subresource.miptail.offset);
}

/* Holds what the list is about to map. Of unknown memory nothing is noted. */
static void tiles_hold(struct process *process, const CUarrayMapInfo *list, unsigned int count,
                       struct bag *bag) {
    struct vgpu_entry handle;
    for (unsigned int i = 0; i < count; i++) {
        if (list[i].memOperationType != CU_MEM_OPERATION_TYPE_MAP ||
            !handle_find(process, list[i].memHandle.memHandle, &handle) ||
            !backing_hold(process, handle.bytes, 0, 1))
            continue;
        struct vgpu_entry tile = {.key = tile_key(&list[i]),
                                  .kind = ENTRY_TILE,
                                  .device = handle.device,
                                  .bytes = tile_resource(&list[i]),
                                  .aux = handle.bytes,
                                  .aux2 = i};
        if (!bag_add(bag, &tile))
            backing_drop(process, handle.bytes, 0, 1);
        else
            begin_on(process, tile.device);
    }
}

static void tile_drop(struct process *process, uint64_t key) {
    struct vgpu_entry tile;
    if (vgpu_ledger_take(process->ledger, ENTRY_TILE, key, &tile))
        return;
    begin_on(process, tile.device);
    backing_drop(process, tile.aux, 0, 1);
    end_on(process, tile.device);
}

/* In the list's order: one tile may be unmapped and mapped in one call. */
static void tiles_enter(struct process *process, const CUarrayMapInfo *list, unsigned int count,
                        const struct bag *bag) {
    size_t next = 0;
    for (unsigned int i = 0; i < count; i++) {
        tile_drop(process, tile_key(&list[i]));
        if (next < bag->count && bag->all[next].aux2 == i)
            (void)vgpu_ledger_put(process->ledger, &bag->all[next++]);
    }
}

static void tiles_settle(struct process *process, const CUarrayMapInfo *list, unsigned int count,
                         struct bag *bag, CUresult result) {
    if (result == CUDA_SUCCESS)
        tiles_enter(process, list, count, bag);
    for (size_t i = 0; i < bag->count; i++) {
        if (result != CUDA_SUCCESS)
            backing_drop(process, bag->all[i].aux, 0, 1);
        end_on(process, bag->all[i].device);
    }
    bag_end(bag);
}

#define TILES_BODY(symbol)                                            \
    NEED_CUDA(symbol);                                                \
    struct process *process = enter();                                \
    struct bag bag;                                                   \
    if (!tracks(process) || !mapInfoList)                             \
        return real.symbol(mapInfoList, count, hStream);              \
    bag_start(&bag);                                                  \
    tiles_hold(process, mapInfoList, count, &bag);                    \
    CUresult result = CALL_REAL(symbol, mapInfoList, count, hStream); \
    tiles_settle(process, mapInfoList, count, &bag, result);          \
    return result

CUresult cuMemMapArrayAsync(CUarrayMapInfo *mapInfoList, unsigned int count, CUstream hStream) {
    TILES_BODY(cuMemMapArrayAsync);
}

CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *mapInfoList, unsigned int count,
                                 CUstream hStream) {
    TILES_BODY(cuMemMapArrayAsync_ptsz);
}

void vmm_array_gone(struct process *process, uint64_t resource) {
    struct vgpu_entry tile;
    uint64_t cursor = 0;
    while (vgpu_ledger_next(process->ledger, ENTRY_TILE, &cursor, &tile) == 0)
        if (tile.bytes == resource)
            tile_drop(process, tile.key);
}

/* ---- multicast ------------------------------------------------------------------------------- */

/* The object takes nothing. What is bound to it is held by the binding until it is unbound or the
 * object's last handle and mapping are gone. */

CUresult cuMulticastCreate(CUmemGenericAllocationHandle *mcHandle,
                           const CUmulticastObjectProp *prop) {
    NEED_CUDA(cuMulticastCreate);
    struct process *process = enter();
    if (!tracks(process) || !mcHandle)
        return real.cuMulticastCreate(mcHandle, prop);
    CUmemGenericAllocationHandle made = 0;
    CUresult result = CALL_REAL(cuMulticastCreate, &made, prop);
    if (result != CUDA_SUCCESS)
        return result;
    if (!handle_enter(process, made, NO_DEVICE, 0)) {
        (void)CALL_REAL(cuMemRelease, made);
        return NO_MEMORY;
    }
    *mcHandle = made;
    return result;
}

void bindings_drop(struct process *process, uint64_t object) {
    struct vgpu_entry binding;
    uint64_t cursor = 0;
    while (vgpu_ledger_next(process->ledger, ENTRY_BINDING, &cursor, &binding) == 0) {
        if (binding.aux2 != object ||
            vgpu_ledger_take(process->ledger, ENTRY_BINDING, binding.key, &binding))
            continue;
        begin_on(process, binding.device);
        backing_drop(process, binding.aux, 0, 1);
        end_on(process, binding.device);
    }
}

/* Holds the memory for a binding about to be made; false: nothing to note. */
static bool binding_begin(struct process *process, struct vgpu_entry *binding, size_t offset,
                          CUmemGenericAllocationHandle object, const struct vgpu_entry *memory,
                          uint64_t id) {
    struct vgpu_entry handle;
    if (!handle_find(process, object, &handle) || !backing_hold(process, id, 0, 1))
        return false;
    *binding = (struct vgpu_entry){.key = vmm_next_id(),
                                   .kind = ENTRY_BINDING,
                                   .device = memory->device,
                                   .bytes = offset,
                                   .aux = id,
                                   .aux2 = handle.bytes};
    begin_on(process, binding->device);
    return true;
}

static CUresult binding_end(struct process *process, const struct vgpu_entry *binding,
                            CUmemGenericAllocationHandle object, size_t size, CUresult result) {
    if (result == CUDA_SUCCESS && vgpu_ledger_put(process->ledger, binding)) {
        if (real.cuMulticastUnbind)
            (void)CALL_REAL(cuMulticastUnbind, object, binding->device, binding->bytes, size);
        result = NO_MEMORY;
    }
    if (result != CUDA_SUCCESS)
        backing_drop(process, binding->aux, 0, 1);
    end_on(process, binding->device);
    return result;
}

CUresult cuMulticastBindMem(CUmemGenericAllocationHandle mcHandle, size_t mcOffset,
                            CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size,
                            unsigned long long flags) {
    NEED_CUDA(cuMulticastBindMem);
    struct process *process = enter();
    struct vgpu_entry memory, binding;
    if (!handle_find(process, memHandle, &memory) ||
        !binding_begin(process, &binding, mcOffset, mcHandle, &memory, memory.bytes))
        return real.cuMulticastBindMem(mcHandle, mcOffset, memHandle, memOffset, size, flags);
    CUresult result =
        CALL_REAL(cuMulticastBindMem, mcHandle, mcOffset, memHandle, memOffset, size, flags);
    return binding_end(process, &binding, mcHandle, size, result);
}

CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle mcHandle, size_t mcOffset,
                             CUdeviceptr memptr, size_t size, unsigned long long flags) {
    NEED_CUDA(cuMulticastBindAddr);
    struct process *process = enter();
    struct vgpu_entry memory, binding;
    if (!mapping_find(process, memptr, &memory) ||
        !binding_begin(process, &binding, mcOffset, mcHandle, &memory, memory.aux))
        return real.cuMulticastBindAddr(mcHandle, mcOffset, memptr, size, flags);
    CUresult result = CALL_REAL(cuMulticastBindAddr, mcHandle, mcOffset, memptr, size, flags);
    return binding_end(process, &binding, mcHandle, size, result);
}

CUresult cuMulticastUnbind(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset,
                           size_t size) {
    NEED_CUDA(cuMulticastUnbind);
    struct process *process = enter();
    struct vgpu_entry object, binding;
    struct bag bag;
    uint64_t cursor = 0;
    if (!handle_find(process, mcHandle, &object))
        return real.cuMulticastUnbind(mcHandle, dev, mcOffset, size);
    bag_start(&bag);
    while (vgpu_ledger_next(process->ledger, ENTRY_BINDING, &cursor, &binding) == 0)
        if (binding.aux2 == object.bytes && binding.device == dev &&
            binding.bytes - mcOffset < size)
            (void)bag_take(&bag, process, ENTRY_BINDING, binding.key);
    CUresult result = CALL_REAL(cuMulticastUnbind, mcHandle, dev, mcOffset, size);
    bag_settle(&bag, process, result);
    return result;
}
