/* Every export without behaviour: not supported, once initialised. */
#include "sim.h"

int nv_ready(void);

#define STUB(name)                                                             \
    SIM_EXPORT int name(void);                                                 \
    int name(void) {                                                           \
        int result = SIM_UNLIKELY(sim_trace_on) ? sim_trace_enter(#name) : -1; \
        if (result < 0)                                                        \
            result = nv_ready();                                               \
        result = result == 0 ? 3 : result; /* NVML_ERROR_NOT_SUPPORTED */      \
        if (SIM_UNLIKELY(sim_trace_on))                                        \
            sim_trace_leave(#name, result);                                    \
        return result;                                                         \
    }

STUB(nvmlComputeInstanceDestroy)
STUB(nvmlComputeInstanceGetInfo)
STUB(nvmlComputeInstanceGetInfo_v2)
STUB(nvmlDeviceClearAccountingPids)
STUB(nvmlDeviceClearCpuAffinity) STUB(nvmlDeviceClearEccErrorCounts) STUB(nvmlDeviceClearFieldValues) STUB(
    nvmlDeviceCreateGpuInstance) STUB(nvmlDeviceCreateGpuInstanceWithPlacement) STUB(nvmlDeviceDiscoverGpus)
    STUB(nvmlDeviceFreezeNvLinkUtilizationCounter) STUB(nvmlDeviceGetAccountingBufferSize) STUB(
        nvmlDeviceGetAccountingMode) STUB(nvmlDeviceGetAccountingPids) STUB(nvmlDeviceGetAccountingStats)
        STUB(nvmlDeviceGetActiveVgpus) STUB(nvmlDeviceGetAdaptiveClockInfoStatus) STUB(nvmlDeviceGetAddressingMode) STUB(
            nvmlDeviceGetAPIRestriction) STUB(nvmlDeviceGetApplicationsClock) STUB(nvmlDeviceGetAutoBoostedClocksEnabled)
            STUB(nvmlDeviceGetBoardId) STUB(nvmlDeviceGetBoardPartNumber) STUB(nvmlDeviceGetBridgeChipInfo) STUB(
                nvmlDeviceGetBusType) STUB(nvmlDeviceGetC2cModeInfoV) STUB(nvmlDeviceGetCapabilities)
                STUB(nvmlDeviceGetClkMonStatus) STUB(nvmlDeviceGetClock) STUB(nvmlDeviceGetClockInfo) STUB(
                    nvmlDeviceGetClockOffsets) STUB(nvmlDeviceGetConfComputeGpuAttestationReport) STUB(nvmlDeviceGetConfComputeGpuCertificate)
                    STUB(nvmlDeviceGetConfComputeMemSizeInfo) STUB(nvmlDeviceGetConfComputeProtectedMemoryUsage) STUB(
                        nvmlDeviceGetCoolerInfo) STUB(nvmlDeviceGetCpuAffinity) STUB(nvmlDeviceGetCpuAffinityWithinScope)
                        STUB(nvmlDeviceGetCreatableVgpus) STUB(nvmlDeviceGetCurrentClockFreqs) STUB(
                            nvmlDeviceGetCurrentClocksEventReasons) STUB(nvmlDeviceGetCurrentClocksThrottleReasons)
                            STUB(nvmlDeviceGetCurrPcieLinkGeneration) STUB(nvmlDeviceGetCurrPcieLinkWidth) STUB(
                                nvmlDeviceGetDecoderUtilization) STUB(nvmlDeviceGetDefaultApplicationsClock)
                                STUB(nvmlDeviceGetDefaultEccMode) STUB(nvmlDeviceGetDetailedEccErrors) STUB(
                                    nvmlDeviceGetDisplayActive) STUB(nvmlDeviceGetDisplayMode) STUB(nvmlDeviceGetDramEncryptionMode)
                                    STUB(nvmlDeviceGetDriverModel) STUB(nvmlDeviceGetDriverModel_v2) STUB(
                                        nvmlDeviceGetDynamicPstatesInfo) STUB(nvmlDeviceGetEccMode) STUB(nvmlDeviceGetEncoderCapacity)
                                        STUB(nvmlDeviceGetEncoderSessions) STUB(nvmlDeviceGetEncoderStats) STUB(
                                            nvmlDeviceGetEncoderUtilization) STUB(nvmlDeviceGetFanControlPolicy_v2)
                                            STUB(nvmlDeviceGetFanSpeed) STUB(nvmlDeviceGetFanSpeedRPM) STUB(
                                                nvmlDeviceGetFanSpeed_v2) STUB(nvmlDeviceGetFBCSessions)
                                                STUB(nvmlDeviceGetFBCStats) STUB(nvmlDeviceGetFieldValues) STUB(
                                                    nvmlDeviceGetGpcClkMinMaxVfOffset) STUB(nvmlDeviceGetGpcClkVfOffset)
                                                    STUB(nvmlDeviceGetGpuFabricInfo) STUB(
                                                        nvmlDeviceGetGpuFabricInfoV) STUB(nvmlDeviceGetGpuInstanceById)
                                                        STUB(nvmlDeviceGetGpuInstancePossiblePlacements) STUB(
                                                            nvmlDeviceGetGpuInstancePossiblePlacements_v2)
                                                            STUB(nvmlDeviceGetGpuInstanceProfileInfo) STUB(
                                                                nvmlDeviceGetGpuInstanceProfileInfoByIdV)
                                                                STUB(nvmlDeviceGetGpuInstanceProfileInfoV) STUB(nvmlDeviceGetGpuInstanceRemainingCapacity) STUB(nvmlDeviceGetGpuInstances) STUB(nvmlDeviceGetGpuMaxPcieLinkGeneration) STUB(nvmlDeviceGetGpuOperationMode) STUB(nvmlDeviceGetGridLicensableFeatures) STUB(nvmlDeviceGetGridLicensableFeatures_v2) STUB(nvmlDeviceGetGridLicensableFeatures_v3) STUB(nvmlDeviceGetGridLicensableFeatures_v4) STUB(nvmlDeviceGetGspFirmwareMode) STUB(nvmlDeviceGetGspFirmwareVersion) STUB(nvmlDeviceGetHostname_v1) STUB(nvmlDeviceGetHostVgpuMode) STUB(nvmlDeviceGetInforomConfigurationChecksum) STUB(nvmlDeviceGetInforomImageVersion) STUB(nvmlDeviceGetInforomVersion) STUB(nvmlDeviceGetIrqNum) STUB(nvmlDeviceGetJpgUtilization) STUB(nvmlDeviceGetLastBBXFlushTime) STUB(nvmlDeviceGetMarginTemperature) STUB(nvmlDeviceGetMaxClockInfo) STUB(nvmlDeviceGetMaxCustomerBoostClock) STUB(nvmlDeviceGetMaxPcieLinkGeneration) STUB(nvmlDeviceGetMaxPcieLinkWidth) STUB(nvmlDeviceGetMemClkMinMaxVfOffset) STUB(nvmlDeviceGetMemClkVfOffset) STUB(nvmlDeviceGetMemoryAffinity) STUB(
                                                                    nvmlDeviceGetMemoryErrorCounter) STUB(nvmlDeviceGetMinMaxClockOfPState)
                                                                    STUB(nvmlDeviceGetMinMaxFanSpeed) STUB(nvmlDeviceGetModuleId) STUB(
                                                                        nvmlDeviceGetMultiGpuBoard) STUB(nvmlDeviceGetNumaNodeId)
                                                                        STUB(nvmlDeviceGetNumFans) STUB(nvmlDeviceGetNumGpuCores) STUB(
                                                                            nvmlDeviceGetNvlinkBwMode) STUB(nvmlDeviceGetNvLinkCapability)
                                                                            STUB(nvmlDeviceGetNvLinkErrorCounter) STUB(nvmlDeviceGetNvLinkInfo) STUB(
                                                                                nvmlDeviceGetNvLinkRemoteDeviceType) STUB(nvmlDeviceGetNvLinkRemotePciInfo)
                                                                                STUB(nvmlDeviceGetNvLinkRemotePciInfo_v2) STUB(nvmlDeviceGetNvLinkState) STUB(nvmlDeviceGetNvlinkSupportedBwModes) STUB(nvmlDeviceGetNvLinkUtilizationControl) STUB(nvmlDeviceGetNvLinkUtilizationCounter) STUB(nvmlDeviceGetNvLinkVersion) STUB(nvmlDeviceGetOfaUtilization) STUB(nvmlDeviceGetP2PStatus) STUB(nvmlDeviceGetPcieLinkMaxSpeed) STUB(nvmlDeviceGetPcieReplayCounter) STUB(nvmlDeviceGetPcieSpeed) STUB(nvmlDeviceGetPcieThroughput) STUB(nvmlDeviceGetPdi) STUB(nvmlDeviceGetPerformanceModes) STUB(nvmlDeviceGetPgpuMetadataString) STUB(nvmlDeviceGetPlatformInfo) STUB(nvmlDeviceGetPowerManagementDefaultLimit) STUB(nvmlDeviceGetPowerManagementLimitConstraints) STUB(nvmlDeviceGetPowerManagementMode) STUB(nvmlDeviceGetPowerMizerMode_v1) STUB(nvmlDeviceGetPowerSource) STUB(nvmlDeviceGetPowerState) STUB(nvmlDeviceGetRemappedRows) STUB(
                                                                                    nvmlDeviceGetRemappedRows_v2) STUB(nvmlDeviceGetRepairStatus) STUB(nvmlDeviceGetRetiredPages)
                                                                                    STUB(nvmlDeviceGetRetiredPagesPendingStatus) STUB(
                                                                                        nvmlDeviceGetRetiredPages_v2) STUB(nvmlDeviceGetRowRemapperHistogram) STUB(nvmlDeviceGetSamples) STUB(nvmlDeviceGetSramEccErrorStatus) STUB(nvmlDeviceGetSramUniqueUncorrectedEccErrorCounts) STUB(nvmlDeviceGetSupportedClocksEventReasons) STUB(nvmlDeviceGetSupportedClocksThrottleReasons)
                                                                                        STUB(nvmlDeviceGetSupportedEventTypes) STUB(nvmlDeviceGetSupportedGraphicsClocks) STUB(
                                                                                            nvmlDeviceGetSupportedMemoryClocks) STUB(nvmlDeviceGetSupportedPerformanceStates)
                                                                                            STUB(nvmlDeviceGetSupportedVgpus) STUB(nvmlDeviceGetTargetFanSpeed) STUB(nvmlDeviceGetTemperatureThreshold) STUB(nvmlDeviceGetTemperatureV) STUB(nvmlDeviceGetThermalSettings) STUB(nvmlDeviceGetTopologyCommonAncestor) STUB(
                                                                                                nvmlDeviceGetTopologyNearestGpus) STUB(nvmlDeviceGetTotalEccErrors)
                                                                                                STUB(nvmlDeviceGetTotalEnergyConsumption) STUB(
                                                                                                    nvmlDeviceGetUnrepairableMemoryFlag_v1) STUB(nvmlDeviceGetVbiosVersion) STUB(nvmlDeviceGetVgpuCapabilities) STUB(nvmlDeviceGetVgpuHeterogeneousMode) STUB(nvmlDeviceGetVgpuInstancesUtilizationInfo) STUB(nvmlDeviceGetVgpuMetadata) STUB(nvmlDeviceGetVgpuProcessesUtilizationInfo) STUB(nvmlDeviceGetVgpuProcessUtilization) STUB(nvmlDeviceGetVgpuSchedulerCapabilities) STUB(nvmlDeviceGetVgpuSchedulerLog)
                                                                                                    STUB(nvmlDeviceGetVgpuSchedulerState) STUB(nvmlDeviceGetVgpuTypeCreatablePlacements) STUB(nvmlDeviceGetVgpuTypeSupportedPlacements) STUB(
                                                                                                        nvmlDeviceGetVgpuUtilization)
                                                                                                        STUB(nvmlDeviceGetViolationStatus) STUB(
                                                                                                            nvmlDeviceGetVirtualizationMode)
                                                                                                            STUB(
                                                                                                                nvmlDeviceModifyDrainState)
                                                                                                                STUB(
                                                                                                                    nvmlDeviceOnSameBoard)
                                                                                                                    STUB(
                                                                                                                        nvmlDevicePowerSmoothingActivatePresetProfile) STUB(nvmlDevicePowerSmoothingSetState) STUB(nvmlDevicePowerSmoothingUpdatePresetProfileParam) STUB(nvmlDeviceQueryDrainState) STUB(nvmlDeviceReadPRMCounters_v1) STUB(nvmlDeviceReadWritePRM_v1) STUB(nvmlDeviceRegisterEvents) STUB(nvmlDeviceRemoveGpu) STUB(nvmlDeviceRemoveGpu_v2) STUB(nvmlDeviceResetApplicationsClocks) STUB(nvmlDeviceResetGpuLockedClocks) STUB(nvmlDeviceResetMemoryLockedClocks) STUB(nvmlDeviceResetNvLinkErrorCounters) STUB(nvmlDeviceResetNvLinkUtilizationCounter)
                                                                                                                        STUB(nvmlDeviceSetAccountingMode) STUB(nvmlDeviceSetAPIRestriction) STUB(nvmlDeviceSetApplicationsClocks) STUB(nvmlDeviceSetAutoBoostedClocksEnabled) STUB(nvmlDeviceSetClockOffsets) STUB(nvmlDeviceSetComputeMode) STUB(
                                                                                                                            nvmlDeviceSetConfComputeUnprotectedMemSize) STUB(nvmlDeviceSetCpuAffinity) STUB(nvmlDeviceSetDefaultAutoBoostedClocksEnabled)
                                                                                                                            STUB(nvmlDeviceSetDefaultFanSpeed_v2) STUB(nvmlDeviceSetDramEncryptionMode) STUB(nvmlDeviceSetDriverModel) STUB(nvmlDeviceSetEccMode) STUB(nvmlDeviceSetFanControlPolicy) STUB(nvmlDeviceSetFanSpeed_v2) STUB(
                                                                                                                                nvmlDeviceSetGpcClkVfOffset) STUB(nvmlDeviceSetGpuLockedClocks) STUB(nvmlDeviceSetGpuOperationMode)
                                                                                                                                STUB(nvmlDeviceSetHostname_v1) STUB(nvmlDeviceSetMemClkVfOffset) STUB(
                                                                                                                                    nvmlDeviceSetMemoryLockedClocks) STUB(nvmlDeviceSetMigMode) STUB(nvmlDeviceSetNvlinkBwMode) STUB(nvmlDeviceSetNvLinkDeviceLowPowerThreshold) STUB(nvmlDeviceSetNvLinkUtilizationControl) STUB(nvmlDeviceSetPersistenceMode)
                                                                                                                                    STUB(nvmlDeviceSetPowerManagementLimit) STUB(
                                                                                                                                        nvmlDeviceSetPowerManagementLimit_v2)
                                                                                                                                        STUB(
                                                                                                                                            nvmlDeviceSetPowerMizerMode_v1)
                                                                                                                                            STUB(
                                                                                                                                                nvmlDeviceSetTemperatureThreshold)
                                                                                                                                                STUB(
                                                                                                                                                    nvmlDeviceSetVgpuCapabilities)
                                                                                                                                                    STUB(
                                                                                                                                                        nvmlDeviceSetVgpuHeterogeneousMode)
                                                                                                                                                        STUB(
                                                                                                                                                            nvmlDeviceSetVgpuSchedulerState) STUB(nvmlDeviceSetVirtualizationMode) STUB(nvmlDeviceValidateInforom) STUB(nvmlDeviceWorkloadPowerProfileClearRequestedProfiles) STUB(nvmlDeviceWorkloadPowerProfileGetCurrentProfiles) STUB(nvmlDeviceWorkloadPowerProfileGetProfilesInfo) STUB(nvmlDeviceWorkloadPowerProfileSetRequestedProfiles) STUB(nvmlEventSetCreate) STUB(nvmlEventSetFree) STUB(nvmlEventSetWait) STUB(nvmlEventSetWait_v2) STUB(nvmlGetBlacklistDeviceCount) STUB(nvmlGetBlacklistDeviceInfoByIndex) STUB(nvmlGetExcludedDeviceCount) STUB(nvmlGetExcludedDeviceInfoByIndex) STUB(nvmlGetVgpuCompatibility) STUB(nvmlGetVgpuDriverCapabilities) STUB(nvmlGetVgpuVersion) STUB(nvmlGpmMetricsGet) STUB(nvmlGpmMigSampleGet) STUB(nvmlGpmQueryDeviceSupport) STUB(nvmlGpmQueryIfStreamingEnabled) STUB(nvmlGpmSampleAlloc) STUB(nvmlGpmSampleFree) STUB(nvmlGpmSampleGet) STUB(nvmlGpmSetStreamingEnabled) STUB(nvmlGpuInstanceCreateComputeInstance)
                                                                                                                                                            STUB(nvmlGpuInstanceCreateComputeInstanceWithPlacement) STUB(nvmlGpuInstanceDestroy) STUB(nvmlGpuInstanceGetActiveVgpus) STUB(nvmlGpuInstanceGetComputeInstanceById) STUB(nvmlGpuInstanceGetComputeInstancePossiblePlacements) STUB(nvmlGpuInstanceGetComputeInstanceProfileInfo) STUB(nvmlGpuInstanceGetComputeInstanceProfileInfoV) STUB(nvmlGpuInstanceGetComputeInstanceRemainingCapacity) STUB(nvmlGpuInstanceGetComputeInstances) STUB(nvmlGpuInstanceGetCreatableVgpus) STUB(nvmlGpuInstanceGetInfo) STUB(nvmlGpuInstanceGetVgpuHeterogeneousMode) STUB(nvmlGpuInstanceGetVgpuSchedulerLog) STUB(nvmlGpuInstanceGetVgpuSchedulerState) STUB(nvmlGpuInstanceGetVgpuTypeCreatablePlacements) STUB(nvmlGpuInstanceSetVgpuHeterogeneousMode) STUB(
                                                                                                                                                                nvmlGpuInstanceSetVgpuSchedulerState) STUB(nvmlInternalGetExportTable)
                                                                                                                                                                STUB(
                                                                                                                                                                    nvmlSetVgpuVersion) STUB(nvmlSystemEventSetCreate) STUB(nvmlSystemEventSetFree) STUB(nvmlSystemEventSetWait) STUB(nvmlSystemGetConfComputeCapabilities) STUB(nvmlSystemGetConfComputeGpusReadyState) STUB(nvmlSystemGetConfComputeKeyRotationThresholdInfo) STUB(nvmlSystemGetConfComputeSettings) STUB(nvmlSystemGetConfComputeState) STUB(nvmlSystemGetDriverBranch) STUB(nvmlSystemGetHicVersion) STUB(nvmlSystemGetNvlinkBwMode) STUB(nvmlSystemGetTopologyGpuSet) STUB(nvmlSystemRegisterEvents) STUB(nvmlSystemSetConfComputeGpusReadyState) STUB(nvmlSystemSetConfComputeKeyRotationThresholdInfo) STUB(nvmlSystemSetNvlinkBwMode) STUB(nvmlUnitGetCount) STUB(nvmlUnitGetDevices) STUB(nvmlUnitGetFanSpeedInfo) STUB(nvmlUnitGetHandleByIndex) STUB(nvmlUnitGetLedState) STUB(nvmlUnitGetPsuInfo)
                                                                                                                                                                    STUB(nvmlUnitGetTemperature) STUB(nvmlUnitGetUnitInfo) STUB(nvmlUnitSetLedState) STUB(nvmlVgpuInstanceClearAccountingPids) STUB(nvmlVgpuInstanceGetAccountingMode) STUB(nvmlVgpuInstanceGetAccountingPids) STUB(
                                                                                                                                                                        nvmlVgpuInstanceGetAccountingStats)
                                                                                                                                                                        STUB(nvmlVgpuInstanceGetEccMode) STUB(nvmlVgpuInstanceGetEncoderCapacity) STUB(nvmlVgpuInstanceGetEncoderSessions) STUB(nvmlVgpuInstanceGetEncoderStats) STUB(nvmlVgpuInstanceGetFBCSessions) STUB(
                                                                                                                                                                            nvmlVgpuInstanceGetFBCStats) STUB(nvmlVgpuInstanceGetFbUsage) STUB(nvmlVgpuInstanceGetFrameRateLimit) STUB(nvmlVgpuInstanceGetGpuInstanceId) STUB(nvmlVgpuInstanceGetGpuPciId) STUB(nvmlVgpuInstanceGetLicenseInfo)
                                                                                                                                                                            STUB(nvmlVgpuInstanceGetLicenseInfo_v2)
                                                                                                                                                                                STUB(
                                                                                                                                                                                    nvmlVgpuInstanceGetLicenseStatus)
                                                                                                                                                                                    STUB(
                                                                                                                                                                                        nvmlVgpuInstanceGetMdevUUID)
                                                                                                                                                                                        STUB(
                                                                                                                                                                                            nvmlVgpuInstanceGetMetadata)
                                                                                                                                                                                            STUB(nvmlVgpuInstanceGetPlacementId) STUB(nvmlVgpuInstanceGetRuntimeStateSize) STUB(nvmlVgpuInstanceGetType) STUB(nvmlVgpuInstanceGetUUID) STUB(nvmlVgpuInstanceGetVmDriverVersion) STUB(nvmlVgpuInstanceGetVmID) STUB(nvmlVgpuInstanceSetEncoderCapacity) STUB(nvmlVgpuTypeGetBAR1Info) STUB(nvmlVgpuTypeGetCapabilities) STUB(nvmlVgpuTypeGetClass) STUB(nvmlVgpuTypeGetDeviceID) STUB(nvmlVgpuTypeGetFbReservation) STUB(nvmlVgpuTypeGetFramebufferSize) STUB(nvmlVgpuTypeGetFrameRateLimit) STUB(nvmlVgpuTypeGetGpuInstanceProfileId) STUB(nvmlVgpuTypeGetGspHeapSize) STUB(nvmlVgpuTypeGetLicense) STUB(nvmlVgpuTypeGetMaxInstances) STUB(nvmlVgpuTypeGetMaxInstancesPerGpuInstance) STUB(
                                                                                                                                                                                                nvmlVgpuTypeGetMaxInstancesPerVm) STUB(nvmlVgpuTypeGetName)
                                                                                                                                                                                                STUB(
                                                                                                                                                                                                    nvmlVgpuTypeGetNumDisplayHeads)
                                                                                                                                                                                                    STUB(
                                                                                                                                                                                                        nvmlVgpuTypeGetResolution)
