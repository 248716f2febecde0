/* Operators over the KV pools. */
#include "dspark_node.h"

#include <string.h>

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

/* The rows of every sequence lie in order within the rows and have room behind its past. */
static OrtStatus *check_rows(const OrtApi *api, const VerifyAttention *a) {
  REQUIRE(api, !a->offsets || (a->batch == 1 && a->offsets[0] == 0 && a->offsets[a->slots] == a->rows),
          "ai.dspark: row_offsets must go from 0 to the rows of a batch of 1");
  for (int64_t slot = 0; slot < a->slots; slot++) {
    int64_t rows = dspark_first_row(a, slot + 1) - dspark_first_row(a, slot);
    REQUIRE(api, rows >= 0, "ai.dspark: row_offsets must not fall");
    REQUIRE(api, dspark_has_room(a, slot),
            "ai.dspark: past_lengths plus the new rows must lie within the pool, or the window within a ring");
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
                           .sinks = in[3].data, .tree = in[4].data, .offsets = in[5].data, .scale = node->scale,
                           .softcap = node->softcap, .window = node->window};
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

/* ---- their descriptions ---- */

static const OrtCustomOp operators[] = {
    {SHARED, .name = attention_name, .create_kernel_v2 = create_attention, .compute_v2 = compute_attention,
     .input_type = attention_type, .input_kind = attention_kind, .input_count = attention_inputs,
     .output_count = attention_outputs},
    {SHARED, .name = qkv_name, .create_kernel_v2 = create_qkv, .compute_v2 = compute_qkv,
     .input_type = attention_type, .input_kind = attention_kind, .input_count = attention_inputs,
     .output_count = attention_outputs},
};

OperatorList dspark_attention_operators(void) {
  return (OperatorList){operators, sizeof operators / sizeof *operators};
}
