#define _GNU_SOURCE
#include <errno.h>
#include <string.h>

#include "core_internal.h"

/* The arithmetic of the quota: limits, charge, give back, sums.
 *
 * Announce, then look. A process first makes its bytes visible as undecided, then adds everybody's
 * bytes up, and passes only when the sum fits.
 *
 * Never do two pass that do not fit together: announcements and the loads of a look are
 * sequentially consistent, so of two that passed one announced last, and its look saw the other's
 * bytes, either undecided or granted (one store moves them from one half of a word to the other);
 * it added them and still fitted. Taking off or giving back only ever makes a sum smaller after the
 * fact.
 *
 * One of several that could pass always does: who fails the quick way withdraws and settles, one at
 * a time under the region lock. A final refusal needs granted bytes that leave no room (then
 * somebody passed) or an announcement that is still undecided when we have withdrawn ours and look
 * again. Its owner decides after us; so the last one to decide finds nobody undecided and passes.
 *
 * Our own word is a copy of `shadow` in private memory: it is overwritten, never added to, so what
 * somebody else wrote there is gone with our next change. */

#define OWN_WAIT_NS (20 * VGPU_NS_PER_MS)
#define STEAL_AFTER_NS (1000 * VGPU_NS_PER_MS)
#define SETTLE_WAIT_NS (23 * VGPU_NS_PER_MS)
#define UNDECIDED_NS (1 * VGPU_NS_PER_MS)
#define LAST_TRIES 4

struct sums {
    uint64_t granted;   /* units, ghosts included */
    uint64_t undecided; /* units, ours included */
    uint64_t below;     /* undecided of slots before ours */
};

/* ---- limits ------------------------------------------------------------------------------ */

static int is_space(char c) {
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static int is_digit(char c) {
    return c >= '0' && c <= '9';
}

/* Takes white space off both ends. -EINVAL when that was more than one newline. */
static int trim(const char **text, const char **end) {
    int newlines = 0;

    while (*text < *end && is_space(**text)) {
        newlines += *(*text)++ == '\n';
    }
    while (*end > *text && is_space((*end)[-1])) {
        newlines += *--(*end) == '\n';
    }
    return newlines > 1 ? -EINVAL : 0;
}

/* The factor of a unit: [kmgt][i][bB], each optional, no i without a letter. 0 = malformed. */
static uint64_t unit_factor(const char *at, const char *end) {
    static const char letters[] = "kmgt";
    uint64_t factor = 1;

    if (at < end && *at != 'b' && *at != 'B') {
        const char *letter = *at ? strchr(letters, *at | 0x20) : NULL;
        if (!letter) {
            return 0;
        }
        factor = 1ull << (10 * (letter - letters + 1));
        at++;
        at += at < end && *at == 'i';
    }
    at += at < end && (*at == 'b' || *at == 'B');
    return at == end ? factor : 0;
}

int vgpu_limit_parse(const char *text, uint64_t length, uint64_t *bytes) {
    const char *end = text + length, *whole, *fraction, *unit;
    uint64_t factor, value = 0, part = 0;
    int over = 0;

    if (trim(&text, &end)) {
        return -EINVAL;
    }
    if (text == end) {
        return -ENODATA;
    }
    whole = text;
    while (text < end && is_digit(*text)) {
        over |= __builtin_mul_overflow(value, 10ull, &value);
        over |= __builtin_add_overflow(value, (uint64_t)(*text++ - '0'), &value);
    }
    unit = fraction = text;
    if (text < end && *text == '.') {
        fraction = ++text;
        while (text < end && is_digit(*text)) {
            text++;
        }
        if (text == fraction) {
            return -EINVAL;
        }
        unit = text;
    }
    factor = unit_factor(unit, end);
    if (whole == text || !is_digit(*whole) || !factor) {
        return -EINVAL;
    }
    /* From the last digit on: exact for any number of them, since floors nest. */
    while (text > fraction) {
        part = (part + (uint64_t)(*--text - '0') * factor) / 10;
    }
    over |= __builtin_mul_overflow(value, factor, &value);
    over |= __builtin_add_overflow(value, part, &value);
    if (over || value > INT64_MAX) {
        return -ERANGE;
    }
    if (value < VGPU_LIMIT_MIN) {
        return -EINVAL;
    }
    *bytes = value;
    return 0;
}

void vgpu_core_set_limit(vgpu_core *core, int device, uint64_t bytes) {
    if (!vgpu_bad_device(device)) {
        __atomic_store_n(&core->own[device].limit, bytes, __ATOMIC_RELAXED);
    }
}

/* A recorded limit that other processes of the container hold is no news: only a change since we
 * agreed with it is, and only one that would lift ours. */
static uint64_t limit_of(vgpu_core *core, int device) {
    uint64_t own = __atomic_load_n(&core->own[device].limit, __ATOMIC_RELAXED);
    uint64_t found = __atomic_load_n(&core->region->limit[device], __ATOMIC_RELAXED);

    if (__builtin_expect(found == own, 1)) {
        return own;
    }
    if (found && (!own || found < own)) {
        return found;
    }
    uint64_t agreed = __atomic_load_n(&core->own[device].recorded, __ATOMIC_RELAXED);
    if (agreed && found != agreed && !core->read_only) {
        vgpu_flag(core->ext, VGPU_FLAG_TAMPERED);
    }
    return own;
}

uint64_t vgpu_core_limit(vgpu_core *core, int device) {
    return vgpu_bad_device(device) ? 0 : limit_of(core, device);
}

void vgpu_core_record_limit(vgpu_core *core, int device, uint64_t bytes) {
    uint64_t found = 0;

    if (vgpu_bad_device(device) || core->read_only) {
        return;
    }
    if (__atomic_compare_exchange_n(&core->region->limit[device], &found, bytes, 0,
                                    __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        found = bytes;
    }
    __atomic_store_n(&core->own[device].recorded, found, __ATOMIC_RELAXED);
}

/* ---- own word ---------------------------------------------------------------------------- */

static inline uint64_t shadow_of(const struct vgpu_own *own) {
    return __atomic_load_n(&own->shadow, __ATOMIC_RELAXED);
}

/* Under own->lock. `announce`: everybody's look that comes after ours sees it. */
static inline void publish(struct vgpu_core *core, int device, uint64_t shadow, int announce) {
    struct vgpu_own *own = &core->own[device];
    uint32_t slot = (uint32_t)core->slot;
    uint64_t *word = &core->ext->word[device][slot];

    if (__builtin_expect(__atomic_load_n(word, __ATOMIC_RELAXED) != own->shadow, 0)) {
        vgpu_flag(core->ext, VGPU_FLAG_TAMPERED);
    }
    if (__builtin_expect(vgpu_slot_high(core->ext) <= slot, 0)) {
        vgpu_flag(core->ext, VGPU_FLAG_TAMPERED);
        vgpu_raise_slot_high(core->ext, slot);
    }
    __atomic_store_n(&own->shadow, shadow, __ATOMIC_RELAXED);
    if (announce) {
        __atomic_exchange_n(word, shadow, __ATOMIC_SEQ_CST);
    } else {
        __atomic_store_n(word, shadow, __ATOMIC_RELEASE);
    }
}

/* Under own->lock: shows the columns in HAMi's part. */
static inline void show(struct vgpu_core *core, int device) {
    struct vgpu_own *own = &core->own[device];
    struct vgpu_hami_memory *used = &core->region->procs[core->slot].used[device];

    __atomic_store_n(&used->data_size, own->column[VGPU_KIND_DATA], __ATOMIC_RELAXED);
    __atomic_store_n(&used->context_size, own->column[VGPU_KIND_CONTEXT], __ATOMIC_RELAXED);
    __atomic_store_n(&used->module_size, own->column[VGPU_KIND_MODULE], __ATOMIC_RELAXED);
    __atomic_store_n(&used->total, (uint64_t)(uint32_t)own->shadow * VGPU_UNIT, __ATOMIC_RELAXED);
}

static inline int column_of(int kind) {
    return kind == VGPU_KIND_CONTEXT || kind == VGPU_KIND_MODULE ? kind : VGPU_KIND_DATA;
}

/* Takes `bytes` off the column of `kind`, the rest off the others: the sum must stay the total. */
static void column_take(struct vgpu_own *own, int kind, uint64_t bytes) {
    for (int i = 0; i < 3 && bytes; i++) {
        uint64_t *column = &own->column[(kind + i) % 3];
        uint64_t part = bytes < *column ? bytes : *column;
        *column -= part;
        bytes -= part;
    }
}

static inline uint64_t units_of(uint64_t bytes) {
    return bytes / VGPU_UNIT + (bytes % VGPU_UNIT != 0);
}

/* How much may still be added before a half of the word runs over. */
static inline uint64_t headroom(uint64_t shadow) {
    uint64_t held = (shadow >> 32) + (uint32_t)shadow;
    return held < UINT32_MAX ? UINT32_MAX - held : 0;
}

static inline int own_lock(struct vgpu_own *own) {
    return __builtin_expect(vgpu_lock_try(&own->lock), 1) ||
           vgpu_lock_wait(&own->lock, OWN_WAIT_NS);
}

/* For changes that must happen: a holder that is not back after a second was cancelled. */
static inline void own_lock_surely(struct vgpu_own *own) {
    if (__builtin_expect(!vgpu_lock_try(&own->lock), 0)) {
        (void)vgpu_lock_wait(&own->lock, STEAL_AFTER_NS);
    }
}

static inline int announce(struct vgpu_core *core, int device, uint64_t units) {
    struct vgpu_own *own = &core->own[device];
    int done = 0;

    if (own_lock(own)) {
        done = units <= headroom(own->shadow);
        if (done) {
            publish(core, device, own->shadow + (units << 32), 1);
        }
        vgpu_unlock(&own->lock);
    }
    return done ? 0 : -ENOMEM;
}

static void withdraw(struct vgpu_core *core, int device, uint64_t units) {
    struct vgpu_own *own = &core->own[device];

    own_lock_surely(own);
    publish(core, device, own->shadow - (units << 32), 1);
    vgpu_unlock(&own->lock);
}

/* Announced bytes become granted in one store. */
static inline void grant(struct vgpu_core *core, int device, uint64_t units, int kind) {
    struct vgpu_own *own = &core->own[device];

    own_lock_surely(own);
    own->column[kind] += units * VGPU_UNIT;
    publish(core, device, own->shadow - (units << 32) + units, 0);
    show(core, device);
    vgpu_unlock(&own->lock);
}

/* Without asking. Past what a word can hold (16 TiB) it stays at the most. */
static void grant_forced(struct vgpu_core *core, int device, uint64_t units, int kind) {
    struct vgpu_own *own = &core->own[device];

    own_lock_surely(own);
    if (units > headroom(own->shadow)) {
        units = headroom(own->shadow);
    }
    own->column[kind] += units * VGPU_UNIT;
    publish(core, device, own->shadow + units, 1);
    show(core, device);
    vgpu_unlock(&own->lock);
}

/* ---- looking ----------------------------------------------------------------------------- */

static inline void add_words(const uint64_t *from, const uint64_t *to, struct sums *sums) {
    uint64_t granted = 0, undecided = 0;

    for (; from < to; from++) {
        uint64_t word = __atomic_load_n(from, __ATOMIC_SEQ_CST);
        granted += (uint32_t)word;
        undecided += word >> 32;
    }
    sums->granted += granted;
    sums->undecided += undecided;
}

/* One pass over everybody. Our own part is the shadow, which nobody else can write. */
static inline struct sums look(const struct vgpu_core *core, int device) {
    const uint64_t *words = core->ext->word[device];
    uint32_t high = vgpu_slot_high(core->ext);
    uint32_t slot = core->slot < 0 ? high : (uint32_t)core->slot;
    struct sums sums = {0, 0, 0};

    sums.granted = units_of(__atomic_load_n(&core->ext->ghost[device], __ATOMIC_RELAXED));
    add_words(words, words + (slot < high ? slot : high), &sums);
    sums.below = sums.undecided;
    if (slot + 1 < high) {
        add_words(words + slot + 1, words + high, &sums);
    }
    if (core->slot >= 0) {
        uint64_t shadow = shadow_of(&core->own[device]);
        sums.granted += (uint32_t)shadow;
        sums.undecided += shadow >> 32;
    }
    return sums;
}

static inline void note_peak(struct vgpu_core *core, int device, const struct sums *sums) {
    uint64_t bytes = (sums->granted + sums->undecided) * VGPU_UNIT;

    if (bytes > __atomic_load_n(&core->ext->peak[device], __ATOMIC_RELAXED)) {
        __atomic_store_n(&core->ext->peak[device], bytes, __ATOMIC_RELAXED);
    }
}

/* ---- settling ---------------------------------------------------------------------------- */

/* Announces and waits until others have decided, at most UNDECIDED_NS; after that their bytes count
 * as granted. 0; -ENOMEM granted bytes leave no room; -EAGAIN others stay undecided. Without the
 * lock only the lowest slot waits, the others make way at once. */
static int decide(struct vgpu_core *core, int device, uint64_t units, uint64_t room, int locked) {
    uint64_t end = vgpu_clock(CLOCK_MONOTONIC) + UNDECIDED_NS;

    if (announce(core, device, units)) {
        return -ENOMEM;
    }
    for (unsigned turn = 0;; turn++) {
        int late = vgpu_clock(CLOCK_MONOTONIC) >= end; /* before the look: the last one counts */
        struct sums sums = look(core, device);
        if (sums.granted + sums.undecided <= room) {
            note_peak(core, device, &sums);
            return 0;
        }
        if (sums.granted + units > room || late || (!locked && sums.below)) {
            withdraw(core, device, units);
            return sums.granted + units > room ? -ENOMEM : -EAGAIN;
        }
        if (turn < 20) {
            vgpu_pause();
        } else {
            sched_yield(); /* the undecided one may need this processor */
        }
    }
}

/* After withdrawing: nobody undecided and room enough, so all who met gave way to each other. */
static int worth_another(struct vgpu_core *core, int device, uint64_t units, uint64_t room) {
    struct sums sums = look(core, device);
    return sums.granted + sums.undecided + units <= room;
}

static int settle(struct vgpu_core *core, int device, uint64_t units, uint64_t room,
                  uint64_t start) {
    int locked = vgpu_region_lock(core);
    int tries = 0;
    int rc;

    for (;;) {
        rc = decide(core, device, units, room, locked);
        if (rc != -EAGAIN) {
            break;
        }
        int late = vgpu_clock(CLOCK_MONOTONIC) - start >= SETTLE_WAIT_NS;
        if ((locked || late) &&
            (tries++ >= LAST_TRIES || !worth_another(core, device, units, room))) {
            break;
        }
        if (!locked) {
            vgpu_nap(vgpu_jitter(core, late ? 100000 : 400000));
        }
    }
    if (locked) {
        vgpu_region_unlock(core);
    }
    return rc;
}

/* ---- charge ------------------------------------------------------------------------------ */

void vgpu_refused(vgpu_core *core, int device, uint64_t bytes) {
    struct vgpu_ext *ext = core->ext;

    if (vgpu_bad_device(device)) {
        return;
    }
    __atomic_fetch_add(&ext->refused[device], 1, __ATOMIC_RELAXED);
    __atomic_store_n(&ext->refused_bytes[device], bytes, __ATOMIC_RELAXED);
    __atomic_store_n(&ext->refused_last_ns[device], vgpu_clock(CLOCK_REALTIME_COARSE),
                     __ATOMIC_RELAXED);
}

/* Announced on success, not yet granted. */
static int pass(struct vgpu_core *core, int device, uint64_t units, uint64_t room) {
    uint64_t start = 0;

    for (int again = 0;; again = 1) {
        struct sums sums = look(core, device);
        if (sums.granted + units <= room) {
            if (announce(core, device, units)) {
                return -ENOMEM;
            }
            sums = look(core, device);
            if (__builtin_expect(sums.granted + sums.undecided <= room, 1)) {
                note_peak(core, device, &sums);
                return 0;
            }
            withdraw(core, device, units);
            start = start ? start : vgpu_clock(CLOCK_MONOTONIC);
            if (!settle(core, device, units, room, start)) {
                return 0;
            }
        }
        if (again || !vgpu_core_sweep(core, 0)) {
            return -ENOMEM;
        }
    }
}

int vgpu_charge_quietly(vgpu_core *core, int device, uint64_t bytes, int kind) {
    uint64_t units = units_of(bytes);
    uint64_t limit;

    if (vgpu_bad_device(device)) {
        return -EINVAL;
    }
    if (core->slot < 0) {
        return -EBADF;
    }
    limit = limit_of(core, device);
    if (limit == 0) {
        /* What a word cannot hold no card has; cut short it would be given back in full. */
        if (units > headroom(shadow_of(&core->own[device]))) {
            return -ENOMEM;
        }
        grant_forced(core, device, units, column_of(kind));
        return 0;
    }
    if (units > limit / VGPU_UNIT || units > UINT32_MAX ||
        pass(core, device, units, limit / VGPU_UNIT)) {
        return -ENOMEM;
    }
    grant(core, device, units, column_of(kind));
    return 0;
}

int vgpu_charge(vgpu_core *core, int device, uint64_t bytes, int kind) {
    int rc = vgpu_charge_quietly(core, device, bytes, kind);

    if (rc == -ENOMEM) {
        vgpu_refused(core, device, bytes);
    }
    return rc;
}

void vgpu_charge_forced(vgpu_core *core, int device, uint64_t bytes, int kind) {
    if (!vgpu_bad_device(device) && core->slot >= 0) {
        grant_forced(core, device, units_of(bytes), column_of(kind));
        struct sums sums = look(core, device);
        note_peak(core, device, &sums);
    }
}

void vgpu_give_back(vgpu_core *core, int device, uint64_t bytes, int kind) {
    uint64_t units = units_of(bytes);
    int clamped = 0;

    if (vgpu_bad_device(device) || core->slot < 0) {
        return;
    }
    struct vgpu_own *own = &core->own[device];
    own_lock_surely(own);
    if (units > (uint32_t)own->shadow) {
        units = (uint32_t)own->shadow;
        clamped = 1;
    }
    column_take(own, column_of(kind), units * VGPU_UNIT);
    publish(core, device, own->shadow - units, 0);
    show(core, device);
    vgpu_unlock(&own->lock);
    if (clamped) {
        __atomic_fetch_add(&core->ext->clamped, 1, __ATOMIC_RELAXED);
    }
}

/* ---- sums -------------------------------------------------------------------------------- */

static uint64_t bytes_of(uint64_t units) {
    return units > UINT64_MAX / VGPU_UNIT ? UINT64_MAX : units * VGPU_UNIT;
}

uint64_t vgpu_used(vgpu_core *core, int device) {
    if (vgpu_bad_device(device)) {
        return 0;
    }
    vgpu_core_sweep(core, 0);
    return bytes_of(look(core, device).granted);
}

uint64_t vgpu_used_roughly(vgpu_core *core, int device) {
    if (vgpu_bad_device(device)) {
        return 0;
    }
    struct sums sums = look(core, device);
    return bytes_of(sums.granted + sums.undecided);
}

uint64_t vgpu_used_own(const vgpu_core *core, int device) {
    return vgpu_bad_device(device) ? 0 : bytes_of((uint32_t)shadow_of(&core->own[device]));
}

uint64_t vgpu_used_slot(const vgpu_core *core, int slot, int device) {
    if (vgpu_bad_device(device) || slot < 0 || slot >= VGPU_MAX_SLOTS ||
        !__atomic_load_n(&core->region->procs[slot].pid, __ATOMIC_RELAXED)) {
        return 0;
    }
    return bytes_of((uint32_t)__atomic_load_n(&core->ext->word[device][slot], __ATOMIC_RELAXED));
}
