/* Asks each way of taking device memory for `bytes`, each in a process of its own; a line each:
 * "<name> <CUresult>". The sum over several calls counts where one call cannot ask for so much.
 *
 *   paths [BYTES [GROUP|NAME]]
 *
 * Groups: "calls" (the default), "names" (the same calls by other names and look-ups), "kinds" (rarer
 * kinds of memory), all refused past a quota; and "shared": memory that is charged once, granted
 * while it and half as much again fit. */
#include "common.h"
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
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

/* ---- other names and look-ups --------------------------------------------------------------- */

static void *driver_symbol(const char *name) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    void *found = driver ? dlsym(driver, name) : NULL;
    if (!found)
        must(name, CUDA_ERROR_NOT_FOUND);
    return found;
}

static CUresult allocate_by(void *found, size_t bytes) {
    CUdeviceptr address;
    return found ? ((CUresult(*)(CUdeviceptr *, size_t))found)(&address, bytes)
                 : CUDA_ERROR_NOT_FOUND;
}

static CUresult by_dlopen(size_t bytes) {
    return allocate_by(driver_symbol("cuMemAlloc_v2"), bytes);
}

static CUresult by_next(size_t bytes) {
    return allocate_by(dlsym(RTLD_NEXT, "cuMemAlloc_v2"), bytes);
}

static CUresult by_default(size_t bytes) {
    return allocate_by(dlsym(RTLD_DEFAULT, "cuMemAlloc_v2"), bytes);
}

static CUresult by_version(size_t bytes) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    return allocate_by(dlvsym(driver, "cuMemAlloc_v2", "libcuda.so.1"), bytes);
}

typedef CUresult find_v1(const char *, void **, int, cuuint64_t);
typedef CUresult find_v2(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);

static CUresult by_proc_address(size_t bytes) {
    void *found = NULL;
    must("find", ((find_v1 *)driver_symbol("cuGetProcAddress"))("cuMemAlloc", &found, 3020, 0));
    return allocate_by(found, bytes);
}

static CUresult by_proc_address_v2(size_t bytes) {
    void *found = NULL;
    CUdriverProcAddressQueryResult status;
    find_v2 *find = (find_v2 *)driver_symbol("cuGetProcAddress_v2");
    must("find", find("cuMemAlloc", &found, 12000, 0, &status));
    return allocate_by(found, bytes);
}

/* What the look-up function finds when asked for itself. */
static CUresult by_found_look_up(size_t bytes) {
    void *found = NULL, *again = NULL;
    CUdriverProcAddressQueryResult status;
    find_v2 *find = (find_v2 *)driver_symbol("cuGetProcAddress_v2");
    must("find", find("cuGetProcAddress", &again, 12000, 0, &status));
    must("again", ((find_v2 *)again)("cuMemAlloc", &found, 12000, 0, &status));
    return allocate_by(found, bytes);
}

typedef CUresult ordered_call(CUdeviceptr *, size_t, CUstream);

static CUresult ordered_by(void *found, size_t bytes) {
    CUdeviceptr address;
    CUresult result = ((ordered_call *)found)(&address, bytes, NULL);
    return result ? result : cuCtxSynchronize();
}

static CUresult ordered_ptsz(size_t bytes) {
    return ordered_by(driver_symbol("cuMemAllocAsync_ptsz"), bytes);
}

static CUresult ordered_per_thread(size_t bytes) {
    void *found = NULL;
    CUdriverProcAddressQueryResult status;
    find_v2 *find = (find_v2 *)driver_symbol("cuGetProcAddress_v2");
    must("find", find("cuMemAllocAsync", &found, 12000,
                      CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, &status));
    return ordered_by(found, bytes);
}

static CUresult pool_ptsz(size_t bytes) {
    CUmemPoolProps properties = on_device();
    CUmemoryPool made;
    CUdeviceptr address;
    must("cuMemPoolCreate", cuMemPoolCreate(&made, &properties));
    CUresult result = ((CUresult(*)(CUdeviceptr *, size_t, CUmemoryPool, CUstream))driver_symbol(
        "cuMemAllocFromPoolAsync_ptsz"))(&address, bytes, made, NULL);
    return result ? result : cuCtxSynchronize();
}

/* The first names, with 32-bit sizes and addresses. */
static CUresult plain_v1(size_t bytes) {
    CUresult (*ask)(unsigned *, unsigned) = driver_symbol("cuMemAlloc");
    CUresult result = CUDA_SUCCESS;
    unsigned address;
    for (size_t got = 0; got < bytes && !result; got += GIB)
        result = ask(&address, (unsigned)GIB);
    return result;
}

static CUresult pitch_v1(size_t bytes) {
    CUresult (*ask)(unsigned *, unsigned *, unsigned, unsigned, unsigned) =
        driver_symbol("cuMemAllocPitch");
    CUresult result = CUDA_SUCCESS;
    unsigned address, got;
    for (size_t sum = 0; sum < bytes && !result; sum += GIB)
        result = ask(&address, &got, 1 << 20, 1 << 10, 4);
    return result;
}

static CUresult array_v1(size_t bytes) {
    struct {
        unsigned width, height;
        CUarray_format format;
        unsigned channels;
    } as = {SIDE, SIDE, CU_AD_FORMAT_FLOAT, 4};
    CUresult (*ask)(CUarray *, const void *) = driver_symbol("cuArrayCreate");
    CUresult result = CUDA_SUCCESS;
    CUarray made;
    for (size_t got = 0; got < bytes && !result; got += 16ull * SIDE * SIDE)
        result = ask(&made, &as);
    return result;
}

static CUresult contexts_by(const char *name, size_t bytes) {
    CUresult (*ask)(CUcontext *, unsigned, CUdevice) = driver_symbol(name);
    CUresult result = CUDA_SUCCESS;
    CUcontext made;
    for (size_t got = 0; got < bytes && !result; got += 512 * MIB)
        result = ask(&made, 0, device);
    return result;
}

static CUresult contexts_v1(size_t bytes) {
    return contexts_by("cuCtxCreate", bytes);
}

static CUresult contexts_v2(size_t bytes) {
    return contexts_by("cuCtxCreate_v2", bytes);
}

static CUresult contexts_v3(size_t bytes) {
    CUresult (*ask)(CUcontext *, void *, int, unsigned, CUdevice) = driver_symbol("cuCtxCreate_v3");
    CUresult result = CUDA_SUCCESS;
    CUcontext made;
    for (size_t got = 0; got < bytes && !result; got += 512 * MIB)
        result = ask(&made, NULL, 0, 0, device);
    return result;
}

/* ---- rarer kinds ---------------------------------------------------------------------------- */

static CUresult managed_small(size_t bytes) {
    CUdeviceptr address;
    CUresult result = CUDA_SUCCESS;
    for (size_t got = 0; got < bytes && !result; got += MIB)
        result = cuMemAllocManaged(&address, MIB, CU_MEM_ATTACH_GLOBAL);
    return result;
}

static CUresult default_pool_many(size_t bytes) {
    CUdeviceptr address;
    CUresult result = CUDA_SUCCESS;
    for (size_t got = 0; got < bytes && !result; got += 32 * MIB)
        result = cuMemAllocAsync(&address, 32 * MIB, NULL);
    return result ? result : cuCtxSynchronize();
}

/* A green context takes a few MiB, so it is asked for where all else is taken. */
static CUresult green(size_t bytes) {
    CUdevResource all, part, rest;
    CUdevResourceDesc desc;
    CUgreenCtx made;
    CUdeviceptr address;
    unsigned groups = 1;
    size_t got = 0;
    for (size_t step = GIB; step >= 2 * MIB; step /= 2)
        for (; got < bytes && !cuMemAlloc(&address, step); got += step)
            ;
    must("resource", cuDeviceGetDevResource(device, &all, CU_DEV_RESOURCE_TYPE_SM));
    must("split", cuDevSmResourceSplitByCount(&part, &groups, &all, &rest, 0, 16));
    must("describe", cuDevResourceGenerateDesc(&desc, &part, 1));
    return cuGreenCtxCreate(&made, desc, device, CU_GREEN_CTX_DEFAULT_STREAM);
}

static CUmemAllocationProp shareable(void) {
    CUmemAllocationProp properties = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    };
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    return properties;
}

/* Charged again as what another interface made: whether the driver takes this one's own is its matter. */
static CUresult external(size_t bytes) {
    CUmemAllocationProp properties = shareable();
    CUmemGenericAllocationHandle made;
    CUexternalMemory imported;
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC from = {
        .type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .size = bytes / 4, .flags = 0};
    must("create", cuMemCreate(&made, bytes / 4, &properties, 0));
    must("export", cuMemExportToShareableHandle(&from.handle.fd, made,
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    return cuImportExternalMemory(&imported, &from);
}

/* ---- memory of two processes ---------------------------------------------------------------- */

static void send_fd(int over, int fd) {
    char room[CMSG_SPACE(sizeof fd)] = {0}, byte = 0;
    struct iovec data = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(head), &fd, sizeof fd);
    if (sendmsg(over, &message, 0) != 1)
        exit(3);
}

static int receive_fd(int over) {
    char room[CMSG_SPACE(sizeof(int))] = {0}, byte;
    struct iovec data = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    int fd;
    if (recvmsg(over, &message, 0) != 1 || !CMSG_FIRSTHDR(&message))
        exit(3);
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fd;
}

static void give_ipc(int over, size_t bytes) {
    CUdeviceptr address;
    CUipcMemHandle handle;
    must("make", cuMemAlloc(&address, bytes));
    must("handle", cuIpcGetMemHandle(&handle, address));
    if (write(over, &handle, sizeof handle) != sizeof handle)
        exit(3);
}

static CUresult take_ipc(int over) {
    CUdeviceptr address;
    CUipcMemHandle handle;
    if (read(over, &handle, sizeof handle) != sizeof handle)
        exit(3);
    return cuIpcOpenMemHandle(&address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
}

static void give_fd(int over, size_t bytes) {
    CUmemAllocationProp properties = shareable();
    CUmemGenericAllocationHandle made;
    int fd;
    must("make", cuMemCreate(&made, bytes, &properties, 0));
    must("export",
         cuMemExportToShareableHandle(&fd, made, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    send_fd(over, fd);
}

static CUresult take_fd(int over) {
    CUmemGenericAllocationHandle made;
    int fd = receive_fd(over);
    CUresult result = cuMemImportFromShareableHandle(&made, (void *)(intptr_t)fd,
                                                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    close(fd);
    return result;
}

/* A quarter of `bytes` made by one process and taken over by another, which then asks for `more`:
 * while its maker lives, or after its end. */
static CUresult passed_on(void (*give)(int, size_t), CUresult (*take)(int), bool outlived,
                          size_t bytes, size_t more) {
    int ends[2];
    char byte = 0;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends))
        exit(3);
    pid_t maker = fork();
    if (maker == 0) {
        close(ends[0]);
        must("start", start(0));
        give(ends[1], bytes / 4);
        _exit(read(ends[1], &byte, 1) < 0);
    }
    close(ends[1]);
    must("start", start(0));
    must("take", take(ends[0]));
    if (outlived) {
        close(ends[0]);
        waitpid(maker, NULL, 0);
    }
    CUresult result = plain(more);
    if (!outlived) {
        close(ends[0]);
        waitpid(maker, NULL, 0);
    }
    return result;
}

static CUresult ipc_outlived(size_t bytes) {
    return passed_on(give_ipc, take_ipc, true, bytes, bytes / 4);
}

static CUresult fd_outlived(size_t bytes) {
    return passed_on(give_fd, take_fd, true, bytes, bytes / 4);
}

static CUresult ipc_once(size_t bytes) {
    return passed_on(give_ipc, take_ipc, false, bytes, bytes / 8);
}

static CUresult fd_once(size_t bytes) {
    return passed_on(give_fd, take_fd, false, bytes, bytes / 8);
}

static const struct {
    const char *group, *name;
    path *ask;
    bool alone; /* starts by itself: it forks first */
} paths[] = {
    {"calls", "cuMemAlloc", plain, false},
    {"calls", "cuMemAlloc_small", many_small, false},
    {"calls", "cuMemAllocPitch", pitch, false},
    {"calls", "cuMemAllocPitch_narrow", narrow_pitch, false},
    {"calls", "cuMemAllocManaged", managed, false},
    {"calls", "cuMemAllocAsync", ordered, false},
    {"calls", "cuMemAllocFromPoolAsync", pool, false},
    {"calls", "cuMemCreate", handle, false},
    {"calls", "cuArrayCreate", array, false},
    {"calls", "cuArray3DCreate", array_3d, false},
    {"calls", "cuMipmappedArrayCreate", mipmap, false},
    {"calls", "graph_node", graph_node, false},
    {"calls", "captured_alloc", captured, false},
    {"calls", "cuCtxCreate", contexts, false},
    {"calls", "cuStreamCreate", streams, false},
    {"calls", "cuCtxSetLimit_stack", stack, false},
    {"calls", "local_memory", local_memory, false},
    {"calls", "module_images", images, false},
    {"names", "dlopen", by_dlopen, false},
    {"names", "RTLD_NEXT", by_next, false},
    {"names", "RTLD_DEFAULT", by_default, false},
    {"names", "dlvsym", by_version, false},
    {"names", "cuGetProcAddress", by_proc_address, false},
    {"names", "cuGetProcAddress_v2", by_proc_address_v2, false},
    {"names", "cuGetProcAddress_of_itself", by_found_look_up, false},
    {"names", "cuMemAllocAsync_ptsz", ordered_ptsz, false},
    {"names", "cuMemAllocAsync_per_thread", ordered_per_thread, false},
    {"names", "cuMemAllocFromPoolAsync_ptsz", pool_ptsz, false},
    {"names", "cuMemAlloc_v1", plain_v1, false},
    {"names", "cuMemAllocPitch_v1", pitch_v1, false},
    {"names", "cuArrayCreate_v1", array_v1, false},
    {"names", "cuCtxCreate_v1", contexts_v1, false},
    {"names", "cuCtxCreate_v2", contexts_v2, false},
    {"names", "cuCtxCreate_v3", contexts_v3, false},
    {"kinds", "cuMemAllocManaged_small", managed_small, false},
    {"kinds", "default_pool_growth", default_pool_many, false},
    {"kinds", "green_context", green, false},
    {"kinds", "cuImportExternalMemory", external, false},
    {"kinds", "IPC_outlived", ipc_outlived, true},
    {"kinds", "POSIX_fd_outlived", fd_outlived, true},
    {"shared", "IPC_charged_once", ipc_once, true},
    {"shared", "POSIX_fd_charged_once", fd_once, true},
};

int main(int count, char **arguments) {
    size_t bytes = count > 1 ? strtoull(arguments[1], NULL, 10) : 8 * GIB;
    const char *asked = count > 2 ? arguments[2] : "calls";
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        if (strcmp(asked, paths[i].group) != 0 && strcmp(asked, paths[i].name) != 0)
            continue;
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            alarm(60);
            if (!paths[i].alone)
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
