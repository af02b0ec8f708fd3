#include "vmm.h"

#include <string.h>
#include <sys/mman.h>

/* Physical memory by handle. A backing is what cuMemCreate took; it is held by references (create,
 * retain, import), mappings, tiles of sparse arrays and multicast bindings, and given back with
 * the last of them, as the driver does. A hold is counted before the driver makes it and let go
 * after the driver dropped it, so no moment shows less than is held.
 *
 * Imported memory is charged to the process that made it, once: here its backing weighs nothing.
 * What a process imports from itself is another handle of the same backing. */

uint64_t vmm_next_id(void) {
    static uint64_t serial;
    return __atomic_add_fetch(&serial, 1, __ATOMIC_RELAXED);
}

/* ---- entries of one call, taken out of the ledger or still to be put in -------------------- */

void bag_start(struct bag *bag) {
    bag->all = bag->few;
    bag->count = 0;
    bag->room = BAG_FEW;
}

void bag_end(struct bag *bag) {
    if (bag->all != bag->few)
        munmap(bag->all, bag->room * sizeof *bag->all);
}

bool bag_add(struct bag *bag, const struct vgpu_entry *entry) {
    if (bag->count == bag->room) {
        size_t room = bag->room * 16;
        struct vgpu_entry *all = mmap(NULL, room * sizeof *all, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (all == MAP_FAILED)
            return false;
        memcpy(all, bag->all, bag->count * sizeof *all);
        bag_end(bag);
        bag->all = all;
        bag->room = room;
    }
    bag->all[bag->count++] = *entry;
    return true;
}

bool bag_take(struct bag *bag, struct process *process, int kind, uint64_t key) {
    struct vgpu_entry entry;
    if (vgpu_ledger_take(process->ledger, kind, key, &entry))
        return false;
    if (!bag_add(bag, &entry)) {
        (void)vgpu_ledger_put(process->ledger, &entry);
        return false;
    }
    begin_on(process, entry.device);
    return true;
}

/* ---- backings and handles ------------------------------------------------------------------- */

bool backing_hold(struct process *process, uint64_t id, int handles, int mappings) {
    struct vgpu_entry backing;
    return vgpu_ledger_add(process->ledger, ENTRY_BACKING, id, handles, mappings, &backing) == 0;
}

void backing_drop(struct process *process, uint64_t id, int64_t handles, int64_t mappings) {
    struct vgpu_entry backing;
    /* Whoever drops the last hold gives it back: once. */
    if (vgpu_ledger_drop(process->ledger, ENTRY_BACKING, id, handles, mappings, &backing) != 1)
        return;
    if (backing.device == NO_DEVICE) {
        bindings_drop(process, id);
        return;
    }
    if (shares(process))
        vgpu_core_stir(process->core);
    give_back(process, &process->devices[backing.device], backing.bytes, VGPU_KIND_DATA);
}

bool handle_find(struct process *process, CUmemGenericAllocationHandle handle,
                 struct vgpu_entry *found) {
    return tracks(process) && vgpu_ledger_get(process->ledger, ENTRY_HANDLE, handle, found) == 0;
}

/* Counts one reference of this value, already counted in the backing. */
static int handle_ref(struct process *process, CUmemGenericAllocationHandle handle, int ordinal,
                      uint64_t id) {
    struct vgpu_entry old;
    int first = vgpu_ledger_ref(process->ledger, ENTRY_HANDLE, handle, ordinal, id, 0);
    if (first || vgpu_ledger_get(process->ledger, ENTRY_HANDLE, handle, &old) || old.bytes == id)
        return first < 0 ? first : 0;
    /* The driver gave a value again that we thought was live: what it named is gone. */
    if (vgpu_ledger_take(process->ledger, ENTRY_HANDLE, handle, &old) == 0)
        backing_drop(process, old.bytes, (int64_t)old.aux - 1, 0);
    first = vgpu_ledger_ref(process->ledger, ENTRY_HANDLE, handle, ordinal, id, 0);
    return first < 0 ? first : 0;
}

uint64_t handle_enter(struct process *process, CUmemGenericAllocationHandle handle, int ordinal,
                      uint64_t bytes) {
    struct vgpu_entry backing = {
        .key = vmm_next_id(), .kind = ENTRY_BACKING, .device = ordinal, .bytes = bytes, .aux = 1};
    if (vgpu_ledger_put(process->ledger, &backing))
        return 0;
    if (handle_ref(process, handle, ordinal, backing.key) == 0)
        return backing.key;
    (void)vgpu_ledger_take(process->ledger, ENTRY_BACKING, backing.key, &backing);
    return 0;
}

/* NULL: not ours to judge. Host memory takes no device memory; a device that does not exist and a
 * call before cuInit are answered by the driver. */
static struct device *create_device(struct process *process, const CUmemAllocationProp *prop) {
    int count = process->visible;
    if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return NULL;
    if (count == 0 && (!real.cuDeviceGetCount || CALL_REAL(cuDeviceGetCount, &count)))
        return NULL;
    return prop->location.id < count ? process_device(process, prop->location.id) : NULL;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                     const CUmemAllocationProp *prop, unsigned long long flags) {
    NEED_CUDA(cuMemCreate);
    struct process *process = enter();
    struct device *device = NULL;
    if (process && handle && size && prop)
        device = create_device(process, prop);
    if (!device)
        return real.cuMemCreate(handle, size, prop, flags);
    uint64_t charged = granules(size);
    charging_begin(process, device);
    CUresult result = charge(process, device, charged, VGPU_KIND_DATA);
    if (result == CUDA_SUCCESS) {
        CUmemGenericAllocationHandle made = 0;
        result = CALL_REAL(cuMemCreate, &made, size, prop, flags);
        if (result == CUDA_SUCCESS && !handle_enter(process, made, device->ordinal, charged)) {
            (void)CALL_REAL(cuMemRelease, made);
            result = NO_MEMORY;
        }
        if (result == CUDA_SUCCESS)
            *handle = made;
        else
            give_back(process, device, charged, VGPU_KIND_DATA);
    }
    operation_end(device);
    return result;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    NEED_CUDA(cuMemRelease);
    struct process *process = enter();
    struct vgpu_entry entry;
    if (!tracks(process) || vgpu_ledger_unref(process->ledger, ENTRY_HANDLE, handle, &entry) < 0)
        return real.cuMemRelease(handle);
    begin_on(process, entry.device);
    CUresult result = CALL_REAL(cuMemRelease, handle);
    if (result == CUDA_SUCCESS)
        backing_drop(process, entry.bytes, 1, 0);
    else
        (void)handle_ref(process, handle, entry.device, entry.bytes);
    end_on(process, entry.device);
    return result;
}

/* ---- mappings ------------------------------------------------------------------------------- */

bool mapping_find(struct process *process, uint64_t address, struct vgpu_entry *found) {
    uint64_t cursor = 0;
    if (!tracks(process))
        return false;
    if (vgpu_ledger_get(process->ledger, ENTRY_MAPPING, address, found) == 0)
        return true;
    while (vgpu_ledger_next(process->ledger, ENTRY_MAPPING, &cursor, found) == 0)
        if (address - found->key < found->aux2)
            return true;
    return false;
}

static int mapping_enter(struct process *process, const struct vgpu_entry *entry) {
    struct vgpu_entry old;
    int error = vgpu_ledger_put(process->ledger, entry);
    /* The driver maps nothing twice, so an old entry is one whose end we did not see. */
    if (error && vgpu_ledger_take(process->ledger, ENTRY_MAPPING, entry->key, &old) == 0) {
        backing_drop(process, old.aux, 0, 1);
        error = vgpu_ledger_put(process->ledger, entry);
    }
    return error;
}

CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    NEED_CUDA(cuMemMap);
    struct process *process = enter();
    struct vgpu_entry entry;
    if (!handle_find(process, handle, &entry) || !backing_hold(process, entry.bytes, 0, 1))
        return real.cuMemMap(ptr, size, offset, handle, flags);
    struct vgpu_entry mapping = {.key = ptr,
                                 .kind = ENTRY_MAPPING,
                                 .device = entry.device,
                                 .aux = entry.bytes,
                                 .aux2 = size};
    begin_on(process, entry.device);
    CUresult result = CALL_REAL(cuMemMap, ptr, size, offset, handle, flags);
    if (result == CUDA_SUCCESS && mapping_enter(process, &mapping)) {
        (void)CALL_REAL(cuMemUnmap, ptr, size);
        result = NO_MEMORY;
    }
    if (result != CUDA_SUCCESS)
        backing_drop(process, entry.bytes, 0, 1);
    end_on(process, entry.device);
    return result;
}

/* One call may unmap several mappings, each whole. Those side by side are found by address, those
 * behind a gap by looking through all. */
static void mappings_take(struct process *process, uint64_t from, uint64_t size, struct bag *bag) {
    uint64_t at = from, end = from + size, cursor = 0;
    struct vgpu_entry entry;
    while (at < end && bag_take(bag, process, ENTRY_MAPPING, at))
        at += bag->all[bag->count - 1].aux2;
    if (at >= end)
        return;
    while (vgpu_ledger_next(process->ledger, ENTRY_MAPPING, &cursor, &entry) == 0)
        if (entry.key - from < size)
            (void)bag_take(bag, process, ENTRY_MAPPING, entry.key);
}

void bag_settle(struct bag *bag, struct process *process, CUresult result) {
    for (size_t i = 0; i < bag->count; i++) {
        const struct vgpu_entry *entry = &bag->all[i];
        if (result == CUDA_SUCCESS)
            backing_drop(process, entry->aux, 0, 1);
        else
            (void)vgpu_ledger_put(process->ledger, entry);
        end_on(process, entry->device);
    }
    bag_end(bag);
}

CUresult cuMemUnmap(CUdeviceptr ptr, size_t size) {
    NEED_CUDA(cuMemUnmap);
    struct process *process = enter();
    struct bag bag;
    if (!tracks(process))
        return real.cuMemUnmap(ptr, size);
    bag_start(&bag);
    mappings_take(process, ptr, size, &bag);
    CUresult result = CALL_REAL(cuMemUnmap, ptr, size);
    bag_settle(&bag, process, result);
    return result;
}

/* The driver gives the value the memory was made with, or may give another. */
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr) {
    NEED_CUDA(cuMemRetainAllocationHandle);
    struct process *process = enter();
    struct vgpu_entry mapping;
    if (!handle || !mapping_find(process, (uintptr_t)addr, &mapping) ||
        !backing_hold(process, mapping.aux, 1, 0))
        return real.cuMemRetainAllocationHandle(handle, addr);
    CUmemGenericAllocationHandle made = 0;
    begin_on(process, mapping.device);
    CUresult result = CALL_REAL(cuMemRetainAllocationHandle, &made, addr);
    if (result == CUDA_SUCCESS && handle_ref(process, made, mapping.device, mapping.aux)) {
        (void)CALL_REAL(cuMemRelease, made);
        result = NO_MEMORY;
    }
    if (result == CUDA_SUCCESS)
        *handle = made;
    else
        backing_drop(process, mapping.aux, 1, 0);
    end_on(process, mapping.device);
    return result;
}

/* ---- shared handles -------------------------------------------------------------------------- */

#define FABRIC_HANDLE_WORDS 8

/* What names shared memory here: the descriptor's number, or the fabric handle itself. */
static uint64_t export_key(CUmemAllocationHandleType type, const void *fabric, int descriptor) {
    uint64_t words[FABRIC_HANDLE_WORDS], key = (uint64_t)type;
    if (type != CU_MEM_HANDLE_TYPE_FABRIC)
        return key << 32 | (uint32_t)descriptor;
    memcpy(words, fabric, sizeof words);
    for (int i = 0; i < FABRIC_HANDLE_WORDS; i++)
        key = mix(key, words[i]);
    return key;
}

static bool is_shareable(CUmemAllocationHandleType type) {
    return type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || type == CU_MEM_HANDLE_TYPE_FABRIC;
}

/* Notes which memory a shared handle names, so that importing it here is known as our own. */
CUresult cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType handleType,
                                      unsigned long long flags) {
    NEED_CUDA(cuMemExportToShareableHandle);
    struct process *process = enter();
    struct vgpu_entry entry, backing, old;
    if (!shareableHandle || !is_shareable(handleType) || !handle_find(process, handle, &entry) ||
        vgpu_ledger_get(process->ledger, ENTRY_BACKING, entry.bytes, &backing))
        return real.cuMemExportToShareableHandle(shareableHandle, handle, handleType, flags);
    CUresult result =
        CALL_REAL(cuMemExportToShareableHandle, shareableHandle, handle, handleType, flags);
    if (result != CUDA_SUCCESS)
        return result;
    int descriptor = 0;
    if (handleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        memcpy(&descriptor, shareableHandle, sizeof descriptor);
    struct vgpu_entry shared = {.key = export_key(handleType, shareableHandle, descriptor),
                                .kind = ENTRY_EXPORT,
                                .device = entry.device,
                                .aux = entry.bytes,
                                .aux2 = backing.bytes};
    (void)vgpu_ledger_take(process->ledger, ENTRY_EXPORT, shared.key, &old);
    (void)vgpu_ledger_put(process->ledger, &shared);
    shared_mark(process, true);
    return result;
}

/* The device of imported memory, NO_DEVICE for a multicast object, which has no properties. False
 * for host memory. */
static bool import_device(struct process *process, CUmemGenericAllocationHandle handle,
                          int *ordinal) {
    CUmemAllocationProp prop;
    memset(&prop, 0, sizeof prop);
    *ordinal = NO_DEVICE;
    if (!real.cuMemGetAllocationPropertiesFromHandle ||
        CALL_REAL(cuMemGetAllocationPropertiesFromHandle, &prop, handle) != CUDA_SUCCESS)
        return true;
    const struct device *device = create_device(process, &prop);
    if (device)
        *ordinal = device->ordinal;
    return device != NULL;
}

/* Our own memory: one more reference, or, where only the shared handle kept it, charged anew. */
static CUresult import_own(struct process *process, CUmemGenericAllocationHandle handle,
                           const struct vgpu_entry *shared) {
    if (backing_hold(process, shared->aux, 1, 0)) {
        if (handle_ref(process, handle, shared->device, shared->aux) == 0)
            return CUDA_SUCCESS;
        backing_drop(process, shared->aux, 1, 0);
        return NO_MEMORY;
    }
    if (shared->device == NO_DEVICE)
        return handle_enter(process, handle, NO_DEVICE, 0) ? CUDA_SUCCESS : NO_MEMORY;
    struct device *device = &process->devices[shared->device];
    CUresult result = charge(process, device, shared->aux2, VGPU_KIND_DATA);
    if (result != CUDA_SUCCESS)
        return result;
    struct vgpu_entry renewed = *shared;
    renewed.aux = handle_enter(process, handle, shared->device, shared->aux2);
    if (!renewed.aux) {
        give_back(process, device, shared->aux2, VGPU_KIND_DATA);
        return NO_MEMORY;
    }
    struct vgpu_entry old;
    (void)vgpu_ledger_take(process->ledger, ENTRY_EXPORT, shared->key, &old);
    (void)vgpu_ledger_put(process->ledger, &renewed);
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle,
                                        CUmemAllocationHandleType shHandleType) {
    NEED_CUDA(cuMemImportFromShareableHandle);
    struct process *process = enter();
    struct vgpu_entry shared;
    if (!tracks(process) || !handle || !is_shareable(shHandleType))
        return real.cuMemImportFromShareableHandle(handle, osHandle, shHandleType);
    CUmemGenericAllocationHandle made = 0;
    CUresult result = CALL_REAL(cuMemImportFromShareableHandle, &made, osHandle, shHandleType);
    if (result != CUDA_SUCCESS)
        return result;
    int ordinal;
    if (!import_device(process, made, &ordinal)) {
        *handle = made;
        return result;
    }
    /* A descriptor's number may name other memory by now, hardly on the same device. */
    uint64_t key = export_key(shHandleType, osHandle, (int)(intptr_t)osHandle);
    bool own = vgpu_ledger_get(process->ledger, ENTRY_EXPORT, key, &shared) == 0 &&
               shared.device == ordinal;
    begin_on(process, ordinal);
    if (own)
        result = import_own(process, made, &shared);
    else if (!handle_enter(process, made, ordinal, 0))
        result = NO_MEMORY;
    else
        shared_mark(process, false);
    if (result != CUDA_SUCCESS)
        (void)CALL_REAL(cuMemRelease, made);
    else
        *handle = made;
    end_on(process, ordinal);
    return result;
}
