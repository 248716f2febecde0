/* Products on narrow and on wide vectors, of random shapes: the results must be the same bits.  Prints how many were
 * compared, 0 where the processor has narrow vectors only. */
#include "dspark_dense.h"
#include "dspark_matmul.c"
#include "native_buffers.h"

#include <stdio.h>
#include <string.h>

static float *product(const InterleavedMatMul *op, Multiply *multiply) {
  InterleavedMatMul own = *op;
  own.y = floats(op->rows * op->weight.n);
  if (multiply_by(&own, &here, multiply)) exit(2);
  return own.y;
}

static float *dense_product(const DenseMatMul *op, DenseItem *item) {
  DenseMatMul own = *op;
  own.y = floats(op->rows * op->n);
  for (int64_t tile = 0; tile * tile_width(op) < op->n; tile++) item(&own, (size_t)tile);
  return own.y;
}

static int same_dense(void) {
  int64_t rows = NARROW_ROWS + 1 + rand() % 40, k = 1 + rand() % 300, n = 1 + rand() % 120;
  float *x = floats(rows * k), *weight = floats(n * k);
  if (rand() % 5 == 0) x[rand() % (rows * k)] = rand() % 2 ? NAN : INFINITY;
  DenseMatMul op = {rows, k, n, x, weight, NULL};
  float *one = dense_product(&op, dspark_dense_avx2), *other = dense_product(&op, dspark_dense_avx512);
  int equal = !memcmp(one, other, (size_t)(rows * n) * sizeof(float));
  if (!equal) fprintf(stderr, "floats, %ld rows of %ld, %ld columns\n", (long)rows, (long)k, (long)n);
  free(x), free(weight), free(one), free(other);
  return equal;
}

static int same_blocks(int bits) {
  int64_t rows = rand() % 20, groups = 1 + rand() % 70, n = 1 + rand() % 70;
  int64_t blocks = (n + INTERLEAVE - 1) / INTERLEAVE * INTERLEAVE * groups, bytes = blocks * 4 * bits;
  uint8_t *codes = malloc((size_t)bytes);
  int extreme = rand() % 4; /* all codes or activations at an end of their range */
  for (int64_t i = 0; i < bytes; i++) codes[i] = (uint8_t)(extreme == 1 ? 0 : extreme == 2 ? 255 : rand());
  float *x = floats(rows * groups * BLOCK), *scales = floats(blocks), *mins = rand() % 2 ? floats(blocks) : NULL;
  for (int64_t i = 0; i < rows * groups * BLOCK; i++)
    if (extreme) x[i] = i % (1 + rand() % 3) ? -1.0f : 1.0f;
  if (rows && rand() % 5 == 0) x[rand() % (rows * groups * BLOCK)] = rand() % 2 ? NAN : INFINITY;
  InterleavedMatMul op = {{groups * BLOCK, n, bits, codes, scales, mins}, rows, x, NULL};
  float *one = product(&op, dspark_multiply_avx2), *other = product(&op, dspark_multiply_avx512);
  int equal = !memcmp(one, other, (size_t)(rows * n) * sizeof(float));
  if (!equal) fprintf(stderr, "%d bits, %ld rows, %ld blocks, %ld columns\n", bits, (long)rows, (long)groups, (long)n);
  free(codes), free(x), free(scales), free(mins), free(one), free(other);
  return equal;
}

int main(int argc, char **argv) {
  int wide = has_vnni() && __builtin_cpu_supports("avx512dq"), count = wide && argc > 1 ? atoi(argv[1]) : 0;
  srand(5);
  for (int i = 0; i < count; i++)
    if (!(i % 3 ? same_blocks(4 * (i % 3)) : same_dense())) return 1;
  printf("%d\n", count);
  return 0;
}
