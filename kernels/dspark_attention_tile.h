/* Scores, softmax and weighted values of one tile; included once for each width of vectors.
 *
 * Queries of one KV head, of one row or of several, share every load of a key or value.  A score is a dot product in
 * one order, whatever the width: eight lanes add every eighth product, a fixed tree adds the lanes.  A weighted value
 * adds key after key.  So a query's result is the same bits in any company.
 *
 * The including file defines ATTEND (the function's name), QUERIES (most at a time) and COUNTS (of how many), V (an
 * intrinsic's name), WIDTH (floats of a vector), get and put (all of them, or the first ones), load_queries
 * (eight elements of PAIR queries), put_scores (stores the scores of PAIR queries with KEYS keys, of which each vector
 * of `halves` has two sums for four) and part (eight of the lanes); CODE, INLINE, PAIR, Floats and load_row as for products.
 */
#include "dspark_attention.h"
#include "dspark_lanes.h"

#include <math.h>
#include <string.h>

enum { LANES = 8, VECTORS = QUERIES / PAIR, LINE = 16, AHEAD = 8 };

typedef float Scores[QUERIES][POOL_TILE];

INLINE Floats cap_floats(Floats x, float cap) { /* cap * tanh(x / cap) */
  const Floats one = V(set1_ps)(1.0f), limit = V(set1_ps)(20.0f);
  Floats twice = V(mul_ps)(x, V(set1_ps)(2.0f / cap));
  twice = V(min_ps)(limit, V(max_ps)(V(sub_ps)(V(setzero_ps)(), limit), twice));
  Floats e = exp_floats(twice);
  return V(mul_ps)(V(set1_ps)(cap), V(div_ps)(V(sub_ps)(e, one), V(add_ps)(e, one)));
}

AVX2_INLINE float max_of(__m256 v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

/* Keeps the compiler from loading a value once for every use: loads are what limits the loop. */
INLINE Floats once(Floats value) {
  __asm__("" : "+v"(value));
  return value;
}

/* Sums of neighbours, as a horizontal addition gives them in more steps. */
INLINE Floats join(Floats a, Floats b) { return V(add_ps)(V(shuffle_ps)(a, b, 0x88), V(shuffle_ps)(a, b, 0xdd)); }

/* The last query of vector v: the only one where the number of queries leaves no other. */
INLINE int last_of(int v, int count) { return (v + 1) * PAIR <= count ? (v + 1) * PAIR - 1 : v * PAIR; }

/* Adds the products of eight elements, or of the first `left` ones. */
INLINE void score_lanes(const Query *queries, int count, const float *keys, int64_t d, int64_t dim, int64_t left,
                        Floats (*sums)[KEYS]) {
  Floats query[VECTORS];
  for (int v = 0; v * PAIR < count; v++) query[v] = load_queries(queries + v * PAIR, queries + last_of(v, count), d, left);
  for (int j = 0; j < KEYS; j++) {
    Floats key = load_row(keys + j * dim + d, left);
    for (int v = 0; v * PAIR < count; v++) sums[v][j] = V(fmadd_ps)(query[v], key, sums[v][j]);
  }
}

/* scores[i][at + j] = query i . key j. */
INLINE void score_keys(int64_t dim, const Query *queries, int count, const float *keys, Scores scores, int64_t at) {
  Floats sums[VECTORS][KEYS];
  int64_t d = 0;
  for (int v = 0; v < VECTORS; v++)
    for (int j = 0; j < KEYS; j++) sums[v][j] = V(setzero_ps)();
  for (; d + LANES <= dim; d += LANES) score_lanes(queries, count, keys, d, dim, LANES, sums);
  if (d < dim) score_lanes(queries, count, keys, d, dim, dim - d, sums);
  for (int v = 0; v * PAIR < count; v++) {
    Floats halves[KEYS / 4], *of = sums[v];
    for (int i = 0; i < KEYS / 4; i++, of += 4) halves[i] = join(join(of[0], of[1]), join(of[2], of[3]));
    put_scores(halves, scores[v * PAIR] + at, scores[last_of(v, count)] + at);
  }
}

AVX2_INLINE void fetch_floats(const float *from, int64_t count) {
  for (int64_t i = 0; i < count; i += LINE) _mm_prefetch((const char *)(from + i), _MM_HINT_T0);
}

/* The keys start .. end - 1, and those that fill a step: zeros after the last, since a pool may end there. */
INLINE void score_tile(const VerifyAttention *op, const KvTile *tile, const Query *queries, int count, int64_t start,
                       int64_t end, Scores scores) {
  int64_t j = start / KEYS * KEYS, dim = op->dim;
  float padded[KEYS * MAX_HEAD];
  for (; j + KEYS <= end; j += KEYS) {
    if (tile->fetch) { /* values come from memory while keys are scored, and the next keys */
      fetch_floats(tile->values + j * dim, KEYS * dim);
      if (j + AHEAD + KEYS <= end) fetch_floats(tile->keys + (j + AHEAD) * dim, KEYS * dim);
    }
    score_keys(dim, queries, count, tile->keys + j * dim, scores, j);
  }
  if (j == end) return;
  memcpy(padded, tile->keys + j * dim, (size_t)((end - j) * dim) * sizeof(float));
  memset(padded + (end - j) * dim, 0, (size_t)((KEYS - end + j) * dim) * sizeof(float));
  score_keys(dim, queries, count, padded, scores, j);
}

/* Softmax numerators of one query in place, zero where it sees nothing, of all `end` keys that were scored. */
INLINE void weigh(const VerifyAttention *op, const Query *query, float *scores, int64_t end) {
  int64_t count = (end + WIDTH - 1) / WIDTH * WIDTH, j;
  for (j = 0; j < count; j += WIDTH) {
    Floats score = V(mul_ps)(V(loadu_ps)(scores + j), V(set1_ps)(op->scale));
    V(storeu_ps)(scores + j, op->softcap > 0 ? cap_floats(score, op->softcap) : score);
  }
  for (j = 0; j < query->start; j++) scores[j] = -INFINITY;
  for (j = query->known; j < query->end; j++)
    if (!query->seen[j - query->known]) scores[j] = -INFINITY;
  for (j = query->end; j < count; j++) scores[j] = -INFINITY;
  Floats most = V(set1_ps)(-INFINITY);
  for (j = 0; j < count; j += WIDTH) most = V(max_ps)(most, V(loadu_ps)(scores + j));
  float *stats = query->out + op->dim;
  stats[0] = max_of(_mm256_max_ps(part(most, 0), part(most, PAIR - 1)));
  most = V(set1_ps)(stats[0]);
  __m256 sum = _mm256_setzero_ps();
  for (j = 0; j < count; j += WIDTH) {
    Floats e = exp_floats(V(sub_ps)(V(loadu_ps)(scores + j), most));
    V(storeu_ps)(scores + j, e);
    for (int i = 0; i < PAIR; i++) sum = _mm256_add_ps(sum, part(e, i));
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
      Floats row = once(get(value + j * dim + d + v * WIDTH, left));
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
