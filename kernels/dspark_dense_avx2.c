/* Tiles of a float product on vectors of eight lanes. */
#include "dspark_narrow.h"

#define WEIGHTS weight
#define ITEM dspark_dense_avx2

typedef float Weight;

AVX2_INLINE __m256 load_columns(const float *from, int64_t step, int64_t count, __m256 scales) {
  (void)step, (void)scales;
  return load_row(from, count);
}

#include "dspark_dense_tile.h"
