/* Operators that work on rows one by one: products with blocks, the embedding, the gated activation. */
#include "dspark_node.h"

OrtStatus *add_and_normalise(const Node *node, OrtKernelContext *context, size_t first, const Tensor *sum) {
  const OrtApi *api = node->api;
  Tensor skip, gain;
  void *y;
  TRY(read_input(api, context, first, &skip));
  TRY(read_input(api, context, first + 1, &gain));
  int64_t n = sum->dims[sum->rank - 1];
  REQUIRE(api, n > 0, "ai.dspark: N of a normalised product must be positive");
  int same = skip.rank == sum->rank;
  for (size_t i = 0; same && i < sum->rank; i++) same = skip.dims[i] == sum->dims[i];
  REQUIRE(api, same, "ai.dspark: skip must have the shape of the product");
  REQUIRE(api, gain.rank == 1 && gain.dims[0] == n, "ai.dspark: gain must be [N]");
  TRY(make_output(api, context, 0, sum, &y));
  SkipNorm op = {elements(sum) / n, n, skip.data, gain.data, node->epsilon, sum->data, y};
  Pool pool = {run_on_runtime, api, context};
  dspark_skip_norm(&op, &pool);
  return NULL;
}

/* ---- interleaved products and the embedding: x or ids, then the blocks ---- */

static OrtStatus *create_interleaved(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **out) {
  Node node = {.api = api};
  TRY(ort_attribute_int(api)(info, "bits", &node.bits));
  TRY(ort_attribute_int(api)(info, "K", &node.k));
  TRY(ort_attribute_int(api)(info, "N", &node.n));
  REQUIRE(api, node.bits == 4 || node.bits == 8, "ai.dspark: bits of an interleaved matrix must be 4 or 8");
  REQUIRE(api, node.k > 0 && node.k % BLOCK == 0,
          "ai.dspark: K of an interleaved matrix must be a positive multiple of 32");
  REQUIRE(api, node.n > 0, "ai.dspark: N of an interleaved matrix must be positive");
  if (op->output_count(op) == 2) TRY(ort_attribute_float(api)(info, "epsilon", &node.epsilon));
  return keep_node(node, out);
}

static OrtStatus *read_interleaved(const Node *node, OrtKernelContext *context, Interleaved *weight) {
  const OrtApi *api = node->api;
  Tensor codes, scales, mins;
  TRY(read_input(api, context, 1, &codes));
  TRY(read_input(api, context, 2, &scales));
  TRY(read_input(api, context, 3, &mins));
  int64_t factors = (node->n + INTERLEAVE - 1) / INTERLEAVE * INTERLEAVE * (node->k / BLOCK);
  REQUIRE(api, codes.rank == 5 && codes.dims[2] == node->bits && codes.dims[3] == INTERLEAVE &&
                   elements(&codes) == factors * 4 * node->bits,
          "ai.dspark: interleaved qweight must be [N/16, K/32, bits, 16, 4]");
  REQUIRE(api, scales.rank == 3 && scales.dims[2] == INTERLEAVE && elements(&scales) == factors,
          "ai.dspark: interleaved scales must be [N/16, K/32, 16]");
  REQUIRE(api, !mins.data || (mins.rank == 3 && mins.dims[2] == INTERLEAVE && elements(&mins) == factors),
          "ai.dspark: interleaved mins must be [N/16, K/32, 16]");
  *weight = (Interleaved){node->k, node->n, (int)node->bits, codes.data, scales.data, mins.data};
  return NULL;
}

/* Output `index` receives the product. */
static OrtStatus *interleaved_product(const Node *node, OrtKernelContext *context, size_t index, Tensor *y) {
  const OrtApi *api = node->api;
  Tensor x;
  Interleaved weight;
  TRY(read_input(api, context, 0, &x));
  TRY(read_interleaved(node, context, &weight));
  REQUIRE(api, x.rank > 0 && x.dims[x.rank - 1] == node->k, "ai.dspark: x must end in K elements");
  *y = x;
  y->dims[y->rank - 1] = node->n;
  TRY(make_output(api, context, index, y, &y->data));
  InterleavedMatMul op = {.weight = weight, .rows = elements(&x) / node->k, .x = x.data, .y = y->data};
  Pool pool = {run_on_runtime, api, context};
  REQUIRE(api, dspark_interleaved_matmul(&op, &pool) == 0, "ai.dspark: out of memory for an interleaved product");
  return NULL;
}

static OrtStatus *compute_interleaved_matmul(void *kernel, OrtKernelContext *context) {
  Tensor y;
  return interleaved_product(kernel, context, 0, &y);
}

static OrtStatus *compute_interleaved_skip_norm(void *kernel, OrtKernelContext *context) {
  Tensor sum;
  TRY(interleaved_product(kernel, context, 1, &sum));
  return add_and_normalise(kernel, context, 4, &sum);
}

OrtStatus *read_ids(const Node *node, OrtKernelContext *context, const int64_t **ids, int64_t *rows, float **y) {
  const OrtApi *api = node->api;
  Tensor tensor;
  TRY(read_input(api, context, 0, &tensor));
  REQUIRE(api, tensor.rank < MAX_RANK, "ai.dspark: ids has too many dimensions");
  *ids = tensor.data;
  *rows = elements(&tensor);
  for (int64_t i = 0; i < *rows; i++)
    REQUIRE(api, (*ids)[i] >= 0 && (*ids)[i] < node->n, "ai.dspark: an id is not within 0 .. N - 1");
  tensor.dims[tensor.rank++] = node->k;
  return make_output(api, context, 0, &tensor, (void **)y);
}

static OrtStatus *compute_interleaved_gather(void *kernel, OrtKernelContext *context) {
  const Node *node = kernel;
  InterleavedGather op;
  TRY(read_interleaved(node, context, &op.weight));
  TRY(read_ids(node, context, &op.ids, &op.rows, &op.y));
  Pool pool = {run_on_runtime, node->api, context};
  dspark_interleaved_gather(&op, &pool);
  return NULL;
}

static const char *interleaved_matmul_name(const OrtCustomOp *op) { (void)op; return "InterleavedMatMul"; }
static const char *interleaved_gather_name(const OrtCustomOp *op) { (void)op; return "InterleavedGather"; }
static const char *interleaved_skip_norm_name(const OrtCustomOp *op) { (void)op; return "InterleavedMatMulSkipNorm"; }
static size_t six(const OrtCustomOp *op) { (void)op; return 6; }
static int interleaved_kind(const OrtCustomOp *op, size_t i) { (void)op; return i == 3 ? ORT_OPTIONAL : ORT_REQUIRED; }
static int interleaved_matmul_type(const OrtCustomOp *op, size_t i) { (void)op; return i == 1 ? ORT_UINT8 : ORT_FLOAT; }
static int interleaved_gather_type(const OrtCustomOp *op, size_t i) {
  return i == 0 ? ORT_INT64 : interleaved_matmul_type(op, i);
}

/* ---- SwiGlu ---- */

static OrtStatus *compute_swiglu(void *kernel, OrtKernelContext *context) {
  const OrtApi *api = ((const Node *)kernel)->api;
  Tensor x, y;
  TRY(read_input(api, context, 0, &x));
  REQUIRE(api, x.rank > 0 && x.dims[x.rank - 1] % 2 == 0, "ai.dspark::SwiGlu: x must end in an even number of elements");
  y = x;
  y.dims[y.rank - 1] /= 2;
  TRY(make_output(api, context, 0, &y, &y.data));
  int64_t width = y.dims[y.rank - 1];
  SwiGlu op = {.rows = width ? elements(&y) / width : 0, .width = width, .x = x.data, .y = y.data};
  Pool pool = {run_on_runtime, api, context};
  dspark_swiglu(&op, &pool);
  return NULL;
}

static const char *swiglu_name(const OrtCustomOp *op) { (void)op; return "SwiGlu"; }

/* ---- their descriptions ---- */

static const OrtCustomOp operators[] = {
    {SHARED, .name = interleaved_matmul_name, .create_kernel_v2 = create_interleaved,
     .compute_v2 = compute_interleaved_matmul, .input_type = interleaved_matmul_type, .input_kind = interleaved_kind,
     .input_count = four, .output_count = one},
    {SHARED, .name = interleaved_skip_norm_name, .create_kernel_v2 = create_interleaved,
     .compute_v2 = compute_interleaved_skip_norm, .input_type = interleaved_matmul_type,
     .input_kind = interleaved_kind, .input_count = six, .output_count = two},
    {SHARED, .name = interleaved_gather_name, .create_kernel_v2 = create_interleaved,
     .compute_v2 = compute_interleaved_gather, .input_type = interleaved_gather_type, .input_kind = interleaved_kind,
     .input_count = four, .output_count = one},
    {SHARED, .name = swiglu_name, .create_kernel_v2 = create_plain, .compute_v2 = compute_swiglu,
     .input_type = floats, .input_kind = required, .input_count = one, .output_count = one},
};

OperatorList dspark_product_operators(void) {
  return (OperatorList){operators, sizeof operators / sizeof *operators};
}
