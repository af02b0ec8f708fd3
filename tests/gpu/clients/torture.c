/* torture PROCESSES SECONDS LIMIT_MIB: many processes take and free memory in every way while this one
 * samples the card, which nobody else may use; prints samples, the highest figure and how often it was
 * over the limit. */
#include "operations.h"
#include <nvml.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

struct shared {
    long granted, refused, other;
};
static struct shared *shared;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static CUresult count(CUresult result)
{
    long *at = result == CUDA_SUCCESS             ? &shared->granted
               : result == CUDA_ERROR_OUT_OF_MEMORY ? &shared->refused
                                                    : &shared->other;
    __atomic_fetch_add(at, 1, __ATOMIC_RELAXED);
    return result;
}

static void child(unsigned seed, double until)
{
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

/* The card's own figure, one counter: the sum over NVML's process list is not taken at one moment. */
static unsigned long long used(nvmlDevice_t on)
{
    nvmlMemory_t memory;
    return nvmlDeviceGetMemoryInfo(on, &memory) == NVML_SUCCESS ? memory.used : 0;
}

/* The children run under the library named by TORTURE_PRELOAD; this process does not, so that its NVML
 * tells the truth. */
static pid_t spawn(int number, const char *until, int memory)
{
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

static void map(int memory)
{
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (shared == MAP_FAILED)
        exit(5);
}

int main(int arguments, char **argument)
{
    char until_text[32];
    if (arguments == 5) {
        map(atoi(argument[3]));
        child((unsigned)atoi(argument[1]), atof(argument[2]));
    }
    if (arguments != 4)
        return 2;
    int processes = atoi(argument[1]), died = 0, status, memory = memfd_create("torture", 0);
    double until = now() + atof(argument[2]);
    unsigned long long limit = strtoull(argument[3], NULL, 10) * MIB, highest = 0;
    long samples = 0, over = 0;
    nvmlDevice_t on;
    snprintf(until_text, sizeof until_text, "%.3f", until);
    if (memory < 0 || ftruncate(memory, sizeof *shared))
        return 5;
    map(memory);
    if (nvmlInit() != NVML_SUCCESS || nvmlDeviceGetHandleByIndex(0, &on) != NVML_SUCCESS)
        return 3;
    unsigned long long before = used(on);
    for (int i = 0; i < processes; i++)
        spawn(i, until_text, memory);
    while (now() < until) {
        unsigned long long bytes = used(on) - before;
        samples++;
        over += bytes > limit;
        if (bytes > highest)
            highest = bytes;
        usleep(500);
    }
    while (wait(&status) > 0)
        died += !WIFEXITED(status) || WEXITSTATUS(status);
    printf("samples=%ld highest_mib=%llu over=%ld granted=%ld refused=%ld other=%ld died=%d\n", samples,
           highest / MIB, over, shared->granted, shared->refused, shared->other, died);
    return 0;
}
