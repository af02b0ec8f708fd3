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
#define SIM_HIDE __attribute__((visibility("hidden"), used))
#ifdef SIM_OLD_DRIVER
#define SIM_NEW SIM_HIDE
#define SIM_DRIVER_MAX 11010
#else
#define SIM_NEW SIM_EXPORT
#define SIM_DRIVER_MAX 1000000
#endif
#define SIM_API_NEW(name, params, args) SIM_DEFINE(SIM_NEW, name, params, args)
#define SIM_DEFINE(vis, name, params, args) \
    CUresult name##_body params;            \
    SIM_WRAP(vis, name, name, params, args) \
    CUresult name##_body params
#define SIM_WRAP(vis, name, body, params, args)                               \
    vis CUresult name params {                                                \
        CUresult result;                                                      \
        int fault = SIM_UNLIKELY(sim_trace_on) ? sim_trace_enter(#name) : -1; \
        if (fault >= 0) {                                                     \
            result = (CUresult)fault;                                         \
        } else {                                                              \
            cu_lock();                                                        \
            result = body##_body args;                                        \
            cu_unlock();                                                      \
        }                                                                     \
        if (SIM_UNLIKELY(sim_trace_on))                                       \
            sim_trace_leave(#name, (long)result);                             \
        return result;                                                        \
    }                                                                         \
    SIM_SELF(name)
/* Our own address of an export, also while an interposer exports the same name. */
#define SIM_SELF(name) \
    extern __typeof__(name) name##_self __attribute__((alias(#name), visibility("hidden")));
/* A further export of its own identity with the body of another. */
#define SIM_TWIN(name, body, params, args) \
    CUresult name params;                  \
    SIM_WRAP(SIM_EXPORT, name, body, params, args)
#define SIM_TWIN_NEW(name, body, params, args) \
    CUresult name params;                      \
    SIM_WRAP(SIM_NEW, name, body, params, args)
/* NAME and its per-thread-stream form; the body tells them apart only through a NULL stream. */
#define SIM_PAIR(name, params, args)          \
    CUresult name##_body params;              \
    SIM_TWIN(name##_ptsz, name, params, args) \
    SIM_API(name, params, args)
#define SIM_PAIR_NEW(name, params, args)          \
    CUresult name##_body params;                  \
    SIM_TWIN_NEW(name##_ptsz, name, params, args) \
    SIM_API_NEW(name, params, args)

void cu_lock(void);
void cu_unlock(void);

#define CU_TRY(expr)                    \
    do {                                \
        CUresult try_result = (expr);   \
        if (try_result != CUDA_SUCCESS) \
            return try_result;          \
    } while (0)
#define CU_CHECK(condition, error) \
    do {                           \
        if (!(condition))          \
            return error;          \
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
    K_HANDLE, /* cuMemCreate and what it imports */
    K_ARRAY,
    K_MIPMAP,
    K_GRAPH,
    K_NODE,
    K_EXEC,
    K_EXTMEM,
    K_LINK,
    K_MAX
};

struct cu_ctx;
struct cu_pool;
struct cu_block;
struct cu_stream;
struct cu_graph;
struct cu_node;
struct cu_function;
struct cu_library;

/* Every handle's struct starts with this. */
struct cu_obj {
    struct cu_ctx *ctx;       /* it dies with this context; NULL if with none */
    void (*destroy)(void *p); /* frees p and gives its memory back */
};

/* cuda_map.c. Handles are addresses of structs; a table of the live ones tells wrong ones without
 * touching them. cu_map is the same table for other keys. */
struct cu_map {
    struct {
        uint64_t key;
        void *value;
    } *slot;
    size_t cap, used;
};
bool map_put(struct cu_map *m, uint64_t key, void *value);
void *map_get(const struct cu_map *m, uint64_t key);
void map_del(struct cu_map *m, uint64_t key);
bool cu_handle_add(const void *p, enum cu_kind kind);
void cu_handle_del(const void *p);
bool cu_handle_is(const void *p, enum cu_kind kind);
long cu_handle_count(enum cu_kind kind);
/* The next live handle at or after *at; NULL at the end. Start again after any change. */
void *cu_handle_next(enum cu_kind kind, size_t *at);

/* What an address range is. */
enum rec_kind {
    R_ALLOC,    /* cuMemAlloc above 2 MiB, pitch */
    R_BLOCK,    /* 2 MiB shared by pieces up to 2 MiB */
    R_CHUNK,    /* part of a pool */
    R_RESERVED, /* cuMemAddressReserve */
    R_IPC,      /* opened from another process */
    R_EXTERNAL, /* buffer mapped from external memory */
    R_GRAPH,    /* graph memory node */
    R_IMAGE,    /* global of a module */
    R_ARRAY,    /* array or mipmap above 2 MiB */
    R_HOST,     /* real host memory, page-locked */
    R_MANAGED,  /* real host memory, page-wise charged when touched */
};

struct cu_rec {
    enum rec_kind kind;
    bool owned_va; /* the address comes from va_take */
    uint32_t dom;
    CUdeviceptr base;
    size_t size;     /* as asked for */
    size_t physical; /* charged to this process, unless shared >= 0 */
    int shared;      /* index of the shared object that carries the bytes, else -1 */
    uint64_t id;
    unsigned flags;
    struct cu_ctx *ctx;         /* NULL for memory of no context */
    struct cu_rec *next, *prev; /* all of one context */
    union {
        struct cu_block *block;
        void *data;
    };
};

/* cuda_va.c: addresses. Size classes of their own, so that any address leads to its record. */
#define VA_BASE 0x10000000000ull
#define VA_CLASS_BITS 42 /* 4 TiB a class */
#define VA_CLASSES 20    /* slots of 2 MiB << class */
bool va_take(struct cu_rec *rec, size_t size);
bool va_take_low(struct cu_rec *rec, size_t size); /* below 4 GiB, for the 32-bit entry points */
void va_put(struct cu_rec *rec);
void va_host_add(struct cu_rec *rec);
void va_host_del(struct cu_rec *rec);
struct cu_rec *va_find(CUdeviceptr p); /* the record that covers p, or NULL */
struct cu_rec *va_next(size_t *at);    /* all records, host ones included */

struct cu_device {
    uint32_t dom;
    struct cu_ctx *primary; /* the struct, kept so that the handle stays the same */
    unsigned primary_refs, primary_flags;
    struct cu_pool *default_pool, *current_pool;
    uint64_t graph_reserved, graph_live, graph_high, graph_used, graph_used_high;
};
extern struct cu_device cu_devs[SIM_DEVS];
extern int cu_ndevs;

/* Blocks are shared within a group only: linear memory, and arrays by bytes a texel. */
#define GROUPS 6 /* 0 is linear; 1 + log2(texel) */

struct cu_ctx {
    struct cu_obj obj;
    uint32_t dom;
    int dev;
    bool primary;
    struct cu_ctx *base;    /* of a green context: the primary one, which holds all memory */
    struct cu_green *green; /* whose handle this is */
    unsigned flags, api_version;
    unsigned long long id;
    size_t charged; /* the context without local memory */
    size_t lmem_charged;
    size_t runtime_charged, heap_charged; /* what printf and malloc in kernels need */
    size_t green_charged, stream_charged, image_charged;
    size_t image_bytes; /* small globals, packed */
    bool has_printf, has_heap;
    size_t limit[CU_LIMIT_MAX];
    struct cu_rec *recs;
    struct cu_block *partial[GROUPS]; /* blocks with room */
    long streams, streams_high;
    unsigned legacy_refs;
    struct cu_stream *special[2]; /* legacy and per-thread default stream */
    CUfunc_cache cache;
    CUsharedconfig shared_config;
};

CUresult cu_ready(void);                  /* NOT_INITIALIZED, or success */
CUresult cu_current(struct cu_ctx **out); /* INVALID_CONTEXT, or the thread's context */
CUresult cu_device_of(CUdevice dev, struct cu_device **out);
CUresult cu_ctx_start(struct cu_ctx *ctx, int dev, unsigned flags); /* takes its memory */
void cu_ctx_stop(struct cu_ctx *ctx);                               /* ends all that lives in it */
CUresult cu_ctx_pick(CUcontext handle, struct cu_ctx **out);        /* NULL: the current one */
CUresult cu_push(struct cu_ctx *ctx);
CUresult cu_primary(CUdevice dev, struct cu_ctx **out); /* retained */
void cu_primary_put(CUdevice dev);
int cu_dev_of_dom(uint32_t dom);
uint64_t cu_next_id(void);
int cu_driver_version(void);

/* Takes bytes for this process; pools give back what they hold unused before it fails. */
bool cu_take(uint32_t dom, uint64_t bytes);

/* cuda_limit.c: local memory = SMs x threads x bytes a thread, at once and per context */
CUresult cu_lmem_need(struct cu_ctx *ctx, size_t per_thread);
size_t cu_lmem_bytes(uint32_t dom, size_t per_thread);
CUresult cu_runtime_need(struct cu_ctx *ctx, bool uses_printf, bool uses_heap);
CUresult cu_heap_need(struct cu_ctx *ctx);

/* cuda_memory.c */
struct cu_rec *cu_rec_new(enum rec_kind kind, uint32_t dom, size_t size);
void cu_rec_link(struct cu_ctx *ctx, struct cu_rec *rec);
void cu_rec_free(struct cu_rec *rec); /* returns bytes and address */
struct cu_rec *cu_rec_take(enum rec_kind kind, struct cu_ctx *ctx, size_t bytes, bool low);
CUresult cu_alloc(struct cu_ctx *ctx, size_t bytes, bool low, CUdeviceptr *out);
CUresult cu_free(CUdeviceptr p);
size_t cu_physical(size_t bytes);                              /* whole granules */
bool cu_whole(CUdeviceptr p, CUdeviceptr *base, size_t *size); /* the allocation around p */
bool cu_range_ok(CUdeviceptr p, size_t bytes);
CUresult cu_v1(struct cu_ctx **out); /* the 32-bit calls work in contexts of their own only */

/* cuda_host.c */
void cu_host_release(struct cu_rec *rec);
void cu_touch(CUdeviceptr p, size_t bytes, bool to_device); /* managed pages move */

/* cuda_block.c */
#define PIECE_MAX SIM_GRANULE
CUresult block_alloc(struct cu_ctx *ctx, int group, size_t bytes, CUdeviceptr *out);
bool block_piece(struct cu_rec *rec, CUdeviceptr p, CUdeviceptr *base, size_t *size);
bool block_free(struct cu_rec *rec, CUdeviceptr p);
void block_drop(struct cu_rec *rec);
long block_pieces(const struct cu_rec *rec);

/* cuda_stream.c, cuda_capture.c */
struct cu_capture {
    struct cu_graph *graph;
    CUstreamCaptureMode mode;
    CUstreamCaptureStatus status;
    uint64_t thread, id;
    struct cu_stream *origin;
    bool own_graph; /* made by the capture, or given to cuStreamBeginCaptureToGraph */
    struct cu_capture *next;
};

#define TAILS 32
struct cu_stream {
    struct cu_obj obj;
    struct cu_ctx *ctx;
    unsigned flags;
    int priority;
    uint64_t id;
    bool special; /* a default stream: no handle of its own */
    struct cu_green *green;
    struct cu_capture *capture;
    struct cu_node *tail[TAILS]; /* what the next captured node depends on */
    int tails;
};
CUresult cu_stream(CUstream handle, struct cu_stream **out);
/* Work put into a stream: *node is set if the stream is capturing. */
CUresult cu_enqueue(CUstream handle, CUgraphNodeType type, struct cu_stream **out,
                    struct cu_node **node);
CUresult cu_unsafe(void); /* refuses, and spoils captures, while a capture forbids the call */
void cu_spoil(struct cu_capture *c);
void capture_leave(struct cu_stream *s);
uint64_t cu_thread(void);
void cu_synced(uint64_t stream_id); /* 0: all streams */
CUresult free_later(CUdeviceptr p, struct cu_stream *s);
bool freed_already(CUdeviceptr p);
void free_later_end(struct cu_ctx *ctx); /* its memory goes with it */

/* cuda_pool.c */
CUresult pool_free(struct cu_rec *rec, CUdeviceptr p, uint64_t stream_id, bool now);
bool pool_piece(struct cu_rec *rec, CUdeviceptr p, CUdeviceptr *base, size_t *size);
struct cu_pool *pool_of(struct cu_rec *rec);
CUresult pool_alloc(struct cu_pool *pool, size_t bytes, CUdeviceptr *out);
CUresult pool_default(int dev, struct cu_pool **out);
void pool_synced(uint64_t stream_id);
bool pool_trim_all(uint32_t dom);
void pool_span_free(struct cu_rec *rec);

/* cuda_vmm.c */
bool vmm_piece(struct cu_rec *rec, CUdeviceptr p, CUdeviceptr *base, size_t *size);

/* cuda_image.c: what a module holds, from our own text format or from PTX */
struct image_global {
    char name[96];
    size_t bytes;
    bool managed;
};
struct image_kernel {
    char name[160];
    size_t local;
    bool uses_printf, uses_heap;
};
struct image {
    struct image_global *global;
    struct image_kernel *kernel;
    size_t globals, kernels;
    int refs; /* modules and libraries that point here */
};
CUresult image_parse(const void *data, struct image **out);
CUresult image_read(const char *path, struct image **out);
void image_put(struct image *image);

/* cuda_module.c, cuda_library.c */
struct cu_module {
    struct cu_obj obj;
    struct cu_library *library; /* NULL for a module of its own */
    struct image *image;
    struct cu_rec **global;
    struct cu_function **function; /* made on demand */
    size_t small;                  /* bytes of the globals that are packed */
};
struct cu_function {
    struct cu_obj obj;
    struct cu_module *module;
    const struct image_kernel *code;
    int max_dynamic_shared, carveout;
};
CUresult module_load(struct cu_ctx *ctx, struct image *image, struct cu_library *library,
                     struct cu_module **out);
CUresult module_function(struct cu_module *m, size_t index, struct cu_function **out);
CUresult module_global(struct cu_module *m, const char *name, bool managed, CUdeviceptr *p,
                       size_t *bytes);
CUresult code_attribute(const struct image_kernel *k, CUfunction_attribute attr, int *out);
bool modules_are_lazy(void);
/* A function, or a kernel, which is loaded into ctx for it. */
CUresult cu_function_of(void *handle, struct cu_ctx *ctx, struct cu_function **out);
CUresult cu_function_need(struct cu_function *f); /* the memory that a launch takes */
CUresult kernel_function(void *kernel, struct cu_ctx *ctx, struct cu_function **out);
void cu_count_launch(void);
void library_context(struct cu_ctx *ctx, CUresult *result);

/* cuda_graph.c */
struct cu_node *node_new(struct cu_graph *g, CUgraphNodeType type, struct cu_node *const *deps,
                         size_t n);
struct cu_graph *graph_new(void);
void graph_free(struct cu_graph *g);
CUresult graph_alloc_node(struct cu_node *n, size_t bytes, int dev, CUdeviceptr *out);
CUresult graph_free_node(struct cu_node *n, CUdeviceptr p);
CUresult graph_ptr_free(struct cu_rec *rec);
bool graph_ptr_live(const struct cu_rec *rec);
void node_set_function(struct cu_node *n, struct cu_function *f);

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
CUresult cuCtxDestroy_v2_body(CUcontext ctx);
