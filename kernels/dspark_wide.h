/* Vectors of sixteen lanes for products with float weights: eight of one column and eight of the next. */
#ifndef DSPARK_WIDE_H
#define DSPARK_WIDE_H

#include "dspark_cpu.h"
#include "dspark_lanes.h"

#include <immintrin.h>

#define WIDE_CODE __attribute__((target("avx512f,avx512dq,avx2,fma")))
#define INLINE static inline __attribute__((always_inline, target("avx512f,avx512dq,avx2,fma")))
#define PAIR 2
#define ROWS 12

typedef __m512 Floats;

INLINE __m512 load_row(const float *from, int64_t count) { return _mm512_broadcast_f32x8(get_eight(from, count)); }

INLINE __m512 load_two(const float *from, const float *next, int64_t count) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(get_eight(from, count)), get_eight(next, count), 1);
}

INLINE __m128i load_halves(const uint16_t *from, int64_t count) {
  uint16_t last[8] = {0};
  for (int64_t i = 0; count < 8 && i < count; i++) last[i] = from[i];
  return _mm_loadu_si128((const __m128i *)(count < 8 ? last : from));
}

INLINE __m512 load_two_halves(const uint16_t *from, const uint16_t *next, int64_t count) {
  __m256i two = _mm256_set_m128i(load_halves(next, count), load_halves(from, count));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(two), 16));
}

INLINE __m512 no_scales(const float *scales, int64_t at) {
  (void)scales, (void)at;
  return _mm512_setzero_ps();
}

INLINE __m512 load_two_scales(const float *scales) {
  return _mm512_mask_broadcastss_ps(_mm512_set1_ps(scales[0]), 0xff00, _mm_load_ss(scales + 1));
}

INLINE __m512 load_codes(const int16_t *from, __m512 scales) {
  __m512i codes = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)from));
  return _mm512_mul_ps(_mm512_cvtepi32_ps(codes), scales);
}

INLINE __m512 fused(__m512 a, __m512 b, __m512 sum) { return _mm512_fmadd_ps(a, b, sum); }

INLINE __m256 column(const __m512 *sums, int c) {
  return c % 2 ? _mm512_extractf32x8_ps(sums[c / 2], 1) : _mm512_castps512_ps256(sums[c / 2]);
}

#endif
