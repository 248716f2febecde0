/* Runs the kernels on random shapes with every buffer exactly as long as stated; meant for sanitizers. */
#include "native_buffers.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static int64_t between(int64_t low, int64_t high) { return low + rand() % (high - low + 1); }

static int multiply(void) {
  int64_t rows = between(0, 40), groups = between(1, 70), n = between(1, 70), bits = 4 * between(1, 2);
  int64_t blocks = (n + INTERLEAVE - 1) / INTERLEAVE * INTERLEAVE * groups, bytes = blocks * 4 * bits;
  uint8_t *codes = malloc((size_t)bytes);
  for (int64_t i = 0; i < bytes; i++) codes[i] = (uint8_t)rand();
  float *x = floats(rows * groups * BLOCK), *scales = floats(blocks), *y = floats(rows * n);
  float *mins = between(0, 1) ? floats(blocks) : NULL, *taken = floats(rows * groups * BLOCK);
  int64_t *ids = malloc((size_t)rows * sizeof *ids);
  for (int64_t i = 0; i < rows; i++) ids[i] = between(0, n - 1);
  Interleaved weight = {groups * BLOCK, n, (int)bits, codes, scales, mins};
  InterleavedMatMul product = {weight, rows, x, y};
  InterleavedGather gather = {weight, rows, ids, taken};
  int bad = dspark_interleaved_matmul(&product, &here);
  dspark_interleaved_gather(&gather, &here);
  for (int64_t i = 0; i < rows * n; i++) bad |= !isfinite(y[i]);
  for (int64_t i = 0; i < rows * groups * BLOCK; i++) bad |= !isfinite(taken[i]);
  free(codes), free(x), free(scales), free(y), free(mins), free(taken), free(ids);
  return bad;
}

static int multiply_dense(void) {
  int64_t rows = between(0, 20), k = between(1, 300), n = between(1, 120);
  float *x = floats(rows * k), *weight = floats(n * k), *y = floats(rows * n);
  DenseMatMul product = {rows, k, n, x, weight, {0}, y, n, NULL};
  int bad = 0;
  dspark_dense_matmul(&product, &here);
  for (int64_t i = 0; i < rows * n; i++) bad |= !isfinite(y[i]);
  free(x), free(weight), free(y);
  return bad;
}

/* With weights in bfloat16 every result has the bits that the floats give. */
static int multiply_bfloat16(void) {
  int64_t rows = between(0, 9) ? between(0, 20) : between(120, 140), k = between(1, 300), n = between(1, 120);
  if (rows > 20) k = 8 * between(1, 40);
  uint16_t *halves = malloc((size_t)(n * k) * sizeof *halves);
  float *x = floats(rows * k), *weight = floats(n * k), *y = floats(rows * n), *wanted = floats(rows * n);
  for (int64_t i = 0; i < n * k; i++) {
    uint32_t bits;
    memcpy(&bits, &weight[i], sizeof bits);
    halves[i] = (uint16_t)(bits >> 16);
    bits &= 0xffff0000;
    memcpy(&weight[i], &bits, sizeof bits);
  }
  DenseMatMul product = {rows, k, n, x, NULL, {0}, y, n, halves}, dense = {rows, k, n, x, weight, {0}, wanted, n, NULL};
  dspark_dense_matmul(&product, &here);
  dspark_dense_matmul(&dense, &here);
  int bad = memcmp(y, wanted, (size_t)(rows * n) * sizeof *y);
  free(x), free(weight), free(halves), free(y), free(wanted);
  return bad;
}

/* The same with 16-bit codes and scales. */
static int multiply_int16(void) {
  int64_t rows = between(0, 9) ? between(0, 20) : between(120, 140), k = BLOCK * between(1, 12), n = between(1, 120);
  int64_t columns = (n + 1) / 2 * 2;
  int16_t *codes = malloc((size_t)(columns * k) * sizeof *codes);
  for (int64_t i = 0; i < columns * k; i++) codes[i] = (int16_t)between(-32767, 32767);
  float *x = floats(rows * k), *scales = floats(columns * k / BLOCK), *weight = floats(n * k);
  float *y = floats(rows * n), *wanted = floats(rows * n);
  int64_t *ids = malloc((size_t)n * sizeof *ids);
  for (int64_t i = 0; i < n; i++) ids[i] = i;
  Int16Matrix packed = {k, n, codes, scales};
  Int16Gather gather = {packed, n, ids, weight};
  DenseMatMul product = {rows, k, n, x, NULL, packed, y, n, NULL}, dense = {rows, k, n, x, weight, {0}, wanted, n, NULL};
  dspark_int16_gather(&gather, &here);
  dspark_dense_matmul(&product, &here);
  dspark_dense_matmul(&dense, &here);
  int bad = memcmp(y, wanted, (size_t)(rows * n) * sizeof *y);
  free(codes), free(x), free(scales), free(weight), free(y), free(wanted), free(ids);
  return bad;
}

static int add_and_normalise(void) {
  int64_t rows = between(0, 20), n = between(1, 300);
  float *skip = floats(rows * n), *sum = floats(rows * n), *gain = floats(n), *y = floats(rows * n);
  SkipNorm op = {rows, n, skip, gain, 1e-5f, sum, y};
  int bad = 0;
  dspark_skip_norm(&op, &here);
  for (int64_t i = 0; i < rows * n; i++) bad |= !isfinite(y[i]);
  free(skip), free(sum), free(gain), free(y);
  return bad;
}

/* A pool holds numbers where the next rows may look, and NaN elsewhere: nothing there may reach a result. */
static float *pool_of(const VerifyAttention *op, const int32_t *past) {
  int64_t rows = op->slots * op->kv_heads * op->pool_rows;
  float *pool = floats(rows * op->dim), *number = floats(op->dim);
  for (int64_t i = 0; i < rows * op->dim; i++) pool[i] = NAN;
  for (int64_t head = 0; head < op->slots * op->kv_heads; head++) {
    int64_t end = past[head / op->kv_heads], first = op->window > 0 && end >= op->window ? end - op->window + 1 : 0;
    for (int64_t at = first; at < end; at++)
      for (int64_t d = 0; d < op->dim; d++)
        pool[(head * op->pool_rows + at % op->pool_rows) * op->dim + d] = number[d];
  }
  free(number);
  return pool;
}

static int attend(void) {
  int64_t batch = between(1, 3), kv = between(1, 3), heads = kv * between(1, 8), rows = between(1, 20);
  int64_t dim = between(1, 70), window = between(0, 1) ? between(1, 200) : -1, ring = window > 0 && between(0, 1);
  int64_t pool = ring ? (window + rows + POOL_TILE - 2) / POOL_TILE * POOL_TILE : rows + between(0, 300);
  int64_t queries = batch * heads * rows * dim;
  float *q = floats(queries), *o = floats(queries), *sinks = between(0, 1) ? floats(heads) : NULL;
  float *k = floats(batch * kv * rows * dim), *v = floats(batch * kv * rows * dim);
  int32_t *past = malloc((size_t)batch * sizeof *past);
  uint8_t *tree = between(0, 1) ? malloc((size_t)(batch * rows * rows)) : NULL;
  for (int64_t b = 0; b < batch; b++) {
    past[b] = (int32_t)between(0, ring ? 1000 : pool - rows);
    for (int64_t i = 0; tree && i < rows * rows; i++) tree[b * rows * rows + i] = i / rows == i % rows || rand() % 2;
  }
  VerifyAttention op = {.batch = batch, .heads = heads, .kv_heads = kv, .rows = rows, .dim = dim, .pool_rows = pool,
                        .slots = batch, .q = q, .k = k, .v = v, .past = past, .sinks = sinks, .tree = tree,
                        .scale = 0.3f, .softcap = between(0, 1) ? 5.0f : 0.0f, .window = window,
                        .q_batch = heads * rows * dim, .q_head = rows * dim, .q_row = dim,
                        .o_batch = heads * rows * dim, .o_head = rows * dim, .o_row = dim, .o = o};
  op.k_pool = pool_of(&op, past), op.v_pool = pool_of(&op, past);
  int bad = !dspark_has_room(&op, 0) || dspark_verify_attention(&op, &here);
  for (int64_t i = 0; i < queries; i++) bad |= !isfinite(o[i]);
  free(q), free(o), free(sinks), free(k), free(v), free(op.k_pool), free(op.v_pool), free(past), free(tree);
  return bad;
}

/* Rows of several sequences packed into one batch, some slots without rows. */
static int attend_packed(void) {
  int64_t slots = between(1, 5), kv = between(1, 3), heads = kv * between(1, 4), dim = between(1, 70), pool = between(25, 300);
  int32_t past[5], offsets[6] = {0};
  for (int64_t i = 0; i < slots; i++) {
    int64_t count = between(0, 25);
    offsets[i + 1] = offsets[i] + (int32_t)count;
    past[i] = (int32_t)between(0, pool - count);
  }
  int64_t rows = offsets[slots];
  float *q = floats(heads * rows * dim), *o = floats(heads * rows * dim);
  float *k = floats(kv * rows * dim), *v = floats(kv * rows * dim);
  float *k_pool = floats(slots * kv * pool * dim), *v_pool = floats(slots * kv * pool * dim);
  VerifyAttention op = {.batch = 1, .heads = heads, .kv_heads = kv, .rows = rows, .dim = dim, .pool_rows = pool,
                        .slots = slots, .q = q, .k = k, .v = v, .k_pool = k_pool, .v_pool = v_pool, .past = past,
                        .offsets = offsets, .scale = 0.3f, .window = -1, .q_head = rows * dim, .q_row = dim,
                        .o_head = rows * dim, .o_row = dim, .o = o};
  int bad = dspark_verify_attention(&op, &here);
  for (int64_t i = 0; i < heads * rows * dim; i++) bad |= !isfinite(o[i]);
  free(q), free(o), free(k), free(v), free(k_pool), free(v_pool);
  return bad;
}

int main(int count, char **arguments) {
  int rounds = count > 1 ? atoi(arguments[1]) : 100;
  srand(1);
  for (int i = 0; i < rounds; i++) {
    if (multiply() || multiply_dense() || multiply_bfloat16() || multiply_int16() || add_and_normalise() || attend() || attend_packed()) {
      printf("round %d: a result is not finite\n", i);
      return 1;
    }
  }
  return 0;
}
