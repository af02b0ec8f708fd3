/* A CUDA program told by its arguments what to do; prints one line a verb. Runs on any glibc from
 * 2.17 on, with no header of the vendor. With -DLINKED it is linked to the driver, else it looks
 * every function up (by cuGetProcAddress with CLIENT_FIND=proc). */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long address;

#define FUNCTIONS(F)                                          \
    F(cuInit, (unsigned flags))                               \
    F(cuDeviceGet, (int *device, int ordinal))                \
    F(cuDevicePrimaryCtxRetain, (void **context, int device)) \
    F(cuCtxSetCurrent, (void *context))                       \
    F(cuMemAlloc_v2, (address * pointer, size_t bytes))       \
    F(cuMemFree_v2, (address pointer))                        \
    F(cuMemGetInfo_v2, (size_t *free, size_t *total))

#ifdef LINKED
#define F(name, params) extern int name params;
FUNCTIONS(F)
#undef F
static int find(void) {
    return 0;
}
#else
#define F(name, params) static int(*name) params;
FUNCTIONS(F)
#undef F
static int (*get)(const char *name, void **function, int version, unsigned long long flags);

static void *look(void *driver, const char *name) {
    char base[64];
    void *function = NULL;
    if (!get)
        return dlsym(driver, name);
    snprintf(base, sizeof base, "%.*s", (int)strcspn(name, "_"), name);
    return get(base, &function, 12000, 0) ? NULL : function;
}

static int find(void) {
    const char *how = getenv("CLIENT_FIND");
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver)
        return printf("no driver\n"), 1;
    if (how && !strcmp(how, "proc"))
        *(void **)&get = dlsym(driver, "cuGetProcAddress");
#define F(name, params) *(void **)&name = look(driver, #name);
    FUNCTIONS(F)
#undef F
    return !cuMemGetInfo_v2;
}
#endif

static address blocks[64];
static int count;
static volatile sig_atomic_t caught;

static void on_signal(int number) {
    (void)number;
    caught++;
}

static int entries(const char *path) {
    int found = 0;
    DIR *folder = opendir(path);
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        found += entry->d_name[0] != '.';
    if (folder)
        closedir(folder);
    return found;
}

static long long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000ll + time.tv_nsec / 1000;
}

static void mark(const char *name) {
    (void)!write(-1, name, strlen(name)); /* seen by strace only */
}

static int context(void) {
    void *made = NULL;
    int device = 0, result = cuDeviceGet(&device, 0);
    if (!result)
        result = cuDevicePrimaryCtxRetain(&made, device);
    return result ? result : cuCtxSetCurrent(made);
}

static void take(long mebibytes) {
    int result = cuMemAlloc_v2(&blocks[count & 63], (size_t)mebibytes << 20);
    count += !result;
    printf("alloc %ld %d\n", mebibytes, result);
}

static int pairs(long number) {
    int bad = 0;
    address pointer;
    for (long i = 0; i < number; i++)
        bad += cuMemAlloc_v2(&pointer, 2 << 20) || cuMemFree_v2(pointer);
    return bad;
}

static void signals(void) {
    printf("signals");
    for (int number = 1; number < NSIG; number++) {
        struct sigaction action;
        if (!sigaction(number, NULL, &action) && action.sa_handler != SIG_DFL)
            printf(" %d", number);
    }
    printf("\n");
}

/* Linked in by the test of global names: how many of the program's own values are not as it set
 * them. */
#ifdef OWN
extern int changed_globals(void);
#else
extern int changed_globals(void) __attribute__((weak));
#endif

static int mappings(const char *name) {
    char line[4096];
    int found = 0;
    FILE *file = fopen("/proc/self/maps", "r");
    while (file && fgets(line, sizeof line, file))
        found += strstr(line, name) != NULL;
    if (file)
        fclose(file);
    return found;
}

static void descend(void) {
    int status = 0;
    pid_t child = fork();
    if (child == 0)
        return;
    waitpid(child, &status, 0);
    exit(WIFEXITED(status) ? WEXITSTATUS(status) : 99);
}

static void machine(const char *verb) {
    mode_t mask = 0;
    if (!strcmp(verb, "fds"))
        printf("fds %d\n", entries("/proc/self/fd"));
    else if (!strcmp(verb, "threads"))
        printf("threads %d\n", entries("/proc/self/task"));
    else if (!strcmp(verb, "umask"))
        umask(mask = umask(0)), printf("umask %03o\n", mask);
    else if (!strcmp(verb, "signals"))
        signals();
    else if (!strcmp(verb, "regions"))
        printf("regions %d\n", mappings("/usage.cache"));
    else if (!strcmp(verb, "globals"))
        printf("globals %d\n", changed_globals ? changed_globals() : -1);
    else if (!strcmp(verb, "handle"))
        signal(SIGUSR1, on_signal), signal(SIGUSR2, on_signal);
    else if (!strcmp(verb, "raise"))
        raise(SIGUSR1), raise(SIGUSR2), printf("caught %d\n", (int)caught);
    else if (!strcmp(verb, "closeall"))
        for (int fd = 3; fd < 1024; fd++)
            close(fd);
    else if (!strcmp(verb, "fork"))
        descend();
    else if (!strcmp(verb, "wait"))
        printf("waiting\n"), (void)!read(STDIN_FILENO, &mask, 1);
    else
        printf("what is %s?\n", verb);
}

int main(int argc, char **argv) {
    long long start = now();
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (find())
        return 1;
    for (int i = 1; i < argc; i++) {
        const char *verb = argv[i], *colon = strchr(verb, ':');
        long number = colon ? atol(colon + 1) : 0;
        size_t available = 0, total = 0;
        if (!strcmp(verb, "init"))
            printf("init %d\n", cuInit(0));
        else if (!strcmp(verb, "context"))
            printf("context %d\n", context());
        else if (!strncmp(verb, "alloc:", 6))
            take(number);
        else if (!strncmp(verb, "over:", 5))
            (void)cuMemAlloc_v2(&blocks[63], (size_t)number << 20);
        else if (!strcmp(verb, "free"))
            printf("free %d\n", cuMemFree_v2(blocks[--count & 63]));
        else if (!strcmp(verb, "total"))
            printf("total %d %zu\n", cuMemGetInfo_v2(&available, &total), total >> 20);
        else if (!strncmp(verb, "pairs:", 6))
            printf("pairs %d\n", pairs(number));
        else if (!strncmp(verb, "mark:", 5))
            mark(colon + 1);
        else if (!strncmp(verb, "sleep:", 6))
            usleep((unsigned)number * 1000);
        else if (!strcmp(verb, "lap"))
            printf("lap %lld\n", now() - start), start = now();
        else
            machine(verb);
    }
    return 0;
}
