#include "pool.h"

#include <sys/mman.h>

/* Executable graphs that allocate: their memory is taken at the first launch or upload and kept
 * until the device's graph memory is trimmed, whatever becomes of graph and pointers. */

#define NO_MEMORY CUDA_ERROR_OUT_OF_MEMORY
#define GRAPH_DEPTH_MAX 32
/* No pointer reaches these bits of a key. */
#define KEY_DEVICE_SHIFT 56

/* What a graph's nodes take on one device. */
struct part {
    struct device *device;
    struct pool *pool;
    uint64_t bytes;   /* were no node to use again what another one freed */
    uint64_t largest; /* one of them */
    uint64_t credit;
    uint64_t trims;
    bool tight; /* not charged ahead: less than `bytes` may do, only the driver knows */
    bool keeps; /* more is allocated than freed: others may have to take anew */
};

struct plan {
    struct process *process;
    bool tight;
    int count;
    struct part parts[MAX_ORDINALS];
};

static uint64_t exec_key(CUgraphExec exec, const struct device *device) {
    return (uint64_t)(uintptr_t)exec | (uint64_t)device->ordinal << KEY_DEVICE_SHIFT;
}

/* ---- what a graph will take ------------------------------------------------------------------- */

static struct part *plan_part(struct plan *plan, CUdevice ordinal) {
    for (int i = 0; i < plan->count; i++)
        if (plan->parts[i].device->ordinal == ordinal)
            return &plan->parts[i];
    struct device *device = process_device(plan->process, ordinal);
    struct pool *pool = device ? pool_graph(plan->process, device) : NULL;
    if (!pool)
        return NULL;
    struct part *part = &plan->parts[plan->count++];
    *part = (struct part){.device = device, .pool = pool};
    return part;
}

static CUresult plan_alloc(struct plan *plan, CUgraphNode node, int *live) {
    CUDA_MEM_ALLOC_NODE_PARAMS params = {0};
    CUresult result = CALL_REAL(cuGraphMemAllocNodeGetParams, node, &params);
    if (result != CUDA_SUCCESS || params.poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return result;
    struct part *part = plan_part(plan, params.poolProps.location.id);
    if (!part)
        return NO_MEMORY;
    uint64_t bytes = pool_steps(params.bytesize);
    part->bytes = part->bytes > UINT64_MAX - bytes ? UINT64_MAX : part->bytes + bytes;
    part->largest = bytes > part->largest ? bytes : part->largest;
    ++*live;
    return CUDA_SUCCESS;
}

static CUresult plan_graph(struct plan *plan, CUgraph graph, int *live, int depth);

static CUresult plan_node(struct plan *plan, CUgraphNode node, int *live, int depth) {
    CUgraphNodeType type = CU_GRAPH_NODE_TYPE_KERNEL;
    CUgraph child = NULL;
    CUresult result = CALL_REAL(cuGraphNodeGetType, node, &type);
    if (result != CUDA_SUCCESS)
        return result;
    switch ((int)type) {
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        return plan_alloc(plan, node, live);
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        --*live;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_GRAPH:
        result = CALL_REAL(cuGraphChildGraphNodeGetGraph, node, &child);
        return result == CUDA_SUCCESS ? plan_graph(plan, child, live, depth + 1) : result;
    default:
        return CUDA_SUCCESS;
    }
}

static CUresult plan_graph(struct plan *plan, CUgraph graph, int *live, int depth) {
    size_t count = 0;
    CUresult result = CALL_REAL(cuGraphGetNodes, graph, NULL, &count);
    if (result != CUDA_SUCCESS || count == 0 || depth > GRAPH_DEPTH_MAX)
        return result;
    size_t size = count * sizeof(CUgraphNode);
    CUgraphNode *nodes =
        mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (nodes == MAP_FAILED)
        return NO_MEMORY;
    result = CALL_REAL(cuGraphGetNodes, graph, nodes, &count);
    for (size_t i = 0; result == CUDA_SUCCESS && i < count; i++)
        result = plan_node(plan, nodes[i], live, depth);
    munmap(nodes, size);
    return result;
}

/* Graphs without memory nodes end as an empty plan. */
static CUresult plan_make(struct plan *plan, struct process *process, CUgraph graph) {
    int live = 0;
    plan->process = process;
    plan->count = 0;
    plan->tight = false;
    if (!real.cuGraphMemAllocNodeGetParams || !real.cuDeviceGetGraphMemAttribute ||
        !real.cuGraphGetNodes || !real.cuGraphNodeGetType || !real.cuGraphChildGraphNodeGetGraph)
        return CUDA_SUCCESS; /* a driver without memory nodes */
    CUresult result = plan_graph(plan, graph, &live, 0);
    for (int i = 0; i < plan->count; i++)
        plan->parts[i].keeps = live > 0;
    return result;
}

/* ---- around a call that takes it --------------------------------------------------------------- */

static bool could_fit(const struct plan *plan, const struct part *part) {
    uint64_t limit = process_limit(plan->process, part->device);
    uint64_t used = vgpu_used(plan->process->core, part->device->index);
    uint64_t graphs = __atomic_load_n(&part->pool->charged, __ATOMIC_RELAXED);
    uint64_t beside = used > graphs ? used - graphs : 0;
    return part->largest <= limit && beside <= limit - part->largest;
}

/* After the call, or instead of it. `undo`: what is not in use goes back first. */
static void plan_end(struct plan *plan, int count, bool undo) {
    for (int i = 0; i < count; i++) {
        struct part *part = &plan->parts[i];
        if (undo)
            pool_trim(part->pool);
        (void)pool_settle(part->pool, &part->credit, true);
        operation_end(part->device);
    }
}

static CUresult plan_begin(struct plan *plan) {
    for (int i = 0; i < plan->count; i++) {
        struct part *part = &plan->parts[i];
        part->credit = 0;
        part->tight = false;
        part->trims = __atomic_load_n(&part->device->trims, __ATOMIC_ACQUIRE);
        operation_begin(part->device);
        if (part->device->index >= 0 && pool_announce(part->pool, part->bytes) == CUDA_SUCCESS) {
            part->credit = part->bytes;
        } else if (part->device->index >= 0 && could_fit(plan, part)) {
            part->tight = plan->tight = true;
        } else {
            plan_end(plan, i + 1, false);
            return NO_MEMORY;
        }
    }
    return CUDA_SUCCESS;
}

/* After a call that can be undone: whether what it took fits. */
static CUresult plan_check(struct plan *plan) {
    CUresult result = CUDA_SUCCESS;
    for (int i = 0; result == CUDA_SUCCESS && i < plan->count; i++)
        if (plan->parts[i].tight)
            result = pool_settle(plan->parts[i].pool, &plan->parts[i].credit, false);
    return result;
}

/* ---- instantiation ------------------------------------------------------------------------------ */

/* How many ENTRY_EXEC there are; with LAUNCH_GRAPH under pool_lock. */
static uint64_t execs;

static void count_execs(struct process *process, int64_t change) {
    pthread_mutex_lock(&process->pool_lock);
    execs += (uint64_t)change;
    if (change > 0)
        launch_watch(LAUNCH_GRAPH);
    else if (execs == 0)
        __atomic_fetch_and(&launch_reasons, ~(uint32_t)LAUNCH_GRAPH, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&process->pool_lock);
}

static bool exec_take(struct plan *plan, struct device *device, CUgraphExec exec) {
    struct vgpu_entry entry;
    if (vgpu_ledger_take(plan->process->ledger, ENTRY_EXEC, exec_key(exec, device), &entry))
        return false;
    struct part *part = &plan->parts[plan->count++];
    *part = (struct part){.device = device,
                          .pool = pool_graph(plan->process, device),
                          .bytes = entry.bytes,
                          .largest = entry.aux2 >> 1,
                          .keeps = entry.aux2 & 1};
    return true;
}

static int device_count(const struct process *process) {
    return process->visible > 0 && process->visible < MAX_ORDINALS ? process->visible
                                                                   : VGPU_MAX_DEVICES;
}

static CUresult execs_put(const struct plan *plan, CUgraphExec exec) {
    for (int i = 0; i < plan->count; i++) {
        const struct part *part = &plan->parts[i];
        struct vgpu_entry old, entry = {.key = exec_key(exec, part->device),
                                        .kind = ENTRY_EXEC,
                                        .device = part->device->ordinal,
                                        .bytes = part->bytes,
                                        .aux2 = part->largest << 1 | part->keeps};
        /* One that its context took along may have left an entry. */
        if (!vgpu_ledger_take(plan->process->ledger, ENTRY_EXEC, entry.key, &old))
            count_execs(plan->process, -1);
        if (vgpu_ledger_put(plan->process->ledger, &entry))
            return NO_MEMORY;
        count_execs(plan->process, 1);
    }
    return CUDA_SUCCESS;
}

/* Answers for the driver's success; when not CUDA_SUCCESS the caller destroys the graph. */
static CUresult instantiated(struct plan *plan, CUgraphExec exec, bool uploaded) {
    CUresult result = uploaded ? plan_check(plan) : CUDA_SUCCESS;
    return result == CUDA_SUCCESS ? execs_put(plan, exec) : result;
}

#define INSTANTIATE_BODY(symbol, upload, ...)                            \
    NEED_CUDA(symbol);                                                   \
    struct process *process = enter();                                   \
    struct plan plan;                                                    \
    if (!process || process->mode != MODE_ON || !phGraphExec || !hGraph) \
        return real.symbol(phGraphExec, hGraph, __VA_ARGS__);            \
    CUresult result = plan_make(&plan, process, hGraph);                 \
    if (result == CUDA_SUCCESS && (upload))                              \
        result = plan_begin(&plan);                                      \
    if (result != CUDA_SUCCESS)                                          \
        return result;                                                   \
    CUgraphExec exec = NULL;                                             \
    CUresult granted = CALL_REAL(symbol, &exec, hGraph, __VA_ARGS__);    \
    result = granted;                                                    \
    if (granted == CUDA_SUCCESS)                                         \
        result = instantiated(&plan, exec, upload);                      \
    if (granted == CUDA_SUCCESS && result != CUDA_SUCCESS)               \
        (void)CALL_REAL(cuGraphExecDestroy, exec);                       \
    if (upload)                                                          \
        plan_end(&plan, plan.count, result != CUDA_SUCCESS);             \
    if (result == CUDA_SUCCESS)                                          \
        *phGraphExec = exec;                                             \
    return result

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

/* Its memory stays charged: the driver keeps it. */
CUresult cuGraphExecDestroy(CUgraphExec hGraphExec) {
    NEED_CUDA(cuGraphExecDestroy);
    struct process *process = enter();
    struct plan plan = {.process = process, .count = 0};
    if (!process || process->mode != MODE_ON || !(launch_reasons & LAUNCH_GRAPH))
        return real.cuGraphExecDestroy(hGraphExec);
    for (int i = 0, count = device_count(process); i < count; i++)
        (void)exec_take(&plan, &process->devices[i], hGraphExec);
    CUresult result = CALL_REAL(cuGraphExecDestroy, hGraphExec);
    if (plan.count)
        count_execs(process, -plan.count);
    if (result != CUDA_SUCCESS)
        (void)execs_put(&plan, hGraphExec);
    return result;
}

/* ---- launches ----------------------------------------------------------------------------------- */

/* Still holds what its last launch took, as far as anybody can know. */
static bool is_resident(const struct part *part, const struct vgpu_entry *entry) {
    uint64_t reserved = 0;
    return entry->aux == (uint64_t)part->device->trims + 1 && !part->keeps &&
           pool_reserved(part->pool, &reserved) == CUDA_SUCCESS &&
           reserved == __atomic_load_n(&part->pool->charged, __ATOMIC_ACQUIRE);
}

/* The parts that a launch has to take. */
static void plan_exec(struct plan *plan, struct process *process, CUgraphExec exec) {
    plan->process = process;
    plan->count = 0;
    plan->tight = false;
    for (int i = 0, count = device_count(process); i < count; i++) {
        struct device *device = &process->devices[i];
        struct vgpu_entry entry;
        if (vgpu_ledger_get(process->ledger, ENTRY_EXEC, exec_key(exec, device), &entry))
            continue;
        struct part *part = &plan->parts[plan->count];
        *part = (struct part){.device = device,
                              .pool = pool_graph(process, device),
                              .bytes = entry.bytes,
                              .largest = entry.aux2 >> 1,
                              .keeps = entry.aux2 & 1};
        plan->count += !is_resident(part, &entry);
    }
}

/* Notes that the graph holds its memory now. One that keeps it takes it away from others. */
static void plan_launched(const struct plan *plan, CUgraphExec exec) {
    for (int i = 0; i < plan->count; i++) {
        const struct part *part = &plan->parts[i];
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

/* A launch cannot be undone, an upload can: where it is not sure to fit, the upload goes first. */
static CUresult launch_slow(graph_call *launch, graph_call *upload, CUgraphExec exec,
                            CUstream stream) {
    struct process *process = enter();
    struct plan plan;
    if (!process || process->mode != MODE_ON)
        return launch(exec, stream);
    plan_exec(&plan, process, exec);
    if (plan.count == 0)
        return launch(exec, stream);
    CUresult result = plan_begin(&plan);
    if (result != CUDA_SUCCESS)
        return result;
    inside++;
    if (plan.tight || launch == upload) {
        result = upload ? upload(exec, stream) : NO_MEMORY;
        if (result == CUDA_SUCCESS)
            result = plan_check(&plan);
    }
    if (result == CUDA_SUCCESS && launch != upload)
        result = launch(exec, stream);
    inside--;
    plan_end(&plan, plan.count, result != CUDA_SUCCESS);
    if (result == CUDA_SUCCESS)
        plan_launched(&plan, exec);
    return result;
}

/* One test and a jump while no graph has memory nodes. */
#define LAUNCH_BODY(symbol, upload)                              \
    if (LIKELY(!(launch_reasons & LAUNCH_GRAPH) && real.symbol)) \
        return real.symbol(hGraphExec, hStream);                 \
    NEED_CUDA(symbol);                                           \
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
