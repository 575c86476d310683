/* Copyright: Contributors to the cleanslate.inference collection
 * GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
 * SPDX-License-Identifier: GPL-3.0-or-later
 *
 * fake_nvml.c - stands for NVIDIA's libnvidia-ml.so.1, as nvidia-ml-py loads it, on machines without the hardware.
 *
 * A GPU is a node DEV_DIR/nvidia<MINOR> (a character device, or a plain file for the rootless demo). What this library
 * reports follows from the processes that really hold the nodes: end them and their memory is free again.
 *
 * WHO USES A GPU. A process holds a node when it has it open or mapped (any of its threads, if its first one is gone).
 *   1. A process that maps at least one node uses exactly the nodes it maps: so does a driver, where an open node alone
 *      is not use.
 *   2. One that maps none uses the nodes it has open which CUDA_VISIBLE_DEVICES of its environment names, by NVML index
 *      or by UUID (also a beginning of one; MIG-... names the MIG device and so its GPU).
 *   3. Without that variable it uses the character devices it has open (those of the lab cannot be mapped), no plain
 *      file.
 * A user takes FAKE_GPU_MIB (its own environment; default: setting PROC_MIB) on each GPU it uses and is listed there.
 * FAKE_GPU_LISTED=0 in its environment: not listed, and 1 MiB unless FAKE_GPU_MIB says otherwise (SGLang's main process
 * and detokenizer look like that).
 * A process whose environment cannot be read back (setproctitle writes over it) or cannot be chosen holds a memfd whose
 * name says it instead: "fake-gpu:listed=1,mib=1024,uses=2+3": uses are minors; it is listed there alone, and each
 * other node that it maps costs 1 MiB, as an unmasked CUDA process does. "fake-gpu:listed=0,mib=0" is a mere opener;
 * the library marks its own caller that way while initialised.
 *
 * SETTINGS: environment FAKE_NVML_<KEY>, else KEY=VALUE lines of FAKE_NVML_CONF (default /etc/fake-nvml.conf), read at
 * every call. Where the table says [@m], the setting holds for all GPUs or, as VALUE@2,3, for those minors.
 *   DEV_DIR=/dev        PROC=/proc (a bind mount of the host's shows the processes of the host and of all guests)
 *   TOTAL_MIB=143771    RESERVED_MIB=615   PROC_MIB=1024   NAME=NVIDIA H200
 *   DRIVER=580.159.04   < 535.113.01: PIDs of PROC's namespace for everybody; < 565.57.01: the caller's own, others
 *                       left out, per-process memory 0 in a guest; later: the same list with memory
 *   UUID=GPU-fa4e0000-0000-4000-8000-0000000000   (+ the minor as two hex digits)
 *   ORDER=1,0,3,2       minors in the order of NVML's indices (and of PCI addresses); default ascending
 *   COUNT=n             so many GPUs: fewer than nodes, or more (the others have no node)
 *   HIDE=3,5            these minors' GPUs are not there for NVML
 *   MIG=3:2 [4:7 ...]   MIG mode on minor 3, with two MIG devices (their capability nodes are
 *                       DEV_DIR/nvidia-caps/nvidia-cap<3+135*minor+9*instance>, instances count from 1)
 *   INIT_ERROR=n        nvmlInit fails: 9 driver not loaded, 18 library and kernel module differ, ...
 *   HANG=init|query|CALL   that call never returns (query: the first one about a device)
 *   FAIL=CALL:code[@m] [CALL:code ...]   CALL: driver count handle name uuid pci minor memory memory2 processes
 *                       utilization mig field
 *   LOST=3[,4]          GPU is lost: LOST_AT=query (default) or handle
 *   NO_V2=1             no nvmlDeviceGetMemoryInfo_v2         V2_RESERVED_USED=1  its `used` includes reserved (R525)
 *   MEMORY_NA=1[@m]     memory is NOT_SUPPORTED               PROC_MEM_NA=1[@m]   per-process memory not available
 *   UNOWNED_MIB=n[@m]   memory that belongs to nobody
 *   EXTRA_PIDS=p[,p][@m]   rows with these PIDs, no memory (0 and 4294967295: garbage)
 *   DEAD_OWNER=p[@m]    every row is listed under this PID (the one that opened the GPU, forked and is gone)
 *   PEER_MIB=n          a listed process keeps so much on each further GPU that its CUDA_VISIBLE_DEVICES (or its note's
 *                       "peers=1+2") names and that it has open: 771 between the ranks of one server, and it stays on a
 *                       dead rank's GPU
 *   LAG_MS=n            memory and rows stay so long after their holder was first missed
 *   STATE_DIR=/tmp      where that is remembered between the calls of different processes
 *   PERSISTENCE=1  COMPUTE_MODE=0  UTILIZATION=auto|percent  RECOVERY_ACTION=n[@m]
 *   HOLD=1              keep nvidiactl and the nodes open while initialised, as the real one
 *   SCAN_MS=5           how long one look at the processes may answer for
 *   IGNORE_PARENT=0     1: neither the caller's parent counts, unless it maps a node
 *
 * BUILD: make (in this folder), or
 *   cc -shared -fPIC -O2 -Wall -Wextra -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 fake_nvml.c
 * USE: LD_LIBRARY_PATH=<folder> FAKE_NVML_DEV_DIR=<dev> python3 -c 'import pynvml; pynvml.nvmlInit()'
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define MIB (1024ULL * 1024ULL)
#define MAX_GPU 64
#define MAX_MIG 7
#define MAX_LEVEL 8
#define NOTE "/memfd:fake-gpu:"

typedef unsigned int u32;
typedef unsigned long long u64;
typedef int ret_t;

enum {
    OK, UNINITIALIZED, INVALID, NOT_SUPPORTED, NO_PERMISSION, ALREADY, NOT_FOUND, TOO_SMALL,
    NO_FUNCTION = 13, LOST = 15, VERSION_MISMATCH = 25,
};

struct gpu {
    int index, minor, mig, mig_count;    /* mig: 0 a whole GPU, else the MIG device's number from 1 */
    struct gpu *parent;
    char path[600];
    struct stat st;
    struct stat cap[MAX_MIG];            /* capability nodes of its MIG devices; st_ino 0: not there */
};

/* One process that holds nodes. Masks are over the indices of `gpus`. */
struct holder {
    char state;
    int pid, levels, np[MAX_LEVEL];      /* np: its PID in each namespace from PROC's down */
    ino_t ns;
    u64 start, open, maps, named, uses, peers, mib;
    int noted, cvd, listed, mib_given;
    unsigned char mig[MAX_GPU];          /* MIG device in use on each GPU, 0 none known */
};

/* What one holder means on one GPU. */
struct share { int pid, levels, np[MAX_LEVEL], listed, mig; ino_t ns; u64 start, mib; };

struct mem1 { u64 total, free, used; };
struct mem2 { u32 version; u64 total, reserved, free, used; };
struct proc { u32 pid; u64 mem; u32 gi, ci; };
struct util { u32 gpu, memory; };
struct pci { char legacy[16]; u32 domain, bus, device, id, subid; char bus_id[32]; };
struct field { u32 id, scope; long long stamp, latency; int type, ret; union { double d; u32 u; u64 l; } value; };

static struct gpu gpus[MAX_GPU], migs[MAX_GPU][MAX_MIG];
static int gpu_count, inits, kept[MAX_GPU + 4], kept_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- settings ---- */

static const char *setting(const char *key, const char *fallback) {
    static __thread char values[16][512];
    static __thread int slot;
    char name[64], line[512];
    const char *env, *conf = getenv("FAKE_NVML_CONF");
    snprintf(name, sizeof name, "FAKE_NVML_%s", key);
    if ((env = getenv(name))) return env;
    FILE *f = fopen(conf ? conf : "/etc/fake-nvml.conf", "re");
    if (!f) return fallback;
    size_t n = strlen(key);
    while (fgets(line, sizeof line, f))
        if (!strncmp(line, key, n) && line[n] == '=') {
            char *value = values[slot = (slot + 1) % 16];
            line[strcspn(line, "\n")] = 0;
            snprintf(value, sizeof values[0], "%s", line + n + 1);
            fclose(f);
            return value;
        }
    fclose(f);
    return fallback;
}

static u64 number(const char *key, const char *fallback) { return strtoull(setting(key, fallback), 0, 10); }
static const char *procfs(void) { return setting("PROC", "/proc"); }

static int in_list(const char *list, long wanted) {
    for (char *end; *list; list = *end ? end + 1 : end) {
        long n = strtol(list, &end, 10);
        if (end == list) { end++; continue; }
        if (n == wanted) return 1;
    }
    return 0;
}

/* VALUE or VALUE@minors: the value if it holds for this minor, else NULL. */
static const char *setting_for(const char *key, int minor) {
    const char *value = setting(key, ""), *at = strchr(value, '@');
    return *value && (!at || in_list(at + 1, minor)) ? value : 0;
}
static u64 number_for(const char *key, int minor) {
    const char *value = setting_for(key, minor);
    return value ? strtoull(value, 0, 10) : 0;
}

static void hang(const char *call, int about_device) {
    const char *where = setting("HANG", "");
    if (!strcmp(where, call) || (about_device && !strcmp(where, "query")))
        for (;;) pause();
}

/* FAIL=CALL:code[@minors] CALL:code ... */
static ret_t failure(const char *call, int minor) {
    char copy[512], *save = 0;
    snprintf(copy, sizeof copy, "%s", setting("FAIL", ""));
    for (char *item = strtok_r(copy, " ", &save); item; item = strtok_r(0, " ", &save)) {
        char *colon = strchr(item, ':'), *at = strchr(item, '@');
        if (!colon || strncmp(item, call, colon - item) || call[colon - item]) continue;
        if (!at || in_list(at + 1, minor)) return atoi(colon + 1);
    }
    return OK;
}

/* ---- devices ---- */

static int rank_in_order(int minor) {
    const char *list = setting("ORDER", "");
    int rank = 0;
    for (char *end; *list; list = *end ? end + 1 : end, rank++)
        if (strtol(list, &end, 10) == minor && end != list) return rank;
    return *setting("ORDER", "") ? 1000 + minor : minor;
}
static int by_order(const void *a, const void *b) {
    return rank_in_order(((const struct gpu *)a)->minor) - rank_in_order(((const struct gpu *)b)->minor);
}

static int keep(const char *path) {
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOCTTY);
    if (fd < 0) return -1;
    if (number("HOLD", "1") && kept_count < (int)(sizeof kept / sizeof *kept)) kept[kept_count++] = fd;
    else close(fd);
    return 0;
}

static void find_migs(struct gpu *gpu) {
    char path[700];
    const char *dir = setting("DEV_DIR", "/dev");
    gpu->mig_count = -1;
    for (const char *item = setting("MIG", ""); *item; item += strcspn(item, " "), item += strspn(item, " ")) {
        int minor, count;
        if (sscanf(item, "%d:%d", &minor, &count) == 2 && minor == gpu->minor)
            gpu->mig_count = count < 0 ? 0 : count > MAX_MIG ? MAX_MIG : count;
    }
    for (int i = 0; i < gpu->mig_count; i++) {
        struct gpu *mig = &migs[gpu->index][i];
        *mig = *gpu;
        mig->parent = gpu;
        mig->mig = i + 1;
        snprintf(path, sizeof path, "%s/nvidia-caps/nvidia-cap%d", dir, 3 + 135 * gpu->minor + 9 * (i + 1));
        if (stat(path, &gpu->cap[i])) memset(&gpu->cap[i], 0, sizeof gpu->cap[i]);
    }
}

static void find_gpus(void) {
    const char *dir = setting("DEV_DIR", "/dev"), *hidden = setting("HIDE", "");
    DIR *d = opendir(dir);
    struct dirent *e;
    char ctl[600], *end;
    int wanted, top = -1;
    gpu_count = 0;
    memset(gpus, 0, sizeof gpus);
    while (d && (e = readdir(d)) && gpu_count < MAX_GPU) {
        if (strncmp(e->d_name, "nvidia", 6) || !isdigit((unsigned char)e->d_name[6])) continue;
        struct gpu *gpu = &gpus[gpu_count];
        gpu->minor = strtol(e->d_name + 6, &end, 10);
        if (*end || in_list(hidden, gpu->minor)) continue;
        snprintf(gpu->path, sizeof gpu->path, "%s/%s", dir, e->d_name);
        if (keep(gpu->path) || stat(gpu->path, &gpu->st)) continue;    /* like the driver: no access, no GPU */
        if (gpu->minor > top) top = gpu->minor;
        gpu_count++;
    }
    if (d) closedir(d);
    snprintf(ctl, sizeof ctl, "%s/nvidiactl", dir);
    keep(ctl);
    qsort(gpus, gpu_count, sizeof *gpus, by_order);
    wanted = (int)number("COUNT", "0");
    if (*setting("COUNT", "") && wanted < gpu_count) gpu_count = wanted;
    while (gpu_count < wanted && gpu_count < MAX_GPU) gpus[gpu_count++].minor = ++top;
    for (int i = 0; i < gpu_count; i++) {
        gpus[i].index = i;
        find_migs(&gpus[i]);
    }
}

static void uuid_of(const struct gpu *gpu, char *out, size_t size) {
    if (gpu->mig) snprintf(out, size, "MIG-fa4e0000-0000-4000-8000-00000000%02x%02x", gpu->minor, gpu->mig);
    else snprintf(out, size, "%.80s%02x", setting("UUID", "GPU-fa4e0000-0000-4000-8000-0000000000"), gpu->minor);
}

/* ---- who holds what ---- */

static int same_node(const struct stat *a, const struct stat *b) {
    if (!b->st_ino) return 0;
    if (a->st_dev == b->st_dev && a->st_ino == b->st_ino) return 1;
    /* A second node of the same device (dev0: passthrough) has another inode. Major 1 is /dev/null and its like. */
    return S_ISCHR(a->st_mode) && S_ISCHR(b->st_mode) && a->st_rdev == b->st_rdev && major(a->st_rdev) != 1;
}

static void note(struct holder *h, const char *text) {
    const char *s;
    h->noted = h->listed = 1;
    if ((s = strstr(text, "listed="))) h->listed = atoi(s + 7);
    if ((s = strstr(text, "mib="))) { h->mib = strtoull(s + 4, 0, 10); h->mib_given = 1; }
    for (int which = 0; which < 2; which++) {
        u64 *mask = which ? &h->peers : &h->uses;
        if (!(s = strstr(text, which ? "peers=" : "uses="))) continue;
        for (s += which ? 6 : 5; isdigit((unsigned char)*s); s += *s == '+') {
            char *end;
            long minor = strtol(s, &end, 10);
            for (int g = 0; g < gpu_count; g++) if (gpus[g].minor == minor) *mask |= 1ULL << g;
            s = end;
        }
    }
}

static void read_fds(const char *base, struct holder *h) {
    char path[700], target[300];
    struct dirent *e;
    struct stat st;
    snprintf(path, sizeof path, "%s/fd", base);
    DIR *d = opendir(path);
    while (d && (e = readdir(d))) {
        if (!isdigit((unsigned char)e->d_name[0]) || fstatat(dirfd(d), e->d_name, &st, 0)) continue;
        for (int g = 0; g < gpu_count; g++) {
            if (same_node(&st, &gpus[g].st)) h->open |= 1ULL << g;
            for (int i = 0; i < gpus[g].mig_count; i++)
                if (same_node(&st, &gpus[g].cap[i])) { h->mig[g] = i + 1; h->open |= 1ULL << g; }
        }
        /* memfds are nameless regular files with no link */
        if (S_ISREG(st.st_mode) && !st.st_nlink) {
            ssize_t n = readlinkat(dirfd(d), e->d_name, target, sizeof target - 1);
            if (n > 0 && (target[n] = 0, !strncmp(target, NOTE, sizeof NOTE - 1))) note(h, target + sizeof NOTE - 1);
        }
    }
    if (d) closedir(d);
}

static void read_maps(const char *base, struct holder *h) {
    char path[700], line[4700], file[4200];
    snprintf(path, sizeof path, "%s/maps", base);
    FILE *f = fopen(path, "re");
    if (!f) return;
    while (fgets(line, sizeof line, f)) {
        unsigned maj, min;
        u64 inode;
        if (sscanf(line, "%*s %*s %*s %x:%x %llu %4199[^\n]", &maj, &min, &inode, file) != 4 || !inode) continue;
        for (int g = 0; g < gpu_count; g++) {
            if (gpus[g].st.st_ino != inode) continue;
            /* On overlayfs the device in maps may be that of the layer: then the name decides. */
            const char *mine = strrchr(gpus[g].path, '/'), *its = strrchr(file, '/');
            if (gpus[g].st.st_dev == makedev(maj, min) || (mine && its && !strcmp(mine, its))) h->maps |= 1ULL << g;
        }
    }
    fclose(f);
}

static void read_visible_devices(const char *value, struct holder *h) {
    char copy[4096], uuid[128], *save = 0;
    h->cvd = 1;
    snprintf(copy, sizeof copy, "%s", value);
    for (char *item = strtok_r(copy, ",", &save); item; item = strtok_r(0, ",", &save)) {
        item += strspn(item, " ");
        for (int g = 0; g < gpu_count; g++) {
            size_t n = strcspn(item, " ");
            uuid_of(&gpus[g], uuid, sizeof uuid);
            if (n > 4 && !strncmp(item, uuid, n)) h->named |= 1ULL << g;
            if (isdigit((unsigned char)*item) && strspn(item, "0123456789") == n && atoi(item) == g) h->named |= 1ULL << g;
            for (int i = 0; i < gpus[g].mig_count; i++) {
                uuid_of(&migs[g][i], uuid, sizeof uuid);
                if (n > 4 && !strncmp(item, uuid, n)) { h->named |= 1ULL << g; h->mig[g] = i + 1; }
            }
        }
    }
}

static void read_environment(const char *base, struct holder *h) {
    char path[700];
    size_t size = 0, room = 0;
    char *text = 0, *more;
    snprintf(path, sizeof path, "%s/environ", base);
    int fd = open(path, O_RDONLY | O_CLOEXEC), listed = 1;
    if (fd < 0) return;
    for (ssize_t n = 1; n > 0; size += n > 0 ? n : 0) {
        if (size + 4096 > room) {
            if (!(more = realloc(text, room + 65536))) break;
            text = more;
            room += 65536;
        }
        n = read(fd, text + size, room - size - 1);
    }
    close(fd);
    if (!text) return;
    text[size] = 0;
    for (char *s = text; s < text + size; s += strlen(s) + 1) {
        if (!strncmp(s, "CUDA_VISIBLE_DEVICES=", 21)) read_visible_devices(s + 21, h);
        else if (!strncmp(s, "FAKE_GPU_MIB=", 13) && !h->noted) { h->mib = strtoull(s + 13, 0, 10); h->mib_given = 1; }
        else if (!strncmp(s, "FAKE_GPU_LISTED=", 16)) listed = atoi(s + 16);
    }
    free(text);
    if (!h->noted) h->listed = listed;
}

static void read_status(const char *base, struct holder *h) {
    char path[700], line[512], *save = 0;
    struct stat st;
    snprintf(path, sizeof path, "%s/status", base);
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, "NSpid:", 6))
            for (char *s = strtok_r(line + 6, " \t\n", &save); s && h->levels < MAX_LEVEL; s = strtok_r(0, " \t\n", &save))
                h->np[h->levels++] = atoi(s);
    if (f) fclose(f);
    snprintf(path, sizeof path, "%s/ns/pid", base);
    h->ns = stat(path, &st) ? 0 : st.st_ino;
}

/* 'R', or 'Z' when its first thread has ended, and its start time; 0 when the process is gone. */
static char read_stat(const char *base, u64 *start) {
    char path[700], text[1024], *s;
    snprintf(path, sizeof path, "%s/stat", base);
    FILE *f = fopen(path, "re");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    if (f) fclose(f);
    text[n] = 0;
    if (!(s = strrchr(text, ')'))) return 0;
    char state = s[2];
    s += 2;
    for (int i = 3; i < 22 && s; i++) s = strchr(s + 1, ' ');
    *start = s ? strtoull(s, 0, 10) : 0;
    return state == 'Z' || state == 'X' ? 'Z' : 'R';
}

static void read_holds(const char *base, struct holder *h) {
    read_fds(base, h);
    read_maps(base, h);
    if (h->open | h->maps) read_environment(base, h);
}

/* Returns 1 if the process holds a node. A first thread that has ended shows nothing: ask the others. */
static int read_holder(const char *name, struct holder *h) {
    char base[600], thread[700], path[640];
    struct dirent *e;
    memset(h, 0, sizeof *h);
    h->listed = 1;
    snprintf(base, sizeof base, "%.500s/%.64s", procfs(), name);
    char state = h->state = read_stat(base, &h->start);
    if (!state) return 0;
    h->pid = atoi(name);
    if (state != 'Z') read_holds(base, h);
    else {
        snprintf(path, sizeof path, "%s/task", base);
        DIR *d = opendir(path);
        while (d && !(h->open | h->maps) && (e = readdir(d))) {
            if (!isdigit((unsigned char)e->d_name[0]) || !strcmp(e->d_name, name)) continue;
            snprintf(thread, sizeof thread, "%.600s/%.64s", path, e->d_name);
            read_holds(thread, h);
        }
        if (d) closedir(d);
    }
    if (!(h->open | h->maps)) return 0;
    read_status(base, h);
    return 1;
}

static int self_in(const char *what) {       /* my PID (or "self"'s own entry) as PROC shows it */
    char path[600], link[32];
    snprintf(path, sizeof path, "%s/%s", procfs(), what);
    ssize_t n = readlink(path, link, sizeof link - 1);
    if (n <= 0) return 0;
    link[n] = 0;
    return atoi(link);
}

static int my_parent(int me) {
    char path[600], line[256];
    int parent = 0;
    snprintf(path, sizeof path, "%s/%d/status", procfs(), me);
    FILE *f = me ? fopen(path, "re") : 0;
    while (f && fgets(line, sizeof line, f)) if (sscanf(line, "PPid: %d", &parent) == 1) break;
    if (f) fclose(f);
    return parent;
}

static int take_scan(struct holder **out) {
    DIR *d = opendir(procfs());
    struct dirent *e;
    struct holder h, *list = 0, *more;
    int count = 0, room = 0, me = self_in("self"), parent = number("IGNORE_PARENT", "0") ? my_parent(me) : -1;
    while (d && (e = readdir(d))) {
        if (!isdigit((unsigned char)e->d_name[0]) || !read_holder(e->d_name, &h)) continue;
        if ((h.pid == me || h.pid == parent) && !h.maps) continue;
        if (count == room) {
            if (!(more = realloc(list, (room = room * 2 + 32) * sizeof *list))) break;
            list = more;
        }
        list[count++] = h;
    }
    if (d) closedir(d);
    *out = list;
    return count;
}

static u64 now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000ULL + t.tv_nsec / 1000000;
}

static int all_live(const struct holder *list, int count) {
    char base[600];
    u64 start;
    for (int i = 0; i < count; i++) {
        snprintf(base, sizeof base, "%.500s/%d", procfs(), list[i].pid);
        if (read_stat(base, &start) != list[i].state || start != list[i].start) return 0;
    }
    return 1;
}

/* A survey asks two or three things about each GPU: answered from one scan, unless a holder has ended since. */
static int scan(const struct holder **out) {
    static struct holder *list;
    static int count, valid;
    static u64 taken;
    if (valid && now_ms() - taken < number("SCAN_MS", "5") && all_live(list, count)) { *out = list; return count; }
    free(list);
    list = 0;
    count = take_scan(&list);
    taken = now_ms();
    *out = list;
    return valid = 1, count;
}
/* ---- what it means on one GPU ---- */

static int share_of(const struct holder *h, const struct gpu *gpu, struct share *s) {
    u64 bit = 1ULL << gpu->index;
    u64 own = h->mib_given ? h->mib : h->listed ? number("PROC_MIB", "1024") : 1;
    u64 peers = h->peers ? h->peers : h->named, peer = number("PEER_MIB", "0") * MIB;
    int holds = ((h->open | h->maps) & bit) != 0;
    *s = (struct share){ .pid = h->pid, .levels = h->levels, .ns = h->ns, .start = h->start, .mig = h->mig[gpu->index] };
    memcpy(s->np, h->np, sizeof s->np);
    int used = h->uses ? holds && (h->uses & bit)
             : h->maps ? (h->maps & bit) != 0
             : h->noted ? 0
             : h->cvd ? holds && (h->named & bit)
             : holds && S_ISCHR(gpu->st.st_mode);
    if (used) {
        s->listed = h->listed;
        s->mib = own * MIB;
    } else if (peer && h->listed && (h->open & bit) && (peers & bit) && (h->uses || h->maps)) {
        s->mib = peer;                               /* a rank's context on its peer's GPU */
    } else if (h->maps & bit) {
        s->mib = MIB;                                /* an unmasked process' context on a GPU that it does not use */
    }
    return used || s->mib;
}

static void remember(FILE *out, const struct share *s, u64 gone) {
    fprintf(out, "%d %llu %llu %d %d %llu %llu", s->pid, s->start, s->mib, s->listed, s->mig, gone, (u64)s->ns);
    for (int k = 0; k < s->levels; k++) fprintf(out, " %d", s->np[k]);
    fputc('\n', out);
}

/* One file a GPU: what was seen, and since when it is missed. Adds what still lingers to `list`. */
static int linger(const struct gpu *gpu, struct share *list, int count, int room) {
    u64 lag = number("LAG_MS", "0");
    char path[700], *text = 0;
    size_t size = 0;
    if (!lag || !gpu->st.st_ino) return count;
    snprintf(path, sizeof path, "%.500s/fake-nvml-%llx-%llu.state", setting("STATE_DIR", "/tmp"),
             (u64)gpu->st.st_dev, (u64)gpu->st.st_ino);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd < 0) return count;
    (void)!fchmod(fd, 0666);                         /* the callers may be different users */
    flock(fd, LOCK_EX);
    FILE *in = fdopen(dup(fd), "r"), *out = open_memstream(&text, &size);
    if (in && out) {
        char line[512];
        int live = count;
        u64 now = now_ms();
        for (int i = 0; i < live; i++) remember(out, &list[i], 0);
        while (fgets(line, sizeof line, in)) {
            struct share s = { 0 };
            u64 gone, ns;
            int used = 0, known = 0, step, level;
            if (sscanf(line, "%d %llu %llu %d %d %llu %llu%n", &s.pid, &s.start, &s.mib, &s.listed, &s.mig, &gone, &ns, &used) != 7) continue;
            for (int i = 0; i < live; i++) known |= list[i].pid == s.pid && list[i].start == s.start;
            if (known) continue;
            if (!gone) gone = now;
            if (now - gone >= lag) continue;
            s.ns = ns;
            for (const char *c = line + used; s.levels < MAX_LEVEL && sscanf(c, "%d%n", &level, &step) == 1; c += step) s.np[s.levels++] = level;
            remember(out, &s, gone);
            if (count < room) list[count++] = s;
        }
    }
    if (out) fclose(out);
    if (in && text && !ftruncate(fd, 0)) (void)!pwrite(fd, text, size, 0);
    free(text);
    if (in) fclose(in);
    close(fd);
    return count;
}

/* Everything that holds memory on this GPU, or on this MIG device. The caller frees it. */
static int shares(const struct gpu *gpu, struct share **out) {
    const struct holder *holders;
    const struct gpu *whole = gpu->parent ? gpu->parent : gpu;
    pthread_mutex_lock(&lock);
    int found = scan(&holders), room = found + 256, count = 0, n = 0;
    struct share *list = calloc(room, sizeof *list);
    for (int i = 0; list && i < found; i++) count += share_of(&holders[i], whole, &list[count]);
    if (list) count = linger(whole, list, count, room);
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < count; i++)
        if (!gpu->mig || list[i].mig == gpu->mig) list[n++] = list[i];
    *out = list;
    return n;
}

static int older_than(const char *driver, int major, int minor) {
    int a = 0, b = 0;
    sscanf(driver, "%d.%d", &a, &b);
    return a < major || (a == major && b < minor);
}

/* The PID that the driver would give this caller for that process; 0: leave it out.
 * Open kernel modules, gpu_rmapi.c: before 535.113.01 the PID in the initial namespace; since then pid_vnr() in the
 * caller's namespace, where processes that are not visible are left out. */
static u32 visible_pid(const struct share *s, const char *driver, int me, int my_level) {
    struct stat self;
    if (older_than(driver, 535, 113) || !s->levels) return s->pid;
    if (!me || stat("/proc/self/ns/pid", &self)) return 0;
    if (my_level <= 1) return s->np[0];
    return s->ns == self.st_ino && s->levels >= my_level ? s->np[my_level - 1] : 0;
}

static int rows(const struct gpu *gpu, struct proc *out, int room) {
    struct share *list;
    struct holder mine = { 0 };
    char base[600];
    const char *driver = setting("DRIVER", "580.159.04"), *extra = setting_for("EXTRA_PIDS", gpu->minor);
    u64 dead = number_for("DEAD_OWNER", gpu->minor);
    int count = shares(gpu, &list), n = 0, me = self_in("self");
    if (me) {
        snprintf(base, sizeof base, "%.500s/%d", procfs(), me);
        read_status(base, &mine);
    }
    for (int i = 0; i < count; i++) {
        u32 pid = list[i].listed ? visible_pid(&list[i], driver, me, mine.levels) : 0;
        if (!pid) continue;
        /* Between 535.113 and 565.57 the lookup of a guest's memory compared host PIDs. */
        u64 mem = !older_than(driver, 535, 113) && older_than(driver, 565, 57) && mine.levels > 1 ? 0 : list[i].mib;
        if (number_for("PROC_MEM_NA", gpu->minor)) mem = ~0ULL;
        u32 instance = list[i].mig ? (u32)list[i].mig : ~0u;
        if (n < room) out[n] = (struct proc){ dead ? (u32)dead : pid, mem, instance, list[i].mig ? 0 : ~0u };
        n++;
    }
    free(list);
    for (char *end; extra && *extra && *extra != '@'; extra = *end == ',' ? end + 1 : end) {
        u32 pid = strtoul(extra, &end, 10);
        if (end == extra) break;
        if (n < room) out[n] = (struct proc){ pid, 0, ~0u, ~0u };
        n++;
    }
    return n;
}

static void memory(const struct gpu *gpu, struct mem2 *m) {
    struct share *list;
    int count = shares(gpu, &list), parts = gpu->mig ? gpu->mig_count : 1;
    u64 used = gpu->mig ? 0 : number_for("UNOWNED_MIB", gpu->minor) * MIB;
    for (int i = 0; i < count; i++) used += list[i].mib;
    free(list);
    m->total = number("TOTAL_MIB", "143771") * MIB / parts;
    m->reserved = number("RESERVED_MIB", "615") * MIB / parts;
    if (m->reserved > m->total) m->reserved = m->total;
    m->used = used > m->total - m->reserved ? m->total - m->reserved : used;
    m->free = m->total - m->reserved - m->used;
}

/* ---- the interface ---- */

static ret_t text(const char *s, char *out, u32 room) {
    if (!out) return INVALID;
    if (strlen(s) >= room) return TOO_SMALL;
    strcpy(out, s);
    return OK;
}

static ret_t ask(const char *call, const struct gpu *gpu) {
    ret_t r;
    if (!inits) return UNINITIALIZED;
    hang(call, gpu != 0);
    if (gpu && in_list(setting("LOST", ""), gpu->minor) && strcmp(setting("LOST_AT", "query"), "handle")) return LOST;
    if ((r = failure(call, gpu ? gpu->minor : -1))) return r;
    return OK;
}
#define ASK(call, gpu) do { ret_t r_; if (!inits) return UNINITIALIZED; if (!(gpu)) return INVALID; \
                            if ((r_ = ask(call, gpu))) return r_; } while (0)
#define ASK_SYSTEM(call) do { ret_t r_ = ask(call, 0); if (r_) return r_; } while (0)

API ret_t nvmlInitWithFlags(u32 flags) {
    (void)flags;
    hang("init", 0);
    ret_t error = (ret_t)number("INIT_ERROR", "0");
    if (error) return error;
    if (!inits++) {
        if (number("HOLD", "1")) {
            int fd = memfd_create("fake-gpu:listed=0,mib=0", MFD_CLOEXEC);
            if (fd >= 0) kept[kept_count++] = fd;
        }
        find_gpus();
    }
    return OK;
}
API ret_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API ret_t nvmlInit(void) { return nvmlInitWithFlags(0); }
API ret_t nvmlShutdown(void) {
    if (!inits) return UNINITIALIZED;
    if (!--inits) while (kept_count) close(kept[--kept_count]);
    return OK;
}

API const char *nvmlErrorString(ret_t r) {
    static const char *const names[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded",
        "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
        "Corrupted infoROM", "GPU is lost", "GPU requires reset", "GPU access blocked by the operating system",
        "Driver/library version mismatch", "In use by another client", "Insufficient Memory", "No data",
        "vGPU ECC not supported", "Insufficient resources", "Frequency not supported", "Argument version mismatch",
        "Deprecated", "Not ready", "GPU not found", "Invalid state", "Reset type not supported" };
    return r >= 0 && r < (ret_t)(sizeof names / sizeof *names) ? names[r] : "Unknown Error";
}

API ret_t nvmlSystemGetDriverVersion(char *out, u32 room) { ASK_SYSTEM("driver"); return text(setting("DRIVER", "580.159.04"), out, room); }
API ret_t nvmlSystemGetNVMLVersion(char *out, u32 room) {
    char version[600];
    snprintf(version, sizeof version, "13.%s", setting("DRIVER", "580.159.04"));
    return text(version, out, room);
}
API ret_t nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return OK; }
API ret_t nvmlSystemGetCudaDriverVersion(int *v) { *v = 13000; return OK; }

API ret_t nvmlDeviceGetCount_v2(u32 *n) { ASK_SYSTEM("count"); *n = gpu_count; return OK; }
API ret_t nvmlDeviceGetCount(u32 *n) { return nvmlDeviceGetCount_v2(n); }

static ret_t hand_out(struct gpu *gpu, struct gpu **out) {
    ret_t r = failure("handle", gpu->minor);
    if (r) return r;
    hang("handle", 0);
    if (in_list(setting("LOST", ""), gpu->minor) && !strcmp(setting("LOST_AT", "query"), "handle")) return LOST;
    *out = gpu;
    return OK;
}
API ret_t nvmlDeviceGetHandleByIndex_v2(u32 i, struct gpu **out) {
    if (!inits) return UNINITIALIZED;
    return i < (u32)gpu_count && out ? hand_out(&gpus[i], out) : INVALID;
}
API ret_t nvmlDeviceGetHandleByIndex(u32 i, struct gpu **out) { return nvmlDeviceGetHandleByIndex_v2(i, out); }
API ret_t nvmlDeviceGetHandleByUUID(const char *uuid, struct gpu **out) {
    char mine[128];
    if (!inits) return UNINITIALIZED;
    if (!uuid || !out) return INVALID;
    for (int g = 0; g < gpu_count; g++)
        for (int i = -1; i < 0 || i < gpus[g].mig_count; i++) {
            struct gpu *gpu = i < 0 ? &gpus[g] : &migs[g][i];
            uuid_of(gpu, mine, sizeof mine);
            if (!strcmp(mine, uuid)) return hand_out(gpu, out);
        }
    return NOT_FOUND;
}
static int bus_of(const struct gpu *gpu) { return 0x19 + rank_in_order(gpu->minor) % 200; }
API ret_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, struct gpu **out) {
    unsigned domain, bus, device;
    if (!inits) return UNINITIALIZED;
    if (!id || !out) return INVALID;
    if (sscanf(id, "%x:%x:%x", &domain, &bus, &device) != 3 && (domain = 0, sscanf(id, "%x:%x", &bus, &device) != 2)) return INVALID;
    for (int g = 0; g < gpu_count; g++)
        if (!domain && !device && bus_of(&gpus[g]) == (int)bus) return hand_out(&gpus[g], out);
    return NOT_FOUND;
}

API ret_t nvmlDeviceGetIndex(struct gpu *gpu, u32 *i) { ASK("index", gpu); *i = gpu->mig ? gpu->mig - 1 : gpu->index; return OK; }
API ret_t nvmlDeviceGetMinorNumber(struct gpu *gpu, u32 *i) { ASK("minor", gpu); if (gpu->mig) return NOT_SUPPORTED; *i = gpu->minor; return OK; }
API ret_t nvmlDeviceGetName(struct gpu *gpu, char *out, u32 room) {
    char name[600];
    ASK("name", gpu);
    snprintf(name, sizeof name, gpu->mig ? "%s MIG 1g" : "%s", setting("NAME", "NVIDIA H200"));
    return text(name, out, room);
}
API ret_t nvmlDeviceGetUUID(struct gpu *gpu, char *out, u32 room) {
    char uuid[128];
    ASK("uuid", gpu);
    uuid_of(gpu, uuid, sizeof uuid);
    return text(uuid, out, room);
}
API ret_t nvmlDeviceGetPciInfo_v3(struct gpu *gpu, struct pci *p) {
    ASK("pci", gpu);
    memset(p, 0, sizeof *p);
    p->bus = bus_of(gpu);
    p->id = 0x233510de;
    snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02X:00.0", p->bus & 0xff);
    snprintf(p->legacy, sizeof p->legacy, "0000:%02X:00.0", p->bus & 0xff);
    return OK;
}

API ret_t nvmlDeviceGetMemoryInfo_v2(struct gpu *gpu, struct mem2 *m) {
    if (number("NO_V2", "0")) return NO_FUNCTION;
    ASK("memory2", gpu);
    ASK("memory", gpu);
    if (m->version != (sizeof *m | 2u << 24)) return VERSION_MISMATCH;
    if (number_for("MEMORY_NA", gpu->minor)) return NOT_SUPPORTED;
    memory(gpu, m);
    if (number("V2_RESERVED_USED", "0")) m->used += m->reserved;
    return OK;
}
API ret_t nvmlDeviceGetMemoryInfo(struct gpu *gpu, struct mem1 *m) {     /* v1 counts the reserved part as used */
    struct mem2 x;
    ASK("memory", gpu);
    if (number_for("MEMORY_NA", gpu->minor)) return NOT_SUPPORTED;
    memory(gpu, &x);
    *m = (struct mem1){ x.total, x.free, x.used + x.reserved };
    return OK;
}

API ret_t nvmlDeviceGetComputeRunningProcesses_v3(struct gpu *gpu, u32 *count, struct proc *out) {
    ASK("processes", gpu);
    int room = out ? (int)*count : 0, have = rows(gpu, out, room);
    *count = have;
    return have > room ? TOO_SMALL : OK;
}
API ret_t nvmlDeviceGetComputeRunningProcesses_v2(struct gpu *gpu, u32 *n, struct proc *p) { return nvmlDeviceGetComputeRunningProcesses_v3(gpu, n, p); }
API ret_t nvmlDeviceGetGraphicsRunningProcesses_v3(struct gpu *gpu, u32 *n, struct proc *p) { (void)p; ASK("processes", gpu); *n = 0; return OK; }
API ret_t nvmlDeviceGetGraphicsRunningProcesses_v2(struct gpu *gpu, u32 *n, struct proc *p) { return nvmlDeviceGetGraphicsRunningProcesses_v3(gpu, n, p); }
API ret_t nvmlDeviceGetMPSComputeRunningProcesses_v3(struct gpu *gpu, u32 *n, struct proc *p) { return nvmlDeviceGetGraphicsRunningProcesses_v3(gpu, n, p); }
API ret_t nvmlDeviceGetMPSComputeRunningProcesses_v2(struct gpu *gpu, u32 *n, struct proc *p) { return nvmlDeviceGetGraphicsRunningProcesses_v3(gpu, n, p); }

API ret_t nvmlDeviceGetUtilizationRates(struct gpu *gpu, struct util *u) {
    struct share *list;
    const char *fixed = setting("UTILIZATION", "auto");
    ASK("utilization", gpu);
    if (gpu->mig || gpu->mig_count >= 0) return NOT_SUPPORTED;
    int count = shares(gpu, &list), busy = 0;
    for (int i = 0; i < count; i++) busy |= list[i].listed;
    free(list);
    u->gpu = strcmp(fixed, "auto") ? (u32)atoi(fixed) : busy ? 100 : 0;
    u->memory = u->gpu / 2;
    return OK;
}
API ret_t nvmlDeviceGetTemperature(struct gpu *gpu, int sensor, u32 *t) { (void)sensor; ASK("temperature", gpu); *t = 35; return OK; }
API ret_t nvmlDeviceGetPowerUsage(struct gpu *gpu, u32 *p) { ASK("power", gpu); *p = 75000; return OK; }
API ret_t nvmlDeviceGetComputeMode(struct gpu *gpu, int *m) { ASK("mode", gpu); *m = (int)number("COMPUTE_MODE", "0"); return OK; }
API ret_t nvmlDeviceGetPersistenceMode(struct gpu *gpu, int *m) { ASK("mode", gpu); *m = (int)number("PERSISTENCE", "1"); return OK; }
API ret_t nvmlDeviceGetRemappedRows(struct gpu *gpu, u32 *a, u32 *b, u32 *c, u32 *d) {
    (void)a; (void)b; (void)c; (void)d;
    ASK("rows", gpu);
    return NOT_SUPPORTED;
}
API ret_t nvmlDeviceGetRetiredPagesPendingStatus(struct gpu *gpu, int *pending) { (void)pending; ASK("rows", gpu); return NOT_SUPPORTED; }
API ret_t nvmlDeviceGetFieldValues(struct gpu *gpu, int count, struct field *f) {
    ASK("field", gpu);
    for (int i = 0; i < count; i++) {
        f[i].ret = f[i].id == 230 ? OK : NOT_SUPPORTED;      /* NVML_FI_DEV_GET_GPU_RECOVERY_ACTION */
        f[i].type = 1;                                       /* unsigned int */
        f[i].value.l = 0;
        f[i].value.u = f[i].id == 230 ? (u32)number_for("RECOVERY_ACTION", gpu->minor) : 0;
    }
    return OK;
}

API ret_t nvmlDeviceGetMigMode(struct gpu *gpu, u32 *current, u32 *pending) {
    ASK("mig", gpu);
    if (gpu->mig) return NOT_SUPPORTED;
    *current = *pending = gpu->mig_count >= 0;
    return OK;
}
API ret_t nvmlDeviceGetMaxMigDeviceCount(struct gpu *gpu, u32 *count) { ASK("mig", gpu); *count = gpu->mig_count >= 0 ? MAX_MIG : 0; return OK; }
API ret_t nvmlDeviceGetMigDeviceHandleByIndex(struct gpu *gpu, u32 i, struct gpu **out) {
    ASK("mig", gpu);
    if (gpu->mig || i >= MAX_MIG) return INVALID;
    if ((int)i >= gpu->mig_count) return NOT_FOUND;
    *out = &migs[gpu->index][i];
    return OK;
}
API ret_t nvmlDeviceIsMigDeviceHandle(struct gpu *gpu, u32 *is) { ASK("mig", gpu); *is = gpu->mig != 0; return OK; }
API ret_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(struct gpu *gpu, struct gpu **out) { ASK("mig", gpu); if (!gpu->mig) return INVALID; *out = gpu->parent; return OK; }
API ret_t nvmlDeviceGetGpuInstanceId(struct gpu *gpu, u32 *id) { ASK("mig", gpu); if (!gpu->mig) return NOT_SUPPORTED; *id = gpu->mig; return OK; }
API ret_t nvmlDeviceGetComputeInstanceId(struct gpu *gpu, u32 *id) { ASK("mig", gpu); if (!gpu->mig) return NOT_SUPPORTED; *id = 0; return OK; }

API ret_t nvmlSystemGetProcessName(u32 pid, char *out, u32 room) {
    char path[64], name[64] = "";
    snprintf(path, sizeof path, "/proc/%u/comm", pid);
    FILE *f = fopen(path, "re");
    if (!f) return NOT_FOUND;
    if (fgets(name, sizeof name, f)) name[strcspn(name, "\n")] = 0;
    fclose(f);
    return text(name, out, room);
}
