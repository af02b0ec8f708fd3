/* Arrays and mipmaps. The size is that of the block-linear layout, fitted to what the H200 asks for
 * (all 60 measured shapes): rows of 64-byte groups, heights and depths in blocks of groups. Small
 * ones share 2 MiB blocks with arrays of the same texel size, never with linear memory. */
#include "sim_cuda.h"

#include <stdlib.h>
#include <string.h>

#define REQUIRED_ALIGN 65536u

struct array {
    struct cu_obj obj;
    CUDA_ARRAY3D_DESCRIPTOR desc;
    bool mipmap, takes_none; /* deferred, sparse, a level, an import */
    unsigned levels;
    size_t bytes;
    CUdeviceptr at;
    struct array **level; /* of a mipmap: handles made on demand */
    struct array *whole;  /* of a level */
};

static size_t up(size_t v, size_t to) {
    return (v + to - 1) / to * to;
}

static size_t pow2(size_t v) {
    size_t p = 1;
    while (p < v)
        p *= 2;
    return p;
}

/* Bytes of a packed format's element, or 0. */
static size_t packed(unsigned format) {
    switch (format) {
    case CU_AD_FORMAT_UNORM_INT8X1:
    case CU_AD_FORMAT_SNORM_INT8X1:
        return 1;
    case CU_AD_FORMAT_UNORM_INT8X2:
    case CU_AD_FORMAT_SNORM_INT8X2:
    case CU_AD_FORMAT_UNORM_INT16X1:
    case CU_AD_FORMAT_SNORM_INT16X1:
    case CU_AD_FORMAT_NV12: /* one plane and a half of bytes, never more than two */
        return 2;
    case CU_AD_FORMAT_UNORM_INT8X4:
    case CU_AD_FORMAT_SNORM_INT8X4:
    case CU_AD_FORMAT_UNORM_INT16X2:
    case CU_AD_FORMAT_SNORM_INT16X2:
    case CU_AD_FORMAT_UNORM_INT_101010_2:
        return 4;
    case CU_AD_FORMAT_UNORM_INT16X4:
    case CU_AD_FORMAT_SNORM_INT16X4:
        return 8;
    default:
        return 0;
    }
}

/* Bytes of an element and how many texels it covers each way; 0 for formats we do not know. */
static size_t element(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned *cover) {
    unsigned ch = d->NumChannels, format = (unsigned)d->Format;
    bool compressed = format >= CU_AD_FORMAT_BC1_UNORM && format <= CU_AD_FORMAT_BC7_UNORM_SRGB;
    *cover = compressed ? 4 : 1;
    if (ch != 1 && ch != 2 && ch != 4 && !(ch == 3 && format >= CU_AD_FORMAT_BC1_UNORM))
        return 0;
    if (compressed)
        return format <= CU_AD_FORMAT_BC1_UNORM_SRGB || format == CU_AD_FORMAT_BC4_UNORM ||
                       format == CU_AD_FORMAT_BC4_SNORM
                   ? 8
                   : 16;
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return ch;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        return 2 * ch;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        return 4 * ch;
    default:
        return packed(format);
    }
}

static bool layered(const CUDA_ARRAY3D_DESCRIPTOR *d) {
    return d->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);
}

/* One image of w x h x deep texels. */
static size_t image_bytes(const CUDA_ARRAY3D_DESCRIPTOR *d, size_t w, size_t h, size_t deep) {
    unsigned cover;
    size_t size = element(d, &cover);
    size_t row = up((w + cover - 1) / cover * size, 64), rows = (h + cover - 1) / cover;
    size_t block_depth = deep > 1 ? pow2(deep) : 1;
    if (block_depth > 16)
        block_depth = 16;
    size_t block_rows = pow2((rows + 7) / 8);
    if (block_rows > 16 / block_depth)
        block_rows = 16 / block_depth;
    return row * up(rows, 8 * block_rows) * up(deep, block_depth);
}

static size_t half(size_t v, unsigned level) {
    return v >> level ? v >> level : 1;
}

static size_t all_bytes(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels) {
    size_t h = d->Height ? d->Height : 1, deep = layered(d) || !d->Depth ? 1 : d->Depth, sum = 0;
    for (unsigned l = 0; l < levels; l++)
        sum += image_bytes(d, half(d->Width, l), half(h, l), half(deep, l));
    return layered(d) ? sum * (d->Depth ? d->Depth : 1) : sum;
}

static CUresult check(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels) {
    unsigned cover;
    size_t h = d->Height ? d->Height : 1, deep = d->Depth ? d->Depth : 1;
    CU_ARG(d->Width && element(d, &cover));
    CU_ARG(d->Width <= 131072 && h <= 131072 && deep <= 16384);
    CU_ARG(!(d->Depth && !d->Height) || layered(d));
    size_t longest = d->Width > h ? d->Width : h;
    if (!layered(d) && deep > longest)
        longest = deep;
    CU_ARG(levels >= 1 && (levels == 1 || longest >> (levels - 1)));
    CU_ARG((d->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)) !=
           (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING));
    return CUDA_SUCCESS;
}

/* ---- memory ---- */

static CUresult take(struct cu_ctx *ctx, struct array *a) {
    unsigned cover;
    size_t texel = element(&a->desc, &cover);
    if (a->takes_none)
        return CUDA_SUCCESS;
    if (a->bytes <= PIECE_MAX) {
        int group = 1;
        while (texel > 1 && group < GROUPS - 1) {
            texel /= 2;
            group++;
        }
        return block_alloc(ctx, group, a->bytes, &a->at);
    }
    struct cu_rec *rec = cu_rec_take(R_ARRAY, ctx, a->bytes, false);
    CU_CHECK(rec, CUDA_ERROR_OUT_OF_MEMORY);
    a->at = rec->base;
    return CUDA_SUCCESS;
}

static void give(struct array *a) {
    struct cu_rec *rec = a->at ? va_find(a->at) : NULL;
    if (rec && rec->kind == R_BLOCK)
        block_free(rec, a->at);
    else if (rec)
        cu_rec_free(rec);
}

static void destroy(void *p) {
    struct array *a = p;
    for (unsigned l = 0; a->level && l < a->levels; l++)
        if (a->level[l])
            destroy(a->level[l]);
    if (a->whole)
        for (unsigned l = 0; l < a->whole->levels; l++)
            if (a->whole->level[l] == a)
                a->whole->level[l] = NULL;
    free(a->level);
    give(a);
    cu_handle_del(a);
    free(a);
}

static CUresult make(void **out, const CUDA_ARRAY3D_DESCRIPTOR *d, bool mipmap, unsigned levels,
                     bool takes_none) {
    struct cu_ctx *ctx;
    CU_TRY(cu_current(&ctx));
    CU_ARG(out && d);
    CU_TRY(check(d, levels));
    CU_TRY(cu_unsafe());
    struct array *a = calloc(1, sizeof *a);
    CU_CHECK(a, CUDA_ERROR_OUT_OF_MEMORY);
    a->obj = (struct cu_obj){ctx, destroy};
    a->desc = *d;
    a->mipmap = mipmap;
    a->levels = levels;
    a->bytes = all_bytes(d, levels);
    a->takes_none =
        takes_none || (d->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING));
    CUresult result = CUDA_SUCCESS;
    if (mipmap && !(a->level = calloc(levels, sizeof *a->level)))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS)
        result = take(ctx, a);
    if (result == CUDA_SUCCESS && !cu_handle_add(a, mipmap ? K_MIPMAP : K_ARRAY)) {
        give(a);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result != CUDA_SUCCESS) {
        free(a->level);
        free(a);
        return result;
    }
    *out = a;
    return CUDA_SUCCESS;
}

static CUresult find(const void *handle, enum cu_kind kind, struct array **out) {
    CU_TRY(cu_ready());
    CU_CHECK(cu_handle_is(handle, kind), CUDA_ERROR_INVALID_HANDLE);
    *out = (struct array *)(uintptr_t)handle;
    return CUDA_SUCCESS;
}

/* ---- API ---- */

SIM_API(cuArray3DCreate_v2, (CUarray * out, const CUDA_ARRAY3D_DESCRIPTOR *d), (out, d)) {
    return make((void **)out, d, false, 1, false);
}

SIM_API(cuArrayCreate_v2, (CUarray * out, const CUDA_ARRAY_DESCRIPTOR *d), (out, d)) {
    CU_TRY(cu_ready());
    CU_ARG(d);
    CUDA_ARRAY3D_DESCRIPTOR full = {
        .Width = d->Width, .Height = d->Height, .Format = d->Format, .NumChannels = d->NumChannels};
    return make((void **)out, &full, false, 1, false);
}

SIM_API(cuArrayCreate, (CUarray * out, const CUDA_ARRAY_DESCRIPTOR_v1 *d), (out, d)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_v1(&ctx));
    CU_ARG(d);
    CUDA_ARRAY_DESCRIPTOR wide = {d->Width, d->Height, d->Format, d->NumChannels};
    return cuArrayCreate_v2_body(out, &wide);
}

SIM_API(cuArray3DCreate, (CUarray * out, const CUDA_ARRAY3D_DESCRIPTOR_v1 *d), (out, d)) {
    struct cu_ctx *ctx;
    CU_TRY(cu_v1(&ctx));
    CU_ARG(d);
    CUDA_ARRAY3D_DESCRIPTOR wide = {d->Width,  d->Height,      d->Depth,
                                    d->Format, d->NumChannels, d->Flags};
    return make((void **)out, &wide, false, 1, false);
}

SIM_API(cuArrayDestroy, (CUarray handle), (handle)) {
    struct array *a;
    CU_TRY(find(handle, K_ARRAY, &a));
    CU_ARG(!a->whole); /* a level goes with its mipmap */
    destroy(a);
    return CUDA_SUCCESS;
}

SIM_API(cuArray3DGetDescriptor_v2, (CUDA_ARRAY3D_DESCRIPTOR * d, CUarray handle), (d, handle)) {
    struct array *a;
    CU_TRY(find(handle, K_ARRAY, &a));
    CU_ARG(d);
    *d = a->desc;
    return CUDA_SUCCESS;
}

SIM_API(cuArrayGetDescriptor_v2, (CUDA_ARRAY_DESCRIPTOR * d, CUarray handle), (d, handle)) {
    struct array *a;
    CU_TRY(find(handle, K_ARRAY, &a));
    CU_ARG(d);
    *d =
        (CUDA_ARRAY_DESCRIPTOR){a->desc.Width, a->desc.Height, a->desc.Format, a->desc.NumChannels};
    return CUDA_SUCCESS;
}

SIM_API(cuArrayGetDescriptor, (CUDA_ARRAY_DESCRIPTOR_v1 * d, CUarray handle), (d, handle)) {
    struct array *a;
    CU_TRY(find(handle, K_ARRAY, &a));
    CU_ARG(d);
    *d = (CUDA_ARRAY_DESCRIPTOR_v1){(unsigned)a->desc.Width, (unsigned)a->desc.Height,
                                    a->desc.Format, a->desc.NumChannels};
    return CUDA_SUCCESS;
}

SIM_API(cuArray3DGetDescriptor, (CUDA_ARRAY3D_DESCRIPTOR_v1 * d, CUarray handle), (d, handle)) {
    struct array *a;
    CU_TRY(find(handle, K_ARRAY, &a));
    CU_ARG(d);
    *d = (CUDA_ARRAY3D_DESCRIPTOR_v1){(unsigned)a->desc.Width, (unsigned)a->desc.Height,
                                      (unsigned)a->desc.Depth, a->desc.Format,
                                      a->desc.NumChannels,     a->desc.Flags};
    return CUDA_SUCCESS;
}

SIM_API(cuMipmappedArrayCreate,
        (CUmipmappedArray * out, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels),
        (out, d, levels)) {
    return make((void **)out, d, true, levels, false);
}

SIM_API(cuMipmappedArrayDestroy, (CUmipmappedArray handle), (handle)) {
    struct array *a;
    CU_TRY(find(handle, K_MIPMAP, &a));
    destroy(a);
    return CUDA_SUCCESS;
}

SIM_API(cuMipmappedArrayGetLevel, (CUarray * out, CUmipmappedArray handle, unsigned level),
        (out, handle, level)) {
    struct array *m;
    CU_TRY(find(handle, K_MIPMAP, &m));
    CU_ARG(out && level < m->levels);
    if (!m->level[level]) {
        CUDA_ARRAY3D_DESCRIPTOR d = m->desc;
        d.Width = half(d.Width, level);
        d.Height = d.Height ? half(d.Height, level) : 0;
        d.Depth = d.Depth && !layered(&d) ? half(d.Depth, level) : d.Depth;
        CU_TRY(make((void **)&m->level[level], &d, false, 1, true));
        m->level[level]->whole = m;
        m->level[level]->obj.ctx = NULL;
    }
    *out = (CUarray)m->level[level];
    return CUDA_SUCCESS;
}

SIM_API(cuExternalMemoryGetMappedMipmappedArray,
        (CUmipmappedArray * out, CUexternalMemory memory,
         const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC *d),
        (out, memory, d)) {
    CU_TRY(cu_ready());
    CU_CHECK(cu_handle_is(memory, K_EXTMEM), CUDA_ERROR_INVALID_HANDLE);
    CU_ARG(d);
    return make((void **)out, &d->arrayDesc, true, d->numLevels, true);
}

/* Only memory that is mapped later has requirements. */
static CUresult required(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, const struct array *a) {
    CU_ARG(out && (a->desc.Flags & CUDA_ARRAY3D_DEFERRED_MAPPING));
    *out = (CUDA_ARRAY_MEMORY_REQUIREMENTS){.size = up(a->bytes, REQUIRED_ALIGN),
                                            .alignment = REQUIRED_ALIGN};
    return CUDA_SUCCESS;
}

SIM_API_NEW(cuArrayGetMemoryRequirements,
            (CUDA_ARRAY_MEMORY_REQUIREMENTS * out, CUarray handle, CUdevice dev),
            (out, handle, dev)) {
    struct array *a;
    struct cu_device *d;
    CU_TRY(find(handle, K_ARRAY, &a));
    CU_TRY(cu_device_of(dev, &d));
    return required(out, a);
}

SIM_API_NEW(cuMipmappedArrayGetMemoryRequirements,
            (CUDA_ARRAY_MEMORY_REQUIREMENTS * out, CUmipmappedArray handle, CUdevice dev),
            (out, handle, dev)) {
    struct array *a;
    struct cu_device *d;
    CU_TRY(find(handle, K_MIPMAP, &a));
    CU_TRY(cu_device_of(dev, &d));
    return required(out, a);
}

static CUresult sparse(CUDA_ARRAY_SPARSE_PROPERTIES *out, const struct array *a) {
    CU_ARG(out && (a->desc.Flags & CUDA_ARRAY3D_SPARSE));
    memset(out, 0, sizeof *out);
    out->tileExtent.width = out->tileExtent.height = 128;
    out->tileExtent.depth = 1;
    out->miptailFirstLevel = a->levels;
    return CUDA_SUCCESS;
}

SIM_API(cuArrayGetSparseProperties, (CUDA_ARRAY_SPARSE_PROPERTIES * out, CUarray handle),
        (out, handle)) {
    struct array *a;
    CU_TRY(find(handle, K_ARRAY, &a));
    return sparse(out, a);
}

SIM_API(cuMipmappedArrayGetSparseProperties,
        (CUDA_ARRAY_SPARSE_PROPERTIES * out, CUmipmappedArray handle), (out, handle)) {
    struct array *a;
    CU_TRY(find(handle, K_MIPMAP, &a));
    return sparse(out, a);
}

/* The memory of the tiles is that of the handles. */
SIM_PAIR(cuMemMapArrayAsync, (CUarrayMapInfo * list, unsigned n, CUstream stream),
         (list, n, stream)) {
    struct cu_stream *s;
    struct cu_node *node;
    CU_TRY(cu_enqueue(stream, CU_GRAPH_NODE_TYPE_EMPTY, &s, &node));
    CU_ARG(list && n);
    return CUDA_SUCCESS;
}
