/* Launches. Nothing runs; the handle and the shape are checked, and local memory grows. */
#include "sim_cuda.h"

static _Atomic uint64_t launches;

SIM_EXPORT uint64_t simgpu_launches(void);

/* For tests: kernels launched by this process, those of graphs included. */
uint64_t simgpu_launches(void) {
    return atomic_load(&launches);
}

void cu_count_launch(void) {
    atomic_fetch_add_explicit(&launches, 1, memory_order_relaxed);
}

static CUresult launch(void *handle, const unsigned grid[3], const unsigned block[3],
                       CUstream stream) {
    struct cu_stream *s;
    struct cu_function *f;
    struct cu_node *node;
    CU_TRY(cu_stream(stream, &s));
    CU_TRY(cu_function_of(handle, s->ctx, &f));
    CU_ARG(grid[0] && grid[1] && grid[2] && block[0] && block[1] && block[2]);
    CU_ARG(grid[0] <= 2147483647u && grid[1] <= 65535 && grid[2] <= 65535);
    CU_ARG((uint64_t)block[0] * block[1] * block[2] <= 1024 && block[2] <= 64);
    CU_TRY(cu_enqueue(stream, CU_GRAPH_NODE_TYPE_KERNEL, &s, &node));
    if (node) {
        node_set_function(node, f);
        return CUDA_SUCCESS;
    }
    CU_TRY(cu_function_need(f));
    cu_count_launch();
    return CUDA_SUCCESS;
}

SIM_PAIR(cuLaunchKernel,
         (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
          unsigned bz, unsigned shared, CUstream stream, void **params, void **extra),
         (f, gx, gy, gz, bx, by, bz, shared, stream, params, extra)) {
    (void)shared;
    CU_ARG(!(params && extra));
    return launch(f, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, stream);
}

SIM_PAIR(cuLaunchCooperativeKernel,
         (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
          unsigned bz, unsigned shared, CUstream stream, void **params),
         (f, gx, gy, gz, bx, by, bz, shared, stream, params)) {
    (void)shared, (void)params;
    return launch(f, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, stream);
}

SIM_PAIR_NEW(cuLaunchKernelEx, (const CUlaunchConfig *c, CUfunction f, void **params, void **extra),
             (c, f, params, extra)) {
    CU_TRY(cu_ready());
    CU_ARG(c && !(params && extra));
    return launch(f, (unsigned[]){c->gridDimX, c->gridDimY, c->gridDimZ},
                  (unsigned[]){c->blockDimX, c->blockDimY, c->blockDimZ}, c->hStream);
}

SIM_API(cuLaunchCooperativeKernelMultiDevice,
        (CUDA_LAUNCH_PARAMS * list, unsigned n, unsigned flags), (list, n, flags)) {
    CU_TRY(cu_ready());
    CU_ARG(list && n && flags <= 3);
    for (unsigned i = 0; i < n; i++)
        CU_TRY(launch(list[i].function,
                      (unsigned[]){list[i].gridDimX, list[i].gridDimY, list[i].gridDimZ},
                      (unsigned[]){list[i].blockDimX, list[i].blockDimY, list[i].blockDimZ},
                      list[i].hStream));
    return CUDA_SUCCESS;
}

/* ---- CUDA 2 and 3 ---- */

SIM_API(cuLaunch, (CUfunction f), (f)) {
    return launch(f, (unsigned[]){1, 1, 1}, (unsigned[]){1, 1, 1}, NULL);
}

SIM_API(cuLaunchGrid, (CUfunction f, int width, int height), (f, width, height)) {
    CU_ARG(width > 0 && height > 0);
    return launch(f, (unsigned[]){(unsigned)width, (unsigned)height, 1}, (unsigned[]){1, 1, 1},
                  NULL);
}

SIM_API(cuLaunchGridAsync, (CUfunction f, int width, int height, CUstream stream),
        (f, width, height, stream)) {
    CU_ARG(width > 0 && height > 0);
    return launch(f, (unsigned[]){(unsigned)width, (unsigned)height, 1}, (unsigned[]){1, 1, 1},
                  stream);
}

static CUresult is_function(CUfunction f) {
    CU_TRY(cu_ready());
    CU_CHECK(cu_handle_is(f, K_FUNCTION), CUDA_ERROR_INVALID_HANDLE);
    return CUDA_SUCCESS;
}

SIM_API(cuFuncSetBlockShape, (CUfunction f, int x, int y, int z), (f, x, y, z)) {
    CU_TRY(is_function(f));
    CU_ARG(x > 0 && y > 0 && z > 0);
    return CUDA_SUCCESS;
}

SIM_API(cuFuncSetSharedSize, (CUfunction f, unsigned bytes), (f, bytes)) {
    (void)bytes;
    return is_function(f);
}

SIM_API(cuParamSetSize, (CUfunction f, unsigned bytes), (f, bytes)) {
    (void)bytes;
    return is_function(f);
}

SIM_API(cuParamSeti, (CUfunction f, int offset, unsigned value), (f, offset, value)) {
    (void)offset, (void)value;
    return is_function(f);
}

SIM_API(cuParamSetf, (CUfunction f, int offset, float value), (f, offset, value)) {
    (void)offset, (void)value;
    return is_function(f);
}

SIM_API(cuParamSetv, (CUfunction f, int offset, void *p, unsigned bytes), (f, offset, p, bytes)) {
    (void)offset, (void)bytes;
    CU_TRY(is_function(f));
    CU_ARG(p);
    return CUDA_SUCCESS;
}

/* ---- occupancy: plausible constants ---- */

SIM_API(cuOccupancyMaxActiveBlocksPerMultiprocessor,
        (int *blocks, CUfunction f, int size, size_t shared), (blocks, f, size, shared)) {
    struct cu_ctx *ctx;
    struct cu_function *fn;
    (void)shared;
    CU_TRY(cu_current(&ctx));
    CU_TRY(cu_function_of(f, ctx, &fn));
    CU_ARG(blocks && size > 0 && size <= 1024);
    *blocks = (int)sim->dom[ctx->dom].threads_per_sm / (size < 32 ? 32 : size);
    return CUDA_SUCCESS;
}

SIM_API(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
        (int *blocks, CUfunction f, int size, size_t shared, unsigned flags),
        (blocks, f, size, shared, flags)) {
    CU_ARG(flags <= 1);
    return cuOccupancyMaxActiveBlocksPerMultiprocessor_body(blocks, f, size, shared);
}
