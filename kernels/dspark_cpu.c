/* Registers the CPU kernels of the `ai.dspark` domain with ONNX Runtime (see kernels/native.py for the build). */
#include "dspark_cpu.h"
#include "dspark_ort.h"

#include <stdlib.h>
#include <string.h>

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
  int64_t bits, k, n;    /* an interleaved matrix */
  float scale, softcap;  /* VerifyAttention */
  int64_t window, heads, kv_heads;
} Node;

static void run_on_runtime(const Pool *pool, void (*body)(void *, size_t), size_t count, void *argument) {
  const OrtApi *api = pool->api;
  OrtStatus *status = ort_parallel_for(api)(pool->context, body, count, count, argument);
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

static OrtStatus *keep_node(Node node, void **out) {
  Node *kept = malloc(sizeof node);
  REQUIRE(node.api, kept, "ai.dspark: out of memory");
  *kept = node;
  *out = kept;
  return NULL;
}

/* ---- InterleavedMatMul, InterleavedGather: x or ids, then the blocks ---- */

static OrtStatus *create_interleaved(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **out) {
  (void)op;
  Node node = {.api = api};
  TRY(ort_attribute_int(api)(info, "bits", &node.bits));
  TRY(ort_attribute_int(api)(info, "K", &node.k));
  TRY(ort_attribute_int(api)(info, "N", &node.n));
  REQUIRE(api, node.bits == 4 || node.bits == 8, "ai.dspark: bits of an interleaved matrix must be 4 or 8");
  REQUIRE(api, node.k > 0 && node.k % BLOCK == 0, "ai.dspark: K of an interleaved matrix must be a positive multiple of 32");
  REQUIRE(api, node.n > 0, "ai.dspark: N of an interleaved matrix must be positive");
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

static OrtStatus *compute_interleaved_matmul(void *kernel, OrtKernelContext *context) {
  const Node *node = kernel;
  const OrtApi *api = node->api;
  Tensor x, y;
  Interleaved weight;
  TRY(read_input(api, context, 0, &x));
  TRY(read_interleaved(node, context, &weight));
  REQUIRE(api, x.rank > 0 && x.dims[x.rank - 1] == node->k, "ai.dspark::InterleavedMatMul: x must end in K elements");
  y = x;
  y.dims[y.rank - 1] = node->n;
  TRY(make_output(api, context, 0, &y, &y.data));
  InterleavedMatMul op = {.weight = weight, .rows = elements(&x) / node->k, .x = x.data, .y = y.data};
  Pool pool = {run_on_runtime, api, context};
  REQUIRE(api, dspark_interleaved_matmul(&op, &pool) == 0, "ai.dspark::InterleavedMatMul: out of memory");
  return NULL;
}

static OrtStatus *compute_interleaved_gather(void *kernel, OrtKernelContext *context) {
  const Node *node = kernel;
  const OrtApi *api = node->api;
  Tensor ids, y;
  Interleaved weight;
  TRY(read_input(api, context, 0, &ids));
  TRY(read_interleaved(node, context, &weight));
  REQUIRE(api, ids.rank < MAX_RANK, "ai.dspark::InterleavedGather: ids has too many dimensions");
  InterleavedGather op = {.weight = weight, .rows = elements(&ids), .ids = ids.data};
  for (int64_t i = 0; i < op.rows; i++)
    REQUIRE(api, op.ids[i] >= 0 && op.ids[i] < node->n, "ai.dspark::InterleavedGather: an id is not within 0 .. N - 1");
  y = ids;
  y.dims[y.rank++] = node->k;
  TRY(make_output(api, context, 0, &y, &y.data));
  op.y = y.data;
  Pool pool = {run_on_runtime, api, context};
  dspark_interleaved_gather(&op, &pool);
  return NULL;
}

static const char *interleaved_matmul_name(const OrtCustomOp *op) { (void)op; return "InterleavedMatMul"; }
static const char *interleaved_gather_name(const OrtCustomOp *op) { (void)op; return "InterleavedGather"; }
static size_t four(const OrtCustomOp *op) { (void)op; return 4; }
static int interleaved_kind(const OrtCustomOp *op, size_t i) { (void)op; return i == 3 ? ORT_OPTIONAL : ORT_REQUIRED; }
static int interleaved_matmul_type(const OrtCustomOp *op, size_t i) { (void)op; return i == 1 ? ORT_UINT8 : ORT_FLOAT; }
static int interleaved_gather_type(const OrtCustomOp *op, size_t i) {
  return i == 0 ? ORT_INT64 : interleaved_matmul_type(op, i);
}

/* ---- DenseMatMul ---- */

static OrtStatus *create_plain(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **out) {
  (void)op, (void)info;
  return keep_node((Node){.api = api}, out);
}

static OrtStatus *compute_dense_matmul(void *kernel, OrtKernelContext *context) {
  const OrtApi *api = ((const Node *)kernel)->api;
  Tensor x, weight, y;
  TRY(read_input(api, context, 0, &x));
  TRY(read_input(api, context, 1, &weight));
  REQUIRE(api, weight.rank == 2 && weight.dims[1] > 0, "ai.dspark::DenseMatMul: weight must be [N, K]");
  int64_t n = weight.dims[0], k = weight.dims[1];
  REQUIRE(api, x.rank > 0 && x.dims[x.rank - 1] == k, "ai.dspark::DenseMatMul: x must end in K elements");
  y = x;
  y.dims[y.rank - 1] = n;
  TRY(make_output(api, context, 0, &y, &y.data));
  DenseMatMul op = {.rows = elements(&x) / k, .k = k, .n = n, .x = x.data, .weight = weight.data, .y = y.data};
  Pool pool = {run_on_runtime, api, context};
  dspark_dense_matmul(&op, &pool);
  return NULL;
}

static const char *dense_matmul_name(const OrtCustomOp *op) { (void)op; return "DenseMatMul"; }
static size_t two(const OrtCustomOp *op) { (void)op; return 2; }

/* ---- VerifyAttention ---- */

enum { IN_Q, IN_K, IN_V, IN_K_POOL, IN_V_POOL, IN_PAST, IN_SINKS, IN_TREE, IN_OFFSETS, ATTENTION_INPUTS };

static Node attention_node(const OrtApi *api, const OrtKernelInfo *info) {
  Node node = {.api = api, .scale = 1.0f, .window = -1};
  OrtStatus *absent[] = {ort_attribute_float(api)(info, "scale", &node.scale),
                         ort_attribute_float(api)(info, "softcap", &node.softcap),
                         ort_attribute_int(api)(info, "window", &node.window)};
  for (int i = 0; i < 3; i++)
    if (absent[i]) ort_release_status(api)(absent[i]); /* the default stays */
  return node;
}

static OrtStatus *create_attention(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **out) {
  (void)op;
  return keep_node(attention_node(api, info), out);
}

static int has_shape(const Tensor *t, int64_t a, int64_t b, int64_t c, int64_t d) {
  return t->rank == 4 && t->dims[0] == a && t->dims[1] == b && t->dims[2] == c && t->dims[3] == d;
}

/* The rows of every sequence lie in order within the rows and fit behind its past. */
static OrtStatus *check_rows(const OrtApi *api, const VerifyAttention *a) {
  REQUIRE(api, !a->offsets || (a->batch == 1 && a->offsets[0] == 0 && a->offsets[a->slots] == a->rows),
          "ai.dspark: row_offsets must go from 0 to the rows of a batch of 1");
  for (int64_t slot = 0; slot < a->slots; slot++) {
    int64_t rows = dspark_first_row(a, slot + 1) - dspark_first_row(a, slot);
    REQUIRE(api, rows >= 0, "ai.dspark: row_offsets must not fall");
    REQUIRE(api, a->past[slot] >= 0 && a->past[slot] + rows <= a->pool_rows,
            "ai.dspark: past_lengths plus the new rows must lie within the pool");
  }
  return NULL;
}

/* `in` starts with the pools: k_pool, v_pool, past_lengths, sinks, tree_mask, row_offsets. */
static OrtStatus *check_pools(const OrtApi *api, const Tensor *in, const VerifyAttention *a) {
  REQUIRE(api, a->kv_heads > 0 && a->heads > 0 && a->heads % a->kv_heads == 0,
          "ai.dspark: query heads must be a multiple of KV heads");
  REQUIRE(api, a->dim > 0 && a->dim <= MAX_HEAD, "ai.dspark: the head size must be 1 to 512");
  REQUIRE(api, has_shape(&in[0], a->slots, a->kv_heads, a->pool_rows, a->dim) &&
                   has_shape(&in[1], a->slots, a->kv_heads, a->pool_rows, a->dim),
          "ai.dspark: the pools must be [batch, kv_heads, pool_rows, head_dim]");
  REQUIRE(api, a->offsets || a->slots == a->batch, "ai.dspark: the pools must be [batch, kv_heads, pool_rows, head_dim]");
  REQUIRE(api, elements(&in[2]) == a->slots, "ai.dspark: past_lengths must be [batch]");
  REQUIRE(api, !a->offsets || elements(&in[5]) == a->slots + 1, "ai.dspark: row_offsets must be [slots + 1]");
  REQUIRE(api, !a->sinks || elements(&in[3]) == a->heads, "ai.dspark: sinks must be [heads]");
  REQUIRE(api, !a->tree || elements(&in[4]) == a->batch * a->rows * a->rows,
          "ai.dspark: tree_mask must be [batch, 1, rows, rows]");
  return check_rows(api, a);
}

static void keep_pool(float *out, const Tensor *in) {
  if (out != in->data) memcpy(out, in->data, (size_t)elements(in) * sizeof(float));
}

/* Outputs 1 and 2: the pools, the very memory of the inputs where it is bound so, else copies. */
static OrtStatus *share_pools(const OrtApi *api, OrtKernelContext *context, const Tensor *in, VerifyAttention *a) {
  void *k_pool, *v_pool;
  TRY(make_output(api, context, 1, &in[0], &k_pool));
  TRY(make_output(api, context, 2, &in[1], &v_pool));
  keep_pool(k_pool, &in[0]);
  keep_pool(v_pool, &in[1]);
  a->k_pool = k_pool, a->v_pool = v_pool;
  return NULL;
}

static VerifyAttention attention_of(const Node *node, const Tensor *in) {
  return (VerifyAttention){.slots = in[0].dims[0], .pool_rows = in[0].dims[2], .past = in[2].data,
                           .sinks = in[3].data, .tree = in[4].data, .offsets = in[5].data, .scale = node->scale, .softcap = node->softcap, .window = node->window};
}

static OrtStatus *compute_attention(void *kernel, OrtKernelContext *context) {
  const Node *node = kernel;
  const OrtApi *api = node->api;
  Tensor in[ATTENTION_INPUTS];
  void *o;
  for (size_t i = 0; i < ATTENTION_INPUTS; i++) TRY(read_input(api, context, i, &in[i]));
  REQUIRE(api, in[IN_Q].rank == 4 && in[IN_K].rank == 4 && in[IN_K_POOL].rank == 4,
          "ai.dspark::VerifyAttention: q, k and the pools must have 4 dimensions");
  const int64_t *q = in[IN_Q].dims;
  VerifyAttention a = attention_of(node, in + IN_K_POOL);
  a.batch = q[0], a.heads = q[1], a.rows = q[2], a.dim = q[3], a.kv_heads = in[IN_K].dims[1];
  a.q = in[IN_Q].data, a.k = in[IN_K].data, a.v = in[IN_V].data;
  a.q_row = a.o_row = a.dim, a.q_head = a.o_head = a.rows * a.dim, a.q_batch = a.o_batch = a.heads * a.q_head;
  REQUIRE(api, has_shape(&in[IN_K], a.batch, a.kv_heads, a.rows, a.dim) &&
                   has_shape(&in[IN_V], a.batch, a.kv_heads, a.rows, a.dim),
          "ai.dspark::VerifyAttention: k and v must be [batch, kv_heads, rows, head_dim]");
  TRY(check_pools(api, in + IN_K_POOL, &a));
  TRY(make_output(api, context, 0, &in[IN_Q], &o));
  TRY(share_pools(api, context, in + IN_K_POOL, &a));
  a.o = o;
  Pool pool = {run_on_runtime, api, context};
  REQUIRE(api, dspark_verify_attention(&a, &pool) == 0, "ai.dspark::VerifyAttention: out of memory");
  return NULL;
}

static const char *attention_name(const OrtCustomOp *op) { (void)op; return "VerifyAttention"; }
static size_t attention_inputs(const OrtCustomOp *op) { (void)op; return ATTENTION_INPUTS; }
static size_t attention_outputs(const OrtCustomOp *op) { (void)op; return 3; }
static int attention_kind(const OrtCustomOp *op, size_t i) { (void)op; return i >= IN_SINKS ? ORT_OPTIONAL : ORT_REQUIRED; }
static int attention_type(const OrtCustomOp *op, size_t i) {
  (void)op;
  return i == IN_PAST || i == IN_OFFSETS ? ORT_INT32 : i == IN_TREE ? ORT_BOOL : ORT_FLOAT;
}

/* ---- QkvAttention: qkv, cos, sin, then from the pools on as VerifyAttention ---- */

static OrtStatus *create_qkv(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **out) {
  (void)op;
  Node node = attention_node(api, info);
  TRY(ort_attribute_int(api)(info, "heads", &node.heads));
  TRY(ort_attribute_int(api)(info, "kv_heads", &node.kv_heads));
  return keep_node(node, out);
}

static OrtStatus *compute_qkv(void *kernel, OrtKernelContext *context) {
  const Node *node = kernel;
  const OrtApi *api = node->api;
  Tensor in[ATTENTION_INPUTS], shape;
  void *o;
  for (size_t i = 0; i < ATTENTION_INPUTS; i++) TRY(read_input(api, context, i, &in[i]));
  const int64_t *qkv = in[0].dims, *cos = in[1].dims;
  REQUIRE(api, in[0].rank == 3 && in[1].rank == 3 && in[2].rank == 3 && in[IN_K_POOL].rank == 4,
          "ai.dspark::QkvAttention: qkv, cos and sin must have 3 dimensions, the pools 4");
  VerifyAttention a = attention_of(node, in + IN_K_POOL);
  a.batch = qkv[0], a.rows = qkv[1], a.heads = node->heads, a.kv_heads = node->kv_heads, a.dim = in[IN_K_POOL].dims[3];
  REQUIRE(api, qkv[2] == (a.heads + 2 * a.kv_heads) * a.dim,
          "ai.dspark::QkvAttention: qkv must be [batch, rows, (heads + 2 kv_heads) head_dim]");
  REQUIRE(api, cos[0] == a.batch && cos[1] == a.rows && 2 * cos[2] <= a.dim && elements(&in[2]) == elements(&in[1]),
          "ai.dspark::QkvAttention: cos and sin must be [batch, rows, at most head_dim / 2]");
  TRY(check_pools(api, in + IN_K_POOL, &a));
  shape = in[0];
  shape.dims[2] = a.heads * a.dim;
  TRY(make_output(api, context, 0, &shape, &o));
  TRY(share_pools(api, context, in + IN_K_POOL, &a));
  a.o = o;
  QkvAttention op = {a, in[0].data, in[1].data, in[2].data, cos[2]};
  Pool pool = {run_on_runtime, api, context};
  REQUIRE(api, dspark_qkv_attention(&op, &pool) == 0, "ai.dspark::QkvAttention: out of memory");
  return NULL;
}

static const char *qkv_name(const OrtCustomOp *op) { (void)op; return "QkvAttention"; }

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
    {SHARED, .name = interleaved_matmul_name, .create_kernel_v2 = create_interleaved,
     .compute_v2 = compute_interleaved_matmul, .input_type = interleaved_matmul_type, .input_kind = interleaved_kind,
     .input_count = four, .output_count = one},
    {SHARED, .name = interleaved_gather_name, .create_kernel_v2 = create_interleaved,
     .compute_v2 = compute_interleaved_gather, .input_type = interleaved_gather_type, .input_kind = interleaved_kind,
     .input_count = four, .output_count = one},
    {SHARED, .name = dense_matmul_name, .create_kernel_v2 = create_plain, .compute_v2 = compute_dense_matmul,
     .input_type = floats, .input_kind = required, .input_count = two, .output_count = one},
    {SHARED, .name = attention_name, .create_kernel_v2 = create_attention, .compute_v2 = compute_attention,
     .input_type = attention_type, .input_kind = attention_kind, .input_count = attention_inputs,
     .output_count = attention_outputs},
    {SHARED, .name = qkv_name, .create_kernel_v2 = create_qkv, .compute_v2 = compute_qkv,
     .input_type = attention_type, .input_kind = attention_kind, .input_count = attention_inputs,
     .output_count = attention_outputs},
    {SHARED, .name = swiglu_name, .create_kernel_v2 = create_plain, .compute_v2 = compute_swiglu,
     .input_type = floats, .input_kind = required, .input_count = one, .output_count = one},
};

/* Whether the library can serve this processor; asked before it is registered. */
/* Rises whenever an operator is added or its results change: see REVISION in native.py. */
EXPORT int dspark_cpu_revision(void) { return 5; }

EXPORT int dspark_cpu_supported(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

EXPORT OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
  OrtStatus *error;
  const OrtApi *api = ort_table(base, &error);
  if (!api) return error;
  OrtOpDomain *domain = NULL;
  REQUIRE(api, dspark_cpu_supported(), "ai.dspark: this processor lacks AVX2 or FMA");
  TRY(ort_create_domain(api)("ai.dspark", &domain)); /* never released: sessions refer to it */
  for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) TRY(ort_domain_add(api)(domain, &operators[i]));
  return ort_add_domain(api)(options, domain);
}
