/* One tile of attention, as its parts see it. */
#ifndef DSPARK_ATTENTION_H
#define DSPARK_ATTENTION_H

#include "dspark_cpu.h"

enum { PARTIAL = 8, NARROW_QUERIES = 3, WIDE_QUERIES = 6 };

/* The rows of the pool that a tile of one KV head has: [POOL_TILE, dim]. */
typedef struct {
  const float *keys, *values;
  int fetch; /* whether to ask memory for them ahead of their use */
} KvTile;

/* One query head of one new row.  Keys are counted from the tile's first. */
typedef struct {
  const float *q;             /* [dim] */
  int64_t start, known, end;  /* sees keys start .. known - 1 all, known .. end - 1 as `seen` says; at least one */
  const uint8_t *seen;        /* [end - known] */
  float *out;                 /* [dim + PARTIAL]: weighted values, maximum of the scores, sum of the exponentials */
} Query;

/* A tile for up to NARROW_QUERIES or WIDE_QUERIES queries of its KV head.  Processors differ in speed, never in a bit. */
typedef void AttendTile(const VerifyAttention *op, const KvTile *tile, const Query *queries, int count);

AttendTile dspark_attend_avx2;
AttendTile dspark_attend_avx512;

#endif
