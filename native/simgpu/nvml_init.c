/* The entry points of old and new programs. They reach nvmlInitWithFlags as NVML's do: through the
 * exported name, where an interposer can be met. A file of its own keeps it from being inlined. */
#include "sim_nvml.h"

NV_FREE(nvmlInit_v2, (void), ()) {
    return nvmlInitWithFlags(0);
}

NV_FREE(nvmlInit, (void), ()) {
    return nvmlInit_v2();
}
