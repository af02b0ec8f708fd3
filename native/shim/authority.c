#define _GNU_SOURCE
#include "authority.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "../core/core.h"
#include "hooks.h"

#define LIMIT_NAME "CUDA_DEVICE_MEMORY_LIMIT"
#define SM_NAME "CUDA_DEVICE_SM_LIMIT"
#define CACHE_NAME "CUDA_DEVICE_MEMORY_SHARED_CACHE"
#define FILE_MAX 65536

/* A block of text read whole; static storage would race, the stack is the program's. */
struct text {
    char *bytes;
    size_t length;
};

/* Reads at most FILE_MAX bytes; files of /proc have no size to ask for. */
static int text_read(struct text *text, const char *path) {
    text->length = 0;
    text->bytes =
        mmap(NULL, FILE_MAX + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (text->bytes == MAP_FAILED) {
        text->bytes = NULL;
        return -ENOMEM;
    }
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0)
        return -errno;
    while (text->length < FILE_MAX) {
        ssize_t got = read(fd, text->bytes + text->length, FILE_MAX - text->length);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        text->length += (size_t)got;
    }
    close(fd);
    return 0;
}

static void text_free(struct text *text) {
    if (text->bytes)
        munmap(text->bytes, FILE_MAX + 1);
    text->bytes = NULL;
}

/* ---- mounts --------------------------------------------------------------------------- */

struct mounts {
    bool known;      /* /proc/self/mountinfo could be read */
    bool limit;      /* the limit file, or its folder, is a read-only mount of its own */
    bool containers; /* <mount>/containers is a mount of its own */
};

/* mountinfo writes blanks in paths as \040. */
static void unescape(char *path) {
    char *out = path;
    for (; *path; out++) {
        if (path[0] == '\\' && path[1] >= '0' && path[1] <= '3' && path[2] && path[3]) {
            *out = (char)(((path[1] - '0') << 6) | ((path[2] - '0') << 3) | (path[3] - '0'));
            path += 4;
        } else {
            *out = *path++;
        }
    }
    *out = 0;
}

static void mount_line(char *line, const char *mount, struct mounts *mounts) {
    char *field = line, *point = NULL, *options = NULL, *save = NULL;
    for (int i = 0; i < 6; i++) {
        field = strtok_r(i ? NULL : line, " ", &save);
        if (!field)
            return;
        if (i == 4)
            point = field;
        if (i == 5)
            options = field;
    }
    unescape(point);
    size_t length = strlen(mount);
    if (strncmp(point, mount, length) != 0)
        return;
    const char *rest = point + length;
    if (strcmp(rest, "/containers") == 0)
        mounts->containers = true;
    if (strcmp(rest, "/limit") == 0 || strcmp(rest, "/limit/" LIMIT_NAME) == 0)
        mounts->limit = strncmp(options, "ro", 2) == 0 && (options[2] == ',' || !options[2]);
}

static void mounts_read(struct mounts *mounts, const char *mount) {
    /* Longer than any other file here: one line a mount, hundreds on some hosts. */
    FILE *file = fopen("/proc/self/mountinfo", "re");
    char *line = NULL;
    size_t room = 0;
    *mounts = (struct mounts){0};
    if (!file)
        return;
    mounts->known = true;
    while (getline(&line, &room, file) > 0) {
        line[strcspn(line, "\n")] = 0;
        mount_line(line, mount, mounts);
    }
    free(line);
    fclose(file);
}

/* Without /proc only the file system can be asked: enough to never trust a writable file. */
static bool read_only(const char *path) {
    struct statvfs fs;
    return statvfs(path, &fs) == 0 && (fs.f_flag & ST_RDONLY);
}

/* ---- environment ------------------------------------------------------------------------ */

/* Own environment, then that of PID 1: an entry point, ssh, su or cron may have dropped ours. */
struct environment {
    struct text first; /* /proc/1/environ, empty when not readable or not asked yet */
    bool asked;
};

static const char *first_value(struct environment *env, const char *name) {
    if (!env->asked) {
        env->asked = true;
        if (getpid() != 1 && text_read(&env->first, "/proc/1/environ"))
            env->first.length = 0;
    }
    size_t length = strlen(name);
    for (size_t at = 0; at < env->first.length;) {
        const char *entry = env->first.bytes + at;
        if (strncmp(entry, name, length) == 0 && entry[length] == '=')
            return entry + length + 1;
        at += strlen(entry) + 1;
    }
    return NULL;
}

static const char *any_value(struct environment *env, const char *name) {
    const char *own = getenv(name);
    return own && *own ? own : first_value(env, name);
}

typedef const char *lookup(struct environment *env, const char *name);
static const char *own_value(struct environment *env, const char *name) {
    (void)env;
    return getenv(name);
}

static void complain(struct authority *a, int error, const char *name, const char *value) {
    if (a->error)
        return;
    a->error = error;
    snprintf(a->source, sizeof a->source, "%.240s=%.40s", name, value);
    for (char *c = a->source; *c; c++) /* it must stay one line */
        if ((unsigned char)*c < ' ')
            *c = ' ';
}

/* Limits of one environment; number of variables that were set and not empty. */
static int limits_of(struct authority *a, struct environment *env, lookup *get) {
    int found = 0;
    for (int i = -1; i < VGPU_MAX_DEVICES; i++) {
        char name[40] = LIMIT_NAME;
        if (i >= 0)
            snprintf(name, sizeof name, LIMIT_NAME "_%d", i);
        const char *value = get(env, name);
        uint64_t bytes = 0;
        int error = value ? vgpu_limit_parse(value, strlen(value), &bytes) : -ENODATA;
        if (error == -ENODATA)
            continue;
        found++;
        if (error) {
            complain(a, -error, name, value);
            continue;
        }
        if (i >= 0)
            a->per_device = true;
        for (int d = i < 0 ? 0 : i; d < (i < 0 ? VGPU_MAX_DEVICES : i + 1); d++)
            a->limit[d] = bytes;
    }
    return found;
}

static void sm_limits_of(struct authority *a) {
    for (int i = -1; i < VGPU_MAX_DEVICES; i++) {
        char name[40] = SM_NAME, *end = NULL;
        if (i >= 0)
            snprintf(name, sizeof name, SM_NAME "_%d", i);
        const char *value = getenv(name);
        unsigned long percent = value ? strtoul(value, &end, 10) : 0;
        if (!value || end == value || *end || percent == 0 || percent >= 100)
            continue;
        a->sm_limit = true;
        for (int d = i < 0 ? 0 : i; d < (i < 0 ? VGPU_MAX_DEVICES : i + 1); d++)
            a->sm[d] = percent;
    }
}

/* ---- limit file ------------------------------------------------------------------------- */

static void limit_file(struct authority *a, const char *path) {
    struct text text;
    uint64_t bytes = 0;
    int error = text_read(&text, path);
    if (!error)
        error = vgpu_limit_parse(text.bytes, text.length, &bytes);
    if (error)
        complain(a, -error, path, !text.bytes ? "" : text.bytes);
    a->asked = true;
    for (int d = 0; d < VGPU_MAX_DEVICES; d++)
        if (a->limit[d] == 0 || bytes < a->limit[d])
            a->limit[d] = bytes;
    text_free(&text);
}

/* ---- region path ------------------------------------------------------------------------ */

static bool plain_name(const char *name) {
    return name && *name && !strchr(name, '/') && strcmp(name, "..") != 0 && strlen(name) < 254;
}

/* The folder isolator 1.0 and 1.1 name by variables, below the containers mount. */
static bool legacy_path(struct authority *a, struct environment *env, const char *mount) {
    const char *uid = any_value(env, "POD_UID");
    const char *container = any_value(env, "CONTAINER_NAME");
    if (!plain_name(uid) || !plain_name(container))
        return false;
    int length = snprintf(a->path, sizeof a->path, "%s/containers/%s_%s", mount, uid, container);
    if (length < 0 || (size_t)length + sizeof "/usage.cache" > sizeof a->path) {
        a->path[0] = 0;
        return false;
    }
    if (mkdir(a->path, 0777) == 0)
        (void)!chmod(a->path, 0777);
    strcat(a->path, "/usage.cache");
    return true;
}

static void region_path(struct authority *a, struct environment *env, const char *mount,
                        bool limit_file_found, bool containers) {
    if (containers) {
        if (!limit_file_found && legacy_path(a, env, mount))
            return;
        if (snprintf(a->path, sizeof a->path, "%s/containers/usage.cache", mount) >=
            (int)sizeof a->path)
            a->path[0] = 0;
        return;
    }
    const char *cache = any_value(env, CACHE_NAME);
    if (cache && *cache) {
        if (snprintf(a->path, sizeof a->path, "%s", cache) >= (int)sizeof a->path)
            a->path[0] = 0;
        return;
    }
    const char *legacy = any_value(env, "CONTAINER_VGPU_MOUNT");
    if (legacy && access(legacy, W_OK | X_OK) == 0 && legacy_path(a, env, legacy))
        return;
    strcpy(a->path, DEFAULT_CACHE);
    strcpy(a->fallback, FALLBACK_CACHE);
}

/* ---- this run of the container ------------------------------------------------------------ */

static uint64_t start_time_of_first(void) {
    struct text text;
    uint64_t ticks = 0;
    if (text_read(&text, "/proc/1/stat") == 0) {
        text.bytes[text.length] = 0;
        const char *at = strrchr(text.bytes, ')');
        for (int field = 2; at && field < 22; field++)
            at = strchr(at + 1, ' ');
        if (at)
            ticks = strtoull(at + 1, NULL, 10);
    }
    text_free(&text);
    return ticks;
}

static uint64_t container_instance(void) {
    struct stat space = {0};
    (void)!stat("/proc/self/ns/pid", &space);
    uint64_t mixed = (uint64_t)space.st_ino * 0x9e3779b97f4a7c15u ^ start_time_of_first();
    return mixed ? mixed : 1;
}

/* Folder of this library as the loader was told, so the mount it came through. */
static bool own_folder(char folder[PATH_MAX]) {
    Dl_info info;
    if (!dladdr((void *)&authority_read, &info) || !info.dli_fname || info.dli_fname[0] != '/')
        return false;
    if (snprintf(folder, PATH_MAX, "%s", info.dli_fname) >= PATH_MAX)
        return false;
    char *slash = strrchr(folder, '/');
    *slash = 0;
    return slash != folder;
}

/* Whatever does not clearly say no is meant to enforce. */
static bool is_true(const char *value) {
    static const char *const no[] = {"", "0", "no", "false", "off", "none"};
    for (size_t i = 0; value && i < sizeof no / sizeof *no; i++)
        if (!strcasecmp(value, no[i]))
            return false;
    return value != NULL;
}

void authority_read(struct authority *a) {
    char mount[PATH_MAX] = "", file[PATH_MAX + sizeof "/limit/" LIMIT_NAME];
    struct environment env = {0};
    struct mounts mounts = {0};
    bool found = false;
    *a = (struct authority){0};
    if (own_folder(mount)) {
        mounts_read(&mounts, mount);
        snprintf(file, sizeof file, "%s/limit/" LIMIT_NAME, mount);
        found = mounts.known ? mounts.limit : access(file, F_OK) == 0 && read_only(file);
    }
    const char *enforce = getenv("ISOLATOR_ENFORCE");
    a->required = found || mounts.containers || is_true(enforce);
    a->asked = limits_of(a, &env, own_value) > 0;
    if (!a->asked && !found)
        a->asked = limits_of(a, &env, first_value) > 0;
    if (found) {
        a->error = 0; /* a wrong variable cannot matter beside a limit file */
        limit_file(a, file);
    }
    sm_limits_of(a);
    region_path(a, &env, mount, found, mounts.containers);
    a->instance = container_instance();
    if (a->required && !a->asked && !a->error) {
        a->error = ENODATA;
        snprintf(a->source, sizeof a->source, "%s", LIMIT_NAME);
    }
    text_free(&env.first);
}
