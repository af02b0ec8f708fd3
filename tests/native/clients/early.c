/* Looks driver functions up at moments when little works yet. Preloaded (or linked) code of this
 * file runs in the program's constructors; main prints what the look-ups found, then four threads
 * race the first call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

static void *found_default, *found_next, *found_malloc;

__attribute__((constructor(101))) static void early(void) {
    found_default = dlsym(RTLD_DEFAULT, "cuInit");
    found_next = dlsym(RTLD_NEXT, "cuInit");
    found_malloc = dlsym(RTLD_NEXT, "malloc");
}

static pthread_barrier_t barrier;

static void *race(void *unused) {
    int count = -1;
    (void)unused;
    pthread_barrier_wait(&barrier);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
    int (*get_count)(int *) = (int (*)(int *))dlsym(RTLD_DEFAULT, "cuDeviceGetCount");
    if (!init || !get_count || init(0) || get_count(&count))
        return "failed";
    return count == 1 ? NULL : "wrong count";
}

int main(void) {
    pthread_t threads[4];
    void *said;
    int wrong = 0;
    printf("%d %d %d\n", found_default != NULL, found_next != NULL,
           found_malloc == dlsym(RTLD_NEXT, "malloc"));
    pthread_barrier_init(&barrier, NULL, 4);
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, race, NULL);
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], &said);
        wrong += said != NULL;
    }
    printf("%d\n", wrong);
    return 0;
}
