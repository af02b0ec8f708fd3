/* Process-local side of the simulated CUDA driver. Everything below is guarded by one recursive
 * lock, which the API wrapper takes around each body. */
#pragma once

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include "sim.h"

/* SIM_API(name, (parameters), (arguments)) { body }
 * exports `name` with the prototype of cuda.h and makes it traceable; NAME_body is the bare body.
 * SIM_API_NEW is the same for names younger than CUDA 11.1, which the old build must not show. */
#define SIM_API(name, params, args) SIM_DEFINE(SIM_EXPORT, name, params, args)
#ifdef SIM_OLD_DRIVER
#define SIM_API_NEW(name, params, args)                                                            \
    SIM_DEFINE(__attribute__((visibility("hidden"), used)), name, params, args)
#define SIM_DRIVER_MAX 11010
#else
#define SIM_API_NEW(name, params, args) SIM_API(name, params, args)
#define SIM_DRIVER_MAX 1000000
#endif
#define SIM_DEFINE(vis, name, params, args)                                                        \
    CUresult name##_body params;                                                                   \
    SIM_WRAP(vis, name, name, params, args)                                                        \
    CUresult name##_body params
#define SIM_WRAP(vis, name, body, params, args)                                                    \
    vis CUresult name params {                                                                     \
        CUresult result;                                                                           \
        int fault = SIM_UNLIKELY(sim_trace_on) ? sim_trace_enter(#name) : -1;                      \
        if (fault >= 0) {                                                                          \
            result = (CUresult)fault;                                                              \
        } else {                                                                                   \
            cu_lock();                                                                             \
            result = body##_body args;                                                             \
            cu_unlock();                                                                           \
        }                                                                                          \
        if (SIM_UNLIKELY(sim_trace_on))                                                            \
            sim_trace_leave(#name, (long)result);                                                  \
        return result;                                                                             \
    }                                                                                              \
    SIM_SELF(name)
/* Our own address of an export, also while an interposer exports the same name. */
#define SIM_SELF(name)                                                                             \
    extern __typeof__(name) name##_self __attribute__((alias(#name), visibility("hidden")));
/* A further export of its own identity with the body of another. */
#define SIM_TWIN(name, body, params, args)                                                         \
    CUresult name params;                                                                          \
    SIM_WRAP(SIM_EXPORT, name, body, params, args)
#ifdef SIM_OLD_DRIVER
#define SIM_TWIN_NEW(name, body, params, args)                                                     \
    CUresult name params;                                                                          \
    SIM_WRAP(__attribute__((visibility("hidden"), used)), name, body, params, args)
#else
#define SIM_TWIN_NEW(name, body, params, args) SIM_TWIN(name, body, params, args)
#endif

void cu_lock(void);
void cu_unlock(void);

#define CU_TRY(expr)                                                                               \
    do {                                                                                           \
        CUresult try_result = (expr);                                                              \
        if (try_result != CUDA_SUCCESS)                                                            \
            return try_result;                                                                     \
    } while (0)
#define CU_CHECK(condition, error)                                                                 \
    do {                                                                                           \
        if (!(condition))                                                                          \
            return error;                                                                          \
    } while (0)
#define CU_ARG(condition) CU_CHECK(condition, CUDA_ERROR_INVALID_VALUE)

enum cu_kind {
    K_NONE,
    K_CONTEXT,
    K_GREEN,
    K_STREAM,
    K_EVENT,
    K_MODULE,
    K_LIBRARY,
    K_KERNEL,
    K_FUNCTION,
    K_POOL,
    K_ARRAY,
    K_MIPMAP,
    K_GRAPH,
    K_NODE,
    K_EXEC,
    K_EXTMEM,
    K_LINK,
    K_TEX,
    K_USEROBJ,
    K_MAX
};

/* Handles are addresses of structs; a table of the live ones tells wrong ones without touching
 * them. */
bool cu_handle_add(const void *p, enum cu_kind kind);
void cu_handle_del(const void *p);
bool cu_handle_is(const void *p, enum cu_kind kind);
long cu_handle_count(enum cu_kind kind);
/* The next live handle at or after *at; NULL at the end. Start again after any change. */
void *cu_handle_next(enum cu_kind kind, size_t *at);

/* What an address range is. */
enum rec_kind {
    R_ALLOC,    /* cuMemAlloc above 1 MiB, pitch */
    R_BLOCK,    /* 2 MiB shared by pieces up to 1 MiB */
    R_CHUNK,    /* part of a pool */
    R_RESERVED, /* cuMemAddressReserve */
    R_IPC,      /* opened from another process */
    R_EXTERNAL, /* buffer mapped from external memory */
    R_GRAPH,    /* graph memory node */
    R_IMAGE,    /* globals of a module */
    R_HOST,     /* real host memory, page-locked */
    R_MANAGED,  /* real host memory, page-wise charged when touched */
};

struct cu_ctx;
struct cu_pool;
struct cu_block;

/* Every handle's struct starts with this. */
struct cu_obj {
    struct cu_ctx *ctx;       /* it dies with this context; NULL if with none */
    void (*destroy)(void *p); /* frees p and gives its memory back */
};

struct cu_rec {
    enum rec_kind kind;
    bool owned_va; /* the address comes from va_take */
    bool pool_exported;
    uint32_t dom;
    CUdeviceptr base;
    size_t size;     /* as asked for */
    size_t physical; /* charged to this process, unless shared >= 0 */
    int shared;      /* index of the shared object that carries the bytes, else -1 */
    uint64_t id;
    unsigned flags;
    struct cu_ctx *ctx; /* NULL for memory of no context */
    struct cu_rec *next, *prev; /* all of one context */
    union {
        struct cu_block *block;
        struct cu_pool *pool;
        void *data;
    };
};

/* cuda_va.c: addresses. Size classes of their own, so that any address leads to its record. */
#define VA_BASE 0x100000000000ull
#define VA_CLASS_BITS 42 /* 4 TiB a class */
#define VA_CLASSES 20    /* slots of 2 MiB << class */
bool va_take(struct cu_rec *rec, size_t size);
bool va_take_low(struct cu_rec *rec, size_t size); /* below 4 GiB, for the 32-bit entry points */
void va_put(struct cu_rec *rec);
void va_host_add(struct cu_rec *rec);
void va_host_del(struct cu_rec *rec);
struct cu_rec *va_find(CUdeviceptr p); /* the record that covers p, or NULL */
long va_count(void);

struct cu_device {
    uint32_t dom;
    struct cu_ctx *primary; /* the struct, kept so that the handle stays the same */
    unsigned primary_refs, primary_flags;
    struct cu_pool *default_pool, *current_pool;
    struct cu_pool *graph_pool;
};
extern struct cu_device cu_devs[SIM_DEVS];
extern int cu_ndevs;

struct cu_ctx {
    struct cu_obj obj;
    uint32_t dom;
    int dev;
    bool primary;
    struct cu_green *green;
    unsigned flags, api_version;
    unsigned long long id;
    size_t charged;         /* the context itself */
    size_t lmem_per_thread; /* 1 KiB is part of the context */
    size_t lmem_charged, heap_charged, fifo_charged;
    size_t limit[CU_LIMIT_MAX];
    struct cu_rec *recs;
    struct cu_block *partial; /* blocks with room */
    long streams;
    size_t stream_charged;
    unsigned legacy_refs;
    struct cu_stream *null_stream[3];
    CUfunc_cache cache;
};

extern uint64_t cu_alive_gen;
CUresult cu_ready(void);              /* NOT_INITIALIZED, or success */
CUresult cu_current(struct cu_ctx **out); /* INVALID_CONTEXT, or the thread's context */
CUresult cu_device_of(CUdevice dev, struct cu_device **out);
CUresult cu_ctx_start(struct cu_ctx *ctx, int dev, unsigned flags); /* takes its memory */
void cu_ctx_stop(struct cu_ctx *ctx); /* ends all that lives in it */
CUresult cu_push(struct cu_ctx *ctx);
int cu_dev_of_dom(uint32_t dom);
uint64_t cu_next_id(void);

/* cuda_memory.c */
struct cu_rec *cu_rec_new(enum rec_kind kind, uint32_t dom, size_t size);
void cu_rec_link(struct cu_ctx *ctx, struct cu_rec *rec);
void cu_rec_free(struct cu_rec *rec); /* returns bytes and address */
CUresult cu_alloc(struct cu_ctx *ctx, size_t bytes, bool low, CUdeviceptr *out);
CUresult cu_free(CUdeviceptr p);
size_t cu_physical(size_t bytes); /* whole granules */
bool cu_whole(CUdeviceptr p, CUdeviceptr *base, size_t *size); /* the allocation around p */
bool cu_range_ok(CUdeviceptr p, size_t bytes);
void cu_touch(CUdeviceptr p, size_t bytes); /* managed pages come to the device */

struct cu_rec *cu_rec_take(enum rec_kind kind, struct cu_ctx *ctx, size_t bytes, bool low);
int cu_driver_version(void);

/* cuda_host.c, cuda_pool.c, cuda_vmm.c: their parts of the above */
void cu_host_release(struct cu_rec *rec);
CUresult pool_free(struct cu_rec *rec, CUdeviceptr p);
bool pool_piece(struct cu_rec *rec, CUdeviceptr p, CUdeviceptr *base, size_t *size);
bool vmm_piece(struct cu_rec *rec, CUdeviceptr p, CUdeviceptr *base, size_t *size);

/* cuda_block.c: pieces up to 1 MiB */
#define PIECE_MAX SIM_MIB
bool block_alloc(struct cu_ctx *ctx, size_t bytes, CUdeviceptr *out, bool *oom);
bool block_piece(struct cu_rec *rec, CUdeviceptr p, CUdeviceptr *base, size_t *size);
bool block_free(struct cu_rec *rec, CUdeviceptr p);
void block_drop(struct cu_rec *rec);
long block_pieces(const struct cu_rec *rec);

/* cuda_names.c: what cuGetProcAddress knows, sorted by base without regard to case */
struct cu_name {
    const char *base, *symbol;
    int since;
    bool per_thread;
    const char *address;
};
extern const struct cu_name cu_names[];
extern const int cu_names_count;

/* Bodies that another file calls. */
CUresult cuMemAlloc_v2_body(CUdeviceptr *dptr, size_t bytesize);
