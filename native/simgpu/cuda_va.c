/* Device addresses. Class k hands out slots of 2 MiB << k from a range of its own, so an address
 * leads to its record by arithmetic, and a freed address is the next to be handed out again. */
#include "sim_cuda.h"

#include <stdlib.h>
#include <string.h>

#define LOW_BASE 0x40000000ull
#define LOW_SLOTS 1024 /* of 2 MiB: 1 to 3 GiB */

struct va_class {
    struct cu_rec **rec;
    uint32_t *free;
    uint32_t used, n_free, cap, free_cap;
};

static struct va_class classes[VA_CLASSES];
static struct cu_rec *low[LOW_SLOTS];
static struct cu_rec **host; /* sorted by address */
static size_t n_host, cap_host;

static bool grow(void *array, uint32_t *cap, uint32_t need, size_t item) {
    if (need <= *cap)
        return true;
    uint32_t to = *cap ? *cap * 2 : 64;
    void *p = realloc(*(void **)array, to * item);
    if (!p)
        return false;
    *(void **)array = p;
    *cap = to;
    return true;
}

bool va_take(struct cu_rec *rec, size_t size) {
    unsigned k = 0;
    while (k < VA_CLASSES && size > (size_t)SIM_GRANULE << k)
        k++;
    if (k == VA_CLASSES)
        return false;
    struct va_class *c = &classes[k];
    uint32_t slot;
    if (c->n_free) {
        slot = c->free[--c->n_free];
    } else {
        if ((uint64_t)(c->used + 1) << (21 + k) > 1ull << VA_CLASS_BITS ||
            !grow(&c->rec, &c->cap, c->used + 1, sizeof *c->rec))
            return false;
        slot = c->used++;
    }
    c->rec[slot] = rec;
    rec->base = VA_BASE + ((uint64_t)k << VA_CLASS_BITS) + ((uint64_t)slot << (21 + k));
    rec->owned_va = true;
    return true;
}

bool va_take_low(struct cu_rec *rec, size_t size) {
    uint32_t need = (uint32_t)((size + SIM_GRANULE - 1) / SIM_GRANULE), run = 0;
    for (uint32_t i = 0; i < LOW_SLOTS; i++) {
        run = low[i] ? 0 : run + 1;
        if (run < need)
            continue;
        for (uint32_t j = i + 1 - need; j <= i; j++)
            low[j] = rec;
        rec->base = LOW_BASE + (uint64_t)(i + 1 - need) * SIM_GRANULE;
        rec->owned_va = true;
        return true;
    }
    return false;
}

void va_put(struct cu_rec *rec) {
    if (!rec->owned_va)
        return;
    rec->owned_va = false;
    if (rec->base < VA_BASE) {
        for (uint32_t i = 0; i < LOW_SLOTS; i++)
            if (low[i] == rec)
                low[i] = NULL;
        return;
    }
    unsigned k = (unsigned)((rec->base - VA_BASE) >> VA_CLASS_BITS);
    struct va_class *c = &classes[k];
    uint32_t slot = (uint32_t)(((rec->base - VA_BASE) & ((1ull << VA_CLASS_BITS) - 1)) >> (21 + k));
    c->rec[slot] = NULL;
    if (grow(&c->free, &c->free_cap, c->n_free + 1, sizeof *c->free))
        c->free[c->n_free++] = slot;
}

static size_t host_after(CUdeviceptr p) {
    size_t lo = 0, hi = n_host;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (host[mid]->base <= p)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

void va_host_add(struct cu_rec *rec) {
    if (n_host == cap_host) {
        size_t to = cap_host ? cap_host * 2 : 64;
        struct cu_rec **p = realloc(host, to * sizeof *p);
        if (!p)
            abort();
        host = p;
        cap_host = to;
    }
    size_t at = host_after(rec->base);
    memmove(host + at + 1, host + at, (n_host - at) * sizeof *host);
    host[at] = rec;
    n_host++;
}

void va_host_del(struct cu_rec *rec) {
    size_t at = host_after(rec->base);
    if (at == 0 || host[at - 1] != rec)
        return;
    memmove(host + at - 1, host + at, (n_host - at) * sizeof *host);
    n_host--;
}

struct cu_rec *va_find(CUdeviceptr p) {
    struct cu_rec *r = NULL;
    if (p >= VA_BASE && p < VA_BASE + ((uint64_t)VA_CLASSES << VA_CLASS_BITS)) {
        unsigned k = (unsigned)((p - VA_BASE) >> VA_CLASS_BITS);
        uint64_t slot = ((p - VA_BASE) & ((1ull << VA_CLASS_BITS) - 1)) >> (21 + k);
        r = slot < classes[k].used ? classes[k].rec[slot] : NULL;
    } else if (p >= LOW_BASE && p < LOW_BASE + LOW_SLOTS * SIM_GRANULE) {
        r = low[(p - LOW_BASE) / SIM_GRANULE];
    }
    if (!r) {
        size_t at = host_after(p);
        r = at ? host[at - 1] : NULL;
    }
    return r && p >= r->base && p - r->base < (r->size ? r->size : 1) ? r : NULL;
}

/* Position: classes first, then low memory, then host memory. */
struct cu_rec *va_next(size_t *at) {
    size_t i = *at;
    for (int k = 0; k < VA_CLASSES; k++) {
        for (; i < classes[k].used; i++, ++*at)
            if (classes[k].rec[i]) {
                ++*at;
                return classes[k].rec[i];
            }
        i -= classes[k].used;
    }
    if (i < n_host) {
        ++*at;
        return host[i];
    }
    return NULL;
}
