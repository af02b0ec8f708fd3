/* Module images. No code runs here, so an image is a list of globals and kernels: either our own
 * text ("//simgpu", then `global NAME BYTES`, `managed NAME BYTES` and
 * `kernel NAME [local=BYTES] [printf=1] [heap=1]`), or PTX, of which the same is read. */
#include "sim_cuda.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct image_global *add_global(struct image *im, const char *name, size_t len,
                                       size_t bytes) {
    struct image_global *grown = realloc(im->global, (im->globals + 1) * sizeof *grown);
    if (!grown)
        return NULL;
    im->global = grown;
    struct image_global *g = &grown[im->globals++];
    memset(g, 0, sizeof *g);
    snprintf(g->name, sizeof g->name, "%.*s", (int)len, name);
    g->bytes = bytes;
    return g;
}

static struct image_kernel *add_kernel(struct image *im, const char *name, size_t len) {
    struct image_kernel *grown = realloc(im->kernel, (im->kernels + 1) * sizeof *grown);
    if (!grown)
        return NULL;
    im->kernel = grown;
    struct image_kernel *k = &grown[im->kernels++];
    memset(k, 0, sizeof *k);
    snprintf(k->name, sizeof k->name, "%.*s", (int)len, name);
    return k;
}

/* ---- our text ---- */

static bool parse_text(struct image *im, const char *text) {
    for (const char *line = text; *line; line += strcspn(line, "\n"), line += *line == '\n') {
        char word[16], name[160], rest[256];
        int n = 0;
        snprintf(rest, sizeof rest, "%.*s", (int)strcspn(line, "\n"), line);
        if (sscanf(rest, "%15s %159s %n", word, name, &n) < 2 || strncmp(word, "//", 2) == 0)
            continue;
        const char *more = rest + n;
        if (strcmp(word, "global") == 0 || strcmp(word, "managed") == 0) {
            struct image_global *g = add_global(im, name, strlen(name), strtoull(more, NULL, 10));
            if (!g)
                return false;
            g->managed = word[0] == 'm';
        } else if (strcmp(word, "kernel") == 0) {
            struct image_kernel *k = add_kernel(im, name, strlen(name));
            const char *local = strstr(more, "local=");
            if (!k)
                return false;
            k->local = local ? strtoull(local + 6, NULL, 10) : 0;
            k->uses_printf = strstr(more, "printf=1") != NULL;
            k->uses_heap = strstr(more, "heap=1") != NULL;
        } else {
            return false;
        }
    }
    return true;
}

/* ---- PTX ---- */

static size_t type_size(const char *t, size_t len) {
    if (len < 2 || !strchr("busf", t[0]))
        return 0;
    size_t bits = strtoull(t + 1, NULL, 10);
    return bits >= 8 && bits <= 128 ? bits / 8 : 0;
}

static size_t ident(const char *p) {
    size_t n = 0;
    while (isalnum((unsigned char)p[n]) || p[n] == '_' || p[n] == '$' || p[n] == '%')
        n++;
    return n;
}

/* After ".global" or ".local": attributes, type, name, extents. *end is set behind it. */
static size_t variable(const char *p, const char **name, size_t *len, const char **end) {
    size_t size = 0;
    *name = NULL;
    *len = 0;
    while (*p && *p != ';' && *p != '=' && *p != '{' && *p != '}') {
        if (*p == '.') {
            size_t n = ident(p + 1);
            size_t s = type_size(p + 1, n);
            size = s ? s : size;
            p += 1 + n;
        } else if (*p == '[' && *name) {
            size *= strtoull(p + 1, NULL, 10);
            p += strcspn(p, "]");
        } else if (ident(p) && !isdigit((unsigned char)*p)) {
            *len = ident(p);
            *name = p;
            p += *len;
        } else {
            p++;
        }
    }
    *end = p;
    return *name ? size : 0;
}

static const char *body_end(const char *p) {
    int depth = 0;
    for (; *p; p++) {
        depth += (*p == '{') - (*p == '}');
        if (*p == '}' && depth == 0)
            return p;
    }
    return p;
}

static bool in_body(const char *from, const char *to, const char *word) {
    const char *hit = strstr(from, word);
    return hit && hit < to;
}

static size_t locals(const char *from, const char *to) {
    size_t sum = 0;
    for (const char *p = strstr(from, ".local"); p && p < to; p = strstr(p, ".local")) {
        const char *name, *end;
        size_t len;
        /* ld.local and the like follow a letter; a declaration does not. */
        bool declared = !isalnum((unsigned char)p[-1]);
        p += 6;
        if (declared && isspace((unsigned char)*p))
            sum += variable(p, &name, &len, &end);
    }
    return sum;
}

static bool parse_entry(struct image *im, const char *p, const char **end) {
    p += strspn(p, " \t\r\n");
    struct image_kernel *k = add_kernel(im, p, ident(p));
    const char *open = strchr(p, '{');
    if (!k || !open)
        return false;
    *end = body_end(open);
    k->local = locals(open, *end);
    k->uses_printf = in_body(open, *end, "vprintf");
    k->uses_heap = in_body(open, *end, "malloc");
    return true;
}

static bool parse_ptx(struct image *im, const char *text) {
    const char *p = text;
    while ((p = strpbrk(p, "./"))) {
        if (p[0] == '/' && p[1] == '/') {
            p += strcspn(p, "\n");
        } else if (strncmp(p, ".entry", 6) == 0 && isspace((unsigned char)p[6])) {
            if (!parse_entry(im, p + 6, &p))
                return false;
        } else if (strncmp(p, ".global", 7) == 0 && isspace((unsigned char)p[7])) {
            const char *name;
            size_t len, bytes = variable(p + 7, &name, &len, &p);
            struct image_global *g = bytes ? add_global(im, name, len, bytes) : NULL;
            if (bytes && !g)
                return false;
        } else {
            p++;
        }
    }
    return true;
}

/* ---- life ---- */

void image_put(struct image *im) {
    if (--im->refs > 0)
        return;
    free(im->global);
    free(im->kernel);
    free(im);
}

CUresult image_parse(const void *data, struct image **out) {
    const char *text = data;
    CU_ARG(text);
    struct image *im = calloc(1, sizeof *im);
    CU_CHECK(im, CUDA_ERROR_OUT_OF_MEMORY);
    im->refs = 1;
    bool good, ptx = false;
    if (strncmp(text, "//simgpu", 8) == 0) {
        good = parse_text(im, text);
    } else {
        /* Binary images (ELF, fat binaries) start with bytes that no text starts with. */
        size_t n = 0;
        while (n < 4096 && (isprint((unsigned char)text[n]) || isspace((unsigned char)text[n])))
            n++;
        ptx = n == 4096 || text[n] == 0;
        good = ptx && strstr(text, ".version") && parse_ptx(im, text);
    }
    if (!good) {
        image_put(im);
        return ptx ? CUDA_ERROR_INVALID_PTX : CUDA_ERROR_INVALID_IMAGE;
    }
    *out = im;
    return CUDA_SUCCESS;
}

CUresult image_read(const char *path, struct image **out) {
    CU_ARG(path);
    FILE *f = fopen(path, "re");
    CU_CHECK(f, CUDA_ERROR_FILE_NOT_FOUND);
    char *text = NULL;
    size_t n = 0, cap = 0;
    do {
        cap = cap ? cap * 2 : 65536;
        char *grown = realloc(text, cap + 1);
        if (!grown)
            break;
        text = grown;
        n += fread(text + n, 1, cap - n, f);
    } while (n == cap);
    fclose(f);
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (text && n < cap) {
        text[n] = 0;
        result = image_parse(text, out);
    }
    free(text);
    return result;
}
