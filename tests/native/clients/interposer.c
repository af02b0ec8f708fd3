/* Another interposer, as tools and allocators bring one: wraps malloc through RTLD_NEXT (asked
 * twice), wraps cuMemAlloc_v2 for programs linked to the driver, and exports names that only look
 * like the driver's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

int interposed;

int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes) {
    static int (*next)(unsigned long long *, size_t);
    if (!next)
        next = (int (*)(unsigned long long *, size_t))dlsym(RTLD_NEXT, "cuMemAlloc_v2");
    interposed++;
    return next ? next(pointer, bytes) : -1;
}

void *malloc(size_t bytes) {
    static void *(*first)(size_t), *(*second)(size_t);
    if (!second) {
        first = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
        second = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
    }
    return first == second ? first(bytes) : NULL;
}

#define LOOKALIKE(name, value) \
    int name(void) {           \
        return value;          \
    }
LOOKALIKE(cudnnCreate, 1)
LOOKALIKE(cublasCreate_v2, 2)
LOOKALIKE(cufftPlan1d, 3)
LOOKALIKE(curl_easy_init, 4)
LOOKALIKE(cupsGetDests, 5)
LOOKALIKE(cudaMalloc, 6)
LOOKALIKE(cuFooBar, 7)
LOOKALIKE(nvmlSomething, 8)
LOOKALIKE(cu, 9)
LOOKALIKE(cuMemAlloc_v99, 10)
