/* A tile of attention on vectors of sixteen lanes: of two queries eight elements each, of values sixteen. */
#include "dspark_attention.h"
#include "dspark_wide.h"

#define FLOATS __m512
#define EXP exp_floats
#define TARGET INLINE
#define V(name) _mm512_##name
#define ROUND(x) _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define ABOVE(x, least, y) _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), y)
#include "dspark_exp.h"

#define ATTEND dspark_attend_avx512
#define CODE WIDE_CODE
#define QUERIES WIDE_QUERIES
#define V(name) _mm512_##name
#define COUNTS CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#define WIDTH 16
#define KEYS 8

INLINE __m512 get(const float *from, int64_t count) {
  return count >= WIDTH ? _mm512_loadu_ps(from) : _mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
}

INLINE void put(float *to, __m512 value, int64_t count) {
  if (count >= WIDTH)
    _mm512_storeu_ps(to, value);
  else
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), value);
}

INLINE __m512 load_queries(const Query *first, const Query *second, int64_t d, int64_t left) {
  return load_two(first->q + d, second->q + d, left);
}

INLINE __m256 part(__m512 sums, int i) { return i ? _mm512_extractf32x8_ps(sums, 1) : _mm512_castps512_ps256(sums); }

INLINE void put_scores(const __m512 *halves, float *first, float *second) {
  __m512 low = _mm512_shuffle_f32x4(halves[0], halves[1], 0x88), high = _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd);
  __m512 dots = _mm512_add_ps(low, high);
  dots = _mm512_shuffle_f32x4(dots, dots, 0xd8);
  _mm256_storeu_ps(first, part(dots, 0));
  _mm256_storeu_ps(second, part(dots, 1));
}

#include "dspark_attention_tile.h"
