/* Life of the library and the ways to a device handle. */
#include "sim_nvml.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static _Atomic int refs;
static _Atomic uint64_t first_init;
static uint64_t fail_after_us;
static uint32_t devices; /* none after an initialisation that attaches to none */
static pthread_mutex_t life = PTHREAD_MUTEX_INITIALIZER; /* init and shutdown */
static char handles[SIM_DOMS]; /* a handle is the address of its domain's byte */

uint64_t nv_init_time(void) {
    return atomic_load(&first_init);
}

nvmlReturn_t nv_ready(void) {
    NV_CHECK(atomic_load(&refs) > 0, NVML_ERROR_UNINITIALIZED);
    NV_CHECK(!fail_after_us || sim_now_us() - nv_init_time() < fail_after_us, NVML_ERROR_UNKNOWN);
    return NVML_SUCCESS;
}

struct sim_dom *nv_dom(nvmlDevice_t device) {
    const char *p = (const char *)device;
    return p >= handles && p < handles + sim->doms ? &sim->dom[p - handles] : NULL;
}

uint32_t nv_index(const struct sim_dom *dom) {
    return (uint32_t)(dom - sim->dom);
}

nvmlDevice_t nv_handle(uint32_t dom) {
    return (nvmlDevice_t)&handles[dom];
}

nvmlReturn_t nv_text(const char *text, char *out, unsigned length) {
    NV_ARG(out);
    NV_CHECK(length > strlen(text), NVML_ERROR_INSUFFICIENT_SIZE);
    memcpy(out, text, strlen(text) + 1);
    return NVML_SUCCESS;
}

static nvmlReturn_t start(unsigned flags) {
    NV_CHECK(sim_attach(false) == 0, NVML_ERROR_DRIVER_NOT_LOADED);
    if (atomic_load(&refs) == 0) {
        const char *after = getenv("SIMGPU_NVML_FAIL_AFTER");
        fail_after_us = after && *after ? (uint64_t)(atof(after) * 1e6) : 0;
        atomic_store(&first_init, sim_now_us());
        devices = flags & NVML_INIT_FLAG_NO_ATTACH ? 0 : sim->doms;
    }
    atomic_fetch_add(&refs, 1);
    return NVML_SUCCESS;
}

NV_FREE(nvmlInitWithFlags, (unsigned flags), (flags)) {
    pthread_mutex_lock(&life);
    nvmlReturn_t result = start(flags);
    pthread_mutex_unlock(&life);
    return result;
}

NV_FREE(nvmlInit, (void), ()) {
    return nvmlInit_v2(); /* the export, see nvml_init.c */
}

NV_FREE(nvmlShutdown, (void), ()) {
    pthread_mutex_lock(&life);
    int n = atomic_load(&refs);
    if (n > 0)
        atomic_store(&refs, n - 1);
    pthread_mutex_unlock(&life);
    return n > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

NV_API(nvmlDeviceGetCount_v2, (unsigned *deviceCount), (deviceCount)) {
    NV_ARG(deviceCount);
    *deviceCount = devices ? sim->devs : 0;
    return NVML_SUCCESS;
}

NV_API(nvmlDeviceGetCount, (unsigned *deviceCount), (deviceCount)) {
    return nvmlDeviceGetCount_v2_body(deviceCount);
}

NV_API(nvmlDeviceGetHandleByIndex_v2, (unsigned index, nvmlDevice_t *device), (index, device)) {
    NV_ARG(device && index < sim->devs && devices);
    *device = nv_handle(index);
    return NVML_SUCCESS;
}

NV_API(nvmlDeviceGetHandleByIndex, (unsigned index, nvmlDevice_t *device), (index, device)) {
    return nvmlDeviceGetHandleByIndex_v2_body(index, device);
}

NV_API(nvmlDeviceGetHandleByUUID, (const char *uuid, nvmlDevice_t *device), (uuid, device)) {
    NV_ARG(uuid && device);
    for (uint32_t d = 0; d < devices; d++)
        if (strcasecmp(sim->dom[d].uuid_text, uuid) == 0) {
            *device = nv_handle(d);
            return NVML_SUCCESS;
        }
    return strncmp(uuid, "GPU-", 4) == 0 || strncmp(uuid, "MIG-", 4) == 0
               ? NVML_ERROR_NOT_FOUND
               : NVML_ERROR_INVALID_ARGUMENT;
}

NV_API(nvmlDeviceGetHandleByUUIDV, (const nvmlUUID_t *uuid, nvmlDevice_t *device), (uuid, device)) {
    NV_ARG(uuid && device);
    NV_CHECK(uuid->version == nvmlUUID_v1, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    if (uuid->type == NVML_UUID_TYPE_ASCII)
        return nvmlDeviceGetHandleByUUID_body(uuid->value.str, device);
    NV_ARG(uuid->type == NVML_UUID_TYPE_BINARY);
    for (uint32_t d = 0; d < devices; d++)
        if (memcmp(sim->dom[d].uuid, uuid->value.bytes, sizeof sim->dom[d].uuid) == 0) {
            *device = nv_handle(d);
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

NV_API(nvmlDeviceGetHandleBySerial, (const char *serial, nvmlDevice_t *device), (serial, device)) {
    NV_ARG(serial && device);
    for (uint32_t d = 0; d < sim->devs && devices; d++)
        if (strcmp(sim->dom[d].serial, serial) == 0) {
            *device = nv_handle(d);
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

NV_API(nvmlDeviceGetHandleByPciBusId_v2, (const char *pciBusId, nvmlDevice_t *device),
       (pciBusId, device)) {
    unsigned a = 0, b = 0, c = 0;
    NV_ARG(pciBusId && device);
    if (sscanf(pciBusId, "%x:%x:%x", &a, &b, &c) != 3) {
        a = 0;
        NV_ARG(sscanf(pciBusId, "%x:%x", &b, &c) == 2);
    }
    for (uint32_t d = 0; d < sim->devs && devices; d++)
        if (sim->dom[d].pci_domain == a && sim->dom[d].pci_bus == b &&
            sim->dom[d].pci_device == c) {
            *device = nv_handle(d);
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

NV_API(nvmlDeviceGetHandleByPciBusId, (const char *pciBusId, nvmlDevice_t *device),
       (pciBusId, device)) {
    return nvmlDeviceGetHandleByPciBusId_v2_body(pciBusId, device);
}

/* ---- MIG ---- */

NV_API(nvmlDeviceIsMigDeviceHandle, (nvmlDevice_t device, unsigned *isMigDevice),
       (device, isMigDevice)) {
    NV_DEVICE(device, dom);
    NV_ARG(isMigDevice);
    *isMigDevice = dom->parent >= 0;
    return NVML_SUCCESS;
}

NV_API(nvmlDeviceGetMigMode, (nvmlDevice_t device, unsigned *current, unsigned *pending),
       (device, current, pending)) {
    NV_DEVICE(device, dom);
    NV_ARG(current && pending && dom->parent < 0);
    NV_CHECK(dom->cc_major >= 8, NVML_ERROR_NOT_SUPPORTED);
    *current = *pending = dom->mig_count ? NVML_DEVICE_MIG_ENABLE : NVML_DEVICE_MIG_DISABLE;
    return NVML_SUCCESS;
}

NV_API(nvmlDeviceGetMaxMigDeviceCount, (nvmlDevice_t device, unsigned *count), (device, count)) {
    NV_DEVICE(device, dom);
    NV_ARG(count);
    *count = dom->mig_count ? 7 : 0;
    return NVML_SUCCESS;
}

NV_API(nvmlDeviceGetMigDeviceHandleByIndex,
       (nvmlDevice_t device, unsigned index, nvmlDevice_t *migDevice), (device, index, migDevice)) {
    NV_DEVICE(device, dom);
    NV_ARG(migDevice && index < 7);
    NV_CHECK(dom->mig_count, NVML_ERROR_NOT_SUPPORTED);
    for (uint32_t d = sim->devs; d < sim->doms; d++)
        if (sim->dom[d].parent == (int32_t)nv_index(dom) && index-- == 0) {
            *migDevice = nv_handle(d);
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

NV_API(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, (nvmlDevice_t migDevice, nvmlDevice_t *device),
       (migDevice, device)) {
    NV_DEVICE(migDevice, dom);
    NV_ARG(device && dom->parent >= 0);
    *device = nv_handle((uint32_t)dom->parent);
    return NVML_SUCCESS;
}

NV_API(nvmlDeviceGetGpuInstanceId, (nvmlDevice_t device, unsigned *id), (device, id)) {
    NV_DEVICE(device, dom);
    NV_ARG(id);
    NV_CHECK(dom->parent >= 0, NVML_ERROR_NOT_SUPPORTED);
    *id = dom->gpu_instance;
    return NVML_SUCCESS;
}

NV_API(nvmlDeviceGetComputeInstanceId, (nvmlDevice_t device, unsigned *id), (device, id)) {
    NV_DEVICE(device, dom);
    NV_ARG(id);
    NV_CHECK(dom->parent >= 0, NVML_ERROR_NOT_SUPPORTED);
    *id = dom->compute_instance;
    return NVML_SUCCESS;
}
