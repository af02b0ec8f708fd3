#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "core_internal.h"

/* This process's things that hold device memory: open addressing with linear probing. An entry that
 * goes closes its gap by moving followers back, so there are no tombstones and every operation stays
 * O(1). Memory comes from mmap: we live under the program's allocator. */

#define FIRST_CELLS 64

struct cell {
    struct vgpu_entry entry;
    uint64_t hash; /* 0 = free */
};

struct vgpu_ledger {
    uint32_t lock;
    uint64_t count;
    uint64_t mask; /* cells - 1, a power of two less one */
    struct cell *cells;
};

static uint64_t hash_of(int kind, uint64_t key)
{
    uint64_t x = key ^ ((uint64_t)(uint32_t)kind * 0x9e3779b97f4a7c15ull);

    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
    return (x ^ (x >> 32)) | 1ull << 63;
}

static void *take_memory(uint64_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

/* The entry's cell, or the free one where it would go. */
static struct cell *find(const struct vgpu_ledger *ledger, int kind, uint64_t key)
{
    uint64_t hash = hash_of(kind, key);

    for (uint64_t i = hash & ledger->mask;; i = (i + 1) & ledger->mask) {
        struct cell *cell = &ledger->cells[i];
        if (!cell->hash ||
            (cell->hash == hash && cell->entry.key == key && cell->entry.kind == kind)) {
            return cell;
        }
    }
}

static int grow(struct vgpu_ledger *ledger)
{
    uint64_t cells = (ledger->mask + 1) * 2;
    struct cell *old = ledger->cells, *fresh = take_memory(cells * sizeof(struct cell));

    if (!fresh) {
        return -ENOMEM;
    }
    for (uint64_t i = 0; i <= ledger->mask; i++) {
        if (old[i].hash) {
            uint64_t at = old[i].hash & (cells - 1);
            while (fresh[at].hash) {
                at = (at + 1) & (cells - 1);
            }
            fresh[at] = old[i];
        }
    }
    munmap(old, (ledger->mask + 1) * sizeof(struct cell));
    ledger->cells = fresh;
    ledger->mask = cells - 1;
    return 0;
}

/* Fills a free cell; the caller has looked that the entry is absent. */
static int insert(struct vgpu_ledger *ledger, struct cell *cell, const struct vgpu_entry *entry)
{
    if ((ledger->count + 1) * 10 > (ledger->mask + 1) * 7) {
        /* Without memory the old table does until it is nearly full. */
        if (grow(ledger) && ledger->count + 1 > ledger->mask) {
            return -ENOMEM;
        }
        cell = find(ledger, entry->kind, entry->key);
    }
    cell->entry = *entry;
    cell->hash = hash_of(entry->kind, entry->key);
    ledger->count++;
    return 0;
}

/* Frees a cell and moves back whoever probed past it. */
static void erase(struct vgpu_ledger *ledger, struct cell *cell)
{
    struct cell *cells = ledger->cells;
    uint64_t mask = ledger->mask, gap = (uint64_t)(cell - cells);

    for (uint64_t i = (gap + 1) & mask; cells[i].hash; i = (i + 1) & mask) {
        uint64_t home = cells[i].hash & mask;
        if (((i - home) & mask) >= ((i - gap) & mask)) {
            cells[gap] = cells[i];
            gap = i;
        }
    }
    cells[gap].hash = 0;
    ledger->count--;
}

int vgpu_ledger_new(vgpu_ledger **out)
{
    struct vgpu_ledger *ledger = take_memory(sizeof(*ledger));

    *out = NULL;
    if (!ledger) {
        return -ENOMEM;
    }
    ledger->mask = FIRST_CELLS - 1;
    ledger->cells = take_memory(FIRST_CELLS * sizeof(struct cell));
    if (!ledger->cells) {
        munmap(ledger, sizeof(*ledger));
        return -ENOMEM;
    }
    *out = ledger;
    return 0;
}

void vgpu_ledger_free(vgpu_ledger *ledger)
{
    if (ledger) {
        munmap(ledger->cells, (ledger->mask + 1) * sizeof(struct cell));
        munmap(ledger, sizeof(*ledger));
    }
}

int vgpu_ledger_put(vgpu_ledger *ledger, const struct vgpu_entry *entry)
{
    int rc = -EEXIST;

    vgpu_lock(&ledger->lock);
    struct cell *cell = find(ledger, entry->kind, entry->key);
    if (!cell->hash) {
        rc = insert(ledger, cell, entry);
    }
    vgpu_unlock(&ledger->lock);
    return rc;
}

int vgpu_ledger_take(vgpu_ledger *ledger, int kind, uint64_t key, struct vgpu_entry *out)
{
    int rc = -ENOENT;

    vgpu_lock(&ledger->lock);
    struct cell *cell = find(ledger, kind, key);
    if (cell->hash) {
        *out = cell->entry;
        erase(ledger, cell);
        rc = 0;
    }
    vgpu_unlock(&ledger->lock);
    return rc;
}

int vgpu_ledger_get(vgpu_ledger *ledger, int kind, uint64_t key, struct vgpu_entry *out)
{
    return vgpu_ledger_add(ledger, kind, key, 0, 0, out);
}

int vgpu_ledger_add(vgpu_ledger *ledger, int kind, uint64_t key, int64_t aux, int64_t aux2,
                    struct vgpu_entry *out)
{
    int rc = -ENOENT;

    vgpu_lock(&ledger->lock);
    struct cell *cell = find(ledger, kind, key);
    if (cell->hash) {
        cell->entry.aux += (uint64_t)aux;
        cell->entry.aux2 += (uint64_t)aux2;
        *out = cell->entry;
        rc = 0;
    }
    vgpu_unlock(&ledger->lock);
    return rc;
}

int vgpu_ledger_ref(vgpu_ledger *ledger, int kind, uint64_t key, int device, uint64_t bytes)
{
    int rc = 0;

    vgpu_lock(&ledger->lock);
    struct cell *cell = find(ledger, kind, key);
    if (cell->hash) {
        cell->entry.aux++;
    } else {
        struct vgpu_entry entry = {
            .key = key, .bytes = bytes, .aux = 1, .kind = kind, .device = device};
        rc = insert(ledger, cell, &entry);
        rc = rc ? rc : 1;
    }
    vgpu_unlock(&ledger->lock);
    return rc;
}

int vgpu_ledger_unref(vgpu_ledger *ledger, int kind, uint64_t key, struct vgpu_entry *out)
{
    int rc = -ENOENT;

    vgpu_lock(&ledger->lock);
    struct cell *cell = find(ledger, kind, key);
    if (cell->hash) {
        rc = cell->entry.aux <= 1;
        if (rc) {
            *out = cell->entry;
            erase(ledger, cell);
        } else {
            cell->entry.aux--;
        }
    }
    vgpu_unlock(&ledger->lock);
    return rc;
}

int vgpu_ledger_next(vgpu_ledger *ledger, int kind, uint64_t *cursor, struct vgpu_entry *out)
{
    int rc = -ENOENT;

    vgpu_lock(&ledger->lock);
    while (rc && *cursor <= ledger->mask) {
        const struct cell *cell = &ledger->cells[(*cursor)++];
        if (cell->hash && cell->entry.kind == kind) {
            *out = cell->entry;
            rc = 0;
        }
    }
    vgpu_unlock(&ledger->lock);
    return rc;
}

uint64_t vgpu_ledger_count(vgpu_ledger *ledger)
{
    vgpu_lock(&ledger->lock);
    uint64_t count = ledger->count;
    vgpu_unlock(&ledger->lock);
    return count;
}
