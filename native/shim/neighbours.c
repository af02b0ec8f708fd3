#define _GNU_SOURCE
#include "neighbours.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Whose is a process that the driver lists. */

/* Inode of the initial PID namespace (PROC_PID_INIT_INO of the kernel). */
#define INITIAL_PID_NAMESPACE 0xEFFFFFFCu

static uint64_t namespace_of(long pid, const char *kind) {
    char path[64];
    struct stat found;
    snprintf(path, sizeof path, "/proc/%ld/ns/%s", pid, kind);
    return stat(path, &found) ? 0 : (uint64_t)found.st_ino;
}

/* The process's id in its own, innermost namespace; 0 when it cannot be read. */
static long innermost_pid(long pid) {
    char path[64], line[256];
    long found = 0;
    snprintf(path, sizeof path, "/proc/%ld/status", pid);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) {
        if (strncmp(line, "NSpid:", 6) != 0)
            continue;
        const char *last = strrchr(line, '\t');
        found = last ? strtol(last + 1, NULL, 10) : 0;
        break;
    }
    if (file)
        fclose(file);
    return found;
}

int neighbour_slot(struct process *process, long pid) {
    const struct vgpu_hami_region *region = vgpu_core_region(process->core);
    const struct vgpu_ext *ext = vgpu_core_ext(process->core);
    uint32_t high = slots_used(process);
    uint64_t space = namespace_of(getpid(), "pid"), theirs = 0;
    long inner = 0;
    for (uint32_t i = 0; i < high; i++) {
        int32_t slot_pid = region->procs[i].pid;
        if (slot_pid == 0)
            continue;
        if (slot_pid == pid && (ext->info[i].pid_ns == space || ext->info[i].pid_ns == 0))
            return (int)i;
        if (ext->info[i].pid_ns == space)
            continue;
        if (!theirs) {
            theirs = namespace_of(pid, "pid");
            inner = innermost_pid(pid);
        }
        if (slot_pid == inner && ext->info[i].pid_ns == theirs)
            return (int)i;
    }
    return -1;
}

/* Whether the process maps a file whose path ends in `end`, deleted or not, or (`within`) has it in its
 * midst; `unknown` when that cannot be read. */
static bool maps(long pid, const char *end, bool within, bool unknown) {
    char path[64], *line = NULL;
    size_t room = 0;
    bool found = false;
    snprintf(path, sizeof path, "/proc/%ld/maps", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return unknown;
    while (!found && getline(&line, &room, file) > 0) {
        const char *name = strchr(line, '/'), *at = name ? strstr(name, end) : NULL;
        const char *rest = at ? at + strlen(end) : NULL;
        found = rest && (within || *rest == '\n' || strncmp(rest, " (deleted)", 10) == 0);
    }
    free(line);
    fclose(file);
    return found;
}

bool neighbour_is_ours(struct process *process, long pid) {
    uint64_t theirs = namespace_of(pid, "mnt");
    bool host = namespace_of(getpid(), "pid") == INITIAL_PID_NAMESPACE;
    if (!theirs)
        return process->required && !host;
    if (theirs != namespace_of(getpid(), "mnt"))
        return false;
    if (maps(pid, process->path, false, false))
        return true;
    return !host && !maps(pid, "/libvgpu.so", false, false) && maps(pid, "/libcuda.so", true, true);
}

bool neighbour_is_stranger(long pid) {
    return kill((pid_t)pid, 0) && errno == ESRCH;
}

bool neighbours_hidden(void) {
    return namespace_of(getpid(), "pid") != INITIAL_PID_NAMESPACE;
}
