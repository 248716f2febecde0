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
 * CASES (of how many rows and columns), Weight (what is stored in WEIGHTS of the product) and UNIT (how many columns lie
 * together, eight elements of each in turn), Floats (a vector of PAIR columns, eight lanes each), load_row, load_scales,
 * load_columns, fused, and column.
 */
#include "dspark_dense.h"

enum { LANES = 8, LINE = 64 / sizeof(Weight), VECTORS = COLUMNS / PAIR };

#ifndef LINES
#define LINES (BLOCK * UNIT / LINE)
#endif

/* What one pass fetches for each STEP * LANES weights of a column: some of their two lines, `ahead` weights further. */
typedef struct {
  int64_t ahead;
  int lines;
} Fetch;

/* Adds the products of eight elements, or of the first `count` ones; `step` weights lie between units. */
INLINE void add_products(const float *x, const Weight *w, const Floats *scales, int64_t k, int64_t step, int64_t count,
                         int rows, int columns, Floats (*sums)[VECTORS]) {
  Floats a, b[VECTORS];
  for (int v = 0; v < columns / PAIR; v++) b[v] = load_columns(w + v * (PAIR / UNIT) * step, step, count, scales[v]);
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
AVX2_INLINE void fetch_lines(const Weight *from, int lines) {
  if (lines == 1) {
    _mm_prefetch(from, _MM_HINT_T1);
  } else if (lines == 2) {
    _mm_prefetch(from, _MM_HINT_T0);
    _mm_prefetch(from + LINE, _MM_HINT_T0);
  }
}

INLINE void store_column(const DenseMatMul *op, int64_t row, int64_t n, float y) {
  if (n < op->n) op->y[row * op->y_step + n] = y;
}

/* Units u, u + apart, ... of some rows. */
INLINE void multiply_tile(const DenseMatMul *op, int64_t row, int64_t u, int64_t apart, int rows, int columns,
                          Fetch fetch) {
  const float *x = op->x + row * op->k;
  const Weight *w = op->WEIGHTS + u * UNIT * op->k, *later = w + fetch.ahead;
  Floats sums[ROWS][VECTORS] = {0}, factors[VECTORS] = {0};
  int64_t at = 0, k = op->k, step = apart * UNIT * k;
  for (; at + BLOCK <= k; at += BLOCK) {
    for (int c = 0; c < columns / UNIT; c++) fetch_lines(later + c * step + at * UNIT, fetch.lines);
    for (int v = 0; v < columns / PAIR; v++)
      factors[v] = load_scales(op->packed.scales, (u * UNIT * k + v * step + at * UNIT) / BLOCK);
    for (int64_t i = at; i < at + BLOCK; i += LANES)
      add_products(x + i, w + i * UNIT, factors, k, step, LANES, rows, columns, sums);
  }
  for (; at < k; at += LANES) add_products(x + at, w + at * UNIT, factors, k, step, k - at, rows, columns, sums);
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c += 2) {
      int next = c + 1 < columns ? c + 1 : c;
      __m128 two = add_lanes(column(sums[r], c), column(sums[r], next));
      store_column(op, row + r, (u + c / UNIT * apart) * UNIT + c % UNIT, _mm_cvtss_f32(two));
      store_column(op, row + r, (u + next / UNIT * apart) * UNIT + next % UNIT, _mm_cvtss_f32(_mm_movehdup_ps(two)));
    }
}

/* Some rows times the units first .. last - 1, `columns` at a time, and what is left one vector at a time. */
INLINE void multiply_rows(const DenseMatMul *op, int64_t row, int64_t first, int64_t last, int rows, int columns,
                          Fetch fetch) {
  int64_t apart = (last - first) / (columns / UNIT), u = first;
  for (; u < first + apart; u++) multiply_tile(op, row, u, apart, rows, columns, fetch);
  for (u = first + apart * (columns / UNIT); u < last; u++) multiply_tile(op, row, u, 0, rows, PAIR, fetch);
}

/* A single pass fetches all of the next tile, the first ones of several a line each; one row of floats is slower so. */
static Fetch to_fetch(const DenseMatMul *op, int64_t width, int pass) {
  int64_t tile = width * op->k;
  if (op->rows > ROWS) return (Fetch){pass == 1 ? tile + LINE : tile, pass < LINES};
  return (Fetch){tile, sizeof(Weight) == sizeof(float) && op->rows == 1 ? 0 : LINES};
}

CODE void ITEM(void *argument, size_t tile) {
  const DenseMatMul *op = argument;
  int64_t width = tile_width(op->k, sizeof(Weight)), first = (int64_t)tile * width;
  int64_t last = first + width < op->n ? first + width : op->n;
  int pass = 0;
  for (int64_t row = 0, rows; row < op->rows; row += rows, pass++) {
    Fetch fetch = to_fetch(op, width, pass);
    rows = op->rows - row;
    rows = rows <= ROWS ? rows : rows < 2 * ROWS ? (rows + 1) / 2 : ROWS;
    switch (rows) {
#define CASE(rows, columns) \
  case rows: multiply_rows(op, row, first / UNIT, (last + UNIT - 1) / UNIT, rows, columns, fetch); break;
      CASES
    }
  }
}
