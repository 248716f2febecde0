/* Scores, softmax and weighted values of one tile; included once for each width of vectors.
 *
 * Queries of one KV head, of one row or of several, share every load of a key or value.  A score is a dot product in
 * one order, whatever the width: eight lanes add every eighth product, a fixed tree adds the lanes.  A weighted value
 * adds key after key.  So a query's result is the same bits in any company.
 *
 * The including file defines ATTEND (the function's name), QUERIES (most at a time) and COUNTS (of how many), V (an
 * intrinsic's name), WIDTH (floats of a vector), get and put (all of them, or the first ones), load_queries (eight
 * elements of PAIR queries) and part (of these the sums of one); CODE, INLINE, PAIR, Floats and load_row as for products.
 */
#include "dspark_attention.h"
#include "dspark_lanes.h"

#include <math.h>
#include <string.h>

enum { LANES = 8, VECTORS = QUERIES / PAIR, LINE = 16, AHEAD = 8 };

typedef float Scores[QUERIES][POOL_TILE];

AVX2_INLINE __m256 cap_lanes(__m256 x, float cap) { /* cap * tanh(x / cap) */
  const __m256 one = _mm256_set1_ps(1.0f), limit = _mm256_set1_ps(20.0f);
  __m256 twice = _mm256_mul_ps(x, _mm256_set1_ps(2.0f / cap));
  twice = _mm256_min_ps(limit, _mm256_max_ps(_mm256_sub_ps(_mm256_setzero_ps(), limit), twice));
  __m256 e = exp_lanes(twice);
  return _mm256_mul_ps(_mm256_set1_ps(cap), _mm256_div_ps(_mm256_sub_ps(e, one), _mm256_add_ps(e, one)));
}

AVX2_INLINE float max_of(__m256 v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

/* Sums of neighbours, as a horizontal addition gives them in more steps. */
INLINE Floats join(Floats a, Floats b) { return V(add_ps)(V(shuffle_ps)(a, b, 0x88), V(shuffle_ps)(a, b, 0xdd)); }

/* Adds the products of eight elements, or of the first `left` ones. */
INLINE void score_lanes(const Query *queries, int count, const float *key, int64_t d, int64_t dim, int64_t left, int keys,
                        Floats (*sums)[4]) {
  Floats query[VECTORS];
  for (int v = 0; v * PAIR < count; v++)
    query[v] = load_queries(queries + v * PAIR, queries + (v * PAIR + PAIR <= count ? v * PAIR + PAIR : count) - 1, d, left);
  for (int j = 0; j < keys; j++) {
    Floats k = load_row(key + j * dim + d, left);
    for (int v = 0; v * PAIR < count; v++) sums[v][j] = V(fmadd_ps)(query[v], k, sums[v][j]);
  }
}

/* scores[i][at .. at + keys - 1] = scale * query i . key, for 1 or 4 keys. */
INLINE void score_keys(const VerifyAttention *op, const Query *queries, int count, const float *key, int keys,
                       Scores scores, int64_t at) {
  Floats sums[VECTORS][4];
  int64_t d = 0;
  for (int v = 0; v < VECTORS; v++)
    for (int j = 0; j < 4; j++) sums[v][j] = V(setzero_ps)();
  for (; d + LANES <= op->dim; d += LANES) score_lanes(queries, count, key, d, op->dim, LANES, keys, sums);
  if (d < op->dim) score_lanes(queries, count, key, d, op->dim, op->dim - d, keys, sums);
  for (int i = 0; i < count; i++) {
    Floats *of = sums[i / PAIR], four = join(join(of[0], of[1]), join(of[2], of[3]));
    __m256 sum = part(four, i % PAIR);
    __m128 dots = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    dots = _mm_mul_ps(dots, _mm_set1_ps(op->scale));
    if (keys == 4)
      _mm_storeu_ps(scores[i] + at, dots);
    else
      _mm_store_ss(scores[i] + at, dots);
  }
}

AVX2_INLINE void fetch_floats(const float *from, int64_t count) {
  for (int64_t i = 0; i < count; i += LINE) _mm_prefetch((const char *)(from + i), _MM_HINT_T0);
}

/* Values come from memory while keys are scored, and the next keys. */
INLINE void score_tile(const VerifyAttention *op, const KvTile *tile, const Query *queries, int count, int64_t start,
                       int64_t end, Scores scores) {
  int64_t j = start, dim = op->dim;
  for (; j + 4 <= end; j += 4) {
    if (tile->fetch) {
      fetch_floats(tile->values + j * dim, 4 * dim);
      if (j + AHEAD + 4 <= end) fetch_floats(tile->keys + (j + AHEAD) * dim, 4 * dim);
    }
    score_keys(op, queries, count, tile->keys + j * dim, 4, scores, j);
  }
  for (; j < end; j++) score_keys(op, queries, count, tile->keys + j * dim, 1, scores, j);
}

/* Softmax numerators of one query in place, zero where it sees nothing, of all `end` keys that were scored. */
AVX2_INLINE void weigh(const VerifyAttention *op, const Query *query, float *scores, int64_t end) {
  int64_t count = (end + LANES - 1) / LANES * LANES, j;
  for (j = 0; op->softcap > 0 && j < count; j += LANES)
    _mm256_storeu_ps(scores + j, cap_lanes(_mm256_loadu_ps(scores + j), op->softcap));
  for (j = 0; j < query->start; j++) scores[j] = -INFINITY;
  for (j = query->known; j < query->end; j++)
    if (!query->seen[j - query->known]) scores[j] = -INFINITY;
  for (j = query->end; j < count; j++) scores[j] = -INFINITY;
  __m256 most = _mm256_set1_ps(-INFINITY), sum = _mm256_setzero_ps();
  for (j = 0; j < count; j += LANES) most = _mm256_max_ps(most, _mm256_loadu_ps(scores + j));
  float *stats = query->out + op->dim;
  stats[0] = max_of(most);
  most = _mm256_set1_ps(stats[0]);
  for (j = 0; j < count; j += LANES) {
    __m256 e = exp_lanes(_mm256_sub_ps(_mm256_loadu_ps(scores + j), most));
    _mm256_storeu_ps(scores + j, e);
    sum = _mm256_add_ps(sum, e);
  }
  stats[1] = sum_of(sum);
}

/* Elements d .. of the queries' results += weight * value, key after key, for `width` vectors or the first `left` of one. */
INLINE void add_values(const float *value, int64_t dim, const Query *queries, int count, Scores weights, int64_t first,
                       int64_t last, int64_t d, int64_t left, int width) {
  Floats sums[QUERIES][4];
  for (int i = 0; i < count; i++)
    for (int v = 0; v < width; v++) sums[i][v] = get(queries[i].out + d + v * WIDTH, left);
  for (int64_t j = first; j < last; j++) {
    Floats w[QUERIES];
    for (int i = 0; i < count; i++) w[i] = V(set1_ps)(weights[i][j]);
    for (int v = 0; v < width; v++) {
      Floats row = get(value + j * dim + d + v * WIDTH, left);
      for (int i = 0; i < count; i++) sums[i][v] = V(fmadd_ps)(w[i], row, sums[i][v]);
    }
  }
  for (int i = 0; i < count; i++)
    for (int v = 0; v < width; v++) put(queries[i].out + d + v * WIDTH, sums[i][v], left);
}

/* The values of the keys first .. last - 1. */
INLINE void add_keys(const float *value, int64_t dim, const Query *queries, int count, Scores weights, int64_t first,
                     int64_t last) {
  int64_t d = 0;
  for (; d + 4 * WIDTH <= dim; d += 4 * WIDTH) add_values(value, dim, queries, count, weights, first, last, d, WIDTH, 4);
  for (; d + WIDTH <= dim; d += WIDTH) add_values(value, dim, queries, count, weights, first, last, d, WIDTH, 1);
  if (d < dim) add_values(value, dim, queries, count, weights, first, last, d, dim - d, 1);
}

CODE static void add_own(const float *value, int64_t dim, const Query *query, float *weights, int64_t first, int64_t last) {
  if (first < last) add_keys(value, dim, query, 1, (void *)weights, first, last);
}

/* What all queries see together, and before and after it what each sees alone. */
INLINE void attend(const VerifyAttention *op, const KvTile *tile, const Query *queries, int count) {
  int64_t start = POOL_TILE, end = 0, first = 0, last = POOL_TILE;
  for (int i = 0; i < count; i++) {
    const Query *q = queries + i;
    start = q->start < start ? q->start : start, end = q->end > end ? q->end : end;
    first = q->start > first ? q->start : first, last = q->known < last ? q->known : last;
  }
  Scores scores;
  score_tile(op, tile, queries, count, start, end, scores);
  for (int i = 0; i < count; i++) {
    const Query *q = queries + i;
    weigh(op, q, scores[i], end);
    memset(q->out, 0, (size_t)op->dim * sizeof(float));
    add_own(tile->values, op->dim, q, scores[i], q->start, first < last ? first : q->known);
  }
  if (first < last) add_keys(tile->values, op->dim, queries, count, scores, first, last);
  for (int i = 0; i < count; i++) {
    const Query *q = queries + i;
    if (first < last) add_own(tile->values, op->dim, q, scores[i], last, q->known);
    for (int64_t j = q->known; j < q->end; j++)
      if (q->seen[j - q->known]) add_own(tile->values, op->dim, q, scores[i], j, j + 1);
  }
}

CODE void ATTEND(const VerifyAttention *op, const KvTile *tile, const Query *queries, int count) {
  switch (count) {
#define CASE(count) \
  case count: attend(op, tile, queries, count); break;
    COUNTS
  }
}
