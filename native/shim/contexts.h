#pragma once
#include "process.h"

/* What ends with a context, taken out of the ledger before the driver ends it: its addresses may
 * be another context's at once. */
struct doomed {
    struct vgpu_entry *rows;
    uint64_t count;
    uint64_t room; /* bytes mapped at rows */
};

/* Takes out the entries that live in `context`. A primary context also owns what was made in green
 * contexts of its device. */
void doomed_begin(struct doomed *d, struct process *process, struct device *device,
                  uint64_t context, bool primary);
/* With `dead` gives their quota back (bytes estimated for images are returned); else puts them
 * back. Within an operation of the device. */
uint64_t doomed_end(struct doomed *d, struct process *process, struct device *device, bool dead);

/* Gives back what was charged ahead, at most `bytes`. */
void pending_give_back(struct process *process, struct device *device, uint64_t bytes);

/* The device has no context left, so no stream. */
void streams_forget(struct process *process, struct device *device);
