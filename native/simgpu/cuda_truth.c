/* For tests: what this process has on its devices. */
#include "sim_cuda.h"
#include "sim_pool.h"

SIM_EXPORT long simgpu_live_objects(void);

/* Handles of each kind, contexts included, and allocations: pieces count, not the blocks, pages and
 * spans that hold them. */
long simgpu_live_objects(void) {
    size_t at = 0;
    long n = 0;
    struct cu_rec *rec;
    cu_lock();
    for (int k = 0; k < K_MAX; k++)
        n += cu_handle_count((enum cu_kind)k);
    while ((rec = va_next(&at)))
        n += rec->kind == R_BLOCK ? block_pieces(rec) : rec->kind != R_CHUNK;
    for (struct cu_pool *p = pool_list(); p; p = p->next)
        n += p->imported ? 0 : p->live;
    cu_unlock();
    return n;
}
