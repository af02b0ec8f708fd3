#define _GNU_SOURCE
#include "hooks.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <sched.h>
#include <stdbool.h>
#include <string.h>

/* Finds the driver's functions and answers look-ups of them.
 *
 * The driver's answer comes first; ours takes its place only where the answer is the very address
 * of a row. So versions and flags need no rules of ours, and what is not in the table keeps the
 * driver's own pointer and costs nothing. No state is made before a name of the table is asked
 * for or an entry of ours is called. */

struct real_table real;
bool driver_ready[LIBRARY_COUNT];
TLS int inside;

struct row {
    const char *name;
    void *ours;
    void **real;
    enum hook_library library;
};

#define CUDA LIBRARY_CUDA
#define NVML LIBRARY_NVML
static const struct row hooks[] = {
#define HOOK(library, symbol, result, params) \
    {#symbol, (void *)symbol, (void **)&real.symbol, library},
#include "hooks.def"
};
static const struct row calls[] = {
#define CALL(library, symbol, result, params) {#symbol, NULL, (void **)&real.symbol, library},
#include "hooks.def"
};
#undef CUDA
#undef NVML
#define COUNT(array) (sizeof(array) / sizeof *(array))

static const char *const sonames[LIBRARY_COUNT] = {"libcuda.so.1", "libnvidia-ml.so.1"};
static const char *const families[LIBRARY_COUNT] = {"libcuda.so", "libnvidia-ml.so"};

typedef void *dlsym_function(void *handle, const char *name);

/* Read by dlsym_entry.S. */
__attribute__((visibility("hidden"))) dlsym_function *dispatch_next_dlsym;

/* Code of each library, to know look-ups that it makes itself. */
static struct range {
    uintptr_t start, end;
} driver_code[LIBRARY_COUNT];

/* Open-addressed indices into hooks, + 1; by name (made on the first look-up) and by the
 * driver's address (made with the table). Filling them twice writes the same values. */
#define SLOTS 1024
static uint16_t by_name[SLOTS];
static uint16_t by_address[SLOTS];
static bool by_name_ready;

static uint32_t hash_name(const char *name) {
    uint32_t hash = 2166136261u;
    while (*name)
        hash = (hash ^ (unsigned char)*name++) * 16777619u;
    return hash ^ (hash >> 15);
}

static uint32_t hash_address(const void *address) {
    uint64_t bits = (uint64_t)(uintptr_t)address * 0x9e3779b97f4a7c15u;
    return (uint32_t)(bits >> 40);
}

static void put(uint16_t *table, uint32_t hash, size_t index) {
    uint16_t value = (uint16_t)(index + 1), seen;
    for (uint32_t i = hash % SLOTS;; i = (i + 1) % SLOTS) {
        seen = __atomic_load_n(&table[i], __ATOMIC_RELAXED);
        if (seen == value)
            return;
        if (seen == 0) {
            __atomic_store_n(&table[i], value, __ATOMIC_RELAXED);
            return;
        }
    }
}

static const struct row *find_name(const char *name) {
    if (!__atomic_load_n(&by_name_ready, __ATOMIC_ACQUIRE)) {
        for (size_t i = 0; i < COUNT(hooks); i++)
            put(by_name, hash_name(hooks[i].name), i);
        __atomic_store_n(&by_name_ready, true, __ATOMIC_RELEASE);
    }
    for (uint32_t i = hash_name(name) % SLOTS;; i = (i + 1) % SLOTS) {
        uint16_t index = __atomic_load_n(&by_name[i], __ATOMIC_RELAXED);
        if (index == 0)
            return NULL;
        if (strcmp(hooks[index - 1].name, name) == 0)
            return &hooks[index - 1];
    }
}

void *driver_swap(void *address) {
    if (!address)
        return NULL;
    for (uint32_t i = hash_address(address) % SLOTS;; i = (i + 1) % SLOTS) {
        uint16_t index = __atomic_load_n(&by_address[i], __ATOMIC_RELAXED);
        if (index == 0)
            return address;
        if (*hooks[index - 1].real == address)
            return hooks[index - 1].ours;
    }
}

/* The next dlsym after ours: libc's, or another interposer's. */
static dlsym_function *next_dlsym(void) {
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
    dlsym_function *next = __atomic_load_n(&dispatch_next_dlsym, __ATOMIC_ACQUIRE);
    for (size_t i = 0; !next && i < COUNT(versions); i++)
        next = (dlsym_function *)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    if (next)
        __atomic_store_n(&dispatch_next_dlsym, next, __ATOMIC_RELEASE);
    return next;
}

static int code_of(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    struct range *range = data;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        uintptr_t start = info->dlpi_addr + header->p_vaddr;
        if (header->p_type != PT_LOAD || !(header->p_flags & PF_X) || range->start < start ||
            range->start >= start + header->p_memsz)
            continue;
        range->start = start;
        range->end = start + header->p_memsz;
        return 1;
    }
    return 0;
}

static void fill(enum hook_library library, void *handle, dlsym_function *find) {
    void *anchor = NULL;
    for (size_t i = 0; i < COUNT(calls); i++)
        if (calls[i].library == library)
            *calls[i].real = find(handle, calls[i].name);
    for (size_t i = 0; i < COUNT(hooks); i++) {
        if (hooks[i].library != library)
            continue;
        void *address = find(handle, hooks[i].name);
        *hooks[i].real = address;
        if (!address)
            continue;
        anchor = address;
        put(by_address, hash_address(address), i);
    }
    struct range range = {(uintptr_t)anchor, 0};
    if (anchor && dl_iterate_phdr(code_of, &range))
        driver_code[library] = range;
}

static bool is_named(enum hook_library library, const char *path) {
    const char *base = strrchr(path, '/');
    return strncmp(base ? base + 1 : path, families[library], strlen(families[library])) == 0;
}

struct sought {
    enum hook_library library;
    char path[PATH_MAX];
};

static int path_of(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    struct sought *sought = data;
    size_t length = strlen(info->dlpi_name);
    if (!is_named(sought->library, info->dlpi_name) || length >= sizeof sought->path)
        return 0;
    memcpy(sought->path, info->dlpi_name, length + 1);
    return 1;
}

/* A profiler may open a library of its own where the driver is asked for: then the driver behind it,
 * so that the profiler's calls come to us. `handle` where no other library has the driver's name.
 * The path is copied out: to walk the loader's list without its lock races with dlclose. */
static void *itself(enum hook_library library, void *handle) {
    struct link_map *map;
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) || is_named(library, map->l_name))
        return handle;
    struct sought sought = {.library = library};
    void *found =
        dl_iterate_phdr(path_of, &sought) ? dlopen(sought.path, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    return found ? found : handle;
}

/* One thread fills; others wait for it. No pthread lock: a fork in between must not leave it
 * held for ever in the child, and the filler makes no call that can block on them. */
int driver_find(enum hook_library library, bool load) {
    static int filling;
    if (__atomic_load_n(&driver_ready[library], __ATOMIC_ACQUIRE))
        return 0;
    dlsym_function *find = next_dlsym();
    if (!find)
        return -1;
    void *handle = dlopen(sonames[library], RTLD_LAZY | RTLD_NOLOAD);
    if (!handle && load)
        handle = dlopen(sonames[library], RTLD_LAZY);
    if (!handle)
        return -1;
    handle = itself(library, handle);
    for (int spins = 0; __atomic_exchange_n(&filling, 1, __ATOMIC_ACQUIRE); spins++) {
        if (__atomic_load_n(&driver_ready[library], __ATOMIC_ACQUIRE) || spins > 100000)
            break;
        sched_yield();
    }
    if (!__atomic_load_n(&driver_ready[library], __ATOMIC_ACQUIRE)) {
        fill(library, handle, find);
        __atomic_store_n(&driver_ready[library], true, __ATOMIC_RELEASE);
    }
    __atomic_store_n(&filling, 0, __ATOMIC_RELEASE);
    return 0;
}

static bool is_driver_code(const void *place) {
    uintptr_t address = (uintptr_t)place;
    for (int i = 0; i < LIBRARY_COUNT; i++)
        if (address >= driver_code[i].start && address < driver_code[i].end)
            return true;
    return false;
}

/* Whether the look-up of a row comes from the driver, or from what our calls of that row go to: a
 * profiler that is opened in the driver's place asks for what lies behind it. dladdr reads all of a
 * library's symbols, so it is not asked about what goes to the driver itself. */
static bool called_by_driver(const void *caller, const void *callee) {
    Dl_info asks, serves;
    if (is_driver_code(caller))
        return true;
    return callee && !is_driver_code(callee) && dladdr(caller, &asks) && dladdr(callee, &serves) &&
           asks.dli_fbase == serves.dli_fbase;
}

/* A second copy of the driver (a compat directory) must not be a way past us. */
static bool is_driver_copy(enum hook_library library, void *address) {
    Dl_info info;
    return dladdr(address, &info) && info.dli_fname && is_named(library, info.dli_fname);
}

struct answer {
    void *address;
    uint64_t final; /* 0: jump to the next dlsym instead */
};

/* A name that nobody but us exports here: let libc say so (dlerror included), from behind us. */
static struct answer absent(dlsym_function *next, const char *name) {
    return (struct answer){next(RTLD_NEXT, name), 1};
}

/* What the driver finds when it looks for one of its own names: never ours. */
static struct answer behind(void *handle, const struct row *row, dlsym_function *next) {
    if (handle == RTLD_NEXT)
        return (struct answer){NULL, 0};
    void *address = handle == RTLD_DEFAULT ? row->ours : next(handle, row->name);
    if (address != row->ours)
        return (struct answer){address, 1};
    return *row->real ? (struct answer){*row->real, 1} : absent(next, row->name);
}

__attribute__((visibility("hidden"))) struct answer dispatch_dlsym(void *handle, const char *name,
                                                                   void *caller);

struct answer dispatch_dlsym(void *handle, const char *name, void *caller) {
    const struct answer pass = {NULL, 0};
    dlsym_function *next = next_dlsym();
    if (!next || !name)
        return pass;
    bool candidate = (name[0] == 'c' && name[1] == 'u') || strncmp(name, "nvml", 4) == 0;
    const struct row *row = candidate ? find_name(name) : NULL;
    if (!row)
        return pass;
    bool found = driver_find(row->library, false) == 0;
    if (found && called_by_driver(caller, *row->real))
        return behind(handle, row, next);
    if (handle == RTLD_DEFAULT || handle == RTLD_NEXT) {
        if (found && *row->real)
            return (struct answer){row->ours, 1};
        return absent(next, name);
    }
    void *address = next(handle, name);
    if (!address)
        return (struct answer){NULL, 1};
    if (address == row->ours)
        return found && *row->real ? (struct answer){row->ours, 1} : absent(next, name);
    if (found && (address == *row->real || is_driver_copy(row->library, address)))
        return (struct answer){row->ours, 1};
    return (struct answer){address, 1};
}

static CUresult swapped(CUresult result, void **pfn) {
    if (result == CUDA_SUCCESS && pfn)
        *pfn = driver_swap(*pfn);
    return result;
}

CUresult cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags) {
    NEED_CUDA(cuGetProcAddress);
    return swapped(real.cuGetProcAddress(symbol, pfn, cudaVersion, flags), pfn);
}

CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *symbolStatus) {
    NEED_CUDA(cuGetProcAddress_v2);
    return swapped(real.cuGetProcAddress_v2(symbol, pfn, cudaVersion, flags, symbolStatus), pfn);
}
