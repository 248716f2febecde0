/* What the two kernels of a block-quantised product share: for few rows and for many. */
#ifndef DSPARK_MATMUL_H
#define DSPARK_MATMUL_H

#include "dspark_cpu.h"

#include <immintrin.h>

enum { LANES = 8, PAIR = 2 * BLOCK, PAIRS = 4, LINE = 64 };

/* Activations in int8, and what every unit (a whole group of one weight row, or one remaining pair of blocks of four
 * weight rows) multiplies its lanes by.  4 bits: the elements of a pair of blocks are parted into 32 even and 32 odd
 * ones, as the nibbles of the weights are. */
typedef struct {
  int64_t whole, remaining; /* groups, pairs */
  int64_t stride;           /* lanes of a row */
  int8_t *values;           /* [rows, pairs * 64] */
  float *scales;            /* [rows, stride] */
  float *sums;              /* [rows, stride]: of the unquantised values, for the block minima */
  int32_t *offsets;         /* [rows, stride]: 8 * (sum of the quantised values) */
  void *memory;
} Activations;

typedef struct {
  const BlockMatMul *op;
  Activations in;
  int64_t blocks, pairs; /* of a row */
} Job;

/* Where a row's factors of a block are, the first of four copies for a remaining pair. */
static inline int64_t factor_lane(const Job *job, int64_t block, int bits) {
  int64_t group = block / LANES;
  int inner = (int)(block % LANES), odd = inner & 1;
  if (group == job->in.whole) return (group + inner / 2) * LANES + (bits == 4 ? odd * 4 : odd);
  return group * LANES + (bits == 4 ? odd * 4 + inner / 2 : inner);
}

/* The results of all rows for the columns first .. last - 1, where there are more than a few rows. */
void dspark_block_rows(const Job *job, int64_t first, int64_t last);

#endif
