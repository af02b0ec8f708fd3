#include "pool.h"

/* Synchronisation: the moment at which the driver gives unused memory of pools back. One test and a
 * jump while no pool is charged and nothing was freed in stream order. */

#define SYNC_BODY(symbol, all, params, ...)                                            \
    static __attribute__((noinline)) CUresult symbol##_slow params {                   \
        NEED_CUDA(symbol);                                                             \
        struct process *process = enter();                                             \
        CUresult result = CALL_REAL(symbol, __VA_ARGS__);                              \
        if (process)                                                                   \
            pools_synchronized(process, all);                                          \
        return result;                                                                 \
    }                                                                                  \
    CUresult symbol params {                                                           \
        if (LIKELY(!__atomic_load_n(&pools_watched, __ATOMIC_RELAXED) && real.symbol)) \
            return real.symbol(__VA_ARGS__);                                           \
        return symbol##_slow(__VA_ARGS__);                                             \
    }

SYNC_BODY(cuStreamSynchronize, false, (CUstream hStream), hStream)
SYNC_BODY(cuStreamSynchronize_ptsz, false, (CUstream hStream), hStream)
SYNC_BODY(cuEventSynchronize, false, (CUevent hEvent), hEvent)
SYNC_BODY(cuCtxSynchronize, true, (void), )
SYNC_BODY(cuCtxSynchronize_v2, false, (CUcontext ctx), ctx)
