/* Tiles of a product of many rows and 16-bit weights, which become floats once and not in every pass over some rows. */
#include "dspark_dense.h"
#include "dspark_wide.h"

#define CODE static WIDE_CODE
#define ITEM multiply_copy
#define WEIGHTS weight
#define UNIT 2
#define LINES 0 /* the copy is in the nearest caches, and nothing lies behind it */
#define load_scales no_scales
#define CASES \
  CASE(1, 4) CASE(2, 4) CASE(3, 4) CASE(4, 4) CASE(5, 4) CASE(6, 4) \
  CASE(7, 4) CASE(8, 4) CASE(9, 4) CASE(10, 4) CASE(11, 4) CASE(12, 4)

typedef float Weight;

INLINE __m512 load_columns(const float *from, int64_t step, int64_t count, __m512 scales) {
  (void)step, (void)count, (void)scales;
  return _mm512_load_ps(from);
}

#include "dspark_dense_tile.h"

/* The columns n and n + 1; where there is no second one, the first again, as nothing is stored of it. */
INLINE void copy_halves(const DenseMatMul *op, int64_t n, float *to) {
  const uint16_t *first = op->halves + n * op->k, *second = n + 1 < op->n ? first + op->k : first;
  for (int64_t i = 0; i < op->k; i += LANES)
    _mm512_store_ps(to + UNIT * i, load_two_halves(first + i, second + i, LANES));
}

INLINE void copy_codes(const DenseMatMul *op, int64_t n, float *to) {
  const int16_t *codes = op->packed.codes + n * op->k;
  const float *scales = op->packed.scales + n * (op->k / BLOCK);
  for (int64_t b = 0; b < UNIT * op->k / BLOCK; b += UNIT) {
    __m512 both = load_two_scales(scales + b);
    for (int64_t i = b * BLOCK; i < (b + UNIT) * BLOCK; i += UNIT * LANES)
      _mm512_store_ps(to + i, load_codes(codes + i, both));
  }
}

WIDE_CODE void dspark_copied_avx512(void *argument, size_t tile) {
  const DenseMatMul *op = argument;
  int64_t width = tile_width(op->k, sizeof(Weight)), first = (int64_t)tile * width;
  int64_t n = op->n - first < width ? op->n - first : width;
  float copy[TILE_FLOATS] __attribute__((aligned(64)));
  for (int64_t c = 0; c < n; c += UNIT)
    if (op->halves)
      copy_halves(op, first + c, copy + c * op->k);
    else
      copy_codes(op, first + c, copy + c * op->k);
  DenseMatMul own = {op->rows, op->k, n, op->x, copy, {0}, op->y + first, op->y_step, NULL};
  multiply_copy(&own, 0);
}
