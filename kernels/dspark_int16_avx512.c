/* Tiles of a product with 16-bit weights on vectors of sixteen lanes. */
#include "dspark_wide.h"

#define CODE WIDE_CODE
#define ITEM dspark_int16_avx512
#define WEIGHTS packed.codes
#define UNIT 2
#define CASES \
  CASE(1, 4) CASE(2, 4) CASE(3, 8) CASE(4, 8) CASE(5, 4) CASE(6, 8) \
  CASE(7, 8) CASE(8, 8) CASE(9, 4) CASE(10, 4) CASE(11, 4) CASE(12, 4)

typedef int16_t Weight;

INLINE __m512 load_scales(const float *scales, int64_t at) { return load_two_scales(scales + at); }

INLINE __m512 load_columns(const int16_t *from, int64_t step, int64_t count, __m512 scales) {
  (void)step, (void)count;
  return load_codes(from, scales);
}

#include "dspark_dense_tile.h"
