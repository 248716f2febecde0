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

#define FLOATS __m256
#define EXP exp_lanes
#define TARGET AVX2_INLINE
#define V(name) _mm256_##name
#define ROUND(x) _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define ABOVE(x, least, y) _mm256_and_ps(y, _mm256_cmp_ps(x, least, _CMP_NLT_UQ))
#include "dspark_exp.h"

#endif
