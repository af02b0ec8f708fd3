#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core.h"

/* Any file in the region's place, and any words written into it while it is used: no crash, and
 * never past the own limit.
 *
 * Input: one byte that picks a template, four of file size (0xffffffff: the template's), then
 * patches of four bytes offset, one byte length and that many bytes, applied to the file; from a
 * patch of length 0 on they are applied to the mapping instead, each followed by a round of
 * calls. */

#define EXPECT(what) ((what) ? (void)0 : (fprintf(stderr, "not so: %s\n", #what), abort()))
#define LIMIT (4ull << 30)

static char path[128];
static unsigned char *templates[4];
static size_t sizes[4];

struct input {
    const uint8_t *at, *end;
};

static uint64_t take(struct input *input, int bytes) {
    uint64_t value = 0;

    for (int i = 0; i < bytes && input->at < input->end; i++) {
        value |= (uint64_t)*input->at++ << (8 * i);
    }
    return value;
}

static void load(int number, size_t size) {
    int fd = open(path, O_RDONLY);

    templates[number] = calloc(1, size + 1);
    EXPECT(fd >= 0 && read(fd, templates[number], size) == (ssize_t)size);
    sizes[number] = size;
    close(fd);
}

static void make_templates(void) {
    const char *folder = access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm";
    vgpu_core *core;

    snprintf(path, sizeof(path), "%s/fuzz-region-%d", folder, (int)getpid());
    EXPECT(vgpu_core_open(&core, path, VGPU_OPEN_CREATE, 1) == 0);
    EXPECT(vgpu_core_device(core, "GPU-0", 1) == 0);
    vgpu_core_record_limit(core, 0, LIMIT);
    load(0, VGPU_REGION_SIZE); /* ours, unused */
    EXPECT(vgpu_core_claim(core) == 0);
    vgpu_charge_forced(core, 0, 1 << 30, VGPU_KIND_DATA);
    load(1, VGPU_REGION_SIZE); /* ours, with a process that died */
    vgpu_core_close(core);
    load(2, VGPU_HAMI_SIZE + 1); /* HAMi-core's */
    templates[3] = calloc(1, VGPU_REGION_SIZE);
    sizes[3] = 0;
}

static void put_file(struct input *input) {
    int which = (int)take(input, 1) % 4;
    size_t size = (uint32_t)take(input, 4);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0666);

    size = size == UINT32_MAX ? sizes[which] : size % (VGPU_REGION_SIZE + 4096);
    EXPECT(fd >= 0);
    size_t full = size < sizes[which] ? size : sizes[which];
    EXPECT(pwrite(fd, templates[which], full, 0) == (ssize_t)full);
    EXPECT(ftruncate(fd, (off_t)size) == 0);
    while (input->at < input->end) {
        uint64_t at = take(input, 4) % VGPU_REGION_SIZE, length = take(input, 1);
        if (length == 0) {
            break;
        }
        length =
            length < (size_t)(input->end - input->at) ? length : (size_t)(input->end - input->at);
        if (at + length <= size) {
            EXPECT(pwrite(fd, input->at, length, (off_t)at) == (ssize_t)length);
        }
        input->at += length;
    }
    close(fd);
}

static void read_all(vgpu_core *core) {
    for (int device = -1; device <= VGPU_MAX_DEVICES; device++) {
        (void)vgpu_used(core, device);
        (void)vgpu_used_own(core, device);
        (void)vgpu_used_slot(core, device * 70, device);
        (void)vgpu_core_limit(core, device);
        (void)vgpu_core_slot_live(core, device * 70);
    }
    (void)vgpu_core_device(core, "GPU-0", 0);
}

static void use(vgpu_core *core, uint64_t *held) {
    uint64_t before = *held;

    if (vgpu_charge(core, 0, 1ull << 30, VGPU_KIND_DATA) == 0) {
        *held += 1ull << 30;
    }
    EXPECT(*held <= LIMIT && vgpu_used_own(core, 0) == *held);
    EXPECT(vgpu_used(core, 0) >= *held);
    EXPECT(vgpu_core_limit(core, 0) && vgpu_core_limit(core, 0) <= LIMIT);
    if (before == *held) {
        vgpu_give_back(core, 0, 2ull << 30, VGPU_KIND_CONTEXT);
        *held -= *held < 2ull << 30 ? *held : 2ull << 30;
        EXPECT(vgpu_used_own(core, 0) == *held);
    }
    (void)vgpu_core_sweep(core, 1);
    EXPECT(vgpu_core_device(core, "GPU-1", 1) < VGPU_MAX_DEVICES);
    read_all(core);
}

static void use_region(struct input *input, uint64_t instance) {
    uint64_t held = 0;
    vgpu_core *core;
    int rc = vgpu_core_open(&core, path, VGPU_OPEN_CREATE, instance);

    if (rc) {
        EXPECT(rc == -EBADF || rc == -EPROTO);
        return;
    }
    vgpu_core_set_limit(core, 0, LIMIT);
    vgpu_core_record_limit(core, 0, LIMIT);
    EXPECT(vgpu_core_claim(core) == 0);
    EXPECT(vgpu_core_slot(core) >= 0 && vgpu_core_slot(core) < VGPU_MAX_SLOTS);
    use(core, &held);
    for (int rounds = 0; input->at < input->end && rounds < 8; rounds++) {
        uint64_t at = take(input, 4) % VGPU_REGION_SIZE, length = take(input, 1);
        unsigned char *mapped = (unsigned char *)vgpu_core_region(core);
        for (; length && input->at < input->end && at < VGPU_REGION_SIZE; length--) {
            mapped[at++] = *input->at++;
        }
        use(core, &held);
    }
    vgpu_core_close(core);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input input = {data, data + size};
    vgpu_core *core;
    int rc;

    if (!path[0]) {
        make_templates();
    }
    put_file(&input);
    rc = vgpu_core_open(&core, path, VGPU_OPEN_READ, 1);
    EXPECT(rc == 0 || rc == -EBADF || rc == -EPROTO);
    if (rc == 0) {
        EXPECT(vgpu_core_claim(core) == -EBADF && vgpu_charge(core, 0, 1, 0) == -EBADF);
        read_all(core);
        vgpu_core_close(core);
    }
    use_region(&input, size % 3);
    unlink(path);
    return 0;
}
