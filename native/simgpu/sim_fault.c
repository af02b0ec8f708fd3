/* Faults, delays and the call log. Read once a process; while none is set each call pays one
 * test of sim_trace_on. */
#define _GNU_SOURCE
#include "sim.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define RULES 64

struct rule {
    char name[64];
    long nth;   /* which call, 0 for each */
    long value; /* result, or microseconds */
    _Atomic long calls;
};

int sim_trace_on;

static struct rule faults[RULES], delays[RULES];
static int n_faults, n_delays;
static char log_path[512];
static char hidden[4096];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static int parse(const char *text, struct rule *out, bool with_nth) {
    int n = 0;
    while (text && *text && n < RULES) {
        struct rule *r = &out[n];
        size_t len = strcspn(text, ",");
        char item[128];
        snprintf(item, sizeof item, "%.*s", (int)len, text);
        char *second = strchr(item, ':');
        char *third = second && with_nth ? strchr(second + 1, ':') : second;
        if (second && third) {
            *second = 0;
            snprintf(r->name, sizeof r->name, "%.63s", item);
            r->nth = with_nth && second[1] != '*' ? atol(second + 1) : 0;
            r->value = atol(third + 1);
            n++;
        }
        text += len + (text[len] == ',');
    }
    return n;
}

static void setup(void) {
    n_faults = parse(getenv("SIMGPU_FAULTS"), faults, true);
    n_delays = parse(getenv("SIMGPU_DELAY"), delays, false);
    const char *log = getenv("SIMGPU_LOG");
    if (log)
        snprintf(log_path, sizeof log_path, "%s", log);
    const char *hide = getenv("SIMGPU_HIDE");
    if (hide)
        snprintf(hidden, sizeof hidden, ",%s,", hide);
    sim_trace_on = n_faults || n_delays || log_path[0];
}

void sim_trace_setup(void) {
    pthread_once(&once, setup);
}

__attribute__((constructor)) static void early(void) {
    sim_trace_setup();
}

int sim_trace_enter(const char *name) {
    for (int i = 0; i < n_delays; i++)
        if (strcmp(delays[i].name, name) == 0) {
            struct timespec t = {delays[i].value / 1000000, delays[i].value % 1000000 * 1000};
            nanosleep(&t, NULL);
        }
    int result = -1;
    for (int i = 0; i < n_faults; i++) {
        if (strcmp(faults[i].name, name) != 0)
            continue;
        long call = atomic_fetch_add(&faults[i].calls, 1) + 1;
        if (result < 0 && (faults[i].nth == 0 || faults[i].nth == call))
            result = (int)faults[i].value;
    }
    return result;
}

/* Opened for each line: an application may close descriptors that are not its own. */
void sim_trace_leave(const char *name, long result) {
    if (!log_path[0])
        return;
    char line[160];
    int n = snprintf(line, sizeof line, "%d %ld %s %ld\n", (int)getpid(), syscall(SYS_gettid), name,
                     result);
    int fd = open(log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0)
        return;
    (void)!write(fd, line, (size_t)n);
    close(fd);
}

bool sim_name_hidden(const char *name) {
    char key[128];
    if (!hidden[0])
        return false;
    snprintf(key, sizeof key, ",%s,", name);
    return strstr(hidden, key) != NULL;
}
