/* The lab's test of a quota, on the driver API: 3 GiB must be granted, 2 GiB more refused.
 *
 *   memory-limit [FIRST_MIB [MORE_MIB]]      without MORE_MIB after FIRST_MIB nothing more is asked for
 *   HOLD_SECONDS                             how long the memory is held afterwards, 0
 *
 * Exit status: 0 passed, 1 no driver, 2 the first allocation failed, 3 the second one did not fail as it must. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 2 };

typedef int result;
typedef unsigned long long address;

static result (*init)(unsigned);
static result (*device_get)(int *, int);
static result (*retain)(void **, int);
static result (*set_current)(void *);
static result (*allocate)(address *, size_t);
static result (*error_string)(result, const char **);

#ifdef LINKED
/* Linked with the simulator: a static program that loads nothing, so nothing can be preloaded. */
result cuInit(unsigned);
result cuDeviceGet(int *, int);
result cuDevicePrimaryCtxRetain(void **, int);
result cuCtxSetCurrent(void *);
result cuMemAlloc_v2(address *, size_t);
result cuGetErrorString(result, const char **);

static void load(void) {
    init = cuInit;
    device_get = cuDeviceGet;
    retain = cuDevicePrimaryCtxRetain;
    set_current = cuCtxSetCurrent;
    allocate = cuMemAlloc_v2;
    error_string = cuGetErrorString;
}
#else
static void *find(void *driver, const char *name) {
    void *found = dlsym(driver, name);
    if (!found) {
        fprintf(stderr, "no %s in libcuda.so.1\n", name);
        exit(1);
    }
    return found;
}

static void load(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    *(void **)&init = find(driver, "cuInit");
    *(void **)&device_get = find(driver, "cuDeviceGet");
    *(void **)&retain = find(driver, "cuDevicePrimaryCtxRetain");
    *(void **)&set_current = find(driver, "cuCtxSetCurrent");
    *(void **)&allocate = find(driver, "cuMemAlloc_v2");
    *(void **)&error_string = find(driver, "cuGetErrorString");
}
#endif

static const char *text(result code) {
    const char *said = NULL;
    return error_string(code, &said) == SUCCESS && said ? said : "unknown error";
}

static void need(const char *name, result code) {
    if (code != SUCCESS) {
        fprintf(stderr, "%s: %s (%d)\n", name, text(code), code);
        exit(1);
    }
}

static void stamp(const char *name) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    printf("%s=%lld.%03ld\n", name, (long long)now.tv_sec, now.tv_nsec / 1000000);
}

static result ask(const char *what, unsigned long long mib) {
    address where;
    result code = allocate(&where, (size_t)(mib << 20));
    if (mib % 1024)
        printf("allocate %s%llu MiB: %s\n", what, mib, text(code));
    else
        printf("allocate %s%llu GiB: %s\n", what, mib / 1024, text(code));
    return code;
}

int main(int count, char **words) {
    unsigned long long first = count > 1 ? strtoull(words[1], NULL, 10) : 3072;
    unsigned long long more = count > 2 ? strtoull(words[2], NULL, 10) : count > 1 ? 0 : 2048;
    const char *hold = getenv("HOLD_SECONDS");
    int device, status = 0;
    void *context;

    setvbuf(stdout, NULL, _IOLBF, 0);
    load();
    need("cuInit", init(0));
    need("cuDeviceGet", device_get(&device, 0));
    need("cuDevicePrimaryCtxRetain", retain(&context, device));
    need("cuCtxSetCurrent", set_current(context));
    stamp("test_start");
    if (ask("", first) != SUCCESS) {
        puts("FAIL: the in-quota allocation failed");
        status = 2;
    } else if (more && ask("another ", more) != OUT_OF_MEMORY) {
        puts("FAIL: the over-quota allocation was not refused");
        status = 3;
    } else if (more)
        puts("PASS: in-quota allocation succeeded and over-quota allocation failed");
    if (!status && hold)
        sleep((unsigned)strtoul(hold, NULL, 10));
    stamp("test_end");
    return status;
}
