/* Modules and functions. Globals take device memory when the module is loaded into a context, also
 * with lazy loading: whole granules for a large one, while small ones are packed into what the
 * context has to spare. */
#include "sim_cuda.h"

#include <stdlib.h>
#include <string.h>

#define LARGE SIM_MIB

bool modules_are_lazy(void) {
    const char *v = getenv("CUDA_MODULE_LOADING");
    return !v || strcmp(v, "EAGER") != 0;
}

/* ---- memory ---- */

static size_t packed(size_t bytes) {
    return bytes > SIM_GRANULE ? cu_physical(bytes) - SIM_GRANULE : 0;
}

static CUresult pack(struct cu_ctx *ctx, size_t bytes) {
    size_t want = packed(ctx->image_bytes + bytes);
    CU_CHECK(want <= ctx->image_charged || cu_take(ctx->dom, want - ctx->image_charged),
             CUDA_ERROR_OUT_OF_MEMORY);
    if (want > ctx->image_charged)
        ctx->image_charged = want;
    ctx->image_bytes += bytes;
    return CUDA_SUCCESS;
}

static void unpack(struct cu_ctx *ctx, size_t bytes) {
    ctx->image_bytes -= bytes;
    size_t want = packed(ctx->image_bytes);
    if (want < ctx->image_charged) {
        sim_give(ctx->dom, ctx->image_charged - want);
        ctx->image_charged = want;
    }
}

static struct cu_rec *small_global(struct cu_ctx *ctx, size_t bytes) {
    struct cu_rec *rec = cu_rec_new(R_IMAGE, ctx->dom, bytes ? bytes : 1);
    if (!rec || !va_take(rec, rec->size)) {
        free(rec);
        return NULL;
    }
    cu_rec_link(ctx, rec);
    return rec;
}

static CUresult load_globals(struct cu_ctx *ctx, struct cu_module *m) {
    for (size_t i = 0; i < m->image->globals; i++) {
        const struct image_global *g = &m->image->global[i];
        bool large = g->bytes >= LARGE && !g->managed;
        if (!large && !g->managed) {
            CU_TRY(pack(ctx, g->bytes));
            m->small += g->bytes;
        }
        m->global[i] =
            large ? cu_rec_take(R_IMAGE, ctx, g->bytes, false) : small_global(ctx, g->bytes);
        CU_CHECK(m->global[i], CUDA_ERROR_OUT_OF_MEMORY);
    }
    return CUDA_SUCCESS;
}

static void destroy_function(void *p) {
    struct cu_function *f = p;
    for (size_t i = 0; i < f->module->image->kernels; i++)
        if (f->module->function[i] == f)
            f->module->function[i] = NULL;
    cu_handle_del(f);
    free(f);
}

static void destroy_module(void *p) {
    struct cu_module *m = p;
    struct cu_ctx *ctx = m->obj.ctx;
    for (size_t i = 0; m->function && i < m->image->kernels; i++)
        if (m->function[i])
            destroy_function(m->function[i]);
    for (size_t i = 0; m->global && i < m->image->globals; i++)
        if (m->global[i])
            cu_rec_free(m->global[i]);
    unpack(ctx, m->small);
    free(m->function);
    free(m->global);
    image_put(m->image);
    cu_handle_del(m);
    free(m);
}

static CUresult runtime(struct cu_ctx *ctx, const struct image *im) {
    bool uses_printf = false, uses_heap = false;
    for (size_t i = 0; i < im->kernels; i++) {
        uses_printf |= im->kernel[i].uses_printf;
        uses_heap |= im->kernel[i].uses_heap;
    }
    return cu_runtime_need(ctx, uses_printf, uses_heap);
}

/* Takes a reference to the image on success. */
CUresult module_load(struct cu_ctx *ctx, struct image *im, struct cu_library *library,
                     struct cu_module **out) {
    struct cu_module *m = calloc(1, sizeof *m);
    CU_CHECK(m, CUDA_ERROR_OUT_OF_MEMORY);
    m->obj = (struct cu_obj){ctx, destroy_module};
    m->library = library;
    m->image = im;
    im->refs++;
    m->global = calloc(im->globals + 1, sizeof(void *));
    m->function = calloc(im->kernels + 1, sizeof(void *));
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (m->global && m->function && cu_handle_add(m, K_MODULE))
        result = load_globals(ctx, m);
    if (result == CUDA_SUCCESS)
        result = runtime(ctx, im);
    if (result != CUDA_SUCCESS)
        destroy_module(m);
    else
        *out = m;
    return result;
}

CUresult module_function(struct cu_module *m, size_t i, struct cu_function **out) {
    if (!m->function[i]) {
        struct cu_function *f = calloc(1, sizeof *f);
        if (!f || !cu_handle_add(f, K_FUNCTION)) {
            free(f);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        *f = (struct cu_function){
            .obj = {m->obj.ctx, destroy_function}, .module = m, .code = &m->image->kernel[i]};
        m->function[i] = f;
    }
    *out = m->function[i];
    return CUDA_SUCCESS;
}

CUresult module_global(struct cu_module *m, const char *name, bool managed, CUdeviceptr *p,
                       size_t *bytes) {
    for (size_t i = 0; i < m->image->globals; i++)
        if (strcmp(m->image->global[i].name, name) == 0 && m->image->global[i].managed == managed) {
            if (p)
                *p = m->global[i]->base;
            if (bytes)
                *bytes = m->image->global[i].bytes;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

/* ---- API ---- */

static CUresult load(CUmodule *out, CUresult parsed, struct image *im) {
    struct cu_ctx *ctx;
    struct cu_module *m;
    CU_TRY(parsed);
    CUresult result = cu_current(&ctx);
    if (result == CUDA_SUCCESS)
        result = out ? module_load(ctx, im, NULL, &m) : CUDA_ERROR_INVALID_VALUE;
    image_put(im);
    if (result == CUDA_SUCCESS)
        *out = (CUmodule)m;
    return result;
}

static CUresult load_data(CUmodule *out, const void *data) {
    struct cu_ctx *ctx;
    struct image *im = NULL;
    CU_TRY(cu_current(&ctx));
    CU_ARG(out);
    CUresult parsed = image_parse(data, &im);
    return load(out, parsed, im);
}

SIM_API(cuModuleLoadData, (CUmodule * out, const void *image), (out, image)) {
    return load_data(out, image);
}

SIM_API(cuModuleLoadDataEx,
        (CUmodule * out, const void *image, unsigned n, CUjit_option *options, void **values),
        (out, image, n, options, values)) {
    CU_ARG(n == 0 || (options && values));
    return load_data(out, image);
}

SIM_API(cuModuleLoadFatBinary, (CUmodule * out, const void *image), (out, image)) {
    return load_data(out, image);
}

SIM_API(cuModuleLoad, (CUmodule * out, const char *path), (out, path)) {
    struct cu_ctx *ctx;
    struct image *im = NULL;
    CU_TRY(cu_current(&ctx));
    CU_ARG(out);
    CUresult parsed = image_read(path, &im);
    return load(out, parsed, im);
}

static CUresult module(CUmodule handle, struct cu_module **out) {
    CU_TRY(cu_ready());
    CU_CHECK(cu_handle_is(handle, K_MODULE), CUDA_ERROR_INVALID_HANDLE);
    *out = (struct cu_module *)handle;
    return CUDA_SUCCESS;
}

SIM_API(cuModuleUnload, (CUmodule handle), (handle)) {
    struct cu_module *m;
    CU_TRY(module(handle, &m));
    CU_CHECK(!m->library, CUDA_ERROR_NOT_PERMITTED);
    destroy_module(m);
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuModuleGetLoadingMode, (CUmoduleLoadingMode * mode), (mode)) {
    CU_TRY(cu_ready());
    CU_ARG(mode);
    *mode = modules_are_lazy() ? CU_MODULE_LAZY_LOADING : CU_MODULE_EAGER_LOADING;
    return CUDA_SUCCESS;
}

SIM_API(cuModuleGetFunction, (CUfunction * out, CUmodule handle, const char *name),
        (out, handle, name)) {
    struct cu_module *m;
    struct cu_function *f;
    CU_TRY(module(handle, &m));
    CU_ARG(out && name);
    for (size_t i = 0; i < m->image->kernels; i++)
        if (strcmp(m->image->kernel[i].name, name) == 0) {
            CU_TRY(module_function(m, i, &f));
            *out = (CUfunction)f;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

SIM_API_NEW(cuModuleGetFunctionCount, (unsigned *count, CUmodule handle), (count, handle)) {
    struct cu_module *m;
    CU_TRY(module(handle, &m));
    CU_ARG(count);
    *count = (unsigned)m->image->kernels;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuModuleEnumerateFunctions, (CUfunction * out, unsigned n, CUmodule handle),
            (out, n, handle)) {
    struct cu_module *m;
    struct cu_function *f;
    CU_TRY(module(handle, &m));
    CU_ARG(out && n);
    for (size_t i = 0; i < n && i < m->image->kernels; i++) {
        CU_TRY(module_function(m, i, &f));
        out[i] = (CUfunction)f;
    }
    return CUDA_SUCCESS;
}

SIM_API(cuModuleGetGlobal_v2, (CUdeviceptr * p, size_t *bytes, CUmodule handle, const char *name),
        (p, bytes, handle, name)) {
    struct cu_module *m;
    CU_TRY(module(handle, &m));
    CU_ARG(name && (p || bytes));
    return module_global(m, name, false, p, bytes);
}

SIM_API(cuModuleGetGlobal, (CUdeviceptr_v1 * p, unsigned *bytes, CUmodule handle, const char *name),
        (p, bytes, handle, name)) {
    CUdeviceptr wide;
    size_t size;
    CU_TRY(cuModuleGetGlobal_v2_body(&wide, &size, handle, name));
    CU_CHECK(wide <= 0xffffffffu, CUDA_ERROR_INVALID_CONTEXT);
    if (p)
        *p = (CUdeviceptr_v1)wide;
    if (bytes)
        *bytes = (unsigned)size;
    return CUDA_SUCCESS;
}

/* ---- functions ---- */

CUresult code_attribute(const struct image_kernel *k, CUfunction_attribute attr, int *out) {
    CU_ARG(out);
    switch (attr) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *out = 1024;
        break;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
        *out = (int)k->local;
        break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
        *out = 32;
        break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
        *out = 70;
        break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        *out = 49152;
        break;
    default:
        CU_ARG((unsigned)attr < CU_FUNC_ATTRIBUTE_MAX);
        *out = 0;
    }
    return CUDA_SUCCESS;
}

static CUresult function(CUfunction handle, struct cu_function **out) {
    CU_TRY(cu_ready());
    CU_CHECK(cu_handle_is(handle, K_FUNCTION), CUDA_ERROR_INVALID_HANDLE);
    *out = (struct cu_function *)handle;
    return CUDA_SUCCESS;
}

CUresult cu_function_of(void *handle, struct cu_ctx *ctx, struct cu_function **out) {
    if (cu_handle_is(handle, K_KERNEL))
        return kernel_function(handle, ctx, out);
    return function(handle, out);
}

CUresult cu_function_need(struct cu_function *f) {
    CU_TRY(cu_lmem_need(f->obj.ctx, f->code->local));
    return f->code->uses_heap ? cu_heap_need(f->obj.ctx) : CUDA_SUCCESS;
}

SIM_API(cuFuncGetAttribute, (int *pi, CUfunction_attribute attrib, CUfunction handle),
        (pi, attrib, handle)) {
    struct cu_function *f;
    CU_TRY(function(handle, &f));
    CU_TRY(code_attribute(f->code, attrib, pi));
    if (attrib == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && f->max_dynamic_shared)
        *pi = f->max_dynamic_shared;
    return CUDA_SUCCESS;
}

SIM_API(cuFuncSetAttribute, (CUfunction handle, CUfunction_attribute attrib, int value),
        (handle, attrib, value)) {
    struct cu_function *f;
    CU_TRY(function(handle, &f));
    CU_ARG((unsigned)attrib < CU_FUNC_ATTRIBUTE_MAX);
    if (attrib == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        f->max_dynamic_shared = value;
    return CUDA_SUCCESS;
}

SIM_API(cuFuncSetCacheConfig, (CUfunction handle, CUfunc_cache config), (handle, config)) {
    struct cu_function *f;
    (void)config;
    return function(handle, &f);
}

SIM_API(cuFuncSetSharedMemConfig, (CUfunction handle, CUsharedconfig config), (handle, config)) {
    struct cu_function *f;
    (void)config;
    return function(handle, &f);
}

SIM_API(cuFuncGetModule, (CUmodule * out, CUfunction handle), (out, handle)) {
    struct cu_function *f;
    CU_TRY(function(handle, &f));
    CU_ARG(out);
    *out = (CUmodule)f->module;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuFuncGetName, (const char **name, CUfunction handle), (name, handle)) {
    struct cu_function *f;
    CU_TRY(function(handle, &f));
    CU_ARG(name);
    *name = f->code->name;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuFuncIsLoaded, (CUfunctionLoadingState * state, CUfunction handle), (state, handle)) {
    struct cu_function *f;
    CU_TRY(function(handle, &f));
    CU_ARG(state);
    *state = CU_FUNCTION_LOADING_STATE_LOADED;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuFuncLoad, (CUfunction handle), (handle)) {
    struct cu_function *f;
    return function(handle, &f);
}
