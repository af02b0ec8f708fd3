#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core_internal.h"

/* The region file: judged before it is mapped, made or brought up to date under a lock, mapped.
 *
 * A file is complete once ext.magic is stored, the last of all stores; whoever finds one without it
 * starts again, so a creator may be killed anywhere. */

#define PIN(type, field, at) \
    _Static_assert(offsetof(struct type, field) == (at), "layout of " #type "." #field)

_Static_assert(sizeof(struct vgpu_hami_memory) == 64, "layout");
_Static_assert(sizeof(struct vgpu_hami_util) == 48, "layout");
_Static_assert(sizeof(struct vgpu_hami_slot) == 1960, "layout");
PIN(vgpu_hami_slot, used, 8);
PIN(vgpu_hami_slot, monitorused, 1032);
PIN(vgpu_hami_slot, device_util, 1160);
PIN(vgpu_hami_slot, status, 1928);
PIN(vgpu_hami_slot, seqlock, 1936);
_Static_assert(sizeof(struct vgpu_hami_region) == VGPU_HAMI_SIZE, "layout");
PIN(vgpu_hami_region, owner_pid, 16);
PIN(vgpu_hami_region, device_num, 56);
PIN(vgpu_hami_region, uuids, 64);
PIN(vgpu_hami_region, limit, 1600);
PIN(vgpu_hami_region, sm_limit, 1728);
PIN(vgpu_hami_region, procs, 1856);
PIN(vgpu_hami_region, proc_num, 2008896);
PIN(vgpu_hami_region, last_kernel_time, 2008912);
PIN(vgpu_hami_region, sem_postinit, 2008920);
_Static_assert(sizeof(struct vgpu_ext) == VGPU_EXT_SIZE, "layout");
PIN(vgpu_ext, state, 64);
PIN(vgpu_ext, lock, 76);
PIN(vgpu_ext, refused, 128);
PIN(vgpu_ext, ghost, 640);
PIN(vgpu_ext, info, 1920);
PIN(vgpu_ext, word, 18304);
PIN(vgpu_ext, slot_lock, 149376);
PIN(vgpu_ext, init_lock, 150400);
_Static_assert(VGPU_EXT_OFFSET % 65536 == 0 && VGPU_EXT_OFFSET > VGPU_HAMI_SIZE, "layout");
_Static_assert(VGPU_REGION_SIZE == VGPU_EXT_OFFSET + VGPU_EXT_SIZE, "layout");

/* A start that waits is better than one refused: the maker may be short of a processor. */
#define INIT_WAIT_NS (1000 * VGPU_NS_PER_MS)
#define CHUNK 65536
/* 1.1 as it was for some weeks: same version words, other offsets; only its size tells. */
#define TRANSITIONAL_SIZE 2008984

/* What a file is, before it is mapped. */
enum verdict { VERDICT_FRESH, VERDICT_OLD, VERDICT_OURS, VERDICT_OTHER };

/* The first words of both parts, as read from the file. */
struct heads {
    struct {
        int32_t magic;
        uint32_t major, minor;
        uint32_t rest[13];
    } hami;
    struct {
        uint32_t magic, version;
        uint64_t size;
        uint64_t rest[6];
    } ext;
};

/* ---- file ------------------------------------------------------------------------------ */

/* The initialisation lock at once: 1; 0: somebody else has it, ask again; -EBUSY for too long (from *end
 * on, set at the first call), or -errno. */
static int init_lock(int fd, uint64_t *end) {
    int rc = vgpu_file_lock(fd, VGPU_INIT_LOCK_AT);

    if (rc != -EAGAIN && rc != -EACCES) {
        return rc ? rc : 1;
    }
    uint64_t now = vgpu_clock(CLOCK_MONOTONIC);
    *end = *end ? *end : now + INIT_WAIT_NS;
    if (now >= *end) {
        return -EBUSY;
    }
    vgpu_nap(200000);
    return 0;
}

/* 1 when `path` still names the file behind `fd`, 0 when not, or -errno. */
static int still_there(const char *path, int fd) {
    struct stat named, opened;

    if (fstat(fd, &opened)) {
        return -errno;
    }
    if (lstat(path, &named)) {
        return errno == ENOENT ? 0 : -errno;
    }
    return named.st_dev == opened.st_dev && named.st_ino == opened.st_ino;
}

static int judge_hami(const struct heads *heads, int64_t size) {
    if (heads->hami.major != VGPU_HAMI_MAJOR ||
        (heads->hami.minor != 1 && heads->hami.minor != VGPU_HAMI_MINOR)) {
        return -EPROTO;
    }
    if (heads->ext.magic == VGPU_EXT_MAGIC) {
        if (heads->ext.version != VGPU_EXT_VERSION) {
            return VERDICT_OTHER;
        }
        return size == VGPU_REGION_SIZE && heads->ext.size == VGPU_EXT_SIZE ? VERDICT_OURS : -EBADF;
    }
    if (heads->ext.magic) {
        return -EBADF;
    }
    if (size == VGPU_HAMI_SIZE || size == VGPU_HAMI_SIZE + 1) {
        return VERDICT_OLD;
    }
    /* Longer ones are our own, left by a process killed while it brought them up to date. */
    return size > TRANSITIONAL_SIZE + 1 && size <= VGPU_REGION_SIZE ? VERDICT_OLD : -EPROTO;
}

/* An enum verdict, or -errno. */
static int judge(int fd) {
    struct heads heads;
    struct stat st;

    memset(&heads, 0, sizeof(heads));
    /* In the opposite order of the stores: where the last one is seen, so are the others. */
    if (pread(fd, &heads.ext, sizeof(heads.ext), VGPU_EXT_OFFSET) < 0 ||
        pread(fd, &heads.hami, sizeof(heads.hami), 0) < 0 || fstat(fd, &st)) {
        return -errno;
    }
    if (heads.hami.magic == VGPU_HAMI_MAGIC) {
        return judge_hami(&heads, st.st_size);
    }
    if (heads.hami.magic || heads.ext.magic || st.st_size > VGPU_REGION_SIZE ||
        heads.hami.major > VGPU_HAMI_MAJOR || heads.hami.minor > VGPU_HAMI_MINOR) {
        return -EBADF;
    }
    for (size_t i = 0; i < sizeof(heads.hami.rest) / sizeof(heads.hami.rest[0]); i++) {
        if (heads.hami.rest[i]) {
            return -EBADF;
        }
    }
    return VERDICT_FRESH;
}

/* Writes every chunk as it is, zeros behind the end: for file systems without fallocate. */
static int rewrite_all(int fd) {
    char chunk[4096];

    for (int64_t at = 0; at < VGPU_REGION_SIZE; at += (int64_t)sizeof(chunk)) {
        memset(chunk, 0, sizeof(chunk));
        if (pread(fd, chunk, sizeof(chunk), at) < 0) {
            return -errno;
        }
        ssize_t done = pwrite(fd, chunk, sizeof(chunk), at);
        if (done != (ssize_t)sizeof(chunk)) {
            return done < 0 ? -errno : -ENOSPC;
        }
    }
    return 0;
}

/* Every block, now: a hole on a full disk would be a SIGBUS at some later store. Beyond the
 * process's own limit on file sizes the kernel would not only refuse but send SIGXFSZ. */
static int allocate(int fd) {
    struct rlimit most;

    if (!getrlimit(RLIMIT_FSIZE, &most) && most.rlim_cur < VGPU_REGION_SIZE) {
        return -EFBIG;
    }
    for (int tries = 0; tries < 100; tries++) {
        if (!fallocate(fd, 0, 0, VGPU_REGION_SIZE)) {
            return 0;
        }
        if (errno != EINTR) {
            break;
        }
    }
    /* EPERM: a sandbox that does not know the call. */
    if (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL || errno == EINTR ||
        errno == EPERM) {
        return rewrite_all(fd);
    }
    return -errno;
}

/* ---- contents -------------------------------------------------------------------------- */

static int uuid_valid(const char *uuid) {
    size_t length = strnlen(uuid, VGPU_UUID_LEN);

    for (size_t i = 0; i < length; i++) {
        if (uuid[i] <= ' ' || uuid[i] > '~') {
            return 0;
        }
    }
    return length > 0 && length < VGPU_UUID_LEN;
}

static void fill_ext(struct vgpu_ext *ext, uint64_t instance) {
    ext->version = VGPU_EXT_VERSION;
    ext->size = VGPU_EXT_SIZE;
    ext->instance = instance;
    ext->created_ns = vgpu_clock(CLOCK_REALTIME);
}

static void complete(struct vgpu_hami_region *region, struct vgpu_ext *ext) {
    region->major_version = VGPU_HAMI_MAJOR;
    region->minor_version = VGPU_HAMI_MINOR;
    region->utilization_switch = 1;
    region->recent_kernel = 2;
    __atomic_store_n(&region->initialized_flag, VGPU_HAMI_MAGIC, __ATOMIC_RELEASE);
    __atomic_store_n(&ext->magic, VGPU_EXT_MAGIC, __ATOMIC_RELEASE);
}

/* `blank`: it holds zeros alone, and its pages need not be touched. */
static void fill_fresh(struct vgpu_hami_region *region, struct vgpu_ext *ext, uint64_t instance,
                       int blank) {
    if (!blank) {
        memset(region, 0, sizeof(*region));
        memset(ext, 0, sizeof(*ext));
    }
    region->priority = 1;
    fill_ext(ext, instance);
    complete(region, ext);
}

/* 1.1 and 1.2 have uuids and limits at the same offsets: kept where they can be meant. All else
 * of the old file, slots above all, belongs to processes that are gone. */
static void fill_old(struct vgpu_hami_region *region, struct vgpu_ext *ext, uint64_t instance) {
    uint64_t devices = region->device_num;

    region->sm_init_flag = 0;
    region->owner_pid = 0;
    memset(region->sem, 0, sizeof(region->sem));
    for (uint64_t i = 0; i < VGPU_MAX_DEVICES; i++) {
        if (i >= devices || !uuid_valid(region->uuids[i])) {
            devices = devices < i ? devices : i;
            memset(region->uuids[i], 0, VGPU_UUID_LEN);
        }
        region->limit[i] = region->limit[i] >> 63 ? 0 : region->limit[i];
        region->sm_limit[i] = region->sm_limit[i] > 100 ? 0 : region->sm_limit[i];
    }
    region->device_num = devices < VGPU_MAX_DEVICES ? devices : VGPU_MAX_DEVICES;
    memset(region->procs, 0, sizeof(region->procs));
    region->proc_num = 0;
    region->last_kernel_time = 0;
    memset(region->sem_postinit, 0, sizeof(region->sem_postinit));
    memset(ext, 0, sizeof(*ext));
    fill_ext(ext, instance);
    complete(region, ext);
}

/* A new run of the container: what the last one recorded about its quota is void. */
static void forget_run(struct vgpu_core *core, uint64_t instance) {
    struct vgpu_ext *ext = core->ext;
    uint32_t high = vgpu_slot_high(ext);

    memset(core->region->limit, 0, sizeof(core->region->limit));
    memset(core->region->sm_limit, 0, sizeof(core->region->sm_limit));
    for (uint32_t i = 0; i < high; i++) {
        vgpu_slot_wipe(core, i);
    }
    ext->state = VGPU_STATE_UNKNOWN;
    ext->refuse_reason = 0;
    ext->flags = 0;
    ext->lock = 0;
    ext->clamped = 0;
    memset(ext->refused, 0, sizeof(ext->refused));
    memset(ext->refused_last_ns, 0, sizeof(ext->refused_last_ns));
    memset(ext->refused_bytes, 0, sizeof(ext->refused_bytes));
    memset(ext->ghost, 0, sizeof(ext->ghost));
    memset(ext->peak, 0, sizeof(ext->peak));
    __atomic_store_n(&ext->instance, instance, __ATOMIC_RELEASE);
}

/* ---- mapping --------------------------------------------------------------------------- */

int vgpu_core_map(struct vgpu_core *core, int fd) {
    int protection = core->read_only ? PROT_READ : PROT_READ | PROT_WRITE;
    int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void *at = mmap(core->region, VGPU_REGION_SIZE, protection,
                    flags | (core->region ? MAP_FIXED : 0), fd, 0);

    if (at == MAP_FAILED) {
        return -errno;
    }
    core->region = at;
    core->ext = (struct vgpu_ext *)((char *)at + VGPU_EXT_OFFSET);
    /* The mapping is the life of our slot: a child must not have it. */
    return madvise(at, VGPU_REGION_SIZE, MADV_DONTFORK) ? -errno : 0;
}

/* A container that starts again with a library of another layout finds the region of its last run: it makes
 * its own, unless somebody holds a lock of that one, wherever that layout has them. -EAGAIN or -EPROTO. */
static int discard(const char *path, int fd) {
    int rc = vgpu_file_locked(fd, 0, 0);

    if (rc == 0 && (rc = still_there(path, fd)) == 1) {
        rc = unlink(path) ? -errno : 0;
    } else if (rc == 1) {
        rc = -EPROTO;
    }
    return rc ? rc : -EAGAIN;
}

/* Under the lock: makes or brings up to date, and maps. */
static int prepare(struct vgpu_core *core, int fd, uint64_t instance) {
    struct stat st;
    int blank = !fstat(fd, &st) && st.st_size == 0;
    int verdict = judge(fd);
    int rc = verdict;

    if (verdict == VERDICT_OTHER) {
        return discard(core->path, fd);
    }
    if (verdict >= 0 && verdict != VERDICT_OURS) {
        rc = allocate(fd);
    }
    if (rc < 0 || (rc = vgpu_core_map(core, fd)) < 0) {
        return rc;
    }
    if (verdict == VERDICT_FRESH) {
        fill_fresh(core->region, core->ext, instance, blank);
    } else if (verdict == VERDICT_OLD) {
        fill_old(core->region, core->ext, instance);
    }
    core->creator = verdict != VERDICT_OURS;
    if (instance && core->ext->instance != instance &&
        !(rc = vgpu_file_locked(fd, VGPU_SLOT_LOCK_AT, VGPU_MAX_SLOTS))) {
        forget_run(core, instance);
    }
    return rc < 0 ? rc : 0;
}

static int attach_reader(struct vgpu_core *core, int fd) {
    int verdict = judge(fd);

    if (verdict < 0) {
        return verdict;
    }
    return verdict == VERDICT_OURS ? vgpu_core_map(core, fd)
                                   : (verdict == VERDICT_FRESH ? -EBADF : -EPROTO);
}

static int is_complete(int fd, uint64_t instance) {
    int64_t at = VGPU_EXT_OFFSET + (int64_t)offsetof(struct vgpu_ext, instance);
    uint64_t recorded = 0;

    return judge(fd) == VERDICT_OURS &&
           pread(fd, &recorded, sizeof(recorded), at) == (ssize_t)sizeof(recorded) &&
           (!instance || recorded == instance);
}

/* A file that is not complete may be one that somebody is just making: judged again under the lock, or as
 * soon as it is. Of a crowd that starts at once only the maker needs the lock. */
static int attach(struct vgpu_core *core, int fd, uint64_t instance) {
    uint64_t end = 0;
    int rc = 0;

    while (rc == 0 && !is_complete(fd, instance)) {
        rc = init_lock(fd, &end);
    }
    if (rc == 0) {
        return vgpu_core_map(core, fd);
    }
    if (rc == 1) {
        rc = prepare(core, fd, instance);
        vgpu_file_unlock(fd, VGPU_INIT_LOCK_AT);
    }
    return rc;
}

/* Never O_CREAT on a file that may exist: fs.protected_regular refuses that in sticky folders. */
static int open_or_make(const char *path) {
    int fd = vgpu_file_open(path, O_RDWR);

    if (fd == -ENOENT) {
        fd = vgpu_file_open(path, O_RDWR | O_CREAT | O_EXCL);
        if (fd >= 0) {
            (void)fchmod(fd, 0666); /* whatever the umask: users of one container share it */
        }
    } else if (fd == -EACCES) {
        /* Perhaps its maker, another user, is between open and fchmod. */
        struct stat st;
        fd = !lstat(path, &st) && st.st_size == 0 ? -EEXIST : -EACCES;
    }
    return fd;
}

static int try_open(struct vgpu_core *core, int mode, uint64_t instance) {
    int fd =
        mode == VGPU_OPEN_CREATE ? open_or_make(core->path) : vgpu_file_open(core->path, O_RDONLY);
    struct stat st;
    int rc;

    if (fd < 0) {
        return fd == -EEXIST ? -EAGAIN : fd;
    }
    rc = core->read_only ? attach_reader(core, fd) : attach(core, fd, instance);
    if (rc == 0) {
        rc = still_there(core->path, fd);
        rc = rc == 1 ? 0 : (rc == 0 ? -EAGAIN : rc);
    }
    if (rc == 0) {
        rc = fstat(fd, &st) ? -errno : 0;
        core->dev = (uint64_t)st.st_dev;
        core->ino = (uint64_t)st.st_ino;
    }
    close(fd);
    if (rc && core->region) {
        munmap(core->region, VGPU_REGION_SIZE);
        core->region = NULL;
    }
    return rc;
}

/* ---- handle ---------------------------------------------------------------------------- */

static void free_handle(struct vgpu_core *core) {
    munmap((void *)(uintptr_t)core->cookie, core->handle_bytes);
}

/* A mapping of its own: the first page is the cookie, the struct follows. */
static int new_handle(struct vgpu_core **out) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t bytes = page + (sizeof(struct vgpu_core) + page - 1) / page * page;
    char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct vgpu_core *core;

    if (at == MAP_FAILED) {
        return -errno;
    }
    core = (struct vgpu_core *)(at + page);
    core->wipes = !madvise(at, page, MADV_WIPEONFORK);
    core->cookie = (const uint64_t *)at;
    *(uint64_t *)at = 1;
    core->handle_bytes = bytes;
    core->slot = -1;
    vgpu_identify(core);
    *out = core;
    return 0;
}

int vgpu_core_open(vgpu_core **out, const char *path, int mode, uint64_t instance) {
    size_t length = strnlen(path, PATH_MAX);
    struct vgpu_core *core;
    int rc;

    *out = NULL;
    if (mode != VGPU_OPEN_READ && mode != VGPU_OPEN_CREATE) {
        return -EINVAL;
    }
    if (length == 0 || length == PATH_MAX) {
        return length ? -ENAMETOOLONG : -ENOENT;
    }
    rc = new_handle(&core);
    if (rc) {
        return rc;
    }
    memcpy(core->path, path, length + 1);
    core->read_only = mode == VGPU_OPEN_READ;
    /* -EAGAIN: the file was made, replaced or deleted meanwhile. */
    uint64_t end = vgpu_clock(CLOCK_MONOTONIC) + INIT_WAIT_NS;
    while ((rc = try_open(core, mode, instance)) == -EAGAIN && vgpu_clock(CLOCK_MONOTONIC) < end) {
        vgpu_nap(200000);
    }
    if (rc) {
        free_handle(core);
        return rc == -EAGAIN ? -EBUSY : rc;
    }
    for (int i = 0; i < VGPU_MAX_DEVICES; i++) {
        core->own[i].recorded = __atomic_load_n(&core->region->limit[i], __ATOMIC_RELAXED);
    }
    *out = core;
    return 0;
}

int vgpu_core_open_private(vgpu_core **out) {
    struct vgpu_core *core;
    int rc = new_handle(&core);

    *out = NULL;
    if (rc) {
        return rc;
    }
    core->in_memory = 1;
    core->creator = 1;
    rc = vgpu_core_map(core, -1);
    if (rc) {
        free_handle(core);
        return rc;
    }
    fill_fresh(core->region, core->ext, 0, 1);
    *out = core;
    return 0;
}

void vgpu_core_close(vgpu_core *core) {
    if (!core) {
        return;
    }
    /* In a child the region's addresses may belong to something else by now. */
    if (!vgpu_core_is_stale(core)) {
        if (core->slot >= 0) {
            vgpu_slot_wipe(core, (uint32_t)core->slot);
        }
        munmap(core->region, VGPU_REGION_SIZE);
    }
    free_handle(core);
}

int vgpu_core_is_stale(const vgpu_core *core) {
    if (core->wipes) {
        return __atomic_load_n(core->cookie, __ATOMIC_RELAXED) == 0;
    }
    return core->pid != (int32_t)getpid();
}

int vgpu_core_is_creator(const vgpu_core *core) {
    return core->creator;
}

struct vgpu_hami_region *vgpu_core_region(const vgpu_core *core) {
    return core->region;
}

struct vgpu_ext *vgpu_core_ext(const vgpu_core *core) {
    return core->ext;
}

/* ---- devices ---------------------------------------------------------------------------- */

static int find_device(const struct vgpu_core *core, const char *uuid, uint64_t *count) {
    *count = __atomic_load_n(&core->region->device_num, __ATOMIC_ACQUIRE);
    if (*count > VGPU_MAX_DEVICES) {
        *count = VGPU_MAX_DEVICES;
    }
    for (uint64_t i = 0; i < *count; i++) {
        if (!strncmp(core->region->uuids[i], uuid, VGPU_UUID_LEN)) {
            return (int)i;
        }
    }
    return -ENOENT;
}

static int add_device(struct vgpu_core *core, const char *uuid) {
    uint64_t count;
    int index = find_device(core, uuid, &count);

    if (index >= 0) {
        return index;
    }
    if (count == VGPU_MAX_DEVICES) {
        return -ENOSPC;
    }
    memset(core->region->uuids[count], 0, VGPU_UUID_LEN);
    memcpy(core->region->uuids[count], uuid, strlen(uuid));
    __atomic_store_n(&core->region->device_num, count + 1, __ATOMIC_RELEASE);
    return (int)count;
}

int vgpu_core_device(vgpu_core *core, const char *uuid, int add) {
    uint64_t count, end = 0;
    int index, fd, rc = 0;

    if (!uuid_valid(uuid)) {
        return -EINVAL;
    }
    index = find_device(core, uuid, &count);
    if (index >= 0 || !add || core->read_only) {
        return index;
    }
    vgpu_lock(&core->slow_lock);
    /* Without the file there is nobody new to race with: go on without its lock. */
    fd = core->in_memory ? -ESTALE : vgpu_core_reopen(core);
    while (fd >= 0 && rc == 0 && index < 0) {
        rc = init_lock(fd, &end);
        index = find_device(core, uuid, &count);
    }
    if (index < 0) {
        index = rc < 0 ? rc : add_device(core, uuid);
    }
    if (rc == 1) {
        vgpu_file_unlock(fd, VGPU_INIT_LOCK_AT);
    }
    if (fd >= 0) {
        close(fd);
    }
    vgpu_unlock(&core->slow_lock);
    return index;
}
