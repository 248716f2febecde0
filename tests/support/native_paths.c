/* Products and attention on narrow and on wide vectors, of random shapes: the results must be the same bits.  Prints how
 * many were compared, 0 where the processor has narrow vectors only. */
#include "dspark_attention.h"
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

static float *dense_product(const DenseMatMul *op, DenseItem *item, size_t size) {
  DenseMatMul own = *op;
  own.y = floats(op->rows * op->n);
  for (int64_t tile = 0; tile * tile_width(op->k, size) < op->n; tile++) item(&own, (size_t)tile);
  return own.y;
}

static int same_floats(const DenseMatMul *op, float *one, float *other, const char *kind) {
  int equal = !memcmp(one, other, (size_t)(op->rows * op->n) * sizeof(float));
  if (!equal) fprintf(stderr, "%s, %ld rows of %ld, %ld columns\n", kind, (long)op->rows, (long)op->k, (long)op->n);
  free(other);
  return equal;
}

static int same_dense(void) {
  int64_t rows = NARROW_ROWS + 1 + rand() % 40, k = 1 + rand() % 300, n = 1 + rand() % 120;
  float *x = floats(rows * k), *weight = floats(n * k);
  if (rand() % 5 == 0) x[rand() % (rows * k)] = rand() % 2 ? NAN : INFINITY;
  DenseMatMul op = {rows, k, n, x, weight, {0}, NULL, n, NULL};
  float *one = dense_product(&op, dspark_dense_avx2, sizeof(float));
  int equal = same_floats(&op, one, dense_product(&op, dspark_dense_avx512, sizeof(float)), "floats");
  free(x), free(weight), free(one);
  return equal;
}

static int same_bfloat16(void) {
  int64_t rows = 1 + rand() % 40, k = 1 + rand() % 300, n = 1 + rand() % 120;
  float *x = floats(rows * k);
  uint16_t *halves = malloc((size_t)(n * k) * sizeof *halves);
  for (int64_t i = 0; i < n * k; i++) halves[i] = (uint16_t)(0x3e00 + rand() % 512 + (rand() % 2 << 15));
  if (rand() % 5 == 0) x[rand() % (rows * k)] = rand() % 2 ? NAN : INFINITY;
  DenseMatMul op = {rows, k, n, x, NULL, {0}, NULL, n, halves};
  float *one = dense_product(&op, dspark_bfloat16_avx2, sizeof *halves);
  int equal = same_floats(&op, one, dense_product(&op, dspark_bfloat16_avx512, sizeof *halves), "bfloat16");
  if (k % 8 == 0)
    equal &= same_floats(&op, one, dense_product(&op, dspark_copied_avx512, sizeof(float)), "bfloat16, copied");
  free(x), free(halves), free(one);
  return equal;
}

static int same_int16(void) {
  int64_t rows = 1 + rand() % 40, k = BLOCK * (1 + rand() % 40), n = 1 + rand() % 120, columns = (n + 1) / 2 * 2;
  float *x = floats(rows * k), *scales = floats(columns * k / BLOCK);
  int16_t *codes = malloc((size_t)(columns * k) * sizeof *codes);
  for (int64_t i = 0; i < columns * k; i++) codes[i] = (int16_t)(rand() % 65535 - 32767);
  if (rand() % 5 == 0) x[rand() % (rows * k)] = rand() % 2 ? NAN : INFINITY;
  DenseMatMul op = {rows, k, n, x, NULL, {k, n, codes, scales}, NULL, n, NULL};
  float *one = dense_product(&op, dspark_int16_avx2, sizeof *codes);
  int equal = same_floats(&op, one, dense_product(&op, dspark_int16_avx512, sizeof *codes), "16 bits") &&
              same_floats(&op, one, dense_product(&op, dspark_copied_avx512, sizeof(float)), "16 bits, copied");
  free(x), free(scales), free(codes), free(one);
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

/* A tile for six queries at once and one by one. */
static int same_attention(void) {
  int64_t dim = 1 + rand() % 140, step = dim + PARTIAL;
  int count = 1 + rand() % WIDE_QUERIES, equal = 1;
  float *q = floats(count * dim), *keys = floats(POOL_TILE * dim), *values = floats(POOL_TILE * dim);
  float *one = floats(count * step), *other = floats(count * step);
  uint8_t seen[POOL_TILE];
  for (int j = 0; j < POOL_TILE; j++) seen[j] = rand() % 3 > 0;
  seen[0] = 1;
  VerifyAttention op = {.dim = dim, .scale = 3.0f, .softcap = rand() % 2 ? 2.0f : 0.0f};
  KvTile tile = {keys, values, rand() % 2};
  Query queries[WIDE_QUERIES];
  for (int i = 0; i < count; i++) {
    int64_t start = rand() % POOL_TILE, end = start + 1 + rand() % (POOL_TILE - start);
    int64_t known = rand() % 3 ? end : start + rand() % (end - start);
    queries[i] = (Query){q + i * dim, rand() % 2 ? 0 : start, known, end, seen, other + i * step};
    Query alone = queries[i];
    alone.out = one + i * step;
    dspark_attend_avx2(&op, &tile, &alone, 1);
  }
  dspark_attend_avx512(&op, &tile, queries, count);
  for (int i = 0; i < count; i++) equal &= !memcmp(one + i * step, other + i * step, (size_t)(dim + 2) * sizeof(float));
  if (!equal) fprintf(stderr, "attention, %d queries of %ld\n", count, (long)dim);
  free(q), free(keys), free(values), free(one), free(other);
  return equal;
}

int main(int argc, char **argv) {
  int wide = has_vnni() && __builtin_cpu_supports("avx512dq"), count = wide && argc > 1 ? atoi(argv[1]) : 0;
  srand(5);
  for (int i = 0; i < count; i++)
    if (!same_dense() || !same_bfloat16() || !same_int16() || !same_blocks(4) || !same_blocks(8) ||
        !same_attention())
      return 1;
  printf("%d\n", count);
  return 0;
}
