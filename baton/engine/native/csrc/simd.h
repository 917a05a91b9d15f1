// Vectors of VL floats, for one instruction set per translation unit: define one of BATON_AVX512, BATON_AVX2 (else
// portable) and BATON_ISA, the namespace. All arithmetic on rows goes through these few functions, so that an element
// is computed by the same instructions in the same order wherever it stands in a batch.
#include "api.h"
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(BATON_AVX512) || defined(BATON_AVX2)
#ifndef BATON_EMULATED
#include <immintrin.h>
#endif
#endif

namespace baton {
namespace BATON_ISA {

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;

INLINE int imin(int a, int b) { return a < b ? a : b; }
INLINE int imax(int a, int b) { return a > b ? a : b; }
INLINE int ceil_div(int a, int b) { return (a + b - 1) / b; }

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
INLINE bf16 to_bf16(float x) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bf16)((bits >> 16) | 64);
  return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INLINE void from_float(float* y, float x) { *y = x; }
INLINE void from_float(bf16* y, float x) { *y = to_bf16(x); }

// vmax and vmin of two of which one is a NaN are the second.
#if defined(BATON_AVX512)
constexpr int VL = 16;
typedef __m512 V;
INLINE V zero() { return _mm512_setzero_ps(); }
INLINE V all(float x) { return _mm512_set1_ps(x); }
INLINE V load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, V x) { _mm512_storeu_ps(p, x); }
INLINE V add(V a, V b) { return _mm512_add_ps(a, b); }
INLINE V sub(V a, V b) { return _mm512_sub_ps(a, b); }
INLINE V mul(V a, V b) { return _mm512_mul_ps(a, b); }
INLINE V div(V a, V b) { return _mm512_div_ps(a, b); }
INLINE V vmax(V a, V b) { return _mm512_max_ps(a, b); }
INLINE V vmin(V a, V b) { return _mm512_min_ps(a, b); }
INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V round_to_int(V x) { return _mm512_roundscale_ps(x, 8); }  // to nearest, without exceptions
INLINE V power_of_two(V n) {  // n integral
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
INLINE V zero_below(V x, V limit, V y) {  // 0 where x < limit, else, and for a NaN, y
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, 21), y);
}
INLINE V load(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
INLINE __m512i rounded_bits(V x) {  // bfloat16 in the upper half of each lane
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, 3),  // NaN
                               _mm512_or_si512(bits, _mm512_set1_epi32(0x400000)));
}
INLINE void store(bf16* p, V x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bits(x), 16)));
}
// Of 2 * VL bfloat16 in memory: those at even and those at odd places.
INLINE V evens(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512((const void*)p), 16));
}
INLINE V odds(const bf16* p) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_loadu_si512((const void*)p), _mm512_set1_epi32((int)0xffff0000)));
}
INLINE float sum(V x) { return _mm512_reduce_add_ps(x); }
INLINE float largest(V x) { return _mm512_reduce_max_ps(x); }
INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

#elif defined(BATON_AVX2)
constexpr int VL = 8;
typedef __m256 V;
INLINE V zero() { return _mm256_setzero_ps(); }
INLINE V all(float x) { return _mm256_set1_ps(x); }
INLINE V load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, V x) { _mm256_storeu_ps(p, x); }
INLINE V add(V a, V b) { return _mm256_add_ps(a, b); }
INLINE V sub(V a, V b) { return _mm256_sub_ps(a, b); }
INLINE V mul(V a, V b) { return _mm256_mul_ps(a, b); }
INLINE V div(V a, V b) { return _mm256_div_ps(a, b); }
INLINE V vmax(V a, V b) { return _mm256_max_ps(a, b); }
INLINE V vmin(V a, V b) { return _mm256_min_ps(a, b); }
INLINE V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
INLINE V round_to_int(V x) { return _mm256_round_ps(x, 8); }
INLINE V power_of_two(V n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE V zero_below(V x, V limit, V y) { return _mm256_and_ps(_mm256_cmp_ps(x, limit, 21), y); }
INLINE V load(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
INLINE void store(bf16* p, V x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  __m256 kept = _mm256_blendv_ps(_mm256_castsi256_ps(rounded),
                                 _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(0x400000))),
                                 _mm256_cmp_ps(x, x, 3));
  __m256i upper = _mm256_srli_epi32(_mm256_castps_si256(kept), 16);
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0x08);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
INLINE V evens(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16));
}
INLINE V odds(const bf16* p) {
  return _mm256_and_ps(_mm256_loadu_ps((const float*)p),
                       _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000)));
}
INLINE float sum(V x) {
  __m128 a = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps(a, a, 1)));
}
INLINE float largest(V x) {
  __m128 a = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps(a, a, 1)));
}
INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

#else
// The compiler's own vectors: right everywhere, fast where it knows the machine.
constexpr int VL = 4;
typedef float V __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
INLINE V zero() { return V{0, 0, 0, 0}; }
INLINE V all(float x) { return V{x, x, x, x}; }
INLINE V load(const float* p) {
  V x;
  memcpy(&x, p, sizeof x);
  return x;
}
INLINE void store(float* p, V x) { memcpy(p, &x, sizeof x); }
INLINE V add(V a, V b) { return a + b; }
INLINE V sub(V a, V b) { return a - b; }
INLINE V mul(V a, V b) { return a * b; }
INLINE V div(V a, V b) { return a / b; }
INLINE V choose(I mask, V a, V b) { return (V)((mask & (I)a) | (~mask & (I)b)); }
INLINE V vmax(V a, V b) { return choose(a > b, a, b); }
INLINE V vmin(V a, V b) { return choose(a < b, a, b); }
INLINE V fma(V a, V b, V c) { return a * b + c; }
INLINE V round_to_int(V x) {  // |x| < 2^22
  V magic = all(12582912.0f);
  return (x + magic) - magic;
}
INLINE V power_of_two(V n) { return (V)((__builtin_convertvector(n, I) + 127) << 23); }
INLINE V zero_below(V x, V limit, V y) { return choose(x < limit, zero(), y); }
INLINE V load(const bf16* p) { return V{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}; }
INLINE void store(bf16* p, V x) {
  for (int i = 0; i < VL; i++) p[i] = to_bf16(x[i]);
}
INLINE V evens(const bf16* p) { return V{to_float(p[0]), to_float(p[2]), to_float(p[4]), to_float(p[6])}; }
INLINE V odds(const bf16* p) { return V{to_float(p[1]), to_float(p[3]), to_float(p[5]), to_float(p[7])}; }
INLINE float sum(V x) { return (x[0] + x[2]) + (x[1] + x[3]); }
INLINE float larger(float a, float b) { return a > b ? a : b; }
INLINE float largest(V x) { return larger(larger(x[0], x[2]), larger(x[1], x[3])); }
INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
#endif

// exp by range reduction and a polynomial (the coefficients are Cephes's expf); 0 below -87.3, so of -inf too.
// A NaN stays one, here and in tanh: what is broken must not look like a number.
INLINE V exp(V x) {
  V low = all(-87.3f);
  V y = vmax(low, vmin(all(88.0f), x));
  V n = round_to_int(mul(y, all(1.44269504f)));
  V r = fma(n, all(-0.693359375f), y);
  r = fma(n, all(2.12194440e-4f), r);
  V p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), all(1.0f));
  return zero_below(x, low, mul(p, power_of_two(n)));
}

INLINE V tanh(V x) {
  V y = vmax(all(-15.0f), vmin(all(15.0f), x));
  V e = exp(add(y, y));
  return div(sub(e, all(1.0f)), add(e, all(1.0f)));
}

// The tail of an array in a whole vector: the same arithmetic as for the rest of it.
INLINE V load_part(const float* p, int n) {
  float part[VL] = {0};
  for (int i = 0; i < n; i++) part[i] = p[i];
  return load(part);
}
INLINE V load_part(const bf16* p, int n) {
  float part[VL] = {0};
  for (int i = 0; i < n; i++) part[i] = to_float(p[i]);
  return load(part);
}
template <class T>
INLINE void store_part(T* p, V x, int n) {
  float part[VL];
  store(part, x);
  for (int i = 0; i < n; i++) from_float(p + i, part[i]);
}
template <class T>
INLINE V load_upto(const T* p, int n) {
  return n >= VL ? load(p) : load_part(p, n);
}
template <class T>
INLINE void store_upto(T* p, V x, int n) {
  if (n >= VL)
    store(p, x);
  else
    store_part(p, x, n);
}

}  // namespace BATON_ISA
}  // namespace baton
