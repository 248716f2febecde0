/* Functions of eight floats, each in a fixed order of operations. */
#ifndef DSPARK_LANES_H
#define DSPARK_LANES_H

#include "dspark_cpu.h"

#include <immintrin.h>

/* Eight floats, or the first `count` of them when the head size leaves fewer. */
AVX2_INLINE __m256i first_lanes(int64_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

AVX2_INLINE __m256 get_eight(const float *from, int64_t count) {
  return count >= 8 ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, first_lanes(count));
}

AVX2_INLINE void put_eight(float *to, __m256 value, int64_t count) {
  if (count >= 8)
    _mm256_storeu_ps(to, value);
  else
    _mm256_maskstore_ps(to, first_lanes(count), value);
}

AVX2_INLINE float sum_of(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/* Cephes' expf: 2 units in the last place. */
AVX2_INLINE __m256 exp_lanes(__m256 x) {
  const __m256 low = _mm256_set1_ps(-87.3365f), one = _mm256_set1_ps(1.0f);
  __m256 seen = _mm256_cmp_ps(x, low, _CMP_NLT_UQ); /* NaN stays NaN, -inf becomes 0 */
  __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  n = _mm256_max_ps(_mm256_set1_ps(-126.0f), n);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x), y = _mm256_set1_ps(1.9875691500e-4f);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.3981999507e-3f));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(8.3334519073e-3f));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(4.1665795894e-2f));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.6666665459e-1f));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(5.0000001201e-1f));
  y = _mm256_fmadd_ps(y, _mm256_mul_ps(r, r), _mm256_add_ps(r, one));
  __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_and_ps(_mm256_mul_ps(y, _mm256_castsi256_ps(power)), seen);
}

#endif
