/* Memory of other processes: legacy IPC handles and external memory. The importer takes nothing
 * while the maker holds the memory; when the maker gives it up, the importer shows it. */
#include "sim_cuda.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define IPC_MAGIC 0x4350495f4d49535full

struct wire {
    uint64_t magic, gen, offset, size;
    int32_t index;
    int32_t pid;
};

struct opened {
    uint64_t offset, gen;
    int refs;
};

SIM_API(cuIpcGetMemHandle, (CUipcMemHandle * handle, CUdeviceptr dptr), (handle, dptr)) {
    struct cu_ctx *ctx;
    CUdeviceptr base;
    size_t size;
    CU_TRY(cu_current(&ctx));
    CU_ARG(handle);
    struct cu_rec *rec = va_find(dptr);
    CU_ARG(rec && (rec->kind == R_ALLOC || rec->kind == R_BLOCK) && cu_whole(dptr, &base, &size));
    /* The whole block goes over, also for a small piece of it. */
    if (rec->shared < 0) {
        rec->shared = sim_share(rec->dom, rec->physical, SIM_SHARED_IPC);
        CU_CHECK(rec->shared >= 0, CUDA_ERROR_OUT_OF_MEMORY);
    }
    struct wire w = {IPC_MAGIC,        atomic_load(&sim->shared[rec->shared].gen),
                     base - rec->base, size,
                     rec->shared,      (int32_t)getpid()};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &w, sizeof w);
    return CUDA_SUCCESS;
}

static struct cu_rec *already_open(const struct wire *w) {
    size_t at = 0;
    struct cu_rec *rec;
    while ((rec = va_next(&at))) {
        struct opened *o = rec->kind == R_IPC && !rec->flags ? rec->data : NULL;
        if (o && rec->shared == w->index && o->gen == w->gen && o->offset == w->offset)
            return rec;
    }
    return NULL;
}

static CUresult open_handle(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags) {
    struct cu_ctx *ctx;
    struct wire w;
    CU_TRY(cu_current(&ctx));
    memcpy(&w, &handle, sizeof w);
    CU_ARG(out && flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS && w.magic == IPC_MAGIC);
    CU_ARG(w.index >= 0 && w.index < SIM_OBJS);
    struct cu_rec *rec = already_open(&w);
    if (rec) {
        ((struct opened *)rec->data)->refs++;
        *out = rec->base;
        return CUDA_SUCCESS;
    }
    CU_CHECK(w.pid != getpid() || atomic_load(&sim->shared[w.index].owner) != sim_self,
             CUDA_ERROR_INVALID_CONTEXT);
    CU_ARG(cu_dev_of_dom(sim->shared[w.index].dom) >= 0 && sim_hold(w.index, w.gen));
    rec = cu_rec_new(R_IPC, sim->shared[w.index].dom, w.size);
    struct opened *o = calloc(1, sizeof *o);
    if (!rec || !o || !va_take(rec, w.size)) {
        free(rec);
        free(o);
        sim_drop(w.index);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *o = (struct opened){w.offset, w.gen, 1};
    rec->data = o;
    rec->shared = w.index;
    cu_rec_link(ctx, rec);
    *out = rec->base;
    return CUDA_SUCCESS;
}

SIM_API(cuIpcOpenMemHandle_v2, (CUdeviceptr * out, CUipcMemHandle handle, unsigned flags),
        (out, handle, flags)) {
    return open_handle(out, handle, flags);
}

SIM_API(cuIpcOpenMemHandle, (CUdeviceptr * out, CUipcMemHandle handle, unsigned flags),
        (out, handle, flags)) {
    return open_handle(out, handle, flags);
}

SIM_API(cuIpcCloseMemHandle, (CUdeviceptr dptr), (dptr)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    struct cu_rec *rec = va_find(dptr);
    CU_ARG(rec && rec->kind == R_IPC && !rec->flags && rec->base == dptr);
    if (--((struct opened *)rec->data)->refs == 0)
        cu_rec_free(rec);
    return CUDA_SUCCESS;
}

/* ---- external memory ---- */

struct extmem {
    struct cu_obj obj;
    uint32_t dom;
    int shared;
    size_t size;
};

static void destroy(void *p) {
    struct extmem *e = p;
    cu_handle_del(e);
    sim_drop(e->shared);
    free(e);
}

SIM_API(cuImportExternalMemory,
        (CUexternalMemory * out, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc), (out, desc)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    CU_ARG(out && desc && desc->size);
    CU_CHECK(desc->type == CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, CUDA_ERROR_NOT_SUPPORTED);
    int fd = desc->handle.fd, index = sim_share_from_fd(fd);
    CU_ARG(index >= 0 && sim_hold(index, 0));
    struct extmem *e = calloc(1, sizeof *e);
    if (!e || !cu_handle_add(e, K_EXTMEM)) {
        free(e);
        sim_drop(index);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    e->obj.destroy = destroy;
    e->dom = sim->shared[index].dom;
    e->shared = index;
    e->size = desc->size;
    close(fd); /* an imported descriptor belongs to the driver */
    *out = (CUexternalMemory)e;
    return CUDA_SUCCESS;
}

SIM_API(cuExternalMemoryGetMappedBuffer,
        (CUdeviceptr * out, CUexternalMemory handle, const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *desc),
        (out, handle, desc)) {
    struct cu_ctx *ctx;
    struct extmem *e = (struct extmem *)handle;
    CU_TRY(cu_current(&ctx));
    CU_CHECK(cu_handle_is(e, K_EXTMEM), CUDA_ERROR_INVALID_HANDLE);
    CU_ARG(out && desc && desc->size && desc->size <= e->size &&
           desc->offset <= e->size - desc->size);
    struct cu_rec *rec = cu_rec_new(R_EXTERNAL, e->dom, desc->size);
    if (!rec || !va_take(rec, desc->size)) {
        free(rec);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    rec->shared = sim_hold(e->shared, 0) ? e->shared : -1;
    cu_rec_link(ctx, rec);
    *out = rec->base;
    return CUDA_SUCCESS;
}

SIM_API(cuDestroyExternalMemory, (CUexternalMemory handle), (handle)) {
    CU_TRY(cu_ready());
    CU_CHECK(cu_handle_is(handle, K_EXTMEM), CUDA_ERROR_INVALID_HANDLE);
    destroy(handle);
    return CUDA_SUCCESS;
}
