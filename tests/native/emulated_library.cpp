// The kernels for AVX-512 in a library of their own, for a CPU that has it or not; see emulated_avx512.h.
#include "api.h"
#include <cstring>

extern "C" {
extern const baton_kernels baton_table_avx512bf16, baton_table_avx512;

__attribute__((visibility("default"))) const baton_kernels* baton_kernels_named(const char* name) {
  if (!strcmp(name, "avx512bf16")) return &baton_table_avx512bf16;
  return strcmp(name, "avx512") ? nullptr : &baton_table_avx512;
}
}
