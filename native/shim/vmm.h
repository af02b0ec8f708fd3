#pragma once
#include "process.h"

/* What the parts of virtual memory management share: cuda_vmm.c has backings, handles, mappings and
 * shared handles, cuda_vmm_hold.c the other holds, cuda_array.c the arrays. */

/* Of a backing without a device: a multicast object, which takes no memory itself. */
#define NO_DEVICE (-1)

/* Only what is charged can be found: in MODE_REFUSED there may be no ledger. */
static inline bool tracks(const struct process *process) {
    return process && process->mode == MODE_ON;
}

static inline void begin_on(struct process *process, int ordinal) {
    if (ordinal != NO_DEVICE)
        operation_begin(&process->devices[ordinal]);
}

static inline void end_on(struct process *process, int ordinal) {
    if (ordinal != NO_DEVICE)
        operation_end(&process->devices[ordinal]);
}

static inline uint64_t mix(uint64_t seed, uint64_t value) {
    uint64_t x = (seed ^ value) * 0xd6e8feb86659fd93u;
    return (x ^ (x >> 32)) * 0xd6e8feb86659fd93u;
}

uint64_t vmm_next_id(void);

/* Entries of one call, taken out of the ledger or still to be put in. */
#define BAG_FEW 8

struct bag {
    struct vgpu_entry few[BAG_FEW];
    struct vgpu_entry *all;
    size_t count, room;
};

void bag_start(struct bag *bag);
void bag_end(struct bag *bag);
bool bag_add(struct bag *bag, const struct vgpu_entry *entry);
/* Takes the entry out and remembers it, with its device marked busy. */
bool bag_take(struct bag *bag, struct process *process, int kind, uint64_t key);
/* After the driver's answer: lets go of what the bag's entries held, or puts them back. */
void bag_settle(struct bag *bag, struct process *process, CUresult result);

/* Counts references and mappings of a backing before the driver makes them; false: it is gone. */
bool backing_hold(struct process *process, uint64_t id, int handles, int mappings);
/* Counts them out after the driver dropped them; the last gives the memory back. */
void backing_drop(struct process *process, uint64_t id, int64_t handles, int64_t mappings);
bool handle_find(struct process *process, CUmemGenericAllocationHandle handle,
                 struct vgpu_entry *found);
/* Enters a new backing with one handle; its id, 0 when there is no memory for it. */
uint64_t handle_enter(struct process *process, CUmemGenericAllocationHandle handle, int ordinal,
                      uint64_t bytes);
/* The mapping that covers an address. */
bool mapping_find(struct process *process, uint64_t address, struct vgpu_entry *found);

/* A multicast object is gone, and what was bound to it with it. */
void bindings_drop(struct process *process, uint64_t object);
/* A sparse array is gone, and what was mapped into it with it. */
void vmm_array_gone(struct process *process, uint64_t resource);
