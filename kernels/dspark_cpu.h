/* The kernels behind the `ai.dspark` operators on a CPU, free of any runtime's types.
 *
 * Every kernel computes a row by an order of operations that depends on that row's own values and absolute position
 * only: never on how many rows share the call, on the tiling or on the number of threads.  A token's logits are
 * therefore the same bits whether it is decoded alone or verified among others.
 */
#ifndef DSPARK_CPU_H
#define DSPARK_CPU_H

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define DSPARK_AVX2 1
#define AVX2_CODE __attribute__((target("avx2,fma")))
#define AVX2_INLINE static inline __attribute__((always_inline, target("avx2,fma")))
#endif

enum { LEVEL_SCALAR = 0, LEVEL_AVX2 = 2 };
enum { BLOCK = 32 };

/* Runs `body(argument, i)` for every i < count, in any order, perhaps at once. */
typedef struct Pool {
  void (*run)(const struct Pool *pool, void (*body)(void *, size_t), size_t count, void *argument);
  const void *api;
  const void *context;
} Pool;

/* y [rows, n] = x [rows, k] times the transposed block-quantised weight [n, k] (+ block minima). */
typedef struct {
  int64_t rows, k, n;
  int bits; /* 4 or 8 */
  const float *x;
  const uint8_t *weight; /* [n, k / 32, 4 * bits] */
  const float *scales;   /* [n, k / 32] */
  const float *mins;     /* [n, k / 32] or NULL */
  float *y;
} BlockMatMul;

/* The best level that this processor runs. */
int dspark_cpu_level(void);

/* Returns 0, or -1 when memory is short. */
int dspark_block_matmul(const BlockMatMul *op, int level, const Pool *pool);

#endif
