#pragma once
#include <limits.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "core.h"

/* What the core's files share; no user of core.h sees this. */

#ifndef F_OFD_GETLK
#define F_OFD_GETLK 36
#define F_OFD_SETLK 37
#endif
#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

#define VGPU_NS_PER_MS 1000000ull
#define VGPU_SWEEP_EVERY_NS (50 * VGPU_NS_PER_MS)

/* File offsets of the locked bytes. */
#define VGPU_SLOT_LOCK_AT (VGPU_EXT_OFFSET + (int64_t)offsetof(struct vgpu_ext, slot_lock))
#define VGPU_INIT_LOCK_AT (VGPU_EXT_OFFSET + (int64_t)offsetof(struct vgpu_ext, init_lock))

/* This process's own view of one device: private memory, so the tenant's file cannot change it. */
struct vgpu_own {
    uint32_t lock;      /* held for a few stores, never while waiting */
    uint64_t shadow;    /* what our quota word must hold */
    uint64_t column[3]; /* bytes by enum vgpu_kind; their sum is the granted half of shadow */
    uint64_t limit;     /* bytes, 0 = none */
    uint64_t recorded;  /* the region's limit word as we last agreed with it, 0 = not yet */
} __attribute__((aligned(64)));

struct vgpu_core {
    struct vgpu_own own[VGPU_MAX_DEVICES];
    struct vgpu_hami_region *region;
    struct vgpu_ext *ext;
    const uint64_t *cookie; /* reads 0 in a forked child */
    int32_t slot;           /* -1 = none */
    int32_t pid;
    uint8_t wipes; /* the kernel knows MADV_WIPEONFORK */
    uint8_t creator;
    uint8_t read_only;
    uint8_t in_memory;  /* no file: vgpu_core_open_private */
    uint32_t slow_lock; /* claim and device table, between threads */
    uint64_t dev;       /* identity of the mapped file */
    uint64_t ino;
    uint64_t start_time; /* of this process, as in struct vgpu_slot_info */
    uint64_t pid_ns;
    uint64_t swept_ns;    /* CLOCK_MONOTONIC_COARSE of the last sweep */
    uint64_t stuck_until; /* until then nobody waits for stuck_holder */
    uint32_t stuck_holder;
    uint64_t handle_bytes; /* of the mapping that holds this struct */
    char path[PATH_MAX];
};

static inline uint64_t vgpu_clock(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static inline void vgpu_nap(uint64_t ns) {
    struct timespec t = {0, (long)ns};
    nanosleep(&t, NULL);
}

static inline void vgpu_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Waits for a lock between threads of this process. 0 when `bound_ns` passed (0 = no bound). */
int vgpu_lock_wait(uint32_t *lock, uint64_t bound_ns);

static inline int vgpu_lock_try(uint32_t *lock) {
    uint32_t free_lock = 0;
    return __atomic_compare_exchange_n(lock, &free_lock, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

static inline void vgpu_lock(uint32_t *lock) {
    if (!vgpu_lock_try(lock)) {
        vgpu_lock_wait(lock, 0);
    }
}

static inline void vgpu_unlock(uint32_t *lock) {
    __atomic_store_n(lock, 0, __ATOMIC_RELEASE);
}

static inline uint32_t vgpu_slot_high(const struct vgpu_ext *ext) {
    uint32_t high = __atomic_load_n(&ext->slot_high, __ATOMIC_SEQ_CST);
    return high > VGPU_MAX_SLOTS ? VGPU_MAX_SLOTS : high;
}

static inline void vgpu_flag(struct vgpu_ext *ext, uint32_t flag) {
    if (!(__atomic_load_n(&ext->flags, __ATOMIC_RELAXED) & flag)) {
        __atomic_fetch_or(&ext->flags, flag, __ATOMIC_RELAXED);
    }
}

static inline int vgpu_bad_device(int device) {
    return device < 0 || device >= VGPU_MAX_DEVICES;
}

/* region.c */
int vgpu_file_open(const char *path, int flags);   /* fd of a regular file, or -errno */
int vgpu_core_map(struct vgpu_core *core, int fd); /* maps, or maps anew at the same address */

/* slot.c */
int vgpu_file_lock(int fd, int64_t at); /* OFD write lock of one byte, at once, or -errno */
void vgpu_file_unlock(int fd, int64_t at);
int vgpu_file_locked(int fd, int64_t at,
                     int64_t length);               /* 1 somebody holds a byte of it, 0, -errno */
int vgpu_core_reopen(const struct vgpu_core *core); /* fd of the mapped file, or -ESTALE ... */
void vgpu_identify(struct vgpu_core *core); /* pid, start time and PID namespace of this process */
void vgpu_slot_wipe(struct vgpu_core *core, uint32_t slot);
void vgpu_raise_slot_high(struct vgpu_ext *ext, uint32_t slot);
int vgpu_region_lock(struct vgpu_core *core); /* the settle lock: 1 held, 0 not in time */
void vgpu_region_unlock(struct vgpu_core *core);
/* Between 1/4 and all of `most` ns, different in every process and at every call. */
uint64_t vgpu_jitter(const struct vgpu_core *core, uint64_t most);
