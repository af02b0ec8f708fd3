/* The state file: made once, mapped by all; slots and their liveness. */
#define _GNU_SOURCE
#include "sim.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef F_OFD_SETLK
#define F_OFD_SETLK 37
#define F_OFD_SETLKW 38
#endif
#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

/* Lock bytes lie far behind the data: no I/O ever touches them. */
#define LOCK_INIT (1ll << 40)
#define LOCK_SLOT (LOCK_INIT + 1)

struct sim_state *sim;
int sim_self = -1;

static char path[512];
static dev_t file_dev;
static ino_t file_ino;
static _Atomic(char) *alive; /* a page that reads 0 in a forked child */
static _Atomic bool had_slot;
static pthread_mutex_t attach_lock = PTHREAD_MUTEX_INITIALIZER;

uint64_t sim_now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

static int lock_byte(int fd, off_t byte, int cmd, short type) {
    struct flock l = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    int rc;
    do
        rc = fcntl(fd, cmd, &l);
    while (rc < 0 && errno == EINTR);
    return rc < 0 ? -errno : 0;
}

static int open_path(void) {
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0)
        return -errno;
    /* Containers of other users share the file; the umask must not decide. */
    struct stat st;
    if (fstat(fd, &st) == 0 && st.st_uid == geteuid() && (st.st_mode & 0777) != 0666)
        (void)!fchmod(fd, 0666);
    return fd;
}

int sim_open(void) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    struct stat st;
    if (fstat(fd, &st) < 0 || st.st_dev != file_dev || st.st_ino != file_ino) {
        close(fd);
        return -ESTALE;
    }
    return fd;
}

static struct sim_state *map(int fd) {
    void *p = mmap(NULL, sizeof(struct sim_state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return p == MAP_FAILED ? NULL : p;
}

/* The state of a file that somebody has made, or NULL. Needs no lock: the magic comes last. */
static struct sim_state *made(int fd) {
    struct stat st;
    if (fstat(fd, &st) < 0 || (uint64_t)st.st_size < sizeof(struct sim_state))
        return NULL;
    struct sim_state *s = map(fd);
    if (s && (atomic_load(&s->magic) != SIM_MAGIC || s->size != sizeof *s)) {
        munmap(s, sizeof *s);
        s = NULL;
    }
    return s;
}

/* Under the init lock: nobody else writes, and a maker that died left no magic. The file is
 * allocated in full, for a full disk must not end a process that writes to its mapping. */
static int make(int fd, struct sim_state **out) {
    struct stat st;
    if ((*out = made(fd)))
        return 0;
    if (fstat(fd, &st) < 0)
        return -errno;
    if (st.st_size && (uint64_t)st.st_size != sizeof(struct sim_state))
        return -EINVAL;
    int rc = posix_fallocate(fd, 0, sizeof(struct sim_state));
    if (rc)
        return -rc;
    struct sim_state *s = map(fd);
    if (!s)
        return -errno;
    rc = s->magic ? -EINVAL : sim_configure(s);
    if (rc) {
        munmap(s, sizeof *s);
        return rc;
    }
    s->size = sizeof *s;
    atomic_store(&s->next_gen, 1);
    atomic_store(&s->magic, SIM_MAGIC);
    *out = s;
    return 0;
}

static int prepare(int fd, struct sim_state **out) {
    if ((*out = made(fd)))
        return 0;
    int rc = lock_byte(fd, LOCK_INIT, F_OFD_SETLKW, F_WRLCK);
    if (rc)
        return rc;
    rc = make(fd, out);
    lock_byte(fd, LOCK_INIT, F_OFD_SETLK, F_UNLCK);
    return rc;
}

static uint64_t own_start(void) {
    char buf[1024];
    int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t n = read(fd, buf, sizeof buf - 1);
    close(fd);
    if (n <= 0)
        return 0;
    buf[n] = 0;
    char *p = strrchr(buf, ')');
    for (int field = 2; p && field < 22; field++)
        p = strchr(p + 1, ' ');
    return p ? strtoull(p + 1, NULL, 10) : 0;
}

static void own_name(char *out, size_t size) {
    ssize_t n = readlink("/proc/self/exe", out, size - 1);
    if (n < 0)
        n = snprintf(out, size, "unknown");
    out[n] = 0;
}

void sim_clear_slot(int i);
void sim_clear_slot(int i) {
    for (uint32_t d = 0; d < sim->doms; d++) {
        atomic_store(&sim->pending[d][i], 0);
        atomic_store(&sim->contexts[d][i], 0);
        atomic_store(&sim->managed[d][i], 0);
        atomic_store(&sim->used[d][i], 0);
    }
    uint64_t bit = 1ull << (i % 64);
    uint32_t high = atomic_load(&sim->objs_high);
    for (uint32_t o = 0; o < high; o++)
        if (atomic_load(&sim->shared[o].holders[i / 64]) & bit)
            atomic_fetch_and(&sim->shared[o].holders[i / 64], ~bit);
}

static void raise_high(_Atomic uint32_t *high, uint32_t value) {
    uint32_t old = atomic_load(high);
    while (old < value && !atomic_compare_exchange_weak(high, &old, value))
        ;
}

/* Takes the lowest byte that nobody holds; the lock then lives as long as the mapping. */
static int claim_slot(int fd) {
    for (int i = 0; i < SIM_SLOTS; i++) {
        if (lock_byte(fd, LOCK_SLOT + i, F_OFD_SETLK, F_WRLCK) < 0)
            continue;
        struct sim_slot *s = &sim->slot[i];
        atomic_store(&s->gen, 0);
        sim_clear_slot(i);
        s->pid = getpid();
        s->start = own_start();
        struct stat st;
        s->pid_ns = stat("/proc/self/ns/pid", &st) == 0 ? (uint64_t)st.st_ino : 0;
        own_name(s->name, sizeof s->name);
        raise_high(&sim->slots_high, (uint32_t)i + 1);
        atomic_store(&s->gen, atomic_fetch_add(&sim->next_gen, 1));
        atomic_store(&s->state, SIM_SLOT_USED);
        return i;
    }
    return -EAGAIN;
}

static void child_after_fork(void) {
    if (alive)
        *alive = 0;
}

static int watch_fork(void) {
    void *p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return -errno;
    alive = p;
    *alive = 1;
    if (madvise(p, 4096, MADV_WIPEONFORK) < 0)
        pthread_atfork(NULL, NULL, child_after_fork);
    return 0;
}

static int attach(bool with_slot) {
    const char *env = getenv("SIMGPU_STATE");
    if (env && *env)
        snprintf(path, sizeof path, "%s", env);
    else
        snprintf(path, sizeof path, "/dev/shm/simgpu-%u", (unsigned)geteuid());
    int fd = open_path();
    if (fd < 0)
        return fd;
    struct sim_state *s = NULL;
    int rc = prepare(fd, &s);
    struct stat st;
    if (!rc && fstat(fd, &st) < 0)
        rc = -errno;
    if (!rc) {
        file_dev = st.st_dev;
        file_ino = st.st_ino;
        sim = s;
        if (with_slot) {
            /* The child would keep our lock alive through its copy of the mapping. */
            madvise(s, sizeof *s, MADV_DONTFORK);
            rc = watch_fork();
            int slot = rc ? rc : claim_slot(fd);
            if (slot < 0)
                rc = slot;
            else
                sim_self = slot;
            had_slot = rc == 0;
        }
    }
    close(fd);
    if (!rc && with_slot)
        sim_sweep();
    return rc;
}

int sim_attach(bool with_slot) {
    pthread_mutex_lock(&attach_lock);
    int rc = 0;
    if (!sim || (with_slot && !had_slot))
        rc = attach(with_slot);
    pthread_mutex_unlock(&attach_lock);
    return rc;
}

bool sim_forked(void) {
    /* Set after `alive`, so that a reader of one sees the other. */
    return atomic_load_explicit(&had_slot, memory_order_acquire) &&
           !atomic_load_explicit(alive, memory_order_relaxed);
}

void sim_sweep(void) {
    int fd = sim_open();
    if (fd < 0)
        return;
    uint32_t high = atomic_load(&sim->slots_high);
    for (uint32_t i = 0; i < high; i++) {
        struct sim_slot *s = &sim->slot[i];
        if ((int)i == sim_self || atomic_load(&s->state) == SIM_SLOT_FREE)
            continue;
        if (lock_byte(fd, LOCK_SLOT + (off_t)i, F_OFD_SETLK, F_WRLCK) < 0)
            continue;
        atomic_store(&s->gen, 0);
        sim_clear_slot((int)i);
        atomic_store(&s->state, SIM_SLOT_FREE);
        lock_byte(fd, LOCK_SLOT + (off_t)i, F_OFD_SETLK, F_UNLCK);
    }
    sim_sweep_shared(fd);
    close(fd);
}
