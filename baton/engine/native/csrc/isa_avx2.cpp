// Standard headers come before the pragma: their inline functions, of which the linker keeps one copy for the whole
// library, must run on any CPU.
#include "api.h"
#include "team.h"
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx2,fma")
#define BATON_ISA avx2
#define BATON_AVX2
#include "kernels.h"
#endif
