/* Finds the driver's functions in the way its first argument names, and prints the largest single
 * cuMemAlloc that is granted, in bytes. Built twice: LINKED uses the names as the loader bound
 * them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef int init_function(unsigned);
typedef int retain_function(void **, int);
typedef int current_function(void *);
typedef int alloc_function(unsigned long long *, size_t);
typedef int free_function(unsigned long long);
typedef int proc1_function(const char *, void **, int, uint64_t);
typedef int proc2_function(const char *, void **, int, uint64_t, int *);

#ifdef LINKED
extern init_function cuInit;
extern retain_function cuDevicePrimaryCtxRetain;
extern current_function cuCtxSetCurrent;
extern alloc_function cuMemAlloc_v2;
extern free_function cuMemFree_v2;
#endif

static const char *way;
static void *driver;

/* `base` is the name for cuGetProcAddress, `symbol` the one the library exports. */
static void *find(const char *base, const char *symbol) {
    void *address = NULL;
    if (strcmp(way, "dlsym") == 0)
        address = dlsym(driver, symbol);
    else if (strcmp(way, "program") == 0)
        address = dlsym(dlopen(NULL, RTLD_NOW), symbol);
    else if (strcmp(way, "default") == 0)
        address = dlsym(RTLD_DEFAULT, symbol);
    else if (strcmp(way, "next") == 0)
        address = dlsym(RTLD_NEXT, symbol);
    else if (strcmp(way, "proc1") == 0)
        ((proc1_function *)dlsym(driver, "cuGetProcAddress"))(base, &address, 11030, 0);
    else if (strcmp(way, "proc2") == 0)
        ((proc2_function *)dlsym(driver, "cuGetProcAddress_v2"))(base, &address, 12000, 0, NULL);
    else if (strcmp(way, "self") == 0) {
        void *proc = NULL;
        ((proc2_function *)dlsym(driver, "cuGetProcAddress_v2"))("cuGetProcAddress", &proc, 12000,
                                                                 0, NULL);
        ((proc2_function *)proc)(base, &address, 12000, 0, NULL);
    }
    return address;
}

int main(int count, char **arguments) {
    void *context;
    unsigned long long pointer;
    way = count > 1 ? arguments[1] : "";
#ifdef LINKED
    init_function *init = cuInit;
    retain_function *retain = cuDevicePrimaryCtxRetain;
    current_function *current = cuCtxSetCurrent;
    alloc_function *alloc = cuMemAlloc_v2;
    free_function *release = cuMemFree_v2;
    (void)find;
#else
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    init_function *init = find("cuInit", "cuInit");
    retain_function *retain = find("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain");
    current_function *current = find("cuCtxSetCurrent", "cuCtxSetCurrent");
    alloc_function *alloc = find("cuMemAlloc", "cuMemAlloc_v2");
    free_function *release = find("cuMemFree", "cuMemFree_v2");
#endif
    if (!init || !retain || !current || !alloc || !release)
        return 2;
    if (init(0) || retain(&context, 0) || current(context))
        return 3;
    size_t granted = 0, refused = (size_t)1 << 40;
    while (refused - granted > 1) {
        size_t middle = granted + (refused - granted) / 2;
        int result = alloc(&pointer, middle);
        if (result != 0 && result != 2)
            return 4;
        if (result == 0 && release(pointer))
            return 5;
        *(result == 0 ? &granted : &refused) = middle;
    }
    printf("%zu\n", granted);
    return 0;
}
