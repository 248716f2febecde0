/* Matrix product with float weights: a row of them for a column of the result, as floats or in 16 bits. */
#include "dspark_dense.h"

enum { MANY_ROWS = 128 };

void dspark_dense_matmul(const DenseMatMul *op, const Pool *pool) {
  int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
  int copied = wide && !op->weight && op->rows >= MANY_ROWS && COPIED_COLUMNS * op->k <= TILE_FLOATS;
  int64_t width = tile_width(op->k, op->weight || copied ? sizeof(float) : sizeof(int16_t));
  DenseItem *floats = wide && op->rows > NARROW_ROWS ? dspark_dense_avx512 : dspark_dense_avx2;
  DenseItem *packed = copied ? dspark_copied_avx512 : wide ? dspark_int16_avx512 : dspark_int16_avx2;
  if (op->rows) pool->run(pool, op->weight ? floats : packed, (size_t)((op->n + width - 1) / width), (void *)op);
}
