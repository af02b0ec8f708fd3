/* Context-independent libraries. Loading one takes nothing; its globals come to a context at the
 * first use there (lazy), or with the load and with each new context (eager). */
#include "sim_cuda.h"

#include <stdlib.h>
#include <string.h>

struct cu_library {
    struct cu_obj obj;
    struct image *image;
    struct kernel **kernel;
};

struct kernel {
    struct cu_obj obj;
    struct cu_library *library;
    size_t index;
    struct cu_ctx *last_ctx; /* where last_function is from; its handle tells if it still lives */
    unsigned long long last_id;
    struct cu_function *last_function;
};

static struct cu_module *find_module(const struct cu_library *l, const struct cu_ctx *ctx) {
    size_t at = 0;
    struct cu_module *m;
    while ((m = cu_handle_next(K_MODULE, &at)))
        if (m->library == l && m->obj.ctx == ctx)
            return m;
    return NULL;
}

static CUresult in_context(struct cu_library *l, struct cu_ctx *ctx, struct cu_module **out) {
    *out = find_module(l, ctx);
    return *out ? CUDA_SUCCESS : module_load(ctx, l->image, l, out);
}

void library_context(struct cu_ctx *ctx, CUresult *result) {
    struct cu_library *list[64];
    size_t at = 0, n = 0;
    struct cu_module *m;
    if (modules_are_lazy())
        return;
    while (n < 64 && (list[n] = cu_handle_next(K_LIBRARY, &at)))
        n++;
    for (size_t i = 0; i < n && *result == CUDA_SUCCESS; i++)
        *result = in_context(list[i], ctx, &m);
}

static CUresult eager(struct cu_library *l) {
    struct cu_ctx *list[64];
    size_t at = 0, n = 0;
    struct cu_module *m;
    while (n < 64 && (list[n] = cu_handle_next(K_CONTEXT, &at)))
        n += !list[n]->base;
    for (size_t i = 0; i < n; i++)
        CU_TRY(in_context(l, list[i], &m));
    return CUDA_SUCCESS;
}

static void destroy(void *p) {
    struct cu_library *l = p;
    for (bool again = true; again;) {
        size_t at = 0;
        struct cu_module *m;
        again = false;
        while (!again && (m = cu_handle_next(K_MODULE, &at)))
            if (m->library == l) {
                m->obj.destroy(m);
                again = true;
            }
    }
    for (size_t i = 0; l->kernel && i < l->image->kernels; i++)
        if (l->kernel[i]) {
            cu_handle_del(l->kernel[i]);
            free(l->kernel[i]);
        }
    free(l->kernel);
    image_put(l->image);
    cu_handle_del(l);
    free(l);
}

static CUresult load(CUlibrary *out, CUresult parsed, struct image *im) {
    CU_TRY(parsed);
    struct cu_library *l = calloc(1, sizeof *l);
    struct kernel **kernels = calloc(im->kernels + 1, sizeof(void *));
    if (!l || !kernels || !cu_handle_add(l, K_LIBRARY)) {
        free(l);
        free(kernels);
        image_put(im);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *l = (struct cu_library){.obj = {NULL, destroy}, .image = im, .kernel = kernels};
    CUresult result = modules_are_lazy() ? CUDA_SUCCESS : eager(l);
    if (result != CUDA_SUCCESS)
        destroy(l);
    else
        *out = (CUlibrary)l;
    return result;
}

SIM_API_NEW(cuLibraryLoadData,
            (CUlibrary * out, const void *code, CUjit_option *jit, void **jit_values,
             unsigned n_jit, CUlibraryOption *options, void **values, unsigned n),
            (out, code, jit, jit_values, n_jit, options, values, n)) {
    struct image *im = NULL;
    (void)jit, (void)jit_values, (void)n_jit, (void)options, (void)values, (void)n;
    CU_TRY(cu_ready());
    CU_ARG(out);
    CUresult parsed = image_parse(code, &im);
    return load(out, parsed, im);
}

SIM_API_NEW(cuLibraryLoadFromFile,
            (CUlibrary * out, const char *path, CUjit_option *jit, void **jit_values,
             unsigned n_jit, CUlibraryOption *options, void **values, unsigned n),
            (out, path, jit, jit_values, n_jit, options, values, n)) {
    struct image *im = NULL;
    (void)jit, (void)jit_values, (void)n_jit, (void)options, (void)values, (void)n;
    CU_TRY(cu_ready());
    CU_ARG(out);
    CUresult parsed = image_read(path, &im);
    return load(out, parsed, im);
}

static CUresult library(CUlibrary handle, struct cu_library **out) {
    CU_TRY(cu_ready());
    CU_CHECK(cu_handle_is(handle, K_LIBRARY), CUDA_ERROR_INVALID_HANDLE);
    *out = (struct cu_library *)handle;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuLibraryUnload, (CUlibrary handle), (handle)) {
    struct cu_library *l;
    CU_TRY(library(handle, &l));
    destroy(l);
    return CUDA_SUCCESS;
}

static CUresult get_kernel(struct cu_library *l, size_t i, struct kernel **out) {
    if (!l->kernel[i]) {
        struct kernel *k = calloc(1, sizeof *k);
        if (!k || !cu_handle_add(k, K_KERNEL)) {
            free(k);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        k->library = l;
        k->index = i;
        l->kernel[i] = k;
    }
    *out = l->kernel[i];
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuLibraryGetKernel, (CUkernel * out, CUlibrary handle, const char *name),
            (out, handle, name)) {
    struct cu_library *l;
    struct kernel *k;
    CU_TRY(library(handle, &l));
    CU_ARG(out && name);
    for (size_t i = 0; i < l->image->kernels; i++)
        if (strcmp(l->image->kernel[i].name, name) == 0) {
            CU_TRY(get_kernel(l, i, &k));
            *out = (CUkernel)k;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

SIM_API_NEW(cuLibraryGetKernelCount, (unsigned *count, CUlibrary handle), (count, handle)) {
    struct cu_library *l;
    CU_TRY(library(handle, &l));
    CU_ARG(count);
    *count = (unsigned)l->image->kernels;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuLibraryEnumerateKernels, (CUkernel * out, unsigned n, CUlibrary handle),
            (out, n, handle)) {
    struct cu_library *l;
    struct kernel *k;
    CU_TRY(library(handle, &l));
    CU_ARG(out && n);
    for (size_t i = 0; i < n && i < l->image->kernels; i++) {
        CU_TRY(get_kernel(l, i, &k));
        out[i] = (CUkernel)k;
    }
    return CUDA_SUCCESS;
}

static CUresult here(CUlibrary handle, struct cu_module **out) {
    struct cu_library *l;
    struct cu_ctx *ctx;
    CU_TRY(library(handle, &l));
    CU_TRY(cu_current(&ctx));
    return in_context(l, ctx, out);
}

SIM_API_NEW(cuLibraryGetModule, (CUmodule * out, CUlibrary handle), (out, handle)) {
    struct cu_module *m;
    CU_TRY(here(handle, &m));
    CU_ARG(out);
    *out = (CUmodule)m;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuLibraryGetGlobal,
            (CUdeviceptr * p, size_t *bytes, CUlibrary handle, const char *name),
            (p, bytes, handle, name)) {
    struct cu_module *m;
    CU_TRY(here(handle, &m));
    CU_ARG(name && (p || bytes));
    return module_global(m, name, false, p, bytes);
}

SIM_API_NEW(cuLibraryGetManaged,
            (CUdeviceptr * p, size_t *bytes, CUlibrary handle, const char *name),
            (p, bytes, handle, name)) {
    struct cu_module *m;
    CU_TRY(here(handle, &m));
    CU_ARG(name && (p || bytes));
    return module_global(m, name, true, p, bytes);
}

/* ---- kernels ---- */

static CUresult kernel(CUkernel handle, struct kernel **out) {
    CU_TRY(cu_ready());
    CU_CHECK(cu_handle_is(handle, K_KERNEL), CUDA_ERROR_INVALID_HANDLE);
    *out = (struct kernel *)handle;
    return CUDA_SUCCESS;
}

CUresult kernel_function(void *handle, struct cu_ctx *ctx, struct cu_function **out) {
    struct kernel *k;
    struct cu_module *m;
    CU_TRY(kernel(handle, &k));
    if (k->last_ctx == ctx && k->last_id == ctx->id && cu_handle_is(k->last_function, K_FUNCTION)) {
        *out = k->last_function;
        return CUDA_SUCCESS;
    }
    CU_TRY(in_context(k->library, ctx, &m));
    CU_TRY(module_function(m, k->index, out));
    k->last_ctx = ctx;
    k->last_id = ctx->id;
    k->last_function = *out;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuKernelGetFunction, (CUfunction * out, CUkernel handle), (out, handle)) {
    struct cu_ctx *ctx;
    struct kernel *k;
    struct cu_function *f;
    CU_TRY(kernel(handle, &k));
    CU_TRY(cu_current(&ctx));
    CU_ARG(out);
    CU_TRY(kernel_function(k, ctx, &f));
    *out = (CUfunction)f;
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuKernelGetLibrary, (CUlibrary * out, CUkernel handle), (out, handle)) {
    struct kernel *k;
    CU_TRY(kernel(handle, &k));
    CU_ARG(out);
    *out = (CUlibrary)k->library;
    return CUDA_SUCCESS;
}

/* Loads nothing. */
SIM_API_NEW(cuKernelGetAttribute,
            (int *pi, CUfunction_attribute attrib, CUkernel handle, CUdevice dev),
            (pi, attrib, handle, dev)) {
    struct kernel *k;
    struct cu_device *d;
    CU_TRY(kernel(handle, &k));
    CU_TRY(cu_device_of(dev, &d));
    return code_attribute(&k->library->image->kernel[k->index], attrib, pi);
}

SIM_API_NEW(cuKernelSetAttribute,
            (CUfunction_attribute attrib, int value, CUkernel handle, CUdevice dev),
            (attrib, value, handle, dev)) {
    struct kernel *k;
    struct cu_device *d;
    (void)value;
    CU_TRY(kernel(handle, &k));
    CU_TRY(cu_device_of(dev, &d));
    CU_ARG((unsigned)attrib < CU_FUNC_ATTRIBUTE_MAX);
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuKernelSetCacheConfig, (CUkernel handle, CUfunc_cache config, CUdevice dev),
            (handle, config, dev)) {
    struct kernel *k;
    struct cu_device *d;
    (void)config;
    CU_TRY(kernel(handle, &k));
    return cu_device_of(dev, &d);
}

SIM_API_NEW(cuKernelGetName, (const char **name, CUkernel handle), (name, handle)) {
    struct kernel *k;
    CU_TRY(kernel(handle, &k));
    CU_ARG(name);
    *name = k->library->image->kernel[k->index].name;
    return CUDA_SUCCESS;
}
