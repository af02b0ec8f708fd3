#include <errno.h>

#include "launch.h"

/* Launches: one test and a jump while there is no reason to look further. */

uint32_t launch_reasons = LAUNCH_COLD;

/* Launches that may pass before we stop waiting for the kernels of an unloaded library. */
#define LAZY_PATIENCE 1000
static int32_t lazy_patience;

void launch_watch_lazy(void) {
    __atomic_store_n(&lazy_patience, LAZY_PATIENCE, __ATOMIC_RELAXED);
    launch_watch(LAUNCH_LAZY);
}

/* Without LAUNCH_COLD the targets are there. */
static uint32_t reasons(void) {
    return __atomic_load_n(&launch_reasons, __ATOMIC_ACQUIRE);
}

static void lower(uint32_t bits) {
    __atomic_fetch_and(&launch_reasons, ~bits, __ATOMIC_RELAXED);
}

/* Small images are settled when they have come; a large one must not come unseen. */
static void lazy_review(struct process *process) {
    lower(LAUNCH_LAZY);
    if (loading_due_large(process))
        launch_watch_lazy();
}

/* ---- local memory ------------------------------------------------------------------------- */

/* Measured: within 0.4 MiB of this, in whole granules, from 512 B to 128 KiB. */
#define LOCAL_FIXED (MIB / 2)

static uint64_t frames(const struct device *device, uint64_t per_thread) {
    uint64_t bytes, aligned = (per_thread + 15) & ~UINT64_C(15);
    if (__builtin_mul_overflow(device->local_slots, aligned, &bytes) || bytes > UINT64_MAX / 2)
        return UINT64_MAX / 2;
    return granules(bytes + LOCAL_FIXED);
}

uint64_t local_bytes(const struct device *device, uint64_t from, uint64_t to) {
    uint64_t before = frames(device, from), after = frames(device, to);
    return after > before ? after - before : before - after;
}

int local_context(struct process *process, struct device *device, uint64_t context,
                  struct vgpu_entry *entry) {
    if (vgpu_ledger_get(process->ledger, ENTRY_CONTEXT, context, entry)) {
        struct vgpu_entry made = {.key = context,
                                  .kind = ENTRY_CONTEXT,
                                  .device = device->ordinal,
                                  .aux = 1,
                                  .aux2 = LOCAL_DEFAULT};
        if (!context)
            return -ENOENT;
        (void)vgpu_ledger_put(process->ledger, &made);
        return vgpu_ledger_get(process->ledger, ENTRY_CONTEXT, context, entry);
    }
    if (entry->aux)
        return 0;
    struct vgpu_entry primary;
    if (vgpu_ledger_get(process->ledger, ENTRY_PRIMARY, (uint64_t)device->ordinal, &primary))
        return 0;
    return vgpu_ledger_get(process->ledger, ENTRY_CONTEXT, primary.aux2, entry);
}

uint64_t launch_local_need(struct process *process, CUfunction function) {
    struct vgpu_entry entry = {.key = key_of(function)};
    struct device *device;
    if (!function || !vgpu_ledger_get(process->ledger, ENTRY_FUNCTION, entry.key, &entry))
        return entry.aux;
    /* Not looked up through us; each of the two questions refuses the other's handles. */
    int local = 0;
    CUresult result = CUDA_ERROR_NOT_FOUND;
    if (real.cuFuncGetAttribute)
        result =
            CALL_REAL(cuFuncGetAttribute, &local, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function);
    if (result != CUDA_SUCCESS && real.cuKernelGetAttribute &&
        process_current(&device, process) == CUDA_SUCCESS)
        result = CALL_REAL(cuKernelGetAttribute, &local, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
                           (CUkernel)(void *)function, device->ordinal);
    return result == CUDA_SUCCESS && local > 0 ? (uint64_t)local : 0;
}

CUresult local_begin(struct local_growth *g, struct process *process, struct device *device,
                     uint64_t context, uint64_t need) {
    struct vgpu_entry entry;
    *g = (struct local_growth){.context = 0};
    need = (need + 15) & ~UINT64_C(15);
    for (;;) {
        if (need <= LOCAL_DEFAULT || local_context(process, device, context, &entry) ||
            need <= entry.aux2)
            return CUDA_SUCCESS;
        uint64_t have = entry.aux2;
        CUresult result =
            taking_begin(&g->taking, process, device, local_bytes(device, have, need));
        if (result != CUDA_SUCCESS)
            return result;
        g->context = entry.key;
        g->step = need - have;
        if (vgpu_ledger_add(process->ledger, ENTRY_CONTEXT, entry.key, 0, (int64_t)g->step,
                            &entry) == 0 &&
            entry.aux2 == need)
            return CUDA_SUCCESS;
        /* Another thread grew it meanwhile. */
        (void)local_end(g, CUDA_ERROR_OUT_OF_MEMORY);
        *g = (struct local_growth){.context = 0};
    }
}

CUresult local_end(struct local_growth *g, CUresult result) {
    struct vgpu_entry entry;
    if (!g->step)
        return result;
    if (result != CUDA_SUCCESS)
        (void)vgpu_ledger_add(g->taking.process->ledger, ENTRY_CONTEXT, g->context, 0,
                              -(int64_t)g->step, &entry);
    result = taking_end(&g->taking, result, true);
    if (result == CUDA_SUCCESS)
        local_review(g->taking.process);
    return result;
}

/* Least that any context has. */
static uint64_t least_local(struct process *process) {
    uint64_t cursor = 0, least = UINT64_MAX;
    struct vgpu_entry entry;
    while (vgpu_ledger_next(process->ledger, ENTRY_CONTEXT, &cursor, &entry) == 0)
        if (entry.aux && entry.aux2 < least)
            least = entry.aux2;
    return least;
}

void local_review(struct process *process) {
    uint64_t cursor = 0;
    struct vgpu_entry entry, context;
    lower(LAUNCH_LOCAL);
    uint64_t least = least_local(process);
    while (vgpu_ledger_next(process->ledger, ENTRY_FUNCTION, &cursor, &entry) == 0) {
        if (entry.aux <= LOCAL_DEFAULT)
            continue;
        uint64_t have = least;
        struct device *device = process_device(process, entry.device);
        if (entry.aux2 && device && !local_context(process, device, entry.aux2, &context))
            have = context.aux2;
        if (entry.aux > have) {
            launch_watch(LAUNCH_LOCAL);
            return;
        }
    }
}

/* ---- the slow way ------------------------------------------------------------------------- */

struct launch {
    struct process *process; /* NULL: nothing to do afterwards */
    struct device *device;
    bool settle;
    struct loading loading;
    struct local_growth growth;
};

static CUresult warm(void);

/* The launching context: the stream's, else the thread's. False while the stream is captured:
 * nothing is launched then, though a library may be loaded. */
static bool launching_context(uint64_t *context, CUstream stream) {
    CUcontext owner = NULL;
    *context = context_current();
    if ((uintptr_t)stream <= 1)
        return true;
    bool captured = stream_may_capture(stream);
    if (stream != STREAM_PER_THREAD && real.cuStreamGetCtx &&
        CALL_REAL(cuStreamGetCtx, stream, &owner) == CUDA_SUCCESS && owner)
        *context = key_of(owner);
    return !captured;
}

struct device *context_device(struct process *process, uint64_t context) {
    struct vgpu_entry entry;
    struct device *device = NULL;
    if (vgpu_ledger_get(process->ledger, ENTRY_CONTEXT, context, &entry) == 0)
        return process_device(process, entry.device);
    return process_current(&device, process) == CUDA_SUCCESS ? device : NULL;
}

/* A CUfunction runs in its module's context, a CUkernel in the launching one. */
static uint64_t running_context(struct process *process, CUfunction function, uint64_t launching) {
    struct vgpu_entry entry = {.aux2 = 0};
    (void)vgpu_ledger_get(process->ledger, ENTRY_FUNCTION, key_of(function), &entry);
    return entry.aux2 ? entry.aux2 : launching;
}

/* The library that launching a CUkernel loads. */
static uint64_t library_of(struct process *process, CUfunction function) {
    struct vgpu_entry entry;
    if (vgpu_ledger_get(process->ledger, ENTRY_FUNCTION, key_of(function), &entry) || entry.aux2)
        return 0;
    return entry.bytes;
}

static CUresult launch_charge(struct launch *l, CUfunction function, uint64_t context,
                              uint32_t why) {
    CUresult result = CUDA_SUCCESS;
    if (why & LAUNCH_LAZY) {
        uint64_t library = library_of(l->process, function);
        if (library && loading_due(l->process, library, context))
            result = loading_begin(&l->loading, l->process, l->device, library, context);
        else if (__atomic_sub_fetch(&lazy_patience, 1, __ATOMIC_RELAXED) <= 0)
            lazy_review(l->process);
    }
    if (result == CUDA_SUCCESS && (why & LAUNCH_LOCAL)) {
        uint64_t need = launch_local_need(l->process, function);
        result = local_begin(&l->growth, l->process, l->device, context, need);
        if (result != CUDA_SUCCESS)
            (void)loading_end(&l->loading, result);
    }
    return result;
}

static CUresult launch_begin(struct launch *l, CUfunction function, CUstream stream) {
    *l = (struct launch){.process = NULL};
    uint32_t why = reasons();
    if (why & LAUNCH_COLD) {
        CUresult result = warm();
        if (result != CUDA_SUCCESS)
            return result;
    }
    why &= LAUNCH_UNSETTLED | LAUNCH_LOCAL | LAUNCH_LAZY;
    struct process *process = why ? enter() : NULL;
    uint64_t context = 0;
    if (!process || process->mode != MODE_ON)
        return CUDA_SUCCESS;
    /* Kernels that are never launched may keep the reason up: others shall not pay for that. */
    if (why == LAUNCH_LOCAL && launch_local_need(process, function) <= LOCAL_DEFAULT)
        return CUDA_SUCCESS;
    if (!launching_context(&context, stream)) {
        if (!(why &= LAUNCH_LAZY))
            return CUDA_SUCCESS;
        launch_watch(LAUNCH_UNSETTLED); /* it may load with the graph instead */
    }
    context = running_context(process, function, context);
    l->device = context_device(process, context);
    if (!l->device)
        return CUDA_SUCCESS;
    l->process = process;
    if (why & LAUNCH_UNSETTLED) {
        /* Lowered before the launch: a look-up meanwhile raises it again. */
        lower(LAUNCH_UNSETTLED);
        l->settle = true;
    }
    CUresult result = launch_charge(l, function, context, why);
    if (result != CUDA_SUCCESS && l->settle)
        launch_watch(LAUNCH_UNSETTLED);
    return result;
}

/* Nobody noted on which device it was that something changed. */
static void settle_devices(struct process *process) {
    for (int i = 0; i < MAX_ORDINALS; i++) {
        struct device *device = &process->devices[i];
        if (__atomic_load_n(&device->contexts, __ATOMIC_RELAXED) &&
            settle(process, device, true) == -EAGAIN)
            launch_watch(LAUNCH_UNSETTLED);
    }
}

static CUresult launch_end(struct launch *l, CUresult result) {
    if (!l->process)
        return result;
    bool grew = l->growth.step, loaded = l->loading.key;
    /* Both operations end before the first settle: it waits for a quiet moment. */
    if (grew && loaded && result == CUDA_SUCCESS) {
        taking_keep(&l->loading.taking, CUDA_SUCCESS);
        l->loading.key = 0;
    }
    (void)local_end(&l->growth, result);
    (void)loading_end(&l->loading, result);
    if (!l->settle)
        return result;
    if (result != CUDA_SUCCESS)
        launch_watch(LAUNCH_UNSETTLED);
    else
        settle_devices(l->process);
    return result;
}

/* ---- rows --------------------------------------------------------------------------------- */

/* What launch_entry.S jumps to: the driver's function, at first one that says that this driver has
 * none; and the way round where there is a reason to look further. */
#define HIDDEN __attribute__((visibility("hidden")))
#define DEFINE(symbol, function, stream, params, args)        \
    static CUresult symbol##_none params {                    \
        return CUDA_ERROR_NOT_FOUND;                          \
    }                                                         \
    extern HIDDEN CUresult(*symbol##_target) params;          \
    CUresult(*symbol##_target) params = symbol##_none;        \
    HIDDEN CUresult symbol##_slow params;                     \
    CUresult symbol##_slow params {                           \
        struct launch l;                                      \
        CUresult result = launch_begin(&l, function, stream); \
        if (result != CUDA_SUCCESS)                           \
            return result;                                    \
        inside++;                                             \
        result = symbol##_target args;                        \
        inside--;                                             \
        return launch_end(&l, result);                        \
    }

#pragma GCC diagnostic ignored "-Wunused-parameter"

DEFINE(cuLaunch, f, NULL, (CUfunction f), (f))
DEFINE(cuLaunchGrid, f, NULL, (CUfunction f, int grid_width, int grid_height),
       (f, grid_width, grid_height))
DEFINE(cuLaunchGridAsync, f, hStream,
       (CUfunction f, int grid_width, int grid_height, CUstream hStream),
       (f, grid_width, grid_height, hStream))

#define KERNEL_PARAMS                                                                  \
    CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, \
        unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,        \
        unsigned int sharedMemBytes, CUstream hStream, void **kernelParams
#define KERNEL_ARGS                                                                            \
    f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream, \
        kernelParams

/* The null stream of these is the thread's own. */
#define OWN_STREAM(stream) ((stream) ? (stream) : STREAM_PER_THREAD)
#define CONFIG_STREAM(config) ((config) ? (config)->hStream : NULL)

DEFINE(cuLaunchKernel, f, hStream, (KERNEL_PARAMS, void **extra), (KERNEL_ARGS, extra))
DEFINE(cuLaunchKernel_ptsz, f, OWN_STREAM(hStream), (KERNEL_PARAMS, void **extra),
       (KERNEL_ARGS, extra))
DEFINE(cuLaunchCooperativeKernel, f, hStream, (KERNEL_PARAMS), (KERNEL_ARGS))
DEFINE(cuLaunchCooperativeKernel_ptsz, f, OWN_STREAM(hStream), (KERNEL_PARAMS), (KERNEL_ARGS))
DEFINE(cuLaunchKernelEx, f, CONFIG_STREAM(config),
       (const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra),
       (config, f, kernelParams, extra))
DEFINE(cuLaunchKernelEx_ptsz, f, OWN_STREAM(CONFIG_STREAM(config)),
       (const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra),
       (config, f, kernelParams, extra))

#define MULTI(name) cuLaunchCooperativeKernelMultiDevice_##name

static CUresult MULTI(none)(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags) {
    return CUDA_ERROR_NOT_FOUND;
}
extern HIDDEN CUresult (*MULTI(target))(CUDA_LAUNCH_PARAMS *, unsigned int, unsigned int);
CUresult (*MULTI(target))(CUDA_LAUNCH_PARAMS *, unsigned int, unsigned int) = MULTI(none);
HIDDEN CUresult MULTI(slow)(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags);

CUresult MULTI(slow)(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags) {
    struct launch launches[MAX_ORDINALS];
    unsigned int begun = 0, known = list && count <= MAX_ORDINALS ? count : 0;
    CUresult result = reasons() & LAUNCH_COLD ? warm() : CUDA_SUCCESS;
    while (result == CUDA_SUCCESS && begun < known) {
        result = launch_begin(&launches[begun], list[begun].function, list[begun].hStream);
        begun += result == CUDA_SUCCESS;
    }
    if (result == CUDA_SUCCESS) {
        inside++;
        result = MULTI(target)(list, count, flags);
        inside--;
    }
    while (begun-- > 0)
        (void)launch_end(&launches[begun], result);
    return result;
}

#define AIM(symbol)  \
    if (real.symbol) \
    __atomic_store_n(&symbol##_target, real.symbol, __ATOMIC_RELEASE)

static CUresult warm(void) {
    if (driver_find(LIBRARY_CUDA, true))
        return CUDA_ERROR_NO_DEVICE;
    AIM(cuLaunch);
    AIM(cuLaunchGrid);
    AIM(cuLaunchGridAsync);
    AIM(cuLaunchKernel);
    AIM(cuLaunchKernel_ptsz);
    AIM(cuLaunchCooperativeKernel);
    AIM(cuLaunchCooperativeKernel_ptsz);
    AIM(cuLaunchKernelEx);
    AIM(cuLaunchKernelEx_ptsz);
    AIM(cuLaunchCooperativeKernelMultiDevice);
    __atomic_fetch_and(&launch_reasons, ~(uint32_t)LAUNCH_COLD, __ATOMIC_RELEASE);
    return CUDA_SUCCESS;
}
