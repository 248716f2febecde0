/* Block-quantised matrix product: 4- or 8-bit weights in blocks of 32 times activations quantised to int8 on the fly.
 *
 * The weight is stored by sixteen columns (kernels/interleave.py): of each block four bytes of every column in turn, so
 * that a lane belongs to a column and a row's sums need no shuffling (dspark_matmul_tile.h).
 */
#include "dspark_matmul.h"

#include <immintrin.h>
#include <math.h>
#include <stdlib.h>

enum { ITEM = 2, SERIAL_WORK = 1 << 15 };

typedef struct {
  Job job;
  Multiply *multiply;
} Work;

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
    for (int i = 0; i < 4; i++) /* what is no number becomes the smallest integer */
      q[i] = _mm256_max_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse)), _mm256_set1_epi32(-127));
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

static void quantise_item(void *argument, size_t row) {
  const Work *work = argument;
  quantise_row(&work->job, (int64_t)row);
}

static void multiply_item(void *argument, size_t item) {
  const Work *work = argument;
  int64_t first = (int64_t)item * ITEM, last = first + ITEM < work->job.tiles ? first + ITEM : work->job.tiles;
  work->multiply(&work->job, first, last);
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

static int multiply_by(const InterleavedMatMul *op, const Pool *pool, Multiply *multiply) {
  Work work = {{.op = op}, multiply};
  if (op->rows == 0) return 0;
  if (reserve(&work.job)) return -1;
  run_items(pool, quantise_item, (size_t)op->rows, &work, op->rows * op->weight.k < SERIAL_WORK);
  pool->run(pool, multiply_item, (size_t)((work.job.tiles + ITEM - 1) / ITEM), &work);
  free(work.job.in.memory);
  return 0;
}

static int has_vnni(void) { return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw"); }

int dspark_interleaved_matmul(const InterleavedMatMul *op, const Pool *pool) {
  return multiply_by(op, pool, has_vnni() ? dspark_multiply_avx512 : dspark_multiply_avx2);
}
