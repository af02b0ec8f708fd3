#pragma once
#include "common.h"

/* One random operation after another, over every family of calls that takes device memory. The
 * including file says what counts as progress: `count` gets the result of each request. */

#define HELD 96
struct worker {
    unsigned seed;
    CUstream stream;
    CUdeviceptr held[HELD];
};

static CUresult count(CUresult result);

static void exchange(struct worker *worker) {
    static const size_t sizes[] = {700 * 1024,  64 * 1024,   1153434,      2 * MIB,
                                   2 * MIB + 1, 1536 * 1024, 33 * MIB + 7, 120 * MIB};
    CUdeviceptr *place = &worker->held[rand_r(&worker->seed) % HELD];
    if (*place) {
        must("free", cuMemFree(*place));
        *place = 0;
    } else if (count(cuMemAlloc(place, sizes[rand_r(&worker->seed) % 8])) != CUDA_SUCCESS) {
        *place = 0;
    }
}

static void pooled(struct worker *worker) {
    CUdeviceptr address;
    if (count(cuMemAllocAsync(&address, (size_t)(rand_r(&worker->seed) % 90 + 1) * MIB,
                              worker->stream)) == CUDA_SUCCESS)
        must("free async", cuMemFreeAsync(address, worker->stream));
    if (rand_r(&worker->seed) % 2)
        must("sync", cuStreamSynchronize(worker->stream));
}

static void handles(struct worker *worker) {
    CUmemAllocationProp as = {.type = CU_MEM_ALLOCATION_TYPE_PINNED};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    size_t bytes = (size_t)(rand_r(&worker->seed) % 20 + 1) * 2 * MIB;
    as.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    if (count(cuMemCreate(&handle, bytes, &as, 0)) != CUDA_SUCCESS)
        return;
    must("reserve", cuMemAddressReserve(&at, bytes, 0, 0, 0));
    must("map", cuMemMap(at, bytes, 0, handle, 0));
    must("release", cuMemRelease(handle));
    must("unmap", cuMemUnmap(at, bytes));
    must("address free", cuMemAddressFree(at, bytes));
}

static void arrays(struct worker *worker) {
    CUDA_ARRAY_DESCRIPTOR as = {(size_t)(rand_r(&worker->seed) % 2000 + 1),
                                (size_t)(rand_r(&worker->seed) % 2000 + 1), CU_AD_FORMAT_FLOAT, 1};
    CUarray array;
    if (count(cuArrayCreate(&array, &as)) == CUDA_SUCCESS)
        must("array destroy", cuArrayDestroy(array));
}

static void images(struct worker *worker) {
    CUmodule module;
    CUfunction function;
    size_t local = rand_r(&worker->seed) % 4 ? 0 : 4096;
    if (count(load(&module, &function, local, (size_t)(rand_r(&worker->seed) % 8 + 1) * MIB)) !=
        CUDA_SUCCESS)
        return;
    if (count(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL)) == CUDA_SUCCESS)
        must("ctx sync", cuCtxSynchronize());
    must("unload", cuModuleUnload(module));
}

static void limits(struct worker *worker) {
    count(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 1024 << (rand_r(&worker->seed) % 3)));
}

static void graphs(struct worker *worker) {
    CUgraph graph;
    CUgraphExec exec;
    CUgraphNode node, freed;
    CUDA_MEM_ALLOC_NODE_PARAMS params = {.poolProps = on_device()};
    params.bytesize = (size_t)(rand_r(&worker->seed) % 40 + 1) * MIB;
    must("graph", cuGraphCreate(&graph, 0));
    if (count(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &params)) == CUDA_SUCCESS) {
        must("free node", cuGraphAddMemFreeNode(&freed, graph, &node, 1, params.dptr));
        if (count(cuGraphInstantiate(&exec, graph, 0)) == CUDA_SUCCESS) {
            if (count(cuGraphLaunch(exec, worker->stream)) == CUDA_SUCCESS)
                must("graph sync", cuStreamSynchronize(worker->stream));
            must("exec destroy", cuGraphExecDestroy(exec));
        }
    }
    must("graph destroy", cuGraphDestroy(graph));
    if (rand_r(&worker->seed) % 4 == 0)
        must("trim", cuDeviceGraphMemTrim(device));
}

static void managed(struct worker *worker) {
    CUdeviceptr address;
    if (count(cuMemAllocManaged(&address, (size_t)(rand_r(&worker->seed) % 8 + 1) * MIB,
                                CU_MEM_ATTACH_GLOBAL)) == CUDA_SUCCESS)
        must("managed free", cuMemFree(address));
}

static void operate(struct worker *worker) {
    static void (*const rare[])(struct worker *) = {handles, handles, arrays, arrays,
                                                    images,  limits,  graphs, managed};
    int pick = rand_r(&worker->seed) % 100;
    if (pick < 65)
        exchange(worker);
    else if (pick < 82)
        pooled(worker);
    else
        rare[rand_r(&worker->seed) % 8](worker);
}
