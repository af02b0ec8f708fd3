#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

/* Any bytes as a limit: a size in range or an error, and the same size however it is written. */

#define EXPECT(what) ((what) ? (void)0 : (fprintf(stderr, "not so: %s\n", #what), abort()))

static int parse(const char *text, size_t length, uint64_t *bytes) {
    /* A copy of exactly that length, so that a read behind it is found. */
    char *copy = malloc(length + !length);
    int rc;

    memcpy(copy, text, length);
    rc = vgpu_limit_parse(copy, length, bytes);
    free(copy);
    return rc;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint64_t bytes = 77, again = 77;
    int rc = parse((const char *)data, size, &bytes);
    char text[64];

    if (rc) {
        EXPECT(rc == -EINVAL || rc == -ENODATA || rc == -ERANGE);
        EXPECT(bytes == 77);
        return 0;
    }
    EXPECT(bytes >= VGPU_LIMIT_MIN && bytes <= INT64_MAX);
    EXPECT(size > 0 && memchr(data, 0, size) == NULL && memchr(data, '-', size) == NULL);
    snprintf(text, sizeof(text), " %llu\t\n", (unsigned long long)bytes);
    EXPECT(parse(text, strlen(text), &again) == 0 && again == bytes);
    snprintf(text, sizeof(text), "%llu.9b", (unsigned long long)bytes);
    EXPECT(parse(text, strlen(text), &again) == 0 && again == bytes);
    return 0;
}
