#pragma once
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>

#include "../core/region.h"

/* Who says what the limit is, in this order: the limit file on a read-only mount of its own (the
 * environment may only lower it), the environment, that of PID 1, the limit recorded in the region.
 * The library's own place tells the mount; no variable does. */
#define DEFAULT_CACHE "/tmp/cudevshr.cache"
#define FALLBACK_CACHE "/dev/shm/cudevshr.cache"

struct authority {
    bool required;    /* a missing or unusable limit refuses the start */
    bool asked;       /* some limit was given, usable or not */
    int error;        /* 0; ENODATA no limit where one is required; EINVAL, ERANGE */
    char source[320]; /* what `error` is about, for the one line */
    uint64_t limit[VGPU_MAX_DEVICES]; /* bytes by region index, 0 = none */
    bool per_device;
    bool sm_limit;                 /* a compute limit is asked for */
    uint64_t sm[VGPU_MAX_DEVICES]; /* percent, 0 = none */
    char path[PATH_MAX];           /* region file; empty = cannot be told */
    char fallback[PATH_MAX];       /* second choice of a default path, or empty */
    uint64_t instance;             /* this run of the container, never 0 */
};

void authority_read(struct authority *authority);
