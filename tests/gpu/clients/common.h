#pragma once
#define _GNU_SOURCE
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB (1024ull * 1024ull)
#define GIB (1024ull * MIB)

static CUdevice device;
static CUcontext context;

static void must(const char *what, CUresult result) {
    if (result == CUDA_SUCCESS)
        return;
    fprintf(stderr, "%s: %d\n", what, (int)result);
    exit(3);
}

/* CUDA_SUCCESS, or what kept the context from being made. */
static inline CUresult start(int ordinal) {
    must("cuInit", cuInit(0));
    must("cuDeviceGet", cuDeviceGet(&device, ordinal));
    CUresult result = cuDevicePrimaryCtxRetain(&context, device);
    return result != CUDA_SUCCESS ? result : cuCtxSetCurrent(context);
}

/* Room for the text of an image. */
#define PTX 2048

/* A kernel `work` with `local` bytes of local memory a thread, beside `global` bytes of global
 * memory. */
static inline void image_text(char *text, size_t local, size_t global) {
    char body[512] = "", array[128] = "";
    if (local)
        snprintf(body, sizeof body,
                 ".local .align 4 .b8 buf[%zu]; .reg .u64 %%a,%%b; .reg .u32 %%t;"
                 "mov.u32 %%t,%%tid.x; cvt.u64.u32 %%a,%%t; mov.u64 %%b,buf; add.u64 %%b,%%b,%%a;"
                 "st.local.u8 [%%b],%%t; xor.b64 %%b,%%b,1; ld.local.u8 %%t,[%%b]; st.global.u32 "
                 "[sink],%%t;",
                 local);
    if (global)
        snprintf(array, sizeof array, ".visible .global .align 4 .b8 image[%zu];\n", global);
    snprintf(text, PTX,
             ".version 7.0\n.target sm_70\n.address_size 64\n.global .u32 sink;\n%s.visible .entry "
             "work(){%s ret;}\n",
             array, body);
}

/* A kernel `work` that takes 64 bytes from the heap. */
static inline void heap_text(char *text) {
    snprintf(text, PTX,
             ".version 7.0\n.target sm_70\n.address_size 64\n.global .u64 sink;\n"
             ".extern .func (.param .b64 out) malloc (.param .b64 size);\n"
             ".visible .entry work(){.reg .b64 %%r; mov.u64 %%r,64; {.param .b64 p; .param .b64 q; "
             "st.param.b64 [p],%%r; call.uni (q),malloc,(p); ld.param.b64 %%r,[q];} "
             "st.global.u64 [sink],%%r; ret;}\n");
}

static inline CUresult load(CUmodule *module, CUfunction *function, size_t local, size_t global) {
    char text[PTX];
    image_text(text, local, global);
    CUresult result = cuModuleLoadData(module, text);
    return result != CUDA_SUCCESS ? result : cuModuleGetFunction(function, *module, "work");
}

static inline CUmemPoolProps on_device(void) {
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED};
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    return properties;
}
