/* Every export without behaviour: not supported, once initialised. */
#include "sim.h"

int nv_ready(void);

#define STUB(name)                                                             \
    SIM_EXPORT int name(void);                                                 \
    int name(void) {                                                           \
        int result = SIM_UNLIKELY(sim_trace_on) ? sim_trace_enter(#name) : -1; \
        if (result < 0)                                                        \
            result = nv_ready();                                               \
        result = result == 0 ? 3 : result; /* NVML_ERROR_NOT_SUPPORTED */      \
        if (SIM_UNLIKELY(sim_trace_on))                                        \
            sim_trace_leave(#name, result);                                    \
        return result;                                                         \
    }

#include "nvml_stubs.def"
