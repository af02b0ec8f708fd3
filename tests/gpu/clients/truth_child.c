/* The torture's workers: several threads each that take and give back memory in every way, and note
 * each call before and after it. They come to rest when the sampler asks. */
#define _GNU_SOURCE
#include <execinfo.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include "truth.h"

struct note;
static struct note began(const char *name, uint64_t bytes);
static CUresult took(struct note note, CUresult result);
static CUresult needed(struct note note, CUresult result);

#define TAKE(bytes, call)                        \
    ({                                           \
        struct note note_ = began(#call, bytes); \
        took(note_, call);                       \
    })
#define NEED(call)                           \
    ({                                       \
        struct note note_ = began(#call, 0); \
        needed(note_, call);                 \
    })

struct note {
    struct call *call;
};

#include "operations.h"

enum { ERRANDS = FAMILIES + 1, ALL = FAMILIES + 4 };
_Static_assert((int)ALL <= (int)TALLIES, "a row for each family");

static struct seat *seat;
static __thread struct line *line;
static __thread int family;
static char *binary; /* a binary image of the toolkit, NULL when there is none */

static CUresult count(CUresult result) {
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY)
        return result;
    int refused = result != CUDA_SUCCESS;
    __atomic_fetch_add(refused ? &shared->refused : &shared->granted, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&shared->tally[family][refused], 1, __ATOMIC_RELAXED);
    return result;
}

static struct note began(const char *text, uint64_t bytes) {
    uint64_t sequence = line->sequence + 1;
    struct call *call = &line->ring[sequence % RING];
    size_t length = strcspn(text, "(");
    if (length >= sizeof call->name)
        length = sizeof call->name - 1;
    call->done = 0;
    memcpy(call->name, text, length);
    call->name[length] = 0;
    call->bytes = bytes;
    call->began = now();
    call->sequence = sequence;
    __atomic_store_n(&line->sequence, sequence, __ATOMIC_RELEASE);
    return (struct note){call};
}

static CUresult ended(struct note note, CUresult result) {
    note.call->result = (int)result;
    __atomic_store_n(&note.call->done, 1, __ATOMIC_RELEASE);
    return result;
}

static CUresult took(struct note note, CUresult result) {
    if (ended(note, result) != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY)
        odd(note.call->name, (int)result);
    return count(result);
}

static CUresult needed(struct note note, CUresult result) {
    if (ended(note, result) != CUDA_SUCCESS)
        odd(note.call->name, (int)result);
    return result;
}

void odd(const char *name, int result) {
    for (int i = 0; i < ODDITIES; i++) {
        struct oddity *at = &shared->oddity[i];
        int free_ = 0;
        if (__atomic_compare_exchange_n(&at->times, &free_, 1, 0, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE)) {
            at->result = result;
            snprintf(at->name, sizeof at->name, "%s", name);
            return;
        }
        if (at->result == result && !strcmp(at->name, name)) {
            __atomic_fetch_add(&at->times, 1, __ATOMIC_RELAXED);
            return;
        }
    }
}

/* A child that uses nothing it inherited may ask, and gets nothing. */
static void forks(struct worker *worker) {
    CUdeviceptr address;
    int status = 0;
    pid_t made = fork();
    if (made == 0) {
        alarm(20);
        _exit(any(worker, 2) && cuMemAlloc(&address, MIB) == CUDA_SUCCESS);
    }
    if (made < 0 || waitpid(made, &status, 0) != made)
        return;
    __atomic_fetch_add(&shared->forks, 1, __ATOMIC_RELAXED);
    if (status)
        odd("a forked child", status);
}

/* A program of its own, for a moment; it may be killed, and then leaves all it has. */
static void errands(struct worker *worker) {
    char number[16], seed[16];
    int status = 0, kill_after = (int)any(worker, 3) ? 0 : 1000 + (int)any(worker, 900000),
        idle = 0;
    if (!__atomic_compare_exchange_n(&seat->errands, &idle, 1, 0, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE))
        return;
    snprintf(number, sizeof number, "%d", (int)(seat - shared->seat));
    snprintf(seed, sizeof seed, "%u", any(worker, 1u << 30));
    pid_t made = fork();
    if (made == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm(60);
        execl("/proc/self/exe", "truth", "errand", number, seed, getenv("TRUTH_SHARED"), NULL);
        _exit(9);
    }
    if (made > 0) {
        seat->errand = made;
        if (kill_after) {
            usleep((useconds_t)kill_after);
            kill(made, SIGKILL);
        }
        waitpid(made, &status, 0);
        __atomic_fetch_add(&shared->errands, 1, __ATOMIC_RELAXED);
        if (status && !(kill_after && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL))
            odd("an errand", status);
    }
    __atomic_store_n(&seat->errands, 0, __ATOMIC_RELEASE);
}

/* Opens what another process offers, for a moment; that one may free it, or be killed. */
static int import(struct worker *worker) {
    for (int i = 0; i < OFFERS; i++) {
        struct offer *at = &shared->offer[i];
        int32_t offered = 2;
        CUdeviceptr address;
        if (at->pid == getpid() || !__atomic_compare_exchange_n(&at->state, &offered, 3, 0,
                                                                __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            continue;
        struct note note = began("cuIpcOpenMemHandle", 0);
        /* The maker may be gone: any answer will do. */
        if (ended(note, cuIpcOpenMemHandle(&address, at->handle,
                                           CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)) == CUDA_SUCCESS) {
            __atomic_fetch_add(&shared->imports, 1, __ATOMIC_RELAXED);
            count(CUDA_SUCCESS);
            usleep(100 + any(worker, 8000));
            NEED(cuIpcCloseMemHandle(address));
        }
        __atomic_store_n(&at->state, 0, __ATOMIC_RELEASE);
        return 1;
    }
    return 0;
}

static void shares(struct worker *worker) {
    CUdeviceptr address;
    size_t bytes = 2 * MIB + any(worker, 30 * MIB);
    if (import(worker))
        return;
    if (TAKE(bytes, cuMemAlloc(&address, bytes)) != CUDA_SUCCESS)
        return;
    struct offer *at = &shared->offer[any(worker, OFFERS)];
    int32_t none = 0;
    if (__atomic_compare_exchange_n(&at->state, &none, 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        at->pid = getpid();
        NEED(cuIpcGetMemHandle(&at->handle, address));
        __atomic_store_n(&at->state, 2, __ATOMIC_RELEASE);
        int patience = 30 + (int)any(worker, 60);
        while (patience-- && __atomic_load_n(&at->state, __ATOMIC_ACQUIRE) == 2)
            usleep(500);
        int32_t offered = 2;
        /* Where it was taken it is freed under the importer's hands, at some moment of its use. */
        if (!__atomic_compare_exchange_n(&at->state, &offered, 0, 0, __ATOMIC_ACQ_REL,
                                         __ATOMIC_ACQUIRE))
            usleep(any(worker, 8000));
    }
    NEED(cuMemFree(address));
}

static void binaries(struct worker *worker) {
    CUmodule module;
    CUfunction function;
    if (!binary || TAKE(4 * MIB, cuModuleLoadData(&module, binary)) != CUDA_SUCCESS)
        return;
    if (TAKE(4 * MIB, cuModuleGetFunction(&function, module, "work")) == CUDA_SUCCESS &&
        TAKE(0, cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, worker->stream, NULL, NULL)) ==
            CUDA_SUCCESS)
        NEED(cuStreamSynchronize(worker->stream));
    NEED(cuModuleUnload(module));
}

/* The families that need more than one process, in the order of their numbers. */
static const struct family more[] = {{"forks", forks, 2},
                                     {"errands", errands, 2},
                                     {"shares", shares, 20},
                                     {"binaries", binaries, 6}};

const char *family_name(int number) {
    return number < FAMILIES ? families[number].name
           : number < ALL    ? more[number - FAMILIES].name
                             : NULL;
}

/* One of all families, or of those that TRUTH_ONLY names. An errand does nothing with others. */
static void step(struct worker *worker, int errand) {
    const char *only = getenv("TRUTH_ONLY");
    do {
        unsigned pick = any(worker, 1000), extra = 0;
        while (extra < ALL - FAMILIES && pick >= more[extra].share)
            pick -= more[extra++].share;
        /* The family is known before it runs: the tally is by family. */
        family = extra < ALL - FAMILIES && !errand ? FAMILIES + (int)extra : choose(worker);
    } while (only && !strstr(only, family_name(family)));
    (family < FAMILIES ? families[family].run : more[family - FAMILIES].run)(worker);
}

/* Waits while the sampler compares; the first thread answers its questions. */
static void rest(struct worker *worker, int first) {
    int phase = __atomic_load_n(&shared->phase, __ATOMIC_ACQUIRE);
    if (!(phase & 1))
        return;
    if (worker->stream)
        NEED(cuStreamSynchronize(worker->stream));
    __atomic_store_n(&line->rested, phase, __ATOMIC_RELEASE);
    while (__atomic_load_n(&shared->phase, __ATOMIC_ACQUIRE) == phase && !shared->over) {
        int ask = __atomic_load_n(&seat->ask, __ATOMIC_ACQUIRE);
        if (first && ask != seat->answer) {
            seat->result = context ? (int)NEED(cuMemGetInfo(&seat->free, &seat->total)) : -1;
            __atomic_store_n(&seat->answer, ask, __ATOMIC_RELEASE);
        }
        usleep(200);
    }
}

static void *work(void *data) {
    int number = (int)(intptr_t)data;
    struct worker worker = {.seed = (unsigned)getpid() * 31u + (unsigned)number};
    line = &seat->line[number];
    NEED(cuCtxSetCurrent(context));
    while (!shared->over && TAKE(0, cuStreamCreate(&worker.stream, CU_STREAM_NON_BLOCKING))) {
        worker.stream = NULL;
        rest(&worker, number == 0);
        usleep(20000);
    }
    while (!shared->over) {
        step(&worker, 0);
        rest(&worker, number == 0);
    }
    return NULL;
}

static void read_binary(void) {
    const char *path = getenv("TRUTH_IMAGE");
    FILE *file = path && *path ? fopen(path, "rb") : NULL;
    if (!file)
        return;
    binary = malloc(1 << 20);
    if (!fread(binary, 1, 1 << 20, file))
        binary = NULL;
    fclose(file);
}

/* Where it was when it crashed; what it did last is in its line. */
static void crashed(int number) {
    static const char head[] = "CRASHED:\n";
    void *frame[40];
    if (write(2, head, sizeof head - 1) > 0)
        backtrace_symbols_fd(frame, backtrace(frame, 40), 2);
    signal(number, SIG_DFL);
    raise(number);
}

static void watch_crashes(void) {
    static const int numbers[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    void *frame[1];
    backtrace(frame, 1); /* loads what it needs */
    for (int i = 0; i < 5; i++)
        signal(numbers[i], crashed);
}

/* Some operations, and out, with all of it still held half of the time. */
static void errand_main(unsigned seed) {
    struct worker worker = {.seed = seed};
    if (TAKE(0, start(0)) != CUDA_SUCCESS)
        _exit(0);
    if (TAKE(0, cuStreamCreate(&worker.stream, CU_STREAM_NON_BLOCKING)) != CUDA_SUCCESS)
        _exit(0);
    for (unsigned i = any(&worker, 400); i && !shared->over && !(shared->phase & 1); i--)
        step(&worker, 1);
    if (any(&worker, 2))
        TAKE(0, cuDevicePrimaryCtxReset(device));
    _exit(0);
}

void child_main(int number, unsigned seed, int errand) {
    pthread_t ids[THREADS];
    seat = &shared->seat[number];
    line = &seat->line[errand ? THREADS : 0];
    family = errand ? ERRANDS : 0;
    read_binary();
    watch_crashes();
    if (errand)
        errand_main(seed);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct worker nobody = {.seed = seed};
    while (TAKE(0, start(0)) != CUDA_SUCCESS) {
        context = NULL;
        line->rested = 0;
        if (shared->over)
            _exit(0);
        rest(&nobody, 1);
        usleep(50000);
    }
    __atomic_store_n(&seat->up, seat->threads, __ATOMIC_RELEASE);
    for (int i = 1; i < seat->threads; i++)
        pthread_create(&ids[i], NULL, work, (void *)(intptr_t)i);
    work((void *)0);
    for (int i = 1; i < seat->threads; i++)
        pthread_join(ids[i], NULL);
    _exit(0);
}
