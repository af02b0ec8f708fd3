#pragma once
#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A lock between threads of this process. Not a pthread one: in images before glibc 2.34 that would
 * bring libpthread into every program of the container, and with it another program.
 *
 * Order, outermost first: a device's context_lock, settle_lock, pool_lock, device_lock, then the
 * core's own. The driver may be called under any of them: what it calls from there passes
 * straight. */
struct lock {
    uint32_t word; /* 0 free, 1 held, 2 held and waited for */
};

static inline void lock_take(struct lock *lock) {
    uint32_t seen = 0;
    if (__builtin_expect(__atomic_compare_exchange_n(&lock->word, &seen, 1, 0, __ATOMIC_ACQUIRE,
                                                     __ATOMIC_RELAXED),
                         1))
        return;
    while (__atomic_exchange_n(&lock->word, 2, __ATOMIC_ACQUIRE))
        (void)syscall(SYS_futex, &lock->word, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
}

static inline void lock_leave(struct lock *lock) {
    if (__builtin_expect(__atomic_exchange_n(&lock->word, 0, __ATOMIC_RELEASE) == 2, 0))
        (void)syscall(SYS_futex, &lock->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}
