/* What NVML says of a device and of the system. */
#include "sim_nvml.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

NV_API(nvmlDeviceGetName, (nvmlDevice_t device, char *name, unsigned length),
       (device, name, length)) {
    NV_DEVICE(device, dom);
    return nv_text(dom->name, name, length);
}

NV_API(nvmlDeviceGetUUID, (nvmlDevice_t device, char *uuid, unsigned length),
       (device, uuid, length)) {
    NV_DEVICE(device, dom);
    return nv_text(dom->uuid_text, uuid, length);
}

NV_API(nvmlDeviceGetSerial, (nvmlDevice_t device, char *serial, unsigned length),
       (device, serial, length)) {
    NV_DEVICE(device, dom);
    return nv_text(dom->serial, serial, length);
}

NV_API(nvmlDeviceGetIndex, (nvmlDevice_t device, unsigned *index), (device, index)) {
    NV_DEVICE(device, dom);
    NV_ARG(index);
    uint32_t i = nv_index(dom);
    if (dom->parent >= 0) {
        for (i = 0; sim->dom[sim->devs + i].parent != dom->parent; i++)
            ;
        i = nv_index(dom) - sim->devs - i;
    }
    *index = i;
    return NVML_SUCCESS;
}

NV_API(nvmlDeviceGetMinorNumber, (nvmlDevice_t device, unsigned *minor), (device, minor)) {
    NV_DEVICE(device, dom);
    NV_ARG(minor && dom->parent < 0);
    *minor = dom->minor;
    return NVML_SUCCESS;
}

NV_API(nvmlDeviceGetPciInfo_v3, (nvmlDevice_t device, nvmlPciInfo_t *pci), (device, pci)) {
    NV_DEVICE(device, dom);
    NV_ARG(pci);
    memset(pci, 0, sizeof *pci);
    pci->domain = dom->pci_domain;
    pci->bus = dom->pci_bus;
    pci->device = dom->pci_device;
    pci->pciDeviceId = dom->pci_dev_id;
    pci->pciSubSystemId = dom->pci_sub_id;
    snprintf(pci->busId, sizeof pci->busId, "%s", dom->pci);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0",
             dom->pci_domain & 0xffff, dom->pci_bus & 0xff, dom->pci_device & 0x1f);
    return NVML_SUCCESS;
}

NV_API(nvmlDeviceGetPciInfo_v2, (nvmlDevice_t device, nvmlPciInfo_t *pci), (device, pci)) {
    return nvmlDeviceGetPciInfo_v3_body(device, pci);
}

NV_API(nvmlDeviceGetPciInfo, (nvmlDevice_t device, nvmlPciInfo_t *pci), (device, pci)) {
    return nvmlDeviceGetPciInfo_v3_body(device, pci);
}

NV_API(nvmlDeviceGetPciInfoExt, (nvmlDevice_t device, nvmlPciInfoExt_t *pci), (device, pci)) {
    NV_DEVICE(device, dom);
    NV_ARG(pci);
    NV_CHECK(pci->version == nvmlPciInfoExt_v1, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    pci->domain = dom->pci_domain;
    pci->bus = dom->pci_bus;
    pci->device = dom->pci_device;
    pci->pciDeviceId = dom->pci_dev_id;
    pci->pciSubSystemId = dom->pci_sub_id;
    pci->baseClass = 3;
    pci->subClass = 2;
    snprintf(pci->busId, sizeof pci->busId, "%s", dom->pci);
    return NVML_SUCCESS;
}

/* ---- memory ---- */

struct figures {
    uint64_t total, reserved, used, free;
};

/* The driver keeps what lies between NVML's total and CUDA's. */
static nvmlReturn_t figures(nvmlDevice_t device, struct figures *f) {
    NV_DEVICE(device, dom);
    const char *without = getenv("SIMGPU_NVML_NO_MEMORY");
    NV_CHECK(!without || *without != '1', NVML_ERROR_NOT_SUPPORTED);
    sim_sweep();
    f->total = dom->nvml_total;
    f->reserved = dom->nvml_total - dom->cuda_total;
    f->used = sim_dom_used(nv_index(dom));
    if (f->used > dom->cuda_total)
        f->used = dom->cuda_total;
    f->free = dom->cuda_total - f->used;
    return NVML_SUCCESS;
}

NV_API(nvmlDeviceGetMemoryInfo, (nvmlDevice_t device, nvmlMemory_t *memory), (device, memory)) {
    struct figures f;
    NV_ARG(memory);
    nvmlReturn_t r = figures(device, &f);
    if (r == NVML_SUCCESS)
        *memory = (nvmlMemory_t){.total = f.total, .free = f.free, .used = f.reserved + f.used};
    return r;
}

NV_API(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t device, nvmlMemory_v2_t *memory),
       (device, memory)) {
    struct figures f;
    NV_ARG(memory);
    NV_CHECK(memory->version == nvmlMemory_v2, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    nvmlReturn_t r = figures(device, &f);
    if (r != NVML_SUCCESS)
        return r;
    memory->total = f.total;
    memory->reserved = f.reserved;
    memory->free = f.free;
    memory->used = f.used;
    return NVML_SUCCESS;
}

/* Only cards in confidential mode answer; SIMGPU_CC=1 makes ours one. */
NV_API(nvmlDeviceGetConfComputeProtectedMemoryUsage, (nvmlDevice_t device, nvmlMemory_t *memory),
       (device, memory)) {
    const char *on = getenv("SIMGPU_CC");
    NV_ARG(memory && nv_dom(device));
    NV_CHECK(on && *on == '1', NVML_ERROR_NOT_SUPPORTED);
    return nvmlDeviceGetMemoryInfo_body(device, memory);
}

NV_API(nvmlDeviceGetBAR1MemoryInfo, (nvmlDevice_t device, nvmlBAR1Memory_t *bar1), (device, bar1)) {
    NV_DEVICE(device, dom);
    NV_ARG(bar1 && dom);
    bar1->bar1Total = 256 * SIM_MIB;
    bar1->bar1Used = 2 * SIM_MIB;
    bar1->bar1Free = bar1->bar1Total - bar1->bar1Used;
    return NVML_SUCCESS;
}

NV_API(nvmlDeviceGetAttributes_v2, (nvmlDevice_t device, nvmlDeviceAttributes_t *attributes),
       (device, attributes)) {
    NV_DEVICE(device, dom);
    NV_ARG(attributes);
    NV_CHECK(dom->parent >= 0, NVML_ERROR_NOT_SUPPORTED);
    *attributes = (nvmlDeviceAttributes_t){.multiprocessorCount = dom->sms,
                                           .sharedCopyEngineCount = 3,
                                           .sharedDecoderCount = 2,
                                           .gpuInstanceSliceCount = 3,
                                           .computeInstanceSliceCount = 3,
                                           .memorySizeMB = dom->nvml_total / SIM_MIB};
    return NVML_SUCCESS;
}

NV_API(nvmlDeviceGetAttributes, (nvmlDevice_t device, nvmlDeviceAttributes_t *attributes),
       (device, attributes)) {
    return nvmlDeviceGetAttributes_v2_body(device, attributes);
}

/* ---- the rest of what tools ask ---- */

NV_API(nvmlDeviceGetUtilizationRates, (nvmlDevice_t device, nvmlUtilization_t *utilization),
       (device, utilization)) {
    NV_DEVICE(device, dom);
    NV_ARG(utilization);
    utilization->gpu = atomic_load(&sim->live[nv_index(dom)].util_gpu);
    utilization->memory = atomic_load(&sim->live[nv_index(dom)].util_mem);
    return NVML_SUCCESS;
}

NV_API(nvmlDeviceGetCudaComputeCapability, (nvmlDevice_t device, int *major, int *minor),
       (device, major, minor)) {
    NV_DEVICE(device, dom);
    NV_ARG(major && minor);
    *major = (int)dom->cc_major;
    *minor = (int)dom->cc_minor;
    return NVML_SUCCESS;
}

#define CONSTANT(name, type, value)                                  \
    NV_API(name, (nvmlDevice_t device, type * out), (device, out)) { \
        NV_DEVICE(device, dom);                                      \
        NV_ARG(out &&dom);                                           \
        *out = value;                                                \
        return NVML_SUCCESS;                                         \
    }
CONSTANT(nvmlDeviceGetComputeMode, nvmlComputeMode_t, NVML_COMPUTEMODE_DEFAULT)
CONSTANT(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, NVML_FEATURE_ENABLED)
CONSTANT(nvmlDeviceGetPerformanceState, nvmlPstates_t, NVML_PSTATE_0)
CONSTANT(nvmlDeviceGetPowerUsage, unsigned, 31000)
CONSTANT(nvmlDeviceGetPowerManagementLimit, unsigned, 70000)
CONSTANT(nvmlDeviceGetEnforcedPowerLimit, unsigned, 70000)
CONSTANT(nvmlDeviceGetBrand, nvmlBrandType_t, NVML_BRAND_TESLA)
CONSTANT(nvmlDeviceGetArchitecture, nvmlDeviceArchitecture_t,
         dom->cc_major >= 9   ? NVML_DEVICE_ARCH_HOPPER
         : dom->cc_major >= 8 ? NVML_DEVICE_ARCH_AMPERE
                              : NVML_DEVICE_ARCH_TURING)
CONSTANT(nvmlDeviceGetMemoryBusWidth, unsigned, dom->bus_width)

NV_API(nvmlDeviceGetTemperature,
       (nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned *temp),
       (device, sensor, temp)) {
    NV_DEVICE(device, dom);
    NV_ARG(temp && dom && sensor == NVML_TEMPERATURE_GPU);
    *temp = 38;
    return NVML_SUCCESS;
}

/* ---- system ---- */

static const char *driver_text(void) {
    int v = sim->driver;
    return v >= 13000   ? "580.159.03"
           : v >= 12080 ? "570.133.20"
           : v >= 12000 ? "525.147.05"
                        : "455.45.01";
}

NV_API(nvmlSystemGetDriverVersion, (char *version, unsigned length), (version, length)) {
    return nv_text(driver_text(), version, length);
}

NV_API(nvmlSystemGetNVMLVersion, (char *version, unsigned length), (version, length)) {
    char text[64];
    snprintf(text, sizeof text, "%d.%s", sim->driver / 1000, driver_text());
    return nv_text(text, version, length);
}

NV_API(nvmlSystemGetCudaDriverVersion_v2, (int *version), (version)) {
    NV_ARG(version);
    *version = sim->driver;
    return NVML_SUCCESS;
}

NV_API(nvmlSystemGetCudaDriverVersion, (int *version), (version)) {
    return nvmlSystemGetCudaDriverVersion_v2_body(version);
}

/* nvmlErrorString is no plain NV_API: it returns text and works before nvmlInit. */
SIM_EXPORT const char *nvmlErrorString(nvmlReturn_t result) {
    switch (result) {
    case NVML_SUCCESS:
        return "Success";
    case NVML_ERROR_UNINITIALIZED:
        return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT:
        return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
        return "Not Supported";
    case NVML_ERROR_NO_PERMISSION:
        return "Insufficient Permissions";
    case NVML_ERROR_NOT_FOUND:
        return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    case NVML_ERROR_LIBRARY_NOT_FOUND:
        return "NVML Shared Library Not Found";
    case NVML_ERROR_FUNCTION_NOT_FOUND:
        return "Function Not Found";
    case NVML_ERROR_GPU_IS_LOST:
        return "GPU is lost";
    case NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "Driver/library version mismatch";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH:
        return "Argument version mismatch";
    default:
        return "Unknown Error";
    }
}
