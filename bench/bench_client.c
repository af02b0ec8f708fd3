/* Measures what driver calls cost in this process; prints "name value" lines, values in ns a call.
 * Plain C with no vendor header and nothing linked: the arms differ in LD_PRELOAD alone.
 *
 *   bench_client calls SECONDS OVER    every call, about SECONDS each; OVER MiB are over the quota
 *   bench_client start                 from nothing to a current context, then ends
 *   bench_client first                 what the first calls of a process take
 *   bench_client milestones            when (ns of CLOCK_MONOTONIC, and of processor time since the start) there was
 *                                      a context, an allocation, a finished kernel
 *   bench_client serve                 told on standard input, one line each, what to measure:
 *                                      "batch CALL N" (ns a call: wall, processor), "sample CALL N" (ns of each),
 *                                      "threads CALL T N" (median and 99th percentile of T threads), "control MIB" */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned long long address;

struct location {
    int type, id;
};
struct properties { /* CUmemAllocationProp */
    int type, handle_types;
    struct location location;
    void *security;
    unsigned char flags[8];
};

#define FUNCTIONS(F)                                                                               \
    F(cuInit, (unsigned flags))                                                                    \
    F(cuDeviceGet, (int *device, int ordinal))                                                     \
    F(cuDevicePrimaryCtxRetain, (void **context, int device))                                      \
    F(cuCtxSetCurrent, (void *context))                                                            \
    F(cuCtxGetCurrent, (void **context))                                                           \
    F(cuCtxGetDevice, (int *device))                                                               \
    F(cuCtxSynchronize, (void))                                                                    \
    F(cuModuleLoadData, (void **module, const void *image))                                        \
    F(cuModuleGetFunction, (void **function, void *module, const char *name))                      \
    F(cuLaunchKernel, (void *function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
                       unsigned shared, void *stream, void **arguments, void **extra))             \
    F(cuMemAlloc_v2, (address * pointer, size_t bytes))                                            \
    F(cuMemFree_v2, (address pointer))                                                             \
    F(cuMemGetInfo_v2, (size_t *free, size_t *total))                                              \
    F(cuMemAllocAsync, (address * pointer, size_t bytes, void *stream))                            \
    F(cuMemFreeAsync, (address pointer, void *stream))                                             \
    F(cuDeviceGetDefaultMemPool, (void **pool, int device))                                        \
    F(cuMemPoolSetAttribute, (void *pool, int attribute, void *value))                             \
    F(cuMemAddressReserve,                                                                         \
      (address * pointer, size_t bytes, size_t alignment, address hint, address flags))            \
    F(cuMemCreate, (address * handle, size_t bytes, const struct properties *, address flags))     \
    F(cuMemMap, (address pointer, size_t bytes, size_t offset, address handle, address flags))     \
    F(cuMemUnmap, (address pointer, size_t bytes))                                                 \
    F(cuMemRelease, (address handle))                                                              \
    F(cuStreamCreate, (void **stream, unsigned flags))                                             \
    F(cuStreamBeginCapture_v2, (void *stream, int mode))                                           \
    F(cuStreamEndCapture, (void *stream, void **graph))                                            \
    F(cuGraphInstantiateWithFlags, (void **exec, void *graph, address flags))                      \
    F(cuGraphLaunch, (void *exec, void *stream))                                                   \
    F(cuGetProcAddress_v2, (const char *name, void **function, int version, address flags, int *))

#define F(name, params) static int(*name) params;
FUNCTIONS(F)
#undef F

static const char image[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
                            ".visible .entry noop()\n{\n    ret;\n}\n";
#define LIVE 20000
#define SAMPLES 20000
#define BATCHES 9

static void *driver, *function;
static size_t size; /* of the allocations being measured */
static address reserved;
static address live[LIVE];
static int failed; /* calls that should have succeeded */
static int (*current)(void **);
static int (*device_of)(int *);
static int (*runtime_count)(int *);
static void *stream, *exec;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Read outside of the wall time, and for whole batches alone: it is a system call. */
static int with_processor;
static __thread double processor; /* seconds this thread worked between begin and spent_since */

static double processor_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static double begin(void) {
    if (with_processor)
        processor -= processor_now();
    return now();
}

static double spent_since(double start) {
    double spent = now() - start;
    if (with_processor)
        processor += processor_now();
    return spent;
}

/* Each does n calls and gives the seconds they took: no clock is read in between. */
#define BATCH(name, setup, body, after)    \
    static double name(long n) {           \
        setup;                             \
        double start = begin();            \
        for (long i = 0; i < n; i++) {     \
            body;                          \
        }                                  \
        double spent = spent_since(start); \
        after;                             \
        return spent;                      \
    }

BATCH(get_current, void *context, failed += current(&context), )
BATCH(get_device, int device, failed += device_of(&device), )
BATCH(get_info, size_t available; size_t total, failed += cuMemGetInfo_v2(&available, &total), )
BATCH(look_up, , failed += !dlsym(driver, "cuCtxSynchronize"), )
BATCH(look_up_other, , failed += !dlsym(RTLD_DEFAULT, "malloc"), )
BATCH(pair, address pointer, failed += cuMemAlloc_v2(&pointer, size) || cuMemFree_v2(pointer), )
BATCH(pair_async, address pointer,
      failed += cuMemAllocAsync(&pointer, size, NULL) || cuMemFreeAsync(pointer, NULL),
      failed += cuCtxSynchronize())
BATCH(nothing, , (void)i, )
/* The driver refuses at once, so that what comes before it stands out. */
BATCH(launch_nothing, , failed += !cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), )
BATCH(count_devices, int count, failed += runtime_count(&count), )
BATCH(replay, , failed += cuGraphLaunch(exec, stream), failed += cuCtxSynchronize())
BATCH(refused, address pointer, failed += cuMemAlloc_v2(&pointer, size) != 2, )

static double map_and_back(long n) {
    struct properties properties = {.type = 1, .location = {1, 0}};
    address handle;
    double start = begin();
    for (long i = 0; i < n; i++)
        failed += !reserved || cuMemCreate(&handle, size, &properties, 0) ||
                  cuMemMap(reserved, size, 0, handle, 0) || cuMemUnmap(reserved, size) ||
                  cuMemRelease(handle);
    return spent_since(start);
}

/* The queue of launches is finite: it is emptied off the clock. */
static double launch(long n) {
    double spent = 0;
    for (long left = n; left > 0; left -= 256) {
        double start = begin();
        for (long i = 0; i < (left < 256 ? left : 256); i++)
            failed += cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
        spent += spent_since(start);
        failed += cuCtxSynchronize();
    }
    return spent;
}

/* Frees from all over 20,000 live blocks; they are allocated anew off the clock. */
static double free_among_many(long n) {
    static uint32_t random = 1;
    double spent = 0;
    address chosen[1000];
    for (long left = n; left > 0; left -= 1000) {
        long count = left < 1000 ? left : 1000;
        for (long i = 0; i < count; i++) {
            uint32_t at;
            do
                at = (random = random * 1664525u + 1013904223u) >> 8;
            while (!live[at % LIVE]);
            chosen[i] = live[at % LIVE];
            live[at % LIVE] = 0;
        }
        double start = begin();
        for (long i = 0; i < count; i++)
            failed += cuMemFree_v2(chosen[i]);
        spent += spent_since(start);
        for (long i = 0; i < LIVE; i++)
            if (!live[i])
                failed += cuMemAlloc_v2(&live[i], 64 << 10);
    }
    return spent;
}

static int by_value(const void *a, const void *b) {
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

/* The quickest of several short batches: on a shared machine the others hold others' time. */
static void measure(const char *name, double batch(long), double seconds) {
    double best = 0, spent;
    long n = 32;
    int before = failed;
    batch(1);
    if (failed != before) {
        failed = before;
        printf("failed %s\n", name);
        return;
    }
    while ((spent = batch(n)) < seconds / BATCHES / 2)
        n *= spent < seconds / BATCHES / 32 ? 8 : 2;
    for (int i = 0; i < BATCHES; i++) {
        spent = batch(n) / (double)n * 1e9;
        best = i && best < spent ? best : spent;
    }
    printf("%s %.2f\n", name, best);
}

/* One by one, the clock's own cost taken off: for the percentiles alone. */
static void measure_refusals(const char *name, double seconds) {
    static double times[SAMPLES], clock[1000];
    char line[64];
    address pointer;
    snprintf(line, sizeof line, "%s mean", name);
    measure(line, refused, seconds);
    for (int i = 0; i < 1000; i++) {
        double start = now();
        clock[i] = now() - start;
    }
    for (int i = 0; i < SAMPLES; i++) {
        double start = now();
        failed += cuMemAlloc_v2(&pointer, size) != 2;
        times[i] = now() - start;
    }
    qsort(clock, 1000, sizeof *clock, by_value);
    qsort(times, SAMPLES, sizeof *times, by_value);
    printf("%s p50 %.2f\n", name, (times[SAMPLES / 2] - clock[500]) * 1e9);
    printf("%s p99 %.2f\n", name, (times[SAMPLES / 100 * 99] - clock[500]) * 1e9);
}

static void *proc(const char *name) {
    void *found = NULL;
    int status;
    failed +=
        !cuGetProcAddress_v2 || cuGetProcAddress_v2(name, &found, 12000, 0, &status) || !found;
    return found;
}

static int start(int report) {
    void *context;
    int device;
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver)
        return fprintf(stderr, "%s\n", dlerror()), 1;
#define F(name, params) *(void **)&name = dlsym(driver, #name);
    FUNCTIONS(F)
#undef F
    /* The driver refuses these flags at once: what that takes is the library's own start. */
    double called = now();
    int unknown = cuInit(1u << 31);
    double began = now();
    int result = cuInit(0);
    double ready = now();
    if (!result)
        result = cuDeviceGet(&device, 0);
    if (!result)
        result = cuDevicePrimaryCtxRetain(&context, device);
    double made = now();
    if (!result)
        result = cuCtxSetCurrent(context);
    if (result)
        fprintf(stderr, "no context: CUDA error %d\n", result);
    if (report)
        printf("first call%s %.0f\nfirst cuInit %.0f\nfirst primary context %.0f\n",
               unknown ? "" : " taken", (began - called) * 1e9, (ready - began) * 1e9,
               (made - ready) * 1e9);
    return result;
}

static void untouched(double seconds) {
    current = cuCtxGetCurrent;
    device_of = cuCtxGetDevice;
    measure("cuCtxGetCurrent, dlsym", get_current, seconds);
    measure("cuCtxGetDevice, dlsym", get_device, seconds);
    *(void **)&current = proc("cuCtxGetCurrent");
    *(void **)&device_of = proc("cuCtxGetDevice");
    if (current && device_of) {
        measure("cuCtxGetCurrent, cuGetProcAddress", get_current, seconds);
        measure("cuCtxGetDevice, cuGetProcAddress", get_device, seconds);
    }
    measure("dlsym, name left alone", look_up, seconds);
    measure("dlsym, other library", look_up_other, seconds);
}

static void calls(double seconds, size_t over) {
    void *module;
    address granted = 0;
    untouched(seconds);
    if (!cuModuleLoadData(&module, image) && !cuModuleGetFunction(&function, module, "noop"))
        measure("cuLaunchKernel", launch, seconds);
    else
        printf("failed cuLaunchKernel\n");
    measure("cuMemGetInfo", get_info, seconds);
    size = 1 << 10, measure("cuMemAlloc + Free, 1 KiB", pair, seconds);
    size = 2 << 20, measure("cuMemAlloc + Free, 2 MiB", pair, seconds);
    size = 256 << 20, measure("cuMemAlloc + Free, 256 MiB", pair, seconds);
    size = 2 << 20, measure("cuMemAllocAsync + FreeAsync, 2 MiB", pair_async, seconds);
    if (cuMemAddressReserve(&reserved, size, 0, 0, 0))
        reserved = 0;
    measure("cuMemCreate, Map, Unmap, Release, 2 MiB", map_and_back, seconds);
    for (int i = 0; i < LIVE; i++)
        failed += cuMemAlloc_v2(&live[i], 64 << 10);
    measure("cuMemFree, 20,000 live blocks", free_among_many, seconds);
    for (int i = 0; i < LIVE; i++)
        failed += cuMemFree_v2(live[i]);
    /* The control: granted unless a quota is in force; only then is a refusal ours to time. */
    int result = cuMemAlloc_v2(&granted, over);
    printf("control %d\n", result);
    failed += !result && cuMemFree_v2(granted);
    size = over;
    if (result == 2)
        measure_refusals("refused cuMemAlloc", seconds);
    size = (size_t)1 << 50;
    measure("cuMemAlloc of 1 PiB", refused, seconds / 4);
}

/* ---- serving ------------------------------------------------------------------------------ */

static void *load_noop(void) {
    void *module;
    if (cuModuleLoadData(&module, image) || cuModuleGetFunction(&function, module, "noop"))
        return NULL;
    return function;
}

static int prepare_direct(void) {
    current = cuCtxGetCurrent;
    device_of = cuCtxGetDevice;
    return 1;
}

static int prepare_proc(void) {
    *(void **)&current = proc("cuCtxGetCurrent");
    *(void **)&device_of = proc("cuCtxGetDevice");
    return current && device_of;
}

static int prepare_runtime(void) {
    static const char *const names[] = {"libcudart.so", "libcudart.so.13", "libcudart.so.12"};
    const char *named = getenv("BENCH_CUDART");
    void *runtime = named ? dlopen(named, RTLD_NOW) : NULL;
    for (int i = 0; !runtime && i < 3; i++)
        runtime = dlopen(names[i], RTLD_NOW);
    *(void **)&runtime_count = runtime ? dlsym(runtime, "cudaGetDeviceCount") : NULL;
    return runtime_count != NULL;
}

static int prepare_launch(void) {
    return function || load_noop();
}

static int prepare_graph(void) {
    void *graph;
    if (exec)
        return 1;
    if (!prepare_launch() || cuStreamCreate(&stream, 1) || cuStreamBeginCapture_v2(stream, 2))
        return 0;
    for (int i = 0; i < 100; i++)
        failed += cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
    return !cuStreamEndCapture(stream, &graph) && !cuGraphInstantiateWithFlags(&exec, graph, 0);
}

/* One piece more keeps the block: the pair does not ask the driver for one. */
static int prepare_small(void) {
    static address kept;
    return kept || !cuMemAlloc_v2(&kept, 1 << 10);
}

/* The pool keeps what it has, as PyTorch asks it to: no batch begins with a growth. */
static int prepare_async(void) {
    address most = ~0ull;
    void *pool;
    return !cuDeviceGetDefaultMemPool(&pool, 0) &&
           !cuMemPoolSetAttribute(pool, 4 /* CU_MEMPOOL_ATTR_RELEASE_THRESHOLD */, &most);
}

static int prepare_map(void) {
    return reserved || !cuMemAddressReserve(&reserved, size, 0, 0, 0);
}

static int prepare_many(void) {
    for (int i = 0; i < LIVE; i++)
        if (!live[i] && cuMemAlloc_v2(&live[i], 64 << 10))
            return 0;
    return 1;
}

static const struct call {
    const char *name;
    double (*batch)(long);
    int (*prepare)(void);
    size_t size;
} served[] = {
    {"get_current", get_current, prepare_direct, 0},
    {"get_device", get_device, prepare_direct, 0},
    {"get_current_proc", get_current, prepare_proc, 0},
    {"get_device_proc", get_device, prepare_proc, 0},
    {"runtime_count", count_devices, prepare_runtime, 0},
    {"launch", launch, prepare_launch, 0},
    {"launch_nothing", launch_nothing, NULL, 0},
    {"graph", replay, prepare_graph, 0},
    {"info", get_info, NULL, 0},
    {"pair_1k", pair, prepare_small, 1 << 10},
    {"pair_2m", pair, NULL, 2 << 20},
    {"pair_256m", pair, NULL, 256 << 20},
    {"pair_async", pair_async, prepare_async, 2 << 20},
    {"map", map_and_back, prepare_map, 2 << 20},
    {"free_many", free_among_many, prepare_many, 0},
    {"refused", refused, NULL, (size_t)1 << 43},
    {"nothing", nothing, NULL, 0}, /* the clock alone */
};

static const struct call *call_of(const char *name) {
    for (size_t i = 0; i < sizeof served / sizeof *served; i++)
        if (!strcmp(name, served[i].name)) {
            size = served[i].size;
            return !served[i].prepare || served[i].prepare() ? &served[i] : NULL;
        }
    return NULL;
}

struct worker {
    pthread_t thread;
    const struct call *call;
    void *context;
    double *times;
    long n;
};

static void *work(void *argument) {
    struct worker *worker = argument;
    failed += cuCtxSetCurrent(worker->context);
    for (long i = 0; i < worker->n; i++)
        worker->times[i] = worker->call->batch(1) * 1e9;
    return NULL;
}

static void in_threads(const struct call *call, long count, long n) {
    struct worker workers[256];
    double *times = calloc((size_t)(count * n), sizeof *times);
    void *context = NULL;
    if (count < 1 || count > 256 || n < 1 || !times || cuCtxGetCurrent(&context))
        return;
    for (long i = 0; i < count; i++) {
        workers[i] =
            (struct worker){.call = call, .context = context, .times = times + i * n, .n = n};
        failed += pthread_create(&workers[i].thread, NULL, work, &workers[i]);
    }
    for (long i = 0; i < count; i++)
        pthread_join(workers[i].thread, NULL);
    qsort(times, (size_t)(count * n), sizeof *times, by_value);
    printf("%.1f %.1f", times[count * n / 2], times[count * n / 100 * 99]);
    free(times);
}

static void answer(const char *line) {
    char name[64];
    long n = 0, threads = 0;
    size_t over = 0;
    address granted = 0;
    int before = failed;
    const struct call *call = NULL;
    if (sscanf(line, "control %zu", &over) == 1) {
        int result = cuMemAlloc_v2(&granted, over << 20);
        failed += !result && cuMemFree_v2(granted);
        printf("%d", result);
    } else if (sscanf(line, "batch %63s %ld", name, &n) == 2 && (call = call_of(name))) {
        with_processor = 1, processor = 0;
        double spent = call->batch(n);
        with_processor = 0;
        if (failed == before)
            printf("%.3f %.3f", spent / (double)n * 1e9, processor / (double)n * 1e9);
    } else if (sscanf(line, "sample %63s %ld", name, &n) == 2 && (call = call_of(name))) {
        for (long i = 0; i < n; i++)
            printf("%.0f ", call->batch(1) * 1e9);
    } else if (sscanf(line, "threads %63s %ld %ld", name, &threads, &n) == 3 &&
               (call = call_of(name))) {
        in_threads(call, threads, n);
    }
    failed = before;
    printf("\n");
    fflush(stdout);
}

static void serve(void) {
    char line[256];
    while (fgets(line, sizeof line, stdin))
        answer(line);
}

static void milestone(const char *name) {
    struct timespec wall, cpu;
    clock_gettime(CLOCK_MONOTONIC, &wall);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
    printf("%s %.0f %.0f\n", name, (double)wall.tv_sec * 1e9 + (double)wall.tv_nsec,
           (double)cpu.tv_sec * 1e9 + (double)cpu.tv_nsec);
}

static void milestones(void) {
    address pointer;
    milestone("context");
    failed += cuMemAlloc_v2(&pointer, 2 << 20);
    milestone("allocation");
    failed += !load_noop() || cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) ||
              cuCtxSynchronize();
    milestone("kernel");
}

int main(int argc, char **argv) {
    if (argc < 2 || start(!strcmp(argv[1], "first")))
        return 1;
    if (!strcmp(argv[1], "serve"))
        serve();
    if (!strcmp(argv[1], "milestones"))
        milestones();
    if (argc == 4 && !strcmp(argv[1], "calls"))
        calls(atof(argv[2]), (size_t)atol(argv[3]) << 20);
    if (failed)
        fprintf(stderr, "%d calls did not answer as they should\n", failed);
    return failed != 0;
}
