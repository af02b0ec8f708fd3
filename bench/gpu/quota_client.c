/* Takes memory in the ways the quota is judged by. Plain C with no vendor header, linked to nothing.
 *
 *   quota_client fit WAY              takes all it can get in steps down to 1 or 2 MiB; "got BYTES", then waits
 *   quota_client race PROCESSES ROUNDS  each asks for 0.6 of what their contexts leave, at once; says how many
 *                                     rounds had one winner, none, several
 *   quota_client churn SEED           "ready", then takes and frees for ever
 *   quota_client slot                 holds a slot without a context; "ready", then waits
 *   quota_client together             waits for the end of its input; ns of the library's own start, by the clock and by
 *                                     processor time
 *   quota_client total                bytes of the device, as the driver tells them
 *   quota_client bystander            "ready"; each line of input is a number of MiB to get and free: ns until it did;
 *                                     at the end the longest refusal meanwhile, ns */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MIB (1ull << 20)
typedef unsigned long long address;

struct properties { /* CUmemAllocationProp */
    int type, handle_types, where, id;
    void *security;
    unsigned char flags[8];
};

#define FUNCTIONS(F)                                                                           \
    F(cuInit, (unsigned flags))                                                                \
    F(cuDeviceGet, (int *device, int ordinal))                                                 \
    F(cuDevicePrimaryCtxRetain, (void **context, int device))                                  \
    F(cuCtxSetCurrent, (void *context))                                                        \
    F(cuCtxSynchronize, (void))                                                                \
    F(cuMemAlloc_v2, (address * pointer, size_t bytes))                                        \
    F(cuMemFree_v2, (address pointer))                                                         \
    F(cuMemGetInfo_v2, (size_t *free, size_t *total))                                          \
    F(cuMemAllocAsync, (address * pointer, size_t bytes, void *stream))                        \
    F(cuMemCreate, (address * handle, size_t bytes, const struct properties *, address flags)) \
    F(cuDeviceGetDefaultMemPool, (void **pool, int device))                                    \
    F(cuMemPoolSetAttribute, (void *pool, int attribute, void *value))

#define F(name, params) static int(*name) params;
FUNCTIONS(F)
#undef F

static void *context;

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int find(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver)
        return fprintf(stderr, "%s\n", dlerror()), 1;
#define F(name, params) *(void **)&name = dlsym(driver, #name);
    FUNCTIONS(F)
#undef F
    return 0;
}

static int start(void) {
    int device, result = cuInit(0);
    if (!result)
        result = cuDeviceGet(&device, 0);
    if (!result)
        result = cuDevicePrimaryCtxRetain(&context, device);
    return result ? result : cuCtxSetCurrent(context);
}

static void must_start(void) {
    int result = start();
    if (result) {
        fprintf(stderr, "no context: CUDA error %d\n", result);
        exit(1);
    }
}

static void wait_for_end(void) {
    char line[64];
    fflush(stdout);
    while (fgets(line, sizeof line, stdin))
        ;
}

static void total(void) {
    size_t free, bytes = 0;
    must_start();
    (void)cuMemGetInfo_v2(&free, &bytes);
    printf("%zu\n", bytes);
}

/* ---- fit ------------------------------------------------------------------------------------ */

static int take(const char *way, size_t bytes) {
    struct properties on = {.type = 1, .where = 1, .id = 0};
    address got;
    if (!strcmp(way, "pool"))
        return cuMemAllocAsync(&got, bytes, NULL);
    if (!strcmp(way, "create"))
        return cuMemCreate(&got, bytes, &on, 0);
    return cuMemAlloc_v2(&got, bytes);
}

static void fit(const char *way) {
    unsigned long long got = 0, keep = ~0ull;
    size_t least = strcmp(way, "pieces") ? 2 * MIB : MIB;
    void *pool;
    must_start();
    if (!strcmp(way, "pool") && !cuDeviceGetDefaultMemPool(&pool, 0))
        (void)cuMemPoolSetAttribute(pool, 4, &keep); /* CU_MEMPOOL_ATTR_RELEASE_THRESHOLD */
    for (size_t step = 4096 * MIB; step >= least; step /= 2)
        while (!take(way, step))
            got += step;
    (void)cuCtxSynchronize();
    printf("got %llu\n", got);
    wait_for_end();
}

/* ---- race ----------------------------------------------------------------------------------- */

struct shared {
    pthread_barrier_t barrier;
    size_t bytes;
    long won;
};

static void racer(struct shared *shared, long rounds, int first, long *tally) {
    size_t free = 0, total;
    must_start();
    pthread_barrier_wait(&shared->barrier);
    if (first && !cuMemGetInfo_v2(&free, &total))
        shared->bytes = free / 10 * 6;
    for (long i = 0; i < rounds; i++) {
        address got;
        pthread_barrier_wait(&shared->barrier);
        int result = cuMemAlloc_v2(&got, shared->bytes);
        if (!result)
            __atomic_fetch_add(&shared->won, 1, __ATOMIC_RELAXED);
        pthread_barrier_wait(&shared->barrier);
        if (first) {
            tally[shared->won > 2 ? 2 : shared->won]++;
            shared->won = 0;
        }
        if (!result && cuMemFree_v2(got))
            exit(3);
    }
}

static int race(long processes, long rounds) {
    struct shared *shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_barrierattr_t kind;
    long tally[3] = {0};
    int failed = 0, status;
    if (shared == MAP_FAILED)
        return 1;
    pthread_barrierattr_init(&kind);
    pthread_barrierattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->barrier, &kind, (unsigned)processes);
    for (long i = 1; i < processes; i++)
        if (fork() == 0) {
            racer(shared, rounds, 0, NULL);
            _exit(0);
        }
    racer(shared, rounds, 1, tally);
    while (wait(&status) > 0)
        failed += status != 0;
    printf("one %ld none %ld several %ld\n", tally[1], tally[0], tally[2]);
    return failed != 0;
}

/* ---- kills ---------------------------------------------------------------------------------- */

static void churn(unsigned seed) {
    address held[16] = {0};
    must_start();
    puts("ready");
    fflush(stdout);
    for (;;) {
        address *at = &held[rand_r(&seed) % 16];
        if (*at)
            (void)cuMemFree_v2(*at), *at = 0;
        else if (cuMemAlloc_v2(at, (size_t)(rand_r(&seed) % 64 + 1) * MIB / 3))
            *at = 0;
    }
}

static double longest;
static volatile int ended;

/* Refusals never reach the driver, so what they wait for is the library's own. */
static void *refusals(void *unused) {
    address got;
    (void)cuCtxSetCurrent(context);
    while (!ended) {
        double began = now(CLOCK_MONOTONIC);
        if (!cuMemAlloc_v2(&got, 1ull << 43))
            exit(3);
        double spent = now(CLOCK_MONOTONIC) - began;
        longest = spent > longest ? spent : longest;
        usleep(50);
    }
    return unused;
}

static void bystander(void) {
    unsigned long long mib;
    pthread_t thread;
    must_start();
    pthread_create(&thread, NULL, refusals, NULL);
    puts("ready");
    fflush(stdout);
    while (scanf("%llu", &mib) == 1) {
        address got;
        double began = now(CLOCK_MONOTONIC);
        while (cuMemAlloc_v2(&got, mib * MIB) && now(CLOCK_MONOTONIC) - began < 5e9)
            ;
        double spent = now(CLOCK_MONOTONIC) - began;
        printf("%.0f\n", spent < 5e9 ? spent : -1);
        fflush(stdout);
        (void)cuMemFree_v2(got);
    }
    ended = 1;
    pthread_join(thread, NULL);
    printf("%.0f\n", longest);
}

/* ---- starts --------------------------------------------------------------------------------- */

/* The driver refuses these flags at once: what the call takes is the library's start. */
static void together(void) {
    wait_for_end();
    double wall = now(CLOCK_MONOTONIC), cpu = now(CLOCK_THREAD_CPUTIME_ID);
    (void)cuInit(1u << 31);
    double wall_end = now(CLOCK_MONOTONIC), cpu_end = now(CLOCK_THREAD_CPUTIME_ID);
    printf("%.0f %.0f\n", wall_end - wall, cpu_end - cpu);
}

int main(int count, char **arguments) {
    const char *mode = count > 1 ? arguments[1] : "";
    if (find())
        return 1;
    if (!strcmp(mode, "fit") && count == 3)
        fit(arguments[2]);
    else if (!strcmp(mode, "race") && count == 4)
        return race(atol(arguments[2]), atol(arguments[3]));
    else if (!strcmp(mode, "churn") && count == 3)
        churn((unsigned)atoi(arguments[2]));
    else if (!strcmp(mode, "bystander"))
        bystander();
    else if (!strcmp(mode, "total"))
        total();
    else if (!strcmp(mode, "together"))
        together();
    else if (!strcmp(mode, "slot") && !cuInit(0)) {
        puts("ready");
        wait_for_end();
    } else
        return 2;
    return 0;
}
