/* The simulated GPU: what libcuda.so.1 and libnvidia-ml.so.1 share.
 *
 * All device memory figures live in one file ($SIMGPU_STATE) that every process maps. There is no
 * daemon and no lock on the hot path: a process announces its bytes in `pending`, sums, and moves
 * them to `used`, so a killed process leaves only words of its own slot behind, and a stopped one
 * blocks nobody. A slot is alive as long as an OFD lock on its byte is held; that lock hangs on
 * the mapping, not on a descriptor, so the kernel drops it however the process ends.
 *
 * Settings, read when the state file is made (later processes obey the file):
 *   SIMGPU_STATE          the file; /dev/shm/simgpu-UID
 *   SIMGPU_MODEL          T4 | H200 | A100 | A100-MIG3g; SIMGPU_MODELS=T4,H200 for a mix
 *   SIMGPU_COUNT          devices, 1 to 32; a list of models goes round
 *   SIMGPU_DRIVER         CUDA version, 13000; younger names vanish from cuGetProcAddress
 * Settings of each process:
 *   SIMGPU_FAULTS         name:nth or *:result,…   before any effect, outputs unwritten
 *   SIMGPU_DELAY          name:microseconds,…      SIMGPU_LOG  file for "pid tid name result"
 *   SIMGPU_HIDE           name,…  hidden from cuGetProcAddress
 *   SIMGPU_CUDA_ORDER     reverse: CUDA's order is not NVML's
 *   SIMGPU_SELFLOOKUP     1: cuInit looks itself up       SIMGPU_V1  1: 32-bit calls work
 *   SIMGPU_NVML_HOSTPIDS  1: process lists as of older drivers    SIMGPU_CC  1: confidential mode
 *   SIMGPU_NVML_FAIL_AFTER  seconds, then 999             SIMGPU_NVML_NO_MEMORY  1: not supported
 * Exports for tests: simgpu_device_used, simgpu_process_used, simgpu_set_utilization; in libcuda
 * also simgpu_live_objects and simgpu_launches. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define SIM_MAGIC 0x53494d4750553033ull
#define SIM_DEVS 32    /* physical devices */
#define SIM_DOMS 64    /* memory domains: the physical devices, then MIG instances */
#define SIM_SLOTS 1024 /* processes at a time */
#define SIM_OBJS 4096  /* allocations that more than one process can hold */
#define SIM_MIB (1024ull * 1024ull)
#define SIM_GRANULE (2 * SIM_MIB)

#define SIM_EXPORT __attribute__((visibility("default")))
#define SIM_UNLIKELY(x) __builtin_expect(!!(x), 0)

/* One memory domain as configured when the state file was made; constant afterwards. */
struct sim_dom {
    char name[96];
    char uuid_text[64]; /* "GPU-…" or "MIG-…" */
    char serial[32];
    char pci[32]; /* domain:bus:device.function as NVML prints it */
    uint8_t uuid[16];
    uint64_t nvml_total; /* bytes, what NVML calls total */
    uint64_t cuda_total; /* bytes, what can be allocated */
    uint64_t ctx_bytes;  /* one context, 1 KiB of local memory a thread included */
    uint32_t sms, threads_per_sm, cc_major, cc_minor, clock_khz, mem_clock_khz, bus_width;
    uint32_t pci_domain, pci_bus, pci_device, pci_dev_id, pci_sub_id;
    int32_t parent; /* domain of the physical device of a MIG instance, else -1 */
    uint32_t gpu_instance, compute_instance, mig_count, minor;
};

/* Live figures of a domain that tests may set. */
struct sim_live {
    _Atomic uint32_t util_gpu, util_mem;
};

enum sim_slot_state { SIM_SLOT_FREE = 0, SIM_SLOT_USED = 1 };

struct sim_slot {
    _Atomic uint32_t state; /* sim_slot_state, written by the owner or by who sweeps it */
    int32_t pid;            /* in its own PID namespace */
    _Atomic uint64_t gen;   /* never the same twice in a file; 0 while being written */
    uint64_t pid_ns;        /* inode of its PID namespace, 0 if it has no /proc */
    uint64_t start;         /* clock ticks after boot, 0 if it has no /proc */
    char name[96];
};

enum sim_obj_state { SIM_OBJ_FREE = 0, SIM_OBJ_CLAIMED = 1, SIM_OBJ_LIVE = 2 };

enum sim_shared_kind { SIM_SHARED_IPC = 1, SIM_SHARED_VMM, SIM_SHARED_POOL };

/* Memory that outlives its maker: IPC, shareable handles, exported pools. */
struct sim_shared {
    _Atomic uint32_t state; /* sim_obj_state */
    uint32_t dom;
    _Atomic uint64_t bytes;
    _Atomic uint64_t gen;
    _Atomic int32_t owner; /* slot whose footprint shows the bytes */
    uint32_t kind;
    uint64_t extra[2]; /* of the maker: base address, requested size */
    _Atomic uint64_t holders[SIM_SLOTS / 64];
};

struct sim_state {
    _Atomic uint64_t magic; /* written last */
    uint64_t size;
    int32_t driver; /* as cuDriverGetVersion says it */
    uint32_t devs, doms;
    uint64_t boot_id;
    _Atomic uint64_t next_gen;
    _Atomic uint32_t slots_high, objs_high; /* no used entry at or above */
    struct sim_dom dom[SIM_DOMS];
    struct sim_live live[SIM_DOMS];
    struct sim_slot slot[SIM_SLOTS];
    /* Dense, so that a sum over few processes touches few cache lines. */
    _Atomic uint64_t used[SIM_DOMS][SIM_SLOTS];
    _Atomic uint64_t pending[SIM_DOMS][SIM_SLOTS];
    _Atomic uint64_t managed[SIM_DOMS][SIM_SLOTS]; /* UVM pages: in the total, in no footprint */
    _Atomic uint32_t contexts[SIM_DOMS][SIM_SLOTS];
    struct sim_shared shared[SIM_OBJS];
};

extern struct sim_state *sim; /* NULL until attached */
extern int sim_self;          /* our slot, -1 for NVML */

/* sim_state.c. Results: 0 or -errno. */
int sim_attach(bool with_slot);
bool sim_forked(void); /* true in a child of a process that had attached with a slot */
int sim_open(void);    /* the state file again, or -errno */
void sim_sweep(void);
uint64_t sim_now_us(void);

/* sim_config.c */
int sim_configure(struct sim_state *state);
int sim_cuda_order(int *doms, int max); /* domains visible to CUDA, in CUDA's order */

/* sim_account.c */
bool sim_take(uint32_t dom, uint64_t bytes);
void sim_give(uint32_t dom, uint64_t bytes);
bool sim_take_managed(uint32_t dom, uint64_t bytes);
void sim_give_managed(uint32_t dom, uint64_t bytes);
uint64_t sim_dom_used(uint32_t dom);
uint64_t sim_slot_used(uint32_t dom, int slot);
int sim_share(uint32_t dom, uint64_t bytes, uint32_t kind); /* index or -1 */
bool sim_hold(int index, uint64_t gen);
void sim_drop(int index);
int sim_share_fd(int index); /* a descriptor that keeps the object alive, or -errno */
int sim_share_from_fd(int fd);
void sim_sweep_shared(int fd);

/* sim_fault.c: faults, delays and the call log; one flag while none is asked for. */
extern int sim_trace_on;
void sim_trace_setup(void);
int sim_trace_enter(const char *name); /* result to answer at once, or -1 */
void sim_trace_leave(const char *name, long result);
bool sim_name_hidden(const char *name);
