/* Block-quantised matrix product: 4- or 8-bit weights in blocks of 32 times activations quantised to int8 on the fly.
 *
 * A row's blocks are dealt to eight lanes; a lane adds scale * (integer dot product) block after block, and one fixed
 * tree adds the lanes.  Integer sums are exact, so only that order matters, and it holds for any tiling.
 */
#include "dspark_cpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef DSPARK_AVX2
#include <immintrin.h>
#endif

enum { GROUP = BLOCK * LANES, ROW_TILE = 4, COLUMN_TILE = 64, SERIAL_WORK = 1 << 16 };

/* Activations in int8, with what a lane needs of each block.  4 bits: the elements of two neighbouring blocks are
 * parted into 32 even and 32 odd ones, as the nibbles of the weights are. */
typedef struct {
  int64_t groups;   /* of eight blocks, the last one padded with zeros */
  int8_t *values;   /* [rows, groups * 256] */
  float *scales;    /* [rows, groups * 8], in lane order */
  float *sums;      /* [rows, groups * 8]: of the unquantised values, for the block minima */
  int32_t *offsets; /* [rows, groups * 8]: 8 * (sum of the quantised values), 4 bits only */
  void *memory;
} Activations;

typedef struct {
  const BlockMatMul *op;
  Activations in;
  int level;
} Job;

/* The lane of a block: two blocks share a vector of 4-bit weights, whose halves end up four lanes apart. */
static int lane_of(int bits, int64_t block) {
  int j = (int)(block % LANES);
  return bits == 4 ? (j & 1) * 4 + (j >> 1) : j;
}

static float block_scale(float largest, float sum) {
  return sum == sum ? largest / 127.0f : sum; /* a NaN anywhere in the block stays one */
}

static float block_inverse(float largest) {
  return largest > 1e-30f && largest < INFINITY ? 127.0f / largest : 0.0f;
}

static void store_block(const Job *job, int64_t row, int64_t block, const int8_t *q, float scale, float sum) {
  const Activations *in = &job->in;
  int64_t lane = row * in->groups * LANES + block / LANES * LANES + lane_of(job->op->bits, block);
  int8_t *values = in->values + row * in->groups * GROUP;
  int32_t total = 0;
  for (int i = 0; i < BLOCK; i++) total += q[i];
  if (job->op->bits == 4) {
    int8_t *even = values + block / 2 * 64 + block % 2 * 16;
    for (int i = 0; i < BLOCK; i++) even[(i & 1) * 32 + (i >> 1)] = q[i];
  } else {
    memcpy(values + block * BLOCK, q, BLOCK);
  }
  in->scales[lane] = scale;
  in->sums[lane] = sum;
  in->offsets[lane] = 8 * total;
}

static void quantise_row(const Job *job, int64_t row) {
  const float *x = job->op->x + row * job->op->k;
  for (int64_t block = 0; block < job->op->k / BLOCK; block++, x += BLOCK) {
    float largest = 0, sum = 0;
    int8_t q[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
      largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
      sum += x[i];
    }
    float inverse = block_inverse(largest);
    for (int i = 0; i < BLOCK; i++) q[i] = (int8_t)lrintf(x[i] * inverse);
    store_block(job, row, block, q, block_scale(largest, sum), sum);
  }
}

static float add_lanes(const float *lane) {
  float half[4];
  for (int i = 0; i < 4; i++) half[i] = lane[i] + lane[i + 4];
  return (half[0] + half[2]) + (half[1] + half[3]);
}

static void multiply_scalar(const Job *job, int64_t row, int64_t first, int64_t last) {
  const BlockMatMul *op = job->op;
  const Activations *in = &job->in;
  int64_t blocks = op->k / BLOCK, bytes = BLOCK / 8 * op->bits;
  const int8_t *values = in->values + row * in->groups * GROUP;
  for (int64_t n = first; n < last; n++) {
    float lanes[LANES] = {0};
    for (int64_t block = 0; block < blocks; block++) {
      const uint8_t *w = op->weight + (n * blocks + block) * bytes;
      int64_t lane = lane_of(op->bits, block), at = row * in->groups * LANES + block / LANES * LANES + lane;
      int32_t dot = 0;
      for (int i = 0; i < BLOCK; i++) {
        int even = (int)(block / 2 * 64 + block % 2 * 16) + (i & 1) * 32 + (i >> 1);
        dot += op->bits == 4 ? ((w[i / 2] >> (i & 1) * 4 & 15) - 8) * values[even]
                             : (w[i] - 128) * values[block * BLOCK + i];
      }
      lanes[lane] += (float)dot * (op->scales[n * blocks + block] * in->scales[at]);
      if (op->mins) lanes[lane] += op->mins[n * blocks + block] * in->sums[at];
    }
    op->y[row * op->n + n] = add_lanes(lanes) + (op->bias ? op->bias[n] : 0.0f);
  }
}

#ifdef DSPARK_AVX2

AVX2_CODE static void quantise_row_avx2(const Job *job, int64_t row) {
  const float *x = job->op->x + row * job->op->k;
  const __m256 sign = _mm256_set1_ps(-0.0f);
  const __m256i whole = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7), ones = _mm256_set1_epi16(1);
  const __m256i parted = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12,
                                          14, 1, 3, 5, 7, 9, 11, 13, 15);
  const Activations *in = &job->in;
  int8_t *values = in->values + row * in->groups * GROUP;
  for (int64_t block = 0; block < job->op->k / BLOCK; block++, x += BLOCK) {
    __m256 v[4], large = _mm256_setzero_ps(), sum = _mm256_setzero_ps();
    for (int i = 0; i < 4; i++) {
      v[i] = _mm256_loadu_ps(x + 8 * i);
      large = _mm256_max_ps(large, _mm256_andnot_ps(sign, v[i]));
      sum = _mm256_add_ps(sum, v[i]);
    }
    float lanes[LANES], total, largest = 0;
    _mm256_storeu_ps(lanes, large);
    for (int i = 0; i < LANES; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    _mm256_storeu_ps(lanes, sum);
    total = add_lanes(lanes);
    __m256 inverse = _mm256_set1_ps(block_inverse(largest));
    __m256i q[4];
    for (int i = 0; i < 4; i++) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    bytes = _mm256_permutevar8x32_epi32(bytes, whole);
    __m256i pairs = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), ones);
    int32_t parts[LANES], count = 0;
    _mm256_storeu_si256((__m256i *)parts, pairs);
    for (int i = 0; i < LANES; i++) count += parts[i];
    int64_t lane = row * in->groups * LANES + block / LANES * LANES + lane_of(job->op->bits, block);
    if (job->op->bits == 4) {
      int8_t *even = values + block / 2 * 64 + block % 2 * 16;
      bytes = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(bytes, parted), 0xd8);
      _mm_storeu_si128((__m128i *)even, _mm256_castsi256_si128(bytes));
      _mm_storeu_si128((__m128i *)(even + 32), _mm256_extracti128_si256(bytes, 1));
    } else {
      _mm256_storeu_si256((__m256i *)(values + block * BLOCK), bytes);
    }
    in->scales[lane] = block_scale(largest, total);
    in->sums[lane] = total;
    in->offsets[lane] = 8 * count;
  }
}

AVX2_INLINE float add_lanes_avx2(__m256 lane) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(lane), _mm256_extractf128_ps(lane, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

AVX2_INLINE __m256i load_pair(const uint8_t *w, int half) {
  return half ? _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)w)) : _mm256_loadu_si256((const __m256i *)w);
}

/* Adds two vectors of int16 dot products lane by lane after bringing equal blocks together: 64-bit units. */
AVX2_INLINE __m256i join64(__m256i a, __m256i b) {
  return _mm256_add_epi16(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

AVX2_INLINE __m256i join32(__m256i a, __m256i b) {
  __m256 x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
  return _mm256_add_epi16(_mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88)),
                          _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xdd)));
}

/* dots[r] = the integer dot products of up to eight blocks (`pairs` pairs, the last one perhaps half) in lane order.
 * 4 bits: unsigned nibbles, at most 15 * 127 * 16 = 30480 in an int16 lane. */
AVX2_INLINE void dots4(const uint8_t *w, const int8_t *a, int64_t stride, int rows, int pairs, int half, __m256i *dots) {
  const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256i even[4], odd[4];
  for (int p = 0; p < pairs; p++) {
    __m256i both = load_pair(w + 32 * p, half && p == pairs - 1);
    even[p] = _mm256_and_si256(both, mask);
    odd[p] = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
  }
  for (int r = 0; r < rows; r++) {
    __m256i v[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int p = 0; p < pairs; p++) {
      const __m256i *q = (const __m256i *)(a + r * stride + 64 * p);
      v[p] = _mm256_add_epi16(_mm256_maddubs_epi16(even[p], _mm256_loadu_si256(q)),
                              _mm256_maddubs_epi16(odd[p], _mm256_loadu_si256(q + 1)));
    }
    dots[r] = _mm256_madd_epi16(join32(join64(v[0], v[1]), join64(v[2], v[3])), ones);
  }
}

/* 8 bits: |w| <= 128 unsigned times the activation under w's sign, at most 2 * 128 * 127 = 32512 in an int16 lane. */
AVX2_INLINE void dots8(const uint8_t *w, const int8_t *a, int64_t stride, int rows, int pairs, int half, __m256i *dots) {
  const __m256i zero = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
  __m256i h[ROW_TILE][4];
  for (int p = 0; p < 4; p++) {
    for (int r = 0; r < rows; r++) {
      __m256i t[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
      for (int i = 0; i < 2; i++) {
        if (p >= pairs || (half && p == pairs - 1 && i == 1)) continue;
        __m256i b = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(w + 64 * p + 32 * i)), zero);
        __m256i q = _mm256_loadu_si256((const __m256i *)(a + r * stride + 64 * p + 32 * i));
        t[i] = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(b), _mm256_sign_epi8(q, b)), ones);
      }
      h[r][p] = _mm256_hadd_epi32(t[0], t[1]);
    }
  }
  for (int r = 0; r < rows; r++) {
    __m256i lower = _mm256_hadd_epi32(h[r][0], h[r][1]), upper = _mm256_hadd_epi32(h[r][2], h[r][3]);
    dots[r] = _mm256_add_epi32(_mm256_permute2x128_si256(lower, upper, 0x20),
                               _mm256_permute2x128_si256(lower, upper, 0x31));
  }
}

AVX2_INLINE __m256 load_lanes(const float *values, int bits, int count) {
  const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7), index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256 v = count == LANES ? _mm256_loadu_ps(values)
                            : _mm256_maskload_ps(values, _mm256_cmpgt_epi32(_mm256_set1_epi32(count), index));
  return bits == 4 ? _mm256_permutevar8x32_ps(v, order) : v;
}

/* One group of up to eight blocks of one weight row into the lanes of `rows` rows. */
AVX2_INLINE void add_group(const Job *job, int64_t n, int64_t group, int64_t row, int rows, int bits, int count,
                           __m256 *lanes) {
  const BlockMatMul *op = job->op;
  const Activations *in = &job->in;
  int64_t blocks = op->k / BLOCK, at = n * blocks + group * LANES, meta = in->groups * LANES;
  const uint8_t *w = op->weight + at * (BLOCK / 8 * bits);
  const int8_t *a = in->values + row * in->groups * GROUP + group * GROUP;
  const float *scales = in->scales + row * meta + group * LANES, *sums = in->sums + row * meta + group * LANES;
  const int32_t *offsets = in->offsets + row * meta + group * LANES;
  __m256i dots[ROW_TILE];
  if (bits == 4)
    dots4(w, a, in->groups * GROUP, rows, (count + 1) / 2, count & 1, dots);
  else
    dots8(w, a, in->groups * GROUP, rows, (count + 1) / 2, count & 1, dots);
  __m256 scale = load_lanes(op->scales + at, bits, count);
  for (int r = 0; r < rows; r++) {
    if (bits == 4) dots[r] = _mm256_sub_epi32(dots[r], _mm256_loadu_si256((const __m256i *)(offsets + r * meta)));
    __m256 factor = _mm256_mul_ps(scale, _mm256_loadu_ps(scales + r * meta));
    lanes[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r]), factor, lanes[r]);
  }
  if (!op->mins) return;
  __m256 least = load_lanes(op->mins + at, bits, count);
  for (int r = 0; r < rows; r++) lanes[r] = _mm256_fmadd_ps(least, _mm256_loadu_ps(sums + r * meta), lanes[r]);
}

#define TAIL(count) \
  case count: add_group(job, n, whole, row, rows, bits, count, lanes); break

AVX2_INLINE void multiply_rows(const Job *job, int64_t row, int rows, int bits, int64_t first, int64_t last) {
  const BlockMatMul *op = job->op;
  int64_t blocks = op->k / BLOCK, whole = blocks / LANES;
  for (int64_t n = first; n < last; n++) {
    __m256 lanes[ROW_TILE];
    for (int r = 0; r < rows; r++) lanes[r] = _mm256_setzero_ps();
    for (int64_t group = 0; group < whole; group++) add_group(job, n, group, row, rows, bits, LANES, lanes);
    switch (blocks % LANES) {
      TAIL(1); TAIL(2); TAIL(3); TAIL(4); TAIL(5); TAIL(6); TAIL(7);
    }
    for (int r = 0; r < rows; r++)
      op->y[(row + r) * op->n + n] = add_lanes_avx2(lanes[r]) + (op->bias ? op->bias[n] : 0.0f);
  }
}

#define ROWS(count) \
  case count: multiply_rows(job, row, count, bits, first, last); break

AVX2_INLINE void multiply_bits(const Job *job, int64_t row, int rows, int bits, int64_t first, int64_t last) {
  switch (rows) {
    ROWS(1); ROWS(2); ROWS(3); ROWS(4);
  }
}

AVX2_CODE static void multiply_avx2(const Job *job, int64_t row, int rows, int64_t first, int64_t last) {
  if (job->op->bits == 4)
    multiply_bits(job, row, rows, 4, first, last);
  else
    multiply_bits(job, row, rows, 8, first, last);
}

#else
static void quantise_row_avx2(const Job *job, int64_t row) { quantise_row(job, row); }
static void multiply_avx2(const Job *job, int64_t row, int rows, int64_t first, int64_t last) {
  for (int r = 0; r < rows; r++) multiply_scalar(job, row + r, first, last);
}
#endif

static void quantise_item(void *argument, size_t row) {
  const Job *job = argument;
  if (job->level == LEVEL_AVX2)
    quantise_row_avx2(job, (int64_t)row);
  else
    quantise_row(job, (int64_t)row);
}

static void multiply_item(void *argument, size_t tile) {
  const Job *job = argument;
  int64_t first = (int64_t)tile * COLUMN_TILE, last = first + COLUMN_TILE;
  if (last > job->op->n) last = job->op->n;
  for (int64_t row = 0; row < job->op->rows; row += ROW_TILE) {
    int rows = (int)(job->op->rows - row < ROW_TILE ? job->op->rows - row : ROW_TILE);
    if (job->level == LEVEL_AVX2)
      multiply_avx2(job, row, rows, first, last);
    else
      for (int r = 0; r < rows; r++) multiply_scalar(job, row + r, first, last);
  }
}

static int reserve(Activations *in, const BlockMatMul *op) {
  in->groups = (op->k + GROUP - 1) / GROUP;
  size_t blocks = (size_t)(op->rows * in->groups * LANES);
  in->memory = calloc(blocks, BLOCK + 3 * sizeof(float)); /* the padding of the last group must be zero */
  if (!in->memory) return -1;
  in->values = in->memory;
  in->scales = (float *)(in->values + blocks * BLOCK);
  in->sums = in->scales + blocks;
  in->offsets = (int32_t *)(in->sums + blocks);
  return 0;
}

int dspark_cpu_level(void) {
#ifdef DSPARK_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return LEVEL_AVX2;
#endif
  return LEVEL_SCALAR;
}

int dspark_block_matmul(const BlockMatMul *op, int level, const Pool *pool) {
  Job job = {.op = op, .level = level};
  if (op->rows == 0 || op->n == 0) return 0;
  if (reserve(&job.in, op)) return -1;
  size_t tiles = (size_t)((op->n + COLUMN_TILE - 1) / COLUMN_TILE);
  if (op->rows * op->k < SERIAL_WORK)
    for (int64_t row = 0; row < op->rows; row++) quantise_item(&job, (size_t)row);
  else
    pool->run(pool, quantise_item, (size_t)op->rows, &job);
  pool->run(pool, multiply_item, tiles, &job);
  free(job.in.memory);
  return 0;
}
