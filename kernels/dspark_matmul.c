/* Block-quantised matrix product: 4- or 8-bit weights in blocks of 32 times activations quantised to int8 on the fly.
 *
 * The weight is stored by sixteen columns (kernels/interleave.py): of each block four bytes of every column in turn, so
 * that a lane belongs to a column and a row's sums need no shuffling.  Order of additions of one result, the same for
 * every number of rows: blocks come in whole groups of eight and a remainder.  Eight sums take scale * (integer dot
 * product) group after group, a fixed tree adds the eight, and two of the remainder, of its even and of its odd blocks,
 * come last.  The integer dot products are exact.
 */
#include "dspark_cpu.h"

#include <immintrin.h>
#include <math.h>
#include <stdlib.h>

enum { LANES = 8, HALVES = 2, ROW_TILE = 6, SETS = LANES + 2, LINE = 64, ITEM = 2, SERIAL_WORK = 1 << 15 };

/* Activations in int8 and the factors of their blocks.  4 bits: of every eight elements the four even ones come first,
 * as the nibbles of four weight bytes are parted. */
typedef struct {
  int8_t *values;   /* [rows, k] */
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

static float block_scale(float largest, float sum) {
  return sum == sum ? largest / 127.0f : sum; /* a NaN anywhere in the block stays one */
}

static float block_inverse(float largest) {
  return largest > 1e-30f && largest < INFINITY ? 127.0f / largest : 0.0f;
}

AVX2_CODE static void quantise_row(const Job *job, int64_t row) {
  const float *x = job->op->x + row * job->op->weight.k;
  const __m256 sign = _mm256_set1_ps(-0.0f);
  const __m256i whole = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i parted =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  int64_t at = row * job->blocks;
  for (int64_t block = 0; block < job->blocks; block++, at++, x += BLOCK) {
    __m256 v[4], large = _mm256_setzero_ps(), sum = _mm256_setzero_ps();
    __m256i q[4];
    for (int i = 0; i < 4; i++) {
      v[i] = _mm256_loadu_ps(x + 8 * i);
      large = _mm256_max_ps(large, _mm256_andnot_ps(sign, v[i]));
      sum = _mm256_add_ps(sum, v[i]);
    }
    __m128 top = _mm_max_ps(_mm256_castps256_ps128(large), _mm256_extractf128_ps(large, 1));
    top = _mm_max_ps(top, _mm_movehl_ps(top, top));
    float largest = _mm_cvtss_f32(_mm_max_ss(top, _mm_movehdup_ps(top)));
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    float total = _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
    __m256 inverse = _mm256_set1_ps(block_inverse(largest));
    for (int i = 0; i < 4; i++) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    __m256i all = _mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3]));
    __m128i count = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    count = _mm_add_epi32(count, _mm_unpackhi_epi64(count, count));
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    bytes = _mm256_permutevar8x32_epi32(bytes, whole);
    if (job->op->weight.bits == 4) bytes = _mm256_shuffle_epi8(bytes, parted);
    _mm256_storeu_si256((__m256i *)(job->in.values + at * BLOCK), bytes);
    job->in.scales[at] = block_scale(largest, total);
    job->in.sums[at] = total;
    job->in.offsets[at] = 8 * (_mm_cvtsi128_si32(count) + _mm_extract_epi32(count, 1));
  }
}

/* The sums of a row: of the blocks 0, 8, 16 .., of 1, 9, 17 .., and last of the remaining even and odd ones. */
typedef __m256 Sums[SETS][HALVES];

AVX2_INLINE __m256i broadcast(const int8_t *four) {
  return _mm256_castps_si256(_mm256_broadcast_ss((const float *)four));
}

/* Keeps a sum where it is: the compiler would first form all products, more than there are registers. */
#define KEEP(sum) __asm__ volatile("" : "+x"(sum))

/* Four elements of each column, signed bytes or nibbles: of nibbles the even ones and the odd ones in turn. */
AVX2_INLINE __m256i elements(const uint8_t *block, int i, int h, int bits) {
  const __m256i *quads = (const __m256i *)block;
  if (bits == 8) return _mm256_xor_si256(_mm256_loadu_si256(quads + i * HALVES + h), _mm256_set1_epi8(-128));
  __m256i both = _mm256_loadu_si256(quads + i / 2 * HALVES + h);
  return _mm256_and_si256(i % 2 ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
}

/* dots[r] = a block's dot products.  Nibbles: unsigned, at most 16 * 15 * 127 = 30480 in an int16 lane.  Bytes:
 * |w| <= 128 unsigned times the activation under w's sign, at most 2 * 128 * 127 = 32512 in an int16 lane. */
AVX2_INLINE void multiply_block(const uint8_t *block, const int8_t *const *q, int rows, int bits,
                                __m256i (*dots)[HALVES]) {
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    __m256i w[HALVES], size[HALVES];
    for (int h = 0; h < HALVES; h++) {
      w[h] = elements(block, i, h, bits);
      size[h] = bits == 8 ? _mm256_abs_epi8(w[h]) : w[h];
    }
    for (int r = 0; r < rows; r++) {
      __m256i x = broadcast(q[r] + i * 4);
      for (int h = 0; h < HALVES; h++) {
        __m256i dot = _mm256_maddubs_epi16(size[h], bits == 8 ? _mm256_sign_epi8(x, w[h]) : x);
        if (bits == 8) dot = _mm256_madd_epi16(dot, ones);
        if (i) dot = bits == 8 ? _mm256_add_epi32(dots[r][h], dot) : _mm256_add_epi16(dots[r][h], dot);
        dots[r][h] = dot;
        KEEP(dots[r][h]);
      }
    }
  }
  for (int r = 0; r < rows && bits == 4; r++)
    for (int h = 0; h < HALVES; h++) dots[r][h] = _mm256_madd_epi16(dots[r][h], ones);
}

/* Adds a block of sixteen columns, counted over the whole weight, to the sums of `rows` rows. */
AVX2_INLINE void add_block(const Job *job, int64_t at, int64_t block, int64_t set, int64_t row, int rows, int bits,
                           int mins, Sums *sums) {
  const Activations *in = &job->in;
  const InterleavedMatMul *op = job->op;
  int64_t factor = row * job->blocks + block;
  const int8_t *q[ROW_TILE];
  __m256i dots[ROW_TILE][HALVES];
  for (int r = 0; r < rows; r++) {
    q[r] = in->values + (factor + r * job->blocks) * BLOCK;
    __asm__("" : "+r"(q[r])); /* one register a row, not an address for every four bytes */
  }
  multiply_block(op->weight.codes + at * INTERLEAVE * 4 * bits, q, rows, bits, dots);
  for (int r = 0; r < rows; r++, factor += job->blocks) {
    __m256 scale = _mm256_broadcast_ss(in->scales + factor), total = _mm256_broadcast_ss(in->sums + factor);
    __m256i offset = _mm256_set1_epi32(in->offsets[factor]);
    for (int h = 0; h < HALVES; h++) {
      int64_t lane = (at * HALVES + h) * LANES;
      __m256i dot = bits == 4 ? _mm256_sub_epi32(dots[r][h], offset) : dots[r][h];
      __m256 both = _mm256_mul_ps(_mm256_loadu_ps(op->weight.scales + lane), scale);
      __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), both, sums[r][set][h]);
      sums[r][set][h] = mins ? _mm256_fmadd_ps(_mm256_loadu_ps(op->weight.mins + lane), total, sum) : sum;
    }
  }
}

/* Fetches the same block of the next sixteen columns: alone the processor fetches too late to keep memory busy. */
AVX2_INLINE void fetch_next(const Job *job, int64_t at, int bits) {
  const InterleavedMatMul *op = job->op;
  int64_t next = (at + job->blocks) * INTERLEAVE;
  const uint8_t *codes = op->weight.codes + next * 4 * bits;
  for (int i = 0; i < INTERLEAVE * 4 * bits; i += LINE) _mm_prefetch(codes + i, _MM_HINT_T0);
  _mm_prefetch(op->weight.scales + next, _MM_HINT_T0);
  if (op->weight.mins) _mm_prefetch(op->weight.mins + next, _MM_HINT_T0);
}

/* One vector of a row's results: the eight sums by a tree, then the remainder. */
AVX2_INLINE __m256 add_sets(Sums s, int h, int bits) {
  __m256 lane[LANES];
  for (int i = 0; i < LANES; i++) lane[i] = bits == 4 ? s[i % 4 * 2 + i / 4][h] : s[i][h];
  __m256 low = _mm256_add_ps(_mm256_add_ps(lane[0], lane[1]), _mm256_add_ps(lane[2], lane[3]));
  __m256 high = _mm256_add_ps(_mm256_add_ps(lane[4], lane[5]), _mm256_add_ps(lane[6], lane[7]));
  return _mm256_add_ps(_mm256_add_ps(low, high), _mm256_add_ps(s[LANES][h], s[LANES + 1][h]));
}

AVX2_INLINE void store_row(const InterleavedMatMul *op, int64_t row, int64_t n, Sums sums, int bits) {
  float all[INTERLEAVE], *y = op->y + row * op->weight.n + n;
  int whole = n + INTERLEAVE <= op->weight.n;
  for (int h = 0; h < HALVES; h++) _mm256_storeu_ps((whole ? y : all) + h * LANES, add_sets(sums, h, bits));
  for (int c = 0; c < op->weight.n - n && !whole; c++) y[c] = all[c];
}

/* `rows` rows by sixteen columns. */
AVX2_INLINE void multiply_tile(const Job *job, int64_t tile, int64_t row, int rows, int bits, int mins) {
  Sums sums[ROW_TILE];
  int64_t whole = job->blocks / LANES * LANES;
  for (int r = 0; r < rows; r++)
    for (int s = 0; s < SETS; s++)
      for (int h = 0; h < HALVES; h++) sums[r][s][h] = _mm256_setzero_ps();
  for (int64_t b = 0; b < job->blocks; b++) {
    int64_t at = tile * job->blocks + b;
    if (row == 0) fetch_next(job, at, bits);
    add_block(job, at, b, b < whole ? b % LANES : LANES + b % 2, row, rows, bits, mins, sums);
  }
  for (int r = 0; r < rows; r++) store_row(job->op, row + r, tile * INTERLEAVE, sums[r], bits);
}

AVX2_INLINE void multiply_rows(const Job *job, int64_t tile, int64_t row, int rows, int bits) {
  if (job->op->weight.mins)
    multiply_tile(job, tile, row, rows, bits, 1);
  else
    multiply_tile(job, tile, row, rows, bits, 0);
}

/* All rows in groups of equal size, or nearly. */
AVX2_INLINE void multiply_tiles(const Job *job, int64_t first, int64_t last, int bits) {
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
        default: multiply_rows(job, tile, row, ROW_TILE, bits);
      }
    }
}

AVX2_CODE static void multiply4(const Job *job, int64_t first, int64_t last) { multiply_tiles(job, first, last, 4); }
AVX2_CODE static void multiply8(const Job *job, int64_t first, int64_t last) { multiply_tiles(job, first, last, 8); }

static void quantise_item(void *argument, size_t row) {
  quantise_row(argument, (int64_t)row);
}

static void multiply_item(void *argument, size_t item) {
  const Job *job = argument;
  int64_t first = (int64_t)item * ITEM, last = first + ITEM < job->tiles ? first + ITEM : job->tiles;
  (job->op->weight.bits == 4 ? multiply4 : multiply8)(job, first, last);
}

static int reserve(Job *job) {
  Activations *in = &job->in;
  job->blocks = job->op->weight.k / BLOCK;
  job->tiles = (job->op->weight.n + INTERLEAVE - 1) / INTERLEAVE;
  size_t blocks = (size_t)(job->op->rows * job->blocks);
  in->memory = malloc(blocks * (BLOCK + 3 * sizeof(float)));
  if (!in->memory) return -1;
  in->values = in->memory;
  in->scales = (float *)(in->values + blocks * BLOCK);
  in->sums = in->scales + blocks;
  in->offsets = (int32_t *)(in->sums + blocks);
  return 0;
}

int dspark_interleaved_matmul(const InterleavedMatMul *op, const Pool *pool) {
  Job job = {.op = op};
  if (op->rows == 0) return 0;
  if (reserve(&job)) return -1;
  if (op->rows * op->weight.k < SERIAL_WORK)
    for (int64_t row = 0; row < op->rows; row++) quantise_item(&job, (size_t)row);
  else
    pool->run(pool, quantise_item, (size_t)op->rows, &job);
  pool->run(pool, multiply_item, (size_t)((job.tiles + ITEM - 1) / ITEM), &job);
  free(job.in.memory);
  return 0;
}
