#include <errno.h>
#include <string.h>

#include "vmm.h"

/* Arrays, and memory imported from other interfaces.
 *
 * An array's size is told by the driver for a twin whose memory is mapped later, which itself takes
 * nothing; where it cannot be told it follows from the descriptor, never too low. Above 1 MiB an
 * array holds whole granules and is charged exactly. Smaller ones share blocks with arrays of their
 * family, at no address we know: a block is charged before the call and NVML's figure settles
 * what really came. Without that figure each keeps its share of a block of its equals. */

#define GOB_WIDTH 64
#define GOB_ROWS 8
#define BLOCK_GOBS 16
#define ARRAY_ALIGNMENT (UINT64_C(64) << 10)
#define MAP_LATER (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)
/* The driver's name for no mipmap chain. */
#define NO_LEVELS 0

struct array {
    struct process *process;
    struct device *device;
    unsigned int levels;
    bool nothing;         /* takes its memory by cuMemMapArrayAsync */
    uint64_t bytes;       /* charged exactly, or 0 */
    uint64_t share;       /* what it holds of a block, or an estimate */
    struct taking taking; /* of what is not exact */
};

/* ---- sizes ----------------------------------------------------------------------------------- */

static uint64_t times(uint64_t a, uint64_t b) {
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

static uint64_t round_up(uint64_t value, uint64_t unit) {
    return value > UINT64_MAX - unit ? UINT64_MAX / unit * unit : (value + unit - 1) / unit * unit;
}

/* Smallest power of two that holds `value`, at most `most`. */
static uint64_t power_of_two(uint64_t value, uint64_t most) {
    uint64_t power = 1;
    while (power < value && power < most)
        power *= 2;
    return power;
}

struct texel {
    unsigned int bytes; /* of a texel, or of a block of 4 x 4 */
    unsigned int edge;  /* 1 or 4 */
};

static struct texel texel_of(CUarray_format format, unsigned int channels) {
    unsigned int code = (unsigned int)format;
    switch (code) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return (struct texel){channels, 1};
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        return (struct texel){2 * channels, 1};
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        return (struct texel){4 * channels, 1};
    case CU_AD_FORMAT_UNORM_INT_101010_2:
        return (struct texel){4, 1};
    case CU_AD_FORMAT_UNORM_INT8X1:
    case CU_AD_FORMAT_SNORM_INT8X1:
        return (struct texel){1, 1};
    case CU_AD_FORMAT_UNORM_INT8X2:
    case CU_AD_FORMAT_SNORM_INT8X2:
    case CU_AD_FORMAT_UNORM_INT16X1:
    case CU_AD_FORMAT_SNORM_INT16X1:
        return (struct texel){2, 1};
    case CU_AD_FORMAT_UNORM_INT8X4:
    case CU_AD_FORMAT_SNORM_INT8X4:
    case CU_AD_FORMAT_UNORM_INT16X2:
    case CU_AD_FORMAT_SNORM_INT16X2:
        return (struct texel){4, 1};
    case CU_AD_FORMAT_UNORM_INT16X4:
    case CU_AD_FORMAT_SNORM_INT16X4:
        return (struct texel){8, 1};
    default:
        break;
    }
    if (code >= CU_AD_FORMAT_BC1_UNORM && code <= CU_AD_FORMAT_BC7_UNORM_SRGB) {
        bool half = code <= CU_AD_FORMAT_BC1_UNORM_SRGB || code == CU_AD_FORMAT_BC4_UNORM ||
                    code == CU_AD_FORMAT_BC4_SNORM;
        return (struct texel){half ? 8 : 16, 4};
    }
    /* Video formats of several planes take at most 8, and no format more than 16. */
    return (struct texel){code >= CU_AD_FORMAT_P010 ? 8 : 16, 1};
}

/* Bytes of one level, in tiles of 64 bytes by 8 rows that are gathered into blocks of up to 16
 * tiles in height (measured; in depth likewise). `depth` counts slices of a volume. */
static uint64_t level_bytes(struct texel texel, uint64_t width, uint64_t height, uint64_t depth) {
    uint64_t columns = round_up(width ? width : 1, texel.edge) / texel.edge;
    uint64_t rows = round_up(height ? height : 1, texel.edge) / texel.edge;
    uint64_t row = round_up(times(columns, texel.bytes), GOB_WIDTH);
    uint64_t unit = GOB_ROWS * power_of_two((rows + GOB_ROWS - 1) / GOB_ROWS, BLOCK_GOBS);
    uint64_t slices = round_up(depth, power_of_two(depth, BLOCK_GOBS));
    return times(times(row, round_up(rows, unit)), slices);
}

static uint64_t size_by_descriptor(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels) {
    struct texel texel = texel_of(d->Format, d->NumChannels);
    bool layered = (d->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) != 0;
    uint64_t layers = layered && d->Depth ? d->Depth : 1;
    uint64_t depth = !layered && d->Depth ? d->Depth : 1, total = 0;
    for (unsigned int level = 0; level < (levels ? levels : 1) && level < 64; level++) {
        uint64_t bytes = level_bytes(texel, d->Width >> level, d->Height >> level,
                                     depth >> level ? depth >> level : 1);
        bytes = times(round_up(bytes, layered ? ARRAY_ALIGNMENT : GOB_WIDTH), layers);
        total = total > UINT64_MAX - bytes ? UINT64_MAX : total + bytes;
    }
    return round_up(total ? total : 1, ARRAY_ALIGNMENT);
}

/* Asks the driver, by a twin that takes no memory. Legal wherever making an array is. */
static CUresult size_by_driver(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels,
                               CUdevice device, uint64_t *bytes) {
    CUDA_ARRAY3D_DESCRIPTOR twin = *d;
    CUDA_ARRAY_MEMORY_REQUIREMENTS needed;
    CUmipmappedArray mipmap = NULL;
    CUarray array = NULL;
    CUresult result;
    memset(&needed, 0, sizeof needed);
    twin.Flags |= CUDA_ARRAY3D_DEFERRED_MAPPING;
    if (!real.cuArrayGetMemoryRequirements || !real.cuMipmappedArrayGetMemoryRequirements)
        return CUDA_ERROR_NOT_FOUND;
    if (levels == NO_LEVELS) {
        result = CALL_REAL(cuArray3DCreate_v2, &array, &twin);
        if (result != CUDA_SUCCESS)
            return result;
        result = CALL_REAL(cuArrayGetMemoryRequirements, &needed, array, device);
        (void)CALL_REAL(cuArrayDestroy, array);
    } else {
        result = CALL_REAL(cuMipmappedArrayCreate, &mipmap, &twin, levels);
        if (result != CUDA_SUCCESS)
            return result;
        result = CALL_REAL(cuMipmappedArrayGetMemoryRequirements, &needed, mipmap, device);
        (void)CALL_REAL(cuMipmappedArrayDestroy, mipmap);
    }
    *bytes = needed.size;
    return result == CUDA_SUCCESS && needed.size == 0 ? CUDA_ERROR_NOT_FOUND : result;
}

/* ---- making and destroying ------------------------------------------------------------------- */

/* No process of this container has NVML's figure: estimates stay. */
static bool never_settles(struct process *process) {
    uint32_t state = __atomic_load_n(&vgpu_core_ext(process->core)->state, __ATOMIC_RELAXED);
    return state == VGPU_STATE_UNSETTLED;
}

/* Charges. CUDA_SUCCESS: call the driver, then array_end; anything else is the answer. */
static CUresult array_begin(struct array *a, struct process *process,
                            const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels) {
    *a = (struct array){.process = process, .levels = levels};
    CUresult result = process_current(&a->device, process);
    if (result != CUDA_SUCCESS)
        return result;
    a->nothing = (d->Flags & MAP_LATER) != 0;
    if (a->nothing)
        return CUDA_SUCCESS;
    if (process->mode != MODE_ON)
        return NO_MEMORY;
    uint64_t needed = 0;
    CUstreamCaptureMode mode = capture_relax();
    CUresult asked = size_by_driver(d, levels, a->device->ordinal, &needed);
    capture_restore(mode);
    if (asked != CUDA_SUCCESS)
        needed = size_by_descriptor(d, levels);
    if (asked == CUDA_SUCCESS && needed > MIB) {
        a->bytes = granules(needed);
        charging_begin(process, a->device);
        result = charge(process, a->device, a->bytes, VGPU_KIND_DATA);
        if (result != CUDA_SUCCESS)
            operation_end(a->device);
        return result;
    }
    a->share = needed > MIB ? granules(needed) : GRANULE / (GRANULE / needed);
    result = taking_begin(&a->taking, process, a->device, granules(needed));
    /* A refusal must not hide that the driver would not make such an array at all. */
    return result != CUDA_SUCCESS && asked == CUDA_ERROR_INVALID_VALUE ? asked : result;
}

static void array_undo(const struct array *a, uint64_t handle) {
    if (a->levels == NO_LEVELS)
        (void)CALL_REAL(cuArrayDestroy, (CUarray)(uintptr_t)handle);
    else
        (void)CALL_REAL(cuMipmappedArrayDestroy, (CUmipmappedArray)(uintptr_t)handle);
}

static int array_enter(struct array *a, uint64_t handle) {
    struct vgpu_entry old, entry = {.key = handle,
                                    .kind = ENTRY_ARRAY,
                                    .device = a->device->ordinal,
                                    .bytes = a->bytes,
                                    .aux = a->share,
                                    .aux2 = context_current()};
    int error = vgpu_ledger_put(a->process->ledger, &entry);
    /* An old entry of the same handle went with its context. */
    if (error != -EEXIST || vgpu_ledger_take(a->process->ledger, ENTRY_ARRAY, handle, &old))
        return error;
    give_back(a->process, a->device, old.bytes, VGPU_KIND_DATA);
    return vgpu_ledger_put(a->process->ledger, &entry);
}

static CUresult array_end_exact(struct array *a, CUresult result, uint64_t handle) {
    if (result == CUDA_SUCCESS && array_enter(a, handle)) {
        array_undo(a, handle);
        result = NO_MEMORY;
    }
    if (result != CUDA_SUCCESS)
        give_back(a->process, a->device, a->bytes, VGPU_KIND_DATA);
    operation_end(a->device);
    return result;
}

static CUresult array_end_estimate(struct array *a, CUresult result, uint64_t handle) {
    struct vgpu_entry entry;
    uint64_t charged = a->taking.bytes;
    if (result == CUDA_SUCCESS && array_enter(a, handle)) {
        array_undo(a, handle);
        result = NO_MEMORY;
    }
    CUresult answer = taking_end(&a->taking, result, false);
    if (result != CUDA_SUCCESS)
        return result;
    if (answer != CUDA_SUCCESS) {
        (void)vgpu_ledger_take(a->process->ledger, ENTRY_ARRAY, handle, &entry);
        array_undo(a, handle);
        taking_undone(&a->taking);
    } else if (never_settles(a->process)) {
        estimate_give_back(a->process, a->device, charged - a->share);
    }
    return answer;
}

/* Takes the driver's result, and destroys what does not fit. */
static CUresult array_end(struct array *a, CUresult result, const void *array) {
    uint64_t handle = key_of(array);
    if (a->nothing) {
        /* Noted for the tiles that are to be mapped into it. */
        if (result == CUDA_SUCCESS && tracks(a->process))
            (void)array_enter(a, handle);
        return result;
    }
    return a->bytes ? array_end_exact(a, result, handle) : array_end_estimate(a, result, handle);
}

/* After the driver destroyed an array. */
static void array_gone(struct process *process, struct device *device,
                       const struct vgpu_entry *entry) {
    if (entry->bytes)
        give_back(process, device, entry->bytes, VGPU_KIND_DATA);
    else if (!entry->aux)
        vmm_array_gone(process, entry->key);
    operation_end(device);
    if (!entry->aux)
        return;
    settle_less(process, device, entry->aux);
}

#define DESTROY_BODY(symbol, array)                                               \
    NEED_CUDA(symbol);                                                            \
    struct process *process = enter();                                            \
    struct vgpu_entry entry;                                                      \
    if (!tracks(process) ||                                                       \
        vgpu_ledger_take(process->ledger, ENTRY_ARRAY, (uintptr_t)array, &entry)) \
        return real.symbol(array);                                                \
    struct device *device = &process->devices[entry.device];                      \
    operation_begin(device);                                                      \
    CUresult result = CALL_REAL(symbol, array);                                   \
    if (result == CUDA_SUCCESS) {                                                 \
        array_gone(process, device, &entry);                                      \
        return result;                                                            \
    }                                                                             \
    (void)vgpu_ledger_put(process->ledger, &entry);                               \
    operation_end(device);                                                        \
    return result

/* `descriptor` is the caller's in the widest form. */
#define CREATE_BODY(symbol, type, descriptor, levels, ...)          \
    struct array a;                                                 \
    CUresult result = array_begin(&a, process, descriptor, levels); \
    if (result != CUDA_SUCCESS)                                     \
        return result;                                              \
    type made = NULL;                                               \
    result = CALL_REAL(symbol, &made, __VA_ARGS__);                 \
    result = array_end(&a, result, made);                           \
    if (result == CUDA_SUCCESS)                                     \
        *pHandle = made;                                            \
    return result

#define WIDE(d, depth, flags) {(d)->Width, (d)->Height, depth, (d)->Format, (d)->NumChannels, flags}

CUresult cuArrayCreate_v2(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *pAllocateArray) {
    NEED_CUDA(cuArrayCreate_v2);
    struct process *process = enter();
    if (!process || !pHandle || !pAllocateArray)
        return real.cuArrayCreate_v2(pHandle, pAllocateArray);
    const CUDA_ARRAY3D_DESCRIPTOR wide = WIDE(pAllocateArray, 0, 0);
    CREATE_BODY(cuArrayCreate_v2, CUarray, &wide, NO_LEVELS, pAllocateArray);
}

CUresult cuArrayCreate(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR_v1 *pAllocateArray) {
    NEED_CUDA(cuArrayCreate);
    struct process *process = enter();
    if (!process || !pHandle || !pAllocateArray)
        return real.cuArrayCreate(pHandle, pAllocateArray);
    const CUDA_ARRAY3D_DESCRIPTOR wide = WIDE(pAllocateArray, 0, 0);
    CREATE_BODY(cuArrayCreate, CUarray, &wide, NO_LEVELS, pAllocateArray);
}

CUresult cuArray3DCreate_v2(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray) {
    NEED_CUDA(cuArray3DCreate_v2);
    struct process *process = enter();
    if (!process || !pHandle || !pAllocateArray)
        return real.cuArray3DCreate_v2(pHandle, pAllocateArray);
    CREATE_BODY(cuArray3DCreate_v2, CUarray, pAllocateArray, NO_LEVELS, pAllocateArray);
}

CUresult cuArray3DCreate(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR_v1 *pAllocateArray) {
    NEED_CUDA(cuArray3DCreate);
    struct process *process = enter();
    if (!process || !pHandle || !pAllocateArray)
        return real.cuArray3DCreate(pHandle, pAllocateArray);
    const CUDA_ARRAY3D_DESCRIPTOR wide =
        WIDE(pAllocateArray, pAllocateArray->Depth, pAllocateArray->Flags);
    CREATE_BODY(cuArray3DCreate, CUarray, &wide, NO_LEVELS, pAllocateArray);
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *pHandle,
                                const CUDA_ARRAY3D_DESCRIPTOR *pMipmappedArrayDesc,
                                unsigned int numMipmapLevels) {
    NEED_CUDA(cuMipmappedArrayCreate);
    struct process *process = enter();
    if (!process || !pHandle || !pMipmappedArrayDesc || !numMipmapLevels)
        return real.cuMipmappedArrayCreate(pHandle, pMipmappedArrayDesc, numMipmapLevels);
    CREATE_BODY(cuMipmappedArrayCreate, CUmipmappedArray, pMipmappedArrayDesc, numMipmapLevels,
                pMipmappedArrayDesc, numMipmapLevels);
}

CUresult cuArrayDestroy(CUarray hArray) {
    DESTROY_BODY(cuArrayDestroy, hArray);
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray hMipmappedArray) {
    DESTROY_BODY(cuMipmappedArrayDestroy, hMipmappedArray);
}

/* ---- external memory ------------------------------------------------------------------------- */

/* Memory that another interface made: nobody else charges it, and NVML counts it for its maker. It
 * is charged in full, to the device that imports it, for as long as the import lives. */

static void external_gone(struct process *process, struct device *device, uint64_t bytes) {
    invisible_add(device, -(int64_t)bytes);
    give_back(process, device, bytes, VGPU_KIND_DATA);
}

CUresult cuImportExternalMemory(CUexternalMemory *extMem_out,
                                const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *memHandleDesc) {
    NEED_CUDA(cuImportExternalMemory);
    struct process *process = enter();
    struct device *device;
    if (!process || !extMem_out || !memHandleDesc || !memHandleDesc->size)
        return real.cuImportExternalMemory(extMem_out, memHandleDesc);
    CUresult result = process_current(&device, process);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t charged = granules(memHandleDesc->size);
    charging_begin(process, device);
    result = charge(process, device, charged, VGPU_KIND_DATA);
    if (result == CUDA_SUCCESS) {
        CUexternalMemory made = NULL;
        invisible_add(device, (int64_t)charged);
        result = CALL_REAL(cuImportExternalMemory, &made, memHandleDesc);
        struct vgpu_entry entry = {.key = (uintptr_t)made,
                                   .kind = ENTRY_EXTERNAL,
                                   .device = device->ordinal,
                                   .bytes = charged,
                                   .aux2 = context_current()};
        if (result == CUDA_SUCCESS && vgpu_ledger_put(process->ledger, &entry)) {
            (void)CALL_REAL(cuDestroyExternalMemory, made);
            result = NO_MEMORY;
        }
        if (result == CUDA_SUCCESS)
            *extMem_out = made;
        else
            external_gone(process, device, charged);
    }
    operation_end(device);
    return result;
}

CUresult cuDestroyExternalMemory(CUexternalMemory extMem) {
    NEED_CUDA(cuDestroyExternalMemory);
    struct process *process = enter();
    struct vgpu_entry entry;
    if (!tracks(process) ||
        vgpu_ledger_take(process->ledger, ENTRY_EXTERNAL, (uintptr_t)extMem, &entry))
        return real.cuDestroyExternalMemory(extMem);
    struct device *device = &process->devices[entry.device];
    operation_begin(device);
    CUresult result = CALL_REAL(cuDestroyExternalMemory, extMem);
    if (result == CUDA_SUCCESS)
        external_gone(process, device, entry.bytes);
    else
        (void)vgpu_ledger_put(process->ledger, &entry);
    operation_end(device);
    return result;
}
