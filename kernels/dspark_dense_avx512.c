/* Tiles of a float product on vectors of sixteen lanes: eight of one column and eight of the next. */
#include "dspark_cpu.h"

#include <immintrin.h>

#define CODE __attribute__((target("avx512f,avx512dq,avx2,fma")))
#define INLINE static inline __attribute__((always_inline, target("avx512f,avx512dq,avx2,fma")))
#define ITEM dspark_dense_avx512
#define PAIR 2
#define ROWS 12
#define CASES CASE(6, 4) CASE(7, 4) CASE(8, 4) CASE(9, 4) CASE(10, 4) CASE(11, 4) CASE(12, 4)

typedef __m512 Floats;

INLINE __m256 load_eight(const float *from, int64_t count) {
  __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  return count >= 8 ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, mask);
}

INLINE __m512 load_row(const float *from, int64_t count) { return _mm512_broadcast_f32x8(load_eight(from, count)); }

INLINE __m512 load_columns(const float *from, int64_t step, int64_t count) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(load_eight(from, count)), load_eight(from + step, count), 1);
}

INLINE __m512 fused(__m512 a, __m512 b, __m512 sum) { return _mm512_fmadd_ps(a, b, sum); }

INLINE __m256 column(const __m512 *sums, int c) {
  return c % PAIR ? _mm512_extractf32x8_ps(sums[c / PAIR], 1) : _mm512_castps512_ps256(sums[c / PAIR]);
}

#include "dspark_dense_tile.h"
