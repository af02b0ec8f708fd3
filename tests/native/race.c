#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "race_stall.h"

/* Many processes on one region, too fast for Python: `race SCENARIO REGION ROUNDS [more]`.
 * Prints `name=value` words; the tests judge them. */

#define MIB (1ull << 20)
#define LIMIT (4096 * MIB)
#define MOST 64

struct shared {
    uint32_t waiting, phase; /* barrier */
    uint32_t winners, stop, ready;
    int64_t held[MOST], held_by_all; /* what workers really have */
    uint64_t longest[MOST];
    uint64_t bad, good, refused, creators, failed;
    uint64_t slots[16];
};

#define COUNT(what, number) \
    ((void)__atomic_add_fetch(&all->what, (uint64_t)(number), __ATOMIC_SEQ_CST))
#define STOPPED() __atomic_load_n(&all->stop, __ATOMIC_RELAXED)

static struct shared *all;
static const char *region_path;

static void die(const char *what, int rc) {
    fprintf(stderr, "%s: %s\n", what, strerror(-rc));
    exit(2);
}

static void away(int signal_number) {
    struct timespec t = {0, (long)(vgpu_clock(CLOCK_MONOTONIC) % 150000)};

    (void)signal_number;
    int saved = errno;
    nanosleep(&t, NULL);
    errno = saved;
}

/* RACE_SHAKE: every 300 us or so we stand still, wherever we are, and calls are interrupted. */
static void shake(void) {
    struct sigaction action = {.sa_handler = away};
    int us = 300 + getpid() % 50;
    struct itimerval timer = {{0, us}, {0, us}};

    if (getenv("RACE_SHAKE")) {
        sigaction(SIGALRM, &action, NULL);
        setitimer(ITIMER_REAL, &timer, NULL);
    }
}

/* RACE_STALL: called before each look; see race_stall.h. */
void race_stall(void) {
    static __thread unsigned seed;
    static int wanted = -1;

    if (wanted < 0) {
        wanted = getenv("RACE_STALL") != NULL;
    }
    if (!wanted) {
        return;
    }
    seed = seed ? seed : (unsigned)getpid() * 31 + (unsigned)(uintptr_t)&seed;
    int dice = rand_r(&seed) % 16;
    if (dice == 0) {
        vgpu_nap((uint64_t)rand_r(&seed) % 200000);
    } else if (dice < 6) {
        sched_yield();
    } else if (dice < 10) {
        for (int i = rand_r(&seed) % 2000; i > 0; i--) {
            vgpu_pause();
        }
    }
}

static vgpu_core *join(void) {
    vgpu_core *core;
    int rc;

    shake();
    rc = vgpu_core_open(&core, region_path, VGPU_OPEN_CREATE, 1);
    rc = rc ? rc : vgpu_core_claim(core);
    if (rc) {
        die("join", rc);
    }
    vgpu_core_set_limit(core, 0, LIMIT);
    vgpu_core_record_limit(core, 0, LIMIT);
    return core;
}

static void barrier(uint32_t parties) {
    uint32_t phase = __atomic_load_n(&all->phase, __ATOMIC_SEQ_CST);

    if (__atomic_add_fetch(&all->waiting, 1, __ATOMIC_SEQ_CST) == parties) {
        __atomic_store_n(&all->waiting, 0, __ATOMIC_SEQ_CST);
        __atomic_add_fetch(&all->phase, 1, __ATOMIC_SEQ_CST);
        return;
    }
    while (__atomic_load_n(&all->phase, __ATOMIC_SEQ_CST) == phase) {
        sched_yield();
    }
}

/* A child that does not outlive us. */
static pid_t start(void (*body)(uint32_t, uint32_t), uint32_t number, uint32_t argument) {
    pid_t pid = fork();

    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        body(number, argument);
        _exit(0);
    }
    return pid;
}

static int reap(pid_t pid) {
    int status = 0;

    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    return status;
}

static void end(pid_t pid) {
    int status = reap(pid);

    if (!WIFEXITED(status) || WEXITSTATUS(status)) {
        COUNT(failed, 1);
    }
}

/* ns this thread was ready to run and had no processor: no wait of ours. */
static uint64_t run_delay(void) {
    static __thread int fd = -1;
    static __thread pid_t owner;
    char text[128] = "";

    if (owner != getpid()) {
        owner = getpid();
        fd = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    }
    return pread(fd, text, sizeof(text) - 1, 0) > 0 ? strtoull(strchr(text, ' '), NULL, 10) : 0;
}

static int timed_charge(vgpu_core *core, uint32_t number, uint64_t bytes) {
    static __thread uint64_t sampled, delay;
    uint64_t begun = vgpu_clock(CLOCK_MONOTONIC);

    if (begun - sampled > VGPU_NS_PER_MS) {
        delay = run_delay();
        begun = sampled = vgpu_clock(CLOCK_MONOTONIC);
    }
    int rc = vgpu_charge(core, 0, bytes, VGPU_KIND_DATA);
    uint64_t took = vgpu_clock(CLOCK_MONOTONIC) - begun;
    if (took > all->longest[number]) {
        uint64_t idle = run_delay() - delay;
        took = took > idle ? took - idle : 0;
        all->longest[number] = took > all->longest[number] ? took : all->longest[number];
    }
    return rc;
}

static uint64_t longest_ms(void) {
    uint64_t most = 0;

    for (int i = 0; i < MOST; i++) {
        most = all->longest[i] > most ? all->longest[i] : most;
    }
    return most / VGPU_NS_PER_MS;
}

/* ---- rounds: everybody asks at once -------------------------------------------------------- */

static uint32_t parties, rounds, share, expected;

static void round_worker(uint32_t number, uint32_t unused) {
    vgpu_core *core = join();
    uint64_t bytes = LIMIT / 100 * share;

    (void)unused;
    for (uint32_t i = 0; i < rounds; i++) {
        barrier(parties);
        int won = !timed_charge(core, number, bytes);
        if (won) {
            COUNT(winners, 1);
        }
        barrier(parties);
        if (number == 0) {
            COUNT(good, all->winners == expected);
            COUNT(bad, all->winners > expected);
            all->winners = 0;
        }
        if (won) {
            vgpu_give_back(core, 0, bytes, VGPU_KIND_DATA);
        }
    }
    vgpu_core_close(core);
}

static void scenario_rounds(char **more) {
    pid_t pids[MOST];

    parties = (uint32_t)atoi(more[0]);
    share = (uint32_t)atoi(more[1]);
    expected = (uint32_t)atoi(more[2]);
    for (uint32_t i = 0; i < parties; i++) {
        pids[i] = start(round_worker, i, 0);
    }
    for (uint32_t i = 0; i < parties; i++) {
        end(pids[i]);
    }
}

/* ---- kills: the quota of the dead comes back ------------------------------------------------ */

static void churn(vgpu_core *core, uint32_t number, uint32_t seed) {
    uint64_t mine[8] = {0};

    while (!STOPPED()) {
        uint32_t at = (uint32_t)rand_r(&seed) % 8;
        if (mine[at]) {
            all->held[number] -= (int64_t)mine[at];
            __atomic_sub_fetch(&all->held_by_all, (int64_t)mine[at], __ATOMIC_SEQ_CST);
            vgpu_give_back(core, 0, mine[at], VGPU_KIND_DATA);
            mine[at] = 0;
            continue;
        }
        uint64_t bytes = ((uint64_t)rand_r(&seed) % 1024 + 1) * MIB;
        if (timed_charge(core, number, bytes)) {
            COUNT(refused, 1);
            continue;
        }
        mine[at] = bytes;
        all->held[number] += (int64_t)bytes;
        COUNT(good, 1);
        COUNT(bad, __atomic_add_fetch(&all->held_by_all, (int64_t)bytes, __ATOMIC_SEQ_CST) >
                       (int64_t)LIMIT);
    }
}

static void churn_worker(uint32_t number, uint32_t seed) {
    vgpu_core *core = join();

    churn(core, number, seed);
    vgpu_core_close(core);
}

/* Victims join, charge and are killed somewhere; then the whole limit must be there again. */
static void scenario_kills(char **more) {
    uint32_t batch = 5, survivors = (uint32_t)atoi(more[0]);
    uint64_t latest = 0, left = 0;
    pid_t pids[MOST];
    unsigned seed = (unsigned)getpid();

    for (uint32_t done = 0; done < rounds; done += batch) {
        all->stop = 0;
        vgpu_core *core = join();
        for (uint32_t i = 0; i < batch + survivors; i++) {
            pids[i] = start(churn_worker, i, seed + done + i);
        }
        vgpu_nap(1000000 + (uint64_t)rand_r(&seed) % 3000000);
        for (uint32_t i = 0; i < batch; i++) {
            vgpu_nap((uint64_t)rand_r(&seed) % 300000);
            kill(pids[i], SIGKILL);
            reap(pids[i]);
        }
        __atomic_store_n(&all->stop, 1, __ATOMIC_RELAXED);
        for (uint32_t i = batch; i < batch + survivors; i++) {
            end(pids[i]);
        }
        /* The living hold theirs until a busy machine has let them end: that is no wait for the dead. */
        uint64_t delay = run_delay(), ended = vgpu_clock(CLOCK_MONOTONIC);
        while (vgpu_charge(core, 0, LIMIT, VGPU_KIND_DATA)) {
            if (vgpu_clock(CLOCK_MONOTONIC) - ended > 2000 * VGPU_NS_PER_MS) {
                break;
            }
            vgpu_nap(1000000);
        }
        uint64_t took = vgpu_clock(CLOCK_MONOTONIC) - ended, idle = run_delay() - delay;
        took = took > idle ? took - idle : 0;
        latest = took > latest ? took : latest;
        vgpu_give_back(core, 0, LIMIT, VGPU_KIND_DATA);
        left += vgpu_used(core, 0);
        vgpu_core_close(core);
    }
    printf("latest_ms=%llu left=%llu ", (unsigned long long)(latest / VGPU_NS_PER_MS),
           (unsigned long long)left);
    all->bad = 0; /* the sum of what workers hold knows nothing of those killed */
}

/* ---- stopped: a process stands still with the lock, or with bytes announced ---------------- */

static void stopped_worker(uint32_t number, uint32_t announcer) {
    vgpu_core *core = join();

    (void)number;
    if (announcer) {
        core->own[0].shadow = (LIMIT / 2 / VGPU_UNIT) << 32;
        __atomic_store_n(&core->ext->word[0][core->slot], core->own[0].shadow, __ATOMIC_SEQ_CST);
    } else if (!vgpu_region_lock(core)) {
        die("region lock", -EBUSY);
    }
    all->ready = 1;
    raise(SIGSTOP);
}

/* more[0]: the stopped one is 0 lock holder, 1 announcer, 2 a lock holder that is then killed. */
static void scenario_stopped(char **more) {
    int kind = atoi(more[0]);
    pid_t stopped = start(stopped_worker, 0, kind == 1);

    while (!all->ready) {
        vgpu_nap(1000000);
    }
    if (kind == 2) {
        vgpu_core *waiter = join();
        kill(stopped, SIGKILL);
        reap(stopped);
        COUNT(failed, !vgpu_region_lock(waiter));
        vgpu_region_unlock(waiter);
        vgpu_core_close(waiter);
    }
    scenario_rounds(more + 1);
    if (kind != 2) {
        kill(stopped, SIGKILL);
        reap(stopped);
    }
    vgpu_core *core = join();
    vgpu_core_sweep(core, 1);
    printf("left=%llu lock=%u ", (unsigned long long)vgpu_used(core, 0), core->ext->lock);
    vgpu_core_close(core);
}

/* ---- threads: several in each process, each with bytes of its own -------------------------- */

static vgpu_core *thread_core;

static void *churn_thread(void *number) {
    churn(thread_core, (uint32_t)(uintptr_t)number, (uint32_t)(uintptr_t)number * 77);
    return NULL;
}

static void thread_worker(uint32_t number, uint32_t threads) {
    pthread_t ids[8];

    thread_core = join();
    for (uint32_t i = 0; i < threads; i++) {
        pthread_create(&ids[i], NULL, churn_thread, (void *)(uintptr_t)(number * threads + i));
    }
    for (uint32_t i = 0; i < threads; i++) {
        pthread_join(ids[i], NULL);
    }
    int64_t own = 0;
    for (uint32_t i = 0; i < threads; i++) {
        own += all->held[number * threads + i];
    }
    COUNT(failed, own != (int64_t)vgpu_used_own(thread_core, 0));
    barrier(parties); /* what one takes along would be room for the others */
    vgpu_core_close(thread_core);
}

/* Runs for `rounds` ms. */
static void scenario_threads(char **more) {
    pid_t pids[MOST];

    parties = (uint32_t)atoi(more[0]);
    for (uint32_t i = 0; i < parties; i++) {
        pids[i] = start(thread_worker, i, (uint32_t)atoi(more[1]));
    }
    vgpu_nap(rounds % 1000 * VGPU_NS_PER_MS);
    sleep(rounds / 1000);
    __atomic_store_n(&all->stop, 1, __ATOMIC_RELAXED);
    for (uint32_t i = 0; i < parties; i++) {
        end(pids[i]);
    }
}

/* ---- creators: killed half-way, and several at once ----------------------------------------- */

static void killed_creator(uint32_t number, uint32_t unused) {
    (void)number;
    (void)unused;
    join();
    pause();
}

static void scenario_creator_killed(char **more) {
    unsigned seed = (unsigned)getpid();

    (void)more;
    for (uint32_t i = 0; i < rounds; i++) {
        vgpu_core *core;
        unlink(region_path);
        pid_t pid = start(killed_creator, 0, 0);
        vgpu_nap((uint64_t)rand_r(&seed) % 1500000);
        kill(pid, SIGKILL);
        reap(pid);
        int rc = vgpu_core_open(&core, region_path, VGPU_OPEN_CREATE, 1);
        COUNT(bad, rc != 0);
        if (!rc) {
            COUNT(creators, (uint64_t)vgpu_core_is_creator(core));
            COUNT(good, vgpu_core_claim(core) == 0 && vgpu_core_slot(core) == 0);
            vgpu_core_close(core);
        }
    }
}

static void creator_worker(uint32_t number, uint32_t unused) {
    (void)number;
    (void)unused;
    for (uint32_t i = 0; i < rounds; i++) {
        barrier(parties);
        vgpu_core *core = join();
        uint64_t bit = 1ull << (vgpu_core_slot(core) & 63);
        COUNT(creators, (uint64_t)vgpu_core_is_creator(core));
        COUNT(bad, (__atomic_fetch_or(&all->slots[0], bit, __ATOMIC_SEQ_CST) & bit) != 0);
        barrier(parties);
        if (number == 0) {
            COUNT(good, all->slots[0] == (1ull << parties) - 1);
            all->slots[0] = 0;
            unlink(region_path);
        }
        vgpu_core_close(core);
        barrier(parties);
    }
}

static void scenario_creators(char **more) {
    pid_t pids[MOST];

    parties = (uint32_t)atoi(more[0]);
    for (uint32_t i = 0; i < parties; i++) {
        pids[i] = start(creator_worker, i, 0);
    }
    for (uint32_t i = 0; i < parties; i++) {
        end(pids[i]);
    }
}

/* ---- tamper: somebody writes anything anywhere ---------------------------------------------- */

static void tamper_worker(uint32_t number, uint32_t unused) {
    vgpu_core *core;
    unsigned seed = (unsigned)getpid();

    (void)number;
    (void)unused;
    if (vgpu_core_open(&core, region_path, VGPU_OPEN_CREATE, 1)) {
        _exit(2);
    }
    while (!STOPPED()) {
        uint64_t dirt = (uint64_t)rand_r(&seed) << 33 ^ (uint64_t)rand_r(&seed);
        uint32_t at = (uint32_t)rand_r(&seed) % VGPU_MAX_SLOTS;
        switch (rand_r(&seed) % 8) {
        case 0:
            core->ext->word[0][at % 8] = dirt;
            break;
        case 1:
            core->ext->word[0][at] = rand_r(&seed) % 2 ? 0 : dirt;
            break;
        case 2:
            core->region->limit[0] = rand_r(&seed) % 2 ? 0 : dirt | LIMIT;
            break;
        case 3:
            core->ext->lock = (uint32_t)dirt;
            break;
        case 4:
            core->ext->slot_high = (uint32_t)dirt;
            break;
        case 5:
            core->region->proc_num = (int32_t)dirt;
            break;
        case 6:
            core->ext->info[at].pid_ns = dirt;
            break;
        default:
            core->region->procs[at].pid = (int32_t)dirt;
            break;
        }
    }
}

static void tampered_worker(uint32_t number, uint32_t seed) {
    vgpu_core *core = join();
    uint64_t held = 0;

    while (!STOPPED()) {
        uint64_t bytes = ((uint64_t)rand_r(&seed) % 1024 + 1) * MIB;
        if (!timed_charge(core, number, bytes)) {
            held += bytes;
            COUNT(good, 1);
        } else if (held) {
            vgpu_give_back(core, 0, held, VGPU_KIND_DATA);
            held = 0;
        }
        COUNT(bad, held > LIMIT || vgpu_used_own(core, 0) != held);
    }
    /* After the dirt: one change of each, then everybody's word is right again. */
    vgpu_give_back(core, 0, held, VGPU_KIND_DATA);
    barrier(parties);
    vgpu_core_sweep(core, 1);
    barrier(parties);
    COUNT(bad, vgpu_charge(core, 0, LIMIT / parties, VGPU_KIND_DATA) != 0);
    barrier(parties);
    COUNT(bad, vgpu_used(core, 0) != LIMIT);
    COUNT(bad, vgpu_charge(core, 0, VGPU_UNIT, VGPU_KIND_DATA) != -ENOMEM);
    barrier(parties);
}

static void scenario_tamper(char **more) {
    pid_t pids[MOST];

    parties = (uint32_t)atoi(more[0]);
    for (uint32_t i = 0; i < parties; i++) {
        pids[i] = start(tampered_worker, i, i + 1);
    }
    pid_t tamperer = start(tamper_worker, 0, 0);
    vgpu_nap(rounds % 1000 * VGPU_NS_PER_MS);
    sleep(rounds / 1000);
    kill(tamperer, SIGKILL);
    reap(tamperer);
    __atomic_store_n(&all->stop, 1, __ATOMIC_RELAXED);
    for (uint32_t i = 0; i < parties; i++) {
        end(pids[i]);
    }
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(char **);
        int more;
    } scenarios[] = {
        {"rounds", scenario_rounds, 3},     {"kills", scenario_kills, 1},
        {"stopped", scenario_stopped, 4},   {"threads", scenario_threads, 2},
        {"creators", scenario_creators, 1}, {"creator-killed", scenario_creator_killed, 0},
        {"tamper", scenario_tamper, 1},
    };

    setvbuf(stdout, NULL, _IONBF, 0);
    all = mmap(NULL, sizeof(*all), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (size_t i = 0; argc > 3 && i < sizeof(scenarios) / sizeof(scenarios[0]); i++) {
        if (!strcmp(argv[1], scenarios[i].name) && argc == 4 + scenarios[i].more) {
            region_path = argv[2];
            rounds = (uint32_t)atoi(argv[3]);
            scenarios[i].run(argv + 4);
            printf("good=%llu bad=%llu refused=%llu creators=%llu failed=%llu longest_ms=%llu\n",
                   (unsigned long long)all->good, (unsigned long long)all->bad,
                   (unsigned long long)all->refused, (unsigned long long)all->creators,
                   (unsigned long long)all->failed, (unsigned long long)longest_ms());
            return 0;
        }
    }
    fprintf(stderr, "usage: race SCENARIO REGION ROUNDS [...]\n");
    return 2;
}
