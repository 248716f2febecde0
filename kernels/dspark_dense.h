/* One product with float weights, as its parts see it. */
#ifndef DSPARK_DENSE_H
#define DSPARK_DENSE_H

#include "dspark_cpu.h"

enum { COLUMNS = 4, COLUMN_TILE = 48, TILE_FLOATS = 1 << 15 };

/* Columns of a tile, few enough that two tiles stay in the second-level cache. */
static inline int64_t tile_width(const DenseMatMul *op) {
  int64_t width = TILE_FLOATS / op->k / COLUMNS * COLUMNS;
  return width < COLUMNS ? COLUMNS : width > COLUMN_TILE ? COLUMN_TILE : width;
}

/* All rows of a DenseMatMul times one tile of columns.  Processors differ in speed, never in a bit. */
typedef void DenseItem(void *op, size_t tile);

DenseItem dspark_dense_avx2;
DenseItem dspark_dense_avx512; /* for more rows than dspark_dense_avx2 multiplies at once */

enum { NARROW_ROWS = 6 };

#endif
