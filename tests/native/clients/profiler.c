/* A profiler that stands in for the driver, as NVIDIA's do: built with -DLAUNCHER it is preloaded and
 * answers dlopen of the driver with the other build, which wraps two functions and finds the driver's
 * in the way that PROFILER_WAY names. PROFILER_OWN: bytes that it takes for itself. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef LAUNCHER
typedef void *open_function(const char *, int);

void *true_dlopen(const char *name, int flags) {
    return ((open_function *)dlsym(RTLD_NEXT, "dlopen"))(name, flags);
}

void *dlopen(const char *name, int flags) {
    const char *stand_in = getenv("PROFILER");
    return true_dlopen(name && stand_in && !strcmp(name, "libcuda.so.1") ? stand_in : name, flags);
}
#else
typedef int proc_function(const char *, void **, int, uint64_t, int *);
typedef int alloc_function(unsigned long long *, size_t);
void *true_dlopen(const char *, int);

static void *original(const char *name) {
    const char *way = getenv("PROFILER_WAY");
    if (strcmp(way, "next") == 0)
        return dlsym(RTLD_NEXT, name);
    return dlsym(true_dlopen("libcuda.so.1", RTLD_NOW), name);
}

int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes) {
    static unsigned long long own;
    if (!own && getenv("PROFILER_OWN"))
        ((alloc_function *)original("cuMemAlloc_v2"))(&own,
                                                      strtoull(getenv("PROFILER_OWN"), NULL, 10));
    if (getenv("PROFILER_MARK"))
        close(open(getenv("PROFILER_MARK"), O_CREAT | O_WRONLY, 0600));
    return ((alloc_function *)original("cuMemAlloc_v2"))(pointer, bytes);
}

int cuGetProcAddress_v2(const char *symbol, void **found, int version, uint64_t flags,
                        int *status) {
    int result =
        ((proc_function *)original("cuGetProcAddress_v2"))(symbol, found, version, flags, status);
    if (result == 0 && strcmp(symbol, "cuMemAlloc") == 0)
        *found = (void *)cuMemAlloc_v2;
    return result;
}
#endif
