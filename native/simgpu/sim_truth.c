/* For tests: the truth, to compare an interposer's ledger with. Exported by both libraries. */
#include "sim.h"

SIM_EXPORT uint64_t simgpu_device_used(int nvml_index);
SIM_EXPORT uint64_t simgpu_process_used(int pid, int nvml_index);
SIM_EXPORT void simgpu_set_utilization(int nvml_index, unsigned gpu, unsigned memory);

static bool have(int nvml_index) {
    return !sim_forked() && sim_attach(false) == 0 && nvml_index >= 0 &&
           nvml_index < (int)sim->doms;
}

uint64_t simgpu_device_used(int nvml_index) {
    if (!have(nvml_index))
        return 0;
    sim_sweep();
    return sim_dom_used((uint32_t)nvml_index);
}

/* `pid` as the process itself knows it; domains behind the devices are MIG instances. */
uint64_t simgpu_process_used(int pid, int nvml_index) {
    if (!have(nvml_index))
        return 0;
    sim_sweep();
    uint64_t sum = 0;
    for (int i = 0; i < SIM_SLOTS; i++)
        if (atomic_load(&sim->slot[i].state) == SIM_SLOT_USED && sim->slot[i].pid == pid)
            sum += sim_slot_used((uint32_t)nvml_index, i);
    return sum;
}

void simgpu_set_utilization(int nvml_index, unsigned gpu, unsigned memory) {
    if (!have(nvml_index))
        return;
    atomic_store(&sim->live[nvml_index].util_gpu, gpu);
    atomic_store(&sim->live[nvml_index].util_mem, memory);
}
