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

#include "cuda_stubs.def"
