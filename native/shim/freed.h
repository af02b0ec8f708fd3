#pragma once
#include <sched.h>

#include "pool.h"

/* Memory of cuMemAlloc that was freed in stream order stays charged until its stream is done. */

/* After cuMemFreeAsync of a plain allocation: its ENTRY_POINTER, or with `piece` that of its block. */
void freed_add(struct process *process, const struct vgpu_entry *memory, bool piece,
               CUstream stream);
/* Gives back what streams that have nothing left to do kept; never waits. `all`: the current
 * context was just synchronised. Bytes given back. */
uint64_t freed_flush(struct process *process, bool all);
/* Bytes that stay charged on the device and that the driver may have taken back already. A settle leaves
 * them out of what is tracked, and another one follows when they are given back. */
uint64_t freed_bytes(struct process *process, struct device *device);
/* Synchronises a stream that has nothing left to do; false where that would wait or do harm. */
bool stream_finish(CUstream stream);
/* Before a stream is destroyed: what it still keeps is left to a settle. */
void freed_stream_ends(struct process *process, CUstream stream);
