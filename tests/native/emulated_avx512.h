// The AVX-512 intrinsics that baton/engine/native/csrc uses, in plain C++ after the operation sections of Intel's
// Intrinsics Guide: so kernels that this CPU cannot run can be tested. Compile with -DBATON_EMULATED and this included
// first. An intrinsic that is missing here, or used in another way, fails the build or traps.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

struct __m256i { uint16_t u16[16]; };
struct __m512 { float f32[16]; };
struct __m512i { uint32_t u32[16]; };
struct __m512bh {
  uint16_t bf16[32];
  __m512bh() = default;
  explicit __m512bh(const __m512i& bits) { memcpy(bf16, &bits, 64); }
};
typedef uint16_t __mmask16;

#define EMULATED static inline
#define LANES for (int i = 0; i < 16; i++)

// --- moves ---------------------------------------------------------------------------------------

EMULATED __m512 _mm512_set1_ps(float x) {
  __m512 r;
  LANES r.f32[i] = x;
  return r;
}
EMULATED __m512 _mm512_setzero_ps() { return _mm512_set1_ps(0); }
EMULATED __m512i _mm512_set1_epi32(int x) {
  __m512i r;
  LANES r.u32[i] = (uint32_t)x;
  return r;
}
EMULATED __m512 _mm512_loadu_ps(const void* p) {
  __m512 r;
  memcpy(&r, p, 64);
  return r;
}
EMULATED __m512i _mm512_loadu_si512(const void* p) {
  __m512i r;
  memcpy(&r, p, 64);
  return r;
}
EMULATED __m256i _mm256_loadu_si256(const __m256i* p) {
  __m256i r;
  memcpy(&r, (const void*)p, 32);
  return r;
}
EMULATED void _mm512_storeu_ps(void* p, __m512 x) { memcpy(p, &x, 64); }
EMULATED void _mm512_storeu_si512(void* p, __m512i x) { memcpy(p, &x, 64); }
EMULATED void _mm256_storeu_si256(__m256i* p, __m256i x) { memcpy((void*)p, &x, 32); }
EMULATED __m512 _mm512_castsi512_ps(__m512i x) { return _mm512_loadu_ps(&x); }
EMULATED __m512i _mm512_castps_si512(__m512 x) { return _mm512_loadu_si512(&x); }
EMULATED __m512 _mm512_maskz_mov_ps(__mmask16 k, __m512 a) {
  LANES if (!(k >> i & 1)) a.f32[i] = 0;
  return a;
}
EMULATED __m512i _mm512_mask_mov_epi32(__m512i source, __mmask16 k, __m512i a) {
  LANES if (!(k >> i & 1)) a.u32[i] = source.u32[i];
  return a;
}
enum { _MM_HINT_T0 = 3 };
EMULATED void _mm_prefetch(const char*, int) {}

// --- float32 -------------------------------------------------------------------------------------

EMULATED __m512 _mm512_add_ps(__m512 a, __m512 b) {
  LANES a.f32[i] += b.f32[i];
  return a;
}
EMULATED __m512 _mm512_sub_ps(__m512 a, __m512 b) {
  LANES a.f32[i] -= b.f32[i];
  return a;
}
EMULATED __m512 _mm512_mul_ps(__m512 a, __m512 b) {
  LANES a.f32[i] *= b.f32[i];
  return a;
}
EMULATED __m512 _mm512_div_ps(__m512 a, __m512 b) {
  LANES a.f32[i] /= b.f32[i];
  return a;
}
EMULATED __m512 _mm512_max_ps(__m512 a, __m512 b) {  // the second where one is a NaN, or both are zeros
  LANES a.f32[i] = a.f32[i] > b.f32[i] ? a.f32[i] : b.f32[i];
  return a;
}
EMULATED __m512 _mm512_min_ps(__m512 a, __m512 b) {
  LANES a.f32[i] = a.f32[i] < b.f32[i] ? a.f32[i] : b.f32[i];
  return a;
}
EMULATED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {  // rounded once
  LANES a.f32[i] = fmaf(a.f32[i], b.f32[i], c.f32[i]);
  return a;
}
EMULATED __m512 _mm512_roundscale_ps(__m512 a, int how) {
  if (how != 8) __builtin_trap();  // to nearest, ties to even, no exceptions; no fraction bits
  LANES a.f32[i] = nearbyintf(a.f32[i]);
  return a;
}
EMULATED __m512i _mm512_cvtps_epi32(__m512 a) {
  __m512i r;
  LANES {
    const float x = nearbyintf(a.f32[i]);
    r.u32[i] = x >= -2147483648.0f && x < 2147483648.0f ? (uint32_t)(int32_t)x : 0x80000000u;
  }
  return r;
}
EMULATED __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
  __mmask16 k = 0;
  LANES {
    const float x = a.f32[i], y = b.f32[i];
    bool is = false;
    if (how == 3)  // UNORD_Q
      is = std::isnan(x) || std::isnan(y);
    else if (how == 21)  // NLT_UQ
      is = !(x < y);
    else
      __builtin_trap();
    k |= (__mmask16)(is << i);
  }
  return k;
}
EMULATED float _mm512_reduce_add_ps(__m512 a) {  // halves are added until one is left
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) a.f32[i] += a.f32[half + i];
  return a.f32[0];
}
EMULATED float _mm512_reduce_max_ps(__m512 a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) a.f32[i] = a.f32[i] > a.f32[half + i] ? a.f32[i] : a.f32[half + i];
  return a.f32[0];
}

// Each product is exact in float32 where it is neither huge nor tiny; the odd one is added first. To nearest, ties to
// even; denormals count as zero and come out as zero.
EMULATED float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }
EMULATED float widened(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return flushed(y);
}
EMULATED __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  LANES for (int odd = 1; odd >= 0; odd--) {
    const float product = flushed(widened(a.bf16[2 * i + odd]) * widened(b.bf16[2 * i + odd]));
    sum.f32[i] = flushed(flushed(sum.f32[i]) + product);
  }
  return sum;
}

// --- integers ------------------------------------------------------------------------------------

EMULATED __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  LANES a.u32[i] += b.u32[i];
  return a;
}
EMULATED __m512i _mm512_and_si512(__m512i a, __m512i b) {
  LANES a.u32[i] &= b.u32[i];
  return a;
}
EMULATED __m512i _mm512_or_si512(__m512i a, __m512i b) {
  LANES a.u32[i] |= b.u32[i];
  return a;
}
EMULATED __m512i _mm512_slli_epi32(__m512i a, unsigned n) {
  LANES a.u32[i] = n > 31 ? 0 : a.u32[i] << n;
  return a;
}
EMULATED __m512i _mm512_srli_epi32(__m512i a, unsigned n) {
  LANES a.u32[i] = n > 31 ? 0 : a.u32[i] >> n;
  return a;
}
EMULATED __m512i _mm512_cvtepu16_epi32(__m256i a) {
  __m512i r;
  LANES r.u32[i] = a.u16[i];
  return r;
}
EMULATED __m256i _mm512_cvtepi32_epi16(__m512i a) {  // truncates
  __m256i r;
  LANES r.u16[i] = (uint16_t)a.u32[i];
  return r;
}

// --- across lanes of 128 bits --------------------------------------------------------------------

EMULATED __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) {
  __m512i r;
  for (int lane = 0; lane < 16; lane += 4)
    for (int i = 0; i < 2; i++) r.u32[lane + 2 * i] = a.u32[lane + i], r.u32[lane + 2 * i + 1] = b.u32[lane + i];
  return r;
}
EMULATED __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) {
  __m512i r;
  for (int lane = 0; lane < 16; lane += 4)
    for (int i = 0; i < 2; i++)
      r.u32[lane + 2 * i] = a.u32[lane + 2 + i], r.u32[lane + 2 * i + 1] = b.u32[lane + 2 + i];
  return r;
}
EMULATED __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) {
  __m512i r;
  for (int lane = 0; lane < 16; lane += 4)
    for (int i = 0; i < 2; i++) r.u32[lane + i] = a.u32[lane + i], r.u32[lane + 2 + i] = b.u32[lane + i];
  return r;
}
EMULATED __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) {
  __m512i r;
  for (int lane = 0; lane < 16; lane += 4)
    for (int i = 0; i < 2; i++) r.u32[lane + i] = a.u32[lane + 2 + i], r.u32[lane + 2 + i] = b.u32[lane + 2 + i];
  return r;
}
EMULATED __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int control) {
  __m512i r;
  for (int lane = 0; lane < 4; lane++) {
    const __m512i& from = lane < 2 ? a : b;
    memcpy(r.u32 + 4 * lane, from.u32 + 4 * (control >> 2 * lane & 3), 16);
  }
  return r;
}
