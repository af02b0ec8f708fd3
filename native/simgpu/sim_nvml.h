/* Library-local side of the simulated NVML. */
#pragma once

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>

#include "sim.h"

/* NV_API(name, (parameters), (arguments)) { body }: as SIM_API, for NVML. The body runs only
 * while the library is initialised and not made to fail; NV_FREE runs always. */
#define NV_API(name, params, args) NV_DEFINE(name, params, args, nv_ready())
#define NV_FREE(name, params, args) NV_DEFINE(name, params, args, NVML_SUCCESS)
#define NV_DEFINE(name, params, args, ready)                                  \
    nvmlReturn_t name##_body params;                                          \
    SIM_EXPORT nvmlReturn_t name params {                                     \
        int fault = SIM_UNLIKELY(sim_trace_on) ? sim_trace_enter(#name) : -1; \
        nvmlReturn_t result = fault >= 0 ? (nvmlReturn_t)fault : ready;       \
        if (fault < 0 && result == NVML_SUCCESS)                              \
            result = name##_body args;                                        \
        if (SIM_UNLIKELY(sim_trace_on))                                       \
            sim_trace_leave(#name, (long)result);                             \
        return result;                                                        \
    }                                                                         \
    nvmlReturn_t name##_body params

#define NV_CHECK(condition, error) \
    do {                           \
        if (!(condition))          \
            return error;          \
    } while (0)
#define NV_ARG(condition) NV_CHECK(condition, NVML_ERROR_INVALID_ARGUMENT)
#define NV_DEVICE(device, dom)            \
    struct sim_dom *dom = nv_dom(device); \
    NV_ARG(dom)

nvmlReturn_t nv_ready(void);
struct sim_dom *nv_dom(nvmlDevice_t device); /* NULL for a wrong handle */
uint32_t nv_index(const struct sim_dom *dom);
nvmlDevice_t nv_handle(uint32_t dom);
uint64_t nv_init_time(void);
nvmlReturn_t nv_text(const char *text, char *out, unsigned length);
