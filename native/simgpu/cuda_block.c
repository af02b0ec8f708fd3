/* Requests up to 2 MiB share 2 MiB blocks; a piece never crosses a block's end, and the block goes
 * back when its last piece does. Measured: own growth is exactly 2 MiB x the distinct
 * address >> 21, also where a piece fits into what one above 1 MiB leaves. */
#include "sim_cuda.h"

#include <stdlib.h>
#include <string.h>

#define UNIT 512u
#define UNITS 4096u /* of one block */

struct cu_block {
    struct cu_rec *rec;
    struct cu_block *next, *prev; /* among the context's blocks with room */
    bool listed;
    int group;
    uint32_t pieces, max_run; /* no free run is longer than max_run units */
    uint64_t busy[UNITS / 64];
    uint32_t asked[UNITS]; /* bytes of the piece that starts at this unit */
};

static void list(struct cu_ctx *ctx, struct cu_block *b) {
    if (b->listed)
        return;
    b->prev = NULL;
    b->next = ctx->partial[b->group];
    if (b->next)
        b->next->prev = b;
    ctx->partial[b->group] = b;
    b->listed = true;
}

static void unlist(struct cu_ctx *ctx, struct cu_block *b) {
    if (!b->listed)
        return;
    if (b->prev)
        b->prev->next = b->next;
    else
        ctx->partial[b->group] = b->next;
    if (b->next)
        b->next->prev = b->prev;
    b->listed = false;
}

static void mark(struct cu_block *b, uint32_t from, uint32_t count, bool busy) {
    while (count) {
        uint32_t word = from / 64, bit = from % 64, n = 64 - bit < count ? 64 - bit : count;
        uint64_t mask = (n == 64 ? ~0ull : (1ull << n) - 1) << bit;
        if (busy)
            b->busy[word] |= mask;
        else
            b->busy[word] &= ~mask;
        from += n;
        count -= n;
    }
}

/* First run of `need` free units, or UNITS; full and empty words are skipped whole. */
static uint32_t find_run(struct cu_block *b, uint32_t need) {
    uint32_t run = 0, longest = 0;
    for (uint32_t i = 0; i < UNITS;) {
        uint64_t w = b->busy[i / 64] >> (i % 64);
        uint32_t left = 64 - i % 64;
        uint32_t n;
        if (w & 1) {
            n = ~w ? (uint32_t)__builtin_ctzll(~w) : 64;
            run = 0;
        } else {
            n = w ? (uint32_t)__builtin_ctzll(w) : 64;
        }
        n = n < left ? n : left;
        if (!(w & 1)) {
            run += n;
            if (run >= need)
                return i + n - run;
            longest = run > longest ? run : longest;
        }
        i += n;
    }
    b->max_run = longest;
    return UNITS;
}

static struct cu_block *block_new(struct cu_ctx *ctx, int group) {
    struct cu_block *b = calloc(1, sizeof *b);
    struct cu_rec *rec = cu_rec_new(R_BLOCK, ctx->dom, SIM_GRANULE);
    if (!b || !rec || !cu_take(ctx->dom, SIM_GRANULE)) {
        free(b);
        free(rec);
        return NULL;
    }
    rec->physical = SIM_GRANULE;
    rec->block = b;
    if (!va_take(rec, SIM_GRANULE)) {
        sim_give(ctx->dom, SIM_GRANULE);
        free(b);
        free(rec);
        return NULL;
    }
    b->rec = rec;
    b->group = group;
    b->max_run = UNITS;
    cu_rec_link(ctx, rec);
    list(ctx, b);
    return b;
}

CUresult block_alloc(struct cu_ctx *ctx, int group, size_t bytes, CUdeviceptr *out) {
    uint32_t need = (uint32_t)((bytes + UNIT - 1) / UNIT), at = UNITS;
    struct cu_block *b = ctx->partial[group];
    for (int tries = 0; b && tries < 64; b = b->next, tries++) {
        if (b->max_run < need)
            continue;
        at = find_run(b, need);
        if (at < UNITS)
            break;
    }
    if (at == UNITS) {
        b = block_new(ctx, group);
        CU_CHECK(b, CUDA_ERROR_OUT_OF_MEMORY);
        at = 0;
    }
    mark(b, at, need, true);
    b->asked[at] = (uint32_t)bytes;
    b->pieces++;
    if (find_run(b, 1) == UNITS)
        unlist(ctx, b);
    *out = b->rec->base + (uint64_t)at * UNIT;
    return CUDA_SUCCESS;
}

bool block_piece(struct cu_rec *rec, CUdeviceptr p, CUdeviceptr *base, size_t *size) {
    struct cu_block *b = rec->block;
    for (uint32_t i = (uint32_t)((p - rec->base) / UNIT) + 1; i-- > 0;) {
        if (!b->asked[i])
            continue;
        *base = rec->base + (uint64_t)i * UNIT;
        *size = b->asked[i];
        return p - *base < (*size + UNIT - 1) / UNIT * UNIT;
    }
    return false;
}

bool block_free(struct cu_rec *rec, CUdeviceptr p) {
    struct cu_block *b = rec->block;
    uint64_t offset = p - rec->base;
    uint32_t at = (uint32_t)(offset / UNIT);
    if (offset % UNIT || !b->asked[at])
        return false;
    mark(b, at, (b->asked[at] + UNIT - 1) / UNIT, false);
    b->asked[at] = 0;
    b->max_run = UNITS;
    if (--b->pieces == 0)
        cu_rec_free(rec);
    else
        list(rec->ctx, b);
    return true;
}

void block_drop(struct cu_rec *rec) {
    unlist(rec->ctx, rec->block);
    free(rec->block);
}

long block_pieces(const struct cu_rec *rec) {
    return rec->block->pieces;
}
