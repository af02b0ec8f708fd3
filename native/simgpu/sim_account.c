/* The physical ledger: who holds how many bytes of which memory domain. */
#define _GNU_SOURCE
#include "sim.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#ifndef F_OFD_SETLK
#define F_OFD_GETLK 36
#define F_OFD_SETLK 37
#endif

#define LOCK_SHARED ((1ll << 40) + 65536)
#define SETTLE_US 2000 /* how long the lowest slot waits for others that are undecided */

/* A process holds an object once, however often it refers to it. */
static uint32_t local_refs[SIM_OBJS];

static uint64_t shared_bytes(uint32_t dom) {
    uint64_t sum = 0;
    uint32_t high = atomic_load_explicit(&sim->objs_high, memory_order_acquire);
    for (uint32_t o = 0; o < high; o++)
        if (atomic_load(&sim->shared[o].state) == SIM_OBJ_LIVE && sim->shared[o].dom == dom)
            sum += atomic_load(&sim->shared[o].bytes);
    return sum;
}

static uint64_t granted(uint32_t dom) {
    uint64_t sum = 0;
    uint32_t high = atomic_load_explicit(&sim->slots_high, memory_order_acquire);
    for (uint32_t i = 0; i < high; i++)
        sum += atomic_load_explicit(&sim->used[dom][i], memory_order_acquire) +
               atomic_load_explicit(&sim->managed[dom][i], memory_order_acquire);
    return sum + shared_bytes(dom);
}

uint64_t sim_dom_used(uint32_t dom) {
    uint64_t sum = granted(dom);
    for (uint32_t d = 0; d < sim->doms; d++)
        if (sim->dom[d].parent == (int32_t)dom)
            sum += granted(d);
    return sum;
}

static bool holds(struct sim_shared *s, int slot) {
    return slot >= 0 && (atomic_load(&s->holders[slot / 64]) >> (slot % 64) & 1);
}

static int lowest_holder(struct sim_shared *s) {
    for (int i = 0; i < SIM_SLOTS; i++)
        if (holds(s, i))
            return i;
    return -1;
}

/* Measured: the maker shows the bytes while it holds them; then nobody while a descriptor is
 * open, then an importer. An imported pool is never shown. */
static int shown_by(int index) {
    struct sim_shared *s = &sim->shared[index];
    int owner = atomic_load(&s->owner);
    if (holds(s, owner))
        return owner;
    if (s->kind == SIM_SHARED_POOL)
        return -1;
    int fd = sim_open();
    struct flock l = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = LOCK_SHARED + index, .l_len = 1};
    bool open_fd = fd >= 0 && fcntl(fd, F_OFD_GETLK, &l) == 0 && l.l_type != F_UNLCK;
    if (fd >= 0)
        close(fd);
    return open_fd ? -1 : lowest_holder(s);
}

uint64_t sim_slot_used(uint32_t dom, int slot) {
    uint64_t sum = atomic_load(&sim->used[dom][slot]);
    uint32_t high = atomic_load(&sim->objs_high);
    for (uint32_t o = 0; o < high; o++)
        if (atomic_load(&sim->shared[o].state) == SIM_OBJ_LIVE && sim->shared[o].dom == dom &&
            shown_by((int)o) == slot)
            sum += atomic_load(&sim->shared[o].bytes);
    return sum;
}

/* Others that have announced but not decided; *lower says whether one of them goes before us. */
static uint64_t undecided(uint32_t dom, bool *lower) {
    uint64_t sum = 0;
    *lower = false;
    uint32_t high = atomic_load(&sim->slots_high);
    for (uint32_t i = 0; i < high; i++) {
        uint64_t p = (int)i == sim_self ? 0 : atomic_load(&sim->pending[dom][i]);
        sum += p;
        *lower |= p && (int)i < sim_self;
    }
    return sum;
}

/* Announce, then look. Two that fit only one at a time both see each other: the lower slot keeps
 * its announcement and waits, the others withdraw and look again once it has decided. */
static bool take(uint32_t dom, uint64_t bytes, _Atomic uint64_t *into) {
    uint64_t cap = sim->dom[dom].cuda_total;
    _Atomic uint64_t *pending = &sim->pending[dom][sim_self];
    uint64_t deadline = 0;
    bool swept = false;
    if (bytes > cap)
        return false;
    for (;;) {
        bool lower;
        atomic_store(pending, bytes);
        uint64_t others = undecided(dom, &lower); /* before `granted`: a move is then seen twice */
        uint64_t sure = granted(dom) + bytes;
        if (sure + others <= cap) {
            atomic_fetch_add(into, bytes);
            atomic_store(pending, 0);
            return true;
        }
        if (sure <= cap) {
            uint64_t now = sim_now_us();
            if (!deadline)
                deadline = now + SETTLE_US;
            if (now < deadline) {
                if (lower)
                    atomic_store(pending, 0);
                sched_yield();
                continue;
            }
        }
        atomic_store(pending, 0);
        if (swept)
            return false;
        swept = true;
        deadline = 0;
        sim_sweep();
    }
}

bool sim_take(uint32_t dom, uint64_t bytes) {
    return bytes == 0 || take(dom, bytes, &sim->used[dom][sim_self]);
}

void sim_give(uint32_t dom, uint64_t bytes) {
    atomic_fetch_sub(&sim->used[dom][sim_self], bytes);
}

bool sim_take_managed(uint32_t dom, uint64_t bytes) {
    return bytes == 0 || take(dom, bytes, &sim->managed[dom][sim_self]);
}

void sim_give_managed(uint32_t dom, uint64_t bytes) {
    atomic_fetch_sub(&sim->managed[dom][sim_self], bytes);
}

static int lock_shared(int fd, int index, short type) {
    struct flock l = {
        .l_type = type, .l_whence = SEEK_SET, .l_start = LOCK_SHARED + index, .l_len = 1};
    return fcntl(fd, F_OFD_SETLK, &l) < 0 ? -errno : 0;
}

static bool held(struct sim_shared *s) {
    for (int w = 0; w < SIM_SLOTS / 64; w++)
        if (atomic_load(&s->holders[w]))
            return true;
    return false;
}

static bool have_bytes(uint32_t dom) {
    return sim_self >= 0 && dom < sim->doms;
}

/* Turns bytes that this process already holds into an object that others can hold too. */
int sim_share(uint32_t dom, uint64_t bytes, uint32_t kind) {
    if (!have_bytes(dom))
        return -1;
    for (int o = 0; o < SIM_OBJS; o++) {
        struct sim_shared *s = &sim->shared[o];
        uint32_t expect = SIM_OBJ_FREE;
        /* The claimant's slot is part of the word, so that its death can be seen. */
        if (!atomic_compare_exchange_strong(&s->state, &expect,
                                            SIM_OBJ_CLAIMED | (uint32_t)sim_self << 8))
            continue;
        s->dom = dom;
        s->kind = kind;
        atomic_store(&s->bytes, bytes);
        atomic_store(&s->owner, sim_self);
        atomic_store(&s->gen, atomic_fetch_add(&sim->next_gen, 1));
        for (int w = 0; w < SIM_SLOTS / 64; w++)
            atomic_store(&s->holders[w], 0);
        atomic_store(&s->holders[sim_self / 64], 1ull << (sim_self % 64));
        uint32_t high = atomic_load(&sim->objs_high);
        while (high < (uint32_t)o + 1 &&
               !atomic_compare_exchange_weak(&sim->objs_high, &high, (uint32_t)o + 1))
            ;
        atomic_store(&s->state, SIM_OBJ_LIVE);
        sim_give(dom, bytes);
        local_refs[o] = 1;
        return o;
    }
    return -1;
}

bool sim_hold(int index, uint64_t gen) {
    if (index < 0 || index >= SIM_OBJS || sim_self < 0)
        return false;
    struct sim_shared *s = &sim->shared[index];
    uint64_t bit = 1ull << (sim_self % 64);
    uint64_t before = atomic_fetch_or(&s->holders[sim_self / 64], bit);
    for (int tries = 0; tries < 1000; tries++) {
        if (atomic_load(&s->state) == SIM_OBJ_LIVE && (!gen || atomic_load(&s->gen) == gen)) {
            local_refs[index]++;
            return true;
        }
        sched_yield();
    }
    if (!(before & bit))
        atomic_fetch_and(&s->holders[sim_self / 64], ~bit);
    return false;
}

/* Frees an object that neither a process nor a descriptor holds. The intermediate state makes a
 * late sim_hold either visible here or unsuccessful there. */
static void free_unheld(int fd, int index) {
    struct sim_shared *s = &sim->shared[index];
    uint32_t expect = SIM_OBJ_LIVE;
    if (held(s) || lock_shared(fd, index, F_WRLCK) < 0)
        return;
    uint32_t mine = SIM_OBJ_CLAIMED | (uint32_t)(sim_self < 0 ? SIM_SLOTS : sim_self) << 8;
    if (atomic_compare_exchange_strong(&s->state, &expect, mine))
        atomic_store(&s->state, held(s) ? SIM_OBJ_LIVE : SIM_OBJ_FREE);
    lock_shared(fd, index, F_UNLCK);
}

void sim_drop(int index) {
    struct sim_shared *s = &sim->shared[index];
    if (local_refs[index] && --local_refs[index])
        return;
    atomic_fetch_and(&s->holders[sim_self / 64], ~(1ull << (sim_self % 64)));
    int fd = held(s) ? -1 : sim_open();
    if (fd < 0)
        return;
    free_unheld(fd, index);
    close(fd);
}

void sim_sweep_shared(int fd) {
    uint32_t high = atomic_load(&sim->objs_high);
    for (uint32_t o = 0; o < high; o++) {
        uint32_t state = atomic_load(&sim->shared[o].state);
        uint32_t slot = state >> 8;
        if (state == SIM_OBJ_LIVE)
            free_unheld(fd, (int)o);
        else if (state != SIM_OBJ_FREE && slot < SIM_SLOTS &&
                 atomic_load(&sim->slot[slot].state) == SIM_SLOT_FREE)
            atomic_compare_exchange_strong(&sim->shared[o].state, &state, SIM_OBJ_FREE);
    }
}

int sim_share_fd(int index) {
    int fd = sim_open();
    if (fd < 0)
        return fd;
    int rc = lock_shared(fd, index, F_RDLCK);
    if (!rc && lseek(fd, LOCK_SHARED + index, SEEK_SET) < 0)
        rc = -errno;
    if (rc) {
        close(fd);
        return rc;
    }
    return fd;
}

int sim_share_from_fd(int fd) {
    off_t at = lseek(fd, 0, SEEK_CUR);
    if (at < LOCK_SHARED || at >= LOCK_SHARED + SIM_OBJS)
        return -1;
    int index = (int)(at - LOCK_SHARED);
    return atomic_load(&sim->shared[index].state) == SIM_OBJ_LIVE ? index : -1;
}
