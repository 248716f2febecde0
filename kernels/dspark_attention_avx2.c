/* A tile of attention on vectors of eight lanes. */
#include "dspark_attention.h"
#include "dspark_narrow.h"

#define ATTEND dspark_attend_avx2
#define QUERIES NARROW_QUERIES
#define COUNTS CASE(1) CASE(2) CASE(3)
#define V(name) _mm256_##name
#define WIDTH 8
#define KEYS 4

INLINE __m256 exp_floats(__m256 x) { return exp_lanes(x); }

INLINE __m256 get(const float *from, int64_t count) { return get_eight(from, count); }

INLINE void put(float *to, __m256 value, int64_t count) { put_eight(to, value, count); }

INLINE __m256 load_queries(const Query *query, const Query *last, int64_t d, int64_t left) {
  (void)last;
  return load_row(query->q + d, left);
}

INLINE void put_scores(const __m256 *halves, float *scores, float *last) {
  (void)last;
  _mm_storeu_ps(scores, _mm_add_ps(_mm256_castps256_ps128(halves[0]), _mm256_extractf128_ps(halves[0], 1)));
}

INLINE __m256 part(__m256 sums, int i) {
  (void)i;
  return sums;
}

#include "dspark_attention_tile.h"
