/* A CUDA driver that executes nothing and remembers every launch, for tests without a GPU.
 * A module image is text: for each kernel a line "entry size size ...", the sizes of all of its parameters. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char entry[128]; int count; int sizes[64]; int dynamic_shared; } function_t;
typedef struct { int count; function_t functions[16]; } module_t;

static char events[1 << 16];
static int used, retained, current, driver_version = 12090, major = 9, minor = 0;

static void event(const char *text) {
    int length = (int)strlen(text);
    if (used + length + 2 < (int)sizeof events) { memcpy(events + used, text, length); used += length; events[used++] = '\n'; events[used] = 0; }
}
const char *mock_events(void) { return events; }
void mock_reset(void) { used = 0; events[0] = 0; }
void mock_device(int version, int a, int b) { driver_version = version; major = a; minor = b; }
int mock_retained(void) { return retained; }

int cuInit(unsigned flags) { (void)flags; return 0; }
int cuDriverGetVersion(int *version) { *version = driver_version; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? 101 : 0; }
int cuDeviceGetName(char *name, int length, int device) { (void)device; snprintf(name, length, "Mock GPU"); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 75 ? major : attribute == 76 ? minor : attribute == 16 ? 132 : attribute == 97 ? 232448 : 0;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; retained++; *context = &retained; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; retained--; return 0; }
int cuCtxSetCurrent(void *context) { current = context == &retained; return 0; }
int cuGetErrorString(int code, const char **text) { *text = code == 101 ? "invalid device ordinal" : "mock error"; return 0; }

int cuModuleLoadData(void **out, const char *image) {
    if (!current) return 201;
    module_t *module = calloc(1, sizeof *module);
    char *copy = strdup(image), *line_state, *word_state;
    for (char *line = strtok_r(copy, "\n", &line_state); line; line = strtok_r(NULL, "\n", &line_state)) {
        function_t *f = &module->functions[module->count++];
        snprintf(f->entry, sizeof f->entry, "%s", strtok_r(line, " ", &word_state));
        for (char *word; (word = strtok_r(NULL, " ", &word_state));) f->sizes[f->count++] = atoi(word);
    }
    free(copy);
    *out = module;
    event("load");
    return module->count ? 0 : 200;
}
int cuModuleUnload(void *module) { free(module); event("unload"); return 0; }
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
    event(text);
    return 0;
}
