#include "pool.h"

/* Synchronisation: the moment at which the driver gives unused memory of pools back. One test and a
 * jump while no pool is charged. */

#define SYNC_BODY(symbol, params, ...)                                                 \
    static __attribute__((noinline)) CUresult symbol##_slow params {                   \
        NEED_CUDA(symbol);                                                             \
        struct process *process = enter();                                             \
        CUresult result = CALL_REAL(symbol, __VA_ARGS__);                              \
        if (process)                                                                   \
            pools_synchronized(process);                                               \
        return result;                                                                 \
    }                                                                                  \
    CUresult symbol params {                                                           \
        if (LIKELY(!__atomic_load_n(&pools_watched, __ATOMIC_RELAXED) && real.symbol)) \
            return real.symbol(__VA_ARGS__);                                           \
        return symbol##_slow(__VA_ARGS__);                                             \
    }

SYNC_BODY(cuStreamSynchronize, (CUstream hStream), hStream)
SYNC_BODY(cuStreamSynchronize_ptsz, (CUstream hStream), hStream)
SYNC_BODY(cuEventSynchronize, (CUevent hEvent), hEvent)
SYNC_BODY(cuCtxSynchronize, (void), )
SYNC_BODY(cuCtxSynchronize_v2, (CUcontext ctx), ctx)
