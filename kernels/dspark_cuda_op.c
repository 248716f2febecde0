/* `ai.dspark::VerifyAttention` on ONNX Runtime's CUDA provider: launches a bundle's own compiled kernel inside the graph.
 *
 * It needs no CUDA toolkit and no headers of ONNX Runtime.  Which kernels, and how they are launched, is stated by the
 * loader in a table (see kernels/cuda_op.py, whose structures are these); a session takes the table that was stated
 * last before it registered the library.
 */
#include "dspark_ort.h"

#include <stdlib.h>

#define REQUIRE(api, condition, message) \
  if (!(condition)) return ort_create_status(api)(ORT_FAIL, "ai.dspark::VerifyAttention: " message)

#define ort_gpu_stream(api) ORT_CALL(api, 193, OrtStatus *, const OrtKernelContext *, void **)

enum { MAX_TILES = 4, MAX_HEAD_SIZES = 4, KEYS_PER_TILE = 128, NEW_ROWS = 32, MOST_PARTS = 64 };
enum { IN_Q, IN_K, IN_V, IN_K_POOL, IN_V_POOL, IN_PAST, INPUTS };

typedef int (*Launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                      void **);

/* A compiled variant: the driver's function, threads and shared memory of a block, and what it serves. */
typedef struct {
  void *function;
  int32_t threads, shared;
  int32_t rows;        /* packed query rows of a program */
  int32_t most_packed; /* packed query rows of a launch; 0: any number */
} Kernel;

typedef struct {
  int32_t head_size, n_tiles;
  Kernel tiles[MAX_TILES]; /* tried in this order */
  Kernel join;
} HeadKernels;

typedef struct {
  Launch launch;
  uint64_t parts, stats; /* device addresses of scratch */
  int64_t capacity;      /* rows times parts that the scratch holds, for the largest head */
  int32_t element_type;  /* of rows and pools */
  int32_t softcap;       /* whether the kernels bend their scores */
  int32_t multiprocessors, n_head_sizes;
  const int32_t *length; /* of the longest sequence after the coming run, on the host */
  HeadKernels heads[MAX_HEAD_SIZES];
} Table;

typedef struct {
  OrtCustomOp op; /* first, so that the one is the other */
  Table *table;
} Op;

typedef struct {
  const OrtApi *api;
  Table *table;
  float scale, softcap;
  int64_t window;
} Node;

typedef struct {
  void *data;
  int64_t dims[4];
} Tensor;

static Table *stated;

EXPORT void dspark_cuda_state(Table *table) { stated = table; }
EXPORT size_t dspark_cuda_table_size(void) { return sizeof(Table); }

static int32_t up(int64_t value, int64_t per) { return (int32_t)((value + per - 1) / per); }

/* As dsc.runtime.device_kernels.attention_parts: two programs for each multiprocessor, four tiles of keys a part. */
static int32_t count_parts(const Table *table, int64_t programs, int64_t rows) {
  int64_t wanted = up(2 * table->multiprocessors, programs), worthwhile = *table->length / (4 * KEYS_PER_TILE);
  int64_t room = table->capacity / rows;
  int64_t parts = wanted < worthwhile ? wanted : worthwhile;
  if (parts > MOST_PARTS) parts = MOST_PARTS;
  if (parts > room) parts = room;
  return parts < 1 ? 1 : (int32_t)parts;
}

static const HeadKernels *find_head(const Table *table, int64_t head_size) {
  for (int i = 0; i < table->n_head_sizes; i++)
    if (table->heads[i].head_size == head_size) return &table->heads[i];
  return NULL;
}

static const Kernel *find_tile(const HeadKernels *head, int64_t packed) {
  for (int i = 0; i < head->n_tiles; i++)
    if (!head->tiles[i].most_packed || packed <= head->tiles[i].most_packed) return &head->tiles[i];
  return NULL;
}

static OrtStatus *read_tensor(const OrtApi *api, const OrtValue *value, size_t rank, Tensor *tensor) {
  OrtShapeInfo *shape = NULL;
  size_t got = 0;
  TRY(ort_data(api)((OrtValue *)value, &tensor->data));
  TRY(ort_shape(api)(value, &shape));
  OrtStatus *status = ort_rank(api)(shape, &got);
  if (!status && got == rank) status = ort_dims(api)(shape, tensor->dims, rank);
  ort_release_shape(api)(shape);
  if (status) return status;
  REQUIRE(api, got == rank, "an input has the wrong number of dimensions");
  return NULL;
}

static OrtStatus *make_output(const OrtApi *api, OrtKernelContext *context, size_t index, const Tensor *like,
                              void **data) {
  OrtValue *value = NULL;
  TRY(ort_output(api)(context, index, like->dims, 4, &value));
  return ort_data(api)(value, data);
}

/* The kernels load and store 16 bytes at a time. */
static int aligned(const Tensor *in, const void *o) {
  uintptr_t all = (uintptr_t)o;
  for (int i = IN_Q; i <= IN_V_POOL; i++) all |= (uintptr_t)in[i].data;
  return all % 16 == 0;
}

/* The pools are the caller's own memory, written where it lies. */
static OrtStatus *check_pools(const OrtApi *api, OrtKernelContext *context, const Tensor *in) {
  void *k_pool, *v_pool;
  TRY(make_output(api, context, 1, &in[IN_K_POOL], &k_pool));
  TRY(make_output(api, context, 2, &in[IN_V_POOL], &v_pool));
  REQUIRE(api, k_pool == in[IN_K_POOL].data && v_pool == in[IN_V_POOL].data,
          "outputs 1 and 2 must be bound to the memory of inputs 3 and 4");
  return NULL;
}

/* Parameters of a Triton kernel: its arguments by address, then two null pointers. */
static int launch_tiled(const Node *node, const Kernel *kernel, const Tensor *in, void *o, int32_t parts, void *stream) {
  Table *table = node->table;
  void *null = NULL;
  int32_t rows = (int32_t)in[IN_Q].dims[2], pool_rows = (int32_t)in[IN_K_POOL].dims[2];
  int32_t kv_heads = (int32_t)in[IN_K].dims[1], groups = (int32_t)(in[IN_Q].dims[1] / kv_heads);
  int32_t window = (int32_t)node->window, zero = 0;
  float scale = node->scale, cap = node->softcap;
  void *q = in[IN_Q].data, *k = in[IN_K].data, *v = in[IN_V].data, *past = in[IN_PAST].data;
  void *k_pool = in[IN_K_POOL].data, *v_pool = in[IN_V_POOL].data;
  void *params[] = {&q,      &k,      &v,    &k_pool, &v_pool,       &past,         &null, &null,
                    &null,   &null,   &o,    &table->parts, &table->stats, &rows,   &pool_rows, &kv_heads,
                    &groups, &window, &zero, &zero,   &scale,        &cap,          &null, &null};
  return table->launch(kernel->function, (unsigned)up((int64_t)groups * rows, kernel->rows),
                       (unsigned)(in[IN_Q].dims[0] * kv_heads), (unsigned)parts, (unsigned)kernel->threads, 1, 1,
                       (unsigned)kernel->shared, stream, params, NULL);
}

static int launch_join(const Node *node, const Kernel *kernel, const Tensor *q, void *o, int32_t parts, void *stream) {
  Table *table = node->table;
  void *null = NULL;
  int32_t rows = (int32_t)q->dims[2], heads = (int32_t)q->dims[1], zero = 0;
  void *params[] = {&table->parts, &table->stats, &null, &o, &parts, &rows, &heads, &zero, &null, &null};
  return table->launch(kernel->function, (unsigned)(q->dims[0] * heads * rows), 1, 1, (unsigned)kernel->threads, 1, 1,
                       (unsigned)kernel->shared, stream, params, NULL);
}

static OrtStatus *compute(void *kernel, OrtKernelContext *context) {
  const Node *node = kernel;
  const OrtApi *api = node->api;
  const OrtValue *value = NULL;
  Tensor in[INPUTS];
  void *o, *stream;
  for (size_t i = 0; i < INPUTS; i++) {
    TRY(ort_input(api)(context, i, &value));
    TRY(read_tensor(api, value, i == IN_PAST ? 1 : 4, &in[i]));
  }
  const int64_t *q = in[IN_Q].dims, kv_heads = in[IN_K].dims[1];
  REQUIRE(api, kv_heads > 0 && q[1] % kv_heads == 0, "query heads must be a multiple of KV heads");
  REQUIRE(api, q[2] <= NEW_ROWS, "at most 32 new rows a call");
  int64_t packed = q[1] / kv_heads * q[2], rows = q[0] * q[1] * q[2];
  const HeadKernels *head = find_head(node->table, q[3]);
  const Kernel *tile = head ? find_tile(head, packed) : NULL;
  REQUIRE(api, tile, "the table has no kernel for this head size and number of rows");
  TRY(make_output(api, context, 0, &in[IN_Q], &o));
  TRY(check_pools(api, context, in));
  REQUIRE(api, aligned(in, o), "tensors must lie at multiples of 16");
  TRY(ort_gpu_stream(api)(context, &stream));
  int32_t parts = count_parts(node->table, q[0] * kv_heads * up(packed, tile->rows), rows);
  REQUIRE(api, launch_tiled(node, tile, in, o, parts, stream) == 0, "the driver refused the launch");
  if (parts > 1)
    REQUIRE(api, launch_join(node, &head->join, &in[IN_Q], o, parts, stream) == 0, "the driver refused the launch");
  return NULL;
}

static OrtStatus *create(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **out) {
  Node *node = malloc(sizeof *node);
  REQUIRE(api, node, "out of memory");
  *node = (Node){.api = api, .table = ((const Op *)op)->table, .scale = 1.0f, .window = -1};
  OrtStatus *absent[] = {ort_attribute_float(api)(info, "scale", &node->scale),
                         ort_attribute_float(api)(info, "softcap", &node->softcap),
                         ort_attribute_int(api)(info, "window", &node->window)};
  for (int i = 0; i < 3; i++)
    if (absent[i]) ort_release_status(api)(absent[i]); /* the default stays */
  *out = node;
  if ((node->softcap > 0) == (node->table->softcap != 0)) return NULL;
  free(node);
  return ort_create_status(api)(ORT_FAIL, "ai.dspark::VerifyAttention: the table's kernels do not suit the softcap");
}

static const char *name(const OrtCustomOp *op) { (void)op; return "VerifyAttention"; }
static const char *provider(const OrtCustomOp *op) { (void)op; return "CUDAExecutionProvider"; }
static size_t inputs(const OrtCustomOp *op) { (void)op; return INPUTS; }
static size_t outputs(const OrtCustomOp *op) { (void)op; return 3; }
static int input_type(const OrtCustomOp *op, size_t i) {
  return i == IN_PAST ? ORT_INT32 : ((const Op *)op)->table->element_type;
}
static int output_type(const OrtCustomOp *op, size_t i) { (void)i; return ((const Op *)op)->table->element_type; }
static int zero_for(const OrtCustomOp *op, size_t i) { (void)op, (void)i; return 0; }
static int one(const OrtCustomOp *op) { (void)op; return 1; }

EXPORT OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
  OrtStatus *error;
  const OrtApi *api = ort_table(base, &error);
  if (!api) return error;
  Op *made = calloc(1, sizeof *made); /* for as long as there may be sessions */
  OrtOpDomain *domain = NULL;
  REQUIRE(api, made && stated, "no table of kernels was stated");
  made->table = stated;
  made->op = (OrtCustomOp){.version = ORT_VERSION, .name = name, .provider = provider, .input_type = input_type,
                           .input_count = inputs, .output_type = output_type, .output_count = outputs, .destroy = free,
                           .input_kind = zero_for, .output_kind = zero_for, .input_memory = zero_for,
                           .variadic_input_min = one, .variadic_input_same = one, .variadic_output_min = one,
                           .variadic_output_same = one, .create_kernel_v2 = create, .compute_v2 = compute,
                           .since_version = one, .until_version = one};
  TRY(ort_create_domain(api)("ai.dspark", &domain));
  TRY(ort_domain_add(api)(domain, &made->op));
  return ort_add_domain(api)(options, domain);
}
