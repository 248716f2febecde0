/* Registers the CPU kernels of the `ai.dspark` domain with ONNX Runtime (see kernels/native.py for the build). */
#include "dspark_node.h"

static OrtStatus *add_all(const OrtApi *api, OrtOpDomain *domain, OperatorList list) {
  for (size_t i = 0; i < list.count; i++) TRY(ort_domain_add(api)(domain, &list.first[i]));
  return NULL;
}

/* Rises whenever an operator is added or its results change: see REVISION in native.py. */
EXPORT int dspark_cpu_revision(void) { return 7; }

/* Whether the library can serve this processor; asked before it is registered. */
EXPORT int dspark_cpu_supported(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

EXPORT OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
  OrtStatus *error;
  const OrtApi *api = ort_table(base, &error);
  if (!api) return error;
  OrtOpDomain *domain = NULL;
  REQUIRE(api, dspark_cpu_supported(), "ai.dspark: this processor lacks AVX2 or FMA");
  TRY(ort_create_domain(api)("ai.dspark", &domain)); /* never released: sessions refer to it */
  TRY(add_all(api, domain, dspark_dense_operators()));
  TRY(add_all(api, domain, dspark_product_operators()));
  TRY(add_all(api, domain, dspark_attention_operators()));
  return ort_add_domain(api)(options, domain);
}
