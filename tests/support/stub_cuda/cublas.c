/* cuBLAS without a device: handles know their stream, products are remembered. */
#include <stdio.h>
#include <stdlib.h>

void mock_event(const char *text);
typedef struct { void *stream; } handle;

int cublasCreate_v2(handle **out) { *out = calloc(1, sizeof **out); return 0; }
int cublasDestroy_v2(handle *h) { free(h); return 0; }
int cublasSetStream_v2(handle *h, void *stream) { h->stream = stream; return 0; }
int cublasGetMathMode(handle *h, int *mode) { (void)h; *mode = 0; return 0; }
const char *cublasGetStatusName(int code) { (void)code; return "stub"; }
const char *cublasGetStatusString(int code) { (void)code; return "stub"; }

#define PRODUCT(name)                                                                      \
    int name(handle *h) {                                                                  \
        char text[128];                                                                    \
        snprintf(text, sizeof text, "kernel %s 0 stream %lx", #name, (unsigned long)h->stream); \
        mock_event(text);                                                                  \
        return 0;                                                                          \
    }
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmBatched)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmBatchedEx)
PRODUCT(cublasGemmStridedBatchedEx)
