/* What the operators have in common on ONNX Runtime's side: tensors, nodes, and the fields of a description. */
#ifndef DSPARK_NODE_H
#define DSPARK_NODE_H

#include "dspark_cpu.h"
#include "dspark_ort.h"

#include <stdlib.h>

#define REQUIRE(api, condition, message) \
  if (!(condition)) return ort_create_status(api)(ORT_INVALID_ARGUMENT, message)

enum { MAX_RANK = 8 };

typedef struct {
  void *data; /* NULL: an absent optional input */
  size_t rank;
  int64_t dims[MAX_RANK];
} Tensor;

/* One node: the runtime's table and the node's attributes. */
typedef struct {
  const OrtApi *api;
  int64_t bits, k, n;    /* a matrix: those of its weights, and its sizes */
  float epsilon;         /* of a normalisation */
  float scale, softcap;  /* VerifyAttention */
  int64_t window, heads, kv_heads;
} Node;

static inline void run_on_runtime(const Pool *pool, void (*body)(void *, size_t), size_t count, void *argument) {
  const OrtApi *api = pool->api;
  OrtStatus *status = ort_parallel_for(api)(pool->context, body, count, count, argument);
  if (!status) return;
  ort_release_status(api)(status);
  for (size_t i = 0; i < count; i++) body(argument, i);
}

static inline OrtStatus *read_tensor(const OrtApi *api, const OrtValue *value, Tensor *tensor) {
  OrtShapeInfo *shape = NULL;
  TRY(ort_data(api)((OrtValue *)value, &tensor->data));
  TRY(ort_shape(api)(value, &shape));
  OrtStatus *status = ort_rank(api)(shape, &tensor->rank);
  if (!status && tensor->rank <= MAX_RANK) status = ort_dims(api)(shape, tensor->dims, tensor->rank);
  ort_release_shape(api)(shape);
  if (status) return status;
  REQUIRE(api, tensor->rank <= MAX_RANK, "ai.dspark: a tensor has more than 8 dimensions");
  return NULL;
}

static inline OrtStatus *read_input(const OrtApi *api, const OrtKernelContext *context, size_t index, Tensor *tensor) {
  size_t count = 0;
  const OrtValue *value = NULL;
  tensor->data = NULL;
  tensor->rank = 0;
  TRY(ort_input_count(api)(context, &count));
  if (index < count) TRY(ort_input(api)(context, index, &value));
  return value ? read_tensor(api, value, tensor) : NULL;
}

static inline OrtStatus *make_output(const OrtApi *api, OrtKernelContext *context, size_t index, const Tensor *shape,
                                     void **data) {
  OrtValue *value = NULL;
  TRY(ort_output(api)(context, index, shape->dims, shape->rank, &value));
  return ort_data(api)(value, data);
}

static inline int64_t elements(const Tensor *tensor) {
  int64_t count = 1;
  for (size_t i = 0; i < tensor->rank; i++) count *= tensor->dims[i];
  return count;
}

static inline OrtStatus *keep_node(Node node, void **out) {
  Node *kept = malloc(sizeof node);
  REQUIRE(node.api, kept, "ai.dspark: out of memory");
  *kept = node;
  *out = kept;
  return NULL;
}

static inline OrtStatus *create_plain(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **out) {
  (void)op, (void)info;
  return keep_node((Node){.api = api}, out);
}

static inline const char *on_cpu(const OrtCustomOp *op) { (void)op; return NULL; }
static inline size_t one(const OrtCustomOp *op) { (void)op; return 1; }
static inline size_t two(const OrtCustomOp *op) { (void)op; return 2; }
static inline size_t four(const OrtCustomOp *op) { (void)op; return 4; }
static inline int floats(const OrtCustomOp *op, size_t i) { (void)op, (void)i; return ORT_FLOAT; }
static inline int required(const OrtCustomOp *op, size_t i) { (void)op, (void)i; return ORT_REQUIRED; }
static inline int default_memory(const OrtCustomOp *op, size_t i) { (void)op, (void)i; return 0; }
static inline int version_one(const OrtCustomOp *op) { (void)op; return 1; }

#define SHARED                                                                                              \
  .version = ORT_VERSION, .provider = on_cpu, .output_type = floats, .output_kind = required, .destroy = free, \
  .input_memory = default_memory, .variadic_input_min = version_one, .variadic_input_same = version_one,      \
  .variadic_output_min = version_one, .variadic_output_same = version_one, .since_version = version_one,      \
  .until_version = version_one

/* The operators of a file. */
typedef struct {
  const OrtCustomOp *first;
  size_t count;
} OperatorList;

/* After a product in output 1: inputs `first` and `first + 1` are skip and gain, output 0 is y. */
OrtStatus *add_and_normalise(const Node *node, OrtKernelContext *context, size_t first, const Tensor *sum);

/* Input 0 are ids, all within 0 .. N - 1; output 0 is a row of K elements for each. */
OrtStatus *read_ids(const Node *node, OrtKernelContext *context, const int64_t **ids, int64_t *rows, float **y);

OperatorList dspark_dense_operators(void);
OperatorList dspark_product_operators(void);
OperatorList dspark_attention_operators(void);

#endif
