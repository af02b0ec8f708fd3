#pragma once
#include "process.h"

/* Local memory: the driver holds, for each context, one frame of the largest size needed so far
 * for every thread that the device can have resident. It grows at the launch (or at the
 * instantiation of a graph) that needs more, and at cuCtxSetLimit. */

/* What the memory of a context includes. */
#define LOCAL_DEFAULT 1024

/* Growth of one context's frames, from charge to correction. */
struct local_growth {
    struct taking taking;
    uint64_t context; /* key of its ENTRY_CONTEXT */
    uint64_t step;    /* bytes per thread; 0 = nothing grows */
};

/* Bytes a context takes more (or less) when its frames go from `from` to `to` bytes per thread. */
uint64_t local_bytes(const struct device *device, uint64_t from, uint64_t to);

/* The ENTRY_CONTEXT that carries the frames of `context`: a green one shares its primary's. A
 * context that we did not see being made is entered. -ENOENT where there is none. */
int local_context(struct process *process, struct device *device, uint64_t context,
                  struct vgpu_entry *entry);

/* Bytes per thread that a CUfunction or CUkernel needs, 0 = not known. */
uint64_t launch_local_need(struct process *process, CUfunction function);

/* Charges for a call that will need `need` bytes per thread in `context`: a launch, or a graph
 * that is instantiated or launched. CUDA_SUCCESS: call the driver, then local_end with its result.
 * Else refused. */
CUresult local_begin(struct local_growth *g, struct process *process, struct device *device,
                     uint64_t context, uint64_t need);
CUresult local_end(struct local_growth *g, CUresult result);

/* Raises LAUNCH_LOCAL if some known function needs more than its contexts have, else lowers it. */
void local_review(struct process *process);

/* The device of a context, else the current one's; NULL where neither is known. */
struct device *context_device(struct process *process, uint64_t context);

/* The first use of a library in a context loads its image (cuda_module.c). */
struct loading {
    struct taking taking;
    uint64_t key; /* of its ENTRY_LOADED; 0 = was loaded before */
};
CUresult loading_begin(struct loading *l, struct process *process, struct device *device,
                       uint64_t library, uint64_t context);
CUresult loading_end(struct loading *l, CUresult result);
/* True while the next use of the library in this context is the first. */
bool loading_due(struct process *process, uint64_t library, uint64_t context);
/* True while a library of this size or more is still to be loaded somewhere. */
#define LOADING_LARGE (16 * MIB)
bool loading_due_large(struct process *process);

/* Forgets functions and loaded marks of a context that died; bytes estimated for the latter. */
uint64_t modules_forget(struct process *process, uint64_t context);
/* As long as kernels of unloaded libraries are to be launched. */
void launch_watch_lazy(void);
