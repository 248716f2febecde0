/* Vectors of eight lanes for products with float weights, a column each. */
#ifndef DSPARK_NARROW_H
#define DSPARK_NARROW_H

#include "dspark_cpu.h"
#include "dspark_lanes.h"

#include <immintrin.h>

#define CODE AVX2_CODE
#define INLINE AVX2_INLINE
#define UNIT 1
#define PAIR 1
#define ROWS 6
#define CASES CASE(1, 4) CASE(2, 2) CASE(3, 2) CASE(4, 2) CASE(5, 2) CASE(6, 2)

typedef __m256 Floats;

/* Keeps the compiler from loading a value once for every use: loads are what limits the loop. */
AVX2_INLINE __m256 load_row(const float *from, int64_t count) {
  __m256 value = get_eight(from, count);
  __asm__("" : "+x"(value));
  return value;
}

AVX2_INLINE __m256 load_scales(const float *scales, int64_t at) {
  (void)scales, (void)at;
  return _mm256_setzero_ps();
}

AVX2_INLINE __m256 fused(__m256 a, __m256 b, __m256 sum) { return _mm256_fmadd_ps(a, b, sum); }

AVX2_INLINE __m256 column(const __m256 *sums, int c) { return sums[c]; }

#endif
