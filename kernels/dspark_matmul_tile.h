/* The product of a tile, sixteen columns, by some rows; included once for each width of vectors.
 *
 * Order of additions of one result, the same for every width and number of rows: blocks come in whole groups of eight
 * and a remainder.  Eight sums take scale * (integer dot product) group after group, a fixed tree adds the eight, and
 * two of the remainder, of its even and of its odd blocks, come last.  The integer dot products are exact.
 *
 * The including file defines MULTIPLY (the function's name), CODE and INLINE (of its processors), Floats and Ints
 * (vectors), V (an intrinsic's name), HALVES (vectors for sixteen columns), ROW_TILE (most rows at a time), BYTES_ABOVE
 * (what is added to signed bytes), and multiply_block.
 */
#include "dspark_matmul.h"

enum { GROUP = 8, SETS = GROUP + 2, LINE = 64, LANES = INTERLEAVE / HALVES };

/* The sums of a row: of the blocks 0, 8, 16 .., of 1, 9, 17 .., and last of the remaining even and odd ones. */
typedef Floats Sums[SETS][HALVES];

/* Adds a block of sixteen columns, counted over the whole weight, to the sums of `rows` rows. */
INLINE void add_block(const Job *job, int64_t at, int64_t block, int64_t set, int64_t row, int rows, int bits,
                      int mins, Sums *sums) {
  const Activations *in = &job->in;
  const InterleavedMatMul *op = job->op;
  int64_t factor = row * job->blocks + block;
  const int8_t *q[ROW_TILE];
  Ints dots[ROW_TILE][HALVES];
  for (int r = 0; r < rows; r++) {
    q[r] = in->values + (factor + r * job->blocks) * BLOCK;
    __asm__("" : "+r"(q[r])); /* one register a row, not an address for every four bytes */
  }
  multiply_block(op->weight.codes + at * INTERLEAVE * 4 * bits, q, rows, bits, dots);
  for (int r = 0; r < rows; r++, factor += job->blocks) {
    Floats scale = V(set1_ps)(in->scales[factor]), total = V(set1_ps)(in->sums[factor]);
    Ints above = V(set1_epi32)(bits == 4 ? in->offsets[factor] : BYTES_ABOVE / 8 * in->offsets[factor]);
    for (int h = 0; h < HALVES; h++) {
      int64_t lane = (at * HALVES + h) * LANES;
      Ints dot = bits == 4 || BYTES_ABOVE ? V(sub_epi32)(dots[r][h], above) : dots[r][h];
      Floats both = V(mul_ps)(V(loadu_ps)(op->weight.scales + lane), scale);
      Floats sum = V(fmadd_ps)(V(cvtepi32_ps)(dot), both, sums[r][set][h]);
      sums[r][set][h] = mins ? V(fmadd_ps)(V(loadu_ps)(op->weight.mins + lane), total, sum) : sum;
    }
  }
}

/* Fetches the same block of the next sixteen columns: alone the processor fetches too late to keep memory busy. */
INLINE void fetch_next(const Job *job, int64_t at, int bits) {
  const InterleavedMatMul *op = job->op;
  int64_t next = (at + job->blocks) * INTERLEAVE;
  const uint8_t *codes = op->weight.codes + next * 4 * bits;
  for (int i = 0; i < INTERLEAVE * 4 * bits; i += LINE) _mm_prefetch(codes + i, _MM_HINT_T0);
  _mm_prefetch(op->weight.scales + next, _MM_HINT_T0);
  if (op->weight.mins) _mm_prefetch(op->weight.mins + next, _MM_HINT_T0);
}

/* One vector of a row's results: the eight sums by a tree, then the remainder. */
INLINE Floats add_sets(Sums s, int h, int bits) {
  Floats group[GROUP];
  for (int i = 0; i < GROUP; i++) group[i] = bits == 4 ? s[i % 4 * 2 + i / 4][h] : s[i][h];
  Floats low = V(add_ps)(V(add_ps)(group[0], group[1]), V(add_ps)(group[2], group[3]));
  Floats high = V(add_ps)(V(add_ps)(group[4], group[5]), V(add_ps)(group[6], group[7]));
  return V(add_ps)(V(add_ps)(low, high), V(add_ps)(s[GROUP][h], s[GROUP + 1][h]));
}

INLINE void store_row(const InterleavedMatMul *op, int64_t row, int64_t n, Sums sums, int bits) {
  float all[INTERLEAVE], *y = op->y + row * op->weight.n + n;
  int whole = n + INTERLEAVE <= op->weight.n;
  for (int h = 0; h < HALVES; h++) V(storeu_ps)((whole ? y : all) + h * LANES, add_sets(sums, h, bits));
  for (int c = 0; c < op->weight.n - n && !whole; c++) y[c] = all[c];
}

/* `rows` rows by sixteen columns. */
INLINE void multiply_tile(const Job *job, int64_t tile, int64_t row, int rows, int bits, int mins) {
  Sums sums[ROW_TILE];
  int64_t whole = job->blocks / GROUP * GROUP;
  for (int r = 0; r < rows; r++)
    for (int s = 0; s < SETS; s++)
      for (int h = 0; h < HALVES; h++) sums[r][s][h] = V(setzero_ps)();
  for (int64_t b = 0; b < job->blocks; b++) {
    int64_t at = tile * job->blocks + b;
    if (row == 0) fetch_next(job, at, bits);
    add_block(job, at, b, b < whole ? b % GROUP : GROUP + b % 2, row, rows, bits, mins, sums);
  }
  for (int r = 0; r < rows; r++) store_row(job->op, row + r, tile * INTERLEAVE, sums[r], bits);
}

INLINE void multiply_rows(const Job *job, int64_t tile, int64_t row, int rows, int bits) {
  if (job->op->weight.mins)
    multiply_tile(job, tile, row, rows, bits, 1);
  else
    multiply_tile(job, tile, row, rows, bits, 0);
}

/* All rows in groups of equal size, or nearly. */
INLINE void multiply_tiles(const Job *job, int64_t first, int64_t last, int bits) {
  int64_t rows = job->op->rows, groups = (rows + ROW_TILE - 1) / ROW_TILE;
  for (int64_t tile = first; tile < last; tile++)
    for (int64_t g = 0; g < groups; g++) {
      int64_t row = g * rows / groups;
      switch ((g + 1) * rows / groups - row) {
        case 1: multiply_rows(job, tile, row, 1, bits); break;
        case 2: multiply_rows(job, tile, row, 2, bits); break;
        case 3: multiply_rows(job, tile, row, 3, bits); break;
        case 4: multiply_rows(job, tile, row, 4, bits); break;
        case 5: multiply_rows(job, tile, row, 5, bits); break;
#if ROW_TILE > 6
        case 6: multiply_rows(job, tile, row, 6, bits); break;
        case 7: multiply_rows(job, tile, row, 7, bits); break;
#endif
        default: multiply_rows(job, tile, row, ROW_TILE, bits);
      }
    }
}

CODE static void multiply4(const Job *job, int64_t first, int64_t last) { multiply_tiles(job, first, last, 4); }
CODE static void multiply8(const Job *job, int64_t first, int64_t last) { multiply_tiles(job, first, last, 8); }

CODE void MULTIPLY(const Job *job, int64_t first, int64_t last) {
  (job->op->weight.bits == 4 ? multiply4 : multiply8)(job, first, last);
}
