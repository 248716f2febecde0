/* One product with float weights, as its parts see it. */
#ifndef DSPARK_DENSE_H
#define DSPARK_DENSE_H

#include "dspark_cpu.h"

enum { COLUMNS = 8, COLUMN_TILE = 48, TILE_FLOATS = 1 << 15, COPIED_COLUMNS = 4 };

/* Columns of a tile of weights of `size` bytes, few enough that two tiles stay in the second-level cache. */
static inline int64_t tile_width(int64_t k, size_t size) {
  int64_t times = sizeof(float) / size, columns = COPIED_COLUMNS * times;
  int64_t width = TILE_FLOATS * times / k / columns * columns;
  return width < columns ? columns : width > COLUMN_TILE ? COLUMN_TILE : width;
}

/* All rows of a DenseMatMul times one tile of columns.  Processors differ in speed, never in a bit. */
typedef void DenseItem(void *op, size_t tile);

DenseItem dspark_dense_avx2;
DenseItem dspark_dense_avx512;  /* for more rows than dspark_dense_avx2 multiplies at once */
DenseItem dspark_bfloat16_avx2; /* weights in 16 bits */
DenseItem dspark_bfloat16_avx512;
DenseItem dspark_int16_avx2;
DenseItem dspark_int16_avx512;
DenseItem dspark_copied_avx512; /* either for many rows; k is a multiple of 8, and COPIED_COLUMNS fit into a tile of floats */

enum { NARROW_ROWS = 6 };

#endif
