#pragma once
#include "process.h"

/* Slots that may be in use. */
static inline uint32_t slots_used(const struct process *process) {
    uint32_t high = __atomic_load_n(&vgpu_core_ext(process->core)->slot_high, __ATOMIC_RELAXED);
    return high < VGPU_MAX_SLOTS ? high : VGPU_MAX_SLOTS;
}

/* The slot of a listed process, or -1. */
int neighbour_slot(struct process *process, long pid);

/* Who maps our region's path, the file deleted or not, is of this container; who has our library and
 * another region is a neighbour. Of others only the container's own PID namespace tells: there NVML
 * lists this container and no other, unless a driver lists host ids, which mean somebody else. */
bool neighbour_is_ours(struct process *process, long pid);

/* No process of our PID namespace has this id. */
bool neighbour_is_stranger(long pid);

/* Our PID namespace is not that of the host, so there are ids that mean nobody here. */
bool neighbours_hidden(void);
