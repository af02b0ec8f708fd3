/* Processes on a device, as the caller's PID namespace sees them. */
#define _GNU_SOURCE
#include "sim_nvml.h"

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define INIT_PID_NS 4026531836ull /* the kernel's fixed inode of the first PID namespace */
#define UNKNOWN_HOST_PID 3900000  /* for a process whose host PID nobody here can know */

struct process {
    unsigned pid, gpu_instance, compute_instance;
    uint64_t bytes;
};

/* A slot's PID here, found once a process: 0 means not in our namespace or below it. */
static struct {
    uint64_t gen;
    unsigned pid;
} known[SIM_SLOTS];
static pthread_mutex_t known_lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t inode(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 ? (uint64_t)st.st_ino : 0;
}

/* True if /proc is there and of our own PID namespace; the driver needs it too. */
static bool have_proc(void) {
    char text[32], mine[32];
    ssize_t n = readlink("/proc/self", text, sizeof text - 1);
    if (n <= 0)
        return false;
    text[n] = 0;
    snprintf(mine, sizeof mine, "%d", (int)getpid());
    return strcmp(text, mine) == 0;
}

/* Last entry of NSpid: the PID in the innermost namespace. */
static int inner_pid(const char *pid) {
    char path[64], line[256];
    int inner = -1;
    snprintf(path, sizeof path, "/proc/%.20s/status", pid);
    FILE *f = fopen(path, "re");
    if (!f)
        return -1;
    while (fgets(line, sizeof line, f)) {
        if (strncmp(line, "NSpid:", 6) != 0)
            continue;
        char *last = strrchr(line, '\t');
        inner = last ? atoi(last + 1) : -1;
        break;
    }
    fclose(f);
    return inner;
}

/* A process without /proc could not record its namespace; its mapping of the state file tells. */
static bool maps_state(const char *pid) {
    char path[64], line[512], want[32];
    bool found = false;
    const char *env = getenv("SIMGPU_STATE");
    snprintf(path, sizeof path, "/proc/%.20s/maps", pid);
    struct stat st;
    if (!env || stat(env, &st) < 0)
        return false;
    snprintf(want, sizeof want, " %llu ", (unsigned long long)st.st_ino);
    FILE *f = fopen(path, "re");
    while (f && !found && fgets(line, sizeof line, f))
        found = strstr(line, want) != NULL;
    if (f)
        fclose(f);
    return found;
}

static unsigned search(const struct sim_slot *s) {
    DIR *d = opendir("/proc");
    struct dirent *e;
    unsigned found = 0;
    char path[64];
    while (d && !found && (e = readdir(d))) {
        if (e->d_name[0] < '1' || e->d_name[0] > '9' || inner_pid(e->d_name) != s->pid)
            continue;
        snprintf(path, sizeof path, "/proc/%.20s/ns/pid", e->d_name);
        if (s->pid_ns ? inode(path) == s->pid_ns : maps_state(e->d_name))
            found = (unsigned)atoi(e->d_name);
    }
    if (d)
        closedir(d);
    return found;
}

static unsigned pid_here(int i, uint64_t own_ns) {
    struct sim_slot *s = &sim->slot[i];
    uint64_t gen = atomic_load(&s->gen);
    if (s->pid_ns && s->pid_ns == own_ns)
        return (unsigned)s->pid;
    pthread_mutex_lock(&known_lock);
    if (known[i].gen != gen) {
        known[i].pid = search(s);
        known[i].gen = gen;
    }
    unsigned pid = known[i].pid;
    pthread_mutex_unlock(&known_lock);
    return pid;
}

/* Older drivers: all processes, under PIDs of the host. */
static unsigned host_pid(int i, uint64_t own_ns) {
    struct sim_slot *s = &sim->slot[i];
    if (s->pid_ns == INIT_PID_NS)
        return (unsigned)s->pid;
    unsigned pid = own_ns == INIT_PID_NS && have_proc() ? pid_here(i, own_ns) : 0;
    return pid ? pid : (unsigned)(UNKNOWN_HOST_PID + i);
}

static int list(const struct sim_dom *dom, struct process *out, int max) {
    const char *old = getenv("SIMGPU_NVML_HOSTPIDS");
    bool host = old && *old == '1';
    int n = 0;
    if (!host && !have_proc())
        return 0;
    sim_sweep();
    uint32_t high = atomic_load(&sim->slots_high), self = nv_index(dom);
    uint64_t own_ns = inode("/proc/self/ns/pid");
    for (uint32_t d = 0; d < sim->doms; d++) {
        if (d != self && sim->dom[d].parent != (int32_t)self)
            continue;
        for (int i = 0; i < (int)high && n < max; i++) {
            if (atomic_load(&sim->slot[i].state) != SIM_SLOT_USED ||
                !atomic_load(&sim->contexts[d][i]))
                continue;
            unsigned pid = host ? host_pid(i, own_ns) : pid_here(i, own_ns);
            bool mig = sim->dom[d].parent >= 0;
            if (pid)
                out[n++] = (struct process){pid, mig ? sim->dom[d].gpu_instance : 0xffffffffu,
                                            mig ? sim->dom[d].compute_instance : 0xffffffffu,
                                            sim_slot_used(d, i)};
        }
    }
    return n;
}

/* The common protocol: the count goes in as room and comes out as need. */
static nvmlReturn_t fill(nvmlDevice_t device, unsigned *count, void *infos, int version) {
    NV_DEVICE(device, dom);
    NV_ARG(count);
    struct process *all = calloc(SIM_SLOTS, sizeof *all);
    NV_CHECK(all, NVML_ERROR_MEMORY);
    unsigned n = version ? (unsigned)list(dom, all, SIM_SLOTS) : 0, room = *count;
    nvmlReturn_t r = NVML_SUCCESS;
    if (room < n)
        r = NVML_ERROR_INSUFFICIENT_SIZE;
    else if (n && !infos)
        r = NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned i = 0; r == NVML_SUCCESS && i < n; i++) {
        if (version == 1)
            ((nvmlProcessInfo_v1_t *)infos)[i] =
                (nvmlProcessInfo_v1_t){.pid = all[i].pid, .usedGpuMemory = all[i].bytes};
        else
            ((nvmlProcessInfo_v2_t *)infos)[i] =
                (nvmlProcessInfo_v2_t){.pid = all[i].pid,
                                       .usedGpuMemory = all[i].bytes,
                                       .gpuInstanceId = all[i].gpu_instance,
                                       .computeInstanceId = all[i].compute_instance};
    }
    *count = n;
    free(all);
    return r;
}

#define LIST(name, type, version)                                         \
    NV_API(name, (nvmlDevice_t device, unsigned *infoCount, type *infos), \
           (device, infoCount, infos)) {                                  \
        return fill(device, infoCount, infos, version);                   \
    }
LIST(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, 1)
LIST(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, 2)
LIST(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t, 3)
LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t, 0)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t, 0)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t, 0)
LIST(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t, 0)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, 0)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t, 0)

NV_API(nvmlDeviceGetRunningProcessDetailList, (nvmlDevice_t device, nvmlProcessDetailList_t *plist),
       (device, plist)) {
    NV_DEVICE(device, dom);
    NV_ARG(plist);
    NV_CHECK(plist->version == nvmlProcessDetailList_v1, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    NV_ARG(plist->mode <= 2);
    struct process *all = calloc(SIM_SLOTS, sizeof *all);
    NV_CHECK(all, NVML_ERROR_MEMORY);
    unsigned n = plist->mode == 0 ? (unsigned)list(dom, all, SIM_SLOTS) : 0;
    bool fits = plist->numProcArrayEntries >= n && (plist->procArray || !n);
    for (unsigned i = 0; fits && i < n; i++)
        plist->procArray[i] =
            (nvmlProcessDetail_v1_t){.pid = all[i].pid,
                                     .usedGpuMemory = all[i].bytes,
                                     .gpuInstanceId = all[i].gpu_instance,
                                     .computeInstanceId = all[i].compute_instance};
    plist->numProcArrayEntries = n;
    free(all);
    return fits ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

/* All processes share what the test set as the device's utilisation. */
static unsigned share(const struct sim_dom *dom, unsigned n, bool memory) {
    const struct sim_live *l = &sim->live[nv_index(dom)];
    unsigned v = atomic_load(memory ? &l->util_mem : &l->util_gpu);
    return n ? v / n : 0;
}

NV_API(nvmlDeviceGetProcessUtilization,
       (nvmlDevice_t device, nvmlProcessUtilizationSample_t *utilization, unsigned *count,
        unsigned long long lastSeen),
       (device, utilization, count, lastSeen)) {
    NV_DEVICE(device, dom);
    NV_ARG(count);
    struct process *all = calloc(SIM_SLOTS, sizeof *all);
    NV_CHECK(all, NVML_ERROR_MEMORY);
    unsigned n = (unsigned)list(dom, all, SIM_SLOTS), room = *count;
    uint64_t now = sim_now_us();
    nvmlReturn_t r = n == 0 || lastSeen > now          ? NVML_ERROR_NOT_FOUND
                     : utilization == NULL || room < n ? NVML_ERROR_INSUFFICIENT_SIZE
                                                       : NVML_SUCCESS;
    for (unsigned i = 0; r == NVML_SUCCESS && i < n; i++)
        utilization[i] = (nvmlProcessUtilizationSample_t){.pid = all[i].pid,
                                                          .timeStamp = now,
                                                          .smUtil = share(dom, n, false),
                                                          .memUtil = share(dom, n, true)};
    *count = n;
    free(all);
    return r;
}

NV_API(nvmlDeviceGetProcessesUtilizationInfo,
       (nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *info), (device, info)) {
    NV_DEVICE(device, dom);
    NV_ARG(info);
    NV_CHECK(info->version == nvmlProcessesUtilizationInfo_v1,
             NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    struct process *all = calloc(SIM_SLOTS, sizeof *all);
    NV_CHECK(all, NVML_ERROR_MEMORY);
    unsigned n = (unsigned)list(dom, all, SIM_SLOTS);
    bool fits = info->processSamplesCount >= n && (info->procUtilArray || !n);
    for (unsigned i = 0; fits && i < n; i++)
        info->procUtilArray[i] = (nvmlProcessUtilizationInfo_v1_t){.pid = all[i].pid,
                                                                   .timeStamp = sim_now_us(),
                                                                   .smUtil = share(dom, n, false),
                                                                   .memUtil = share(dom, n, true)};
    info->processSamplesCount = n;
    free(all);
    return fits ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

NV_API(nvmlSystemGetProcessName, (unsigned pid, char *name, unsigned length), (pid, name, length)) {
    char path[64], exe[256];
    NV_ARG(name && length);
    snprintf(path, sizeof path, "/proc/%u/exe", pid);
    ssize_t n = readlink(path, exe, sizeof exe - 1);
    NV_CHECK(n > 0, NVML_ERROR_NOT_FOUND);
    exe[n] = 0;
    snprintf(name, length, "%s", exe);
    return NVML_SUCCESS;
}
