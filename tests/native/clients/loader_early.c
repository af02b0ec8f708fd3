/* Looks names up before any constructor of a library has run, then from racing threads: the answers
 * must be those of a process without the library, in time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static const char *const names[] = {"cuInit",       "cuMemAlloc_v2",  "nvmlInit_v2",
                                    "cublasCreate", "curl_easy_init", "malloc",
                                    "nanosleep",    "no such name"};
#define COUNT (sizeof names / sizeof *names)
static char early[2 * COUNT + 1];

static char look(void *handle, const char *name) {
    void *address = dlsym(handle, name);
    return address ? 'y' : dlerror() ? 'n' : '?';
}

static void before_constructors(void) {
    for (size_t i = 0; i < COUNT; i++) {
        early[2 * i] = look(RTLD_DEFAULT, names[i]);
        early[2 * i + 1] = look(RTLD_NEXT, names[i]);
    }
}

__attribute__((section(".preinit_array"), used)) static void (*preinit)(void) = before_constructors;

static void *race(void *unused) {
    (void)unused;
    long different = 0;
    for (int round = 0; round < 1000; round++)
        for (size_t i = 0; i < COUNT; i++)
            different += look(RTLD_DEFAULT, names[i]) != early[2 * i];
    return (void *)different;
}

int main(void) {
    pthread_t threads[4];
    long different = 0;
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, race, NULL);
    for (int i = 0; i < 4; i++) {
        void *result = NULL;
        pthread_join(threads[i], &result);
        different += (long)result;
    }
    printf("early %s, later %ld different, same twice %d\n", early, different,
           dlsym(RTLD_NEXT, "malloc") == dlsym(RTLD_NEXT, "malloc"));
    return 0;
}
