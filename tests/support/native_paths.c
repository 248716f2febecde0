/* Both ways of multiplying blocks, on random shapes: the results must be the same bits.  Prints how many shapes were
 * compared, 0 where the processor has one way only. */
#include "dspark_matmul.c"

#include <stdio.h>
#include <string.h>

static void serial(const Pool *pool, void (*body)(void *, size_t), size_t count, void *argument) {
  (void)pool;
  for (size_t i = 0; i < count; i++) body(argument, i);
}

static float *floats(int64_t count) {
  float *values = malloc((size_t)count * sizeof(float) + 1);
  for (int64_t i = 0; i < count; i++) values[i] = (float)rand() / (float)RAND_MAX - 0.5f;
  return values;
}

static float *product(const InterleavedMatMul *op, Multiply *multiply) {
  const Pool here = {serial, NULL, NULL};
  InterleavedMatMul own = *op;
  own.y = floats(op->rows * op->weight.n);
  if (multiply_by(&own, &here, multiply)) exit(2);
  return own.y;
}

static int same(int bits) {
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
  int count = has_vnni() && argc > 1 ? atoi(argv[1]) : 0;
  srand(5);
  for (int i = 0; i < count; i++)
    if (!same(i % 2 ? 4 : 8)) return 1;
  printf("%d\n", count);
  return 0;
}
