/* Block-quantised matrix product: 4- or 8-bit weights in blocks of 32 times activations quantised to int8 on the fly.
 *
 * Order of additions of one result, the same for every tiling: blocks come in whole groups of eight and a remainder of
 * pairs.  Eight lanes add scale * (integer dot product) group after group, a fixed tree adds the lanes, and the
 * remainder's two lanes (even blocks, odd blocks) come last.  The integer dot products are exact.
 */
#include "dspark_matmul.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { FEW = 3, COLUMN_TILE = 32, SERIAL_WORK = 1 << 15, AHEAD = 4096 };

/* Writes what the lanes of a block need: one lane of a whole group, or four of a remaining pair. */
static void store_factors(const Job *job, int64_t row, int64_t block, float scale, float sum, int32_t total) {
  const Activations *in = &job->in;
  int64_t at = row * in->stride + factor_lane(job, block, job->op->bits);
  int copies = block / LANES < in->whole ? 1 : PAIRS, step = job->op->bits == 4 ? 1 : 2;
  for (int i = 0; i < copies; i++, at += step) {
    in->scales[at] = scale;
    in->sums[at] = sum;
    in->offsets[at] = 8 * total;
  }
}

static float block_scale(float largest, float sum) {
  return sum == sum ? largest / 127.0f : sum; /* a NaN anywhere in the block stays one */
}

static float block_inverse(float largest) {
  return largest > 1e-30f && largest < INFINITY ? 127.0f / largest : 0.0f;
}

AVX2_CODE static void quantise_row(const Job *job, int64_t row) {
  const float *x = job->op->x + row * job->op->k;
  const __m256 sign = _mm256_set1_ps(-0.0f);
  const __m256i whole = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i parted = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  for (int64_t block = 0; block < job->blocks; block++, x += BLOCK) {
    int8_t *out = job->in.values + (row * job->pairs + block / 2) * PAIR;
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
    if (job->op->bits == 4) {
      bytes = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(bytes, parted), 0xd8);
      _mm_storeu_si128((__m128i *)(out + block % 2 * 16), _mm256_castsi256_si128(bytes));
      _mm_storeu_si128((__m128i *)(out + block % 2 * 16 + BLOCK), _mm256_extracti128_si256(bytes, 1));
    } else {
      _mm256_storeu_si256((__m256i *)(out + block % 2 * BLOCK), bytes);
    }
    store_factors(job, row, block, block_scale(largest, total), total,
                  _mm_cvtsi128_si32(count) + _mm_extract_epi32(count, 1));
  }
}

/* Four pairs of blocks: a whole group of one weight row, or the same remaining pair of four rows. */
typedef struct {
  int whole;             /* known at compile time */
  int64_t block[PAIRS];  /* first block of each pair, counted over the whole weight */
  int half;              /* the pairs have no second block */
  const int8_t *values;
  int64_t step;          /* bytes from row to row */
  int64_t lane;          /* of the first row's factors */
} Unit;

/* 16 * count bytes, zeros after them. */
AVX2_INLINE __m256i load_bytes(const uint8_t *from, int count) {
  __m256i index = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
  return _mm256_maskload_epi32((const int *)from, _mm256_cmpgt_epi32(_mm256_set1_epi32(count), index));
}

/* Adds 64-bit halves of two vectors of int16 sums: [a0 a1 | a2 a3], [b0 b1 | b2 b3] -> [a0+a1 b0+b1 | a2+a3 b2+b3]. */
AVX2_INLINE __m256i join64(__m256i a, __m256i b) {
  return _mm256_add_epi16(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

AVX2_INLINE __m256i join32(__m256i a, __m256i b) {
  __m256 x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
  return _mm256_add_epi16(_mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88)),
                          _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xdd)));
}

/* dots[r] = dot products of unsigned nibbles, lanes: even blocks of the four pairs, then odd blocks.
 * At most 16 * 15 * 127 = 30480 in an int16 lane. */
AVX2_INLINE void dots4(const Job *job, Unit u, int rows, __m256i *dots) {
  const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256i even[PAIRS], odd[PAIRS], v[PAIRS];
  for (int p = 0; p < PAIRS; p++) {
    const uint8_t *w = job->op->weight + u.block[p] * 16;
    __m256i both = u.whole ? _mm256_loadu_si256((const __m256i *)w) : load_bytes(w, 2 - u.half);
    even[p] = _mm256_and_si256(both, mask);
    odd[p] = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
  }
  for (int r = 0; r < rows; r++) {
    for (int p = 0; p < PAIRS; p++) {
      const __m256i *q = (const __m256i *)(u.values + r * u.step + (u.whole ? p * PAIR : 0));
      v[p] = _mm256_add_epi16(_mm256_maddubs_epi16(even[p], _mm256_loadu_si256(q)),
                              _mm256_maddubs_epi16(odd[p], _mm256_loadu_si256(q + 1)));
    }
    dots[r] = _mm256_madd_epi16(join32(join64(v[0], v[1]), join64(v[2], v[3])), ones);
  }
}

/* dots[r] = dot products of signed bytes, lanes: block after block.  |w| <= 128 unsigned times the activation under
 * w's sign: at most 2 * 128 * 127 = 32512 in an int16 lane. */
AVX2_INLINE void dots8(const Job *job, Unit u, int rows, __m256i *dots) {
  const __m256i centre = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
  __m256i h[FEW][PAIRS];
  for (int p = 0; p < PAIRS; p++) {
    const uint8_t *w = job->op->weight + u.block[p] * BLOCK;
    __m256i b[2] = {_mm256_loadu_si256((const __m256i *)w),
                    u.whole ? _mm256_loadu_si256((const __m256i *)(w + BLOCK)) : load_bytes(w + BLOCK, 2 - 2 * u.half)};
    for (int i = 0; i < 2; i++) b[i] = _mm256_xor_si256(b[i], centre);
    for (int r = 0; r < rows; r++) {
      const __m256i *q = (const __m256i *)(u.values + r * u.step + (u.whole ? p * PAIR : 0));
      __m256i t[2];
      for (int i = 0; i < 2; i++) {
        __m256i a = _mm256_sign_epi8(_mm256_loadu_si256(q + i), b[i]);
        t[i] = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(b[i]), a), ones);
      }
      h[r][p] = _mm256_hadd_epi32(t[0], t[1]);
    }
  }
  for (int r = 0; r < rows; r++) {
    __m256i low = _mm256_hadd_epi32(h[r][0], h[r][1]), high = _mm256_hadd_epi32(h[r][2], h[r][3]);
    dots[r] = _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
  }
}

/* Eight blocks' factors in lane order. */
AVX2_INLINE __m256 load_factors(const float *factors, Unit u, int bits) {
  const float *f[PAIRS];
  for (int p = 0; p < PAIRS; p++) f[p] = factors + u.block[p];
  __m256 all;
  if (u.whole)
    all = _mm256_loadu_ps(f[0]);
  else if (u.half)
    all = _mm256_setr_ps(*f[0], 0, *f[1], 0, *f[2], 0, *f[3], 0);
  else
    all = _mm256_setr_ps(f[0][0], f[0][1], f[1][0], f[1][1], f[2][0], f[2][1], f[3][0], f[3][1]);
  return bits == 4 ? _mm256_permutevar8x32_ps(all, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7)) : all;
}

/* Fetches what lies some way behind a whole group: alone the processor fetches too late to keep memory busy. */
AVX2_INLINE void fetch_ahead(const BlockMatMul *op, Unit u, int bits) {
  int64_t blocks = AHEAD / (4 * bits);
  for (int i = 0; i < LANES * 4 * bits; i += LINE)
    _mm_prefetch(op->weight + (u.block[0] + blocks) * 4 * bits + i, _MM_HINT_T0);
  _mm_prefetch(op->scales + u.block[0] + blocks, _MM_HINT_T0);
  if (op->mins) _mm_prefetch(op->mins + u.block[0] + blocks, _MM_HINT_T0);
}

/* Adds a unit to the lanes of `rows` rows. */
AVX2_INLINE void add_unit(const Job *job, Unit u, int rows, int bits, __m256 *lanes) {
  const Activations *in = &job->in;
  __m256i dots[FEW];
  if (bits == 4)
    dots4(job, u, rows, dots);
  else
    dots8(job, u, rows, dots);
  __m256 scale = load_factors(job->op->scales, u, bits);
  for (int r = 0; r < rows; r++) {
    int64_t at = u.lane + r * in->stride;
    if (bits == 4) dots[r] = _mm256_sub_epi32(dots[r], _mm256_loadu_si256((const __m256i *)(in->offsets + at)));
    __m256 factor = _mm256_mul_ps(scale, _mm256_loadu_ps(in->scales + at));
    lanes[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r]), factor, lanes[r]);
  }
  if (!job->op->mins) return;
  __m256 least = load_factors(job->op->mins, u, bits);
  for (int r = 0; r < rows; r++)
    lanes[r] = _mm256_fmadd_ps(least, _mm256_loadu_ps(in->sums + u.lane + r * in->stride), lanes[r]);
}

AVX2_INLINE __m128 add_lanes(const __m256 *lanes, int64_t step, __m256 rest, int bits) {
  __m256 four = _mm256_hadd_ps(_mm256_hadd_ps(lanes[0], lanes[step]), _mm256_hadd_ps(lanes[2 * step], lanes[3 * step]));
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1));
  __m256 pairs = _mm256_hadd_ps(rest, rest);
  __m128 low = _mm256_castps256_ps128(bits == 4 ? rest : pairs), high = _mm256_extractf128_ps(bits == 4 ? rest : pairs, 1);
  return _mm_add_ps(sum, bits == 4 ? _mm_add_ps(low, high) : _mm_movelh_ps(low, high));
}

/* The results of all rows, a few, by `columns` of four columns; a missing column is the last one again, not stored. */
AVX2_INLINE void multiply_tile(const Job *job, int64_t n, int rows, int columns, int bits) {
  const Activations *in = &job->in;
  int64_t step = job->pairs * PAIR, start[PAIRS];
  __m256 lanes[PAIRS][FEW], rest[FEW];
  for (int c = 0; c < PAIRS; c++) start[c] = (n + (c < columns ? c : columns - 1)) * job->blocks;
  for (int r = 0; r < rows; r++) rest[r] = _mm256_setzero_ps();
  for (int c = 0; c < PAIRS; c++) {
    for (int r = 0; r < rows; r++) lanes[c][r] = _mm256_setzero_ps();
    for (int64_t g = 0; g < in->whole; g++) {
      int64_t b = start[c] + g * LANES;
      Unit u = {1, {b, b + 2, b + 4, b + 6}, 0, in->values + g * PAIRS * PAIR, step, g * LANES};
      fetch_ahead(job->op, u, bits);
      add_unit(job, u, rows, bits, lanes[c]);
    }
  }
  for (int64_t p = 0; p < in->remaining; p++) {
    int64_t b = in->whole * LANES + 2 * p;
    Unit u = {0, {start[0] + b, start[1] + b, start[2] + b, start[3] + b}, b + 1 == job->blocks,
              in->values + b / 2 * PAIR, step, (in->whole + p) * LANES};
    add_unit(job, u, rows, bits, rest);
  }
  for (int r = 0; r < rows; r++) {
    float four[PAIRS], *y = job->op->y + r * job->op->n + n;
    __m128 sum = add_lanes(&lanes[0][r], FEW, rest[r], bits);
    _mm_storeu_ps(columns == PAIRS ? y : four, sum);
    for (int c = 0; c < columns && columns < PAIRS; c++) y[c] = four[c];
  }
}

AVX2_INLINE void multiply_columns(const Job *job, int64_t first, int64_t last, int rows, int bits) {
  for (int64_t n = first; n < last; n += PAIRS)
    multiply_tile(job, n, rows, (int)(last - n < PAIRS ? last - n : PAIRS), bits);
}

AVX2_INLINE void multiply_bits(const Job *job, int64_t first, int64_t last, int bits) {
  switch (job->op->rows) {
    case 1: multiply_columns(job, first, last, 1, bits); break;
    case 2: multiply_columns(job, first, last, 2, bits); break;
    default: multiply_columns(job, first, last, FEW, bits);
  }
}

AVX2_CODE static void multiply_few(const Job *job, int64_t first, int64_t last) {
  if (job->op->bits == 4)
    multiply_bits(job, first, last, 4);
  else
    multiply_bits(job, first, last, 8);
}

static void quantise_item(void *argument, size_t row) {
  quantise_row(argument, (int64_t)row);
}

static void multiply_item(void *argument, size_t tile) {
  const Job *job = argument;
  int64_t first = (int64_t)tile * COLUMN_TILE, last = first + COLUMN_TILE;
  if (last > job->op->n) last = job->op->n;
  if (job->op->rows <= FEW)
    multiply_few(job, first, last);
  else
    dspark_block_rows(job, first, last);
}

static int reserve(Job *job) {
  Activations *in = &job->in;
  job->blocks = job->op->k / BLOCK;
  job->pairs = (job->blocks + 1) / 2;
  in->whole = job->blocks / LANES;
  in->remaining = job->pairs - in->whole * PAIRS;
  in->stride = (in->whole + in->remaining) * LANES;
  size_t lanes = (size_t)(job->op->rows * in->stride), bytes = (size_t)(job->op->rows * job->pairs * PAIR);
  in->memory = calloc(1, bytes + lanes * 3 * sizeof(float)); /* a missing second block of a pair must be zero */
  if (!in->memory) return -1;
  in->values = in->memory;
  in->scales = (float *)(in->values + bytes);
  in->sums = in->scales + lanes;
  in->offsets = (int32_t *)(in->sums + lanes);
  return 0;
}

int dspark_block_matmul(const BlockMatMul *op, const Pool *pool) {
  Job job = {.op = op};
  if (op->rows == 0) return 0;
  if (reserve(&job)) return -1;
  if (op->rows * op->k < SERIAL_WORK)
    for (int64_t row = 0; row < op->rows; row++) quantise_item(&job, (size_t)row);
  else
    pool->run(pool, quantise_item, (size_t)op->rows, &job);
  pool->run(pool, multiply_item, (size_t)((op->n + COLUMN_TILE - 1) / COLUMN_TILE), &job);
  free(job.in.memory);
  return 0;
}
