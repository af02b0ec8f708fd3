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

/* ---- handles: open addressing, deletion by shifting back ---- */

struct handle {
    const void *p;
    enum cu_kind kind;
};

static struct handle *table;
static size_t table_cap, table_used;
static long kind_count[K_MAX];

static size_t home(const void *p) {
    return (size_t)(((uintptr_t)p >> 4) * 0x9e3779b97f4a7c15ull >> 20) & (table_cap - 1);
}

static size_t locate(const void *p) {
    size_t i = home(p);
    while (table[i].p && table[i].p != p)
        i = (i + 1) & (table_cap - 1);
    return i;
}

static bool rehash(size_t cap) {
    struct handle *old = table, *fresh = calloc(cap, sizeof *fresh);
    size_t old_cap = table_cap;
    if (!fresh)
        return false;
    table = fresh;
    table_cap = cap;
    for (size_t i = 0; i < old_cap; i++)
        if (old[i].p)
            table[locate(old[i].p)] = old[i];
    free(old);
    return true;
}

bool cu_handle_add(const void *p, enum cu_kind kind) {
    if (table_used * 2 >= table_cap && !rehash(table_cap ? table_cap * 2 : 256))
        return false;
    table[locate(p)] = (struct handle){p, kind};
    table_used++;
    kind_count[kind]++;
    return true;
}

void cu_handle_del(const void *p) {
    size_t i = table_cap ? locate(p) : 0, j = i;
    if (!table_cap || !table[i].p)
        return;
    kind_count[table[i].kind]--;
    table_used--;
    for (;;) {
        j = (j + 1) & (table_cap - 1);
        if (!table[j].p)
            break;
        size_t k = home(table[j].p);
        if (i <= j ? (i < k && k <= j) : (i < k || k <= j))
            continue;
        table[i] = table[j];
        i = j;
    }
    table[i] = (struct handle){NULL, K_NONE};
}

bool cu_handle_is(const void *p, enum cu_kind kind) {
    if (!p || !table_cap)
        return false;
    struct handle *h = &table[locate(p)];
    return h->p && h->kind == kind;
}

long cu_handle_count(enum cu_kind kind) {
    return kind_count[kind];
}

void *cu_handle_next(enum cu_kind kind, size_t *at) {
    while (*at < table_cap) {
        struct handle *h = &table[(*at)++];
        if (h->p && (kind == K_NONE || h->kind == kind))
            return (void *)(uintptr_t)h->p;
    }
    return NULL;
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

SIM_EXPORT long simgpu_live_objects(void);

/* For tests: allocations of any kind plus handles, contexts included. */
long simgpu_live_objects(void) {
    cu_lock();
    long n = va_count();
    for (int k = 0; k < K_MAX; k++)
        n += kind_count[k];
    cu_unlock();
    return n;
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
