/* Registers the CPU kernels of the `ai.dspark` domain with ONNX Runtime (see kernels/native.py for the build). */
#include "dspark_cpu.h"
#include "dspark_ort.h"

#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))
#define TRY(call)                        \
  do {                                   \
    OrtStatus *status_ = (call);         \
    if (status_) return status_;         \
  } while (0)
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
  int64_t bits, k, n;
} Node;

static void run_on_runtime(const Pool *pool, void (*body)(void *, size_t), size_t count, void *argument) {
  const OrtApi *api = pool->api;
  OrtStatus *status = ort_parallel_for(api)(pool->context, body, count, 0, argument);
  if (!status) return;
  ort_release_status(api)(status);
  for (size_t i = 0; i < count; i++) body(argument, i);
}

static OrtStatus *read_tensor(const OrtApi *api, const OrtValue *value, Tensor *tensor) {
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

static OrtStatus *read_input(const OrtApi *api, const OrtKernelContext *context, size_t index, Tensor *tensor) {
  size_t count = 0;
  const OrtValue *value = NULL;
  tensor->data = NULL;
  tensor->rank = 0;
  TRY(ort_input_count(api)(context, &count));
  if (index < count) TRY(ort_input(api)(context, index, &value));
  return value ? read_tensor(api, value, tensor) : NULL;
}

static OrtStatus *make_output(const OrtApi *api, OrtKernelContext *context, size_t index, const Tensor *shape,
                              void **data) {
  OrtValue *value = NULL;
  TRY(ort_output(api)(context, index, shape->dims, shape->rank, &value));
  return ort_data(api)(value, data);
}

static int64_t elements(const Tensor *tensor) {
  int64_t count = 1;
  for (size_t i = 0; i < tensor->rank; i++) count *= tensor->dims[i];
  return count;
}

/* ---- BlockMatMul ---- */

static OrtStatus *create_block_matmul(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **out) {
  (void)op;
  Node node = {.api = api};
  TRY(ort_attribute_int(api)(info, "bits", &node.bits));
  TRY(ort_attribute_int(api)(info, "K", &node.k));
  TRY(ort_attribute_int(api)(info, "N", &node.n));
  REQUIRE(api, node.bits == 4 || node.bits == 8, "ai.dspark::BlockMatMul: bits must be 4 or 8");
  REQUIRE(api, node.k > 0 && node.k % BLOCK == 0, "ai.dspark::BlockMatMul: K must be a positive multiple of 32");
  REQUIRE(api, node.n > 0, "ai.dspark::BlockMatMul: N must be positive");
  Node *kept = malloc(sizeof node);
  REQUIRE(api, kept, "ai.dspark: out of memory");
  *kept = node;
  *out = kept;
  return NULL;
}

static OrtStatus *compute_block_matmul(void *kernel, OrtKernelContext *context) {
  const Node *node = kernel;
  const OrtApi *api = node->api;
  Tensor x, weight, scales, mins, y;
  TRY(read_input(api, context, 0, &x));
  TRY(read_input(api, context, 1, &weight));
  TRY(read_input(api, context, 2, &scales));
  TRY(read_input(api, context, 3, &mins));
  int64_t blocks = node->n * (node->k / BLOCK);
  REQUIRE(api, x.rank > 0 && x.dims[x.rank - 1] == node->k, "ai.dspark::BlockMatMul: x must end in K elements");
  REQUIRE(api, elements(&weight) == blocks * BLOCK / 8 * node->bits,
          "ai.dspark::BlockMatMul: qweight must be [N, K/32, 4*bits]");
  REQUIRE(api, elements(&scales) == blocks, "ai.dspark::BlockMatMul: scales must be [N, K/32]");
  REQUIRE(api, !mins.data || elements(&mins) == blocks, "ai.dspark::BlockMatMul: mins must be [N, K/32]");
  y = x;
  y.dims[y.rank - 1] = node->n;
  TRY(make_output(api, context, 0, &y, &y.data));
  BlockMatMul op = {.rows = elements(&x) / node->k, .k = node->k, .n = node->n, .bits = (int)node->bits,
                    .x = x.data, .weight = weight.data, .scales = scales.data, .mins = mins.data, .y = y.data};
  Pool pool = {run_on_runtime, api, context};
  REQUIRE(api, dspark_block_matmul(&op, dspark_cpu_level(), &pool) == 0, "ai.dspark::BlockMatMul: out of memory");
  return NULL;
}

static const char *block_matmul_name(const OrtCustomOp *op) { (void)op; return "BlockMatMul"; }
static size_t block_matmul_inputs(const OrtCustomOp *op) { (void)op; return 4; }
static int block_matmul_type(const OrtCustomOp *op, size_t i) { (void)op; return i == 1 ? ORT_UINT8 : ORT_FLOAT; }
static int block_matmul_kind(const OrtCustomOp *op, size_t i) { (void)op; return i == 3 ? ORT_OPTIONAL : ORT_REQUIRED; }

/* ---- what all operators share ---- */

static const char *on_cpu(const OrtCustomOp *op) { (void)op; return NULL; }
static size_t one(const OrtCustomOp *op) { (void)op; return 1; }
static int floats(const OrtCustomOp *op, size_t i) { (void)op, (void)i; return ORT_FLOAT; }
static int required(const OrtCustomOp *op, size_t i) { (void)op, (void)i; return ORT_REQUIRED; }
static int default_memory(const OrtCustomOp *op, size_t i) { (void)op, (void)i; return 0; }
static int version_one(const OrtCustomOp *op) { (void)op; return 1; }

#define SHARED                                                                                              \
  .version = ORT_VERSION, .provider = on_cpu, .output_type = floats, .output_kind = required, .destroy = free, \
  .input_memory = default_memory, .variadic_input_min = version_one, .variadic_input_same = version_one,      \
  .variadic_output_min = version_one, .variadic_output_same = version_one, .since_version = version_one,      \
  .until_version = version_one

static const OrtCustomOp operators[] = {
    {SHARED, .name = block_matmul_name, .create_kernel_v2 = create_block_matmul, .compute_v2 = compute_block_matmul,
     .input_type = block_matmul_type, .input_kind = block_matmul_kind, .input_count = block_matmul_inputs,
     .output_count = one},
};

EXPORT OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
  const OrtApi *api = base->get_api(ORT_VERSION);
  OrtOpDomain *domain = NULL;
  TRY(ort_create_domain(api)("ai.dspark", &domain)); /* ONNX Runtime keeps it as long as the options' sessions live */
  for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) TRY(ort_domain_add(api)(domain, &operators[i]));
  return ort_add_domain(api)(options, domain);
}
