/* Tiles of an interleaved product on vectors of sixteen lanes, with AVX512-VNNI: one instruction adds four products of
 * bytes to every lane. */
#include "dspark_matmul.h"

#include <immintrin.h>
#include <string.h>

#define CODE __attribute__((target("avx512f,avx512bw,avx512vnni")))
#define INLINE static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512vnni")))
#define MULTIPLY dspark_multiply_avx512
#define V(name) _mm512_##name
#define ROW_TILE 8

/* The instruction takes unsigned bytes, so weights stay as they are stored: 128 more than they mean. */
enum { HALVES = 1, BYTES_ABOVE = 128 };

typedef __m512 Floats;
typedef __m512i Ints;

INLINE __m512i broadcast(const int8_t *four) {
  int value;
  memcpy(&value, four, sizeof value);
  return _mm512_set1_epi32(value);
}

/* Four elements of each column, unsigned: bytes, or nibbles, of these the even ones and the odd ones in turn. */
INLINE __m512i elements(const uint8_t *block, int i, int bits) {
  if (bits == 8) return _mm512_loadu_si512(block + i * 64);
  __m512i both = _mm512_loadu_si512(block + i / 2 * 64);
  return _mm512_and_si512(i % 2 ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15));
}

/* dots[r] = a block's dot products, of unsigned elements. */
INLINE void multiply_block(const uint8_t *block, const int8_t *const *q, int rows, int bits, __m512i (*dots)[HALVES]) {
  for (int r = 0; r < rows; r++) dots[r][0] = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    __m512i w = elements(block, i, bits);
    for (int r = 0; r < rows; r++) dots[r][0] = _mm512_dpbusd_epi32(dots[r][0], w, broadcast(q[r] + i * 4));
  }
}

#include "dspark_matmul_tile.h"
