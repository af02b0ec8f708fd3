/* Models, and the settings that are fixed when the state file is made. */
#define _GNU_SOURCE
#include "sim.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct model {
    const char *key, *name;
    uint64_t nvml_mib;
    uint64_t cuda_total;
    uint64_t ctx_bytes;
    uint32_t sms, threads_per_sm, cc_major, cc_minor, clock_khz, mem_clock_khz, bus_width, dev_id;
    uint32_t sub_id;
    uint32_t mig; /* instances of 3g.40gb */
};

/* The T4's context is the lab's published figure; the H200's figures are measured. */
static const struct model models[] = {
    {"T4", "Tesla T4", 15360, 15828320256ull, 106954752ull, 40, 1024, 7, 5, 1590000, 5001000, 256,
     0x1eb810de, 0x12a210de, 0},
    {"H200", "NVIDIA H200", 143771, 143155 * SIM_MIB, 518 * SIM_MIB, 132, 2048, 9, 0, 1980000,
     3201000, 6144, 0x233510de, 0x18be10de, 0},
    {"A100", "NVIDIA A100-SXM4-80GB", 81920, 81152 * SIM_MIB, 420 * SIM_MIB, 108, 2048, 8, 0,
     1410000, 1593000, 5120, 0x20b210de, 0x147f10de, 0},
    {"A100-MIG3g", "NVIDIA A100-SXM4-80GB", 81920, 81152 * SIM_MIB, 420 * SIM_MIB, 108, 2048, 8, 0,
     1410000, 1593000, 5120, 0x20b210de, 0x147f10de, 2},
};

#define MIG_NVML_MIB 40192
#define MIG_CUDA_MIB 39808
#define MIG_CTX_MIB 210
#define MIG_SMS 42

static const struct model *find_model(const char *key, size_t len) {
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        if (strlen(models[i].key) == len && strncasecmp(models[i].key, key, len) == 0)
            return &models[i];
    return NULL;
}

/* splitmix64: UUIDs that differ per device and are the same in every run. */
static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static void make_uuid(struct sim_dom *d, const char *prefix, uint64_t seed) {
    uint64_t part[2] = {mix(seed), mix(seed + 7919)};
    memcpy(d->uuid, part, sizeof d->uuid);
    d->uuid[6] = (uint8_t)((d->uuid[6] & 0x0f) | 0x40);
    d->uuid[8] = (uint8_t)((d->uuid[8] & 0x3f) | 0x80);
    char *p = d->uuid_text + snprintf(d->uuid_text, sizeof d->uuid_text, "%s-", prefix);
    for (int i = 0; i < 16; i++) {
        static const bool dash[16] = {[4] = 1, [6] = 1, [8] = 1, [10] = 1};
        p += snprintf(p, 4, dash[i] ? "-%02x" : "%02x", d->uuid[i]);
    }
}

static void fill(struct sim_dom *d, const struct model *m, uint32_t index) {
    snprintf(d->name, sizeof d->name, "%s", m->name);
    d->nvml_total = m->nvml_mib * SIM_MIB;
    d->cuda_total = m->cuda_total;
    d->ctx_bytes = m->ctx_bytes;
    d->sms = m->sms;
    d->threads_per_sm = m->threads_per_sm;
    d->cc_major = m->cc_major;
    d->cc_minor = m->cc_minor;
    d->clock_khz = m->clock_khz;
    d->mem_clock_khz = m->mem_clock_khz;
    d->bus_width = m->bus_width;
    d->pci_bus = 0x0b + index * 4;
    d->pci_dev_id = m->dev_id;
    d->pci_sub_id = m->sub_id;
    d->parent = -1;
    d->minor = index;
    d->mig_count = m->mig;
    snprintf(d->pci, sizeof d->pci, "%08X:%02X:%02X.0", d->pci_domain, d->pci_bus, d->pci_device);
    snprintf(d->serial, sizeof d->serial, "%llu",
             (unsigned long long)(1320000000000ull + mix(index + 99) % 9999999999ull));
    make_uuid(d, "GPU", index * 1000 + (m->dev_id >> 16));
}

static void fill_mig(struct sim_state *s, uint32_t parent, uint32_t n) {
    struct sim_dom *d = &s->dom[s->doms], *p = &s->dom[parent];
    *d = *p;
    snprintf(d->name, sizeof d->name, "%.70s MIG 3g.40gb", p->name);
    d->nvml_total = MIG_NVML_MIB * SIM_MIB;
    d->cuda_total = MIG_CUDA_MIB * SIM_MIB;
    d->ctx_bytes = MIG_CTX_MIB * SIM_MIB;
    d->sms = MIG_SMS;
    d->parent = (int32_t)parent;
    d->gpu_instance = n + 1;
    d->mig_count = 0;
    make_uuid(d, "MIG", 500000 + parent * 16 + n);
    s->doms++;
}

static const char *setting(const char *name, const char *otherwise) {
    const char *v = getenv(name);
    return v && *v ? v : otherwise;
}

int sim_configure(struct sim_state *s) {
    const char *list = setting("SIMGPU_MODELS", NULL);
    long count = atol(setting("SIMGPU_COUNT", "0"));
    s->driver = atoi(setting("SIMGPU_DRIVER", "13000"));
    s->devs = s->doms = 0;
    if (!list) {
        list = setting("SIMGPU_MODEL", "T4");
        count = count ? count : 1;
    }
    if (count < 0 || count > SIM_DEVS)
        return -EINVAL;
    for (const char *p = list; s->devs < SIM_DEVS;) {
        size_t len = strcspn(p, ",");
        const struct model *m = find_model(p, len);
        if (!m)
            return -EINVAL;
        fill(&s->dom[s->devs], m, s->devs);
        s->devs++;
        p += len + (p[len] == ',');
        if ((long)s->devs == count || (*p == 0 && !count))
            break;
        p = *p ? p : list; /* a longer count goes round the list */
    }
    s->doms = s->devs;
    for (uint32_t d = 0; d < s->devs; d++)
        for (uint32_t n = 0; n < s->dom[d].mig_count && s->doms < SIM_DOMS; n++)
            fill_mig(s, d, n);
    return 0;
}

/* All that CUDA could show: a device in MIG mode is shown as its instances. */
static int candidates(int *out) {
    int n = 0;
    bool reverse = strcmp(setting("SIMGPU_CUDA_ORDER", ""), "reverse") == 0;
    for (uint32_t i = 0; i < sim->devs; i++) {
        uint32_t d = reverse ? sim->devs - 1 - i : i;
        if (!sim->dom[d].mig_count) {
            out[n++] = (int)d;
            continue;
        }
        for (uint32_t m = sim->devs; m < sim->doms; m++)
            if (sim->dom[m].parent == (int32_t)d)
                out[n++] = (int)m;
    }
    return n;
}

/* A token of CUDA_VISIBLE_DEVICES: an index, or a UUID that may be cut short where it is unique. */
static int match(const char *token, size_t len, const int *cand, int n) {
    int found = -1;
    if (len && strspn(token, "0123456789") >= len) {
        long v = strtol(token, NULL, 10);
        return v < n ? (int)v : -1;
    }
    if (len < 5)
        return -1;
    for (int i = 0; i < n; i++) {
        if (strncasecmp(sim->dom[cand[i]].uuid_text, token, len) != 0)
            continue;
        if (found >= 0)
            return -1;
        found = i;
    }
    return found;
}

static bool is_mig(int dom) {
    return sim->dom[dom].parent >= 0;
}

int sim_cuda_order(int *doms, int max) {
    int cand[SIM_DOMS], n = 0, total = candidates(cand);
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    if (!list) {
        for (int i = 0; i < total && n < max; i++)
            if (!is_mig(cand[i]))
                doms[n++] = cand[i];
        /* Without full devices CUDA takes one MIG instance, never more. */
        if (n == 0 && total > 0)
            doms[n++] = cand[0];
        return n;
    }
    while (*list && n < max) {
        list += strspn(list, " \t");
        size_t len = strcspn(list, ","), used = len;
        while (used && (list[used - 1] == ' ' || list[used - 1] == '\t'))
            used--;
        int hit = match(list, used, cand, total);
        if (hit < 0)
            break;
        for (int i = 0; i < n; i++)
            if (doms[i] == cand[hit])
                return 0; /* a device named twice: the driver shows none */
        doms[n++] = cand[hit];
        if (is_mig(doms[n - 1])) {
            doms[0] = doms[n - 1];
            return 1;
        }
        list += len + (list[len] == ',');
    }
    return n;
}
