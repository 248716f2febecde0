/* Tiles of a product with bfloat16 weights on vectors of eight lanes. */
#include "dspark_narrow.h"

#define WEIGHTS halves
#define ITEM dspark_bfloat16_avx2

typedef uint16_t Weight;

AVX2_INLINE __m256 load_columns(const uint16_t *from, int64_t step, int64_t count, __m256 scales) {
  (void)step, (void)scales;
  uint16_t last[8] = {0};
  for (int64_t i = 0; count < 8 && i < count; i++) last[i] = from[i];
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(count < 8 ? last : from)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

#include "dspark_dense_tile.h"
