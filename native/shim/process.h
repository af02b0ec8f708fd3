#pragma once
#include <limits.h>
#include <stdbool.h>

#include "../core/core.h"
#include "hooks.h"
#include "lock.h"

/* What this process knows of its tenant: the authority of the limit, the region, the ledger and
 * one record a device. Made on the first driver call that needs it; a forked child finds an empty
 * page instead of its parent's record and makes its own. */

#define NO_MEMORY CUDA_ERROR_OUT_OF_MEMORY
/* The stream handle that names the calling thread's own stream; smaller ones name the null stream. */
#define STREAM_PER_THREAD ((CUstream)2)

/* A handle as the ledger keys it. */
static inline uint64_t key_of(const void *handle) {
    return (uint64_t)(uintptr_t)handle;
}

enum process_mode {
    MODE_OFF,     /* no sign of a quota: everything passes */
    MODE_ON,      /* charged and refused */
    MODE_REFUSED, /* a quota is required and cannot be enforced: cuInit fails, charges are refused */
};

#define MIB (UINT64_C(1) << 20)
/* The driver holds device memory in blocks of this size. */
#define GRANULE (2 * MIB)
#define GRANULE_SHIFT 21
/* Ordinals we keep a record for: more than the layout's devices, so that the refusal is ours. */
#define MAX_ORDINALS 64

/* Ledger kinds: what an entry's key is, and what aux and aux2 mean. Of POINTER, BLOCK, ARRAY and MODULE
 * aux2 is the context that they die with. */
enum ledger_kind {
    ENTRY_POINTER = 1, /* address; bytes = in blocks of its own, aux = bytes asked for; of managed
                          memory bytes = all, aux = 0 */
    ENTRY_BLOCK, /* address >> GRANULE_SHIFT of a block that may be shared; aux = pieces: those of
                          several blocks are POINTER too */
    ENTRY_ARRAY, /* CUarray or CUmipmappedArray */
    ENTRY_EXTERNAL, /* CUexternalMemory */
    ENTRY_HANDLE,   /* CUmemGenericAllocationHandle; bytes = id of its backing, aux = references */
    ENTRY_BACKING,  /* our id; aux = references by handle, aux2 = mappings and bindings */
    ENTRY_MAPPING,  /* address; aux = id of the backing, aux2 = bytes mapped */
    ENTRY_EXPORT,   /* shared handle; aux = id of the backing, aux2 = its bytes */
    ENTRY_TILE,     /* part of a sparse array, hashed; bytes = array, aux = id of the backing */
    ENTRY_BINDING,  /* our id; bytes = offset, aux = id of the backing, aux2 = of the object */
    ENTRY_FREED,    /* stream; bytes = freed in it and not back yet, aux2 = context (freed.c) */
    ENTRY_LATER, /* block, stream and turn, hashed; bytes = block, aux = pieces freed in the stream and
                          its tag << 32, aux2 = context (freed.c) */
    ENTRY_POOL,     /* CUmemoryPool; aux = its record (pool.h), which holds the charge */
    ENTRY_CONTEXT,  /* CUcontext; aux = references, 0 = of a green one; aux2 = local memory per
                          thread charged */
    ENTRY_GREEN,    /* CUgreenCtx; aux = its CUcontext */
    ENTRY_PRIMARY,  /* ordinal; aux = references, aux2 = CUcontext */
    ENTRY_AHEAD,    /* CUcontext; aux = its part of device.pending */
    ENTRY_MODULE,   /* CUmodule; aux = its library, if any */
    ENTRY_LIBRARY,  /* CUlibrary; bytes = estimate of its image in each context */
    ENTRY_LOADED,   /* library and context hashed; aux = library, aux2 = context */
    ENTRY_SHARED,   /* address of an ENTRY_POINTER that was given to other processes */
    ENTRY_FUNCTION, /* CUfunction or CUkernel; bytes = module or library (a handle, not a size),
                          aux = local memory per thread, aux2 = context of a CUfunction, else 0 */
    ENTRY_EXEC,     /* CUgraphExec and device; bytes = its memory nodes (cuda_graph.c) */
};

/* Why a device has no index. Memory on it is refused, but for the first, which the driver answers. */
enum device_place {
    DEVICE_UNKNOWN = -1,  /* the driver does not know such a device, or not yet */
    DEVICE_NO_PLACE = -2, /* more devices than the layout has */
    DEVICE_LATER = -3,    /* the region could not be asked: next time */
};

/* One device the program sees, by CUDA ordinal. */
struct device {
    int ordinal;
    nvmlDevice_t nvml;    /* its handle, NULL = not asked yet */
    int index;            /* in the region, or enum device_place */
    uint64_t total;       /* bytes, cuDeviceTotalMem */
    uint64_t local_slots; /* multiprocessors x resident threads: one local-memory frame each */
    unsigned multiprocessors;

    /* Stability of a settle: started in the low half, finished in the high half. */
    uint64_t operations;

    bool estimated; /* its first context is charged by estimate: settle before the next charge */
    uint64_t estimates; /* ext.estimated when those of others were last counted */

    /* Charged and tracked, but not in NVML's figure for us: managed, imported. */
    uint64_t invisible;

    /* Under settle_lock: */
    uint64_t other;   /* charged beyond what the ledger tracks: contexts, images, stacks */
    uint64_t pending; /* charged ahead: heaps that the driver takes later */

    uint64_t graph;      /* charged for graph memory: the driver's reserved figure */
    uint32_t trims;      /* graph memory given up so often */
    uint32_t stirred;    /* ext.stirred when the ghosts were last counted */
    uint64_t counted_ns; /* and when that was done for a refusal */

    uint32_t contexts;        /* live or being made */
    uint32_t births;          /* contexts ever begun */
    uint32_t streams;         /* most at a time: the driver keeps the memory of destroyed ones */
    uint32_t streams_guessed; /* of them charged by guess since the last settle */
    struct lock context_lock; /* first retain, last release and reset of the primary context */
};

struct process {
    enum process_mode mode;
    int error;                        /* errno of MODE_REFUSED */
    bool required;                    /* a quota must be enforced in this container */
    bool per_device;                  /* limits differ by device */
    bool foreign_ids;                 /* NVML lists process ids of another namespace */
    bool known_ids;                   /* it was looked for, and does not */
    uint64_t instance;                /* this run of the container */
    uint32_t shares;                  /* enum share */
    char path[PATH_MAX];              /* region file */
    bool other_path;                  /* or, when that cannot be used, FALLBACK_CACHE */
    uint64_t limit[VGPU_MAX_DEVICES]; /* bytes by region index, 0 = none; the authority's */
    vgpu_core *core;                  /* NULL until a region exists */
    vgpu_ledger *ledger;
    struct lock device_lock;
    struct lock settle_lock;
    struct lock pool_lock;
    int visible;      /* devices the program sees, set by cuInit; 0 = not known */
    uint32_t streams; /* live */
    struct device devices[MAX_ORDINALS];
};

/* The record, made when missing. `claim`: the caller will charge, so the region is made and a slot
 * taken; without it the region is only looked at. Never NULL. */
struct process *process_get(bool claim);

/* For cuInit: after a refusal whose cause may be over, a new record; else the same. */
struct process *process_get_again(struct process *process);

/* What bodies begin with: NULL = pass the call on as it is. */
static inline struct process *enter(void) {
    if (inside)
        return NULL;
    struct process *process = process_get(true);
    return process->mode == MODE_OFF ? NULL : process;
}

/* The record of a device, its region index found; NULL for an ordinal that cannot be one. */
struct device *process_device(struct process *process, CUdevice ordinal);

/* The current context's device. The driver's own error when there is none. */
CUresult process_current(struct device **device, struct process *process);

/* The thread's context, as the owner of a ledger entry; 0 = none. */
static inline uint64_t context_current(void) {
    CUcontext context = NULL;
    if (UNLIKELY(!real.cuCtxGetCurrent) || real.cuCtxGetCurrent(&context) != CUDA_SUCCESS)
        return 0;
    return (uint64_t)(uintptr_t)context;
}

/* From now on cuInit fails and charges are refused; one line says why. */
void process_refuse(struct process *process, int error, const char *source);

/* Limit in force in bytes (clamped to the card), 0 = none. */
uint64_t process_limit(struct process *process, struct device *device);

/* Queries of ours inside a stream capture would spoil it; in relaxed mode they do not. */
static inline CUstreamCaptureMode capture_relax(void) {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (LIKELY(real.cuThreadExchangeStreamCaptureMode != NULL))
        (void)real.cuThreadExchangeStreamCaptureMode(&mode);
    return mode;
}
static inline void capture_restore(CUstreamCaptureMode mode) {
    if (LIKELY(real.cuThreadExchangeStreamCaptureMode != NULL))
        (void)real.cuThreadExchangeStreamCaptureMode(&mode);
}

/* Unless the driver clearly says no. The one question that a capture survives on every stream. */
static inline bool stream_may_capture(CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return real.cuStreamIsCapturing &&
           (CALL_REAL(cuStreamIsCapturing, stream, &status) != CUDA_SUCCESS ||
            status != CU_STREAM_CAPTURE_STATUS_NONE);
}

/* ---- charging (charge.c) --------------------------------------------------------------- */

/* Charges and counts; CUDA_ERROR_OUT_OF_MEMORY when refused. Pools of this process that hold
 * unused memory are trimmed before a refusal is final. */
CUresult charge(struct process *process, struct device *device, uint64_t bytes, int kind);
/* As charge, without such tries and uncounted; false when it does not fit. */
bool charge_once(struct process *process, struct device *device, uint64_t bytes, int kind);
void charge_forced(struct process *process, struct device *device, uint64_t bytes, int kind);
void give_back(struct process *process, struct device *device, uint64_t bytes, int kind);

/* Around every change of what the driver holds, so that a settle sees a quiet moment. */
static inline void operation_begin(struct device *device) {
    __atomic_fetch_add(&device->operations, 1, __ATOMIC_ACQ_REL);
}
static inline void operation_end(struct device *device) {
    __atomic_fetch_add(&device->operations, UINT64_C(1) << 32, __ATOMIC_ACQ_REL);
}

/* Charges what lost its maker since we last looked, in this process and in others. */
void settle_shared(struct process *process, struct device *device);

/* Brings the charge to NVML's figure for this process. 0; -ENOMEM when that does not fit the
 * limit and `force` is not set (nothing changed); -ENODATA when NVML does not list us (the estimate
 * stays). */
int settle(struct process *process, struct device *device, bool force);
/* The same with `force`, and how much less is charged now. */
int settle_gone(struct process *process, struct device *device, uint64_t *gone);

/* What a first context took, where it is charged by estimate. */
static inline void settle_first(struct process *process, struct device *device) {
    if (UNLIKELY(__atomic_load_n(&device->estimated, __ATOMIC_ACQUIRE)))
        (void)settle(process, device, true);
}

/* As operation_begin, where a charge follows: first what others left us is charged, and what our
 * first context really took. */
static inline void charging_begin(struct process *process, struct device *device) {
    if (LIKELY(process->mode == MODE_ON) &&
        UNLIKELY(__atomic_load_n(&vgpu_core_ext(process->core)->flags, __ATOMIC_RELAXED) &
                 VGPU_FLAG_SHARED))
        settle_shared(process, device);
    settle_first(process, device);
    operation_begin(device);
}

/* Charged memory that NVML does not count for this process came (or, negative, went). */
static inline void invisible_add(struct device *device, int64_t bytes) {
    __atomic_fetch_add(&device->invisible, (uint64_t)bytes, __ATOMIC_RELAXED);
}

/* What a request of `bytes` takes: whole granules. */
static inline uint64_t granules(uint64_t bytes) {
    return bytes > UINT64_MAX - GRANULE ? bytes : (bytes + GRANULE - 1) & ~(GRANULE - 1);
}

/* One allocation at an address, from announcement to ledger entry. */
struct allocation {
    struct process *process;
    struct device *device;
    uint64_t charged;
};

/* Charges for an allocation on the current device. CUDA_SUCCESS: call the driver, then
 * allocation_end; anything else is the answer. */
CUresult allocation_begin(struct allocation *a, struct process *process, uint64_t bytes);
/* Takes the driver's result. `bytes` is what was asked or found (a pitch). When it answers
 * CUDA_ERROR_OUT_OF_MEMORY after a driver success the caller frees `address` and calls nothing. */
CUresult allocation_end(struct allocation *a, CUresult result, uint64_t address, uint64_t bytes);
/* After the driver freed an ENTRY_POINTER that was taken out: bytes it held alone. */
uint64_t allocation_leave(struct process *process, const struct vgpu_entry *entry);
/* Blocks at its edges, at most two; how many. */
int allocation_blocks(const struct vgpu_entry *entry, uint64_t blocks[2]);
/* A piece of a block is gone: bytes of the block if it was the last. */
uint64_t block_leave(struct process *process, uint64_t block);

/* ---- what the driver holds beyond the ledger (settle.c) ------------------------------- */

/* Our first context may stay charged as recorded until this process charges anything else: NVML takes
 * 15 ms to start (measured). True only where a size is recorded and the limit leaves ample room for
 * what it may be wrong by; false: settle now. Every other process that comes near the limit looks at
 * us meanwhile. */
bool settle_later(struct process *process, struct device *device);
/* After a charge, where somebody was left to an estimate or gave memory away since we last looked: false when
 * the limit does not hold what others really have. */
bool settle_neighbours(struct process *process, struct device *device);

/* Charges an estimate for what a call is about to take; settle() corrects it after the call. */
CUresult estimate_charge(struct process *process, struct device *device, uint64_t bytes);
void estimate_give_back(struct process *process, struct device *device, uint64_t bytes);
/* Settles after the driver gave back what was estimated as `bytes`. */
void settle_less(struct process *process, struct device *device, uint64_t bytes);
/* The same for what the driver took already. */
void estimate_forced(struct process *process, struct device *device, uint64_t bytes);
/* Where the device has no context left nothing is held beyond the ledger: NVML lists nobody
 * without one. False, and nothing done, where there is one. */
bool estimate_clear(struct process *process, struct device *device);

/* One call that takes memory whose size the driver does not tell. */
struct taking {
    struct process *process;
    struct device *device;
    uint64_t bytes; /* the estimate charged */
};

/* Charges the estimate (may be 0). CUDA_SUCCESS: call the driver, then taking_end; anything else
 * is the answer. */
CUresult taking_begin(struct taking *t, struct process *process, struct device *device,
                      uint64_t bytes);
/* Takes the driver's result and settles. When it answers CUDA_ERROR_OUT_OF_MEMORY after a driver success
 * (never with `force`) the caller undoes the call, then calls taking_undone. */
CUresult taking_end(struct taking *t, CUresult result, bool force);
void taking_undone(struct taking *t);
/* Ends without a settle: the estimate stays where the driver said success. */
void taking_keep(struct taking *t, CUresult result);

/* The thread's context is on a device where we saw none being made: the runtime has other ways to
 * the driver. It is charged as found. */
void context_adopt(struct process *process, struct device *device);

/* Bytes a first or further context takes: measured in this container, else by size of the card. */
uint64_t estimate_context(struct process *process, struct device *device);

/* Charges processes of this container that hold no slot to the region's ghost word; false where the driver
 * does not list them. */
bool settle_ghosts(struct process *process, struct device *device);

/* What this process did with memory of several processes: reasons to look again when it lets go. */
enum share {
    SHARE_EXPORTED = 1, /* gave some to others */
    SHARE_ADOPTED = 2,  /* is charged for some whose maker is gone */
};
static inline uint32_t shares(const struct process *process) {
    return __atomic_load_n(&process->shares, __ATOMIC_RELAXED);
}

/* Memory was given to another process, or taken from one: from now on it may outlive its maker. */
void shared_mark(struct process *process, bool exported);
/* An allocation of a process that exports was freed. Before its quota is given back, so that nobody takes that
 * who does not know. */
void shared_freed(struct process *process, uint64_t address);
/* A refusal is only final when what is charged for others is still true. False: nothing changed. */
bool settle_ghosts_again(struct process *process, struct device *device);

/* Fills the region's UUIDs in NVML order. */
void settle_device_order(struct process *process);

/* ---- pools (cuda_pool.c) and launches (cuda_launch.c) ---------------------------------- */

/* Re-reads what this process's pools reserve and charges just that; with `trim`, unused memory is
 * first given up. Bytes given back. */
uint64_t pools_refresh(struct process *process, struct device *device, bool trim);

/* Why launches look further than a flag test. Set by whoever makes the reason, cleared when it
 * is gone; 0 = a launch is a tail jump. */
enum launch_reason {
    LAUNCH_UNSETTLED = 1, /* an image may be loaded by the next launch */
    LAUNCH_LOCAL = 2,     /* a kernel needs more local memory than is charged */
    LAUNCH_GRAPH = 4,     /* an executable graph holds memory nodes or such kernels */
    LAUNCH_COLD = 8,      /* the driver's launch functions are not found yet */
    LAUNCH_LAZY = 16,     /* a library that is not loaded yet has kernels to launch */
};
extern uint32_t launch_reasons;
static inline void launch_watch(uint32_t reasons) {
    __atomic_fetch_or(&launch_reasons, reasons, __ATOMIC_RELAXED);
}

/* Somebody wants to know: nothing that a settle would find stays an estimate. */
static inline void settle_asked(struct process *process, struct device *device) {
    if (UNLIKELY(__atomic_load_n(&launch_reasons, __ATOMIC_RELAXED) & LAUNCH_UNSETTLED))
        (void)settle(process, device, true);
    else
        settle_first(process, device);
}
