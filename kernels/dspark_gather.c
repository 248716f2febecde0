/* Rows of an embedding out of the head that it is tied to: interleaved blocks, or 16-bit codes. */
#include "dspark_cpu.h"

enum { QUAD = 4, PAIR = 2, LANES = 8, SERIAL_WORK = 1 << 15 };

/* One block of a column: scale * (code - 2^(bits - 1)) + min. */
static void take_block(const Interleaved *w, int64_t block, int64_t column, float *y) {
  const uint8_t *codes = w->codes + (block * w->bits * INTERLEAVE + column) * QUAD;
  float scale = w->scales[block * INTERLEAVE + column], min = w->mins ? w->mins[block * INTERLEAVE + column] : 0.0f;
  for (int i = 0; i < QUAD * w->bits; i++) {
    int code = codes[i / QUAD * INTERLEAVE * QUAD + i % QUAD];
    if (w->bits == 8)
      y[i] = (float)(code - 128) * scale + min;
    else
      y[2 * i] = (float)((code & 15) - 8) * scale + min, y[2 * i + 1] = (float)((code >> 4) - 8) * scale + min;
  }
}

static void take_row(void *argument, size_t row) {
  const InterleavedGather *op = argument;
  int64_t id = op->ids[row], blocks = op->weight.k / BLOCK, first = id / INTERLEAVE * blocks;
  float *y = op->y + (int64_t)row * op->weight.k;
  for (int64_t b = 0; b < blocks; b++) take_block(&op->weight, first + b, id % INTERLEAVE, y + b * BLOCK);
}

void dspark_interleaved_gather(const InterleavedGather *op, const Pool *pool) {
  run_items(pool, take_row, (size_t)op->rows, (void *)op, op->rows * op->weight.k < SERIAL_WORK);
}

static void take_int16_row(void *argument, size_t row) {
  const Int16Gather *op = argument;
  int64_t k = op->weight.k, pair = op->ids[row] / PAIR * PAIR, side = op->ids[row] % PAIR;
  const int16_t *codes = op->weight.codes + pair * k + side * LANES;
  const float *scales = op->weight.scales + pair * (k / BLOCK) + side;
  float *y = op->y + (int64_t)row * k;
  for (int64_t eight = 0; eight < k / LANES; eight++, codes += PAIR * LANES, y += LANES)
    for (int i = 0; i < LANES; i++) y[i] = (float)codes[i] * scales[eight * LANES / BLOCK * PAIR];
}

void dspark_int16_gather(const Int16Gather *op, const Pool *pool) {
  run_items(pool, take_int16_row, (size_t)op->rows, (void *)op, op->rows * op->weight.k < SERIAL_WORK);
}
