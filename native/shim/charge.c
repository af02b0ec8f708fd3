#include <errno.h>
#include <string.h>

#include "process.h"

/* Reserve, call, settle: the one shape of every charged call. */

bool charge_once(struct process *process, struct device *device, uint64_t bytes, int kind) {
    const struct vgpu_ext *ext = vgpu_core_ext(process->core);
    if (UNLIKELY(vgpu_charge_quietly(process->core, device->index, bytes, kind)))
        return false;
    if (LIKELY(__atomic_load_n(&ext->estimated, __ATOMIC_SEQ_CST) ==
                   __atomic_load_n(&device->estimates, __ATOMIC_RELAXED) &&
               !(__atomic_load_n(&ext->flags, __ATOMIC_RELAXED) & VGPU_FLAG_SHARED)) ||
        settle_neighbours(process, device))
        return true;
    /* What others really have is in the sum by now: of two that give way one gets it after all. */
    give_back(process, device, bytes, kind);
    return vgpu_charge_quietly(process->core, device->index, bytes, kind) == 0;
}

CUresult charge(struct process *process, struct device *device, uint64_t bytes, int kind) {
    if (UNLIKELY(process->mode != MODE_ON || device->index < 0))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (LIKELY(charge_once(process, device, bytes, kind)))
        return CUDA_SUCCESS;
    /* Neither memory that our own pools keep unused, nor what is counted for processes that are gone,
     * is a reason to refuse. */
    bool less = pools_refresh(process, device, true) > 0;
    less |= settle_ghosts_again(process, device);
    if (less && charge_once(process, device, bytes, kind))
        return CUDA_SUCCESS;
    vgpu_refused(process->core, device->index, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

void charge_forced(struct process *process, struct device *device, uint64_t bytes, int kind) {
    if (process->mode == MODE_ON && device->index >= 0 && bytes)
        vgpu_charge_forced(process->core, device->index, bytes, kind);
}

void give_back(struct process *process, struct device *device, uint64_t bytes, int kind) {
    if (process->mode == MODE_ON && device->index >= 0 && bytes)
        vgpu_give_back(process->core, device->index, bytes, kind);
}

CUresult allocation_begin(struct allocation *a, struct process *process, uint64_t bytes) {
    *a = (struct allocation){.process = process};
    CUresult result = process_current(&a->device, process);
    if (result != CUDA_SUCCESS)
        return result;
    a->charged = granules(bytes ? bytes : 1);
    charging_begin(process, a->device);
    result = charge(process, a->device, a->charged, VGPU_KIND_DATA);
    if (result != CUDA_SUCCESS)
        operation_end(a->device);
    return result;
}

/* The driver's own rule, measured: it holds one block for each distinct address >> GRANULE_SHIFT
 * that any live allocation of the context covers. Blocks covered whole belong to one allocation;
 * those at its edges may be shared and are counted. One that lies in a single block is known by that
 * count alone: of thousands of small ones only their blocks are kept. */
struct extent {
    uint64_t whole; /* bytes in blocks covered whole */
    uint64_t edge[2];
    int edges;
};

static struct extent extent_of(uint64_t address, uint64_t bytes) {
    struct extent e = {0};
    uint64_t end = address + (bytes ? bytes : 1);
    uint64_t first = (address + GRANULE - 1) & ~(GRANULE - 1), last = end & ~(GRANULE - 1);
    if (address < first)
        e.edge[e.edges++] = address >> GRANULE_SHIFT;
    if (last < end && (last >= first || !e.edges))
        e.edge[e.edges++] = end >> GRANULE_SHIFT;
    e.whole = last > first ? last - first : 0;
    return e;
}

/* Counts into the edge blocks; bytes newly held through them, or a negative errno. */
static int64_t edges_ref(struct process *process, int device, const struct extent *e,
                         uint64_t context) {
    int64_t bytes = 0;
    for (int i = 0; i < e->edges; i++) {
        int first =
            vgpu_ledger_ref(process->ledger, ENTRY_BLOCK, e->edge[i], device, GRANULE, context);
        if (first < 0) {
            struct vgpu_entry block;
            while (i-- > 0)
                (void)vgpu_ledger_unref(process->ledger, ENTRY_BLOCK, e->edge[i], &block);
            return first;
        }
        bytes += first ? (int64_t)GRANULE : 0;
    }
    return bytes;
}

uint64_t block_leave(struct process *process, uint64_t block) {
    struct vgpu_entry entry;
    return vgpu_ledger_unref(process->ledger, ENTRY_BLOCK, block, &entry) == 1 ? GRANULE : 0;
}

uint64_t allocation_leave(struct process *process, const struct vgpu_entry *entry) {
    struct extent e = extent_of(entry->key, entry->aux);
    uint64_t bytes = e.whole;
    for (int i = 0; i < e.edges; i++)
        bytes += block_leave(process, e.edge[i]);
    return bytes;
}

int allocation_blocks(const struct vgpu_entry *entry, uint64_t blocks[2]) {
    struct extent e = extent_of(entry->key, entry->aux);
    memcpy(blocks, e.edge, sizeof e.edge);
    return e.edges;
}

/* The driver gives no address twice: an old entry is one whose end we did not see. A settle since
 * may have found its memory gone, so its charge becomes one that the next settle corrects. */
static int pointer_put(struct process *process, const struct vgpu_entry *entry) {
    struct vgpu_entry old;
    int error = vgpu_ledger_put(process->ledger, entry);
    if (LIKELY(error != -EEXIST) ||
        vgpu_ledger_take(process->ledger, ENTRY_POINTER, entry->key, &old))
        return error;
    struct device *device = process_device(process, old.device);
    uint64_t bytes = old.aux ? allocation_leave(process, &old) : old.bytes;
    if (!old.aux)
        invisible_add(device, -(int64_t)bytes);
    estimate_forced(process, device, bytes);
    give_back(process, device, bytes, VGPU_KIND_DATA);
    return vgpu_ledger_put(process->ledger, entry);
}

static CUresult allocation_enter(struct allocation *a, uint64_t address, uint64_t bytes) {
    struct extent e = extent_of(address, bytes);
    bool piece = !e.whole && e.edges == 1;
    struct vgpu_entry entry = {.key = address,
                               .kind = ENTRY_POINTER,
                               .device = a->device->ordinal,
                               .bytes = e.whole,
                               .aux = bytes,
                               .aux2 = context_current()};
    if (!piece && pointer_put(a->process, &entry))
        return CUDA_ERROR_OUT_OF_MEMORY;
    int64_t edges = edges_ref(a->process, entry.device, &e, entry.aux2);
    uint64_t taken = e.whole + (edges > 0 ? (uint64_t)edges : 0);
    CUresult result = edges < 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    if (edges >= 0 && taken > a->charged)
        result = charge(a->process, a->device, taken - a->charged, VGPU_KIND_DATA);
    if (result != CUDA_SUCCESS) {
        if (!piece)
            (void)vgpu_ledger_take(a->process->ledger, ENTRY_POINTER, address, &entry);
        if (edges >= 0)
            (void)allocation_leave(a->process, &entry);
        return result;
    }
    if (taken < a->charged)
        give_back(a->process, a->device, a->charged - taken, VGPU_KIND_DATA);
    a->charged = taken;
    return CUDA_SUCCESS;
}

CUresult allocation_end(struct allocation *a, CUresult result, uint64_t address, uint64_t bytes) {
    CUresult answer = result;
    if (result == CUDA_SUCCESS)
        answer = allocation_enter(a, address, bytes);
    if (answer != CUDA_SUCCESS)
        give_back(a->process, a->device, a->charged, VGPU_KIND_DATA);
    operation_end(a->device);
    return answer;
}
