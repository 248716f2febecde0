/* Tiles of a product with 16-bit codes on vectors of eight lanes, two columns in two of them. */
#include "dspark_cpu.h"

#include <immintrin.h>

#define CODE AVX2_CODE
#define INLINE AVX2_INLINE
#define ITEM dspark_int16_avx2
#define WEIGHTS packed.codes
#define UNIT 2
#define PAIR 2
#define ROWS 6
#define CASES CASE(1, 8) CASE(2, 4) CASE(3, 4) CASE(4, 2) CASE(5, 2) CASE(6, 2)

typedef int16_t Weight;
typedef struct { __m256 first, second; } Floats;

AVX2_INLINE Floats load_row(const float *from, int64_t count) {
  (void)count;
  __m256 value = _mm256_loadu_ps(from);
  return (Floats){value, value};
}

AVX2_INLINE Floats load_scales(const float *scales, int64_t at) {
  return (Floats){_mm256_broadcast_ss(scales + at), _mm256_broadcast_ss(scales + at + 1)};
}

AVX2_INLINE __m256 load_column(const int16_t *from, __m256 scale) {
  __m256i codes = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)from));
  return _mm256_mul_ps(_mm256_cvtepi32_ps(codes), scale);
}

AVX2_INLINE Floats load_columns(const int16_t *from, int64_t step, int64_t count, Floats scales) {
  (void)step, (void)count;
  return (Floats){load_column(from, scales.first), load_column(from + 8, scales.second)};
}

AVX2_INLINE Floats fused(Floats a, Floats b, Floats sum) {
  return (Floats){_mm256_fmadd_ps(a.first, b.first, sum.first), _mm256_fmadd_ps(a.second, b.second, sum.second)};
}

AVX2_INLINE __m256 column(const Floats *sums, int c) { return c % 2 ? sums[c / 2].second : sums[c / 2].first; }

#include "dspark_dense_tile.h"
