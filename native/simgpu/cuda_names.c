/* The table of cuda_names.def with our addresses. */
#include "sim_cuda.h"

/* The self names are hidden aliases, so the answer is our own export whatever is preloaded. */
#define N(base, since, symbol) \
    extern const char symbol##_self[] __attribute__((visibility("hidden")));
#define P N
#include "cuda_names.def"
#undef N
#undef P

const struct cu_name cu_names[] = {
#define N(base, since, symbol) {#base, #symbol, since, false, symbol##_self},
#define P(base, since, symbol) {#base, #symbol, since, true, symbol##_self},
#include "cuda_names.def"
#undef N
#undef P
};

const int cu_names_count = (int)(sizeof cu_names / sizeof *cu_names);
