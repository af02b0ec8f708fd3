#pragma once
#include <stdint.h>
#include "region.h"

/* The quota of one container, seen from one process: a GPU-free, environment-free library.
 * Functions return 0 or a negative errno and never log. All are safe from several threads
 * unless they say otherwise; none may be called in a forked child with the parent's handle
 * (vgpu_core_is_stale tells). Devices are indices 0..VGPU_MAX_DEVICES-1 of the region. */

typedef struct vgpu_core vgpu_core;
typedef struct vgpu_ledger vgpu_ledger;

/* What a charge is for; the column of vgpu_hami_memory it is shown in. */
enum vgpu_kind { VGPU_KIND_DATA = 0, VGPU_KIND_CONTEXT = 1, VGPU_KIND_MODULE = 2 };

/* How to open a region. */
enum vgpu_open_mode {
    VGPU_OPEN_READ = 0,   /* must exist and be ours; no slot */
    VGPU_OPEN_CREATE = 1, /* make it, or bring a HAMi-core file up to our layout; no slot yet */
};

/* ---- limits -------------------------------------------------------------------------- */

/* A limit under this is a unit mistake. */
#define VGPU_LIMIT_MIN 67108864

/* Parses a limit: decimal digits with an optional fraction ("1.5g"), optional k m g t (either
 * case, powers of 1024), optional i, optional b or B; white space around and one newline are
 * ignored. `length` bytes at `text`, which may hold NULs (malformed).
 * 0 and *bytes set; -ENODATA empty; -EINVAL malformed, zero, negative or under VGPU_LIMIT_MIN;
 * -ERANGE over 2^63-1. */
int vgpu_limit_parse(const char *text, uint64_t length, uint64_t *bytes);

/* ---- region -------------------------------------------------------------------------- */

/* Opens (and with VGPU_OPEN_CREATE makes) the region file at `path`. `instance` names this run
 * of the container, 0 = unknown: a file with another instance and no live slot loses its recorded
 * limits. Limits and uuids of a HAMi-core 1.1 or 1.2 file are kept.
 * Every wait is bounded (1 s).
 * 0; -ENOENT no file (READ) or no directory; -EACCES, -EROFS, -ENOSPC, -ELOOP, -EISDIR ... from
 * the system; -EBADF not a region; -EPROTO a region of a version we cannot share;
 * -EBUSY somebody holds the initialisation lock too long. */
int vgpu_core_open(vgpu_core **out, const char *path, int mode, uint64_t instance);

/* As vgpu_core_open with CREATE, in memory of this process alone (tests, no file possible). */
int vgpu_core_open_private(vgpu_core **out);

/* Unmaps; gives the slot up. Not thread-safe. */
void vgpu_core_close(vgpu_core *core);

/* 1 in a child of fork that inherited the handle: it must open a handle of its own. */
int vgpu_core_is_stale(const vgpu_core *core);

/* 1 when this call made (or re-made) the file. */
int vgpu_core_is_creator(const vgpu_core *core);

/* The mapped region, for readers of single words. */
struct vgpu_hami_region *vgpu_core_region(const vgpu_core *core);
struct vgpu_ext *vgpu_core_ext(const vgpu_core *core);

/* Takes a slot for this process and keeps it while the mapping lives. 0; -EUSERS all are live;
 * -EALREADY it has one; -EBADF opened to read; -ESTALE the file is no longer at its path. */
int vgpu_core_claim(vgpu_core *core);

/* The slot, or -1. */
int vgpu_core_slot(const vgpu_core *core);

/* Index of the device with this UUID, adding it when `add`. -ENOENT; -ENOSPC more than
 * VGPU_MAX_DEVICES; -EINVAL malformed uuid. */
int vgpu_core_device(vgpu_core *core, const char *uuid, int add);

/* Sets this process's limit in bytes, 0 = none; the authority for its own charges. */
void vgpu_core_set_limit(vgpu_core *core, int device, uint64_t bytes);

/* min(own limit, lower value recorded in the region); 0 = no limit; with no own limit the recorded
 * one. A higher or zero value that replaced the one recorded is ignored and flagged as tampered. */
uint64_t vgpu_core_limit(vgpu_core *core, int device);

/* Records a limit in the region where none is recorded yet (first process of the container). */
void vgpu_core_record_limit(vgpu_core *core, int device, uint64_t bytes);

/* Frees the slots of dead processes, at most every 50 ms unless `force`. Number freed. */
int vgpu_core_sweep(vgpu_core *core, int force);

/* Tells all processes of the container that memory may have changed hands (ext.stirred). */
void vgpu_core_stir(vgpu_core *core);

/* 1 when slot `slot` belongs to a live process. Costs system calls. */
int vgpu_core_slot_live(vgpu_core *core, int slot);

/* ---- quota --------------------------------------------------------------------------- */

/* Charges `bytes` (rounded up to VGPU_UNIT) on `device`, before the driver is asked. 0, or
 * -ENOMEM: refused, nothing changed. Needs a slot (-EBADF). With no limit only what no card has
 * (16 TiB) is refused.
 * A refusal counts in ext.refused. Wait bounded to 25 ms. */
int vgpu_charge(vgpu_core *core, int device, uint64_t bytes, int kind);

/* As vgpu_charge, where more can be tried before a refusal is final: it is not counted. */
int vgpu_charge_quietly(vgpu_core *core, int device, uint64_t bytes, int kind);

/* Counts a refusal of `bytes` that followed such tries. */
void vgpu_refused(vgpu_core *core, int device, uint64_t bytes);

/* Charges what the driver already holds and cannot be undone; may go past the limit. */
void vgpu_charge_forced(vgpu_core *core, int device, uint64_t bytes, int kind);

/* Gives back. More than this process holds is clamped and counted in ext.clamped. */
void vgpu_give_back(vgpu_core *core, int device, uint64_t bytes, int kind);

/* Bytes granted on `device` to all processes of the container, ghosts included; sweeps the dead
 * first (rate-limited). */
uint64_t vgpu_used(vgpu_core *core, int device);

/* As vgpu_used, without looking for the dead and with what is being asked for: no system call, never
 * too low. */
uint64_t vgpu_used_roughly(vgpu_core *core, int device);

/* Bytes granted to this process. */
uint64_t vgpu_used_own(const vgpu_core *core, int device);

/* Bytes granted to the process in `slot` (0 when the slot is free). */
uint64_t vgpu_used_slot(const vgpu_core *core, int slot, int device);

/* ---- ledger -------------------------------------------------------------------------- */

/* One thing of this process that holds or will hold device memory. (kind, key) is unique. */
struct vgpu_entry {
    uint64_t key;   /* pointer, handle, block number ... */
    uint64_t bytes; /* charged for it */
    uint64_t aux;   /* meaning by kind: count, size, other key */
    uint64_t aux2;
    int32_t kind; /* the caller's enum */
    int32_t device;
};

int vgpu_ledger_new(vgpu_ledger **out);
void vgpu_ledger_free(vgpu_ledger *ledger);

/* Adds. -EEXIST leaves the old entry; -ENOMEM. */
int vgpu_ledger_put(vgpu_ledger *ledger, const struct vgpu_entry *entry);
/* Removes and copies out. -ENOENT. */
int vgpu_ledger_take(vgpu_ledger *ledger, int kind, uint64_t key, struct vgpu_entry *out);
/* Removes (kind, key) and copies it out: 0. Where it is absent, copies the other one out: 1. -ENOENT. */
int vgpu_ledger_take_or_get(vgpu_ledger *ledger, int kind, uint64_t key, int other_kind,
                            uint64_t other_key, struct vgpu_entry *out);
/* Copies out. -ENOENT. */
int vgpu_ledger_get(vgpu_ledger *ledger, int kind, uint64_t key, struct vgpu_entry *out);
/* Adds to aux and aux2 of an entry in one step and copies the result out. -ENOENT. */
int vgpu_ledger_add(vgpu_ledger *ledger, int kind, uint64_t key, int64_t aux, int64_t aux2,
                    struct vgpu_entry *out);
/* Takes off aux and aux2 in one step and copies the result out; the entry goes when both are 0.
 * Returns 1 when it went, 0 when not; -ENOENT. */
int vgpu_ledger_drop(vgpu_ledger *ledger, int kind, uint64_t key, int64_t aux, int64_t aux2,
                     struct vgpu_entry *out);
/* Counts a piece into entry (kind, key), adding the entry (aux = 0) when absent: aux += 1.
 * Returns 1 when it was absent, 0 when not; -ENOMEM. */
int vgpu_ledger_ref(vgpu_ledger *ledger, int kind, uint64_t key, int device, uint64_t bytes,
                    uint64_t aux2);
/* Counts a piece out; the entry, copied out as it was, goes with the last. Returns 1 when it was the
 * last, 0 when not; -ENOENT. */
int vgpu_ledger_unref(vgpu_ledger *ledger, int kind, uint64_t key, struct vgpu_entry *out);
/* Walks: copies out the first entry of `kind` at or after *cursor and moves *cursor behind it.
 * -ENOENT at the end. Entries added or taken meanwhile may be missed or seen twice. */
int vgpu_ledger_next(vgpu_ledger *ledger, int kind, uint64_t *cursor, struct vgpu_entry *out);
uint64_t vgpu_ledger_count(vgpu_ledger *ledger);
