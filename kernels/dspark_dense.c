/* Matrix product with float weights as checkpoints store them, a row of weights for a column of the result.
 *
 * Every result is a dot product over k in one order: eight lanes add every eighth product, a fixed tree adds the lanes.
 * A few rows cost what one does, the time in which memory delivers the weights: they go through the registers once
 * for six rows.  Memory delivers fastest from several places at once, each read in the order in which it lies: the
 * processor fetches ahead for each of them, but not past the end of a page.  So the columns of a tile are far apart.
 * Several rows leave it too little time for that: while a tile is multiplied, the one behind it is fetched, evenly over
 * the passes through the tile, so that memory is never idle.  Then two places are enough.
 */
#include "dspark_cpu.h"

#include <immintrin.h>

enum { LANES = 8, STEP = 4, ROWS = 6, COLUMNS = 4, COLUMN_TILE = 48, TILE_FLOATS = 1 << 15, LINE = 16, SEVERAL = 2 };

/* What one pass fetches for each STEP * LANES weights of a column: some of their two lines, `ahead` floats further. */
typedef struct {
  int64_t ahead;
  int lines;
} Fetch;

static int64_t tile_width(const DenseMatMul *op) {
  int64_t width = TILE_FLOATS / op->k / COLUMNS * COLUMNS;
  return width < COLUMNS ? COLUMNS : width > COLUMN_TILE ? COLUMN_TILE : width;
}

/* Keeps the compiler from loading a value once for every use: loads are what limits the loop. */
AVX2_INLINE __m256 in_register(__m256 value) {
  __asm__("" : "+x"(value));
  return value;
}

AVX2_INLINE __m256 load(const float *from, int64_t count) {
  __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  return in_register(count >= LANES ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, mask));
}

/* Adds the products of eight elements, or of the first `count` ones; `step` floats lie between columns. */
AVX2_INLINE void add_products(const float *x, const float *w, int64_t k, int64_t step, int64_t count, int rows,
                              int columns, __m256 (*sums)[COLUMNS]) {
  __m256 a, b[COLUMNS];
  for (int c = 0; c < columns; c++) b[c] = load(w + c * step, count);
  for (int r = 0; r < rows; r++) {
    a = load(x + r * k, count);
    for (int c = 0; c < columns; c++) sums[r][c] = _mm256_fmadd_ps(a, b[c], sums[r][c]);
  }
}

/* The sums of two vectors' lanes, in the first two lanes. */
AVX2_INLINE __m128 add_lanes(__m256 a, __m256 b) {
  __m256 pairs = _mm256_hadd_ps(a, b), two = _mm256_hadd_ps(pairs, pairs);
  return _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
}

/* One line of two, or both: into the nearest cache as well then, as no second pass needs the room there. */
AVX2_INLINE void fetch_lines(const float *from, int lines) {
  if (lines == 1) {
    _mm_prefetch(from, _MM_HINT_T1);
  } else if (lines == 2) {
    _mm_prefetch(from, _MM_HINT_T0);
    _mm_prefetch(from + LINE, _MM_HINT_T0);
  }
}

/* Columns n, n + apart, ... of some rows. */
AVX2_INLINE void multiply_tile(const DenseMatMul *op, int64_t row, int64_t n, int64_t apart, int rows, int columns,
                               Fetch fetch) {
  const float *x = op->x + row * op->k, *w = op->weight + n * op->k, *later = w + fetch.ahead;
  __m256 sums[ROWS][COLUMNS];
  int64_t at = 0, k = op->k, step = apart * k;
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++) sums[r][c] = _mm256_setzero_ps();
  for (; at + STEP * LANES <= k; at += STEP * LANES) {
    for (int c = 0; c < columns; c++) fetch_lines(later + c * step + at, fetch.lines);
    for (int64_t i = at; i < at + STEP * LANES; i += LANES)
      add_products(x + i, w + i, k, step, LANES, rows, columns, sums);
  }
  for (; at < k; at += LANES) add_products(x + at, w + at, k, step, k - at, rows, columns, sums);
  for (int r = 0; r < rows; r++) {
    float *y = op->y + (row + r) * op->n + n;
    for (int c = 0; c < columns; c += 2) {
      int next = c + 1 < columns ? c + 1 : c;
      __m128 two = add_lanes(sums[r][c], sums[r][next]);
      y[c * apart] = _mm_cvtss_f32(two);
      y[next * apart] = _mm_cvtss_f32(_mm_movehdup_ps(two));
    }
  }
}

/* Up to six rows times the columns first .. last - 1, `columns` at a time. */
AVX2_INLINE void multiply_rows(const DenseMatMul *op, int64_t row, int64_t first, int64_t last, int rows, int columns,
                               Fetch fetch) {
  int64_t apart = (last - first) / columns, n = first;
  for (; n < first + apart; n++) multiply_tile(op, row, n, apart, rows, columns, fetch);
  for (n = first + apart * columns; n < last; n++) multiply_tile(op, row, n, 0, rows, 1, fetch);
}

/* A single pass fetches all of the next tile, the first two of several half of it each. */
static Fetch to_fetch(const DenseMatMul *op, int64_t width, int pass) {
  int64_t tile = width * op->k;
  if (op->rows > ROWS) return (Fetch){pass == 1 ? tile + LINE : tile, pass < 2};
  return (Fetch){tile, op->rows < SEVERAL ? 0 : 2};
}

/* A tile of columns for all rows, small enough to stay in the second-level cache. */
AVX2_CODE static void multiply_item(void *argument, size_t tile) {
  const DenseMatMul *op = argument;
  int64_t width = tile_width(op), first = (int64_t)tile * width, last = first + width < op->n ? first + width : op->n;
  int pass = 0;
  for (int64_t row = 0, rows; row < op->rows; row += rows, pass++) {
    Fetch fetch = to_fetch(op, width, pass);
    rows = op->rows - row;
    rows = rows <= ROWS ? rows : rows < 2 * ROWS ? (rows + 1) / 2 : ROWS;
    switch (rows) {
      case 1: multiply_rows(op, row, first, last, 1, 4, fetch); break;
      case 2: multiply_rows(op, row, first, last, 2, 2, fetch); break;
      case 3: multiply_rows(op, row, first, last, 3, 2, fetch); break;
      case 4: multiply_rows(op, row, first, last, 4, 2, fetch); break;
      case 5: multiply_rows(op, row, first, last, 5, 2, fetch); break;
      default: multiply_rows(op, row, first, last, ROWS, 2, fetch);
    }
  }
}

void dspark_dense_matmul(const DenseMatMul *op, const Pool *pool) {
  int64_t width = tile_width(op);
  if (op->rows) pool->run(pool, multiply_item, (size_t)((op->n + width - 1) / width), (void *)op);
}
