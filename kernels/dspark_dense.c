/* Matrix product with float weights as checkpoints store them, a row of weights for a column of the result. */
#include "dspark_dense.h"

void dspark_dense_matmul(const DenseMatMul *op, const Pool *pool) {
  int64_t width = tile_width(op);
  int wide = op->rows > NARROW_ROWS && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
  DenseItem *item = wide ? dspark_dense_avx512 : dspark_dense_avx2;
  if (op->rows) pool->run(pool, item, (size_t)((op->n + width - 1) / width), (void *)op);
}
