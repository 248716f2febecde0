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
enum { IN_Q, IN_K, IN_V, IN_K_POOL, IN_V_POOL, IN_PAST, IN_SINKS, IN_TREE, INPUTS };
enum { HALF = 2 /* bytes of an element */, PAST_ROOM = 256, ON_DEVICE = 2 };

typedef struct Copy2D Copy2D;
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
  Launch launch; /* functions of the driver */
  int (*copy)(const Copy2D *, void *);
  int (*set)(void *, unsigned, size_t, void *);
  uint64_t parts, stats; /* device addresses of scratch */
  char *piece;           /* and of NEW_ROWS rows of all heads, behind PAST_ROOM bytes for their past */
  int64_t capacity;      /* rows times parts that the scratch holds, for the largest head */
  int32_t element_type;  /* of rows and pools, 16 bits */
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
  void *data; /* NULL: an absent optional input */
  int64_t dims[4];
} Tensor;

/* New rows that attend to their pools: every tensor contiguous, the length that of the longest sequence with them. */
typedef struct {
  int32_t batch, heads, kv_heads, rows, dim, pool_rows, length;
  void *q, *k, *v, *k_pool, *v_pool, *past, *sinks, *tree, *o;
} Call;

/* CUDA_MEMCPY2D of the driver. */
struct Copy2D {
  size_t from_x, from_y;
  unsigned from_type;
  const void *from_host;
  const void *from;
  void *from_array;
  size_t from_pitch, to_x, to_y;
  unsigned to_type;
  void *to_host;
  void *to;
  void *to_array;
  size_t to_pitch, width, height;
};

static Table *stated;

EXPORT void dspark_cuda_state(Table *table) { stated = table; }
EXPORT size_t dspark_cuda_table_size(void) { return sizeof(Table); }

static int32_t up(int64_t value, int64_t per) { return (int32_t)((value + per - 1) / per); }

/* As dsc.runtime.device_kernels.attention_parts: at most two programs for each multiprocessor, at least four tiles of
 * keys a part. */
static int32_t count_parts(const Table *table, int64_t programs, const Call *c) {
  int64_t wanted = 2 * table->multiprocessors / programs, worthwhile = c->length / (4 * KEYS_PER_TILE);
  int64_t room = table->capacity / ((int64_t)c->batch * c->heads * c->rows);
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

static OrtStatus *read_input(const OrtApi *api, const OrtKernelContext *context, size_t index, size_t rank,
                             Tensor *tensor) {
  OrtShapeInfo *shape = NULL;
  const OrtValue *value = NULL;
  size_t count = 0, got = 0;
  *tensor = (Tensor){0};
  TRY(ort_input_count(api)(context, &count));
  if (index < count) TRY(ort_input(api)(context, index, &value));
  if (!value) return NULL;
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
static int aligned(const Call *c) {
  void *all[] = {c->q, c->k, c->v, c->k_pool, c->v_pool, c->o};
  uintptr_t bits = 0;
  for (int i = 0; i < 6; i++) bits |= (uintptr_t)all[i];
  return bits % 16 == 0;
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
static int launch_tiled(const Node *node, const Kernel *kernel, Call *c, int32_t parts, void *stream) {
  Table *table = node->table;
  void *null = NULL;
  int32_t groups = c->heads / c->kv_heads, window = (int32_t)node->window;
  int32_t has_sinks = c->sinks != NULL, has_tree = c->tree != NULL;
  float scale = node->scale, cap = node->softcap;
  void *params[] = {&c->q,  &c->k,  &c->v, &c->k_pool,    &c->v_pool,    &c->past, &c->sinks,     &c->tree,
                    &null,  &null,  &c->o, &table->parts, &table->stats, &c->rows, &c->pool_rows, &c->kv_heads,
                    &groups, &window, &has_sinks, &has_tree, &scale, &cap, &null, &null};
  return table->launch(kernel->function, (unsigned)up((int64_t)groups * c->rows, kernel->rows),
                       (unsigned)(c->batch * c->kv_heads), (unsigned)parts, (unsigned)kernel->threads, 1, 1,
                       (unsigned)kernel->shared, stream, params, NULL);
}

static int launch_join(const Node *node, const Kernel *kernel, Call *c, int32_t parts, void *stream) {
  Table *table = node->table;
  void *null = NULL;
  int32_t has_sinks = c->sinks != NULL;
  void *params[] = {&table->parts, &table->stats, &c->sinks, &c->o,  &parts,
                    &c->rows,      &c->heads,     &has_sinks, &null, &null};
  return table->launch(kernel->function, (unsigned)(c->batch * c->heads * c->rows), 1, 1, (unsigned)kernel->threads, 1,
                       1, (unsigned)kernel->shared, stream, params, NULL);
}

/* At most NEW_ROWS rows of each sequence. */
static OrtStatus *attend(const Node *node, Call *c, void *stream) {
  const OrtApi *api = node->api;
  const HeadKernels *head = find_head(node->table, c->dim);
  int64_t packed = (int64_t)c->heads / c->kv_heads * c->rows;
  const Kernel *tile = head ? find_tile(head, packed) : NULL;
  REQUIRE(api, tile, "the table has no kernel for this head size and number of rows");
  int32_t parts = count_parts(node->table, (int64_t)c->batch * c->kv_heads * up(packed, tile->rows), c);
  REQUIRE(api, launch_tiled(node, tile, c, parts, stream) == 0, "the driver refused the launch");
  if (parts > 1) REQUIRE(api, launch_join(node, &head->join, c, parts, stream) == 0, "the driver refused the launch");
  return NULL;
}

/* Some rows of every head, from one tensor [heads, rows, dim] to another with a different number of rows. */
static int copy_rows(const Table *table, const void *from, size_t from_pitch, void *to, size_t to_pitch, size_t width,
                     size_t heads, void *stream) {
  Copy2D copy = {.from_type = ON_DEVICE, .from = from, .from_pitch = from_pitch, .to_type = ON_DEVICE, .to = to,
                 .to_pitch = to_pitch, .width = width, .height = heads};
  return table->copy(&copy, stream);
}

/* Many rows of one sequence: piece after piece, each put where the rows of a head lie together. */
static OrtStatus *attend_pieces(const Node *node, const Call *all, void *stream) {
  const OrtApi *api = node->api;
  const Table *table = node->table;
  const int32_t past = all->length - all->rows;
  const size_t row = (size_t)all->dim * HALF, pitch = row * (size_t)all->rows, heads = (size_t)all->heads;
  const size_t kv_heads = (size_t)all->kv_heads;
  for (int32_t done = 0; done < all->rows; done += NEW_ROWS) {
    Call piece = *all;
    piece.rows = all->rows - done < NEW_ROWS ? all->rows - done : NEW_ROWS;
    piece.length = past + done + piece.rows;
    const size_t width = row * (size_t)piece.rows, from = row * (size_t)done;
    piece.past = table->piece;
    piece.q = table->piece + PAST_ROOM;
    piece.o = (char *)piece.q + heads * row * NEW_ROWS;
    piece.k = (char *)piece.o + heads * row * NEW_ROWS;
    piece.v = (char *)piece.k + kv_heads * row * NEW_ROWS;
    int failed = table->set(table->piece, (unsigned)(past + done), 1, stream);
    failed |= copy_rows(table, (char *)all->q + from, pitch, piece.q, width, width, heads, stream);
    failed |= copy_rows(table, (char *)all->k + from, pitch, piece.k, width, width, kv_heads, stream);
    failed |= copy_rows(table, (char *)all->v + from, pitch, piece.v, width, width, kv_heads, stream);
    REQUIRE(api, !failed, "the driver refused a copy");
    TRY(attend(node, &piece, stream));
    failed = copy_rows(table, piece.o, width, (char *)all->o + from, pitch, width, heads, stream);
    REQUIRE(api, !failed, "the driver refused a copy");
  }
  return NULL;
}

static int is(const Tensor *t, int64_t a, int64_t b, int64_t c, int64_t d) {
  return t->dims[0] == a && t->dims[1] == b && t->dims[2] == c && t->dims[3] == d;
}

static OrtStatus *check_call(const OrtApi *api, const Tensor *in, const Call *c) {
  const int64_t b = c->batch, heads = c->kv_heads, rows = c->rows, dim = c->dim, pool = c->pool_rows;
  REQUIRE(api, b > 0 && rows > 0, "at least one sequence and one new row");
  REQUIRE(api, heads > 0 && c->heads > 0 && c->heads % heads == 0, /* count_parts divides by them */
          "query heads must be a multiple of KV heads");
  REQUIRE(api, is(&in[IN_K], b, heads, rows, dim) && is(&in[IN_V], b, heads, rows, dim),
          "k and v must be [batch, KV heads, rows, head size]");
  REQUIRE(api, is(&in[IN_K_POOL], b, heads, pool, dim) && is(&in[IN_V_POOL], b, heads, pool, dim),
          "the pools must be [batch, KV heads, pool rows, head size]");
  REQUIRE(api, in[IN_PAST].dims[0] == b, "past_lengths must be [batch]");
  REQUIRE(api, !c->sinks || in[IN_SINKS].dims[0] == c->heads, "sinks must be [heads]");
  REQUIRE(api, !c->tree || is(&in[IN_TREE], b, 1, rows, rows), "tree_mask must be [batch, 1, rows, rows]");
  REQUIRE(api, rows <= NEW_ROWS || (b == 1 && !c->tree),
          "at most 32 new rows a call of several sequences or of a tree");
  REQUIRE(api, c->length >= rows && c->length <= pool, "the stated length must hold the new rows and fit the pools");
  REQUIRE(api, aligned(c), "tensors must lie at multiples of 16");
  return NULL;
}

static OrtStatus *compute(void *kernel, OrtKernelContext *context) {
  static const size_t ranks[INPUTS] = {4, 4, 4, 4, 4, 1, 1, 4};
  const Node *node = kernel;
  const OrtApi *api = node->api;
  Tensor in[INPUTS];
  void *stream;
  for (size_t i = 0; i < INPUTS; i++) TRY(read_input(api, context, i, ranks[i], &in[i]));
  const int64_t *q = in[IN_Q].dims;
  Call c = {.batch = (int32_t)q[0], .heads = (int32_t)q[1], .kv_heads = (int32_t)in[IN_K].dims[1],
            .rows = (int32_t)q[2], .dim = (int32_t)q[3], .pool_rows = (int32_t)in[IN_K_POOL].dims[2],
            .length = *node->table->length, .q = in[IN_Q].data, .k = in[IN_K].data, .v = in[IN_V].data,
            .k_pool = in[IN_K_POOL].data, .v_pool = in[IN_V_POOL].data, .past = in[IN_PAST].data,
            .sinks = in[IN_SINKS].data, .tree = in[IN_TREE].data};
  TRY(make_output(api, context, 0, &in[IN_Q], &c.o));
  TRY(check_pools(api, context, in));
  TRY(check_call(api, in, &c));
  TRY(ort_gpu_stream(api)(context, &stream));
  return c.rows <= NEW_ROWS ? attend(node, &c, stream) : attend_pieces(node, &c, stream);
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
  if (i == IN_PAST) return ORT_INT32;
  if (i == IN_SINKS) return ORT_FLOAT;
  return i == IN_TREE ? ORT_BOOL : ((const Op *)op)->table->element_type;
}
static int output_type(const OrtCustomOp *op, size_t i) { (void)i; return ((const Op *)op)->table->element_type; }
static int input_kind(const OrtCustomOp *op, size_t i) { (void)op; return i >= IN_SINKS ? ORT_OPTIONAL : ORT_REQUIRED; }
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
                           .input_kind = input_kind, .output_kind = zero_for, .input_memory = zero_for,
                           .variadic_input_min = one, .variadic_input_same = one, .variadic_output_min = one,
                           .variadic_output_same = one, .create_kernel_v2 = create, .compute_v2 = compute,
                           .since_version = one, .until_version = one};
  TRY(ort_create_domain(api)("ai.dspark", &domain));
  TRY(ort_domain_add(api)(domain, &made->op));
  return ort_add_domain(api)(options, domain);
}
