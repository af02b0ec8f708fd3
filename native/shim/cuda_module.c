#include <errno.h>

#include "image.h"
#include "launch.h"

/* Modules and libraries: images on the device, and the functions looked up in them.
 *
 * A module's image is there when cuModuleLoad* returns. A library's comes into a context with the
 * first of: a CUfunction of a kernel, a global, its module, a launch of a kernel handle; with
 * eager loading, with cuLibraryLoad* in every context there is. */

/* ---- where a library is loaded ----------------------------------------------------------- */

static uint64_t loaded_key(uint64_t library, uint64_t context) {
    return library ^ context * UINT64_C(0x9e3779b97f4a7c15);
}

bool loading_due(struct process *process, uint64_t library, uint64_t context) {
    struct vgpu_entry entry;
    return vgpu_ledger_get(process->ledger, ENTRY_LOADED, loaded_key(library, context), &entry);
}

/* A stream of another context than the current one takes its launches there. */
static bool is_due_anywhere(struct process *process, uint64_t library) {
    struct vgpu_entry entry;
    uint64_t cursor = 0;
    if (loading_due(process, library, context_current()))
        return true;
    while (vgpu_ledger_next(process->ledger, ENTRY_CONTEXT, &cursor, &entry) == 0)
        if (entry.aux && loading_due(process, library, entry.key))
            return true;
    return false;
}

bool loading_due_large(struct process *process) {
    struct vgpu_entry entry;
    uint64_t cursor = 0;
    while (vgpu_ledger_next(process->ledger, ENTRY_LIBRARY, &cursor, &entry) == 0)
        if (entry.bytes >= LOADING_LARGE && is_due_anywhere(process, entry.key))
            return true;
    return false;
}

/* ---- what is known of functions ------------------------------------------------------------ */

/* Enters a function looked up for the first time; a launch then looks further once. */
static void function_seen(struct process *process, const struct vgpu_entry *entry) {
    if (vgpu_ledger_put(process->ledger, entry))
        return;
    launch_watch(LAUNCH_UNSETTLED);
    if (entry->aux > LOCAL_DEFAULT)
        local_review(process);
}

static bool is_seen(struct process *process, const void *function) {
    struct vgpu_entry entry;
    return vgpu_ledger_get(process->ledger, ENTRY_FUNCTION, key_of(function), &entry) == 0;
}

/* Its first reading takes 10 us, without loading anything. It is of its module's context, whichever
 * is current. */
static void cufunction_seen(struct process *process, CUfunction function, uint64_t owner,
                            uint64_t context) {
    struct device *device;
    int local = 0;
    if (!function || is_seen(process, function) ||
        process_current(&device, process) != CUDA_SUCCESS)
        return;
    if (real.cuFuncGetAttribute)
        (void)CALL_REAL(cuFuncGetAttribute, &local, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function);
    struct vgpu_entry entry = {.key = key_of(function),
                               .kind = ENTRY_FUNCTION,
                               .device = device->ordinal,
                               .bytes = owner,
                               .aux = local > 0 ? (uint64_t)local : 0,
                               .aux2 = context ? context : context_current()};
    function_seen(process, &entry);
}

static void cukernel_seen(struct process *process, CUkernel kernel, uint64_t library) {
    struct device *device;
    int local = 0, ordinal = 0;
    if (!kernel)
        return;
    if (is_due_anywhere(process, library))
        launch_watch_lazy();
    if (is_seen(process, kernel))
        return;
    if (context_current() && process_current(&device, process) == CUDA_SUCCESS)
        ordinal = device->ordinal;
    if (real.cuKernelGetAttribute)
        (void)CALL_REAL(cuKernelGetAttribute, &local, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, kernel,
                        ordinal);
    struct vgpu_entry entry = {.key = key_of(kernel),
                               .kind = ENTRY_FUNCTION,
                               .device = ordinal,
                               .bytes = library,
                               .aux = local > 0 ? (uint64_t)local : 0};
    function_seen(process, &entry);
}

/* Takes out every entry of a kind for which `field` says so; bytes of those taken. */
enum field { FIELD_BYTES, FIELD_AUX, FIELD_AUX2 };

static uint64_t forget(struct process *process, int kind, enum field field, uint64_t value) {
    uint64_t bytes = 0, cursor = 0;
    struct vgpu_entry entry;
    while (vgpu_ledger_next(process->ledger, kind, &cursor, &entry) == 0) {
        uint64_t found = field == FIELD_BYTES ? entry.bytes
                         : field == FIELD_AUX ? entry.aux
                                              : entry.aux2;
        if (found == value && vgpu_ledger_take(process->ledger, kind, entry.key, &entry) == 0)
            bytes += entry.bytes;
    }
    return bytes;
}

uint64_t modules_forget(struct process *process, uint64_t context) {
    (void)forget(process, ENTRY_FUNCTION, FIELD_AUX2, context);
    return forget(process, ENTRY_LOADED, FIELD_AUX2, context);
}

/* ---- first use of a library in a context ---------------------------------------------------- */

CUresult loading_begin(struct loading *l, struct process *process, struct device *device,
                       uint64_t library, uint64_t context) {
    struct vgpu_entry entry = {0};
    l->key = 0;
    (void)vgpu_ledger_get(process->ledger, ENTRY_LIBRARY, library, &entry);
    struct vgpu_entry loaded = {.key = loaded_key(library, context),
                                .kind = ENTRY_LOADED,
                                .device = device->ordinal,
                                .bytes = entry.bytes,
                                .aux = library,
                                .aux2 = context};
    if (vgpu_ledger_put(process->ledger, &loaded))
        return CUDA_SUCCESS;
    CUresult result = taking_begin(&l->taking, process, device, loaded.bytes);
    if (result == CUDA_SUCCESS)
        l->key = loaded.key;
    else
        (void)vgpu_ledger_take(process->ledger, ENTRY_LOADED, loaded.key, &loaded);
    return result;
}

CUresult loading_end(struct loading *l, CUresult result) {
    struct vgpu_entry entry;
    if (!l->key)
        return result;
    if (result != CUDA_SUCCESS)
        (void)vgpu_ledger_take(l->taking.process->ledger, ENTRY_LOADED, l->key, &entry);
    /* It cannot be unloaded from one context alone. */
    return taking_end(&l->taking, result, true);
}

/* ---- modules ------------------------------------------------------------------------------- */

struct load {
    struct taking taking;
    CUmodule module;
};

static CUresult load_end(struct load *l, CUmodule *out, CUresult granted) {
    struct process *process = l->taking.process;
    CUresult result = taking_end(&l->taking, granted, false);
    if (granted == CUDA_SUCCESS && result != CUDA_SUCCESS) {
        if (real.cuModuleUnload)
            (void)CALL_REAL(cuModuleUnload, l->module);
        taking_undone(&l->taking);
    }
    if (result != CUDA_SUCCESS)
        return result;
    struct vgpu_entry entry = {.key = key_of(l->module),
                               .kind = ENTRY_MODULE,
                               .device = l->taking.device->ordinal,
                               .bytes = l->taking.bytes,
                               .aux2 = context_current()};
    (void)vgpu_ledger_put(process->ledger, &entry);
    /* The heap of an image that calls malloc comes with its first launch. */
    launch_watch(LAUNCH_UNSETTLED);
    *out = l->module;
    return CUDA_SUCCESS;
}

#define LOAD_BODY(symbol, out, estimate, ...)                        \
    NEED_CUDA(symbol);                                               \
    struct process *process = enter();                               \
    struct device *device;                                           \
    struct load l = {.module = NULL};                                \
    if (!process || !(out))                                          \
        return real.symbol(out, __VA_ARGS__);                        \
    CUresult result = process_current(&device, process);             \
    if (result == CUDA_SUCCESS)                                      \
        result = taking_begin(&l.taking, process, device, estimate); \
    if (result != CUDA_SUCCESS)                                      \
        return result;                                               \
    return load_end(&l, out, CALL_REAL(symbol, &l.module, __VA_ARGS__))

CUresult cuModuleLoad(CUmodule *module, const char *fname) {
    LOAD_BODY(cuModuleLoad, module, image_file_bytes(fname), fname);
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    LOAD_BODY(cuModuleLoadData, module, image_bytes(image), image);
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int numOptions,
                            CUjit_option *options, void **optionValues) {
    LOAD_BODY(cuModuleLoadDataEx, module, image_bytes(image), image, numOptions, options,
              optionValues);
}

CUresult cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin) {
    LOAD_BODY(cuModuleLoadFatBinary, module, image_bytes(fatCubin), fatCubin);
}

CUresult cuModuleUnload(CUmodule hmod) {
    NEED_CUDA(cuModuleUnload);
    struct process *process = enter();
    struct vgpu_entry entry;
    if (!process || process->mode != MODE_ON ||
        vgpu_ledger_take(process->ledger, ENTRY_MODULE, key_of(hmod), &entry))
        return real.cuModuleUnload(hmod);
    struct device *device = process_device(process, entry.device);
    operation_begin(device);
    CUresult result = CALL_REAL(cuModuleUnload, hmod);
    if (result != CUDA_SUCCESS)
        (void)vgpu_ledger_put(process->ledger, &entry);
    operation_end(device);
    if (result == CUDA_SUCCESS) {
        (void)forget(process, ENTRY_FUNCTION, FIELD_BYTES, entry.key);
        settle_less(process, device, entry.bytes);
    }
    return result;
}

CUresult cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name) {
    NEED_CUDA(cuModuleGetFunction);
    struct process *process = enter();
    if (!process || process->mode != MODE_ON)
        return real.cuModuleGetFunction(hfunc, hmod, name);
    CUresult result = CALL_REAL(cuModuleGetFunction, hfunc, hmod, name);
    struct vgpu_entry module = {.aux = 0};
    if (result != CUDA_SUCCESS)
        return result;
    (void)vgpu_ledger_get(process->ledger, ENTRY_MODULE, key_of(hmod), &module);
    cufunction_seen(process, *hfunc, module.aux ? module.aux : key_of(hmod), module.aux2);
    return result;
}

CUresult cuModuleEnumerateFunctions(CUfunction *functions, unsigned int numFunctions,
                                    CUmodule mod) {
    NEED_CUDA(cuModuleEnumerateFunctions);
    struct process *process = enter();
    struct vgpu_entry module = {.aux = 0};
    unsigned int count = 0;
    if (!process || process->mode != MODE_ON || !real.cuModuleGetFunctionCount)
        return real.cuModuleEnumerateFunctions(functions, numFunctions, mod);
    CUresult result = CALL_REAL(cuModuleEnumerateFunctions, functions, numFunctions, mod);
    if (result != CUDA_SUCCESS || CALL_REAL(cuModuleGetFunctionCount, &count, mod) != CUDA_SUCCESS)
        return result;
    (void)vgpu_ledger_get(process->ledger, ENTRY_MODULE, key_of(mod), &module);
    for (unsigned int i = 0; i < count && i < numFunctions; i++)
        cufunction_seen(process, functions[i], module.aux ? module.aux : key_of(mod), module.aux2);
    return result;
}

/* ---- libraries ------------------------------------------------------------------------------ */

static bool is_lazy(void) {
    CUmoduleLoadingMode mode = 0;
    return real.cuModuleGetLoadingMode &&
           CALL_REAL(cuModuleGetLoadingMode, &mode) == CUDA_SUCCESS &&
           mode == CU_MODULE_LAZY_LOADING;
}

/* Eager: the image comes now, into every context. The current device's is charged ahead. */
static CUresult library_eager(struct taking *t, struct process *process, uint64_t bytes) {
    struct device *device;
    if (!context_current() || process_current(&device, process) != CUDA_SUCCESS)
        return CUDA_SUCCESS;
    return taking_begin(t, process, device, bytes);
}

/* An eager image went to every device with a context. */
static void settle_others(struct process *process, const struct device *done) {
    for (int i = 0; i < MAX_ORDINALS; i++) {
        struct device *device = &process->devices[i];
        if (device != done && __atomic_load_n(&device->contexts, __ATOMIC_RELAXED))
            settle_less(process, device, 0);
    }
}

struct library {
    struct process *process;
    struct taking taking; /* device NULL: nothing is loaded yet */
    CUlibrary handle;
    uint64_t bytes;
};

static CUresult library_begin(struct library *l, struct process *process, uint64_t bytes) {
    *l = (struct library){.process = process, .bytes = bytes};
    if (process->mode != MODE_ON)
        return CUDA_ERROR_OUT_OF_MEMORY;
    return is_lazy() ? CUDA_SUCCESS : library_eager(&l->taking, process, bytes);
}

static CUresult library_end(struct library *l, CUlibrary *out, CUresult granted) {
    CUresult result = granted;
    struct device *device = l->taking.device;
    if (device)
        result = taking_end(&l->taking, granted, false);
    if (granted == CUDA_SUCCESS && result != CUDA_SUCCESS) {
        (void)CALL_REAL(cuLibraryUnload, l->handle);
        taking_undone(&l->taking);
    }
    if (result != CUDA_SUCCESS)
        return result;
    struct vgpu_entry entry = {.key = key_of(l->handle), .kind = ENTRY_LIBRARY, .bytes = l->bytes};
    (void)vgpu_ledger_put(l->process->ledger, &entry);
    if (device) {
        struct vgpu_entry loaded = {.key = loaded_key(entry.key, context_current()),
                                    .kind = ENTRY_LOADED,
                                    .device = device->ordinal,
                                    .bytes = l->bytes,
                                    .aux = entry.key,
                                    .aux2 = context_current()};
        (void)vgpu_ledger_put(l->process->ledger, &loaded);
        settle_others(l->process, device);
    }
    *out = l->handle;
    return CUDA_SUCCESS;
}

#define LIBRARY_BODY(symbol, estimate, source)                                            \
    NEED_CUDA(symbol);                                                                    \
    struct process *process = enter();                                                    \
    struct library l;                                                                     \
    if (!process || !library)                                                             \
        return real.symbol(library, source, jitOptions, jitOptionsValues, numJitOptions,  \
                           libraryOptions, libraryOptionValues, numLibraryOptions);       \
    CUresult result = library_begin(&l, process, estimate);                               \
    if (result != CUDA_SUCCESS)                                                           \
        return result;                                                                    \
    return library_end(&l, library,                                                       \
                       CALL_REAL(symbol, &l.handle, source, jitOptions, jitOptionsValues, \
                                 numJitOptions, libraryOptions, libraryOptionValues,      \
                                 numLibraryOptions))

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jitOptions,
                           void **jitOptionsValues, unsigned int numJitOptions,
                           CUlibraryOption *libraryOptions, void **libraryOptionValues,
                           unsigned int numLibraryOptions) {
    LIBRARY_BODY(cuLibraryLoadData, image_bytes(code), code);
}

CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *fileName, CUjit_option *jitOptions,
                               void **jitOptionsValues, unsigned int numJitOptions,
                               CUlibraryOption *libraryOptions, void **libraryOptionValues,
                               unsigned int numLibraryOptions) {
    LIBRARY_BODY(cuLibraryLoadFromFile, image_file_bytes(fileName), fileName);
}

/* It leaves every context that it was loaded into. */
static void library_unloaded(struct process *process, uint64_t library) {
    uint64_t bytes[MAX_ORDINALS] = {0}, devices = 0, cursor = 0;
    struct vgpu_entry entry;
    while (vgpu_ledger_next(process->ledger, ENTRY_LOADED, &cursor, &entry) == 0) {
        if (entry.aux != library ||
            vgpu_ledger_take(process->ledger, ENTRY_LOADED, entry.key, &entry))
            continue;
        bytes[entry.device] += entry.bytes;
        devices |= UINT64_C(1) << entry.device;
    }
    for (int i = 0; i < MAX_ORDINALS; i++)
        if (devices >> i & 1)
            settle_less(process, &process->devices[i], bytes[i]);
}

CUresult cuLibraryUnload(CUlibrary library) {
    NEED_CUDA(cuLibraryUnload);
    struct process *process = enter();
    struct vgpu_entry entry;
    if (!process || process->mode != MODE_ON ||
        vgpu_ledger_take(process->ledger, ENTRY_LIBRARY, key_of(library), &entry))
        return real.cuLibraryUnload(library);
    CUresult result = CALL_REAL(cuLibraryUnload, library);
    if (result != CUDA_SUCCESS) {
        (void)vgpu_ledger_put(process->ledger, &entry);
        return result;
    }
    (void)forget(process, ENTRY_FUNCTION, FIELD_BYTES, entry.key);
    (void)forget(process, ENTRY_MODULE, FIELD_AUX, entry.key);
    library_unloaded(process, entry.key);
    return result;
}

CUresult cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library, const char *name) {
    NEED_CUDA(cuLibraryGetKernel);
    struct process *process = enter();
    if (!process || process->mode != MODE_ON)
        return real.cuLibraryGetKernel(pKernel, library, name);
    CUresult result = CALL_REAL(cuLibraryGetKernel, pKernel, library, name);
    if (result == CUDA_SUCCESS)
        cukernel_seen(process, *pKernel, key_of(library));
    return result;
}

CUresult cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int numKernels, CUlibrary lib) {
    NEED_CUDA(cuLibraryEnumerateKernels);
    struct process *process = enter();
    unsigned int count = 0;
    if (!process || process->mode != MODE_ON || !real.cuLibraryGetKernelCount)
        return real.cuLibraryEnumerateKernels(kernels, numKernels, lib);
    CUresult result = CALL_REAL(cuLibraryEnumerateKernels, kernels, numKernels, lib);
    if (result != CUDA_SUCCESS || CALL_REAL(cuLibraryGetKernelCount, &count, lib) != CUDA_SUCCESS)
        return result;
    for (unsigned int i = 0; i < count && i < numKernels; i++)
        cukernel_seen(process, kernels[i], key_of(lib));
    return result;
}

/* A look-up that loads the library into the current context. */
static CUresult using_begin(struct loading *l, struct process *process, uint64_t library) {
    struct device *device;
    l->key = 0;
    uint64_t context = context_current();
    if (!context || !library || process_current(&device, process) != CUDA_SUCCESS)
        return CUDA_SUCCESS; /* the driver says what is wrong */
    return loading_begin(l, process, device, library, context);
}

#define USING_BODY(symbol, library, ...)                         \
    NEED_CUDA(symbol);                                           \
    struct process *process = enter();                           \
    struct loading l;                                            \
    if (!process || process->mode != MODE_ON)                    \
        return real.symbol(__VA_ARGS__);                         \
    CUresult result = using_begin(&l, process, key_of(library)); \
    if (result == CUDA_SUCCESS)                                  \
    result = loading_end(&l, CALL_REAL(symbol, __VA_ARGS__))

CUresult cuLibraryGetModule(CUmodule *pMod, CUlibrary library) {
    USING_BODY(cuLibraryGetModule, library, pMod, library);
    if (result == CUDA_SUCCESS) {
        struct device *device = NULL;
        (void)process_current(&device, process);
        struct vgpu_entry entry = {.key = key_of(*pMod),
                                   .kind = ENTRY_MODULE,
                                   .device = device ? device->ordinal : 0,
                                   .aux = key_of(library),
                                   .aux2 = context_current()};
        (void)vgpu_ledger_put(process->ledger, &entry);
    }
    return result;
}

CUresult cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name) {
    USING_BODY(cuLibraryGetGlobal, library, dptr, bytes, library, name);
    return result;
}

CUresult cuLibraryGetManaged(CUdeviceptr *dptr, size_t *bytes, CUlibrary library,
                             const char *name) {
    USING_BODY(cuLibraryGetManaged, library, dptr, bytes, library, name);
    return result;
}

static const void *library_of(struct process *process, CUkernel kernel) {
    struct vgpu_entry entry = {.bytes = 0};
    (void)vgpu_ledger_get(process->ledger, ENTRY_FUNCTION, key_of(kernel), &entry);
    return (const void *)(uintptr_t)entry.bytes;
}

CUresult cuKernelGetFunction(CUfunction *pFunc, CUkernel kernel) {
    USING_BODY(cuKernelGetFunction, library_of(process, kernel), pFunc, kernel);
    if (result == CUDA_SUCCESS)
        cufunction_seen(process, *pFunc, key_of(library_of(process, kernel)), 0);
    return result;
}
