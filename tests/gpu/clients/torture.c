/* torture PROCESSES SECONDS LIMIT_MIB: many processes take and free memory in every way while this
 * one samples NVML; prints samples, the highest sum (of frozen and of running children) and how
 * often the frozen one was over the limit. Run in a PID namespace of its own, so that NVML lists
 * nobody else. */
#include "operations.h"
#include <nvml.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

struct shared {
    long granted, refused, other;
};
static struct shared *shared;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static CUresult count(CUresult result) {
    long *at = result == CUDA_SUCCESS               ? &shared->granted
               : result == CUDA_ERROR_OUT_OF_MEMORY ? &shared->refused
                                                    : &shared->other;
    __atomic_fetch_add(at, 1, __ATOMIC_RELAXED);
    return result;
}

static void child(unsigned seed, double until) {
    struct worker worker = {.seed = seed};
    while (count(start(0)) != CUDA_SUCCESS) {
        if (now() > until)
            _exit(0);
        usleep(50000);
    }
    if (count(cuStreamCreate(&worker.stream, CU_STREAM_NON_BLOCKING)) != CUDA_SUCCESS)
        _exit(0);
    while (now() < until)
        operate(&worker);
    _exit(0);
}

/* NVML's bytes of the children. */
static unsigned long long used(nvmlDevice_t on) {
    static nvmlProcessInfo_t rows[512];
    unsigned int listed = 512;
    unsigned long long bytes = 0;
    if (nvmlDeviceGetComputeRunningProcesses(on, &listed, rows) != NVML_SUCCESS)
        return 0;
    for (unsigned int i = 0; i < listed; i++)
        bytes += rows[i].usedGpuMemory;
    return bytes;
}

/* The list is not made at one moment: memory that one child frees and another takes meanwhile
 * counts twice. So the children are stopped for each sample. */
static unsigned long long frozen(nvmlDevice_t on, const pid_t *children, int count_) {
    for (int i = 0; i < count_; i++)
        kill(children[i], SIGSTOP);
    usleep(2000);
    unsigned long long bytes = used(on);
    for (int i = 0; i < count_; i++)
        kill(children[i], SIGCONT);
    return bytes;
}

/* The children run under the library named by TORTURE_PRELOAD; this process does not, so that its
 * NVML tells the truth. */
static pid_t spawn(int number, const char *until, int memory) {
    char seed[16], descriptor[16];
    pid_t made = fork();
    if (made)
        return made;
    snprintf(seed, sizeof seed, "%d", number + 1);
    snprintf(descriptor, sizeof descriptor, "%d", memory);
    const char *library = getenv("TORTURE_PRELOAD");
    if (library)
        setenv("LD_PRELOAD", library, 1);
    execl("/proc/self/exe", "torture", seed, until, descriptor, "child", NULL);
    _exit(4);
}

static void map(int memory) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (shared == MAP_FAILED)
        exit(5);
}

int main(int arguments, char **argument) {
    char until_text[32];
    if (arguments == 5) {
        map(atoi(argument[3]));
        child((unsigned)atoi(argument[1]), atof(argument[2]));
    }
    if (arguments != 4 || atoi(argument[1]) > 256)
        return 2;
    int processes = atoi(argument[1]), died = 0, status, memory = memfd_create("torture", 0);
    double until = now() + atof(argument[2]);
    unsigned long long limit = strtoull(argument[3], NULL, 10) * MIB, highest = 0, fleeting = 0;
    long samples = 0, over = 0, lasting = 0;
    nvmlDevice_t on;
    snprintf(until_text, sizeof until_text, "%.3f", until);
    if (memory < 0 || ftruncate(memory, sizeof *shared))
        return 5;
    map(memory);
    if (nvmlInit() != NVML_SUCCESS || nvmlDeviceGetHandleByIndex(0, &on) != NVML_SUCCESS)
        return 3;
    pid_t children[256];
    for (int i = 0; i < processes; i++)
        children[i] = spawn(i, until_text, memory);
    while (now() < until) {
        unsigned long long running = used(on), bytes = frozen(on, children, processes);
        samples++;
        over += bytes > limit;
        /* Inside a call that is then refused and undone it may be; that is over a moment later. */
        int again = 0;
        while (bytes > limit && again++ < 5) {
            usleep(5000);
            bytes = frozen(on, children, processes);
        }
        lasting += bytes > limit;
        highest = bytes > highest ? bytes : highest;
        fleeting = running > fleeting ? running : fleeting;
        usleep(3000);
    }
    while (wait(&status) > 0)
        died += !WIFEXITED(status) || WEXITSTATUS(status);
    printf("samples=%ld highest_mib=%llu running_mib=%llu over=%ld lasting=%ld granted=%ld "
           "refused=%ld "
           "other=%ld died=%d\n",
           samples, highest / MIB, fleeting / MIB, over, lasting, shared->granted, shared->refused,
           shared->other, died);
    return 0;
}
