/* Many processes under one quota, on whatever GPU is there.
 *
 *   contend race PROCESSES ROUNDS   each asks for 0.6 of what the contexts leave, at once: one may win
 *   contend kill TIMES SIGNAL       a child that allocates and frees is hit by SIGNAL (9, or 19 = stop) at a
 *                                   random moment; another process must get all that is left, soon
 *
 * Prints one line of key=value. Children start before CUDA does. */
#define _GNU_SOURCE
#include "../../gpu/clients/common.h"
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

struct shared {
    pthread_barrier_t barrier;
    long winners[3]; /* rounds with none, one, more */
    long won;
    double longest; /* s, one call of the observer */
    int ready;
};
static struct shared *shared;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* s that this thread could have run and was not given a processor: a busy machine, not a lock. */
static double starved(void) {
    unsigned long long ran = 0, waited = 0;
    FILE *file = fopen("/proc/thread-self/schedstat", "r");
    if (file && fscanf(file, "%llu %llu", &ran, &waited) != 2)
        waited = 0;
    if (file)
        fclose(file);
    return (double)waited * 1e-9;
}

static void meet(void) {
    pthread_barrier_wait(&shared->barrier);
}

static size_t left(void) {
    size_t free_, total;
    must("info", cuMemGetInfo(&free_, &total));
    return free_;
}

static void contestant(int number, long rounds) {
    must("start", start(0));
    meet();
    size_t ask = (size_t)((double)left() * 0.6);
    for (long i = 0; i < rounds; i++) {
        CUdeviceptr address = 0;
        meet();
        CUresult result = cuMemAlloc(&address, ask);
        if (result == CUDA_SUCCESS)
            __atomic_fetch_add(&shared->won, 1, __ATOMIC_SEQ_CST);
        else if (result != CUDA_ERROR_OUT_OF_MEMORY)
            must("race", result);
        meet();
        if (number == 0) {
            long won = __atomic_exchange_n(&shared->won, 0, __ATOMIC_SEQ_CST);
            shared->winners[won > 2 ? 2 : won]++;
        }
        if (address)
            must("free", cuMemFree(address));
    }
    _exit(0);
}

static int race(int processes, long rounds) {
    pthread_barrierattr_t across;
    int bad = 0, status;
    pthread_barrierattr_init(&across);
    pthread_barrierattr_setpshared(&across, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->barrier, &across, (unsigned)processes);
    for (int i = 0; i < processes; i++)
        if (fork() == 0)
            contestant(i, rounds);
    while (wait(&status) > 0)
        bad |= status;
    printf("none=%ld one=%ld more=%ld bad=%d\n", shared->winners[0], shared->winners[1],
           shared->winners[2], bad);
    return 0;
}

static void victim(unsigned seed) {
    CUdeviceptr held[8] = {0};
    if (start(0) != CUDA_SUCCESS)
        _exit(1);
    __atomic_store_n(&shared->ready, 1, __ATOMIC_SEQ_CST);
    for (;;) {
        int i = rand_r(&seed) % 8;
        if (held[i])
            cuMemFree(held[i]);
        held[i] = 0;
        cuMemAlloc(&held[i], (size_t)(rand_r(&seed) % 200 + 1) * MIB);
    }
}

/* Takes `bytes`; s until it was granted, or -1 after two. The longest single call is noted. */
static double take(size_t bytes) {
    double from = now();
    for (;;) {
        CUdeviceptr address;
        double call = now();
        CUresult result = cuMemAlloc(&address, bytes);
        double end = now();
        if (end - call > shared->longest)
            shared->longest = end - call;
        if (result == CUDA_SUCCESS) {
            must("free", cuMemFree(address));
            return end - from;
        }
        if (end - from > 2)
            return -1;
        usleep(1000);
    }
}

static int hit(long times, int signal_) {
    int late = 0, lost = 0;
    double worst = 0;
    unsigned seed = 7;
    must("start", start(0));
    size_t before = left(), all = before / (2 * MIB) * (2 * MIB);
    /* CUDA does not survive a fork: victims are made by an image of our own. */
    for (long i = 0; i < times; i++) {
        shared->ready = 0;
        pid_t child = fork();
        if (child == 0) {
            char number[24];
            snprintf(number, sizeof number, "%ld", i + 1);
            execl("/proc/self/exe", "contend", "victim", number, getenv("CONTEND_MEMORY"), NULL);
            _exit(4);
        }
        while (!__atomic_load_n(&shared->ready, __ATOMIC_SEQ_CST) &&
               waitpid(child, NULL, WNOHANG) == 0)
            usleep(200);
        usleep((useconds_t)(rand_r(&seed) % 3000));
        kill(child, signal_);
        if (signal_ == SIGSTOP) {
            take(16 * MIB); /* only has to answer, soon */
            kill(child, SIGKILL);
        }
        waitpid(child, NULL, 0);
        double took = take(all);
        worst = took > worst ? took : worst;
        late += took < 0 || took > 0.1;
        lost += left() != before;
    }
    printf("times=%ld late=%d lost=%d worst_ms=%.1f longest_call_ms=%.1f\n", times, late, lost,
           worst * 1e3, shared->longest * 1e3);
    return 0;
}

int main(int count, char **argument) {
    int memory = -1;
    if (count < 4)
        return 2;
    if (strcmp(argument[1], "victim") == 0)
        memory = atoi(argument[3]);
    else
        memory = memfd_create("contend", 0);
    if (memory < 0 || ftruncate(memory, sizeof *shared))
        return 5;
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (shared == MAP_FAILED)
        return 5;
    char text[16];
    snprintf(text, sizeof text, "%d", memory);
    setenv("CONTEND_MEMORY", text, 1);
    if (strcmp(argument[1], "victim") == 0)
        victim((unsigned)atoi(argument[2]));
    if (strcmp(argument[1], "race") == 0)
        return race(atoi(argument[2]), atol(argument[3]));
    return strcmp(argument[1], "kill") == 0 ? hit(atol(argument[2]), atoi(argument[3])) : 2;
}
