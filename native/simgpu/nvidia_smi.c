/* Stand-in for nvidia-smi. It looks NVML up as the real one does, with dlopen and dlsym, so that
 * an interposer meets it in the same way. */
#define _GNU_SOURCE
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>

#include <dlfcn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MIB (1024ull * 1024ull)
#define MAX_PROCS 1024

#define CALLS(X)                               \
    X(nvmlInit_v2)                             \
    X(nvmlShutdown)                            \
    X(nvmlErrorString)                         \
    X(nvmlSystemGetDriverVersion)              \
    X(nvmlSystemGetCudaDriverVersion_v2)       \
    X(nvmlSystemGetProcessName)                \
    X(nvmlDeviceGetCount_v2)                   \
    X(nvmlDeviceGetHandleByIndex_v2)           \
    X(nvmlDeviceGetName)                       \
    X(nvmlDeviceGetUUID)                       \
    X(nvmlDeviceGetPciInfo_v3)                 \
    X(nvmlDeviceGetMemoryInfo_v2)              \
    X(nvmlDeviceGetUtilizationRates)           \
    X(nvmlDeviceGetTemperature)                \
    X(nvmlDeviceGetPowerUsage)                 \
    X(nvmlDeviceGetEnforcedPowerLimit)         \
    X(nvmlDeviceGetComputeRunningProcesses_v3) \
    X(nvmlDeviceGetMigMode)                    \
    X(nvmlDeviceGetMigDeviceHandleByIndex)
#define DECLARE(name) static __typeof__(name) *p_##name;
CALLS(DECLARE)

static void fail(const char *what, nvmlReturn_t r) {
    printf("%s: %s\n", what, p_nvmlErrorString ? p_nvmlErrorString(r) : "library missing");
    exit(r ? (int)r : 12);
}

static void load(void) {
    void *h = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!h) {
        printf("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure "
               "that the NVIDIA Display Driver is properly installed and present in your "
               "system.\n");
        exit(12);
    }
#define LOOK_UP(name) *(void **)&p_##name = dlsym(h, #name);
    CALLS(LOOK_UP)
    nvmlReturn_t r = p_nvmlInit_v2();
    if (r)
        fail("Failed to initialize NVML", r);
}

struct device {
    nvmlDevice_t handle;
    unsigned index;
    char name[96], uuid[96];
    nvmlPciInfo_t pci;
    nvmlMemory_v2_t memory;
    nvmlReturn_t memory_result;
    nvmlUtilization_t util;
};

static void read_device(unsigned index, struct device *d) {
    memset(d, 0, sizeof *d);
    d->index = index;
    nvmlReturn_t r = p_nvmlDeviceGetHandleByIndex_v2(index, &d->handle);
    if (r)
        fail("Unable to determine the device handle", r);
    p_nvmlDeviceGetName(d->handle, d->name, sizeof d->name);
    p_nvmlDeviceGetUUID(d->handle, d->uuid, sizeof d->uuid);
    p_nvmlDeviceGetPciInfo_v3(d->handle, &d->pci);
    d->memory.version = nvmlMemory_v2;
    d->memory_result = p_nvmlDeviceGetMemoryInfo_v2(d->handle, &d->memory);
    p_nvmlDeviceGetUtilizationRates(d->handle, &d->util);
}

static unsigned processes(const struct device *d, nvmlProcessInfo_t *out) {
    unsigned n = MAX_PROCS;
    return p_nvmlDeviceGetComputeRunningProcesses_v3(d->handle, &n, out) ? 0 : n;
}

static unsigned count(void) {
    unsigned n = 0;
    p_nvmlDeviceGetCount_v2(&n);
    return n;
}

/* ---- table ---- */

/* One line of the box, 91 characters wide. */
static void row(const char *left, const char *middle, const char *right) {
    printf("|%-41s|%-24s|%-22s|\n", left, middle, right);
}

static char *text(char *out, size_t size, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(out, size, format, args);
    va_end(args);
    return out;
}

static void device_rows(const struct device *d) {
    char a[128], b[128], c[128], memory[64];
    unsigned temp = 0, power = 0, limit = 0, mig = 0, pending = 0;
    p_nvmlDeviceGetTemperature(d->handle, NVML_TEMPERATURE_GPU, &temp);
    p_nvmlDeviceGetPowerUsage(d->handle, &power);
    p_nvmlDeviceGetEnforcedPowerLimit(d->handle, &limit);
    bool has_mig = p_nvmlDeviceGetMigMode(d->handle, &mig, &pending) == NVML_SUCCESS;
    if (d->memory_result)
        text(memory, sizeof memory, "N/A");
    else
        text(memory, sizeof memory, "%lluMiB / %lluMiB", d->memory.used / MIB,
             d->memory.total / MIB);
    row(text(a, sizeof a, " %3u  %-24.24s On  ", d->index, d->name),
        text(b, sizeof b, "   %-16.16s Off ", d->pci.busId), "                    0 ");
    row(text(a, sizeof a, " N/A  %3uC    P0    %9uW / %4uW ", temp, power / 1000, limit / 1000),
        text(b, sizeof b, " %22s ", memory),
        text(c, sizeof c, " %6u%%      Default ", d->util.gpu));
    row("", "",
        has_mig ? (mig ? "              Enabled " : "             Disabled ")
                : "                  N/A ");
    printf("+-----------------------------------------+------------------------+-------------------"
           "---+\n");
}

static const char *process_name(unsigned pid, char *out, unsigned size) {
    if (p_nvmlSystemGetProcessName(pid, out, size))
        snprintf(out, size, "[Not Found]");
    return out;
}

/* The end of a long path says more than its beginning. */
static const char *shorten(char *name, size_t room) {
    size_t length = strlen(name);
    if (length <= room)
        return name;
    char *tail = name + length - room;
    memcpy(tail, "...", 3);
    return tail;
}

static void process_rows(unsigned devices) {
    static nvmlProcessInfo_t list[MAX_PROCS];
    unsigned shown = 0;
    char name[256], id[16];
    printf(
        "\n+-------------------------------------------------------------------------------------"
        "----+\n");
    printf("| Processes:                                                                           "
           "   |\n");
    printf("|  GPU   GI   CI        PID   Type   Process name                              GPU "
           "Memory |\n");
    printf("|        ID   ID                                                               Usage   "
           "   |\n");
    printf("|======================================================================================"
           "===|\n");
    for (unsigned i = 0; i < devices; i++) {
        struct device d;
        read_device(i, &d);
        unsigned n = processes(&d, list);
        for (unsigned p = 0; p < n; p++, shown++) {
            bool mig = list[p].gpuInstanceId != 0xffffffffu;
            snprintf(id, sizeof id, mig ? "%u" : "N/A", list[p].gpuInstanceId);
            process_name(list[p].pid, name, sizeof name);
            printf("| %4u  %4s  %3s  %9u      C   %-36.36s %10lluMiB |\n", i, id, mig ? "0" : "N/A",
                   list[p].pid, shorten(name, 36), list[p].usedGpuMemory / MIB);
        }
    }
    if (!shown)
        printf("|  No running processes found                                                      "
               "       |\n");
    printf(
        "+-----------------------------------------------------------------------------------------"
        "+\n");
}

static void table(void) {
    char driver[80] = "", stamp[64];
    int cuda = 0;
    time_t now = time(NULL);
    strftime(stamp, sizeof stamp, "%a %b %e %H:%M:%S %Y", localtime(&now));
    p_nvmlSystemGetDriverVersion(driver, sizeof driver);
    p_nvmlSystemGetCudaDriverVersion_v2(&cuda);
    printf("%s       \n", stamp);
    printf(
        "+-----------------------------------------------------------------------------------------"
        "+\n");
    printf("| NVIDIA-SMI %-22s Driver Version: %-14s CUDA Version: %2d.%-5d |\n", driver, driver,
           cuda / 1000, cuda % 1000 / 10);
    printf("|-----------------------------------------+------------------------+-------------------"
           "---+\n");
    row(" GPU  Name                 Persistence-M ", " Bus-Id          Disp.A ",
        " Volatile Uncorr. ECC ");
    row(" Fan  Temp   Perf          Pwr:Usage/Cap ", "           Memory-Usage ",
        " GPU-Util  Compute M. ");
    row("", "", "               MIG M. ");
    printf(
        "|=========================================+========================+===================="
        "==|\n");
    unsigned n = count();
    for (unsigned i = 0; i < n; i++) {
        struct device d;
        read_device(i, &d);
        device_rows(&d);
    }
    process_rows(n);
}

/* ---- queries ---- */

static bool units = true, header = true;

static void number(unsigned long long value, const char *unit) {
    printf(units ? "%llu %s" : "%llu", value, unit);
}

static void memory_field(const struct device *d, unsigned long long value) {
    if (d->memory_result)
        printf("[N/A]");
    else
        number(value / MIB, "MiB");
}

static bool field(const char *f, const struct device *d) {
    char driver[80] = "";
    if (!strcmp(f, "name") || !strcmp(f, "gpu_name"))
        printf("%s", d->name);
    else if (!strcmp(f, "uuid") || !strcmp(f, "gpu_uuid"))
        printf("%s", d->uuid);
    else if (!strcmp(f, "index"))
        printf("%u", d->index);
    else if (!strcmp(f, "count"))
        printf("%u", count());
    else if (!strcmp(f, "pci.bus_id") || !strcmp(f, "gpu_bus_id"))
        printf("%s", d->pci.busId);
    else if (!strcmp(f, "memory.total"))
        memory_field(d, d->memory.total);
    else if (!strcmp(f, "memory.used"))
        memory_field(d, d->memory.used);
    else if (!strcmp(f, "memory.free"))
        memory_field(d, d->memory.free);
    else if (!strcmp(f, "memory.reserved"))
        memory_field(d, d->memory.reserved);
    else if (!strcmp(f, "utilization.gpu"))
        number(d->util.gpu, "%");
    else if (!strcmp(f, "utilization.memory"))
        number(d->util.memory, "%");
    else if (!strcmp(f, "driver_version") && !p_nvmlSystemGetDriverVersion(driver, sizeof driver))
        printf("%s", driver);
    else
        return false;
    return true;
}

static const char *unit_of(const char *f) {
    return !strncmp(f, "memory.", 7) || !strcmp(f, "used_memory") || !strcmp(f, "used_gpu_memory")
               ? " [MiB]"
           : !strncmp(f, "utilization.", 12) ? " [%]"
                                             : "";
}

static char *fields[64];
static int n_fields;

static void split(char *list) {
    for (char *f = strtok(list, ","); f && n_fields < 64; f = strtok(NULL, ",")) {
        while (*f == ' ')
            f++;
        fields[n_fields++] = f;
    }
}

static void print_header(void) {
    for (int i = 0; header && i < n_fields; i++)
        printf("%s%s%s", fields[i], units ? unit_of(fields[i]) : "",
               i + 1 < n_fields ? ", " : "\n");
}

static int query_gpu(void) {
    print_header();
    for (unsigned i = 0, n = count(); i < n; i++) {
        struct device d;
        read_device(i, &d);
        for (int f = 0; f < n_fields; f++) {
            if (!field(fields[f], &d)) {
                printf("Field \"%s\" is not a valid field to query.\n", fields[f]);
                return 2;
            }
            printf(f + 1 < n_fields ? ", " : "\n");
        }
    }
    return 0;
}

static bool app_field(const char *f, const struct device *d, const nvmlProcessInfo_t *p) {
    char name[256];
    if (!strcmp(f, "pid"))
        printf("%u", p->pid);
    else if (!strcmp(f, "used_memory") || !strcmp(f, "used_gpu_memory"))
        number(p->usedGpuMemory / MIB, "MiB");
    else if (!strcmp(f, "process_name") || !strcmp(f, "name"))
        printf("%s", process_name(p->pid, name, sizeof name));
    else
        return field(f, d);
    return true;
}

static int query_apps(void) {
    static nvmlProcessInfo_t list[MAX_PROCS];
    print_header();
    for (unsigned i = 0, n = count(); i < n; i++) {
        struct device d;
        read_device(i, &d);
        unsigned apps = processes(&d, list);
        for (unsigned p = 0; p < apps; p++)
            for (int f = 0; f < n_fields; f++) {
                if (!app_field(fields[f], &d, &list[p])) {
                    printf("Field \"%s\" is not a valid field to query.\n", fields[f]);
                    return 2;
                }
                printf(f + 1 < n_fields ? ", " : "\n");
            }
    }
    return 0;
}

static int list_gpus(void) {
    for (unsigned i = 0, n = count(); i < n; i++) {
        struct device d;
        nvmlDevice_t mig;
        read_device(i, &d);
        printf("GPU %u: %s (UUID: %s)\n", i, d.name, d.uuid);
        for (unsigned m = 0; p_nvmlDeviceGetMigDeviceHandleByIndex(d.handle, m, &mig) == 0; m++) {
            char name[96] = "", uuid[96] = "";
            p_nvmlDeviceGetName(mig, name, sizeof name);
            p_nvmlDeviceGetUUID(mig, uuid, sizeof uuid);
            const char *profile = strstr(name, "MIG ");
            printf("  %s     Device  %u: (UUID: %s)\n", profile ? profile : "MIG", m, uuid);
        }
    }
    return 0;
}

int main(int argc, char **argv) {
    enum { TABLE, GPU, APPS, LIST } mode = TABLE;
    char *list = NULL;
    for (int i = 1; i < argc; i++) {
        char *a = argv[i];
        if (!strncmp(a, "--query-gpu=", 12)) {
            mode = GPU;
            list = a + 12;
        } else if (!strncmp(a, "--query-compute-apps=", 21)) {
            mode = APPS;
            list = a + 21;
        } else if (!strncmp(a, "--format=", 9)) {
            units = !strstr(a, "nounits");
            header = !strstr(a, "noheader");
        } else if (!strcmp(a, "-L") || !strcmp(a, "--list-gpus")) {
            mode = LIST;
        } else {
            printf(
                "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n");
            return 2;
        }
    }
    load();
    if (list)
        split(list);
    int rc = 0;
    if (mode == TABLE)
        table();
    else
        rc = mode == GPU ? query_gpu() : mode == APPS ? query_apps() : list_gpus();
    p_nvmlShutdown();
    return rc;
}
