// Copies a block and computes its checksum on the way, so that its bytes pass through the core once.
//
// The checksum is XXH3, 64 bits, seed 0 and the default secret, as the specification of xxHash defines it (doc/xxhash_spec.md
// of its project) for inputs of more than 240 bytes; shorter ones are the caller's. Memory is what takes the time: the
// arithmetic fits in between.
#include "api.h"
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

const uint64_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
const uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F, PRIME64_3 = 0x165667B19E3779F9,
               PRIME64_4 = 0x85EBCA77C2B2AE63, PRIME64_5 = 0x27D4EB2F165667C5;

const int LANES = 8;                                 // 64-bit accumulators
const int64_t STRIPE = 64;                           // bytes
const int64_t STRIPES = (sizeof(SECRET) - STRIPE) / 8;  // before each scrambling

uint64_t read64(const uint8_t* p) {
  uint64_t x;
  memcpy(&x, p, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  x = __builtin_bswap64(x);
#endif
  return x;
}

// One stripe with the secret from `key` on; `target`, unless null, gets a copy of it.
struct Portable {
  uint64_t acc[LANES];

  explicit Portable(const uint64_t* start) { memcpy(acc, start, sizeof(acc)); }

  void take(const uint8_t* source, const uint8_t* key, uint8_t* target) {
    for (int i = 0; i < LANES; i++) {
      const uint64_t value = read64(source + 8 * i), mixed = value ^ read64(key + 8 * i);
      acc[i ^ 1] += value;
      acc[i] += (mixed & 0xffffffff) * (mixed >> 32);
    }
    if (target) memcpy(target, source, STRIPE);
  }

  void scramble(const uint8_t* key) {
    for (int i = 0; i < LANES; i++) acc[i] = (acc[i] ^ (acc[i] >> 47) ^ read64(key + 8 * i)) * PRIME32_1;
  }

  void put(uint64_t* out) const { memcpy(out, acc, sizeof(acc)); }
};

template <class Lanes>
inline __attribute__((always_inline)) void run(const uint8_t* source, uint8_t* target, int64_t size, uint64_t* acc) {
  Lanes lanes(acc);
  const int64_t round = STRIPE * STRIPES;
  const uint8_t* const last = source + size - STRIPE;
  int64_t left = size - 1;  // the last stripe is always read from the end
  for (; left >= round; left -= round) {
    for (int64_t i = 0; i < STRIPES; i++, source += STRIPE) {
      lanes.take(source, SECRET + 8 * i, target);
      if (target) target += STRIPE;
    }
    lanes.scramble(SECRET + sizeof(SECRET) - STRIPE);
  }
  for (int64_t i = 0; i < left / STRIPE; i++, source += STRIPE) {
    lanes.take(source, SECRET + 8 * i, target);
    if (target) target += STRIPE;
  }
  if (target) memcpy(target, source, last + STRIPE - source);
  lanes.take(last, SECRET + sizeof(SECRET) - STRIPE - 7, nullptr);
  lanes.put(acc);
}

void run_portable(const uint8_t* source, uint8_t* target, int64_t size, uint64_t* acc) {
  run<Portable>(source, target, size, acc);
}

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
// Streaming stores go around the caches and need a target on a multiple of 32 bytes: whoever reads a block next does so
// much later, and lines that are only to be overwritten are not read first.
template <bool streaming>
void store(uint8_t* target, __m256i a, __m256i b) {
  if (streaming) {
    _mm256_stream_si256((__m256i*)target, a);
    _mm256_stream_si256((__m256i*)target + 1, b);
  } else {
    _mm256_storeu_si256((__m256i*)target, a);
    _mm256_storeu_si256((__m256i*)target + 1, b);
  }
}

template <bool streaming>
struct Avx2 {
  __m256i low, high;

  explicit Avx2(const uint64_t* start)
      : low(_mm256_loadu_si256((const __m256i*)start)), high(_mm256_loadu_si256((const __m256i*)start + 1)) {}

  static __m256i mix(__m256i acc, __m256i value, const uint8_t* key) {
    const __m256i mixed = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i*)key));
    const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    const __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(acc, _mm256_add_epi64(product, swapped));
  }

  void take(const uint8_t* source, const uint8_t* key, uint8_t* target) {
    _mm_prefetch((const char*)source + 1024, _MM_HINT_T0);  // reaches behind the block at its end, which is no matter
    const __m256i a = _mm256_loadu_si256((const __m256i*)source), b = _mm256_loadu_si256((const __m256i*)source + 1);
    low = mix(low, a, key);
    high = mix(high, b, key + 32);
    if (target) store<streaming>(target, a, b);
  }

  static __m256i scrambled(__m256i acc, const uint8_t* key) {
    const __m256i x = _mm256_xor_si256(_mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47)),
                                       _mm256_loadu_si256((const __m256i*)key));
    const __m256i prime = _mm256_set1_epi64x((int64_t)PRIME32_1);
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(x, prime), _mm256_slli_epi64(high, 32));
  }

  void scramble(const uint8_t* key) {
    low = scrambled(low, key);
    high = scrambled(high, key + 32);
  }

  void put(uint64_t* out) const {
    _mm256_storeu_si256((__m256i*)out, low);
    _mm256_storeu_si256((__m256i*)out + 1, high);
  }
};

void run_avx2(const uint8_t* source, uint8_t* target, int64_t size, uint64_t* acc) {
  if ((uintptr_t)target % 32 == 0)
    run<Avx2<true>>(source, target, size, acc);
  else
    run<Avx2<false>>(source, target, size, acc);
  _mm_sfence();  // what was streamed is seen before whatever tells of it
}

void copy_avx2(const uint8_t* source, uint8_t* target, int64_t size) {
  int64_t head = -(intptr_t)target & 31;
  if (head > size) head = size;
  memcpy(target, source, head);
  source += head, target += head, size -= head;
  for (; size >= STRIPE; source += STRIPE, target += STRIPE, size -= STRIPE) {
    _mm_prefetch((const char*)source + 256, _MM_HINT_T0);
    store<true>(target, _mm256_loadu_si256((const __m256i*)source), _mm256_loadu_si256((const __m256i*)source + 1));
  }
  memcpy(target, source, size);
  _mm_sfence();
}
#pragma GCC pop_options
#endif

uint64_t folded(uint64_t a, uint64_t b) {
  const unsigned __int128 product = (unsigned __int128)a * b;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

}  // namespace


extern "C" __attribute__((visibility("default"))) void baton_copy(const void* source, void* target, int64_t size) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) return copy_avx2((const uint8_t*)source, (uint8_t*)target, size);
#endif
  memcpy(target, source, size);
}

extern "C" __attribute__((visibility("default"))) uint64_t baton_copy_hash(const void* source, void* target,
                                                                          int64_t size) {
  uint64_t acc[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2"))
    run_avx2((const uint8_t*)source, (uint8_t*)target, size, acc);
  else
#endif
    run_portable((const uint8_t*)source, (uint8_t*)target, size, acc);
  uint64_t hash = (uint64_t)size * PRIME64_1;
  for (int i = 0; i < 4; i++)
    hash += folded(acc[2 * i] ^ read64(SECRET + 11 + 16 * i), acc[2 * i + 1] ^ read64(SECRET + 11 + 16 * i + 8));
  hash ^= hash >> 37;
  hash *= 0x165667919E3779F9;
  return hash ^ (hash >> 32);
}
