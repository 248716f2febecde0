/* What tests of the kernels alone need: a pool of one thread, and random numbers in buffers of exactly their size. */
#include "dspark_cpu.h"

#include <stdlib.h>

static void serial(const Pool *pool, void (*body)(void *, size_t), size_t count, void *argument) {
  (void)pool;
  for (size_t i = 0; i < count; i++) body(argument, i);
}

static const Pool here = {serial, NULL, NULL};

static float *floats(int64_t count) {
  float *values = malloc((size_t)count * sizeof(float));
  for (int64_t i = 0; i < count; i++) values[i] = (float)rand() / (float)RAND_MAX - 0.5f;
  return values;
}
