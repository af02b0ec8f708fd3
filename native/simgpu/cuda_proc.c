/* cuGetProcAddress: names with the versions they appeared in. */
#include "sim_cuda.h"

#include <string.h>
#include <strings.h>

static int by_base(const char *a, const char *b) {
    return strcasecmp(a, b) ? strcasecmp(a, b) : strcmp(a, b);
}

/* First row of this base name; the rows are sorted. */
static int first(const char *base) {
    int lo = 0, hi = cu_names_count;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (by_base(cu_names[mid].base, base) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < cu_names_count && strcmp(cu_names[lo].base, base) == 0 ? lo : -1;
}

/* The youngest variant that is not younger than the version asked for; with the per-thread flag
 * a per-thread variant wins over any other. */
static const struct cu_name *choose(const char *base, int version, bool per_thread, bool *known) {
    const struct cu_name *best = NULL;
    int driver = cu_driver_version();
    *known = false;
    for (int i = first(base); i >= 0 && i < cu_names_count && strcmp(cu_names[i].base, base) == 0;
         i++) {
        const struct cu_name *n = &cu_names[i];
        if (n->since > driver || sim_name_hidden(n->symbol) || (n->per_thread && !per_thread))
            continue;
        *known = true;
        if (n->since > version)
            continue;
        if (!best || n->per_thread > best->per_thread ||
            (n->per_thread == best->per_thread && n->since > best->since))
            best = n;
    }
    return best;
}

static CUresult lookup(const char *symbol, void **pfn, int version, cuuint64_t flags,
                       CUdriverProcAddressQueryResult *status) {
    CU_ARG(symbol && pfn && flags <= CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
    bool known;
    const struct cu_name *n =
        choose(symbol, version, flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, &known);
    *pfn = n ? (void *)(uintptr_t)n->address : NULL;
    if (status)
        *status = n       ? CU_GET_PROC_ADDRESS_SUCCESS
                  : known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                          : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS; /* documented: a name that is not there is no error */
}

SIM_API_NEW(cuGetProcAddress_v2,
            (const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
             CUdriverProcAddressQueryResult *symbolStatus),
            (symbol, pfn, cudaVersion, flags, symbolStatus)) {
    return lookup(symbol, pfn, cudaVersion, flags, symbolStatus);
}

SIM_API_NEW(cuGetProcAddress, (const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags),
            (symbol, pfn, cudaVersion, flags)) {
    return lookup(symbol, pfn, cudaVersion, flags, NULL);
}
