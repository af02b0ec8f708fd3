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

/* The real function, or a return when this driver has none. */
#define REAL(symbol) (real.symbol)

/* First line of every CUDA body: the driver is found, the symbol exists. */
#define NEED_CUDA(symbol)                                                          \
    do {                                                                           \
        if (UNLIKELY(!driver_ready[LIBRARY_CUDA]) && driver_find(LIBRARY_CUDA, 1)) \
            return CUDA_ERROR_NO_DEVICE;                                           \
        if (UNLIKELY(!real.symbol))                                                \
            return CUDA_ERROR_NOT_FOUND;                                           \
    } while (0)

#define NEED_NVML(symbol)                                                          \
    do {                                                                           \
        if (UNLIKELY(!driver_ready[LIBRARY_NVML]) && driver_find(LIBRARY_NVML, 1)) \
            return NVML_ERROR_LIBRARY_NOT_FOUND;                                   \
        if (UNLIKELY(!real.symbol))                                                \
            return NVML_ERROR_FUNCTION_NOT_FOUND;                                  \
    } while (0)

/* Calls the real function with re-entry marked. */
#define CALL_REAL(symbol, ...)                                                   \
    __extension__({                                                              \
        inside++;                                                                \
        __typeof__(real.symbol(__VA_ARGS__)) result_ = real.symbol(__VA_ARGS__); \
        inside--;                                                                \
        result_;                                                                 \
    })

/* Levels of LIBCUDA_LOG_LEVEL; stderr, one line, never stdout. */
enum log_level { LOG_ERROR = 1, LOG_WARNING = 2, LOG_INFO = 3, LOG_DEBUG = 4 };
void log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
