/* Many rows times a block-quantised weight: a lane belongs to a column, so that a row's sums need no shuffling.
 *
 * Sixteen columns are read once, put in order, and met by every row.  A result is added up in the order described in
 * dspark_matmul.c: what are eight lanes there, and two of the remainder, are ten vectors here.
 */
#include "dspark_matmul.h"

enum { TILES = 2, COLUMNS = TILES * LANES, ROW_TILE = 6, BATCH = 32, PART = 32, SETS = LANES + 2 };

/* Some blocks of sixteen columns.  A quad is four bytes of each of eight columns: of a block four (4 bits) or eight. */
typedef struct {
  __m256i quads[PART][8][TILES];
  __m256 scales[PART][TILES], mins[PART][TILES];
  int64_t block, count;
  int64_t lane[PART], set[PART]; /* of the activations' factors; of the sums */
  int64_t next;                  /* first block of the next sixteen columns */
} Part;

/* The sums of a row: of the blocks 0, 8, 16 .., of 1, 9, 17 .., and last of the remaining even and odd ones. */
typedef __m256 Sums[SETS][TILES];

/* Lane c of vector i becomes lane i of vector c. */
AVX2_INLINE void transpose(__m256 *v) {
  __m256 a[LANES], b[LANES];
  for (int i = 0; i < LANES; i += 2) {
    a[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  for (int i = 0; i < LANES / 2; i++) {
    v[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    v[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}

/* The factors of a part's blocks; start: the columns' first ones. */
AVX2_INLINE void take_factors(const float *from, const int64_t *start, int64_t count, int tile, __m256 (*to)[TILES]) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  for (int64_t b = 0; b < count; b += LANES) {
    __m256 v[LANES];
    __m256i there = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(count - b < LANES ? count - b : LANES)), index);
    for (int c = 0; c < LANES; c++) v[c] = _mm256_maskload_ps(from + start[c] + b, there);
    transpose(v);
    for (int i = 0; i < LANES; i++) to[b + i][tile] = v[i];
  }
}

/* Sixteen bytes of eight columns as four quads. */
AVX2_INLINE void load_quads(const uint8_t *const *columns, int64_t at, __m256i *quads) {
  __m256i v[4], t[4];
  for (int c = 0; c < 4; c++)
    v[c] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(columns[c] + at))),
                                   _mm_loadu_si128((const __m128i *)(columns[c + 4] + at)), 1);
  for (int i = 0; i < 4; i += 2) {
    t[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
  }
  quads[0] = _mm256_unpacklo_epi64(t[0], t[2]);
  quads[1] = _mm256_unpackhi_epi64(t[0], t[2]);
  quads[2] = _mm256_unpacklo_epi64(t[1], t[3]);
  quads[3] = _mm256_unpackhi_epi64(t[1], t[3]);
}

AVX2_INLINE void take_block(const uint8_t *const *columns, int64_t at, int bits, int tile, __m256i (*to)[TILES]) {
  const __m256i centre = bits == 4 ? _mm256_setzero_si256() : _mm256_set1_epi8(-128); /* bytes become signed */
  __m256i quads[4];
  for (int half = 0; half < bits / 4; half++) {
    load_quads(columns, at + half * 16, quads);
    for (int i = 0; i < 4; i++) to[4 * half + i][tile] = _mm256_xor_si256(quads[i], centre);
  }
}

/* Fetches what corresponds to a block of these sixteen columns in the next ones. */
AVX2_INLINE void fetch_ahead(const BlockMatMul *op, int64_t at, int bits) {
  for (int i = 0; i < COLUMNS * 4 * bits; i += LINE) _mm_prefetch(op->weight + at * 4 * bits + i, _MM_HINT_T0);
  _mm_prefetch(op->scales + at, _MM_HINT_T0);
  if (op->mins) _mm_prefetch(op->mins + at, _MM_HINT_T0);
}

AVX2_INLINE void take_part(const Job *job, const int64_t *start, int64_t block, int bits, Part *part) {
  const BlockMatMul *op = job->op;
  int64_t from[LANES];
  part->block = block;
  part->count = job->blocks - block < PART ? job->blocks - block : PART;
  part->next = start[0] + COLUMNS * job->blocks;
  for (int64_t b = 0; b < part->count; b++) {
    part->lane[b] = factor_lane(job, block + b, bits);
    part->set[b] = block + b < job->in.whole * LANES ? (block + b) % LANES : LANES + (block + b) % 2;
  }
  for (int t = 0; t < TILES; t++) {
    const uint8_t *columns[LANES];
    for (int c = 0; c < LANES; c++) {
      from[c] = start[t * LANES + c] + block;
      columns[c] = op->weight + from[c] * 4 * bits;
    }
    take_factors(op->scales, from, part->count, t, part->scales);
    if (op->mins) take_factors(op->mins, from, part->count, t, part->mins);
    for (int64_t b = 0; b < part->count; b++) take_block(columns, b * 4 * bits, bits, t, part->quads[b]);
  }
}

AVX2_INLINE __m256i broadcast(const int8_t *four) {
  return _mm256_castps_si256(_mm256_broadcast_ss((const float *)four));
}

/* Keeps a sum where it is: the compiler would first form all products, more than there are registers. */
#define KEEP(sum) __asm__ volatile("" : "+x"(sum))

/* A quad's elements: signed bytes, or of nibbles the even ones and the odd ones in turn. */
AVX2_INLINE __m256i elements(const __m256i (*quads)[TILES], int i, int t, int bits) {
  const __m256i nibble = _mm256_set1_epi8(15);
  if (bits == 8) return quads[i][t];
  return _mm256_and_si256(i % 2 ? _mm256_srli_epi16(quads[i / 2][t], 4) : quads[i / 2][t], nibble);
}

/* dots[r] = a block's dot products.  Nibbles: unsigned, at most 16 * 15 * 127 = 30480 in an int16 lane.  Bytes:
 * |w| <= 128 unsigned times the activation under w's sign, at most 2 * 128 * 127 = 32512 in an int16 lane. */
AVX2_INLINE void multiply_block(const __m256i (*quads)[TILES], const int8_t *const *q, int rows, int bits,
                                __m256i (*dots)[TILES]) {
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    __m256i w[TILES], size[TILES];
    for (int t = 0; t < TILES; t++) {
      w[t] = elements(quads, i, t, bits);
      size[t] = bits == 8 ? _mm256_abs_epi8(w[t]) : w[t];
    }
    for (int r = 0; r < rows; r++) {
      __m256i x = broadcast(q[r] + (bits == 4 ? i % 2 * BLOCK + i / 2 * 4 : i * 4));
      for (int t = 0; t < TILES; t++) {
        __m256i dot = _mm256_maddubs_epi16(size[t], bits == 8 ? _mm256_sign_epi8(x, w[t]) : x);
        if (bits == 8) dot = _mm256_madd_epi16(dot, ones);
        if (i) dot = bits == 8 ? _mm256_add_epi32(dots[r][t], dot) : _mm256_add_epi16(dots[r][t], dot);
        dots[r][t] = dot;
        KEEP(dots[r][t]);
      }
    }
  }
  for (int r = 0; r < rows && bits == 4; r++)
    for (int t = 0; t < TILES; t++) dots[r][t] = _mm256_madd_epi16(dots[r][t], ones);
}

/* Adds one of a part's blocks to the sums of `rows` rows. */
AVX2_INLINE void add_block(const Job *job, const Part *part, int64_t b, int64_t row, int rows, int bits, int mins,
                           Sums *sums) {
  const Activations *in = &job->in;
  int64_t block = part->block + b, set = part->set[b], at = row * in->stride + part->lane[b];
  const int8_t *q[ROW_TILE];
  __m256i dots[ROW_TILE][TILES];
  for (int r = 0; r < rows; r++) {
    q[r] = in->values + ((row + r) * job->pairs + block / 2) * PAIR + block % 2 * 4 * bits;
    __asm__("" : "+r"(q[r])); /* one register a row, not an address for every four bytes */
  }
  multiply_block(part->quads[b], q, rows, bits, dots);
  for (int r = 0; r < rows; r++, at += in->stride) {
    __m256 scale = _mm256_broadcast_ss(in->scales + at), total = _mm256_broadcast_ss(in->sums + at);
    __m256i offset = _mm256_set1_epi32(in->offsets[at]);
    for (int t = 0; t < TILES; t++) {
      __m256i dot = bits == 4 ? _mm256_sub_epi32(dots[r][t], offset) : dots[r][t];
      __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(part->scales[b][t], scale), sums[r][set][t]);
      sums[r][set][t] = mins ? _mm256_fmadd_ps(part->mins[b][t], total, sum) : sum;
    }
  }
}

AVX2_INLINE void add_part(const Job *job, const Part *part, int64_t row, int rows, int bits, Sums *sums) {
  int64_t count = part->count;
  for (int64_t b = 0; b < count; b++) {
    if (row == 0) fetch_ahead(job->op, part->next + (part->block + b) * COLUMNS, bits);
    if (job->op->mins)
      add_block(job, part, b, row, rows, bits, 1, sums);
    else
      add_block(job, part, b, row, rows, bits, 0, sums);
  }
}

/* A batch's rows in groups of equal size, or nearly. */
AVX2_INLINE void add_rows(const Job *job, const Part *part, int64_t row, int rows, int bits, Sums *sums) {
  int groups = (rows + ROW_TILE - 1) / ROW_TILE;
  for (int g = 0; g < groups; g++) {
    int first = g * rows / groups, count = (g + 1) * rows / groups - first;
    switch (count) {
      case 3: add_part(job, part, row + first, 3, bits, sums + first); break;
      case 4: add_part(job, part, row + first, 4, bits, sums + first); break;
      case 5: add_part(job, part, row + first, 5, bits, sums + first); break;
      case ROW_TILE: add_part(job, part, row + first, ROW_TILE, bits, sums + first); break;
      default: /* the rest of a batch */
        for (int r = first; r < first + count; r++) add_part(job, part, row + r, 1, bits, sums + r);
    }
  }
}

/* One tile of a row: the eight lanes by the tree that serves few rows too, then the remainder. */
AVX2_INLINE __m256 add_sets(Sums s, int t, int bits) {
  __m256 lane[LANES];
  for (int i = 0; i < LANES; i++) lane[i] = bits == 4 ? s[i % 4 * 2 + i / 4][t] : s[i][t];
  __m256 low = _mm256_add_ps(_mm256_add_ps(lane[0], lane[1]), _mm256_add_ps(lane[2], lane[3]));
  __m256 high = _mm256_add_ps(_mm256_add_ps(lane[4], lane[5]), _mm256_add_ps(lane[6], lane[7]));
  return _mm256_add_ps(_mm256_add_ps(low, high), _mm256_add_ps(s[LANES][t], s[LANES + 1][t]));
}

AVX2_INLINE void store_row(const Job *job, int64_t row, int64_t n, int columns, Sums sums, int bits) {
  float all[COLUMNS], *y = job->op->y + row * job->op->n + n;
  for (int t = 0; t < TILES; t++) _mm256_storeu_ps((columns == COLUMNS ? y : all) + t * LANES, add_sets(sums, t, bits));
  for (int c = 0; c < columns && columns < COLUMNS; c++) y[c] = all[c];
}

/* A batch of rows by `columns` of sixteen columns; a missing column is the last one again, not stored. */
AVX2_INLINE void multiply_batch(const Job *job, int64_t row, int rows, int64_t n, int columns, int bits) {
  Part part;
  Sums sums[BATCH];
  int64_t start[COLUMNS];
  for (int c = 0; c < COLUMNS; c++) start[c] = (n + (c < columns ? c : columns - 1)) * job->blocks;
  for (int r = 0; r < rows; r++)
    for (int s = 0; s < SETS; s++)
      for (int t = 0; t < TILES; t++) sums[r][s][t] = _mm256_setzero_ps();
  for (int64_t block = 0; block < job->blocks; block += PART) {
    take_part(job, start, block, bits, &part);
    add_rows(job, &part, row, rows, bits, sums);
  }
  for (int r = 0; r < rows; r++) store_row(job, row + r, n, columns, sums[r], bits);
}

AVX2_INLINE void multiply_rows(const Job *job, int64_t first, int64_t last, int bits) {
  for (int64_t n = first; n < last; n += COLUMNS)
    for (int64_t row = 0; row < job->op->rows; row += BATCH) {
      int rows = (int)(job->op->rows - row < BATCH ? job->op->rows - row : BATCH);
      multiply_batch(job, row, rows, n, (int)(last - n < COLUMNS ? last - n : COLUMNS), bits);
    }
}

AVX2_CODE void dspark_block_rows(const Job *job, int64_t first, int64_t last) {
  if (job->op->bits == 4)
    multiply_rows(job, first, last, 4);
  else
    multiply_rows(job, first, last, 8);
}
