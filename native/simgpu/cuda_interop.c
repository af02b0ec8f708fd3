/* Contexts made for graphics. The headers of these calls need GL and VDPAU, so the prototypes are
 * written out here. */
#include "sim_cuda.h"

CUresult cuCtxCreate_v2_body(CUcontext *pctx, unsigned flags, CUdevice dev);

CUresult cuGLCtxCreate_v2(CUcontext *pctx, unsigned flags, CUdevice dev);
CUresult cuGLCtxCreate(CUcontext *pctx, unsigned flags, CUdevice dev);
CUresult cuVDPAUCtxCreate_v2(CUcontext *pctx, unsigned flags, CUdevice dev, unsigned device,
                             void *get);
CUresult cuVDPAUCtxCreate(CUcontext *pctx, unsigned flags, CUdevice dev, unsigned device,
                          void *get);

SIM_API(cuGLCtxCreate_v2, (CUcontext * pctx, unsigned flags, CUdevice dev), (pctx, flags, dev)) {
    return cuCtxCreate_v2_body(pctx, flags, dev);
}
SIM_TWIN(cuGLCtxCreate, cuGLCtxCreate_v2, (CUcontext * pctx, unsigned flags, CUdevice dev),
         (pctx, flags, dev))

SIM_API(cuVDPAUCtxCreate_v2,
        (CUcontext * pctx, unsigned flags, CUdevice dev, unsigned device, void *get),
        (pctx, flags, dev, device, get)) {
    (void)device;
    CU_ARG(get);
    return cuCtxCreate_v2_body(pctx, flags, dev);
}
SIM_TWIN(cuVDPAUCtxCreate, cuVDPAUCtxCreate_v2,
         (CUcontext * pctx, unsigned flags, CUdevice dev, unsigned device, void *get),
         (pctx, flags, dev, device, get))
