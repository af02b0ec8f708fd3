#pragma once
#include "gpu_abi.h"

/* Expands hooks.def: ids, exported prototypes, the table of the driver's own functions; and the
 * macros every body uses. */

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#define EXPORT __attribute__((visibility("default")))
/* Reached from a preloaded library, so static TLS is there and no allocator is called. */
#define TLS __thread __attribute__((tls_model("initial-exec")))

enum hook_library { LIBRARY_CUDA, LIBRARY_NVML, LIBRARY_COUNT };

enum hook_id {
#define HOOK(library, symbol, result, params) HOOK_##symbol,
#include "hooks.def"
    HOOK_COUNT
};

#define HOOK(library, symbol, result, params) EXPORT result symbol params;
#include "hooks.def"

/* The driver's own functions; NULL where this driver has none. Complete once driver_ready. */
struct real_table {
#define HOOK(library, symbol, result, params) result(*symbol) params;
#define CALL(library, symbol, result, params) result(*symbol) params;
#include "hooks.def"
};
extern struct real_table real;
extern _Bool driver_ready[LIBRARY_COUNT];

/* Finds a library's functions, loading the library when `load` (an entry of ours was called, so
 * the program meant to use it). 0 when it is there. */
int driver_find(enum hook_library library, _Bool load);

/* Gives our body when `address` is the driver's own of a row, else `address`. */
void *driver_swap(void *address);

/* > 0 while this thread is inside a body: what the driver calls from there passes straight. */
extern TLS int inside;

/* First line of every body: the driver is found, the symbol exists. */
#define NEED(library, symbol, absent, missing)                                      \
    do {                                                                            \
        if (UNLIKELY(!__atomic_load_n(&driver_ready[library], __ATOMIC_ACQUIRE)) && \
            driver_find(library, 1))                                                \
            return absent;                                                          \
        if (UNLIKELY(!real.symbol))                                                 \
            return missing;                                                         \
    } while (0)
#define NEED_CUDA(symbol) NEED(LIBRARY_CUDA, symbol, CUDA_ERROR_NO_DEVICE, CUDA_ERROR_NOT_FOUND)
#define NEED_NVML(symbol) \
    NEED(LIBRARY_NVML, symbol, NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_FUNCTION_NOT_FOUND)

/* Calls the real function with re-entry marked. */
#define CALL_REAL(symbol, ...)                                                   \
    __extension__({                                                              \
        inside++;                                                                \
        __typeof__(real.symbol(__VA_ARGS__)) result_ = real.symbol(__VA_ARGS__); \
        inside--;                                                                \
        result_;                                                                 \
    })

/* Levels of LIBCUDA_LOG_LEVEL, 0 = silent; stderr, one line, never stdout. */
enum log_level { LOG_ERROR = 1, LOG_WARNING = 2 };
void log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
