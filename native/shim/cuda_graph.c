#include <errno.h>

#include "graph.h"

/* Executable graphs. Memory nodes are taken at the first launch or upload and kept until the device's
 * graph memory is trimmed, whatever becomes of graph and pointers; local memory of kernels at
 * instantiation. */

/* No pointer reaches these bits of a key. */
#define KEY_DEVICE_SHIFT 56
#define KEY_LOCAL (UINT64_C(1) << 63)
/* From so many nodes on the executable itself is worth a look. */
#define NODES_SETTLED 256

static uint64_t exec_key(CUgraphExec exec, const struct device *device) {
    return key_of(exec) | (uint64_t)device->ordinal << KEY_DEVICE_SHIFT;
}

/* ---- around a call that takes it --------------------------------------------------------------- */

/* Were all other graph memory used again. */
static bool could_fit(const struct graph_part *part) {
    uint64_t charged = __atomic_load_n(&part->pool->charged, __ATOMIC_RELAXED);
    return pool_fits(part->pool, part->largest > charged ? part->largest - charged : 0);
}

/* After the call, or instead of it. `undo`: what is not in use goes back first. */
static void plan_end(struct graph_plan *plan, int count, bool undo) {
    for (int i = 0; i < count; i++) {
        struct graph_part *part = &plan->part[i];
        if (undo)
            pool_trim(part->pool);
        (void)pool_settle(part->pool, &part->credit, true);
        operation_end(part->device);
    }
}

/* `sure`: only what is charged ahead. */
static CUresult part_begin(struct graph_part *part, bool sure) {
    struct pool *pool = part->pool;
    if (part->device->index < 0)
        return NO_MEMORY;
    bool fits = pool_fits(pool, part->bytes);
    part->tight = !fits && !sure && could_fit(part);
    if (part->tight)
        return CUDA_SUCCESS;
    if (!fits)
        (void)pools_refresh(pool->process, part->device, true);
    if (sure && !pool_fits(pool, part->bytes))
        return NO_MEMORY; /* counted as refused by the first try */
    CUresult result = pool_announce(pool, part->bytes);
    part->credit = result == CUDA_SUCCESS ? part->bytes : 0;
    return result;
}

static CUresult plan_begin(struct graph_plan *plan, bool sure) {
    plan->tight = false;
    for (int i = 0; i < plan->parts; i++) {
        struct graph_part *part = &plan->part[i];
        part->credit = 0;
        part->trims = __atomic_load_n(&part->device->trims, __ATOMIC_ACQUIRE);
        charging_begin(plan->process, part->device);
        CUresult result = part_begin(part, sure);
        plan->tight |= part->tight;
        if (result != CUDA_SUCCESS) {
            plan_end(plan, i + 1, false);
            return result;
        }
    }
    return CUDA_SUCCESS;
}

/* After a call that can be undone: whether what it took fits. */
static CUresult plan_check(struct graph_plan *plan) {
    CUresult result = CUDA_SUCCESS;
    for (int i = 0; result == CUDA_SUCCESS && i < plan->parts; i++)
        if (plan->part[i].tight)
            result = pool_settle(plan->part[i].pool, &plan->part[i].credit, false);
    return result;
}

/* ---- what an executable graph is known for --------------------------------------------------- */

/* How many ENTRY_EXEC there are; with LAUNCH_GRAPH under pool_lock. */
static uint64_t execs;

static void count_execs(struct process *process, int64_t change) {
    lock_take(&process->pool_lock);
    execs += (uint64_t)change;
    if (change > 0)
        launch_watch(LAUNCH_GRAPH);
    else if (execs == 0)
        __atomic_fetch_and(&launch_reasons, ~(uint32_t)LAUNCH_GRAPH, __ATOMIC_RELAXED);
    lock_leave(&process->pool_lock);
}

static bool entry_take(struct process *process, uint64_t key, struct vgpu_entry *entry) {
    bool found = vgpu_ledger_take(process->ledger, ENTRY_EXEC, key, entry) == 0;
    if (found)
        count_execs(process, -1);
    return found;
}

/* One that its context took along may have left an entry under this key. */
static CUresult entry_put(struct process *process, const struct vgpu_entry *entry) {
    struct vgpu_entry old;
    (void)entry_take(process, entry->key, &old);
    if (vgpu_ledger_put(process->ledger, entry))
        return NO_MEMORY;
    count_execs(process, 1);
    return CUDA_SUCCESS;
}

static CUresult note_part(struct graph_plan *plan, CUgraphExec exec,
                          const struct graph_part *part) {
    struct vgpu_entry entry = {.key = exec_key(exec, part->device),
                               .kind = ENTRY_EXEC,
                               .device = part->device->ordinal,
                               .bytes = part->bytes,
                               .aux2 = part->largest << 1 | part->keeps};
    return entry_put(plan->process, &entry);
}

CUresult exec_note_local(const struct graph_plan *plan, CUgraphExec exec) {
    const struct graph_local *most = NULL;
    for (int i = 0; i < plan->locals; i++)
        if (!most || plan->local[i].need > most->need)
            most = &plan->local[i];
    if (!most)
        return CUDA_SUCCESS;
    struct vgpu_entry entry = {.key = key_of(exec) | KEY_LOCAL,
                               .kind = ENTRY_EXEC,
                               .device = -1,
                               .bytes = most->need,
                               .aux = most->context};
    return entry_put(plan->process, &entry);
}

static int device_count(const struct process *process) {
    return process->visible > 0 && process->visible < MAX_ORDINALS ? process->visible
                                                                   : VGPU_MAX_DEVICES;
}

/* ---- instantiation ------------------------------------------------------------------------------ */

struct instantiation {
    struct graph_plan plan;
    bool upload; /* takes the memory at once */
};

static CUresult instantiate_begin(struct instantiation *i, struct process *process, CUgraph graph,
                                  bool upload) {
    i->upload = upload;
    CUresult result = graph_read(&i->plan, process, graph);
    if (result == CUDA_SUCCESS)
        result = graph_local_begin(&i->plan);
    if (result == CUDA_SUCCESS && upload && (result = plan_begin(&i->plan, false)))
        graph_local_end(&i->plan, result);
    return result;
}

/* Takes the driver's result; when it answers another one, the caller destroys the graph before
 * instantiate_close. */
static CUresult instantiate_end(struct instantiation *i, CUresult result, CUgraphExec exec) {
    struct graph_plan *plan = &i->plan;
    if (result == CUDA_SUCCESS && i->upload)
        result = plan_check(plan);
    for (int p = 0; result == CUDA_SUCCESS && p < plan->parts; p++)
        result = note_part(plan, exec, &plan->part[p]);
    if (result == CUDA_SUCCESS)
        result = exec_note_local(plan, exec);
    return result;
}

static void instantiate_close(struct instantiation *i, CUresult granted, CUresult result) {
    struct graph_plan *plan = &i->plan;
    struct device *device = NULL;
    if (i->upload)
        plan_end(plan, plan->parts, result != CUDA_SUCCESS);
    graph_local_end(plan, granted);
    if (granted == CUDA_SUCCESS && (plan->nodes >= NODES_SETTLED || plan->lazy) &&
        process_current(&device, plan->process) == CUDA_SUCCESS)
        (void)settle(plan->process, device, true);
}

#define INSTANTIATE_BODY(symbol, uploads, ...)                           \
    NEED_CUDA(symbol);                                                   \
    struct process *process = enter();                                   \
    struct instantiation i;                                              \
    if (!process || process->mode != MODE_ON || !phGraphExec || !hGraph) \
        return real.symbol(phGraphExec, hGraph, __VA_ARGS__);            \
    CUgraphExec exec = NULL;                                             \
    CUresult result = instantiate_begin(&i, process, hGraph, uploads);   \
    if (result != CUDA_SUCCESS)                                          \
        return result;                                                   \
    CUresult granted = CALL_REAL(symbol, &exec, hGraph, __VA_ARGS__);    \
    result = instantiate_end(&i, granted, exec);                         \
    if (granted == CUDA_SUCCESS && result != CUDA_SUCCESS)               \
        (void)exec_destroy(process, exec);                               \
    instantiate_close(&i, granted, result);                              \
    if (result == CUDA_SUCCESS)                                          \
        *phGraphExec = exec;                                             \
    return result

/* Its memory stays charged: the driver keeps it. */
static CUresult exec_destroy(struct process *process, CUgraphExec exec) {
    struct vgpu_entry taken[VGPU_MAX_DEVICES + 1];
    int count = 0, devices = device_count(process);
    for (int i = 0; i < devices && count < VGPU_MAX_DEVICES; i++)
        count += entry_take(process, exec_key(exec, &process->devices[i]), &taken[count]);
    count += entry_take(process, key_of(exec) | KEY_LOCAL, &taken[count]);
    CUresult result = CALL_REAL(cuGraphExecDestroy, exec);
    for (int i = 0; result != CUDA_SUCCESS && i < count; i++)
        (void)entry_put(process, &taken[i]);
    return result;
}

CUresult cuGraphInstantiate(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode,
                            char *logBuffer, size_t bufferSize) {
    INSTANTIATE_BODY(cuGraphInstantiate, false, phErrorNode, logBuffer, bufferSize);
}

CUresult cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode,
                               char *logBuffer, size_t bufferSize) {
    INSTANTIATE_BODY(cuGraphInstantiate_v2, false, phErrorNode, logBuffer, bufferSize);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph,
                                     unsigned long long flags) {
    INSTANTIATE_BODY(cuGraphInstantiateWithFlags, false, flags);
}

static bool uploads(const CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    return params && (params->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *phGraphExec, CUgraph hGraph,
                                      CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams) {
    INSTANTIATE_BODY(cuGraphInstantiateWithParams, uploads(instantiateParams), instantiateParams);
}

CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *phGraphExec, CUgraph hGraph,
                                           CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams) {
    INSTANTIATE_BODY(cuGraphInstantiateWithParams_ptsz, uploads(instantiateParams),
                     instantiateParams);
}

CUresult cuGraphExecDestroy(CUgraphExec hGraphExec) {
    NEED_CUDA(cuGraphExecDestroy);
    struct process *process = enter();
    if (!process || process->mode != MODE_ON ||
        !(__atomic_load_n(&launch_reasons, __ATOMIC_RELAXED) & LAUNCH_GRAPH))
        return real.cuGraphExecDestroy(hGraphExec);
    return exec_destroy(process, hGraphExec);
}

/* ---- launches ----------------------------------------------------------------------------------- */

/* Still holds what its last launch took, as far as anybody can know. */
static bool is_resident(const struct graph_part *part, const struct vgpu_entry *entry) {
    uint64_t reserved = 0;
    return entry->aux == (uint64_t)__atomic_load_n(&part->device->trims, __ATOMIC_ACQUIRE) + 1 &&
           !part->keeps && pool_reserved(part->pool, &reserved) == CUDA_SUCCESS &&
           reserved == __atomic_load_n(&part->pool->charged, __ATOMIC_ACQUIRE);
}

/* What a launch still has to take. */
static CUresult plan_launch(struct graph_plan *plan, struct process *process, CUgraphExec exec) {
    struct vgpu_entry entry;
    plan->process = process;
    plan->tight = false;
    plan->parts = plan->locals = 0;
    for (int i = 0, count = device_count(process); i < count; i++) {
        struct device *device = &process->devices[i];
        if (vgpu_ledger_get(process->ledger, ENTRY_EXEC, exec_key(exec, device), &entry))
            continue;
        struct graph_part *part = &plan->part[plan->parts];
        *part = (struct graph_part){.device = device,
                                    .pool = pool_graph(process, device),
                                    .bytes = entry.bytes,
                                    .largest = entry.aux2 >> 1,
                                    .keeps = entry.aux2 & 1};
        if (!part->pool)
            return NO_MEMORY;
        plan->parts += !is_resident(part, &entry);
    }
    uint64_t key = key_of(exec) | KEY_LOCAL;
    if (vgpu_ledger_get(process->ledger, ENTRY_EXEC, key, &entry) == 0)
        plan->local[plan->locals++] =
            (struct graph_local){.context = entry.aux, .need = entry.bytes};
    return CUDA_SUCCESS;
}

/* Notes that the graph holds its memory now. One that keeps it takes it away from others. */
static void plan_launched(const struct graph_plan *plan, CUgraphExec exec) {
    for (int i = 0; i < plan->parts; i++) {
        const struct graph_part *part = &plan->part[i];
        uint64_t key = exec_key(exec, part->device);
        struct vgpu_entry entry;
        if (part->keeps)
            __atomic_fetch_add(&part->device->trims, 1, __ATOMIC_ACQ_REL);
        else if (!vgpu_ledger_get(plan->process->ledger, ENTRY_EXEC, key, &entry))
            (void)vgpu_ledger_add(plan->process->ledger, ENTRY_EXEC, key,
                                  (int64_t)(part->trims + 1 - entry.aux), 0, &entry);
    }
}

typedef CUresult graph_call(CUgraphExec exec, CUstream stream);

/* Uploads, which can be undone. */
static CUresult upload_begun(struct graph_plan *plan, graph_call *upload, CUgraphExec exec,
                             CUstream stream) {
    inside++;
    CUresult result = upload ? upload(exec, stream) : NO_MEMORY;
    inside--;
    return result == CUDA_SUCCESS ? plan_check(plan) : result;
}

/* A launch cannot be undone: where it is not sure to fit, an upload goes first. When that takes too
 * much, all is trimmed and the whole charged ahead, for what it is worth. */
static CUresult launch_planned(struct graph_plan *plan, graph_call *launch, graph_call *upload,
                               CUgraphExec exec, CUstream stream) {
    CUresult result = plan_begin(plan, false);
    if (result == CUDA_SUCCESS && plan->tight) {
        result = upload_begun(plan, upload, exec, stream);
        if (result != CUDA_SUCCESS)
            plan_end(plan, plan->parts, true);
        if (result == NO_MEMORY)
            result = plan_begin(plan, true);
    }
    if (result != CUDA_SUCCESS)
        return result;
    inside++;
    result = launch(exec, stream);
    inside--;
    plan_end(plan, plan->parts, result != CUDA_SUCCESS);
    if (result == CUDA_SUCCESS)
        plan_launched(plan, exec);
    return result;
}

/* Streams and images that are still to be settled: as for a kernel's launch. */
static void settle_due(struct process *process) {
    struct device *device = NULL;
    if (process_current(&device, process) != CUDA_SUCCESS)
        return;
    __atomic_fetch_and(&launch_reasons, ~(uint32_t)LAUNCH_UNSETTLED, __ATOMIC_RELAXED);
    if (settle(process, device, true) == -EAGAIN)
        launch_watch(LAUNCH_UNSETTLED);
}

static CUresult launch_slow(graph_call *launch, graph_call *upload, CUgraphExec exec,
                            CUstream stream) {
    struct process *process = enter();
    struct graph_plan plan;
    if (!process || process->mode != MODE_ON)
        return launch(exec, stream);
    bool unsettled = __atomic_load_n(&launch_reasons, __ATOMIC_RELAXED) & LAUNCH_UNSETTLED;
    CUresult result = plan_launch(&plan, process, exec);
    if (result != CUDA_SUCCESS)
        return result;
    if (!unsettled && plan.parts == 0 && plan.locals == 0)
        return launch(exec, stream);
    result = graph_local_begin(&plan);
    if (result != CUDA_SUCCESS)
        return result;
    result = launch_planned(&plan, launch, upload, exec, stream);
    graph_local_end(&plan, result);
    if (unsettled && result == CUDA_SUCCESS)
        settle_due(process);
    return result;
}

/* One test and a jump while no graph has memory nodes or kernels with much local memory. */
#define LAUNCH_BODY(symbol, upload)                                   \
    if (LIKELY(!(__atomic_load_n(&launch_reasons, __ATOMIC_RELAXED) & \
                 (LAUNCH_GRAPH | LAUNCH_UNSETTLED)) &&                \
               real.symbol))                                          \
        return real.symbol(hGraphExec, hStream);                      \
    NEED_CUDA(symbol);                                                \
    return launch_slow(real.symbol, real.upload, hGraphExec, hStream)

CUresult cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream) {
    LAUNCH_BODY(cuGraphLaunch, cuGraphUpload);
}

CUresult cuGraphLaunch_ptsz(CUgraphExec hGraphExec, CUstream hStream) {
    LAUNCH_BODY(cuGraphLaunch_ptsz, cuGraphUpload_ptsz);
}

CUresult cuGraphUpload(CUgraphExec hGraphExec, CUstream hStream) {
    LAUNCH_BODY(cuGraphUpload, cuGraphUpload);
}

CUresult cuGraphUpload_ptsz(CUgraphExec hGraphExec, CUstream hStream) {
    LAUNCH_BODY(cuGraphUpload_ptsz, cuGraphUpload_ptsz);
}

CUresult cuDeviceGraphMemTrim(CUdevice device) {
    NEED_CUDA(cuDeviceGraphMemTrim);
    struct process *process = enter();
    struct device *known =
        process && process->mode == MODE_ON ? process_device(process, device) : NULL;
    struct pool *pool = known && known->index >= 0 ? pool_graph(process, known) : NULL;
    uint64_t credit = 0;
    if (!pool)
        return real.cuDeviceGraphMemTrim(device);
    operation_begin(known);
    __atomic_fetch_add(&known->trims, 1, __ATOMIC_ACQ_REL);
    CUresult result = CALL_REAL(cuDeviceGraphMemTrim, device);
    (void)pool_settle(pool, &credit, true);
    operation_end(known);
    return result;
}
