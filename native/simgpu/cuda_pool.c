/* Stream-ordered pools. A pool is backed by 32 MiB pages; an allocation takes a run of addresses
 * that may lie across pages, and backs those that are not. Measured: a synchronisation of the
 * stream that freed gives back what no allocation touches, down to the threshold. */
#include "sim_cuda.h"
#include "sim_pool.h"

#include <stdlib.h>
#include <string.h>

#define SPAN (8ull << 30)
#define UNIT 512ull

static struct cu_map segments; /* address of a live allocation -> its segment */

static bool is_device(const struct cu_pool *p) {
    return p->location == CU_MEM_LOCATION_TYPE_DEVICE;
}

/* ---- pages ---- */

/* Bytes of an exported pool are carried by its shared object, so that they outlive us. */
static bool back(struct cu_pool *p, uint64_t bytes) {
    if (p->max && p->reserved + bytes > p->max)
        return false;
    if (is_device(p)) {
        bool got = sim_take(p->dom, bytes);
        if (!got && pool_trim_all(p->dom))
            got = sim_take(p->dom, bytes);
        if (!got)
            return false;
        if (p->shared >= 0) {
            atomic_fetch_add(&sim->shared[p->shared].bytes, bytes);
            sim_give(p->dom, bytes);
        }
    }
    p->reserved += bytes;
    if (p->reserved > p->reserved_high)
        p->reserved_high = p->reserved;
    return true;
}

static void unback(struct cu_pool *p, uint64_t bytes) {
    p->reserved -= bytes;
    if (!is_device(p))
        return;
    if (p->shared >= 0)
        atomic_fetch_sub(&sim->shared[p->shared].bytes, bytes);
    else
        sim_give(p->dom, bytes);
}

static void page_range(const struct segment *s, uint64_t *from, uint64_t *to) {
    *from = (s->at - s->span->rec->base) / POOL_PAGE;
    *to = (s->at - s->span->rec->base + s->size - 1) / POOL_PAGE;
}

static bool occupy(struct segment *s) {
    struct span *span = s->span;
    uint64_t from, to, missing = 0;
    page_range(s, &from, &to);
    for (uint64_t i = from; i <= to; i++)
        missing += !span->page[i].backed;
    if (missing && !back(span->pool, missing * POOL_PAGE))
        return false;
    for (uint64_t i = from; i <= to; i++) {
        span->page[i].backed = true;
        span->page[i].users++;
    }
    return true;
}

static void vacate(struct segment *s) {
    uint64_t from, to;
    page_range(s, &from, &to);
    for (uint64_t i = from; i <= to; i++)
        s->span->page[i].users--;
}

/* Gives back unused pages, from the end, while more than `keep` bytes stay reserved. */
static bool trim(struct cu_pool *p, uint64_t keep) {
    bool any = false;
    for (struct span *s = p->spans; s; s = s->next)
        for (uint64_t i = s->pages; i-- > 0;) {
            if (!s->page[i].backed || s->page[i].users)
                continue;
            if (p->reserved < keep + POOL_PAGE)
                return any;
            s->page[i].backed = false;
            unback(p, POOL_PAGE);
            any = true;
        }
    return any;
}

/* ---- addresses ---- */

static void free_link(struct span *span, struct segment *s) {
    s->free_prev = NULL;
    s->free_next = span->free;
    if (s->free_next)
        s->free_next->free_prev = s;
    span->free = s;
    s->used = false;
}

static void free_unlink(struct span *span, struct segment *s) {
    if (s->free_prev)
        s->free_prev->free_next = s->free_next;
    else
        span->free = s->free_next;
    if (s->free_next)
        s->free_next->free_prev = s->free_prev;
}

static struct span *span_new(struct cu_pool *p, uint64_t size) {
    uint64_t bytes = size > SPAN ? (size + POOL_PAGE - 1) / POOL_PAGE * POOL_PAGE : SPAN;
    struct span *s = calloc(1, sizeof *s + bytes / POOL_PAGE * sizeof *s->page);
    struct segment *all = calloc(1, sizeof *all);
    struct cu_rec *rec = cu_rec_new(R_CHUNK, p->dom, bytes);
    if (!s || !all || !rec || !va_take(rec, bytes)) {
        free(s);
        free(all);
        free(rec);
        return NULL;
    }
    rec->data = s;
    *s = (struct span){.pool = p, .rec = rec, .pages = bytes / POOL_PAGE, .first = all};
    *all = (struct segment){.span = s, .at = rec->base, .size = bytes};
    free_link(s, all);
    struct span **end = &p->spans;
    while (*end)
        end = &(*end)->next;
    *end = s;
    return s;
}

/* Lowest hole that fits, as the driver's growth shows. */
static struct segment *find_hole(struct cu_pool *p, uint64_t size) {
    for (struct span *span = p->spans; span; span = span->next) {
        struct segment *best = NULL;
        for (struct segment *s = span->free; s; s = s->free_next)
            if (s->size >= size && (!best || s->at < best->at))
                best = s;
        if (best)
            return best;
    }
    struct span *fresh = span_new(p, size);
    return fresh ? fresh->free : NULL;
}

static struct segment *carve(struct segment *hole, uint64_t size) {
    struct span *span = hole->span;
    if (hole->size > size) {
        struct segment *rest = calloc(1, sizeof *rest);
        if (!rest)
            return NULL;
        *rest = (struct segment){.span = span,
                                 .at = hole->at + size,
                                 .size = hole->size - size,
                                 .prev = hole,
                                 .next = hole->next};
        if (rest->next)
            rest->next->prev = rest;
        hole->next = rest;
        hole->size = size;
        free_link(span, rest);
    }
    free_unlink(span, hole);
    hole->used = true;
    return hole;
}

static void join(struct segment *a) {
    struct segment *b = a->next;
    if (!b || a->used || b->used)
        return;
    free_unlink(b->span, b);
    a->size += b->size;
    a->next = b->next;
    if (a->next)
        a->next->prev = a;
    free(b);
}

static void release(struct segment *s) {
    struct segment *before = s->prev;
    free_link(s->span, s);
    join(s);
    if (before && !before->used)
        join(before);
}

CUresult pool_alloc(struct cu_pool *p, size_t bytes, CUdeviceptr *out) {
    uint64_t size = (bytes + UNIT - 1) / UNIT * UNIT;
    CU_CHECK(size >= bytes && size < 1ull << 40, CUDA_ERROR_OUT_OF_MEMORY);
    struct segment *s = find_hole(p, size);
    s = s ? carve(s, size) : NULL;
    CU_CHECK(s, CUDA_ERROR_OUT_OF_MEMORY);
    if (!occupy(s)) {
        release(s);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    s->asked = bytes;
    s->id = cu_next_id();
    if (!map_put(&segments, s->at, s)) {
        vacate(s);
        release(s);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    p->live++;
    p->used += bytes;
    if (p->used > p->used_high)
        p->used_high = p->used;
    *out = s->at;
    return CUDA_SUCCESS;
}

/* ---- giving back ---- */

static void note_stream(struct cu_pool *p, uint64_t id) {
    for (int i = 0; i < p->n_freed_on; i++)
        if (p->freed_on[i] == id)
            return;
    if (p->n_freed_on < POOL_STREAMS)
        p->freed_on[p->n_freed_on++] = id;
    else
        p->freed_on_many = true;
}

static bool freed_on(const struct cu_pool *p, uint64_t id) {
    if (id == 0 || p->freed_on_many)
        return true;
    for (int i = 0; i < p->n_freed_on; i++)
        if (p->freed_on[i] == id)
            return true;
    return false;
}

void pool_end(struct cu_pool *p) {
    trim(p, 0);
    while (p->spans) {
        struct span *s = p->spans;
        p->spans = s->next;
        cu_rec_free(s->rec);
    }
    if (p->shared >= 0)
        sim_drop(p->shared);
    pool_unregister(p);
    free(p);
}

/* A destroyed pool lives on until its last allocation is freed. */
static void settle(struct cu_pool *p) {
    uint64_t keep = p->destroyed ? 0 : p->threshold;
    if (p->reserved > keep)
        trim(p, keep);
    if (p->destroyed && p->live == 0)
        pool_end(p);
}

void pool_synced(uint64_t stream_id) {
    for (struct cu_pool *p = pool_list(), *next; p; p = next) {
        next = p->next;
        if (p->imported || !freed_on(p, stream_id))
            continue;
        p->n_freed_on = 0;
        p->freed_on_many = false;
        settle(p);
    }
}

bool pool_trim_all(uint32_t dom) {
    bool any = false;
    for (struct cu_pool *p = pool_list(); p; p = p->next)
        if (p->dom == dom && !p->imported && is_device(p))
            any |= trim(p, 0);
    return any;
}

CUresult pool_free(struct cu_rec *rec, CUdeviceptr at, uint64_t stream_id, bool now) {
    struct segment *s = map_get(&segments, at);
    struct cu_pool *p = ((struct span *)rec->data)->pool;
    CU_ARG(s && s->span->rec == rec);
    map_del(&segments, at);
    vacate(s);
    p->live--;
    if (now) {
        /* Measured: cuMemFree leaves the used figure as it is, and gives back at once. */
        release(s);
        settle(p);
        return CUDA_SUCCESS;
    }
    p->used -= s->asked;
    release(s);
    note_stream(p, stream_id);
    return CUDA_SUCCESS;
}

/* ---- what others ask ---- */

static struct segment *segment_at(struct cu_rec *rec, CUdeviceptr at) {
    struct segment *s = map_get(&segments, at);
    if (s)
        return s;
    for (s = ((struct span *)rec->data)->first; s; s = s->next)
        if (at >= s->at && at - s->at < s->size)
            return s->used ? s : NULL;
    return NULL;
}

bool pool_piece(struct cu_rec *rec, CUdeviceptr at, CUdeviceptr *base, size_t *size) {
    struct segment *s = segment_at(rec, at);
    if (!s || at - s->at >= s->asked)
        return false;
    *base = s->at;
    *size = s->asked;
    return true;
}

struct cu_pool *pool_of(struct cu_rec *rec) {
    return rec->kind == R_CHUNK ? ((struct span *)rec->data)->pool : NULL;
}

void pool_span_free(struct cu_rec *rec) {
    struct span *span = rec->data;
    for (struct segment *s = span->first, *next; s; s = next) {
        next = s->next;
        if (s->used)
            map_del(&segments, s->at);
        free(s);
    }
    free(span);
}

/* Measured: nothing comes back before the streams it was freed in are synchronised. */
bool pool_trim(struct cu_pool *p, uint64_t keep) {
    if (p->n_freed_on || p->freed_on_many)
        return false;
    return trim(p, keep);
}
