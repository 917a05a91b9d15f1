// Which kernels this CPU can run.
#include "api.h"
#include <cstring>

extern "C" {
extern const baton_kernels baton_table_portable;
#if defined(__x86_64__)
extern const baton_kernels baton_table_avx512bf16, baton_table_avx512, baton_table_avx2;
#endif

__attribute__((visibility("default"))) const baton_kernels* baton_kernels_named(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!strcmp(name, "avx512bf16"))
    return avx512 && __builtin_cpu_supports("avx512bf16") ? &baton_table_avx512bf16 : nullptr;
  if (!strcmp(name, "avx512")) return avx512 ? &baton_table_avx512 : nullptr;
  if (!strcmp(name, "avx2")) return avx2 ? &baton_table_avx2 : nullptr;
#endif
  return strcmp(name, "portable") ? nullptr : &baton_table_portable;
}
}
