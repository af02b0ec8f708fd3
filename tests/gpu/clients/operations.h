#pragma once
#include "common.h"

/* One random operation after another, over every family of calls that takes device memory. The
 * including file says what counts as progress: `count` gets the result of each request. It may
 * define TAKE (a request, which may be refused) and NEED (a call that must succeed) itself. */

static CUresult count(CUresult result);

#ifndef TAKE
#define TAKE(bytes, call) count(call)
#define NEED(call) must(#call, call)
#endif

#define HELD 96
struct worker {
    unsigned seed;
    CUstream stream;
    CUdeviceptr held[HELD]; /* plain allocations, freed with cuMemFree */
};

/* A random number in 0 .. below - 1. */
static unsigned any(struct worker *worker, unsigned below) {
    return (unsigned)rand_r(&worker->seed) % below;
}

static void exchange(struct worker *worker) {
    static const size_t sizes[] = {700 * 1024,  64 * 1024,   1153434,      2 * MIB,
                                   2 * MIB + 1, 1536 * 1024, 33 * MIB + 7, 120 * MIB};
    CUdeviceptr *place = &worker->held[any(worker, HELD)];
    if (*place) {
        NEED(cuMemFree(*place));
        *place = 0;
        return;
    }
    size_t bytes = sizes[any(worker, 8)];
    if (TAKE(bytes, cuMemAlloc(place, bytes)) != CUDA_SUCCESS)
        *place = 0;
}

/* Small pieces, of which one is left in each block: the block stays taken. */
static void pieces(struct worker *worker) {
    CUdeviceptr piece[96];
    size_t bytes = 1u << (9 + any(worker, 9));
    int got = 0;
    while (got < 96 && TAKE(bytes, cuMemAlloc(&piece[got], bytes)) == CUDA_SUCCESS)
        got++;
    for (int i = 0; i < got; i++) {
        CUdeviceptr *place = &worker->held[any(worker, HELD)];
        if ((i == 0 || piece[i] >> 21 != piece[i - 1] >> 21) && !*place)
            *place = piece[i];
        else
            NEED(cuMemFree(piece[i]));
    }
}

static void pitched(struct worker *worker) {
    CUdeviceptr *place = &worker->held[any(worker, HELD)];
    size_t pitch, width = any(worker, 2) ? 1 : 1 + any(worker, 60000), rows = 1 + any(worker, 500);
    if (*place)
        NEED(cuMemFree(*place));
    if (TAKE(width * rows, cuMemAllocPitch(place, &pitch, width, rows, 4 << any(worker, 3))) !=
        CUDA_SUCCESS)
        *place = 0;
}

static void managed(struct worker *worker) {
    CUdeviceptr address;
    size_t bytes = (1 + any(worker, 8)) * MIB;
    if (TAKE(bytes, cuMemAllocManaged(&address, bytes, CU_MEM_ATTACH_GLOBAL)) == CUDA_SUCCESS)
        NEED(cuMemFree(address));
}

static void pooled(struct worker *worker) {
    CUdeviceptr address;
    size_t bytes = (1 + any(worker, 90)) * MIB;
    if (TAKE(bytes, cuMemAllocAsync(&address, bytes, worker->stream)) == CUDA_SUCCESS)
        NEED(cuMemFreeAsync(address, worker->stream));
    if (any(worker, 2))
        NEED(cuStreamSynchronize(worker->stream));
}

/* The default pool keeps what is freed for a while. */
static void threshold(struct worker *worker) {
    CUmemoryPool pool;
    cuuint64_t keep = any(worker, 2) ? ~0ull : (1 + any(worker, 128)) * MIB;
    NEED(cuDeviceGetDefaultMemPool(&pool, device));
    NEED(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
    for (int i = 0; i < 4; i++)
        pooled(worker);
    if (any(worker, 2))
        NEED(cuMemPoolTrimTo(pool, any(worker, 64) * MIB));
    keep = 0;
    NEED(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
    pooled(worker);
}

/* A pool of its own, with memory still in it when it goes. */
static void pools(struct worker *worker) {
    CUmemPoolProps properties = on_device();
    CUmemoryPool pool;
    CUdeviceptr address[4];
    cuuint64_t keep = any(worker, 2) ? ~0ull : 0;
    int got = 0;
    if (TAKE(0, cuMemPoolCreate(&pool, &properties)) != CUDA_SUCCESS)
        return;
    NEED(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
    size_t bytes = 1 + any(worker, 50 * MIB);
    while (got < 4 && TAKE(bytes, cuMemAllocFromPoolAsync(&address[got], bytes, pool,
                                                          worker->stream)) == CUDA_SUCCESS)
        got++;
    while (got--) {
        if (any(worker, 4) == 0)
            NEED(cuMemFree(address[got]));
        else
            NEED(cuMemFreeAsync(address[got], worker->stream));
    }
    if (any(worker, 2))
        NEED(cuStreamSynchronize(worker->stream));
    if (any(worker, 2))
        NEED(cuMemPoolTrimTo(pool, any(worker, 64) * MIB));
    NEED(cuMemPoolDestroy(pool));
}

/* Taken plainly, freed in the stream's order. */
static void crossed(struct worker *worker) {
    CUdeviceptr address;
    size_t bytes = 1 + any(worker, 20 * MIB);
    if (TAKE(bytes, cuMemAlloc(&address, bytes)) != CUDA_SUCCESS)
        return;
    NEED(cuMemFreeAsync(address, worker->stream));
    if (any(worker, 2))
        NEED(cuStreamSynchronize(worker->stream));
}

static void handles(struct worker *worker) {
    CUmemAllocationProp as = {.type = CU_MEM_ALLOCATION_TYPE_PINNED};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    size_t bytes = (1 + any(worker, 20)) * 2 * MIB;
    int early = (int)any(worker, 2), twice = (int)any(worker, 2);
    as.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    as.location.id = device;
    if (TAKE(bytes, cuMemCreate(&handle, bytes, &as, 0)) != CUDA_SUCCESS)
        return;
    NEED(cuMemAddressReserve(&at, 2 * bytes, 0, 0, 0));
    NEED(cuMemMap(at, bytes, 0, handle, 0));
    if (twice)
        NEED(cuMemMap(at + bytes, bytes, 0, handle, 0));
    if (early)
        NEED(cuMemRelease(handle));
    NEED(cuMemUnmap(at, bytes));
    if (!early)
        NEED(cuMemRelease(handle));
    if (twice)
        NEED(cuMemUnmap(at + bytes, bytes));
    NEED(cuMemAddressFree(at, 2 * bytes));
}

static void arrays(struct worker *worker) {
    CUDA_ARRAY_DESCRIPTOR flat = {1 + any(worker, 2000), 1 + any(worker, 2000), CU_AD_FORMAT_FLOAT,
                                  1};
    CUDA_ARRAY3D_DESCRIPTOR deep = {
        16 + any(worker, 300), 16 + any(worker, 300), 1 + any(worker, 60), CU_AD_FORMAT_HALF, 2, 0};
    CUarray array;
    CUmipmappedArray chain;
    if (TAKE(flat.Width * flat.Height * 4, cuArrayCreate(&array, &flat)) == CUDA_SUCCESS)
        NEED(cuArrayDestroy(array));
    if (any(worker, 2))
        deep.Flags = CUDA_ARRAY3D_LAYERED;
    if (TAKE(0, cuArray3DCreate(&array, &deep)) == CUDA_SUCCESS)
        NEED(cuArrayDestroy(array));
    if (TAKE(0, cuMipmappedArrayCreate(&chain, &deep, 1 + any(worker, 5))) == CUDA_SUCCESS)
        NEED(cuMipmappedArrayDestroy(chain));
}

static void images(struct worker *worker) {
    CUmodule module;
    CUfunction function;
    char text[PTX];
    size_t local = any(worker, 4) ? 0 : 1024 << any(worker, 3);
    size_t global = (1 + any(worker, 8)) * MIB;
    image_text(text, local, global);
    if (TAKE(global, cuModuleLoadData(&module, text)) != CUDA_SUCCESS)
        return;
    if (TAKE(global, cuModuleGetFunction(&function, module, "work")) == CUDA_SUCCESS &&
        TAKE(local, cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, worker->stream, NULL, NULL)) ==
            CUDA_SUCCESS)
        NEED(cuStreamSynchronize(worker->stream));
    NEED(cuModuleUnload(module));
}

/* A library: loaded by its first kernel unless loading is eager. */
static void libraries(struct worker *worker) {
    CUlibrary library;
    CUkernel kernel;
    CUfunction function;
    char text[PTX];
    size_t global = (1 + any(worker, 8)) * MIB;
    image_text(text, any(worker, 4) ? 0 : 2048, global);
    if (TAKE(global, cuLibraryLoadData(&library, text, NULL, NULL, 0, NULL, NULL, 0)) !=
        CUDA_SUCCESS)
        return;
    NEED(cuLibraryGetKernel(&kernel, library, "work"));
    if (TAKE(global, cuKernelGetFunction(&function, kernel)) == CUDA_SUCCESS &&
        TAKE(0, cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, worker->stream, NULL, NULL)) ==
            CUDA_SUCCESS)
        NEED(cuStreamSynchronize(worker->stream));
    NEED(cuLibraryUnload(library));
}

static void limits(struct worker *worker) {
    TAKE(0, cuCtxSetLimit(CU_LIMIT_STACK_SIZE, (size_t)1024 << any(worker, 5)));
    if (any(worker, 2))
        TAKE(0, cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 1024));
}

static void graph_of_nodes(struct worker *worker, CUgraph graph) {
    CUDA_MEM_ALLOC_NODE_PARAMS params = {.poolProps = on_device()};
    CUgraphNode node, freed;
    params.bytesize = (1 + any(worker, 40)) * MIB;
    if (TAKE(params.bytesize, cuGraphAddMemAllocNode(&node, graph, NULL, 0, &params)) ==
        CUDA_SUCCESS)
        NEED(cuGraphAddMemFreeNode(&freed, graph, &node, 1, params.dptr));
}

static void graph_captured(struct worker *worker, CUgraph *graph) {
    CUdeviceptr address;
    size_t bytes = (1 + any(worker, 40)) * MIB;
    NEED(cuStreamBeginCapture(worker->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    if (TAKE(bytes, cuMemAllocAsync(&address, bytes, worker->stream)) == CUDA_SUCCESS)
        NEED(cuMemFreeAsync(address, worker->stream));
    NEED(cuStreamEndCapture(worker->stream, graph));
}

static void graphs(struct worker *worker) {
    CUgraph graph = NULL;
    CUgraphExec exec;
    if (any(worker, 2)) {
        graph_captured(worker, &graph);
    } else {
        NEED(cuGraphCreate(&graph, 0));
        graph_of_nodes(worker, graph);
    }
    if (!graph)
        return;
    if (TAKE(0, cuGraphInstantiate(&exec, graph, 0)) == CUDA_SUCCESS) {
        if (any(worker, 2))
            TAKE(0, cuGraphUpload(exec, worker->stream));
        for (unsigned i = any(worker, 3); i < 3; i++)
            TAKE(0, cuGraphLaunch(exec, worker->stream));
        NEED(cuStreamSynchronize(worker->stream));
        NEED(cuGraphExecDestroy(exec));
    }
    NEED(cuGraphDestroy(graph));
    if (any(worker, 4) == 0)
        NEED(cuDeviceGraphMemTrim(device));
}

static void streams(struct worker *worker) {
    CUstream made[12];
    unsigned want = 1 + any(worker, 12), got = 0;
    while (got < want && TAKE(0, cuStreamCreate(&made[got], CU_STREAM_DEFAULT)) == CUDA_SUCCESS)
        got++;
    while (got)
        NEED(cuStreamDestroy(made[--got]));
}

/* A context that goes with memory in it; half of them with a heap for kernels. */
static void contexts(struct worker *worker) {
    CUcontext made, back;
    CUdeviceptr kept;
    CUmodule module;
    CUfunction function;
    char text[PTX];
    if (TAKE(0, cuCtxCreate(&made, NULL, 0, device)) != CUDA_SUCCESS)
        return;
    for (int i = 0; i < 3; i++)
        TAKE(5 * MIB, cuMemAlloc(&kept, 1 + any(worker, 5 * MIB)));
    heap_text(text);
    if (any(worker, 2) &&
        TAKE(0, cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, (8 + any(worker, 64)) * MIB)) ==
            CUDA_SUCCESS &&
        TAKE(0, cuModuleLoadData(&module, text)) == CUDA_SUCCESS &&
        TAKE(0, cuModuleGetFunction(&function, module, "work")) == CUDA_SUCCESS &&
        TAKE(0, cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL)) == CUDA_SUCCESS)
        NEED(cuCtxSynchronize());
    NEED(cuCtxPopCurrent(&back));
    NEED(cuCtxDestroy(made));
}

/* Shares are of a thousand: what a program does most is done most. */
static const struct family {
    const char *name;
    void (*run)(struct worker *);
    unsigned share;
} families[] = {
    {"exchange", exchange, 560}, {"pooled", pooled, 150},  {"pieces", pieces, 20},
    {"pitched", pitched, 40},    {"managed", managed, 20}, {"threshold", threshold, 15},
    {"pools", pools, 25},        {"crossed", crossed, 25}, {"handles", handles, 30},
    {"arrays", arrays, 25},      {"images", images, 15},   {"libraries", libraries, 15},
    {"limits", limits, 15},      {"graphs", graphs, 25},   {"streams", streams, 15},
    {"contexts", contexts, 5},
};
enum { FAMILIES = sizeof families / sizeof *families };

/* The number of a family, by its share. */
static int choose(struct worker *worker) {
    unsigned pick = any(worker, 1000);
    int family = 0;
    while (family < FAMILIES - 1 && pick >= families[family].share)
        pick -= families[family++].share;
    return family;
}

static inline void operate(struct worker *worker) {
    families[choose(worker)].run(worker);
}
