#pragma once
#include <stdint.h>

/* THE shared-memory layout of one container's region file; nothing else is here.
 *
 * Part one, bytes 0 .. VGPU_HAMI_SIZE, is HAMi-core's layout 1.2, so that its monitor can read
 * our file and ours can read its.  Part two, at VGPU_EXT_OFFSET, is ours.  All words are
 * little-endian and 64-bit aligned.  The file is writable by the tenant: a reader checks
 * every word it uses as an index or a size, and the limit words are a report, not the authority.
 *
 * Writers: "creator" is the process that makes the file, "owner" the process that holds the
 * slot's lock, "any" every process of the container (atomically).
 * Numbers pinned by static asserts in region.c and by tests; a changed one means a new
 * VGPU_EXT_VERSION. */

#define VGPU_HAMI_MAGIC 19920718
#define VGPU_HAMI_MAJOR 1
#define VGPU_HAMI_MINOR 2
#define VGPU_HAMI_SIZE 2008952

#define VGPU_MAX_DEVICES 16
#define VGPU_MAX_SLOTS 1024
#define VGPU_UUID_LEN 96

/* A page boundary for 4 and 64 KiB pages. */
#define VGPU_EXT_OFFSET 2031616
/* "KARI" */
#define VGPU_EXT_MAGIC 0x4952414b
#define VGPU_EXT_VERSION 1
#define VGPU_EXT_SIZE 151552
#define VGPU_REGION_SIZE 2183168

/* Bytes of one unit of a quota word. */
#define VGPU_UNIT 4096

/* Values of vgpu_hami_slot.status. */
enum vgpu_slot_status { VGPU_SLOT_DEAD = 0, VGPU_SLOT_LIVE = 1 };

/* Values of vgpu_ext.state. */
enum vgpu_enforcement {
    VGPU_STATE_UNKNOWN = 0,   /* no process has initialised CUDA yet */
    VGPU_STATE_ENFORCED = 1,  /* charged, and settled by the driver's own figure */
    VGPU_STATE_UNSETTLED = 2, /* charged, but NVML does not list our processes: estimates stay */
    VGPU_STATE_REFUSED = 3,   /* a process was refused at cuInit; refuse_reason says why */
};

/* Values of vgpu_ext.flags. */
enum vgpu_ext_flag {
    VGPU_FLAG_TAMPERED = 1,      /* a limit or quota word did not hold what we wrote */
    VGPU_FLAG_SM_UNENFORCED = 2, /* an SM limit is set and nothing enforces it */
    VGPU_FLAG_SHARED = 4         /* some process gave memory to another, or took it */
};

/* Bytes of device memory of one process on one device, for readers; sums are made from
 * vgpu_ext.word. Owner writes. */
struct vgpu_hami_memory {
    uint64_t context_size; /* contexts, and what the tracked sum does not explain */
    uint64_t module_size;  /* module and library images */
    uint64_t data_size;    /* allocations */
    uint64_t offset;       /* unused, 0 */
    uint64_t total;        /* sum of the above */
    uint64_t spare[3];
};

/* Utilisation of one process on one device, percent. */
struct vgpu_hami_util {
    uint64_t dec_util;
    uint64_t enc_util;
    uint64_t sm_util;
    uint64_t spare[3];
};

/* One process. Slots never move; a slot is free when nobody holds its lock byte. */
struct vgpu_hami_slot {
    int32_t pid;     /* in the container's PID namespace, 0 = free; owner */
    int32_t hostpid; /* 0 = unknown */
    struct vgpu_hami_memory used[VGPU_MAX_DEVICES];
    uint64_t monitorused[VGPU_MAX_DEVICES]; /* NVML's bytes of the process at the last settle */
    struct vgpu_hami_util device_util[VGPU_MAX_DEVICES];
    int32_t status; /* enum vgpu_slot_status */
    int32_t pad;
    uint64_t seqlock; /* always even (stable) in our files */
    uint64_t spare[2];
};

struct vgpu_hami_region {
    int32_t initialized_flag; /* VGPU_HAMI_MAGIC; creator, last word of part one */
    uint32_t major_version;
    uint32_t minor_version;
    int32_t sm_init_flag;
    uint64_t owner_pid;                          /* 0: we do not use HAMi's semaphores */
    uint8_t sem[32];                             /* 0 */
    uint64_t device_num;                         /* devices with a uuid below; any, grows only */
    char uuids[VGPU_MAX_DEVICES][VGPU_UUID_LEN]; /* NUL-terminated, NVML order; any */
    uint64_t limit[VGPU_MAX_DEVICES];            /* bytes, 0 = none; creator; a report, see above */
    uint64_t sm_limit[VGPU_MAX_DEVICES];         /* percent, 0 = none; creator */
    struct vgpu_hami_slot procs[VGPU_MAX_SLOTS]; /* dense 0..proc_num-1, dead ones included */
    int32_t proc_num;                            /* highest slot ever used + 1 */
    int32_t utilization_switch;                  /* monitor; 1 */
    int32_t recent_kernel;                       /* monitor and shim; 2 */
    int32_t priority;                            /* creator; 1 */
    uint64_t last_kernel_time;                   /* s since the epoch; 0 until a kernel ran */
    uint8_t sem_postinit[32];                    /* 0 */
};

/* What liveness needs beside the lock. Owner writes, before its first charge. */
struct vgpu_slot_info {
    uint64_t start_time; /* field 22 of /proc/<pid>/stat, clock ticks since boot; 0 = unknown */
    uint64_t pid_ns;     /* inode of /proc/self/ns/pid; 0 = unknown */
};

/* Part two. Fields that different writers share sit on cache lines of their own. A field that is only added
 * takes spare words, 0 = unknown, and leaves the version as it is. */
struct vgpu_ext {
    uint32_t magic;    /* VGPU_EXT_MAGIC; creator, the last word written: marks the file complete */
    uint32_t version;  /* VGPU_EXT_VERSION */
    uint64_t size;     /* VGPU_EXT_SIZE */
    uint64_t instance; /* identity of the container run that recorded limit[]; creator */
    uint64_t created_ns; /* CLOCK_REALTIME */
    uint64_t spare0[4];

    uint32_t state;         /* enum vgpu_enforcement; any */
    uint32_t refuse_reason; /* errno of the last refused start, 0 = none; any */
    uint32_t flags;         /* bits of enum vgpu_ext_flag; any */
    uint32_t lock;          /* settle lock: 0 = free, else slot + 1 of the holder */
    uint32_t slot_high;     /* highest slot ever used + 1; any, grows only */
    uint32_t stirred;       /* grows when memory may have changed hands: its maker is gone; any */
    uint64_t clamped;       /* give-backs that would have gone below zero; any */
    uint64_t estimated;     /* grows when a process leaves a context charged by estimate; any */
    uint64_t spare2[3];

    uint64_t refused[VGPU_MAX_DEVICES];         /* refusals; any */
    uint64_t refused_last_ns[VGPU_MAX_DEVICES]; /* CLOCK_REALTIME of the last; any */
    uint64_t refused_bytes[VGPU_MAX_DEVICES];   /* bytes asked by the last; any */
    uint64_t context_bytes[VGPU_MAX_DEVICES];   /* measured size of a first context, 0 = unknown */
    uint64_t ghost[VGPU_MAX_DEVICES]; /* bytes of processes of this container without a slot */
    uint64_t peak[VGPU_MAX_DEVICES];  /* highest sum granted, bytes, best effort */
    uint64_t spare3[128];

    struct vgpu_slot_info info[VGPU_MAX_SLOTS];

    /* Quota words, units of VGPU_UNIT: low half granted, high half undecided (announced, not yet
     * granted or withdrawn). Dense, so that 64 processes are 8 cache lines. Owner writes. */
    uint64_t word[VGPU_MAX_DEVICES][VGPU_MAX_SLOTS];

    /* Never read or written: byte i is the file range whose OFD lock is the life of slot i. */
    uint8_t slot_lock[VGPU_MAX_SLOTS];
    /* File ranges of the initialisation lock (byte 0). */
    uint8_t init_lock[64];
    uint8_t spare4[1088];
};
