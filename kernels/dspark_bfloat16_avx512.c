/* Tiles of a product with bfloat16 weights on vectors of sixteen lanes. */
#include "dspark_wide.h"

#define CODE WIDE_CODE
#define ITEM dspark_bfloat16_avx512
#define WEIGHTS halves
#define UNIT 1
#define load_scales no_scales
#define CASES \
  CASE(1, 8) CASE(2, 8) CASE(3, 8) CASE(4, 8) CASE(5, 4) CASE(6, 8) \
  CASE(7, 8) CASE(8, 8) CASE(9, 4) CASE(10, 4) CASE(11, 4) CASE(12, 4)

typedef uint16_t Weight;

INLINE __m512 load_columns(const uint16_t *from, int64_t step, int64_t count, __m512 scales) {
  (void)scales;
  return load_two_halves(from, from + step, count);
}

#include "dspark_dense_tile.h"
