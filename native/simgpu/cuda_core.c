/* Start-up, the process lock, handles, devices visible to this process. */
#define _GNU_SOURCE
#include "sim_cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct cu_device cu_devs[SIM_DEVS];
int cu_ndevs;

static pthread_mutex_t process_lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static bool initialised;
static uint64_t next_id = 1;

/* In a forked child the lock may belong to a thread that does not exist there; a child of an
 * initialised process can only be told that nothing is initialised. */
void cu_lock(void) {
    if (!sim_forked())
        pthread_mutex_lock(&process_lock);
}

void cu_unlock(void) {
    if (!sim_forked())
        pthread_mutex_unlock(&process_lock);
}

CUresult cu_ready(void) {
    return initialised && !sim_forked() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

uint64_t cu_next_id(void) {
    return next_id++;
}

/* ---- start ---- */

/* A driver that looks itself up (as on WSL) must reach itself, not an interposer. */
static CUresult self_lookup(void) {
    static bool inside;
    const char *v = getenv("SIMGPU_SELFLOOKUP");
    if (!v || strcmp(v, "1") != 0 || inside)
        return CUDA_SUCCESS;
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (!handle)
        return CUDA_ERROR_SHARED_OBJECT_INIT_FAILED;
    CUresult (*found)(unsigned) = NULL;
    *(void **)&found = dlsym(handle, "cuInit");
    inside = true;
    CUresult result = found ? found(0) : CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND;
    inside = false;
    dlclose(handle);
    extern CUresult cuInit_self(unsigned) __attribute__((visibility("hidden")));
    return result ? result : found == cuInit_self ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

SIM_API(cuInit, (unsigned Flags), (Flags)) {
    CU_ARG(Flags == 0);
    CU_CHECK(!sim_forked(), CUDA_ERROR_NOT_INITIALIZED);
    CU_TRY(self_lookup());
    if (initialised)
        return CUDA_SUCCESS;
    if (sim_attach(true))
        return CUDA_ERROR_OPERATING_SYSTEM;
    int doms[SIM_DEVS];
    cu_ndevs = sim_cuda_order(doms, SIM_DEVS);
    CU_CHECK(cu_ndevs > 0, CUDA_ERROR_NO_DEVICE);
    for (int i = 0; i < cu_ndevs; i++)
        cu_devs[i].dom = (uint32_t)doms[i];
    initialised = true;
    return CUDA_SUCCESS;
}

bool cu_take(uint32_t dom, uint64_t bytes) {
    return sim_take(dom, bytes) || (pool_trim_all(dom) && sim_take(dom, bytes));
}

static int driver_version(void) {
    static int cached;
    if (!cached && (sim || sim_attach(false) == 0))
        cached = sim->driver < SIM_DRIVER_MAX ? sim->driver : SIM_DRIVER_MAX;
    return cached;
}

int cu_driver_version(void) {
    return driver_version();
}

SIM_API(cuDriverGetVersion, (int *driverVersion), (driverVersion)) {
    CU_ARG(driverVersion);
    *driverVersion = driver_version();
    return *driverVersion ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

CUresult cu_device_of(CUdevice dev, struct cu_device **out) {
    CU_TRY(cu_ready());
    CU_CHECK(dev >= 0 && dev < cu_ndevs, CUDA_ERROR_INVALID_DEVICE);
    *out = &cu_devs[dev];
    return CUDA_SUCCESS;
}

int cu_dev_of_dom(uint32_t dom) {
    for (int i = 0; i < cu_ndevs; i++)
        if (cu_devs[i].dom == dom)
            return i;
    return -1;
}

int cu_stub(const char *name);

/* The answer of an export without behaviour. */
int cu_stub(const char *name) {
    int fault = SIM_UNLIKELY(sim_trace_on) ? sim_trace_enter(name) : -1;
    CUresult result = cu_ready();
    if (fault >= 0)
        result = (CUresult)fault;
    else if (result == CUDA_SUCCESS)
        result = CUDA_ERROR_NOT_SUPPORTED;
    if (SIM_UNLIKELY(sim_trace_on))
        sim_trace_leave(name, (long)result);
    return (int)result;
}
