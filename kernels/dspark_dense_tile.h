/* The product of a tile of columns by some rows; included once for each width of vectors.
 *
 * Every result is a dot product over k in one order, whatever the width: eight lanes add every eighth product, a fixed
 * tree adds the lanes.  A few rows cost what one does, the time in which memory delivers the weights: they go through
 * the registers once for several rows.  Memory delivers fastest from several places at once, each read in the order in
 * which it lies: the processor fetches ahead for each of them, but not past the end of a page.  So the columns of a
 * tile are far apart.  Several rows leave it too little time for that: while a tile is multiplied, the one behind it is
 * fetched, evenly over the passes through the tile, so that memory is never idle.
 *
 * The including file defines ITEM (the function's name), CODE and INLINE (of its processors), ROWS (most at a time) and
 * CASES (of how many rows and columns), Floats (a vector of PAIR columns, eight lanes each), load_row, load_columns,
 * fused, and column.
 */
#include "dspark_dense.h"

enum { LANES = 8, STEP = 4, LINE = 16, VECTORS = COLUMNS / PAIR };

/* What one pass fetches for each STEP * LANES weights of a column: some of their two lines, `ahead` floats further. */
typedef struct {
  int64_t ahead;
  int lines;
} Fetch;

/* Adds the products of eight elements, or of the first `count` ones; `step` floats lie between columns. */
INLINE void add_products(const float *x, const float *w, int64_t k, int64_t step, int64_t count, int rows,
                         int columns, Floats (*sums)[VECTORS]) {
  Floats a, b[VECTORS];
  for (int v = 0; v < columns / PAIR; v++) b[v] = load_columns(w + v * PAIR * step, step, count);
  for (int r = 0; r < rows; r++) {
    a = load_row(x + r * k, count);
    for (int v = 0; v < columns / PAIR; v++) sums[r][v] = fused(a, b[v], sums[r][v]);
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
INLINE void multiply_tile(const DenseMatMul *op, int64_t row, int64_t n, int64_t apart, int rows, int columns,
                          Fetch fetch) {
  const float *x = op->x + row * op->k, *w = op->weight + n * op->k, *later = w + fetch.ahead;
  Floats sums[ROWS][VECTORS] = {0};
  int64_t at = 0, k = op->k, step = apart * k;
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
      __m128 two = add_lanes(column(sums[r], c), column(sums[r], next));
      y[c * apart] = _mm_cvtss_f32(two);
      y[next * apart] = _mm_cvtss_f32(_mm_movehdup_ps(two));
    }
  }
}

/* Some rows times the columns first .. last - 1, `columns` at a time, and what is left one at a time. */
INLINE void multiply_rows(const DenseMatMul *op, int64_t row, int64_t first, int64_t last, int rows, int columns,
                          Fetch fetch) {
  int64_t apart = (last - first) / columns, n = first;
  for (; n < first + apart; n++) multiply_tile(op, row, n, apart, rows, columns, fetch);
  for (n = first + apart * columns; n < last; n++) multiply_tile(op, row, n, 0, rows, PAIR, fetch);
}

/* A single pass fetches all of the next tile, the first two of several half of it each; one row is slower with it. */
static Fetch to_fetch(const DenseMatMul *op, int64_t width, int pass) {
  int64_t tile = width * op->k;
  if (op->rows > ROWS) return (Fetch){pass == 1 ? tile + LINE : tile, pass < 2};
  return (Fetch){tile, op->rows == 1 ? 0 : 2};
}

CODE void ITEM(void *argument, size_t tile) {
  const DenseMatMul *op = argument;
  int64_t width = tile_width(op), first = (int64_t)tile * width, last = first + width < op->n ? first + width : op->n;
  int pass = 0;
  for (int64_t row = 0, rows; row < op->rows; row += rows, pass++) {
    Fetch fetch = to_fetch(op, width, pass);
    rows = op->rows - row;
    rows = rows <= ROWS ? rows : rows < 2 * ROWS ? (rows + 1) / 2 : ROWS;
    switch (rows) {
#define CASE(rows, columns) \
  case rows: multiply_rows(op, row, first, last, rows, columns, fetch); break;
      CASES
    }
  }
}
