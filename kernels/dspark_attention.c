/* Attention of a few (or many) new rows over the KV pool.
 *
 * The pool is cut into tiles of 128 rows at absolute positions.  A tile gives a row its maximum, the sum of its
 * exponentials and its weighted values; tiles are merged in order, as in Flash Attention (Dao et al., 2022), so the
 * result depends on the row's own position only.  A ring has whole tiles, so a tile's rows lie side by side in it too.
 * The query heads of one KV head share every load of a key or value.
 * Rows of the pool that a row may not see are never read as values, so whatever a rollback left there is harmless.
 */
#include "dspark_cpu.h"
#include "dspark_lanes.h"

#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TILE = POOL_TILE, LANES = 8, SHARED = 3, FEW_ROWS = 16, PARTIAL = 8, LINE = 16, AHEAD = 8 };

/* The new rows of one sequence and the tiles that they can see.  Rows are counted through all sequences. */
typedef struct {
  int64_t slot, past, first_row, rows;
  int64_t first_tile, tiles;
  int64_t first_item, items; /* of the work that the threads share */
  float *partials; /* few rows: [rows, heads, tiles, dim + 8]: values, maximum, sum; NULL when merged at once */
} Sequence;

typedef struct {
  const VerifyAttention *op;
  Sequence *sequences;
  int64_t count, items;
  float *totals; /* [all rows, heads, 2]: maximum, sum */
} Job;

/* The part of one tile that a new row sees. */
typedef struct {
  const Sequence *of;
  int64_t kv_head, row;
  int64_t start, known, end; /* keys start .. known - 1 all, known .. end - 1 by the tree mask */
} Span;

AVX2_INLINE float exp_one(float x) { return _mm256_cvtss_f32(exp_lanes(_mm256_set1_ps(x))); }

AVX2_INLINE __m256 cap_lanes(__m256 x, float cap) { /* cap * tanh(x / cap) */
  const __m256 one = _mm256_set1_ps(1.0f), limit = _mm256_set1_ps(20.0f);
  __m256 twice = _mm256_mul_ps(x, _mm256_set1_ps(2.0f / cap));
  twice = _mm256_min_ps(limit, _mm256_max_ps(_mm256_sub_ps(_mm256_setzero_ps(), limit), twice));
  __m256 e = exp_lanes(twice);
  return _mm256_mul_ps(_mm256_set1_ps(cap), _mm256_div_ps(_mm256_sub_ps(e, one), _mm256_add_ps(e, one)));
}

AVX2_INLINE float max_of(__m256 v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

/* Eight floats, or the first `count` of them when the head size leaves fewer. */
AVX2_INLINE __m256i first_lanes(int64_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

AVX2_INLINE __m256 get(const float *from, int64_t count) {
  return count >= LANES ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, first_lanes(count));
}

AVX2_INLINE void put(float *to, __m256 value, int64_t count) {
  if (count >= LANES)
    _mm256_storeu_ps(to, value);
  else
    _mm256_maskstore_ps(to, first_lanes(count), value);
}

AVX2_INLINE void score_lanes(const float *q, int64_t q_step, const float *key, int64_t dim, int64_t count, int heads,
                             int keys, __m256 (*sums)[4]) {
  __m256 query[SHARED];
  for (int r = 0; r < heads; r++) query[r] = get(q + r * q_step, count);
  for (int j = 0; j < keys; j++) {
    __m256 k = get(key + j * dim, count);
    for (int r = 0; r < heads; r++) sums[r][j] = _mm256_fmadd_ps(query[r], k, sums[r][j]);
  }
}

/* Sums of neighbours, as a horizontal addition gives them in more steps. */
AVX2_INLINE __m256 join(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
}

/* scores[r][at .. at + keys - 1] = scale * (query of head r) . key, for 1 or 4 keys. */
AVX2_INLINE void score_keys(const VerifyAttention *op, const float *q, const float *key, int heads, int keys,
                            float (*scores)[TILE], int64_t at) {
  __m256 sums[SHARED][4];
  int64_t d = 0;
  for (int r = 0; r < heads; r++)
    for (int j = 0; j < 4; j++) sums[r][j] = _mm256_setzero_ps();
  for (; d + LANES <= op->dim; d += LANES) score_lanes(q + d, op->q_head, key + d, op->dim, LANES, heads, keys, sums);
  if (d < op->dim) score_lanes(q + d, op->q_head, key + d, op->dim, op->dim - d, heads, keys, sums);
  for (int r = 0; r < heads; r++) {
    __m256 four = join(join(sums[r][0], sums[r][1]), join(sums[r][2], sums[r][3]));
    __m128 dots = _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1));
    dots = _mm_mul_ps(dots, _mm_set1_ps(op->scale));
    if (keys == 4)
      _mm_storeu_ps(scores[r] + at, dots);
    else
      _mm_store_ss(scores[r] + at, dots);
  }
}

/* The keys first .. last - 1 of a tile, as weights of its value rows. */
typedef struct {
  const float *value;
  int64_t dim, first, last;
  float (*weights)[TILE];
} Mix;

/* values[r][d] += weights[r][j] * value[j][d], key after key, for `width` vectors from d on. */
AVX2_INLINE void add_values(Mix m, int64_t d, int64_t count, int heads, int width, float *values, int64_t step) {
  __m256 sums[SHARED][4];
  for (int r = 0; r < heads; r++)
    for (int i = 0; i < width; i++) sums[r][i] = get(values + r * step + d + i * LANES, count);
  for (int64_t j = m.first; j < m.last; j++) {
    __m256 w[SHARED];
    for (int r = 0; r < heads; r++) w[r] = _mm256_broadcast_ss(&m.weights[r][j]);
    for (int i = 0; i < width; i++) {
      __m256 v = get(m.value + j * m.dim + d + i * LANES, count);
      for (int r = 0; r < heads; r++) sums[r][i] = _mm256_fmadd_ps(w[r], v, sums[r][i]);
    }
  }
  for (int r = 0; r < heads; r++)
    for (int i = 0; i < width; i++) put(values + r * step + d + i * LANES, sums[r][i], count);
}

AVX2_INLINE void add_span(Mix m, int heads, float *values, int64_t step) {
  int64_t d = 0;
  for (; d + 4 * LANES <= m.dim; d += 4 * LANES) add_values(m, d, LANES, heads, 4, values, step);
  for (; d + LANES <= m.dim; d += LANES) add_values(m, d, LANES, heads, 1, values, step);
  if (d < m.dim) add_values(m, d, m.dim - d, heads, 1, values, step);
}

static int sees(const VerifyAttention *op, Span s, int64_t key) {
  return !op->tree || op->tree[s.row * op->rows + (s.of->first_row + key - s.of->past) % op->rows];
}

/* Softmax numerators in place.  stats: maximum, sum. */
AVX2_INLINE void exponentiate(float *scores, int64_t count, float *stats) {
  __m256 most = _mm256_set1_ps(-INFINITY), sum = _mm256_setzero_ps();
  for (int64_t j = 0; j < count; j += LANES) most = _mm256_max_ps(most, _mm256_loadu_ps(scores + j));
  stats[0] = max_of(most);
  most = _mm256_set1_ps(stats[0]);
  for (int64_t j = 0; j < count; j += LANES) {
    __m256 e = exp_lanes(_mm256_sub_ps(_mm256_loadu_ps(scores + j), most));
    _mm256_storeu_ps(scores + j, e);
    sum = _mm256_add_ps(sum, e);
  }
  stats[1] = sum_of(sum);
}

/* Values come from memory while keys are scored, and the next keys, for the first row that needs them. */
AVX2_INLINE void fetch(const float *from, int64_t count) {
  for (int64_t i = 0; i < count; i += LINE) _mm_prefetch((const char *)(from + i), _MM_HINT_T0);
}

/* One tile for `heads` query heads of a row: out[r] = values [dim], maximum, sum.  Keys are counted from the tile's. */
AVX2_INLINE void attend_tile(const VerifyAttention *op, Span s, int64_t head, int heads, float *out, int64_t step) {
  int64_t base = s.start / TILE * TILE, start = s.start - base, known = s.known - base, end = s.end - base, j = start;
  int64_t row = (s.of->slot * op->kv_heads + s.kv_head) * op->pool_rows + base % op->pool_rows;
  int64_t count = (end + LANES - 1) / LANES * LANES;
  const float *q = op->q + s.row / op->rows * op->q_batch + head * op->q_head + s.row % op->rows * op->q_row;
  const float *keys = op->k_pool + row * op->dim, *value = op->v_pool + row * op->dim;
  float scores[SHARED][TILE];
  for (; j + 4 <= end; j += 4) {
    if (s.row == s.of->first_row) {
      fetch(value + j * op->dim, 4 * op->dim);
      if (j + AHEAD + 4 <= end) fetch(keys + (j + AHEAD) * op->dim, 4 * op->dim);
    }
    score_keys(op, q, keys + j * op->dim, heads, 4, scores, j);
  }
  for (; j < end; j++) score_keys(op, q, keys + j * op->dim, heads, 1, scores, j);
  for (int r = 0; r < heads; r++) {
    float *values = out + r * step;
    for (int64_t i = 0; op->softcap > 0 && i < count; i += LANES)
      _mm256_storeu_ps(scores[r] + i, cap_lanes(_mm256_loadu_ps(scores[r] + i), op->softcap));
    for (j = 0; j < start; j++) scores[r][j] = -INFINITY;
    for (j = known; j < end; j++)
      if (!sees(op, s, base + j)) scores[r][j] = -INFINITY;
    for (j = end; j < count; j++) scores[r][j] = -INFINITY;
    exponentiate(scores[r], count, values + op->dim);
    memset(values, 0, (size_t)op->dim * sizeof(float));
  }
  add_span((Mix){value, op->dim, start, known, scores}, heads, out, step);
  for (j = known; j < end; j++)
    if (sees(op, s, base + j)) add_span((Mix){value, op->dim, j, j + 1, scores}, heads, out, step);
}

AVX2_CODE static void attend_heads(const VerifyAttention *op, Span s, int64_t head, int heads, float *out, int64_t step) {
  switch (heads) {
    case 1: attend_tile(op, s, head, 1, out, step); break;
    case 2: attend_tile(op, s, head, 2, out, step); break;
    default: attend_tile(op, s, head, SHARED, out, step);
  }
}

/* Adds a tile's result to a row's running values, maximum and sum. */
AVX2_CODE static void merge(float *o, float *total, const float *part, int64_t dim) {
  float most = total[0] > part[dim] ? total[0] : part[dim];
  float old = exp_one(total[0] - most), new = exp_one(part[dim] - most);
  __m256 a = _mm256_set1_ps(old), b = _mm256_set1_ps(new);
  for (int64_t d = 0; d < dim; d += LANES) {
    __m256 kept = _mm256_mul_ps(get(o + d, dim - d), a);
    put(o + d, _mm256_fmadd_ps(get(part + d, dim - d), b, kept), dim - d);
  }
  total[0] = most;
  total[1] = total[1] * old + part[dim + 1] * new;
}

/* The visible keys of a tile; false when there are none. */
static int span_of(const VerifyAttention *op, const Sequence *of, int64_t kv_head, int64_t row, int64_t tile, Span *s) {
  int64_t position = of->past + row - of->first_row, end = position + 1;
  int64_t start = op->window >= 0 && position - op->window + 1 > 0 ? position - op->window + 1 : 0;
  if (start < tile * TILE) start = tile * TILE;
  if (end > (tile + 1) * TILE) end = (tile + 1) * TILE;
  if (start >= end) return 0;
  int64_t known = op->tree && of->past < end ? (of->past > start ? of->past : start) : end;
  *s = (Span){of, kv_head, row, start, known, end};
  if (known > start) return 1;
  for (int64_t j = start; j < end; j++)
    if (sees(op, *s, j)) return 1;
  return 0;
}

static float *output_row(const VerifyAttention *op, int64_t head, int64_t row) {
  return op->o + row / op->rows * op->o_batch + head * op->o_head + row % op->rows * op->o_row;
}

static float *total_of(const Job *job, int64_t head, int64_t row) {
  return job->totals + 2 * (row * job->op->heads + head);
}

/* The partial result of tile 0 of a row and head. */
static float *partial_of(const Job *job, const Sequence *of, int64_t head, int64_t row) {
  int64_t index = (row - of->first_row) * job->op->heads + head;
  return of->partials + index * of->tiles * (job->op->dim + PARTIAL);
}

/* One tile of a KV head for the rows first .. last - 1 of a sequence. */
static void attend_rows(const Job *job, const Sequence *of, int64_t kv_head, int64_t tile, int64_t first, int64_t last) {
  const VerifyAttention *op = job->op;
  int64_t group = op->heads / op->kv_heads, step = op->dim + PARTIAL;
  float local[SHARED * (MAX_HEAD + PARTIAL)];
  Span s;
  for (int64_t row = first; row < last; row++) {
    if (!span_of(op, of, kv_head, row, tile, &s)) continue;
    for (int64_t done = 0; done < group;) {
      int64_t head = kv_head * group + done, left = group - done;
      int heads = left == 4 ? 2 : (int)(left < SHARED ? left : SHARED);
      if (of->partials) {
        float *out = partial_of(job, of, head, row) + (tile - of->first_tile) * step;
        attend_heads(op, s, head, heads, out, of->tiles * step);
      } else {
        attend_heads(op, s, head, heads, local, step);
        for (int r = 0; r < heads; r++)
          merge(output_row(op, head + r, row), total_of(job, head + r, row), local + r * step, op->dim);
      }
      done += heads;
    }
  }
}

static void start_row(const Job *job, int64_t head, int64_t row) {
  const VerifyAttention *op = job->op;
  float *total = total_of(job, head, row);
  total[0] = op->sinks ? op->sinks[head] : -INFINITY;
  total[1] = op->sinks ? 1.0f : 0.0f;
  memset(output_row(op, head, row), 0, (size_t)op->dim * sizeof(float));
}

AVX2_CODE static void finish_row(const Job *job, int64_t head, int64_t row) {
  const VerifyAttention *op = job->op;
  float *o = output_row(op, head, row);
  __m256 sum = _mm256_set1_ps(total_of(job, head, row)[1]);
  for (int64_t d = 0; d < op->dim; d += LANES)
    put(o + d, _mm256_div_ps(get(o + d, op->dim - d), sum), op->dim - d);
}

/* Many rows: all tiles of a block of rows of one KV head. */
static void attend_block(const Job *job, const Sequence *of, int64_t kv_head, int64_t block) {
  int64_t group = job->op->heads / job->op->kv_heads, first = of->first_row + block * FEW_ROWS;
  int64_t end = of->first_row + of->rows, last = first + FEW_ROWS < end ? first + FEW_ROWS : end;
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
    for (int64_t row = first; row < last; row++) start_row(job, head, row);
  for (int64_t tile = of->first_tile; tile < of->first_tile + of->tiles; tile++)
    attend_rows(job, of, kv_head, tile, first, last);
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
    for (int64_t row = first; row < last; row++) finish_row(job, head, row);
}

/* Few rows: one tile of one KV head for all rows of a sequence, merged later. */
static void attend_item(void *argument, size_t item) {
  const Job *job = argument;
  const Sequence *of = job->sequences;
  while ((int64_t)item >= of->first_item + of->items) of++;
  int64_t kv_head = ((int64_t)item - of->first_item) % job->op->kv_heads;
  int64_t part = ((int64_t)item - of->first_item) / job->op->kv_heads;
  if (of->partials)
    attend_rows(job, of, kv_head, of->first_tile + part, of->first_row, of->first_row + of->rows);
  else
    attend_block(job, of, kv_head, part);
}

static void merge_row(const Job *job, const Sequence *of, int64_t head, int64_t row) {
  const VerifyAttention *op = job->op;
  const float *parts = partial_of(job, of, head, row);
  Span s;
  start_row(job, head, row);
  for (int64_t tile = 0; tile < of->tiles; tile++)
    if (span_of(op, of, 0, row, of->first_tile + tile, &s))
      merge(output_row(op, head, row), total_of(job, head, row), parts + tile * (op->dim + PARTIAL), op->dim);
  finish_row(job, head, row);
}

static void append_rows(const Job *job) {
  const VerifyAttention *op = job->op;
  size_t bytes = (size_t)op->dim * sizeof(float);
  for (const Sequence *of = job->sequences; of < job->sequences + job->count; of++)
    for (int64_t head = 0; head < op->kv_heads; head++) {
      int64_t batch = of->first_row / op->rows, row = of->first_row % op->rows;
      int64_t from = (batch * op->kv_heads + head) * op->rows + row, to = (of->slot * op->kv_heads + head) * op->pool_rows;
      for (int64_t i = 0; i < of->rows; i++) {
        int64_t at = to + (of->past + i) % op->pool_rows;
        memcpy(op->k_pool + at * op->dim, op->k + (from + i) * op->dim, bytes);
        memcpy(op->v_pool + at * op->dim, op->v + (from + i) * op->dim, bytes);
      }
    }
}

/* Sequences that bring rows, their tiles and their work; returns how many floats of partial results they need. */
static size_t find_sequences(Job *job) {
  const VerifyAttention *op = job->op;
  size_t partials = 0;
  for (int64_t slot = 0; slot < op->slots; slot++) {
    Sequence s = {.slot = slot, .past = op->past[slot], .first_row = dspark_first_row(op, slot)};
    s.rows = dspark_first_row(op, slot + 1) - s.first_row;
    if (s.rows == 0) continue;
    int64_t start = op->window >= 0 && s.past - op->window + 1 > 0 ? s.past - op->window + 1 : 0;
    int few = s.rows <= FEW_ROWS;
    s.first_tile = start / TILE;
    s.tiles = (s.past + s.rows + TILE - 1) / TILE - s.first_tile;
    s.first_item = job->items;
    s.items = op->kv_heads * (few ? s.tiles : (s.rows + FEW_ROWS - 1) / FEW_ROWS);
    if (few) partials += (size_t)(s.rows * op->heads * s.tiles * (op->dim + PARTIAL));
    job->items += s.items;
    job->sequences[job->count++] = s;
  }
  return partials;
}

static void run(Job *job, float *partials, const Pool *pool) {
  const VerifyAttention *op = job->op;
  Sequence *end = job->sequences + job->count;
  for (Sequence *of = job->sequences; of < end; of++) {
    if (of->rows > FEW_ROWS) continue;
    of->partials = partials;
    partials += of->rows * op->heads * of->tiles * (op->dim + PARTIAL);
  }
  if (op->k) append_rows(job);
  pool->run(pool, attend_item, (size_t)job->items, job);
  for (const Sequence *of = job->sequences; of < end; of++)
    for (int64_t head = 0; of->partials && head < op->heads; head++)
      for (int64_t row = of->first_row; row < of->first_row + of->rows; row++) merge_row(job, of, head, row);
}

int64_t dspark_first_row(const VerifyAttention *op, int64_t slot) {
  return op->offsets ? op->offsets[slot] : slot * op->rows;
}

int dspark_has_room(const VerifyAttention *op, int64_t slot) {
  int64_t past = op->past[slot], rows = dspark_first_row(op, slot + 1) - dspark_first_row(op, slot);
  if (past < 0 || past + rows <= op->pool_rows) return past >= 0;
  return op->window > 0 && op->pool_rows % TILE == 0 && op->window - 1 + rows <= op->pool_rows;
}

int dspark_verify_attention(const VerifyAttention *op, const Pool *pool) {
  size_t rows = (size_t)(op->batch * op->rows);
  if (rows == 0) return 0;
  Job job = {.op = op, .sequences = malloc((size_t)op->slots * sizeof(Sequence))};
  if (!job.sequences) return -1;
  size_t totals = 2 * rows * (size_t)op->heads, partials = find_sequences(&job);
  job.totals = malloc((totals + partials) * sizeof(float));
  if (job.totals) run(&job, job.totals + totals, pool);
  int failed = job.totals ? 0 : -1;
  free(job.totals);
  free(job.sequences);
  return failed;
}
