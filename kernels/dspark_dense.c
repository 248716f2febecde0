/* Matrix product with float weights as checkpoints store them, a row of weights for a column of the result.
 *
 * Every result is a dot product over k in one order: eight lanes add every eighth product, a fixed tree adds the lanes.
 * A few rows cost what one does, the time in which memory delivers the weights: they go through the registers once for
 * all rows of a tile.  Memory delivers fastest what is read in the order in which it lies, so one row takes a column
 * after the other, and the processor's own fetching keeps up; from the second row on it needs to be told what is next.
 */
#include "dspark_cpu.h"

#include <immintrin.h>
#include <string.h>

enum { LANES = 8, STEP = 4, ROWS = 6, COLUMNS = 2, COLUMN_TILE = 16, TILE_FLOATS = 1 << 16 };

static int64_t tile_width(const DenseMatMul *op) {
  int64_t width = TILE_FLOATS / op->k / COLUMNS * COLUMNS;
  return width < COLUMNS ? COLUMNS : width > COLUMN_TILE ? COLUMN_TILE : width;
}

/* Keeps the compiler from loading a value once for every use: loads are what limits the loop. */
AVX2_INLINE __m256 in_register(__m256 value) {
  __asm__("" : "+x"(value));
  return value;
}

/* Adds the products of eight elements, or of the first `count` ones. */
AVX2_INLINE void add_products(const float *x, const float *w, int64_t k, int64_t count, int rows, int columns,
                              __m256 (*sums)[COLUMNS]) {
  __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  __m256 b[COLUMNS];
  for (int c = 0; c < columns; c++)
    b[c] = in_register(count >= LANES ? _mm256_loadu_ps(w + c * k) : _mm256_maskload_ps(w + c * k, mask));
  for (int r = 0; r < rows; r++) {
    __m256 a = in_register(count >= LANES ? _mm256_loadu_ps(x + r * k) : _mm256_maskload_ps(x + r * k, mask));
    for (int c = 0; c < columns; c++) sums[r][c] = _mm256_fmadd_ps(a, b[c], sums[r][c]);
  }
}

/* The sums of two vectors' lanes, in the first two lanes. */
AVX2_INLINE __m128 add_lanes(__m256 a, __m256 b) {
  __m256 pairs = _mm256_hadd_ps(a, b), two = _mm256_hadd_ps(pairs, pairs);
  return _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
}

/* fetch: whether the weights of the next columns are wanted soon and are not in the cache. */
AVX2_INLINE void multiply_tile(const DenseMatMul *op, int64_t row, int64_t n, int rows, int columns, int fetch) {
  const float *x = op->x + row * op->k, *w = op->weight + n * op->k;
  __m256 sums[ROWS][COLUMNS];
  int64_t at = 0, k = op->k;
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++) sums[r][c] = _mm256_setzero_ps();
  for (; at + STEP * LANES <= k; at += STEP * LANES)
    for (int i = 0; i < STEP; i++) {
      int64_t from = at + i * LANES;
      for (int c = 0; c < columns && fetch && i % 2 == 0; c++) _mm_prefetch(w + (columns + c) * k + from, _MM_HINT_T0);
      add_products(x + from, w + from, k, LANES, rows, columns, sums);
    }
  for (; at < k; at += LANES) add_products(x + at, w + at, k, k - at, rows, columns, sums);
  for (int r = 0; r < rows; r++) {
    float four[4];
    _mm_storeu_ps(four, add_lanes(sums[r][0], sums[r][columns - 1]));
    memcpy(op->y + (row + r) * op->n + n, four, (size_t)columns * sizeof(float));
  }
}

/* Up to six rows times the columns first .. last - 1, as many at a time as the registers allow. */
AVX2_INLINE void multiply_rows(const DenseMatMul *op, int64_t row, int64_t first, int64_t last, int rows, int columns) {
  int64_t n = first;
  for (; n + columns <= last && (row || rows == 1); n += columns) multiply_tile(op, row, n, rows, columns, 0);
  for (; n + columns <= last; n += columns) multiply_tile(op, row, n, rows, columns, 1);
  for (; n < last; n++) multiply_tile(op, row, n, rows, 1, 0);
}

/* A tile of columns for all rows, small enough to stay in the second-level cache. */
AVX2_CODE static void multiply_item(void *argument, size_t tile) {
  const DenseMatMul *op = argument;
  int64_t width = tile_width(op), first = (int64_t)tile * width, last = first + width < op->n ? first + width : op->n;
  for (int64_t row = 0; row < op->rows; row += ROWS)
    switch (op->rows - row) {
      case 1: multiply_rows(op, row, first, last, 1, 1); break;
      case 2: multiply_rows(op, row, first, last, 2, 1); break;
      case 3: multiply_rows(op, row, first, last, 3, 1); break;
      case 4: multiply_rows(op, row, first, last, 4, 2); break;
      case 5: multiply_rows(op, row, first, last, 5, 2); break;
      default: multiply_rows(op, row, first, last, ROWS, 2);
    }
}

void dspark_dense_matmul(const DenseMatMul *op, const Pool *pool) {
  int64_t width = tile_width(op);
  if (op->rows) pool->run(pool, multiply_item, (size_t)((op->n + width - 1) / width), (void *)op);
}
