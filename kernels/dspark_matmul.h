/* One product of interleaved blocks, as its parts see it. */
#ifndef DSPARK_MATMUL_H
#define DSPARK_MATMUL_H

#include "dspark_cpu.h"

/* Activations in int8 and the factors of their blocks.  4 bits: of every eight elements the four even ones come first,
 * as the nibbles of four weight bytes are parted. */
typedef struct {
  int8_t *values;   /* [rows, k], -127 .. 127 */
  float *scales;    /* [rows, blocks] */
  float *sums;      /* [rows, blocks]: of the unquantised values, for the block minima */
  int32_t *offsets; /* [rows, blocks]: 8 * (sum of the quantised values) */
  void *memory;
} Activations;

typedef struct {
  const InterleavedMatMul *op;
  Activations in;
  int64_t blocks, tiles; /* of a row; of sixteen columns */
} Job;

/* All rows times the tiles first .. last - 1.  Processors differ in speed, never in a bit. */
typedef void Multiply(const Job *job, int64_t first, int64_t last);

Multiply dspark_multiply_avx2;
Multiply dspark_multiply_avx512; /* needs AVX512-VNNI */

#endif
