// Standard headers come before the pragma: their inline functions, of which the linker keeps one copy for the whole
// library, must run on any CPU.
#include "api.h"
#include "team.h"
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>
#if defined(__x86_64__) || defined(BATON_EMULATED)
#ifndef BATON_EMULATED  // else the tests define these intrinsics in plain C++
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx2")
#endif
#define BATON_ISA avx512
#define BATON_AVX512
#include "kernels.h"
#endif
