#pragma once
#include "process.h"

/* The driver is going to say so itself: not initialised, no such device. */
bool context_hopeless(CUdevice dev);

/* 1 active, 0 not, -1 the driver does not say. */
int context_primary_active(CUdevice dev);

/* Charges for a context that is about to be made, and counts it. */
CUresult birth_begin(struct taking *t, struct process *process, struct device *device,
                     uint64_t bytes);
/* As taking_end: takes the driver's result and settles, or leaves that for later. */
CUresult birth_end(struct taking *t, CUresult result);
/* It was not made, or was undone. */
void birth_failed(struct device *device);
void context_enter(struct process *process, struct device *device, CUcontext context,
                   uint64_t bytes);

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

/* A context is gone, with what its destroyed streams left for others. `last`: the device has none
 * left, so no stream. */
void streams_forget(struct process *process, struct device *device, bool last);

/* Gives back all that is known to have been in a context that the driver ended. Ends the operation
 * that doomed_begin was in. */
void context_death(struct doomed *d, struct process *process, struct device *device,
                   const struct vgpu_entry *context);
