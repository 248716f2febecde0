/* Tiles of an interleaved product on vectors of eight lanes. */
#include "dspark_matmul.h"

#include <immintrin.h>

#define CODE AVX2_CODE
#define INLINE AVX2_INLINE
#define MULTIPLY dspark_multiply_avx2
#define V(name) _mm256_##name
#define ROW_TILE 6

enum { HALVES = 2, BYTES_ABOVE = 0 };

typedef __m256 Floats;
typedef __m256i Ints;

AVX2_INLINE __m256i broadcast(const int8_t *four) {
  return _mm256_castps_si256(_mm256_broadcast_ss((const float *)four));
}

/* Keeps a sum where it is: the compiler would first form all products, more than there are registers. */
#define KEEP(sum) __asm__ volatile("" : "+x"(sum))

/* Four elements of each column, signed bytes or nibbles: of nibbles the even ones and the odd ones in turn. */
AVX2_INLINE __m256i elements(const uint8_t *block, int i, int h, int bits) {
  const __m256i *quads = (const __m256i *)block;
  if (bits == 8) return _mm256_xor_si256(_mm256_loadu_si256(quads + i * HALVES + h), _mm256_set1_epi8(-128));
  __m256i both = _mm256_loadu_si256(quads + i / 2 * HALVES + h);
  return _mm256_and_si256(i % 2 ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
}

/* dots[r] = a block's dot products.  Nibbles: unsigned, at most 16 * 15 * 127 = 30480 in an int16 lane.  Bytes:
 * |w| <= 128 unsigned times the activation under w's sign, at most 2 * 128 * 127 = 32512 in an int16 lane. */
AVX2_INLINE void multiply_block(const uint8_t *block, const int8_t *const *q, int rows, int bits,
                                __m256i (*dots)[HALVES]) {
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    __m256i w[HALVES], size[HALVES];
    for (int h = 0; h < HALVES; h++) {
      w[h] = elements(block, i, h, bits);
      size[h] = bits == 8 ? _mm256_abs_epi8(w[h]) : w[h];
    }
    for (int r = 0; r < rows; r++) {
      __m256i x = broadcast(q[r] + i * 4);
      for (int h = 0; h < HALVES; h++) {
        __m256i dot = _mm256_maddubs_epi16(size[h], bits == 8 ? _mm256_sign_epi8(x, w[h]) : x);
        if (bits == 8) dot = _mm256_madd_epi16(dot, ones);
        if (i) dot = bits == 8 ? _mm256_add_epi32(dots[r][h], dot) : _mm256_add_epi16(dots[r][h], dot);
        dots[r][h] = dot;
        KEEP(dots[r][h]);
      }
    }
  }
  for (int r = 0; r < rows && bits == 4; r++)
    for (int h = 0; h < HALVES; h++) dots[r][h] = _mm256_madd_epi16(dots[r][h], ones);
}

#include "dspark_matmul_tile.h"
