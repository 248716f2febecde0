/* Products with float weights, held as floats or exactly in 16 bits, and the embedding out of the latter. */
#include "dspark_node.h"

static OrtStatus *run_product(const Node *node, OrtKernelContext *context, size_t index, DenseMatMul op, Tensor *y) {
  const OrtApi *api = node->api;
  Tensor x;
  TRY(read_input(api, context, 0, &x));
  REQUIRE(api, x.rank > 0 && x.dims[x.rank - 1] == op.k, "ai.dspark: x must end in K elements");
  *y = x;
  y->dims[y->rank - 1] = op.n;
  TRY(make_output(api, context, index, y, &y->data));
  op.rows = elements(&x) / op.k;
  op.x = x.data;
  op.y = y->data;
  op.y_step = op.n;
  Pool pool = {run_on_runtime, api, context};
  dspark_dense_matmul(&op, &pool);
  return NULL;
}

/* ---- floats: x, weight; each operator twice, as the weight may be in bfloat16 ---- */

static int in_bfloat16(const OrtCustomOp *op, size_t i) { (void)op; return i == 1 ? ORT_BFLOAT16 : ORT_FLOAT; }

static OrtStatus *create_dense(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **out) {
  Node node = {.api = api, .bits = op->input_type == in_bfloat16 ? 16 : 32};
  if (op->output_count(op) == 2) TRY(ort_attribute_float(api)(info, "epsilon", &node.epsilon));
  return keep_node(node, out);
}

static OrtStatus *dense_product(const Node *node, OrtKernelContext *context, size_t index, Tensor *y) {
  const OrtApi *api = node->api;
  Tensor weight;
  TRY(read_input(api, context, 1, &weight));
  REQUIRE(api, weight.rank == 2 && weight.dims[1] > 0, "ai.dspark: a float weight must be [N, K]");
  DenseMatMul op = {.n = weight.dims[0], .k = weight.dims[1]};
  if (node->bits == 16)
    op.halves = weight.data;
  else
    op.weight = weight.data;
  return run_product(node, context, index, op, y);
}

static OrtStatus *compute_dense_matmul(void *kernel, OrtKernelContext *context) {
  Tensor y;
  return dense_product(kernel, context, 0, &y);
}

static OrtStatus *compute_dense_skip_norm(void *kernel, OrtKernelContext *context) {
  Tensor sum;
  TRY(dense_product(kernel, context, 1, &sum));
  return add_and_normalise(kernel, context, 2, &sum);
}

/* ---- 16 bits: x or ids, codes, scales ---- */

static OrtStatus *create_int16(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **out) {
  Node node = {.api = api};
  TRY(ort_attribute_int(api)(info, "K", &node.k));
  TRY(ort_attribute_int(api)(info, "N", &node.n));
  REQUIRE(api, node.k > 0 && node.k % BLOCK == 0, "ai.dspark: K of 16-bit codes must be a positive multiple of 32");
  REQUIRE(api, node.n > 0, "ai.dspark: N of 16-bit codes must be positive");
  if (op->output_count(op) == 2) TRY(ort_attribute_float(api)(info, "epsilon", &node.epsilon));
  return keep_node(node, out);
}

static OrtStatus *read_int16(const Node *node, OrtKernelContext *context, Int16Matrix *weight) {
  const OrtApi *api = node->api;
  Tensor codes, scales;
  TRY(read_input(api, context, 1, &codes));
  TRY(read_input(api, context, 2, &scales));
  int64_t columns = (node->n + 1) / 2 * 2;
  REQUIRE(api, codes.rank == 4 && codes.dims[2] == 2 && codes.dims[3] == 8 && elements(&codes) == columns * node->k,
          "ai.dspark: 16-bit codes must be [N/2, K/8, 2, 8]");
  REQUIRE(api, scales.rank == 3 && scales.dims[2] == 2 && elements(&scales) == columns * (node->k / BLOCK),
          "ai.dspark: scales of 16-bit codes must be [N/2, K/32, 2]");
  *weight = (Int16Matrix){node->k, node->n, codes.data, scales.data};
  return NULL;
}

static OrtStatus *int16_product(const Node *node, OrtKernelContext *context, size_t index, Tensor *y) {
  Int16Matrix weight;
  TRY(read_int16(node, context, &weight));
  DenseMatMul op = {.n = weight.n, .k = weight.k, .packed = weight};
  return run_product(node, context, index, op, y);
}

static OrtStatus *compute_int16_matmul(void *kernel, OrtKernelContext *context) {
  Tensor y;
  return int16_product(kernel, context, 0, &y);
}

static OrtStatus *compute_int16_skip_norm(void *kernel, OrtKernelContext *context) {
  Tensor sum;
  TRY(int16_product(kernel, context, 1, &sum));
  return add_and_normalise(kernel, context, 3, &sum);
}

static OrtStatus *compute_int16_gather(void *kernel, OrtKernelContext *context) {
  const Node *node = kernel;
  Int16Gather op;
  TRY(read_int16(node, context, &op.weight));
  TRY(read_ids(node, context, &op.ids, &op.rows, &op.y));
  Pool pool = {run_on_runtime, node->api, context};
  dspark_int16_gather(&op, &pool);
  return NULL;
}

/* ---- their descriptions ---- */

static const char *dense_matmul_name(const OrtCustomOp *op) { (void)op; return "DenseMatMul"; }
static const char *dense_skip_norm_name(const OrtCustomOp *op) { (void)op; return "DenseMatMulSkipNorm"; }
static const char *int16_matmul_name(const OrtCustomOp *op) { (void)op; return "Int16MatMul"; }
static const char *int16_skip_norm_name(const OrtCustomOp *op) { (void)op; return "Int16MatMulSkipNorm"; }
static const char *int16_gather_name(const OrtCustomOp *op) { (void)op; return "Int16Gather"; }
static size_t three(const OrtCustomOp *op) { (void)op; return 3; }
static size_t five(const OrtCustomOp *op) { (void)op; return 5; }
static int int16_type(const OrtCustomOp *op, size_t i) { (void)op; return i == 1 ? ORT_INT16 : ORT_FLOAT; }
static int int16_gather_type(const OrtCustomOp *op, size_t i) { return i == 0 ? ORT_INT64 : int16_type(op, i); }

static const OrtCustomOp operators[] = {
    {SHARED, .name = dense_matmul_name, .create_kernel_v2 = create_dense, .compute_v2 = compute_dense_matmul,
     .input_type = floats, .input_kind = required, .input_count = two, .output_count = one},
    {SHARED, .name = dense_matmul_name, .create_kernel_v2 = create_dense, .compute_v2 = compute_dense_matmul,
     .input_type = in_bfloat16, .input_kind = required, .input_count = two, .output_count = one},
    {SHARED, .name = dense_skip_norm_name, .create_kernel_v2 = create_dense, .compute_v2 = compute_dense_skip_norm,
     .input_type = floats, .input_kind = required, .input_count = four, .output_count = two},
    {SHARED, .name = dense_skip_norm_name, .create_kernel_v2 = create_dense, .compute_v2 = compute_dense_skip_norm,
     .input_type = in_bfloat16, .input_kind = required, .input_count = four, .output_count = two},
    {SHARED, .name = int16_matmul_name, .create_kernel_v2 = create_int16, .compute_v2 = compute_int16_matmul,
     .input_type = int16_type, .input_kind = required, .input_count = three, .output_count = one},
    {SHARED, .name = int16_skip_norm_name, .create_kernel_v2 = create_int16, .compute_v2 = compute_int16_skip_norm,
     .input_type = int16_type, .input_kind = required, .input_count = five, .output_count = two},
    {SHARED, .name = int16_gather_name, .create_kernel_v2 = create_int16, .compute_v2 = compute_int16_gather,
     .input_type = int16_gather_type, .input_kind = required, .input_count = three, .output_count = one},
};

OperatorList dspark_dense_operators(void) {
  return (OperatorList){operators, sizeof operators / sizeof *operators};
}
