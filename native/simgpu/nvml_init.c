/* nvmlInit_v2 reaches nvmlInitWithFlags, as NVML's does, through the exported name, where an
 * interposer can be met. A file of its own keeps either from being inlined. */
#include "sim_nvml.h"

NV_FREE(nvmlInit_v2, (void), ()) {
    return nvmlInitWithFlags(0);
}
