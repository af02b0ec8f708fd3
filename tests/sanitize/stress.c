/* stress THREADS SECONDS: threads of one process, and a forked child, use every family of calls on
 * the simulated GPU under a quota; at the end everything is freed and the shim's account must equal
 * the simulator's. Linked with the shim and the simulator, so that the sanitizers see all of it. */
#include "../gpu/clients/operations.h"
#include <nvml.h>
#include <pthread.h>
#include <sys/wait.h>
#include <time.h>

static long granted, refused, other;

static CUresult count(CUresult result) {
    long *at = result == CUDA_SUCCESS               ? &granted
               : result == CUDA_ERROR_OUT_OF_MEMORY ? &refused
                                                    : &other;
    __atomic_fetch_add(at, 1, __ATOMIC_RELAXED);
    return result;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double until;

static void *work(void *data) {
    struct worker worker = {.seed = (unsigned)(uintptr_t)data};
    must("current", cuCtxSetCurrent(context));
    /* The others may have filled the quota already. */
    while (count(cuStreamCreate(&worker.stream, CU_STREAM_NON_BLOCKING)) != CUDA_SUCCESS)
        if (now() > until)
            return NULL;
    while (now() < until)
        operate(&worker);
    for (int i = 0; i < HELD; i++)
        if (worker.held[i])
            must("free", cuMemFree(worker.held[i]));
    must("sync", cuStreamSynchronize(worker.stream));
    must("stream destroy", cuStreamDestroy(worker.stream));
    return NULL;
}

static void run(int threads) {
    pthread_t ids[64];
    for (int i = 0; i < threads; i++)
        pthread_create(&ids[i], NULL, work, (void *)(uintptr_t)(i + 1));
    for (int i = 0; i < threads; i++)
        pthread_join(ids[i], NULL);
}

static void rest(void) {
    must("trim", cuDeviceGraphMemTrim(device));
    must("stack", cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 1024));
    must("sync", cuCtxSynchronize());
}

/* The container's account, by both surfaces, against the simulator's, while all of it is at
 * rest. */
static int compare(const char *who) {
    size_t free_, total;
    nvmlDevice_t on;
    nvmlMemory_t memory;
    extern uint64_t simgpu_device_used(int nvml_index);
    must("info", cuMemGetInfo(&free_, &total));
    if (nvmlInit() || nvmlDeviceGetHandleByIndex(0, &on) || nvmlDeviceGetMemoryInfo(on, &memory))
        return 1;
    uint64_t truth = simgpu_device_used(0), ours = total - free_;
    printf("%s: granted %ld refused %ld other %ld, account %llu, simulator %llu, nvml %llu\n", who,
           granted, refused, other, (unsigned long long)ours, (unsigned long long)truth,
           memory.used);
    /* Never less than the truth; an estimate that no quiet moment let be settled may be left over. */
    if (ours < truth || ours - truth > 16 * MIB || memory.used != ours || !granted || !refused) {
        printf("%s: the account is wrong, or the quota was never reached\n", who);
        return 1;
    }
    return 0;
}

int main(int arguments, char **argument) {
    int threads = arguments > 1 ? atoi(argument[1]) : 4, status = 0, bad = 0, rested[2];
    double seconds = arguments > 2 ? atof(argument[2]) : 5;
    char word = 0;
    if (pipe(rested))
        return 5;
    pid_t child = fork();
    if (child == 0)
        close(rested[1]);
    until = now() + seconds;
    must("start", start(0));
    run(threads);
    rest();
    if (child == 0) {
        bad = read(rested[0], &word, 1) != 1 || compare("child");
        fflush(stdout);
        _exit(bad);
    }
    bad = write(rested[1], &word, 1) != 1;
    waitpid(child, &status, 0);
    usleep(100000); /* the dead are looked for every 50 ms */
    bad |= compare("parent") || status;
    must("release", cuDevicePrimaryCtxRelease(device));
    return bad;
}
