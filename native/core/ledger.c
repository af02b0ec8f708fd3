#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "core_internal.h"

/* This process's things that hold device memory. Entries lie in a pool and never move; an index of
 * eight bytes a cell, open addressing with linear probing, leads to them and stays in the cache. An
 * entry that goes closes its gap in the index by moving followers back, so there are no tombstones
 * and every operation stays O(1). Memory comes from mmap: we live under the program's allocator. */

#define FIRST_CELLS 128
#define IN_USE UINT32_MAX

struct cell {
    uint32_t hash;
    uint32_t item; /* number in the pool + 1, 0 = free */
};

/* One cache line each: among many a lookup misses once here. */
struct item {
    _Alignas(64) struct vgpu_entry entry;
    uint32_t next; /* IN_USE, or the next free item + 1 */
};

struct vgpu_ledger {
    uint32_t lock;
    uint32_t free_item; /* most recently freed item + 1, 0 = none */
    uint64_t count;
    uint64_t items; /* items ever used: the rest of the pool is untouched */
    uint64_t mask;  /* cells - 1, a power of two less one */
    struct cell *cells;
    struct item *pool; /* behind the cells, in the same mapping */
};

static uint32_t hash_of(int kind, uint64_t key) {
    uint64_t x = key ^ ((uint64_t)(uint32_t)kind * 0x9e3779b97f4a7c15ull);

    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
    return (uint32_t)(x ^ (x >> 32));
}

static uint64_t most_items(uint64_t cells) {
    return cells / 10 * 7;
}

static uint64_t bytes_for(uint64_t cells) {
    return cells * sizeof(struct cell) + most_items(cells) * sizeof(struct item);
}

static void *take_memory(uint64_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

/* The entry's cell, or the free one where it would go. */
static struct cell *find(const struct vgpu_ledger *ledger, int kind, uint64_t key) {
    uint32_t hash = hash_of(kind, key);

    for (uint64_t i = hash & ledger->mask;; i = (i + 1) & ledger->mask) {
        struct cell *cell = &ledger->cells[i];
        if (!cell->item) {
            return cell;
        }
        if (cell->hash == hash) {
            const struct vgpu_entry *entry = &ledger->pool[cell->item - 1].entry;
            if (entry->key == key && entry->kind == kind) {
                return cell;
            }
        }
    }
}

static struct vgpu_entry *entry_of(const struct vgpu_ledger *ledger, const struct cell *cell) {
    return &ledger->pool[cell->item - 1].entry;
}

static int grow(struct vgpu_ledger *ledger) {
    uint64_t cells = (ledger->mask + 1) * 2;
    struct cell *old = ledger->cells, *fresh;

    if (cells > UINT32_MAX || !(fresh = take_memory(bytes_for(cells)))) {
        return -ENOMEM;
    }
    for (uint64_t i = 0; i <= ledger->mask; i++) {
        if (old[i].item) {
            uint64_t at = old[i].hash & (cells - 1);
            while (fresh[at].item) {
                at = (at + 1) & (cells - 1);
            }
            fresh[at] = old[i];
        }
    }
    memcpy(fresh + cells, ledger->pool, ledger->items * sizeof(struct item));
    munmap(old, bytes_for(ledger->mask + 1));
    ledger->cells = fresh;
    ledger->pool = (struct item *)(fresh + cells);
    ledger->mask = cells - 1;
    return 0;
}

/* Fills a free cell; the caller has looked that the entry is absent. */
static int insert(struct vgpu_ledger *ledger, struct cell *cell, const struct vgpu_entry *entry) {
    uint32_t number = ledger->free_item;

    if (!number && ledger->items == most_items(ledger->mask + 1)) {
        if (grow(ledger)) {
            return -ENOMEM;
        }
        cell = find(ledger, entry->kind, entry->key);
    }
    if (number) {
        ledger->free_item = ledger->pool[number - 1].next;
    } else {
        number = (uint32_t)++ledger->items;
    }
    ledger->pool[number - 1].entry = *entry;
    ledger->pool[number - 1].next = IN_USE;
    cell->hash = hash_of(entry->kind, entry->key);
    cell->item = number;
    ledger->count++;
    return 0;
}

/* Frees a cell and its item, and moves back whoever probed past it. */
static void erase(struct vgpu_ledger *ledger, struct cell *cell) {
    struct cell *cells = ledger->cells;
    uint64_t mask = ledger->mask, gap = (uint64_t)(cell - cells);

    ledger->pool[cell->item - 1].next = ledger->free_item;
    ledger->free_item = cell->item;
    for (uint64_t i = (gap + 1) & mask; cells[i].item; i = (i + 1) & mask) {
        uint64_t home = cells[i].hash & mask;
        if (((i - home) & mask) >= ((i - gap) & mask)) {
            cells[gap] = cells[i];
            gap = i;
        }
    }
    cells[gap].item = 0;
    ledger->count--;
}

int vgpu_ledger_new(vgpu_ledger **out) {
    struct vgpu_ledger *ledger = take_memory(sizeof(*ledger));

    *out = NULL;
    if (!ledger) {
        return -ENOMEM;
    }
    ledger->mask = FIRST_CELLS - 1;
    ledger->cells = take_memory(bytes_for(FIRST_CELLS));
    if (!ledger->cells) {
        munmap(ledger, sizeof(*ledger));
        return -ENOMEM;
    }
    ledger->pool = (struct item *)(ledger->cells + FIRST_CELLS);
    *out = ledger;
    return 0;
}

void vgpu_ledger_free(vgpu_ledger *ledger) {
    if (ledger) {
        munmap(ledger->cells, bytes_for(ledger->mask + 1));
        munmap(ledger, sizeof(*ledger));
    }
}

int vgpu_ledger_put(vgpu_ledger *ledger, const struct vgpu_entry *entry) {
    int rc = -EEXIST;

    vgpu_lock(&ledger->lock);
    struct cell *cell = find(ledger, entry->kind, entry->key);
    if (!cell->item) {
        rc = insert(ledger, cell, entry);
    }
    vgpu_unlock(&ledger->lock);
    return rc;
}

int vgpu_ledger_take(vgpu_ledger *ledger, int kind, uint64_t key, struct vgpu_entry *out) {
    int rc = -ENOENT;

    vgpu_lock(&ledger->lock);
    struct cell *cell = find(ledger, kind, key);
    if (cell->item) {
        *out = *entry_of(ledger, cell);
        erase(ledger, cell);
        rc = 0;
    }
    vgpu_unlock(&ledger->lock);
    return rc;
}

int vgpu_ledger_take_or_get(vgpu_ledger *ledger, int kind, uint64_t key, int other_kind,
                            uint64_t other_key, struct vgpu_entry *out) {
    int rc = -ENOENT;

    vgpu_lock(&ledger->lock);
    struct cell *cell = find(ledger, kind, key);
    if (cell->item) {
        *out = *entry_of(ledger, cell);
        erase(ledger, cell);
        rc = 0;
    } else if ((cell = find(ledger, other_kind, other_key))->item) {
        *out = *entry_of(ledger, cell);
        rc = 1;
    }
    vgpu_unlock(&ledger->lock);
    return rc;
}

int vgpu_ledger_get(vgpu_ledger *ledger, int kind, uint64_t key, struct vgpu_entry *out) {
    return vgpu_ledger_add(ledger, kind, key, 0, 0, out);
}

int vgpu_ledger_add(vgpu_ledger *ledger, int kind, uint64_t key, int64_t aux, int64_t aux2,
                    struct vgpu_entry *out) {
    int rc = -ENOENT;

    vgpu_lock(&ledger->lock);
    struct cell *cell = find(ledger, kind, key);
    if (cell->item) {
        struct vgpu_entry *entry = entry_of(ledger, cell);
        entry->aux += (uint64_t)aux;
        entry->aux2 += (uint64_t)aux2;
        *out = *entry;
        rc = 0;
    }
    vgpu_unlock(&ledger->lock);
    return rc;
}

int vgpu_ledger_drop(vgpu_ledger *ledger, int kind, uint64_t key, int64_t aux, int64_t aux2,
                     struct vgpu_entry *out) {
    int rc = -ENOENT;

    vgpu_lock(&ledger->lock);
    struct cell *cell = find(ledger, kind, key);
    if (cell->item) {
        struct vgpu_entry *entry = entry_of(ledger, cell);
        entry->aux -= (uint64_t)aux;
        entry->aux2 -= (uint64_t)aux2;
        *out = *entry;
        rc = !entry->aux && !entry->aux2;
        if (rc) {
            erase(ledger, cell);
        }
    }
    vgpu_unlock(&ledger->lock);
    return rc;
}

int vgpu_ledger_ref(vgpu_ledger *ledger, int kind, uint64_t key, int device, uint64_t bytes,
                    uint64_t aux2) {
    int rc = 0;

    vgpu_lock(&ledger->lock);
    struct cell *cell = find(ledger, kind, key);
    if (cell->item) {
        entry_of(ledger, cell)->aux++;
    } else {
        struct vgpu_entry entry = {
            .key = key, .bytes = bytes, .aux = 1, .aux2 = aux2, .kind = kind, .device = device};
        rc = insert(ledger, cell, &entry);
        rc = rc ? rc : 1;
    }
    vgpu_unlock(&ledger->lock);
    return rc;
}

int vgpu_ledger_unref(vgpu_ledger *ledger, int kind, uint64_t key, struct vgpu_entry *out) {
    int rc = -ENOENT;

    vgpu_lock(&ledger->lock);
    struct cell *cell = find(ledger, kind, key);
    if (cell->item) {
        *out = *entry_of(ledger, cell);
        rc = out->aux <= 1;
        if (rc) {
            erase(ledger, cell);
        } else {
            entry_of(ledger, cell)->aux--;
        }
    }
    vgpu_unlock(&ledger->lock);
    return rc;
}

int vgpu_ledger_next(vgpu_ledger *ledger, int kind, uint64_t *cursor, struct vgpu_entry *out) {
    int rc = -ENOENT;

    vgpu_lock(&ledger->lock);
    while (rc && *cursor < ledger->items) {
        const struct item *item = &ledger->pool[(*cursor)++];
        if (item->next == IN_USE && item->entry.kind == kind) {
            *out = item->entry;
            rc = 0;
        }
    }
    vgpu_unlock(&ledger->lock);
    return rc;
}

uint64_t vgpu_ledger_count(vgpu_ledger *ledger) {
    vgpu_lock(&ledger->lock);
    uint64_t count = ledger->count;
    vgpu_unlock(&ledger->lock);
    return count;
}
