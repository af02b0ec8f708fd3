/* Open addressing, deletion by shifting back: the table of live handles, and maps of addresses. */
#include "sim_cuda.h"

#include <stdlib.h>

static size_t home(const struct cu_map *m, uint64_t key) {
    return (size_t)((key >> 4) * 0x9e3779b97f4a7c15ull >> 20) & (m->cap - 1);
}

static size_t locate(const struct cu_map *m, uint64_t key) {
    size_t i = home(m, key);
    while (m->slot[i].key && m->slot[i].key != key)
        i = (i + 1) & (m->cap - 1);
    return i;
}

static bool rehash(struct cu_map *m, size_t cap) {
    struct cu_map fresh = {calloc(cap, sizeof *m->slot), cap, m->used};
    if (!fresh.slot)
        return false;
    for (size_t i = 0; i < m->cap; i++)
        if (m->slot[i].key)
            fresh.slot[locate(&fresh, m->slot[i].key)] = m->slot[i];
    free(m->slot);
    *m = fresh;
    return true;
}

bool map_put(struct cu_map *m, uint64_t key, void *value) {
    if (m->used * 2 >= m->cap && !rehash(m, m->cap ? m->cap * 2 : 256))
        return false;
    size_t i = locate(m, key);
    m->used += m->slot[i].key == 0;
    m->slot[i].key = key;
    m->slot[i].value = value;
    return true;
}

void *map_get(const struct cu_map *m, uint64_t key) {
    return key && m->cap ? m->slot[locate(m, key)].value : NULL;
}

void map_del(struct cu_map *m, uint64_t key) {
    size_t i = m->cap ? locate(m, key) : 0, j = i;
    if (!m->cap || !m->slot[i].key)
        return;
    m->used--;
    for (;;) {
        j = (j + 1) & (m->cap - 1);
        if (!m->slot[j].key)
            break;
        size_t k = home(m, m->slot[j].key);
        if (i <= j ? (i < k && k <= j) : (i < k || k <= j))
            continue;
        m->slot[i] = m->slot[j];
        i = j;
    }
    m->slot[i].key = 0;
    m->slot[i].value = NULL;
}

/* ---- handles ---- */

static struct cu_map handles; /* value: the kind, as a pointer */
static long kind_count[K_MAX];

static enum cu_kind kind_of(const void *p) {
    return (enum cu_kind)(uintptr_t)map_get(&handles, (uint64_t)(uintptr_t)p);
}

bool cu_handle_add(const void *p, enum cu_kind kind) {
    if (!map_put(&handles, (uint64_t)(uintptr_t)p, (void *)(uintptr_t)kind))
        return false;
    kind_count[kind]++;
    return true;
}

void cu_handle_del(const void *p) {
    enum cu_kind kind = kind_of(p);
    if (kind == K_NONE)
        return;
    kind_count[kind]--;
    map_del(&handles, (uint64_t)(uintptr_t)p);
}

bool cu_handle_is(const void *p, enum cu_kind kind) {
    return p && kind_of(p) == kind;
}

long cu_handle_count(enum cu_kind kind) {
    return kind_count[kind];
}

void *cu_handle_next(enum cu_kind kind, size_t *at) {
    while (*at < handles.cap) {
        size_t i = (*at)++;
        if (handles.slot[i].key &&
            (kind == K_NONE || (enum cu_kind)(uintptr_t)handles.slot[i].value == kind))
            return (void *)(uintptr_t)handles.slot[i].key;
    }
    return NULL;
}
