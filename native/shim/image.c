#define _GNU_SOURCE
#include "image.h"

#include <ctype.h>
#include <elf.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* The machine number of a cubin. */
#define EM_DEVICE 190
#define PTX_MAX (64u << 20)
#define NO_END UINT64_MAX

/* Bytes of an image in memory have no known end: `size` is NO_END there, as for the driver. */
struct image {
    const unsigned char *bytes;
    uint64_t size;
};

static bool inside_image(const struct image *image, uint64_t offset, uint64_t length) {
    return offset <= image->size && length <= image->size - offset;
}

static const Elf64_Ehdr *as_elf(const struct image *image) {
    const Elf64_Ehdr *header = (const void *)image->bytes;
    if (!inside_image(image, 0, SELFMAG) || memcmp(image->bytes, ELFMAG, SELFMAG) != 0 ||
        !inside_image(image, 0, sizeof *header) || header->e_ident[EI_CLASS] != ELFCLASS64 ||
        header->e_machine != EM_DEVICE || header->e_shentsize != sizeof(Elf64_Shdr))
        return NULL;
    return header;
}

/* Shared memory is laid out like a section, but is none of the device's memory. */
static bool is_shared(const struct image *image, const Elf64_Shdr *names, const Elf64_Shdr *s) {
    static const char prefix[] = ".nv.shared";
    uint64_t at = names->sh_offset + s->sh_name;
    if (s->sh_name + sizeof prefix > names->sh_size || !inside_image(image, at, sizeof prefix))
        return false;
    return memcmp(image->bytes + at, prefix, sizeof prefix - 1) == 0;
}

static uint64_t elf_bytes(const struct image *image, const Elf64_Ehdr *header) {
    const Elf64_Shdr *sections = (const void *)(image->bytes + header->e_shoff);
    uint64_t total = 0, count = header->e_shnum;
    if (header->e_shoff % 8 || header->e_shstrndx >= count ||
        !inside_image(image, header->e_shoff, count * sizeof *sections))
        return 0;
    for (uint64_t i = 0; i < count; i++) {
        const Elf64_Shdr *s = &sections[i];
        if (!(s->sh_flags & SHF_ALLOC) || is_shared(image, &sections[header->e_shstrndx], s))
            continue;
        if (__builtin_add_overflow(total, s->sh_size, &total))
            return 0;
    }
    return total;
}

/* ---- PTX ---------------------------------------------------------------------------------- */

static const char *skip_space(const char *p) {
    while (isspace((unsigned char)*p))
        p++;
    return p;
}

/* True when the word that ends before `at` (white space between) is `word`. */
static bool follows(const char *text, const char *at, const char *word) {
    size_t length = strlen(word);
    while (at > text && isspace((unsigned char)at[-1]))
        at--;
    return (size_t)(at - text) >= length && memcmp(at - length, word, length) == 0;
}

/* Bytes of ".b8", ".v4", ".f64" ...: the bits of a type, or the count of a vector. */
static uint64_t word_factor(const char *word) {
    unsigned long number = strtoul(word + 2, NULL, 10);
    if (word[1] == 'v')
        return number == 2 || number == 4 || number == 8 ? number : 0;
    if (!strchr("bsuf", word[1]) || number < 8 || number > 128)
        return 0;
    return number / 8;
}

/* One declaration behind its ".global": [.align n] [.attribute(..)] [.vN] .type name[n][m]. */
static uint64_t variable_bytes(const char *p) {
    uint64_t bytes = 1;
    bool typed = false;
    for (p = skip_space(p); *p == '.'; p = skip_space(p)) {
        if (strncmp(p, ".align", 6) == 0) {
            p = skip_space(p + 6);
        } else if (strncmp(p, ".attribute", 10) == 0) {
            p += strcspn(p, ")");
            p += *p == ')';
            continue;
        } else {
            uint64_t factor = word_factor(p);
            typed = typed || p[1] != 'v';
            bytes *= factor;
            p++;
        }
        p += strcspn(p, " \t\r\n;");
    }
    p += strcspn(p, " \t\r\n;[=");
    for (p = skip_space(p); typed && *p == '['; p = skip_space(p)) {
        char *end;
        uint64_t count = strtoull(p + 1, &end, 0);
        if (__builtin_mul_overflow(bytes, count, &bytes))
            return 0;
        p = end + strcspn(end, "];");
        p += *p == ']';
    }
    return typed ? bytes : 0;
}

static uint64_t ptx_bytes(const char *text) {
    uint64_t total = 0;
    static const char word[] = ".global";
    for (const char *p = strstr(text, word); p; p = strstr(p, word)) {
        const char *at = p;
        p += sizeof word - 1;
        bool declares = isspace((unsigned char)*p) &&
                        (at == text || isspace((unsigned char)at[-1])) &&
                        !follows(text, at, ".extern") && !follows(text, at, ".ptr");
        if (declares && __builtin_add_overflow(total, variable_bytes(p), &total))
            return 0;
    }
    return total;
}

/* ---- both --------------------------------------------------------------------------------- */

uint64_t image_bytes(const void *image) {
    if (!image)
        return 0;
    struct image view = {image, NO_END};
    const Elf64_Ehdr *header = as_elf(&view);
    if (header)
        return elf_bytes(&view, header);
    const char *text = image;
    /* Text starts so; the magic numbers of fat binaries do not. */
    return *text == '.' || *text == '/' || isspace((unsigned char)*text) ? ptx_bytes(text) : 0;
}

static uint64_t mapped_bytes(const struct image *image) {
    const Elf64_Ehdr *header = as_elf(image);
    if (header)
        return elf_bytes(image, header);
    if (image->size >= PTX_MAX || image->bytes[0] >= 0x7f)
        return 0;
    char *text = malloc((size_t)image->size + 1);
    if (!text)
        return 0;
    memcpy(text, image->bytes, (size_t)image->size);
    text[image->size] = '\0';
    uint64_t bytes = image_bytes(text);
    free(text);
    return bytes;
}

uint64_t image_file_bytes(const char *path) {
    struct stat found;
    uint64_t bytes = 0;
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    if (fd < 0)
        return 0;
    if (fstat(fd, &found) == 0 && S_ISREG(found.st_mode) && found.st_size > 0) {
        struct image image = {.size = (uint64_t)found.st_size};
        void *memory = mmap(NULL, (size_t)image.size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (memory != MAP_FAILED) {
            image.bytes = memory;
            bytes = mapped_bytes(&image);
            munmap(memory, (size_t)image.size);
        }
    }
    close(fd);
    return bytes;
}
