/* Attention of a few (or many) new rows over the KV pool.
 *
 * The pool is cut into tiles of 128 rows at absolute positions.  A tile gives a row its maximum, the sum of its
 * exponentials and its weighted values; tiles are merged in order, as in Flash Attention (Dao et al., 2022), so the
 * result depends on the row's own position only.  A ring has whole tiles, so a tile's rows lie side by side in it too.
 * Rows of the pool that a row may not see are never read as values, so whatever a rollback left there is harmless.
 */
#include "dspark_attention.h"
#include "dspark_lanes.h"

#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TILE = POOL_TILE, LANES = 8, FEW_ROWS = 16 };

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
  AttendTile *attend;
  int64_t queries; /* most that it takes */
} Job;

/* The part of one tile that a new row sees. */
typedef struct {
  const Sequence *of;
  int64_t row;
  int64_t start, known, end; /* keys start .. known - 1 all, known .. end - 1 by the tree mask */
} Span;

AVX2_INLINE float exp_one(float x) { return _mm256_cvtss_f32(exp_lanes(_mm256_set1_ps(x))); }

static const uint8_t *tree_of(const VerifyAttention *op, Span s) {
  return op->tree + s.row * op->rows + s.of->first_row % op->rows + s.known - s.of->past;
}

/* Adds a tile's result to a row's running values, maximum and sum. */
AVX2_CODE static void merge(float *o, float *total, const float *part, int64_t dim) {
  float most = total[0] > part[dim] ? total[0] : part[dim];
  float old = exp_one(total[0] - most), new = exp_one(part[dim] - most);
  __m256 a = _mm256_set1_ps(old), b = _mm256_set1_ps(new);
  for (int64_t d = 0; d < dim; d += LANES) {
    __m256 kept = _mm256_mul_ps(get_eight(o + d, dim - d), a);
    put_eight(o + d, _mm256_fmadd_ps(get_eight(part + d, dim - d), b, kept), dim - d);
  }
  total[0] = most;
  total[1] = total[1] * old + part[dim + 1] * new;
}

/* The visible keys of a tile; false when there are none. */
static int span_of(const VerifyAttention *op, const Sequence *of, int64_t row, int64_t tile, Span *s) {
  int64_t position = of->past + row - of->first_row, end = position + 1;
  int64_t start = op->window >= 0 && position - op->window + 1 > 0 ? position - op->window + 1 : 0;
  if (start < tile * TILE) start = tile * TILE;
  if (end > (tile + 1) * TILE) end = (tile + 1) * TILE;
  if (start >= end) return 0;
  int64_t known = op->tree && of->past < end ? (of->past > start ? of->past : start) : end;
  *s = (Span){of, row, start, known, end};
  if (known > start) return 1;
  for (int64_t j = start; j < end; j++)
    if (tree_of(op, *s)[j - start]) return 1;
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

static Query query_of(const VerifyAttention *op, Span s, int64_t head, float *out) {
  int64_t base = s.start / TILE * TILE;
  const float *q = op->q + s.row / op->rows * op->q_batch + head * op->q_head + s.row % op->rows * op->q_row;
  const uint8_t *seen = s.known < s.end ? tree_of(op, s) : NULL;
  return (Query){q, s.start - base, s.known - base, s.end - base, seen, out};
}

/* One tile of a KV head for the rows first .. last - 1 of a sequence, at most FEW_ROWS. */
static void attend_rows(const Job *job, const Sequence *of, int64_t kv_head, int64_t tile, int64_t first, int64_t last) {
  const VerifyAttention *op = job->op;
  int64_t group = op->heads / op->kv_heads, step = op->dim + PARTIAL, most = job->queries, seen = 0, count;
  int64_t at = (of->slot * op->kv_heads + kv_head) * op->pool_rows + tile * TILE % op->pool_rows;
  KvTile rows = {op->k_pool + at * op->dim, op->v_pool + at * op->dim, 1};
  float local[WIDE_QUERIES * (MAX_HEAD + PARTIAL)];
  Query queries[WIDE_QUERIES];
  Span spans[FEW_ROWS];
  for (int64_t row = first; row < last; row++) seen += span_of(op, of, row, tile, spans + seen);
  for (int64_t done = 0; done < seen * group; done += count, rows.fetch = 0) {
    count = seen * group - done;
    count = count <= most ? count : count < 2 * most ? (count + 1) / 2 : most;
    for (int64_t i = 0; i < count; i++) {
      Span s = spans[(done + i) / group];
      int64_t head = kv_head * group + (done + i) % group;
      float *part = of->partials ? partial_of(job, of, head, s.row) + (tile - of->first_tile) * step : local + i * step;
      queries[i] = query_of(op, s, head, part);
    }
    job->attend(op, &rows, queries, (int)count);
    for (int64_t i = 0; !of->partials && i < count; i++) {
      int64_t row = spans[(done + i) / group].row, head = kv_head * group + (done + i) % group;
      merge(output_row(op, head, row), total_of(job, head, row), local + i * step, op->dim);
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
    put_eight(o + d, _mm256_div_ps(get_eight(o + d, op->dim - d), sum), op->dim - d);
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
    if (span_of(op, of, row, of->first_tile + tile, &s))
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
  int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
  Job job = {.op = op, .sequences = malloc((size_t)op->slots * sizeof(Sequence))};
  job.attend = wide ? dspark_attend_avx512 : dspark_attend_avx2;
  job.queries = wide ? WIDE_QUERIES : NARROW_QUERIES;
  if (!job.sequences) return -1;
  size_t totals = 2 * rows * (size_t)op->heads, partials = find_sequences(&job);
  job.totals = malloc((totals + partials) * sizeof(float));
  if (job.totals) run(&job, job.totals + totals, pool);
  int failed = job.totals ? 0 : -1;
  free(job.totals);
  free(job.sequences);
  return failed;
}
