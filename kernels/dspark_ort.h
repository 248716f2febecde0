/* The part of ONNX Runtime's C interface that the operators need, stated by slot number.
 *
 * `OrtApi` is an append-only table of function pointers and `OrtCustomOp` a versioned structure, both frozen
 * once released, so no header of ONNX Runtime is needed to build the library.  Version 18 is the first one whose
 * `OrtCustomOp` has all the fields below.
 */
#ifndef DSPARK_ORT_H
#define DSPARK_ORT_H

#include <stddef.h>
#include <stdint.h>

#define ORT_VERSION 18

typedef struct OrtStatus OrtStatus;
typedef struct OrtValue OrtValue;
typedef struct OrtShapeInfo OrtShapeInfo;
typedef struct OrtKernelInfo OrtKernelInfo;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtOpDomain OrtOpDomain;
typedef void *const OrtApi; /* the table, read through the macros below */

typedef struct {
  const OrtApi *(*get_api)(uint32_t version);
  const char *(*get_version)(void);
} OrtApiBase;

enum { ORT_FLOAT = 1, ORT_UINT8 = 2, ORT_INT16 = 5, ORT_INT32 = 6, ORT_INT64 = 7, ORT_BOOL = 9, ORT_BFLOAT16 = 16 };
enum { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 };
enum { ORT_REQUIRED = 0, ORT_OPTIONAL = 1 };

typedef struct OrtCustomOp OrtCustomOp;
struct OrtCustomOp {
  uint32_t version;
  void *(*create_kernel)(const OrtCustomOp *, const OrtApi *, const OrtKernelInfo *);
  const char *(*name)(const OrtCustomOp *);
  const char *(*provider)(const OrtCustomOp *);
  int (*input_type)(const OrtCustomOp *, size_t);
  size_t (*input_count)(const OrtCustomOp *);
  int (*output_type)(const OrtCustomOp *, size_t);
  size_t (*output_count)(const OrtCustomOp *);
  void (*compute)(void *, OrtKernelContext *);
  void (*destroy)(void *);
  int (*input_kind)(const OrtCustomOp *, size_t);
  int (*output_kind)(const OrtCustomOp *, size_t);
  int (*input_memory)(const OrtCustomOp *, size_t);
  int (*variadic_input_min)(const OrtCustomOp *);
  int (*variadic_input_same)(const OrtCustomOp *);
  int (*variadic_output_min)(const OrtCustomOp *);
  int (*variadic_output_same)(const OrtCustomOp *);
  OrtStatus *(*create_kernel_v2)(const OrtCustomOp *, const OrtApi *, const OrtKernelInfo *, void **);
  OrtStatus *(*compute_v2)(void *, OrtKernelContext *);
  void *infer_shapes;
  int (*since_version)(const OrtCustomOp *);
  int (*until_version)(const OrtCustomOp *);
  size_t (*may_inplace)(int **, int **);
  void (*release_inplace)(int *, int *);
  size_t (*alias_map)(int **, int **);
  void (*release_alias)(int *, int *);
};

#define ORT_CALL(api, slot, result, ...) ((result(*)(__VA_ARGS__))(api)[slot])

#define ort_create_status(api) ORT_CALL(api, 0, OrtStatus *, int, const char *)
#define ort_create_domain(api) ORT_CALL(api, 26, OrtStatus *, const char *, OrtOpDomain **)
#define ort_domain_add(api) ORT_CALL(api, 27, OrtStatus *, OrtOpDomain *, const OrtCustomOp *)
#define ort_add_domain(api) ORT_CALL(api, 28, OrtStatus *, OrtSessionOptions *, OrtOpDomain *)
#define ort_data(api) ORT_CALL(api, 51, OrtStatus *, OrtValue *, void **)
#define ort_rank(api) ORT_CALL(api, 61, OrtStatus *, const OrtShapeInfo *, size_t *)
#define ort_dims(api) ORT_CALL(api, 62, OrtStatus *, const OrtShapeInfo *, int64_t *, size_t)
#define ort_shape(api) ORT_CALL(api, 65, OrtStatus *, const OrtValue *, OrtShapeInfo **)
#define ort_attribute_float(api) ORT_CALL(api, 85, OrtStatus *, const OrtKernelInfo *, const char *, float *)
#define ort_attribute_int(api) ORT_CALL(api, 86, OrtStatus *, const OrtKernelInfo *, const char *, int64_t *)
#define ort_input_count(api) ORT_CALL(api, 88, OrtStatus *, const OrtKernelContext *, size_t *)
#define ort_input(api) ORT_CALL(api, 90, OrtStatus *, const OrtKernelContext *, size_t, const OrtValue **)
#define ort_output(api) \
  ORT_CALL(api, 91, OrtStatus *, OrtKernelContext *, size_t, const int64_t *, size_t, OrtValue **)
#define ort_release_status(api) ORT_CALL(api, 93, void, OrtStatus *)
#define ort_release_shape(api) ORT_CALL(api, 99, void, OrtShapeInfo *)
#define ort_parallel_for(api) \
  ORT_CALL(api, 274, OrtStatus *, const OrtKernelContext *, void (*)(void *, size_t), size_t, size_t, void *)

/* The table of functions; NULL, and the error to return, where ONNX Runtime is older than what is read of it. */
static inline const OrtApi *ort_table(const OrtApiBase *base, OrtStatus **error) {
  const OrtApi *api = base->get_api(ORT_VERSION);
  *error = api ? NULL : ort_create_status(base->get_api(1))(ORT_FAIL, "ai.dspark: onnxruntime 1.18 or newer is required");
  return api;
}

#define EXPORT __attribute__((visibility("default")))
#define TRY(call)                        \
  do {                                   \
    OrtStatus *status_ = (call);         \
    if (status_) return status_;         \
  } while (0)

#endif
