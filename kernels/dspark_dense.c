/* Matrix product with float weights: a row of them for a column of the result, as floats or in 16 bits. */
#include "dspark_dense.h"

enum { MANY_ROWS = 128 };

void dspark_dense_matmul(const DenseMatMul *op, const Pool *pool) {
  int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
  int copied = wide && !op->weight && op->rows >= MANY_ROWS && op->k % 8 == 0 && COPIED_COLUMNS * op->k <= TILE_FLOATS;
  int64_t width = tile_width(op->k, op->weight || copied ? sizeof(float) : sizeof(int16_t));
  DenseItem *floats = wide && op->rows > NARROW_ROWS ? dspark_dense_avx512 : dspark_dense_avx2;
  DenseItem *halves = wide ? dspark_bfloat16_avx512 : dspark_bfloat16_avx2;
  DenseItem *packed = wide ? dspark_int16_avx512 : dspark_int16_avx2;
  DenseItem *item = copied ? dspark_copied_avx512 : op->weight ? floats : op->halves ? halves : packed;
  if (op->rows) pool->run(pool, item, (size_t)((op->n + width - 1) / width), (void *)op);
}
