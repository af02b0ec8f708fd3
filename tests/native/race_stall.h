#pragma once
#include "core_internal.h"

/* Included before everything by the race driver's build: the few nanoseconds between announcing and
 * looking become long and random, so that processes really meet there. */

void race_stall(void);

static inline uint32_t stalled_slot_high(const struct vgpu_ext *ext) {
    race_stall();
    return vgpu_slot_high(ext);
}

#define vgpu_slot_high stalled_slot_high
