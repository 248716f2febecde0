/* The kernels behind the `ai.dspark` operators on an x86-64 processor with AVX2, free of any runtime's types.
 *
 * Every kernel computes a row by an order of operations that depends on that row's own values and absolute position
 * only: never on how many rows share the call, on the tiling or on the number of threads.  A token's logits are
 * therefore the same bits whether it is decoded alone or verified among others.
 *
 * There is no slower path for other processors: without the library ONNX Runtime runs the operators' function bodies.
 */
#ifndef DSPARK_CPU_H
#define DSPARK_CPU_H

#include <stddef.h>
#include <stdint.h>

#if !defined(__x86_64__) || !defined(__GNUC__)
#error "the CPU kernels are written for x86-64 and GCC or Clang"
#endif

#define AVX2_CODE __attribute__((target("avx2,fma")))
#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2,fma")))

enum { BLOCK = 32, INTERLEAVE = 16, MAX_HEAD = 512, POOL_TILE = 128 };

/* Runs `body(argument, i)` for every i < count, in any order, perhaps at once. */
typedef struct Pool {
  void (*run)(const struct Pool *pool, void (*body)(void *, size_t), size_t count, void *argument);
  const void *api;
  const void *context;
} Pool;

/* The same by this thread alone where there is too little to share. */
static inline void run_items(const Pool *pool, void (*body)(void *, size_t), size_t count, void *argument, int alone) {
  if (!alone) {
    pool->run(pool, body, count, argument);
    return;
  }
  for (size_t i = 0; i < count; i++) body(argument, i);
}

/* A block-quantised weight [n, k] by sixteen columns (rows of [n, k]): of a block four bytes of each column in turn. */
typedef struct {
  int64_t k, n;
  int bits;              /* 4 or 8 */
  const uint8_t *codes;  /* [n / 16 rounded up, k / 32, bits, 16, 4] */
  const float *scales;   /* [n / 16 rounded up, k / 32, 16] */
  const float *mins;     /* likewise, or NULL */
} Interleaved;

/* y [rows, n] = x [rows, k] times the transposed weight, plus the blocks' minima. */
typedef struct {
  Interleaved weight;
  int64_t rows;
  const float *x;
  float *y;
} InterleavedMatMul;

/* y [rows, k] = rows `ids` of the weight. */
typedef struct {
  Interleaved weight;
  int64_t rows;
  const int64_t *ids; /* each 0 .. n - 1 */
  float *y;
} InterleavedGather;

/* A float weight [n, k] as code * scale, exactly (kernels/int16.py). */
typedef struct {
  int64_t k, n;
  const int16_t *codes; /* [n / 2 rounded up, k / 8, 2, 8] */
  const float *scales;  /* [n / 2 rounded up, k / 32, 2] */
} Int16Matrix;

/* y [rows, k] = rows `ids` of the weight. */
typedef struct {
  Int16Matrix weight;
  int64_t rows;
  const int64_t *ids; /* each 0 .. n - 1 */
  float *y;
} Int16Gather;

/* y [rows, n] = x [rows, k] times the transposed weight [n, k]: floats, bfloat16, or those of `packed`; others are NULL. */
typedef struct {
  int64_t rows, k, n;
  const float *x, *weight;
  Int16Matrix packed;
  float *y;
  int64_t y_step; /* floats from a row of y to the next */
  const uint16_t *halves; /* bfloat16: the upper halves of floats whose lower ones are zeros */
} DenseMatMul;

/* Attention of `rows` new rows per sequence over a pool that holds the rows before them and receives the new ones.
 * q and o are [batch, heads, rows, dim] in any layout given by their steps; the pools are dense.
 * With offsets the rows of a single batch belong to several sequences: offsets[i] .. offsets[i + 1] - 1 to slot i.
 * Position p of a sequence lies in row p mod pool_rows: a pool of whole tiles that a window fits in may be a ring. */
typedef struct {
  int64_t batch, heads, kv_heads, rows, dim, pool_rows;
  int64_t slots; /* of the pools: batch, without offsets */
  const float *q;
  const float *k, *v; /* [batch, kv_heads, rows, dim], or NULL: the pools hold the new rows already */
  float *k_pool, *v_pool; /* [slots, kv_heads, pool_rows, dim] */
  const int32_t *past;    /* [slots] */
  const float *sinks;     /* [heads] or NULL */
  const uint8_t *tree;    /* [batch, rows, rows] or NULL: which new rows a new row sees */
  const int32_t *offsets; /* [slots + 1] or NULL */
  float scale, softcap;   /* softcap 0: none */
  int64_t window;         /* -1: none */
  int64_t q_batch, q_head, q_row, o_batch, o_head, o_row; /* in floats */
  float *o;
} VerifyAttention;

/* The same from a packed projection [batch, rows, (heads + 2 kv_heads) dim], with rotary embedding of the first
 * 2 * half elements of queries and keys; o is [batch, rows, heads, dim].  Fields q, k, v and the steps are not read. */
typedef struct {
  VerifyAttention attention;
  const float *qkv, *cos, *sin; /* cos, sin: [batch, rows, half] */
  int64_t half;
} QkvAttention;

/* y [rows, width] = silu(gate) * up with x [rows, gate and up]. */
typedef struct {
  int64_t rows, width, tiles; /* tiles: set by the kernel */
  const float *x;
  float *y;
} SwiGlu;

/* sum [rows, n] += skip; y = sum / sqrt(mean of a row's squares + epsilon) * gain. */
typedef struct {
  int64_t rows, n;
  const float *skip, *gain; /* gain: [n] */
  float epsilon;
  float *sum, *y;
} SkipNorm;

/* Return 0, or -1 when memory is short. */
void dspark_dense_matmul(const DenseMatMul *op, const Pool *pool);
int dspark_interleaved_matmul(const InterleavedMatMul *op, const Pool *pool);
void dspark_interleaved_gather(const InterleavedGather *op, const Pool *pool);
void dspark_int16_gather(const Int16Gather *op, const Pool *pool);
int64_t dspark_first_row(const VerifyAttention *op, int64_t slot); /* counted through all sequences */
int dspark_has_room(const VerifyAttention *op, int64_t slot); /* the rows of a slot fit, and leave what they see */
int dspark_verify_attention(const VerifyAttention *op, const Pool *pool);
int dspark_qkv_attention(const QkvAttention *op, const Pool *pool);
void dspark_swiglu(SwiGlu *op, const Pool *pool);
void dspark_skip_norm(SkipNorm *op, const Pool *pool);

#endif
