/* A CUDA runtime without a device: what onnxruntime's CUDA provider needs to start, place nodes, allocate, copy and
 * launch. Memory is the host's; kernels do nothing and are remembered by name, in the log of the stub driver
 * (../mock_cuda.c). Functions that need no behaviour are made by build.py: they return 0. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void mock_event(const char *text);
int cuCtxSetCurrent(void *context);
int cuDevicePrimaryCtxRetain(void **context, int device);

typedef struct { unsigned x, y, z; } dim3;
typedef struct { dim3 grid, block; size_t shared; void *stream; } launch_config;

static void event(const char *what, const char *name, size_t nbytes, void *stream) {
    char text[768];
    snprintf(text, sizeof text, "%s %.600s %zu stream %lx", what, name, nbytes, (unsigned long)stream);
    mock_event(text);
}

/* ---- kernels ---- */

enum { BUCKETS = 1 << 16 };
typedef struct kernel { const void *function; const char *name; struct kernel *next; } kernel;
static kernel *buckets[BUCKETS];

static kernel **bucket(const void *function) { return &buckets[((uintptr_t)function >> 4) % BUCKETS]; }
static kernel *find(const void *function) {
    for (kernel *k = *bucket(function); k; k = k->next)
        if (k->function == function) return k;
    return NULL;
}
void **__cudaRegisterFatBinary(void *image) { (void)image; return calloc(1, sizeof(void *)); }
void __cudaRegisterFunction(void **handle, const char *function, char *device, const char *name) {
    (void)handle, (void)device;
    kernel *k = malloc(sizeof *k);
    *k = (kernel){function, name, *bucket(function)};
    *bucket(function) = k;
}
int __cudaGetKernel(void **out, const void *function) { *out = find(function); return *out ? 0 : 98; }
static int launched(const kernel *k, void *stream) { event("kernel", k ? k->name : "?", 0, stream); return 0; }
int __cudaLaunchKernel(void *k, dim3 grid, dim3 block, void **args, size_t shared, void *stream) {
    (void)grid, (void)block, (void)args, (void)shared;
    return launched(k, stream);
}
int cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **args, size_t shared, void *stream) {
    (void)grid, (void)block, (void)args, (void)shared;
    return launched(find(function), stream);
}
int cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **args, size_t shared, void *stream) {
    return cudaLaunchKernel(function, grid, block, args, shared, stream);
}
int cudaLaunchKernelExC(const launch_config *config, const void *function, void **args) {
    (void)args;
    return launched(find(function), config->stream);
}
static _Thread_local launch_config pushed;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed = (launch_config){grid, block, shared, stream};
    return 0;
}
int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *stream = pushed.stream;
    return 0;
}
int cudaFuncGetAttributes(void *attributes, const void *function) {
    (void)function;
    memset(attributes, 0, 64); /* sizes are the first six fields */
    ((int *)attributes)[6] = 1024; /* threads of a block */
    return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks) { *blocks = 2; return 0; }

/* ---- device ---- */

int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) {
    static void *context;
    if (!context) cuDevicePrimaryCtxRetain(&context, device);
    return cuCtxSetCurrent(context);
}
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
const char *cudaGetErrorName(int code) { (void)code; return "stub"; }
const char *cudaGetErrorString(int code) { (void)code; return "stub"; }

static int attribute(int number) {
    switch (number) {
        case 1: return 1024;     /* threads of a block */
        case 8: return 49152;    /* shared memory of a block */
        case 10: return 32;      /* threads of a warp */
        case 16: return 132;     /* multiprocessors */
        case 75: return 9;       /* compute capability */
        case 81: return 233472;  /* shared memory of a multiprocessor */
        case 97: return 232448;  /* shared memory of a block that asks for it */
        default: return 0;
    }
}
int cudaDeviceGetAttribute(int *value, int number) { *value = attribute(number); return 0; }

/* cudaDeviceProp of CUDA 13 up to the last field that is read. */
typedef struct {
    char name[256], uuid[16], luid[8];
    unsigned luid_mask;
    size_t memory, shared_per_block;
    int registers, warp;
    size_t pitch;
    int threads, block_dims[3], grid_dims[3];
    size_t constant_memory;
    int major, minor;
    size_t texture_alignment, texture_pitch;
    int multiprocessors, integrated, maps_host, textures_and_surfaces[39];
    size_t surface_alignment;
    int concurrent, ecc, pci[3], tcc, engines, unified, bus, l2, persisting_l2, multiprocessor_threads, priorities, l1[2];
    size_t shared_per_multiprocessor;
    int multiprocessor_registers, managed, board[2], atomics, pageable, managed_at_once, preemption, host_pointer, cooperative;
    size_t shared_per_block_optin;
} properties;
int cudaGetDeviceProperties(properties *p) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "Stub GPU");
    p->memory = (size_t)16 << 30, p->shared_per_block = attribute(8), p->registers = 65536, p->warp = attribute(10);
    p->threads = attribute(1), p->major = attribute(75), p->multiprocessors = attribute(16);
    p->shared_per_multiprocessor = attribute(81), p->shared_per_block_optin = attribute(97);
    p->multiprocessor_threads = 2048, p->l2 = 50 << 20;
    for (int i = 0; i < 3; i++) p->block_dims[i] = 1024, p->grid_dims[i] = 65535;
    return 0;
}

/* ---- memory ---- */

int cudaMalloc(void **out, size_t nbytes) { *out = calloc(1, nbytes + 256); return *out ? 0 : 2; }
int cudaFree(void *memory) { free(memory); return 0; }
int cudaMallocHost(void **out, size_t nbytes) { return cudaMalloc(out, nbytes); }
int cudaHostAlloc(void **out, size_t nbytes) { return cudaMalloc(out, nbytes); }
int cudaFreeHost(void *memory) { free(memory); return 0; }
int cudaMemGetInfo(size_t *free_nbytes, size_t *total) { *free_nbytes = *total = (size_t)16 << 30; return 0; }
int cudaMemset(void *to, int byte, size_t nbytes) { memset(to, byte, nbytes); return 0; }
int cudaMemsetAsync(void *to, int byte, size_t nbytes, void *stream) {
    event("kernel", "memset", nbytes, stream);
    memset(to, byte, nbytes);
    return 0;
}
static const char *direction(int kind) {
    static const char *names[] = {"host_to_host", "host_to_device", "device_to_host", "device_to_device", "default"};
    return names[kind < 5 ? kind : 4];
}
int cudaMemcpy(void *to, const void *from, size_t nbytes, int kind) {
    event("copy_and_wait", direction(kind), nbytes, NULL);
    memcpy(to, from, nbytes);
    return 0;
}
int cudaMemcpyAsync(void *to, const void *from, size_t nbytes, int kind, void *stream) {
    event("copy", direction(kind), nbytes, stream);
    memcpy(to, from, nbytes);
    return 0;
}
int cudaPointerGetAttributes(void *attributes, const void *pointer) {
    int *fields = attributes; /* type (2: device), device, pointers */
    fields[0] = 2, fields[1] = 0;
    memcpy(fields + 2, &pointer, sizeof pointer);
    memcpy(fields + 4, &pointer, sizeof pointer);
    return 0;
}

/* ---- streams and events ---- */

int cudaStreamCreate(void **stream) { *stream = calloc(1, 64); return 0; }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { (void)flags; return cudaStreamCreate(stream); }
int cudaStreamDestroy(void *stream) { free(stream); return 0; }
int cudaStreamSynchronize(void *stream) { event("wait", "stream", 0, stream); return 0; }
int cudaDeviceSynchronize(void) { event("wait", "device", 0, NULL); return 0; }
int cudaEventSynchronize(void *e) { (void)e; event("wait", "event", 0, NULL); return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { (void)stream; *status = 0; return 0; }
int cudaEventCreate(void **out) { *out = calloc(1, 64); return 0; }
int cudaEventCreateWithFlags(void **out, unsigned flags) { (void)flags; return cudaEventCreate(out); }
int cudaEventDestroy(void *e) { free(e); return 0; }
