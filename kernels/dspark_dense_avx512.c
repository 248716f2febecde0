/* Tiles of a float product on vectors of sixteen lanes. */
#include "dspark_wide.h"

#define CODE WIDE_CODE
#define ITEM dspark_dense_avx512
#define WEIGHTS weight
#define UNIT 1
#define load_scales no_scales
#define CASES CASE(6, 4) CASE(7, 4) CASE(8, 4) CASE(9, 4) CASE(10, 4) CASE(11, 4) CASE(12, 4)

typedef float Weight;

INLINE __m512 load_columns(const float *from, int64_t step, int64_t count, __m512 scales) {
  (void)scales;
  return load_two(from, from + step, count);
}

#include "dspark_dense_tile.h"
