#pragma once
#include <cuda.h>
#include <stdint.h>

/* What the torture's processes share: its sampler (truth.c, without the library under test) and
 * the workers (truth_child.c, with it). Words are written by one side each, unless they say so. */

enum { SEATS = 64, THREADS = 4, RING = 1024, LINES = THREADS + 1, OFFERS = 16, ODDITIES = 32 };

/* One call of a thread; `done` once it has returned. */
struct call {
    char name[28];
    uint64_t sequence; /* 0 = empty */
    uint64_t bytes;
    double began;
    int32_t result;
    int32_t done;
};

/* One thread's last calls: number s is in ring[s % RING]. */
struct line {
    uint64_t sequence;
    int32_t rested; /* the phase in which it last came to rest */
    int32_t pad;
    struct call ring[RING];
};

/* One worker process. */
struct seat {
    int32_t pid; /* any of the two */
    int32_t threads;
    int32_t up;      /* threads that come to rest: one until there is a context */
    int32_t errands; /* 1 while a thread has a program of its own running */
    int32_t errand;  /* its pid */
    int32_t ask;     /* sampler: number of the last question; answered when `answer` equals it */
    int32_t answer;
    int32_t result;
    uint64_t free, total;    /* the answer: cuMemGetInfo */
    struct line line[LINES]; /* the last one is the errand's */
};

/* Memory that one process offers to the others. */
struct offer {
    int32_t state; /* 0 none, 1 being made, 2 offered, 3 taken; any, by compare and exchange */
    int32_t pid;
    CUipcMemHandle handle;
};

/* A result that nobody expects. */
struct oddity {
    char name[28];
    int32_t result;
    int32_t times;
};

enum { TALLIES = 32 };
struct shared {
    int32_t phase; /* odd: come to rest; sampler */
    int32_t over;  /* the time is up; sampler */
    int64_t granted, refused, forks, errands, imports;
    int64_t tally[TALLIES][2]; /* granted, refused by family */
    struct oddity oddity[ODDITIES];
    struct offer offer[OFFERS];
    struct seat seat[SEATS];
};

extern struct shared *shared;

/* The worker's process group and its parent's view of it. */
struct watch {
    int group, seats, verbose;
    uint64_t limit;
    /* running samples, one a millisecond */
    long samples, over, streak;
    double began, ended;
    uint64_t highest;
    /* frozen samples, with all workers stopped */
    long frozen, frozen_over, lasting, unexcused, fitted;
    uint64_t frozen_highest;
    /* comparisons at rest; bytes that the ledger was most below and above NVML's figure */
    long rests, late, compared, wrong;
    struct drift {
        uint64_t below, above;
    } drift, settled;
    uint64_t info_drift;
    double slowest_rest;
};
extern struct watch watch;

/* Starts NVML and finds the region file's path; 0, or what is missing. */
const char *watch_start(void);
/* The two samplers' threads, until shared->over. */
void *watch_running(void *unused);
void *watch_frozen(void *unused);
/* Compares ledger, NVML and cuMemGetInfo while all workers are at rest. */
void watch_rest(void);
/* Held while workers are stopped or compared: whoever starts or ends one takes it. */
void watch_lock(void);
void watch_unlock(void);
/* Writes a worker's last eight calls of each thread to standard error. */
void watch_tell(int seat);
/* Stops seat `seat` until watch_continue; with the lock held. */
void watch_stop(int seat);
void watch_continue(int seat);

static inline double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Notes an unexpected result once, with its number of times. */
void odd(const char *name, int result);

/* The families' names, NULL behind the last. */
const char *family_name(int family);

/* The worker in seat `seat`, or one of its errands; does not return. */
void child_main(int seat, unsigned seed, int errand) __attribute__((noreturn));
