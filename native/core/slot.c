#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core_internal.h"

/* Slots and the life of their processes.
 *
 * A slot is live while somebody holds the OFD lock of its byte. The open file that holds it is
 * referenced by the owner's mapping alone: closing all descriptors does not lose it, a forked child
 * does not have it, and the kernel drops it with the address space. A slot is only ever written by
 * who holds its lock: the owner, a claimer that found it free, or a sweeper. */

/* How long the settle lock is waited for, and its holder left alone once that was in vain. */
#define LOCK_WAIT_NS (15 * VGPU_NS_PER_MS)
#define STUCK_NS (1000 * VGPU_NS_PER_MS)

/* ---- life -------------------------------------------------------------------------------- */

/* NONBLOCK, so that a FIFO in the file's place cannot hold us. */
int vgpu_file_open(const char *path, int flags) {
    struct stat st;
    int fd = open(path, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0666);

    if (fd < 0) {
        return -errno;
    }
    if (fstat(fd, &st) || !S_ISREG(st.st_mode)) {
        close(fd);
        return S_ISDIR(st.st_mode) ? -EISDIR : -EBADF;
    }
    return fd;
}

int vgpu_file_lock(int fd, int64_t at) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = at, .l_len = 1};
    if (!fcntl(fd, F_OFD_SETLK, &lock)) {
        return 0;
    }
    return errno == EINVAL ? -ENOLCK : -errno; /* the kernel or its stand-in has no such locks */
}

void vgpu_file_unlock(int fd, int64_t at) {
    struct flock lock = {.l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = at, .l_len = 1};
    (void)fcntl(fd, F_OFD_SETLK, &lock);
}

int vgpu_file_locked(int fd, int64_t at, int64_t length) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = at, .l_len = length};
    return fcntl(fd, F_OFD_GETLK, &lock) ? -errno : lock.l_type != F_UNLCK;
}

int vgpu_core_reopen(const struct vgpu_core *core) {
    struct stat st;
    int fd = vgpu_file_open(core->path, core->read_only ? O_RDONLY : O_RDWR);

    if (fd < 0) {
        return fd;
    }
    if (fstat(fd, &st) || (uint64_t)st.st_dev != core->dev || (uint64_t)st.st_ino != core->ino) {
        close(fd);
        return -ESTALE;
    }
    return fd;
}

/* What /proc/<pid>/stat says. */
struct vgpu_stat {
    char state;
    uint64_t threads;
    uint64_t start_time;
    uint64_t vsize; /* 0: its address space is gone, or it never had one */
};

/* Fields count from the last ')': the name before it may hold anything. */
static int parse_stat(const char *text, struct vgpu_stat *out) {
    const char *at = strrchr(text, ')');

    memset(out, 0, sizeof(*out));
    if (!at || at[1] != ' ' || !at[2]) {
        return -EINVAL;
    }
    out->state = at[2];
    at += 3;
    for (int field = 4; field <= 23; field++) {
        char *end;
        unsigned long long value = strtoull(at, &end, 10);
        if (end == at) {
            return -EINVAL;
        }
        at = end;
        if (field == 20) {
            out->threads = value;
        } else if (field == 22) {
            out->start_time = value;
        } else if (field == 23) {
            out->vsize = value;
        }
    }
    return 0;
}

/* Reads /proc/<who>/stat; *pid is the number it starts with. */
static int read_stat(const char *who, int32_t *pid, struct vgpu_stat *out) {
    char path[64], text[1024];
    ssize_t length;
    int fd;

    snprintf(path, sizeof(path), "/proc/%s/stat", who);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return -errno;
    }
    length = read(fd, text, sizeof(text) - 1);
    close(fd);
    if (length <= 0) {
        return -ESRCH;
    }
    text[length] = 0;
    *pid = (int32_t)strtol(text, NULL, 10);
    return parse_stat(text, out);
}

void vgpu_identify(struct vgpu_core *core) {
    struct vgpu_stat self;
    struct stat st;
    int32_t pid = 0;

    core->pid = (int32_t)getpid();
    /* A /proc of another PID namespace numbers processes differently: better know nothing. */
    if (!read_stat("self", &pid, &self) && pid == core->pid && !stat("/proc/self/ns/pid", &st)) {
        core->start_time = self.start_time;
        core->pid_ns = (uint64_t)st.st_ino;
    }
}

/* What can be known of a slot's process without its lock. */
enum fate { FATE_UNKNOWN, FATE_GONE, FATE_DYING, FATE_RUNNING };

static enum fate fate(const struct vgpu_core *core, uint32_t slot) {
    const struct vgpu_slot_info *info = &core->ext->info[slot];
    uint64_t start = __atomic_load_n(&info->start_time, __ATOMIC_RELAXED);
    uint64_t pid_ns = __atomic_load_n(&info->pid_ns, __ATOMIC_RELAXED);
    int32_t pid = __atomic_load_n(&core->region->procs[slot].pid, __ATOMIC_RELAXED);
    struct vgpu_stat stat;
    char who[16];
    int32_t shown;

    if (pid <= 0 || !start || !pid_ns || pid_ns != core->pid_ns) {
        return FATE_UNKNOWN;
    }
    /* Existence by getpgid: /proc may hide the processes of other users. */
    if (getpgid(pid) < 0 && errno == ESRCH) {
        return FATE_GONE;
    }
    snprintf(who, sizeof(who), "%d", pid);
    if (read_stat(who, &shown, &stat)) {
        return FATE_UNKNOWN;
    }
    if (stat.start_time != start || stat.state == 'X' || stat.state == 'x' ||
        (stat.state == 'Z' && stat.threads <= 1)) {
        return FATE_GONE;
    }
    return stat.vsize ? FATE_RUNNING : FATE_DYING;
}

int vgpu_core_slot_live(vgpu_core *core, int slot) {
    int fd, locked;

    if (slot < 0 || slot >= VGPU_MAX_SLOTS) {
        return 0;
    }
    if (slot == __atomic_load_n(&core->slot, __ATOMIC_ACQUIRE)) {
        return 1;
    }
    if (core->in_memory) {
        return 0;
    }
    fd = vgpu_core_reopen(core);
    if (fd >= 0) {
        locked = vgpu_file_locked(fd, VGPU_SLOT_LOCK_AT + slot, 1);
        close(fd);
        return locked != 0;
    }
    /* The file is gone from its path and its locks with it: ask for the process, doubt for it. */
    if (!__atomic_load_n(&core->region->procs[slot].pid, __ATOMIC_RELAXED)) {
        return 0;
    }
    return fate(core, (uint32_t)slot) != FATE_GONE;
}

/* ---- writing a slot ---------------------------------------------------------------------- */

void vgpu_raise_slot_high(struct vgpu_ext *ext, uint32_t slot) {
    uint32_t high = __atomic_load_n(&ext->slot_high, __ATOMIC_SEQ_CST);

    while (high <= slot) {
        if (__atomic_compare_exchange_n(&ext->slot_high, &high, slot + 1, 0, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST)) {
            return;
        }
    }
}

static void raise_proc_num(struct vgpu_hami_region *region, uint32_t slot) {
    int32_t count = __atomic_load_n(&region->proc_num, __ATOMIC_RELAXED);
    int32_t wanted = count > VGPU_MAX_SLOTS ? VGPU_MAX_SLOTS : (int32_t)slot + 1;

    while (count < wanted || count > VGPU_MAX_SLOTS) {
        if (__atomic_compare_exchange_n(&region->proc_num, &count, wanted, 0, __ATOMIC_RELEASE,
                                        __ATOMIC_RELAXED)) {
            return;
        }
    }
}

static int slot_dirty(const struct vgpu_core *core, uint32_t slot) {
    if (__atomic_load_n(&core->region->procs[slot].pid, __ATOMIC_RELAXED) ||
        __atomic_load_n(&core->region->procs[slot].status, __ATOMIC_RELAXED)) {
        return 1;
    }
    for (int device = 0; device < VGPU_MAX_DEVICES; device++) {
        if (__atomic_load_n(&core->ext->word[device][slot], __ATOMIC_RELAXED)) {
            return 1;
        }
    }
    return 0;
}

/* The words first: they are the quota. A settle lock of this slot goes with it, or a later owner of
 * the slot would look like its holder. */
void vgpu_slot_wipe(struct vgpu_core *core, uint32_t slot) {
    struct vgpu_hami_slot *hami = &core->region->procs[slot];
    uint32_t holder = slot + 1;

    uint64_t held = 0;
    for (int device = 0; device < VGPU_MAX_DEVICES; device++) {
        held |= __atomic_exchange_n(&core->ext->word[device][slot], 0, __ATOMIC_RELEASE);
    }
    if (held) {
        vgpu_core_stir(core);
    }
    __atomic_compare_exchange_n(&core->ext->lock, &holder, 0, 0, __ATOMIC_ACQ_REL,
                                __ATOMIC_RELAXED);
    __atomic_store_n(&hami->status, VGPU_SLOT_DEAD, __ATOMIC_RELEASE);
    /* By atomic stores: others look at ids and states meanwhile. */
    uint64_t *words = (uint64_t *)(void *)hami;
    for (size_t i = 0; i < sizeof(*hami) / sizeof(*words); i++) {
        __atomic_store_n(&words[i], 0, __ATOMIC_RELAXED);
    }
    core->ext->info[slot].start_time = 0;
    core->ext->info[slot].pid_ns = 0;
}

void vgpu_core_stir(vgpu_core *core) {
    __atomic_fetch_add(&core->ext->stirred, 1, __ATOMIC_ACQ_REL);
}

static void fill_slot(struct vgpu_core *core, uint32_t slot) {
    struct vgpu_hami_slot *hami = &core->region->procs[slot];

    vgpu_slot_wipe(core, slot);
    core->ext->info[slot].start_time = core->start_time;
    core->ext->info[slot].pid_ns = core->pid_ns;
    __atomic_store_n(&hami->pid, core->pid, __ATOMIC_RELEASE);
    __atomic_store_n(&hami->status, VGPU_SLOT_LIVE, __ATOMIC_RELEASE);
    vgpu_raise_slot_high(core->ext, slot);
    raise_proc_num(core->region, slot);
    __atomic_store_n(&core->slot, (int32_t)slot, __ATOMIC_RELEASE);
}

/* ---- claim and sweep --------------------------------------------------------------------- */

/* Locks a byte whose slot may be used, and answers its number. */
static int lock_free_slot(struct vgpu_core *core, int fd) {
    for (uint32_t slot = 0; slot < VGPU_MAX_SLOTS; slot++) {
        int rc = vgpu_file_lock(fd, VGPU_SLOT_LOCK_AT + slot);
        if (rc == -EAGAIN || rc == -EACCES) {
            continue;
        }
        if (rc || fate(core, slot) != FATE_DYING) {
            return rc ? rc : (int)slot;
        }
        vgpu_file_unlock(fd, VGPU_SLOT_LOCK_AT + slot);
    }
    return -EUSERS;
}

/* A fork by another thread between open and close leaves its child a descriptor, and with it our
 * slot, until it execs or ends: too many bytes counted then, never too few. */
static int claim(struct vgpu_core *core) {
    int fd, slot, rc;

    if (core->slot >= 0) {
        return -EALREADY;
    }
    if (core->in_memory) {
        fill_slot(core, 0);
        return 0;
    }
    fd = vgpu_core_reopen(core);
    if (fd < 0) {
        return fd == -ENOENT ? -ESTALE : fd;
    }
    slot = lock_free_slot(core, fd);
    rc = slot < 0 ? slot : vgpu_core_map(core, fd);
    if (rc == 0) {
        fill_slot(core, (uint32_t)slot);
    }
    /* Where mapping failed the old one is still there; closing gives the lock up. */
    close(fd);
    return rc;
}

int vgpu_core_claim(vgpu_core *core) {
    int rc;

    if (core->read_only) {
        return -EBADF;
    }
    vgpu_lock(&core->slow_lock);
    rc = claim(core);
    vgpu_unlock(&core->slow_lock);
    return rc;
}

int vgpu_core_slot(const vgpu_core *core) {
    return __atomic_load_n(&core->slot, __ATOMIC_ACQUIRE);
}

/* GPU memory of a killed process is freed after its address space, hence after our lock: a slot
 * is given on only when the process is past that. `fd` < 0: no locks to go by. */
static int sweep_slot(struct vgpu_core *core, int fd, uint32_t slot) {
    int freed = 0;

    if (fd < 0) {
        freed = fate(core, slot) == FATE_GONE;
        if (freed) {
            vgpu_slot_wipe(core, slot);
        }
        return freed;
    }
    if (vgpu_file_lock(fd, VGPU_SLOT_LOCK_AT + slot)) {
        return 0;
    }
    if (fate(core, slot) != FATE_DYING) {
        vgpu_slot_wipe(core, slot);
        freed = 1;
    }
    vgpu_file_unlock(fd, VGPU_SLOT_LOCK_AT + slot);
    return freed;
}

int vgpu_core_sweep(vgpu_core *core, int force) {
    uint64_t now = vgpu_clock(CLOCK_MONOTONIC_COARSE);
    uint64_t last = __atomic_load_n(&core->swept_ns, __ATOMIC_RELAXED);
    int32_t own = __atomic_load_n(&core->slot, __ATOMIC_ACQUIRE);
    int freed = 0, fd;

    if (core->in_memory || core->read_only || (!force && now - last < VGPU_SWEEP_EVERY_NS)) {
        return 0;
    }
    if (!__atomic_compare_exchange_n(&core->swept_ns, &last, now, 0, __ATOMIC_RELAXED,
                                     __ATOMIC_RELAXED) &&
        !force) {
        return 0;
    }
    fd = vgpu_core_reopen(core);
    if (fd == -EACCES || fd == -EMFILE || fd == -ENFILE || fd == -ENOMEM) {
        return 0;
    }
    for (uint32_t slot = 0; slot < vgpu_slot_high(core->ext); slot++) {
        if ((int32_t)slot != own && slot_dirty(core, slot)) {
            freed += sweep_slot(core, fd, slot);
        }
    }
    if (fd >= 0) {
        close(fd);
    }
    return freed;
}

/* ---- locks that are waited for ------------------------------------------------------------ */

int vgpu_lock_wait(uint32_t *lock, uint64_t bound_ns) {
    uint64_t end = 0;

    for (unsigned turn = 0;; turn++) {
        if (!__atomic_load_n(lock, __ATOMIC_RELAXED) && vgpu_lock_try(lock)) {
            return 1;
        }
        if (turn < 100) {
            vgpu_pause();
        } else if (turn < 110) {
            sched_yield();
        } else {
            /* A yield does nothing for a holder of lower priority on our processor: sleep. */
            uint64_t now = vgpu_clock(CLOCK_MONOTONIC);
            end = end ? end : now + bound_ns;
            if (bound_ns && now >= end) {
                return 0;
            }
            vgpu_nap(50000);
        }
    }
}

uint64_t vgpu_jitter(const struct vgpu_core *core, uint64_t most) {
    uint64_t x = vgpu_clock(CLOCK_MONOTONIC) ^ ((uint64_t)core->slot << 32);

    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
    x ^= x >> 29;
    return most / 4 + x % (most - most / 4);
}

/* The settle lock, between processes. 0: not got in time; the quota does not depend on it, settling
 * without it only takes longer. */
int vgpu_region_lock(struct vgpu_core *core) {
    uint32_t *lock = &core->ext->lock;
    uint32_t mine = (uint32_t)core->slot + 1, seen = 0;
    uint64_t end = 0, since = 0, asked = 0;

    for (unsigned turn = 0;; turn++) {
        uint32_t holder = __atomic_load_n(lock, __ATOMIC_RELAXED);
        if (holder == 0 || holder > VGPU_MAX_SLOTS) {
            if (__atomic_compare_exchange_n(lock, &holder, mine, 0, __ATOMIC_ACQ_REL,
                                            __ATOMIC_RELAXED)) {
                return 1;
            }
            continue;
        }
        if (turn < 64) {
            vgpu_pause();
            continue;
        }
        uint64_t now = vgpu_clock(CLOCK_MONOTONIC);
        if (holder == __atomic_load_n(&core->stuck_holder, __ATOMIC_RELAXED) &&
            now < __atomic_load_n(&core->stuck_until, __ATOMIC_RELAXED)) {
            return 0;
        }
        end = end ? end : now + LOCK_WAIT_NS;
        if (holder != seen) {
            seen = holder;
            since = asked = now;
        }
        if (now >= end) {
            if (now - since >= LOCK_WAIT_NS * 3 / 4) {
                __atomic_store_n(&core->stuck_holder, holder, __ATOMIC_RELAXED);
                __atomic_store_n(&core->stuck_until, now + STUCK_NS, __ATOMIC_RELAXED);
            }
            return 0;
        }
        if (now - asked >= VGPU_NS_PER_MS) {
            asked = now;
            if (!vgpu_core_slot_live(core, (int)holder - 1) &&
                __atomic_compare_exchange_n(lock, &holder, mine, 0, __ATOMIC_ACQ_REL,
                                            __ATOMIC_RELAXED)) {
                return 1;
            }
        }
        vgpu_nap(vgpu_jitter(core, 200000));
    }
}

void vgpu_region_unlock(struct vgpu_core *core) {
    uint32_t mine = (uint32_t)core->slot + 1;

    __atomic_compare_exchange_n(&core->ext->lock, &mine, 0, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}
