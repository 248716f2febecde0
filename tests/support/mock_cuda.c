/* A CUDA driver without a device, for tests without a GPU: memory is the host's, and every launch, copy and wait is
 * remembered. A module image is a cubin, whose own description of its parameters is read, or text: for each kernel a
 * line "entry size size ...", the sizes of all of its parameters. A launch executes nothing but the function that a
 * test has set for it. */
#include <elf.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char entry[128]; int count; int sizes[64]; int dynamic_shared; } function_t;
typedef struct { int count; function_t functions[16]; } module_t;

typedef void (*launched_t)(const char *entry, const unsigned *grid, void **params);

static char events[1 << 22];
static _Thread_local int current;
static int used, retained, allocated, driver_version = 12090, major = 9, minor = 0;
static launched_t on_launch;

void mock_event(const char *text) {
    int length = (int)strlen(text);
    if (used + length + 2 < (int)sizeof events) { memcpy(events + used, text, length); used += length; events[used++] = '\n'; events[used] = 0; }
}
const char *mock_events(void) { return events; }
void mock_reset(void) { used = 0; events[0] = 0; }
void mock_device(int version, int a, int b) { driver_version = version; major = a; minor = b; }
int mock_retained(void) { return retained; }
int mock_allocated(void) { return allocated; }
void mock_on_launch(launched_t function) { on_launch = function; }

int cuInit(unsigned flags) { (void)flags; return 0; }
int cuDriverGetVersion(int *version) { *version = driver_version; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? 101 : 0; }
int cuDeviceGetName(char *name, int length, int device) { (void)device; snprintf(name, length, "Mock GPU"); return 0; }
int cuDeviceTotalMem_v2(size_t *nbytes, int device) { (void)device; *nbytes = (size_t)80 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 75 ? major : attribute == 76 ? minor : attribute == 16 ? 132 : attribute == 97 ? 232448 : 0;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; retained++; *context = &retained; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; retained--; return 0; }
int cuCtxSetCurrent(void *context) { current = context == &retained; return 0; }
int cuGetErrorString(int code, const char **text) { *text = code == 101 ? "invalid device ordinal" : "mock error"; return 0; }

static void stream_event(const char *what, size_t nbytes, void *stream) {
    char text[128];
    snprintf(text, sizeof text, "%s %zu stream %lx", what, nbytes, (unsigned long)stream);
    mock_event(text);
}
int cuStreamCreate(void **stream, unsigned flags) { if (!current || flags != 1) return 1; *stream = calloc(1, 64); return 0; }
int cuStreamDestroy_v2(void *stream) { if (!current) return 201; free(stream); return 0; }
int cuStreamSynchronize(void *stream) { if (!current) return 201; stream_event("synchronize", 0, stream); return 0; }
int cuMemAlloc_v2(uint64_t *address, size_t nbytes) {
    if (!current || !nbytes || nbytes >> 36) return 2;
    *address = (uint64_t)aligned_alloc(256, (nbytes + 255) / 256 * 256);
    memset((void *)*address, 0xCD, nbytes);
    allocated++;
    return 0;
}
int cuMemFree_v2(uint64_t address) { if (!current) return 201; free((void *)address); allocated--; return 0; }
int cuMemsetD8Async(uint64_t to, unsigned char byte, size_t nbytes, void *stream) {
    if (!current) return 201;
    stream_event("fill", nbytes, stream);
    memset((void *)to, byte, nbytes);
    return 0;
}
int cuMemsetD2D8Async(uint64_t to, size_t pitch, unsigned char byte, size_t width, size_t height, void *stream) {
    if (!current) return 201;
    stream_event("clear", width * height, stream);
    for (size_t i = 0; i < height; i++) memset((char *)to + i * pitch, byte, width);
    return 0;
}
int cuMemsetD32Async(uint64_t to, unsigned value, size_t n, void *stream) {
    if (!current) return 201;
    stream_event("set", n, stream);
    for (size_t i = 0; i < n; i++) ((unsigned *)to)[i] = value;
    return 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t nbytes, void *stream) {
    if (!current) return 201;
    stream_event("upload", nbytes, stream);
    memcpy((void *)to, from, nbytes);
    return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t nbytes, void *stream) {
    if (!current) return 201;
    stream_event("download", nbytes, stream);
    memcpy(to, (void *)from, nbytes);
    return 0;
}

typedef struct {
    size_t from_x, from_y; unsigned from_type; const char *from_host; uint64_t from; void *from_array;
    size_t from_pitch, to_x, to_y; unsigned to_type; char *to_host; uint64_t to; void *to_array;
    size_t to_pitch, width, height;
} copy2d_t; /* CUDA_MEMCPY2D */
int cuMemcpy2DAsync_v2(const copy2d_t *c, void *stream) {
    if (!current) return 201;
    if (c->from_type != 2 || c->to_type != 2 || c->width > c->from_pitch || c->width > c->to_pitch) return 1;
    stream_event("copy device_to_device", c->width * c->height, stream);
    for (size_t i = 0; i < c->height; i++)
        memcpy((char *)c->to + i * c->to_pitch, (char *)c->from + i * c->from_pitch, c->width);
    return 0;
}

static void read_text(module_t *module, const char *image) {
    char *copy = strdup(image), *line_state, *word_state;
    for (char *line = strtok_r(copy, "\n", &line_state); line; line = strtok_r(NULL, "\n", &line_state)) {
        function_t *f = &module->functions[module->count++];
        snprintf(f->entry, sizeof f->entry, "%s", strtok_r(line, " ", &word_state));
        for (char *word; (word = strtok_r(NULL, " ", &word_state));) f->sizes[f->count++] = atoi(word);
    }
    free(copy);
}
/* Sections ".nv.info.<kernel>" hold records (format, attribute, size, value); a parameter's has attribute 0x17 and
 * size 12: index, ordinal and offset, then its size in the upper 14 bits. */
static void read_parameters(function_t *f, const unsigned char *at, const unsigned char *end) {
    while (at + 4 <= end) {
        unsigned nbytes = at[0] == 4 ? at[2] | at[3] << 8 : 0, ordinal, size;
        if (at[0] == 4 && at[1] == 0x17 && nbytes == 12) {
            memcpy(&ordinal, at + 8, 4), memcpy(&size, at + 12, 4);
            ordinal &= 0xffff;
            f->sizes[ordinal] = size >> 18;
            if ((int)ordinal >= f->count) f->count = ordinal + 1;
        }
        at += 4 + nbytes;
    }
}
static void read_cubin(module_t *module, const char *image) {
    const Elf64_Ehdr *header = (const void *)image;
    const Elf64_Shdr *sections = (const void *)(image + header->e_shoff);
    const char *names = image + sections[header->e_shstrndx].sh_offset;
    for (int i = 0; i < header->e_shnum; i++) {
        const char *name = names + sections[i].sh_name;
        if (strncmp(name, ".nv.info.", 9)) continue;
        function_t *f = &module->functions[module->count++];
        snprintf(f->entry, sizeof f->entry, "%s", name + 9);
        const unsigned char *data = (const void *)(image + sections[i].sh_offset);
        read_parameters(f, data, data + sections[i].sh_size);
    }
}
int cuModuleLoadData(void **out, const char *image) {
    if (!current) return 201;
    module_t *module = calloc(1, sizeof *module);
    if (memcmp(image, ELFMAG, SELFMAG)) read_text(module, image);
    else read_cubin(module, image);
    *out = module;
    mock_event("load");
    return module->count ? 0 : 200;
}
int cuModuleUnload(void *module) { free(module); mock_event("unload"); return 0; }
int cuModuleGetFunction(void **out, void *module, const char *name) {
    module_t *m = module;
    for (int i = 0; i < m->count; i++)
        if (!strcmp(m->functions[i].entry, name)) { *out = &m->functions[i]; return 0; }
    return 500;
}
int cuFuncSetAttribute(void *function, int attribute, int value) {
    if (attribute == 8) ((function_t *)function)->dynamic_shared = value;
    return 0;
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **params, void **extra) {
    function_t *f = function;
    char text[4096];
    if (!current || extra || !gx || !gy || !gz || (shared > 49152 && f->dynamic_shared < (int)shared)) return 1;
#ifdef QUIET
    return 0; /* for measuring the caller alone */
#endif
    int at = snprintf(text, sizeof text, "launch %s grid %u %u %u block %u %u %u shared %u stream %lx args", f->entry,
                      gx, gy, gz, bx, by, bz, shared, (unsigned long)stream);
    for (int i = 0; i < f->count; i++) {
        uint64_t value = 0;
        memcpy(&value, params[i], f->sizes[i]);
        at += snprintf(text + at, sizeof text - at, " %lx", (unsigned long)value);
    }
    mock_event(text);
    if (on_launch) on_launch(f->entry, (unsigned[]){gx, gy, gz}, params);
    return 0;
}
