/* truth PROCESSES SECONDS LIMIT_MIB: torture of one container's quota by workers that take memory in
 * every way while this process, without the library, compares NVML, the ledger and cuMemGetInfo.
 * Prints one line of figures and one of requests by family; each violation goes to standard error
 * with what its process last did.
 *
 * Run in a PID namespace of its own, so that NVML lists nobody else, with the tenant's environment
 * but TRUTH_PRELOAD instead of LD_PRELOAD. TRUTH_IMAGE may name a binary image with a kernel
 * `work`. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "truth.h"

#define MIB (1024ull * 1024ull)

struct shared *shared;

static struct {
    unsigned seed;
    long kills, stops, died, strangers;
    int killed[SEATS];  /* the pid we killed, 0 = none */
    double wake[SEATS]; /* when a stopped one goes on, 0 = runs */
} keeper = {.seed = 1};

static unsigned any(unsigned below) {
    return (unsigned)rand_r(&keeper.seed) % below;
}

static void map(int memory) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (shared == MAP_FAILED)
        exit(5);
}

/* A process that only keeps the workers' process group alive. */
static int holder(void) {
    int made = fork();
    if (made == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        setpgid(0, 0);
        for (;;)
            pause();
    }
    setpgid(made, made);
    return made;
}

/* With the watch's lock held: a worker that is started while the others are frozen would run. */
static void spawn(int number) {
    char seat[16], seed[16];
    const char *library = getenv("TRUTH_PRELOAD");
    struct seat *at = &shared->seat[number];
    memset(at, 0, sizeof *at);
    at->threads = 2 + (int)any(THREADS - 1);
    at->up = 1;
    snprintf(seat, sizeof seat, "%d", number);
    snprintf(seed, sizeof seed, "%u", any(1u << 30));
    pid_t made = fork();
    if (made == 0) {
        setpgid(0, watch.group);
        if (library)
            setenv("LD_PRELOAD", library, 1);
        setenv("CUDA_MODULE_LOADING", number % 2 ? "EAGER" : "LAZY", 1);
        execl("/proc/self/exe", "truth", "worker", seat, seed, getenv("TRUTH_SHARED"), NULL);
        _exit(9);
    }
    setpgid(made, watch.group);
    at->pid = made;
}

/* Ended workers are replaced; others that end here are errands whose worker was killed. */
static void reap(int replace) {
    int status;
    pid_t gone;
    while ((gone = waitpid(-1, &status, WNOHANG)) > 0) {
        int number = 0;
        while (number < watch.seats && shared->seat[number].pid != gone)
            number++;
        if (number == watch.seats) {
            keeper.strangers += status && !(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
            continue;
        }
        int meant = keeper.killed[number] == gone;
        if (!meant && (status || replace)) {
            keeper.died++;
            fprintf(stderr, "DIED: worker %d, status %d\n", number, status);
            watch_tell(number);
        }
        keeper.killed[number] = 0;
        keeper.wake[number] = 0;
        if (replace)
            spawn(number);
    }
}

/* Kills one in four times, else stops one for a while. */
static void disturb(void) {
    int number = (int)any((unsigned)watch.seats);
    if (keeper.killed[number] || keeper.wake[number] != 0)
        return;
    if (any(4) == 0) {
        keeper.killed[number] = shared->seat[number].pid;
        kill(shared->seat[number].pid, SIGKILL);
        keeper.kills++;
    } else {
        watch_stop(number);
        keeper.wake[number] = now() + 0.005 + any(400) * 1e-3;
        keeper.stops++;
    }
}

static void wake(int all) {
    for (int i = 0; i < watch.seats; i++)
        if (keeper.wake[i] != 0 && (all || now() > keeper.wake[i])) {
            keeper.wake[i] = 0;
            watch_continue(i);
        }
}

static void keep(double until) {
    double disturbance = now() + 2, rest = now() + 5;
    while (now() < until) {
        watch_lock();
        reap(1);
        wake(0);
        if (now() > disturbance) {
            disturb();
            disturbance = now() + 0.02 + any(150) * 1e-3;
        }
        int due = now() > rest;
        wake(due);
        watch_unlock();
        if (due) {
            /* The killed are replaced before: they take part. */
            usleep(300000);
            watch_lock();
            reap(1);
            watch_unlock();
            watch_rest();
            rest = now() + 5;
        }
        usleep(2000);
    }
}

static void finish(void) {
    double until = now() + 60;
    __atomic_store_n(&shared->over, 1, __ATOMIC_RELEASE);
    while (now() < until) {
        int left = 0;
        reap(0);
        for (int i = 0; i < watch.seats; i++)
            left += kill(shared->seat[i].pid, 0) == 0;
        if (!left)
            return;
        usleep(5000);
    }
    fputs("DIED: not all workers end\n", stderr);
    keeper.died++;
}

static unsigned long long kib(uint64_t bytes) {
    return bytes / 1024;
}

static void report(double rate) {
    printf("samples=%ld rate_hz=%.0f running_highest_mib=%.1f running_over=%ld streak_us=%ld "
           "frozen=%ld highest_mib=%.1f over=%ld lasting=%ld unexcused=%ld fitted=%ld ",
           watch.samples, rate, (double)watch.highest / MIB, watch.over, watch.streak, watch.frozen,
           (double)watch.frozen_highest / MIB, watch.frozen_over, watch.lasting, watch.unexcused,
           watch.fitted);
    printf("rests=%ld late=%ld compared=%ld wrong=%ld below_kib=%llu above_kib=%llu "
           "settled_below_kib=%llu settled_above_kib=%llu info_kib=%llu slowest_rest_ms=%.0f ",
           watch.rests, watch.late, watch.compared, watch.wrong, kib(watch.drift.below),
           kib(watch.drift.above), kib(watch.settled.below), kib(watch.settled.above),
           kib(watch.info_drift), watch.slowest_rest * 1e3);
    long odd_ = 0;
    for (int i = 0; i < ODDITIES; i++)
        odd_ += shared->oddity[i].times;
    printf("granted=%lld refused=%lld odd=%ld kills=%ld stops=%ld forks=%lld errands=%lld "
           "imports=%lld died=%ld\n",
           (long long)shared->granted, (long long)shared->refused, odd_, keeper.kills, keeper.stops,
           (long long)shared->forks, (long long)shared->errands, (long long)shared->imports,
           keeper.died + keeper.strangers);
    for (int i = 0; i < TALLIES && family_name(i); i++)
        printf("%s=%lld/%lld ", family_name(i), (long long)shared->tally[i][0],
               (long long)shared->tally[i][1]);
    puts("");
    for (int i = 0; i < ODDITIES && shared->oddity[i].times; i++)
        fprintf(stderr, "ODD %s: %d, %d times\n", shared->oddity[i].name, shared->oddity[i].result,
                shared->oddity[i].times);
}

int main(int arguments, char **argument) {
    char text[16];
    pthread_t running, frozen;
    if (arguments == 5) {
        map(atoi(argument[4]));
        child_main(atoi(argument[2]), (unsigned)atoi(argument[3]), !strcmp(argument[1], "errand"));
    }
    if (arguments != 4 || atoi(argument[1]) < 1 || atoi(argument[1]) > SEATS)
        return 2;
    int memory = memfd_create("truth", 0);
    if (memory < 0 || ftruncate(memory, sizeof *shared))
        return 5;
    map(memory);
    snprintf(text, sizeof text, "%d", memory);
    setenv("TRUTH_SHARED", text, 1);
    watch.seats = atoi(argument[1]);
    watch.limit = strtoull(argument[3], NULL, 10) * MIB;
    watch.verbose = 12;
    const char *missing = watch_start();
    if (missing) {
        fprintf(stderr, "truth: no %s\n", missing);
        return 3;
    }
    watch.group = holder();
    for (int i = 0; i < watch.seats; i++)
        spawn(i);
    pthread_create(&running, NULL, watch_running, NULL);
    pthread_create(&frozen, NULL, watch_frozen, NULL);
    keep(now() + atof(argument[2]));
    watch_lock();
    wake(1);
    watch_unlock();
    finish();
    pthread_join(running, NULL);
    pthread_join(frozen, NULL);
    kill(watch.group, SIGKILL);
    report((double)watch.samples / (watch.ended - watch.began));
    return 0;
}
