/* Every export without behaviour: not supported, once initialised. No prototypes are needed, so
 * this file leaves cuda.h alone; extra arguments are harmless in the C calling conventions. */
#include "sim.h"

int cu_stub(const char *name);

#define STUB_AS(vis, name)     \
    vis int name(void);        \
    vis int name(void) {       \
        return cu_stub(#name); \
    }                          \
    extern __typeof__(name) name##_self __attribute__((alias(#name), visibility("hidden")));
#define STUB(name) STUB_AS(SIM_EXPORT, name)
#ifdef SIM_OLD_DRIVER
#define STUB_NEW(name) STUB_AS(__attribute__((visibility("hidden"), used)), name)
#else
#define STUB_NEW(name) STUB(name)
#endif

STUB(cudbgApiAttach)
STUB(cudbgApiDetach)
STUB(cudbgApiInit)
STUB(cudbgGetAPI) STUB(cudbgGetAPIVersion) STUB(cudbgMain) STUB(cudbgReportDriverApiError) STUB(cudbgReportDriverInternalError) STUB(
    cuDestroyExternalSemaphore) STUB(cuDeviceGetNvSciSyncAttributes) STUB(cuEGLApiInit) STUB(cuEGLStreamConsumerAcquireFrame)
    STUB(cuEGLStreamConsumerConnect) STUB(cuEGLStreamConsumerConnectWithFlags) STUB(cuEGLStreamConsumerDisconnect) STUB(
        cuEGLStreamConsumerReleaseFrame) STUB(cuEGLStreamProducerConnect) STUB(cuEGLStreamProducerDisconnect) STUB(cuEGLStreamProducerPresentFrame)
        STUB(cuEGLStreamProducerReturnFrame) STUB(cuGLGetDevices) STUB(cuGLGetDevices_v2) STUB(cuGLInit) STUB(
            cuGLMapBufferObject) STUB(cuGLMapBufferObjectAsync) STUB(cuGLMapBufferObjectAsync_v2) STUB(cuGLMapBufferObjectAsync_v2_ptsz)
            STUB(cuGLMapBufferObject_v2) STUB(cuGLMapBufferObject_v2_ptds) STUB(cuGLRegisterBufferObject) STUB(
                cuGLSetBufferObjectMapFlags) STUB(cuGLUnmapBufferObject) STUB(cuGLUnmapBufferObjectAsync)
                STUB(cuGLUnregisterBufferObject) STUB(cuGraphExecChildGraphNodeSetParams) STUB(
                    cuGraphExecEventRecordNodeSetEvent) STUB(cuGraphExecEventWaitNodeSetEvent) STUB(cuGraphicsEGLRegisterImage)
                    STUB(cuGraphicsGLRegisterBuffer) STUB(cuGraphicsGLRegisterImage) STUB(cuGraphicsMapResources) STUB(
                        cuGraphicsMapResources_ptsz) STUB(cuGraphicsResourceGetMappedEglFrame) STUB(cuGraphicsResourceGetMappedMipmappedArray)
                        STUB(cuGraphicsResourceGetMappedPointer) STUB(cuGraphicsResourceGetMappedPointer_v2) STUB(
                            cuGraphicsResourceSetMapFlags) STUB(cuGraphicsResourceSetMapFlags_v2)
                            STUB(cuGraphicsSubResourceGetMappedArray) STUB(cuGraphicsUnmapResources) STUB(
                                cuGraphicsUnmapResources_ptsz) STUB(cuGraphicsUnregisterResource)
                                STUB(cuGraphicsVDPAURegisterOutputSurface) STUB(cuGraphicsVDPAURegisterVideoSurface) STUB(
                                    cuGraphKernelNodeCopyAttributes) STUB(cuGraphKernelNodeGetAttribute) STUB(cuGraphKernelNodeSetAttribute)
                                    STUB(cuGraphNodeFindInClone) STUB(cuImportExternalSemaphore) STUB(
                                        cuIpcGetEventHandle) STUB(cuIpcOpenEventHandle) STUB(cuLinkAddData)
                                        STUB(cuLinkAddData_v2) STUB(cuLinkAddFile) STUB(
                                            cuLinkAddFile_v2) STUB(cuLinkComplete) STUB(cuLinkCreate)
                                            STUB(cuLinkCreate_v2) STUB(cuLinkDestroy) STUB(cuMemGetAttribute) STUB(
                                                cuMemGetAttribute_v2) STUB(cuModuleGetSurfRef) STUB(cuModuleGetTexRef)
                                                STUB(cuOccupancyAvailableDynamicSMemPerBlock) STUB(
                                                    cuOccupancyMaxPotentialBlockSize) STUB(cuOccupancyMaxPotentialBlockSizeWithFlags)
                                                    STUB(cuParamSetTexRef) STUB(cuProfilerInitialize) STUB(
                                                        cuProfilerStart) STUB(cuProfilerStop) STUB(cuSignalExternalSemaphoresAsync)
                                                        STUB(cuSignalExternalSemaphoresAsync_ptsz) STUB(
                                                            cuStreamBatchMemOp) STUB(cuStreamBatchMemOp_ptsz)
                                                            STUB(cuStreamWaitValue32) STUB(
                                                                cuStreamWaitValue32_ptsz) STUB(cuStreamWaitValue64)
                                                                STUB(cuStreamWaitValue64_ptsz) STUB(
                                                                    cuStreamWriteValue32) STUB(cuStreamWriteValue32_ptsz)
                                                                    STUB(cuStreamWriteValue64) STUB(cuStreamWriteValue64_ptsz) STUB(
                                                                        cuSurfObjectCreate) STUB(cuSurfObjectDestroy)
                                                                        STUB(cuSurfObjectGetResourceDesc) STUB(cuSurfRefGetArray) STUB(
                                                                            cuSurfRefSetArray) STUB(cuTexObjectCreate)
                                                                            STUB(cuTexObjectDestroy) STUB(
                                                                                cuTexObjectGetResourceDesc)
                                                                                STUB(cuTexObjectGetResourceViewDesc) STUB(
                                                                                    cuTexObjectGetTextureDesc)
                                                                                    STUB(cuTexRefCreate) STUB(
                                                                                        cuTexRefDestroy) STUB(cuTexRefGetAddress)
                                                                                        STUB(cuTexRefGetAddressMode) STUB(
                                                                                            cuTexRefGetAddress_v2)
                                                                                            STUB(cuTexRefGetArray) STUB(
                                                                                                cuTexRefGetBorderColor) STUB(cuTexRefGetFilterMode) STUB(cuTexRefGetFlags) STUB(cuTexRefGetFormat) STUB(cuTexRefGetMaxAnisotropy) STUB(cuTexRefGetMipmapFilterMode) STUB(cuTexRefGetMipmapLevelBias) STUB(cuTexRefGetMipmapLevelClamp) STUB(cuTexRefGetMipmappedArray) STUB(cuTexRefSetAddress) STUB(cuTexRefSetAddress2D) STUB(cuTexRefSetAddress2D_v2) STUB(cuTexRefSetAddress2D_v3) STUB(cuTexRefSetAddressMode) STUB(cuTexRefSetAddress_v2) STUB(cuTexRefSetArray) STUB(cuTexRefSetBorderColor) STUB(cuTexRefSetFilterMode) STUB(cuTexRefSetFlags) STUB(cuTexRefSetFormat) STUB(cuTexRefSetMaxAnisotropy) STUB(cuTexRefSetMipmapFilterMode) STUB(cuTexRefSetMipmapLevelBias)
                                                                                                STUB(
                                                                                                    cuTexRefSetMipmapLevelClamp)
                                                                                                    STUB(cuTexRefSetMipmappedArray) STUB(
                                                                                                        cuVDPAUGetDevice)
                                                                                                        STUB(cuWaitExternalSemaphoresAsync) STUB(
                                                                                                            cuWaitExternalSemaphoresAsync_ptsz)

                                                                                                            STUB_NEW(
                                                                                                                cuArrayGetPlane)
                                                                                                                STUB_NEW(
                                                                                                                    cuCheckpointProcessCheckpoint) STUB_NEW(cuCheckpointProcessGetRestoreThreadId) STUB_NEW(cuCheckpointProcessGetState) STUB_NEW(cuCheckpointProcessLock) STUB_NEW(cuCheckpointProcessRestore) STUB_NEW(cuCheckpointProcessUnlock) STUB_NEW(cuCoredumpGetAttribute) STUB_NEW(cuCoredumpGetAttributeGlobal) STUB_NEW(cuCoredumpSetAttribute)
                                                                                                                    STUB_NEW(cuCoredumpSetAttributeGlobal) STUB_NEW(cuCtxRecordEvent) STUB_NEW(cuCtxWaitEvent) STUB_NEW(cuDeviceGetHostAtomicCapabilities) STUB_NEW(cuDeviceGetP2PAtomicCapabilities) STUB_NEW(cuDeviceRegisterAsyncNotification) STUB_NEW(cuDeviceUnregisterAsyncNotification) STUB_NEW(cuFlushGPUDirectRDMAWrites) STUB_NEW(
                                                                                                                        cuFuncGetParamInfo) STUB_NEW(cuGraphAddBatchMemOpNode) STUB_NEW(cuGraphAddExternalSemaphoresSignalNode) STUB_NEW(cuGraphAddExternalSemaphoresWaitNode) STUB_NEW(cuGraphBatchMemOpNodeGetParams) STUB_NEW(cuGraphBatchMemOpNodeSetParams)
                                                                                                                        STUB_NEW(cuGraphDebugDotPrint) STUB_NEW(cuGraphExecBatchMemOpNodeSetParams) STUB_NEW(cuGraphExecExternalSemaphoresSignalNodeSetParams) STUB_NEW(cuGraphExecExternalSemaphoresWaitNodeSetParams) STUB_NEW(cuGraphExternalSemaphoresSignalNodeGetParams) STUB_NEW(cuGraphExternalSemaphoresSignalNodeSetParams) STUB_NEW(
                                                                                                                            cuGraphExternalSemaphoresWaitNodeGetParams) STUB_NEW(cuGraphExternalSemaphoresWaitNodeSetParams) STUB_NEW(cuGraphReleaseUserObject) STUB_NEW(cuGraphRetainUserObject) STUB_NEW(cuKernelGetParamInfo) STUB_NEW(cuLibraryGetUnifiedFunction)
                                                                                                                            STUB_NEW(cuLogsCurrent) STUB_NEW(cuLogsDumpToFile) STUB_NEW(
                                                                                                                                cuLogsDumpToMemory) STUB_NEW(cuLogsRegisterCallback)
                                                                                                                                STUB_NEW(
                                                                                                                                    cuLogsUnregisterCallback) STUB_NEW(cuMemBatchDecompressAsync) STUB_NEW(cuMemBatchDecompressAsync_ptsz) STUB_NEW(cuMemGetHandleForAddressRange) STUB_NEW(cuOccupancyMaxActiveClusters) STUB_NEW(cuOccupancyMaxPotentialClusterSize) STUB_NEW(cuStreamBatchMemOp_v2) STUB_NEW(cuStreamBatchMemOp_v2_ptsz) STUB_NEW(cuStreamWaitValue32_v2) STUB_NEW(cuStreamWaitValue32_v2_ptsz) STUB_NEW(cuStreamWaitValue64_v2) STUB_NEW(cuStreamWaitValue64_v2_ptsz)
                                                                                                                                    STUB_NEW(cuStreamWriteValue32_v2) STUB_NEW(cuStreamWriteValue32_v2_ptsz) STUB_NEW(cuStreamWriteValue64_v2) STUB_NEW(
                                                                                                                                        cuStreamWriteValue64_v2_ptsz) STUB_NEW(cuTensorMapEncodeIm2col)
                                                                                                                                        STUB_NEW(
                                                                                                                                            cuTensorMapEncodeIm2colWide)
                                                                                                                                            STUB_NEW(
                                                                                                                                                cuTensorMapEncodeTiled)
                                                                                                                                                STUB_NEW(
                                                                                                                                                    cuTensorMapReplaceAddress)
                                                                                                                                                    STUB_NEW(
                                                                                                                                                        cuUserObjectCreate)
                                                                                                                                                        STUB_NEW(
                                                                                                                                                            cuUserObjectRelease)
                                                                                                                                                            STUB_NEW(
                                                                                                                                                                cuUserObjectRetain)
