/* Small operators that stand for several nodes of a decoder layer: rotary embedding of a packed projection, SwiGLU, a
 * residual addition with the normalisation of its result. */
#include "dspark_cpu.h"
#include "dspark_lanes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 8, SWIGLU_TILE = 4096, SERIAL_FLOATS = 1 << 14 };

/* to = from with its first 2 * half elements turned: (a, b) -> (a cos - b sin, b cos + a sin). */
AVX2_CODE static void rotate(float *to, const float *from, const float *cos, const float *sin, int64_t half, int64_t dim) {
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    __m256 a = _mm256_loadu_ps(from + i), b = _mm256_loadu_ps(from + half + i);
    __m256 c = _mm256_loadu_ps(cos + i), s = _mm256_loadu_ps(sin + i);
    _mm256_storeu_ps(to + i, _mm256_sub_ps(_mm256_mul_ps(a, c), _mm256_mul_ps(b, s)));
    _mm256_storeu_ps(to + half + i, _mm256_add_ps(_mm256_mul_ps(b, c), _mm256_mul_ps(a, s)));
  }
  for (; i < half; i++) {
    float a = from[i], b = from[half + i];
    to[i] = a * cos[i] - b * sin[i];
    to[half + i] = b * cos[i] + a * sin[i];
  }
  memcpy(to + 2 * half, from + 2 * half, (size_t)(dim - 2 * half) * sizeof(float));
}

/* One new row: queries to the scratch, key and value to its position in its sequence's slot. */
static void place_row(const QkvAttention *op, float *queries, int64_t row, int64_t slot, int64_t position) {
  const VerifyAttention *a = &op->attention;
  int64_t width = (a->heads + 2 * a->kv_heads) * a->dim;
  const float *from = op->qkv + row * width, *cos = op->cos + row * op->half, *sin = op->sin + row * op->half;
  float *q = queries + row * a->heads * a->dim;
  for (int64_t h = 0; h < a->heads; h++) rotate(q + h * a->dim, from + h * a->dim, cos, sin, op->half, a->dim);
  for (int64_t h = 0; h < a->kv_heads; h++) {
    const float *key = from + (a->heads + h) * a->dim, *value = key + a->kv_heads * a->dim;
    int64_t to = ((slot * a->kv_heads + h) * a->pool_rows + position % a->pool_rows) * a->dim;
    rotate(a->k_pool + to, key, cos, sin, op->half, a->dim);
    memcpy(a->v_pool + to, value, (size_t)a->dim * sizeof(float));
  }
}

int dspark_qkv_attention(const QkvAttention *op, const Pool *pool) {
  VerifyAttention a = op->attention;
  float *queries = malloc((size_t)(a.batch * a.rows * a.heads * a.dim) * sizeof(float) + 1);
  if (!queries) return -1;
  for (int64_t slot = 0; slot < a.slots; slot++) {
    int64_t first = dspark_first_row(&a, slot), last = dspark_first_row(&a, slot + 1);
    for (int64_t row = first; row < last; row++) place_row(op, queries, row, slot, a.past[slot] + row - first);
  }
  a.q = queries;
  a.k = a.v = NULL;
  a.q_head = a.o_head = a.dim;
  a.q_row = a.o_row = a.heads * a.dim;
  a.q_batch = a.o_batch = a.rows * a.q_row;
  int failed = dspark_verify_attention(&a, pool);
  free(queries);
  return failed;
}

AVX2_CODE static void swiglu_item(void *argument, size_t item) {
  const SwiGlu *op = argument;
  int64_t row = (int64_t)item / op->tiles, first = (int64_t)item % op->tiles * SWIGLU_TILE, i = first;
  int64_t last = first + SWIGLU_TILE < op->width ? first + SWIGLU_TILE : op->width;
  const float *gate = op->x + row * 2 * op->width, *up = gate + op->width;
  const __m256 zero = _mm256_setzero_ps(), one = _mm256_set1_ps(1.0f);
  float *y = op->y + row * op->width;
  for (; i < last; i += LANES) {
    float rest[2 * LANES] = {0};
    int64_t count = last - i < LANES ? last - i : LANES;
    if (count < LANES) {
      memcpy(rest, gate + i, (size_t)count * sizeof(float));
      memcpy(rest + LANES, up + i, (size_t)count * sizeof(float));
    }
    __m256 g = _mm256_loadu_ps(count < LANES ? rest : gate + i), u = _mm256_loadu_ps(count < LANES ? rest + LANES : up + i);
    /* g / (1 + exp(-g)); beyond 87 the exponential would overflow and the result is zero anyway */
    __m256 e = exp_lanes(_mm256_min_ps(_mm256_set1_ps(87.0f), _mm256_sub_ps(zero, g)));
    _mm256_storeu_ps(rest, _mm256_mul_ps(_mm256_div_ps(g, _mm256_add_ps(one, e)), u));
    memcpy(y + i, rest, (size_t)count * sizeof(float));
  }
}

void dspark_swiglu(SwiGlu *op, const Pool *pool) {
  op->tiles = (op->width + SWIGLU_TILE - 1) / SWIGLU_TILE;
  run_items(pool, swiglu_item, (size_t)(op->rows * op->tiles), op, op->rows * op->width < SERIAL_FLOATS);
}

/* Four sums of eight lanes each, so that no addition waits for the one before it. */
AVX2_CODE static void skip_norm_item(void *argument, size_t row) {
  const SkipNorm *op = argument;
  const float *skip = op->skip + (int64_t)row * op->n, *gain = op->gain;
  float *sum = op->sum + (int64_t)row * op->n, *y = op->y + (int64_t)row * op->n, rest = 0.0f;
  __m256 squares[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
  int64_t i = 0;
  for (; i + 4 * LANES <= op->n; i += 4 * LANES)
    for (int s = 0; s < 4; s++) {
      __m256 both = _mm256_add_ps(_mm256_loadu_ps(sum + i + s * LANES), _mm256_loadu_ps(skip + i + s * LANES));
      _mm256_storeu_ps(sum + i + s * LANES, both);
      squares[s] = _mm256_fmadd_ps(both, both, squares[s]);
    }
  for (; i < op->n; i++) {
    sum[i] += skip[i];
    rest += sum[i] * sum[i];
  }
  rest += sum_of(_mm256_add_ps(_mm256_add_ps(squares[0], squares[1]), _mm256_add_ps(squares[2], squares[3])));
  float factor = 1.0f / sqrtf(rest / (float)op->n + op->epsilon);
  __m256 factors = _mm256_set1_ps(factor);
  for (i = 0; i + LANES <= op->n; i += LANES)
    _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(sum + i), factors), _mm256_loadu_ps(gain + i)));
  for (; i < op->n; i++) y[i] = sum[i] * factor * gain[i];
}

void dspark_skip_norm(SkipNorm *op, const Pool *pool) {
  run_items(pool, skip_norm_item, (size_t)op->rows, op, op->rows * op->n < SERIAL_FLOATS);
}
