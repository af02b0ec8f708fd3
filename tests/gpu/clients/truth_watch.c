/* The torture's eyes: NVML at one kilohertz and with all workers stopped, and at rest the region's
 * ledger and cuMemGetInfo against it. Nothing here runs under the library under test. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <nvml.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "region.h"
#include "truth.h"

#define MIB (1024ull * 1024ull)
#define ROWS 256

struct watch watch;
static nvmlDevice_t on;
static const char *region_path;
static const char *region; /* the mapped file, NULL until there is one */
static pthread_mutex_t still = PTHREAD_MUTEX_INITIALIZER;
static int stopped[SEATS];
static int suspect;

struct list {
    unsigned int count;
    nvmlProcessInfo_t row[ROWS];
    uint64_t ours[ROWS], sum; /* the ledger's, when it was asked too */
};

const char *watch_start(void) {
    region_path = getenv("CUDA_DEVICE_MEMORY_SHARED_CACHE");
    if (!region_path)
        return "CUDA_DEVICE_MEMORY_SHARED_CACHE";
    if (nvmlInit() != NVML_SUCCESS || nvmlDeviceGetHandleByIndex(0, &on) != NVML_SUCCESS)
        return "NVML";
    return NULL;
}

void watch_lock(void) {
    pthread_mutex_lock(&still);
}

void watch_unlock(void) {
    pthread_mutex_unlock(&still);
}

void watch_stop(int seat) {
    stopped[seat] = 1;
    kill(shared->seat[seat].pid, SIGSTOP);
}

void watch_continue(int seat) {
    stopped[seat] = 0;
    if (shared->seat[seat].pid > 0)
        kill(shared->seat[seat].pid, SIGCONT);
}

/* NVML's bytes of all workers. */
static uint64_t used(struct list *list) {
    uint64_t bytes = 0;
    list->count = ROWS;
    if (nvmlDeviceGetComputeRunningProcesses(on, &list->count, list->row) != NVML_SUCCESS)
        list->count = 0;
    for (unsigned int i = 0; i < list->count; i++)
        bytes += list->row[i].usedGpuMemory;
    return bytes;
}

void *watch_running(void *unused) {
    static struct list list;
    struct timespec at;
    double since = 0;
    (void)unused;
    clock_gettime(CLOCK_MONOTONIC, &at);
    watch.began = now();
    while (!shared->over) {
        at.tv_nsec += 1000000;
        if (at.tv_nsec >= 1000000000) {
            at.tv_nsec -= 1000000000;
            at.tv_sec++;
        }
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
        uint64_t bytes = used(&list);
        watch.samples++;
        if (bytes > watch.highest)
            watch.highest = bytes;
        if (bytes <= watch.limit) {
            since = 0;
            continue;
        }
        watch.over++;
        __atomic_store_n(&suspect, 1, __ATOMIC_RELEASE);
        if (since == 0)
            since = now();
        long micro = (long)((now() - since) * 1e6);
        watch.streak = micro > watch.streak ? micro : watch.streak;
    }
    watch.ended = now();
    return NULL;
}

/* What the ledger holds for one process, or for all live ones (pid 0, with the ghosts). */
static uint64_t ledger(int pid) {
    if (!region) {
        int file = open(region_path, O_RDONLY | O_CLOEXEC);
        void *made =
            file < 0 ? MAP_FAILED : mmap(NULL, VGPU_REGION_SIZE, PROT_READ, MAP_SHARED, file, 0);
        close(file);
        if (made == MAP_FAILED)
            return 0;
        region = made;
    }
    const struct vgpu_hami_region *base = (const void *)region;
    const struct vgpu_ext *ext = (const void *)(region + VGPU_EXT_OFFSET);
    uint64_t bytes = pid ? 0 : ext->ghost[0];
    for (uint32_t i = 0; i < ext->slot_high && i < VGPU_MAX_SLOTS; i++) {
        uint64_t word = __atomic_load_n(&ext->word[0][i], __ATOMIC_ACQUIRE);
        if (!pid || __atomic_load_n(&base->procs[i].pid, __ATOMIC_ACQUIRE) == pid)
            bytes += (word & 0xffffffffu) * VGPU_UNIT + (word >> 32) * VGPU_UNIT;
    }
    return bytes;
}

/* Puts the ledger's figures beside NVML's. */
static void consult(struct list *list) {
    for (unsigned int i = 0; i < list->count; i++)
        list->ours[i] = ledger((int)list->row[i].pid);
    list->sum = ledger(0);
}

/* All workers stopped, and NVML's list of them the same twice: what was inside the kernel is out. */
static uint64_t freeze(struct list *list) {
    static struct list before;
    kill(-watch.group, SIGSTOP);
    usleep(1000);
    uint64_t bytes = used(&before);
    for (int i = 0; i < 40; i++) {
        usleep(500);
        bytes = used(list);
        if (list->count == before.count &&
            !memcmp(list->row, before.row, list->count * sizeof *list->row))
            break;
        before = *list;
    }
    consult(list);
    return bytes;
}

static void thaw(void) {
    kill(-watch.group, SIGCONT);
    for (int i = 0; i < watch.seats; i++)
        if (stopped[i])
            kill(shared->seat[i].pid, SIGSTOP);
}

static void show(const struct call *call) {
    fprintf(stderr, " %s(%llu)", call->name, (unsigned long long)call->bytes);
    if (call->done)
        fprintf(stderr, "=%d", call->result);
    else
        fprintf(stderr, "... %.1f ms", (now() - call->began) * 1e3);
}

void watch_tell(int seat) {
    for (int i = 0; i < LINES; i++) {
        const struct line *line = &shared->seat[seat].line[i];
        uint64_t last = line->sequence;
        if (!last)
            continue;
        fprintf(stderr, "    thread %d:", i);
        for (uint64_t s = last > 7 ? last - 7 : 1; s <= last; s++)
            show(&line->ring[s % RING]);
        fputc('\n', stderr);
    }
}

/* What the ledger's figure for a process is made of. */
static void columns(int pid) {
    const struct vgpu_hami_region *base = (const void *)region;
    for (int i = 0; region && i < base->proc_num && i < VGPU_MAX_SLOTS; i++) {
        const struct vgpu_hami_memory *is = &base->procs[i].used[0];
        if (base->procs[i].pid == pid)
            fprintf(stderr, " data %llu, context %llu, module %llu",
                    (unsigned long long)is->data_size / 1024,
                    (unsigned long long)is->context_size / 1024,
                    (unsigned long long)is->module_size / 1024);
    }
    fputc('\n', stderr);
}

/* Each process by NVML and by the ledger, and what it last did where they differ. */
static void blame(const struct list *list, const char *why) {
    if (watch.verbose-- <= 0)
        return;
    uint64_t slots = 0;
    for (unsigned int i = 0; i < list->count; i++)
        slots += list->ours[i];
    fprintf(stderr, "%s at %.3f s, ledger's sum %llu KiB, %lld of it of no listed process\n", why,
            now() - watch.began, (unsigned long long)list->sum / 1024,
            ((long long)list->sum - (long long)slots) / 1024);
    for (unsigned int i = 0; i < list->count; i++) {
        uint64_t truth = list->row[i].usedGpuMemory, ours = list->ours[i];
        fprintf(stderr, "  process %u: nvml %llu KiB, ledger %llu KiB (%+lld)", list->row[i].pid,
                (unsigned long long)truth / 1024, (unsigned long long)ours / 1024,
                ((long long)ours - (long long)truth) / 1024);
        columns((int)list->row[i].pid);
        for (int seat = 0; seat < watch.seats; seat++)
            if (ours != truth && shared->seat[seat].pid == (int)list->row[i].pid)
                watch_tell(seat);
    }
}

/* Calls that had begun and not returned at one moment. */
struct flight {
    struct flying {
        int pid, seat, line, result; /* or one of the two below */
        uint64_t sequence, bytes;
        char name[28];
    } call[SEATS * LINES];
    int count;
};

/* Not returned; returned unseen, or its process is gone. */
enum { FLYING = -2, UNSEEN = -1 };

/* Who held how much more than was charged to it; seat -1 is no worker. */
struct short_ {
    int count, seat[ROWS];
    uint64_t bytes[ROWS];
};

static void look(struct flight *flight) {
    flight->count = 0;
    for (int seat = 0; seat < watch.seats; seat++)
        for (int i = 0; i < LINES; i++) {
            const struct line *line = &shared->seat[seat].line[i];
            const struct call *call = &line->ring[line->sequence % RING];
            if (!line->sequence || call->done)
                continue;
            struct flying *at = &flight->call[flight->count++];
            *at = (struct flying){shared->seat[seat].pid, seat,        i, FLYING,
                                  call->sequence,         call->bytes, ""};
            memcpy(at->name, call->name, sizeof at->name);
        }
}

/* Waits until they have returned, 1 s at most. */
static void land(struct flight *flight) {
    int flying = flight->count;
    for (double until = now() + 1; flying && now() < until; usleep(50))
        for (int i = 0; i < flight->count; i++) {
            struct flying *at = &flight->call[i];
            const struct call *call =
                &shared->seat[at->seat].line[at->line].ring[at->sequence % RING];
            if (at->result != FLYING)
                continue;
            if (shared->seat[at->seat].pid != at->pid || call->sequence != at->sequence)
                at->result = UNSEEN;
            else if (__atomic_load_n(&call->done, __ATOMIC_ACQUIRE))
                at->result = call->result;
            else
                continue;
            flying--;
        }
}

static int seat_of(int pid) {
    for (int i = 0; i < watch.seats; i++)
        if (shared->seat[i].pid == pid || shared->seat[i].errand == pid)
            return i;
    return -1;
}

/* Calls whose need is known only afterwards: they may take memory and be undone. */
static int late_known(const char *name) {
    static const char *const names[] = {"start",          "cuCtx",    "cuModule", "cuLibrary",
                                        "cuKernel",       "cuLaunch", "cuGraph",  "cuMemAllocAsync",
                                        "cuMemAllocFrom", "cuStream", NULL};
    int i = 0;
    while (names[i] && strncmp(name, names[i], strlen(names[i])))
        i++;
    return names[i] != NULL;
}

/* How a process came to hold more than was charged: by a call that was refused in the end (or whose
 * answer nobody can know), by one that fitted in the end, or by none. Seat -1: who is not known. */
enum verdict { NONE, FITTED, REFUSED };

static enum verdict verdict(const struct flight *flight, int seat) {
    enum verdict best = NONE;
    for (int i = 0; i < flight->count; i++) {
        const struct flying *at = &flight->call[i];
        if (seat >= 0 && at->seat != seat)
            continue;
        fprintf(stderr, " %d:%s(%llu)=%d", at->seat, at->name, (unsigned long long)at->bytes,
                at->result);
        if (!late_known(at->name))
            continue;
        enum verdict here = at->result == UNSEEN || at->result == CUDA_ERROR_OUT_OF_MEMORY ? REFUSED
                            : at->result == CUDA_SUCCESS                                   ? FITTED
                                                                                           : NONE;
        best = here > best ? here : best;
    }
    return best;
}

/* The worst verdict on those that held more than a block uncharged. */
static enum verdict excused(const struct flight *flight, const struct short_ *held) {
    enum verdict worst = REFUSED;
    int seen = 0;
    for (int i = 0; i < held->count; i++) {
        if (held->bytes[i] <= 2 * MIB)
            continue;
        fprintf(stderr, "  seat %d held %llu KiB uncharged;", held->seat[i],
                (unsigned long long)held->bytes[i] / 1024);
        enum verdict here = verdict(flight, held->seat[i]);
        worst = here < worst ? here : worst;
        fputc('\n', stderr);
        seen++;
    }
    if (seen)
        return worst;
    fputs("  all is charged;", stderr);
    worst = verdict(flight, -1);
    fputc('\n', stderr);
    return worst;
}

/* While frozen: who holds more by NVML than by the ledger. */
static void uncharged(const struct list *list, struct short_ *held) {
    held->count = 0;
    for (unsigned int i = 0; i < list->count; i++) {
        uint64_t truth = list->row[i].usedGpuMemory, ours = list->ours[i];
        if (truth <= ours)
            continue;
        held->seat[held->count] = seat_of((int)list->row[i].pid);
        held->bytes[held->count++] = truth - ours;
    }
}

/* Over the limit while frozen: excused when whoever held more than was charged was inside a call
 * that is then refused, and when that one is over the sum is within the limit again. Where the call
 * is granted in the end, as others gave back meanwhile, it is counted as fitted. */
static void judge(uint64_t bytes, struct list *list) {
    static struct flight flight;
    static struct short_ held;
    static struct list then;
    uint64_t first = bytes;
    watch.frozen_over++;
    look(&flight);
    uncharged(list, &held);
    then = *list;
    /* Also those that were to stay stopped: their calls end too. */
    kill(-watch.group, SIGCONT);
    land(&flight);
    for (int again = 0; again < 10 && bytes > watch.limit; again++) {
        if (again) {
            thaw();
            usleep(5000);
        }
        bytes = freeze(list);
    }
    fprintf(stderr, "OVER by %llu KiB at %.3f s\n",
            (unsigned long long)(first - watch.limit) / 1024, now() - watch.began);
    enum verdict is = excused(&flight, &held);
    watch.lasting += bytes > watch.limit;
    watch.unexcused += bytes <= watch.limit && is == NONE;
    watch.fitted += bytes <= watch.limit && is == FITTED;
    if (bytes > watch.limit)
        blame(list, "LASTING");
    else if (is == NONE)
        blame(&then, "UNEXCUSED");
}

void *watch_frozen(void *unused) {
    static struct list list;
    double next = now();
    (void)unused;
    while (!shared->over) {
        int asked = __atomic_exchange_n(&suspect, 0, __ATOMIC_ACQ_REL);
        if (!asked && now() < next) {
            usleep(200);
            continue;
        }
        watch_lock();
        uint64_t bytes = freeze(&list);
        watch.frozen++;
        if (bytes > watch.frozen_highest)
            watch.frozen_highest = bytes;
        if (bytes > watch.limit)
            judge(bytes, &list);
        thaw();
        watch_unlock();
        next = now() + 0.05;
        usleep(5000);
    }
    return NULL;
}

static uint64_t apart(uint64_t a, uint64_t b) {
    return a > b ? a - b : b - a;
}

/* Ledger against NVML, process by process. `most` keeps the greatest differences. */
static void compare(struct drift *most, const char *when) {
    static struct list list;
    char why[96];
    used(&list);
    consult(&list);
    for (unsigned int i = 0; i < list.count; i++) {
        uint64_t truth = list.row[i].usedGpuMemory, ours = list.ours[i];
        uint64_t allowed = truth / 100 > 16 * MIB ? truth / 100 : 16 * MIB;
        uint64_t by = apart(truth, ours);
        watch.compared++;
        uint64_t *side = ours < truth ? &most->below : &most->above;
        *side = by > *side ? by : *side;
        if (by <= allowed)
            continue;
        watch.wrong++;
        snprintf(why, sizeof why, "WRONG %s: process %u is %lld KiB apart", when, list.row[i].pid,
                 ((long long)ours - (long long)truth) / 1024);
        blame(&list, why);
    }
}

/* Each worker's cuMemGetInfo against the ledger's sum. */
static void ask(void) {
    for (int i = 0; i < watch.seats; i++) {
        struct seat *seat = &shared->seat[i];
        int question = seat->ask + 1;
        __atomic_store_n(&seat->ask, question, __ATOMIC_RELEASE);
        double until = now() + 5;
        while (__atomic_load_n(&seat->answer, __ATOMIC_ACQUIRE) != question && now() < until)
            usleep(100);
        if (seat->answer == question && seat->result < 0)
            continue;
        uint64_t sum = ledger(0), by = apart(sum, seat->total - seat->free);
        if (seat->answer != question || seat->result || seat->total != watch.limit ||
            by > 2 * MIB) {
            watch.wrong++;
            fprintf(stderr,
                    "WRONG cuMemGetInfo of %d: result %d, total %llu, used %llu, sum %llu\n",
                    seat->pid, seat->result, (unsigned long long)seat->total,
                    (unsigned long long)(seat->total - seat->free), (unsigned long long)sum);
        }
        watch.info_drift = by > watch.info_drift ? by : watch.info_drift;
    }
}

static int at_rest(int phase) {
    for (int i = 0; i < watch.seats; i++)
        for (int j = 0; j < __atomic_load_n(&shared->seat[i].up, __ATOMIC_ACQUIRE); j++)
            if (__atomic_load_n(&shared->seat[i].line[j].rested, __ATOMIC_ACQUIRE) != phase)
                return 0;
    return 1;
}

void watch_rest(void) {
    double began = now();
    int phase = __atomic_add_fetch(&shared->phase, 1, __ATOMIC_ACQ_REL);
    while (!at_rest(phase) && now() < began + 30)
        usleep(500);
    watch_lock();
    double took = now() - began;
    watch.slowest_rest = took > watch.slowest_rest ? took : watch.slowest_rest;
    if (at_rest(phase)) {
        watch.rests++;
        compare(&watch.drift, "at rest");
        ask();
        compare(&watch.settled, "settled");
    } else {
        static struct list list;
        watch.late++;
        used(&list);
        consult(&list);
        blame(&list, "LATE: not at rest after 30 s");
        for (int i = 0; i < watch.seats && watch.late < 3; i++)
            watch_tell(i);
    }
    watch_unlock();
    __atomic_add_fetch(&shared->phase, 1, __ATOMIC_ACQ_REL);
}
