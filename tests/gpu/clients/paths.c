/* Asks each way of taking device memory for `bytes`, each in a process of its own; a line each:
 * "<name> <CUresult>". The sum over several calls counts where one call cannot ask for so much. */
#include "common.h"
#include <sys/wait.h>

typedef CUresult path(size_t bytes);

static CUresult plain(size_t bytes) {
    CUdeviceptr address;
    return cuMemAlloc(&address, bytes);
}

static CUresult pitch(size_t bytes) {
    CUdeviceptr address;
    size_t got;
    return cuMemAllocPitch(&address, &got, 1 << 20, bytes >> 20, 4);
}

/* One byte a row: the driver takes 512. */
static CUresult narrow_pitch(size_t bytes) {
    CUdeviceptr address;
    size_t got;
    return cuMemAllocPitch(&address, &got, 1, bytes / 512, 4);
}

static CUresult managed(size_t bytes) {
    CUdeviceptr address;
    return cuMemAllocManaged(&address, bytes, CU_MEM_ATTACH_GLOBAL);
}

static CUstream stream(void) {
    CUstream made;
    must("cuStreamCreate", cuStreamCreate(&made, CU_STREAM_NON_BLOCKING));
    return made;
}

static CUresult ordered(size_t bytes) {
    CUdeviceptr address;
    CUstream on = stream();
    CUresult result = cuMemAllocAsync(&address, bytes, on);
    return result ? result : cuStreamSynchronize(on);
}

static CUresult pool(size_t bytes) {
    CUmemPoolProps properties = on_device();
    CUmemoryPool made;
    CUdeviceptr address;
    CUstream on = stream();
    must("cuMemPoolCreate", cuMemPoolCreate(&made, &properties));
    CUresult result = cuMemAllocFromPoolAsync(&address, bytes, made, on);
    return result ? result : cuStreamSynchronize(on);
}

static CUresult many_small(size_t bytes) {
    CUdeviceptr address;
    CUresult result = CUDA_SUCCESS;
    for (size_t got = 0; got < bytes && !result; got += 700 * 1024)
        result = cuMemAlloc(&address, 700 * 1024);
    return result;
}

static CUresult handle(size_t bytes) {
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED};
    CUmemGenericAllocationHandle made;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    return cuMemCreate(&made, bytes, &properties, 0);
}

#define SIDE 8192
static CUresult array(size_t bytes) {
    CUDA_ARRAY_DESCRIPTOR as = {SIDE, SIDE, CU_AD_FORMAT_FLOAT, 4};
    CUarray made;
    CUresult result = CUDA_SUCCESS;
    for (size_t got = 0; got < bytes && !result; got += 16ull * SIDE * SIDE)
        result = cuArrayCreate(&made, &as);
    return result;
}

static CUresult array_3d(size_t bytes) {
    CUDA_ARRAY3D_DESCRIPTOR as = {512, 512, 512, CU_AD_FORMAT_FLOAT, 4, 0};
    CUarray made;
    CUresult result = CUDA_SUCCESS;
    for (size_t got = 0; got < bytes && !result; got += 16ull * 512 * 512 * 512)
        result = cuArray3DCreate(&made, &as);
    return result;
}

static CUresult mipmap(size_t bytes) {
    CUDA_ARRAY3D_DESCRIPTOR as = {SIDE, SIDE, 0, CU_AD_FORMAT_FLOAT, 4, 0};
    CUmipmappedArray made;
    CUresult result = CUDA_SUCCESS;
    for (size_t got = 0; got < bytes && !result; got += 16ull * SIDE * SIDE)
        result = cuMipmappedArrayCreate(&made, &as, 4);
    return result;
}

static CUresult run_graph(CUgraph graph) {
    CUgraphExec exec;
    CUstream on = stream();
    CUresult result = cuGraphInstantiate(&exec, graph, 0);
    if (!result)
        result = cuGraphLaunch(exec, on);
    return result ? result : cuStreamSynchronize(on);
}

static CUresult graph_node(size_t bytes) {
    CUgraph graph;
    CUgraphNode node;
    CUDA_MEM_ALLOC_NODE_PARAMS params = {.poolProps = on_device(), .bytesize = bytes};
    must("cuGraphCreate", cuGraphCreate(&graph, 0));
    CUresult result = cuGraphAddMemAllocNode(&node, graph, NULL, 0, &params);
    return result ? result : run_graph(graph);
}

static CUresult captured(size_t bytes) {
    CUgraph graph;
    CUdeviceptr address;
    CUstream on = stream();
    must("begin", cuStreamBeginCapture(on, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CUresult result = cuMemAllocAsync(&address, bytes, on);
    must("end", cuStreamEndCapture(on, &graph));
    return result ? result : run_graph(graph);
}

static CUresult contexts(size_t bytes) {
    CUcontext made;
    CUresult result = CUDA_SUCCESS;
    for (size_t got = 0; got < bytes && !result; got += 256 * MIB)
        result = cuCtxCreate(&made, NULL, 0, device);
    return result;
}

static CUresult streams(size_t bytes) {
    CUstream made;
    CUresult result = CUDA_SUCCESS;
    for (size_t got = 0; got < bytes && !result; got += MIB / 2)
        result = cuStreamCreate(&made, CU_STREAM_NON_BLOCKING);
    return result;
}

static CUresult stack(size_t bytes) {
    (void)bytes;
    return cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 64 * 1024);
}

static CUresult local_memory(size_t bytes) {
    CUmodule module;
    CUfunction function;
    (void)bytes;
    must("load", load(&module, &function, 64 * 1024, 0));
    CUresult result = cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
    return result ? result : cuCtxSynchronize();
}

static CUresult images(size_t bytes) {
    CUmodule module;
    CUfunction function;
    CUresult result = CUDA_SUCCESS;
    for (size_t got = 0; got < bytes && !result; got += GIB)
        result = load(&module, &function, 0, GIB);
    return result;
}

static const struct {
    const char *name;
    path *ask;
} paths[] = {
    {"cuMemAlloc", plain},
    {"cuMemAlloc_small", many_small},
    {"cuMemAllocPitch", pitch},
    {"cuMemAllocPitch_narrow", narrow_pitch},
    {"cuMemAllocManaged", managed},
    {"cuMemAllocAsync", ordered},
    {"cuMemAllocFromPoolAsync", pool},
    {"cuMemCreate", handle},
    {"cuArrayCreate", array},
    {"cuArray3DCreate", array_3d},
    {"cuMipmappedArrayCreate", mipmap},
    {"graph_node", graph_node},
    {"captured_alloc", captured},
    {"cuCtxCreate", contexts},
    {"cuStreamCreate", streams},
    {"cuCtxSetLimit_stack", stack},
    {"local_memory", local_memory},
    {"module_images", images},
};

int main(int count, char **arguments) {
    size_t bytes = count > 1 ? strtoull(arguments[1], NULL, 10) : 8 * GIB;
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        if (count > 2 && strcmp(arguments[2], paths[i].name) != 0)
            continue;
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            alarm(60);
            must("start", start(0));
            printf("%s %d\n", paths[i].name, (int)paths[i].ask(bytes));
            fflush(stdout);
            _exit(0);
        }
        int status;
        waitpid(child, &status, 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status))
            printf("%s died %d\n", paths[i].name, status);
    }
    return 0;
}
