// Causal attention over the paged pool, with grouped query heads, one pass over the keys (online softmax: Milakov and
// Gimelshein 2018; FlashAttention, Dao et al. 2022). Keys are taken in tiles of TOKENS positions that begin at
// multiples of TOKENS in their sequence: what a row computes, and in which order, depends on its position alone, not on
// the block size, the block table, the chunk, or the rows beside it.
#include "gemm.h"

namespace baton {
namespace BATON_ISA {

constexpr int TOKENS = 64;
constexpr int VECTORS = 48;  // query vectors that share one reading of the keys

struct AttentionScratch {  // sizes in elements; `vectors` query vectors
  static int64_t bytes(int vectors, int head_dim) {
    int64_t d = head_dim + VL;
    return 4 * ((int64_t)vectors * (d + d + TOKENS + 4) + (int64_t)NR * d + d) + 256;
  }
};

INLINE int vectors_per_unit(int group) { return imax(1, VECTORS / group) * group; }

// NR rows of n 32-bit words -> [n][NR].
#if defined(BATON_AVX512)
INLINE void transpose16(const uint32_t* const* rows, int at, uint32_t* out, int ldo) {
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512((const void*)(rows[i] + at));
#pragma GCC unroll 16
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  // r[4g + c]: rows 4g..4g+3 of columns c, c+4, c+8, c+12, one per 128-bit lane.
#pragma GCC unroll 16
  for (int c = 0; c < 4; c++) {
    __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    __m512i d = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd), e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    _mm512_storeu_si512((void*)(out + (c + 0) * ldo), _mm512_shuffle_i32x4(a, b, 0x88));
    _mm512_storeu_si512((void*)(out + (c + 8) * ldo), _mm512_shuffle_i32x4(a, b, 0xdd));
    _mm512_storeu_si512((void*)(out + (c + 4) * ldo), _mm512_shuffle_i32x4(d, e, 0x88));
    _mm512_storeu_si512((void*)(out + (c + 12) * ldo), _mm512_shuffle_i32x4(d, e, 0xdd));
  }
}
#elif defined(BATON_AVX2)
// Halves of rows i and i + 4 are joined as they are loaded: crossing lanes later costs more.
INLINE __m256 two_halves(const uint32_t* low, const uint32_t* high) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps((const float*)low)),
                              _mm_loadu_ps((const float*)high), 1);
}
INLINE void transpose8(const uint32_t* const* rows, int at, uint32_t* out, int ldo) {
#pragma GCC unroll 2
  for (int c = 0; c < 8; c += 4) {
    __m256 r0 = two_halves(rows[0] + at + c, rows[4] + at + c), r1 = two_halves(rows[1] + at + c, rows[5] + at + c);
    __m256 r2 = two_halves(rows[2] + at + c, rows[6] + at + c), r3 = two_halves(rows[3] + at + c, rows[7] + at + c);
    __m256 a = _mm256_unpacklo_ps(r0, r1), b = _mm256_unpackhi_ps(r0, r1);
    __m256 d = _mm256_unpacklo_ps(r2, r3), e = _mm256_unpackhi_ps(r2, r3);
    float* to = (float*)(out + c * ldo);
    _mm256_storeu_ps(to, _mm256_shuffle_ps(a, d, 0x44));
    _mm256_storeu_ps(to + ldo, _mm256_shuffle_ps(a, d, 0xee));
    _mm256_storeu_ps(to + 2 * ldo, _mm256_shuffle_ps(b, e, 0x44));
    _mm256_storeu_ps(to + 3 * ldo, _mm256_shuffle_ps(b, e, 0xee));
  }
}
#endif

INLINE void transpose(const uint32_t* const* rows, int n, uint32_t* out) {
  int at = 0;
#if defined(BATON_AVX512)
  for (; at + 16 <= n; at += 16)
    for (int i = 0; i < NR; i += 16) transpose16(rows + i, at, out + at * NR + i, NR);
#elif defined(BATON_AVX2)
  for (; at + 8 <= n; at += 8)
    for (int i = 0; i < NR; i += 8) transpose8(rows + i, at, out + at * NR + i, NR);
#endif
  for (; at < n; at++)
    for (int i = 0; i < NR; i++) out[at * NR + i] = rows[i][at];
}

// o[M][size] += p[M][first, last) times the rows v[first, last).
template <class T, int M>
static void weigh(const float* p, const T* const* v, int first, int last, float* o, int64_t ldo, int size) {
  int d = 0;
  for (; d + 2 * VL <= size; d += 2 * VL) {
    V acc[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) acc[m][0] = load(o + m * ldo + d), acc[m][1] = load(o + m * ldo + d + VL);
    for (int j = first; j < last; j++) {
      V v0 = load(v[j] + d), v1 = load(v[j] + d + VL);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        V pm = all(p[m * TOKENS + j]);
        acc[m][0] = fma(v0, pm, acc[m][0]);
        acc[m][1] = fma(v1, pm, acc[m][1]);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) store(o + m * ldo + d, acc[m][0]), store(o + m * ldo + d + VL, acc[m][1]);
  }
  for (; d < size; d += VL)
    for (int m = 0; m < M; m++) {
      V acc = load_upto(o + m * ldo + d, size - d);
      for (int j = first; j < last; j++) acc = fma(load_upto(v[j] + d, size - d), all(p[m * TOKENS + j]), acc);
      store_upto(o + m * ldo + d, acc, size - d);
    }
}

constexpr int WEIGH_ROWS = VL == 16 ? 12 : 6;
template <class T>
using Weigh = void (*)(const float*, const T* const*, int, int, float*, int64_t, int);
template <class T, int... M>
INLINE Weigh<T> weigh_in(int rows, std::integer_sequence<int, M...>) {
  static constexpr Weigh<T> all_rows[] = {weigh<T, M + 1>...};
  return all_rows[rows - 1];
}

// Where a position's key, or value, of one head is.
INLINE int64_t pool_offset(const baton_attention& a, const int32_t* table, int position, int head) {
  return table[position / a.block_size] * a.block_stride +
         ((int64_t)head * a.block_size + position % a.block_size) * a.head_dim;
}

// Keys and values of one tile; `count` of them, the other keys are zeros.
template <class T>
struct TokenTile {
  const T *keys[TOKENS], *values[TOKENS];
  int count;

  void find(const baton_attention& a, const int32_t* table, int base, int end, int head, const T* zeros) {
    count = imin(TOKENS, end - base);
    int block = base / a.block_size, offset = base % a.block_size;
    int64_t at = count > 0 ? pool_offset(a, table, base, head) : 0;
    for (int j = 0; j < TOKENS; j++) {
      keys[j] = j < count ? (const T*)a.keys + at : zeros;
      values[j] = (const T*)a.values + at;
      at += a.head_dim;
      if (++offset == a.block_size && j + 1 < count) {
        offset = 0;
        at = table[++block] * a.block_stride + (int64_t)head * a.block_size * a.head_dim;
      }
    }
  }
};

template <class T>
INLINE void prefetch_row(const T* row, int size) {
  for (int i = 0; i < size * (int)sizeof(T); i += 64) prefetch((const char*)row + i);
}

// One unit: rows [first, last) of a sequence and the query heads that share key head `head`.
// query and out: [rows, heads, head_dim], at the sequence's first row.
template <class W>
static void attend_unit(const baton_attention& a, const int32_t* table, int start, int first, int last, int head,
                        const typename W::Input* query, typename W::Input* out, void* scratch) {
  typedef typename W::Stored T;
  typedef typename W::Input Input;
  const int size = a.head_dim, group = a.heads / a.kv_heads, n = (last - first) * group;
  const int64_t ld = size + VL;  // of the scratch rows
  float* o = (float*)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);
  float* scores = o + n * ld;
  float* top = scores + (int64_t)n * TOKENS;
  float* total = top + n;
  int* from = (int*)(total + n);  // of each vector, within the tile: the tokens it attends to
  int* to = from + n;
  Input* q = (Input*)(to + n);
  uint32_t* keys = (uint32_t*)((float*)(to + n) + n * ld);
  float* zeros = (float*)(keys + (int64_t)NR * ld);
  for (int i = 0; i < size; i++) zeros[i] = 0;
  for (int i = 0; i < n; i++) {
    const Input* source = query + ((int64_t)(first + i / group) * a.heads + head * group + i % group) * size;
    memcpy(q + i * ld, source, size * sizeof(Input));
    for (int d = 0; d < size; d++) o[i * ld + d] = 0;
    top[i] = -1e30f;
    total[i] = 0;
  }
  const int end = start + last;  // positions [.., end)
  const int oldest = a.window ? imax(0, start + first - a.window + 1) : 0;
  const bool scattered = n <= 2 * WEIGH_ROWS;  // few rows: memory decides, and blocks lie anywhere
  TokenTile<T> tiles[2];
  int base = oldest / TOKENS * TOKENS;
  tiles[0].find(a, table, base, end, head, (const T*)zeros);
  for (int now = 0; base < end; base += TOKENS, now ^= 1) {
    const TokenTile<T>& tile = tiles[now];
    TokenTile<T>& next = tiles[now ^ 1];
    next.find(a, table, base + TOKENS, end, head, (const T*)zeros);
    const int count = tile.count;
    for (int i = 0; i < n; i++) {
      int position = start + first + i / group;
      from[i] = a.window ? imax(0, position - a.window + 1 - base) : 0;
      to[i] = imin(TOKENS, position + 1 - base);
      if (from[i] >= to[i]) from[i] = to[i] = 0;
    }
    for (int sub = 0; sub < count; sub += NR) {
      if (scattered)
        for (int j = sub; j < sub + NR; j++) {
          if (j < count) prefetch_row(tile.values[j], size);
          if (j < next.count) prefetch_row(next.keys[j], size);
        }
      transpose((const uint32_t* const*)(tile.keys + sub), size * (int)sizeof(T) / 4, keys);
      for (int i = 0, m; i < n; i += m) {
        m = next_rows<W>(n - i);
        int furthest = 0;  // not the last vector's: a window may have left this tile behind
        for (int r = i; r < i + m; r++) furthest = imax(furthest, to[r]);
        if (furthest <= sub) continue;
        tile_of<W>(m)(q + i * ld, ld, (const T*)keys, size, scores + i * TOKENS + sub, TOKENS);
      }
    }
    for (int i = 0; i < n; i++) {
      float* s = scores + (int64_t)i * TOKENS;
      const int lo = from[i], hi = to[i];
      const int used = ceil_div(hi, VL) * VL;
      for (int j = used; j < TOKENS; j++) s[j] = 0;
      if (lo == hi) continue;
      if (a.softcap)
        for (int j = 0; j < used; j += VL)
          store(s + j, mul(all(a.softcap), tanh(div(load(s + j), all(a.softcap)))));
      for (int j = 0; j < lo; j++) s[j] = -INFINITY;
      for (int j = hi; j < used; j++) s[j] = -INFINITY;
      V most = all(-INFINITY);
      for (int j = 0; j < used; j += VL) most = vmax(load(s + j), most);  // not a NaN: it comes out by its weight
      const float before = top[i], after = before > largest(most) ? before : largest(most);
      V sums = zero();
      for (int j = 0; j < used; j += VL) {
        V x = exp(sub(load(s + j), all(after)));
        store(s + j, x);
        sums = add(sums, x);
      }
      if (after != before) {
        float factor[VL];
        store(factor, exp(all(before - after)));
        total[i] *= factor[0];
        V f = all(factor[0]);
        for (int d = 0; d < size; d += VL) store(o + i * ld + d, mul(load(o + i * ld + d), f));
        top[i] = after;
      }
      total[i] += sum(sums);
    }
    for (int i = 0, m; i < n; i += m) {
      m = ceil_div(n - i, ceil_div(n - i, WEIGH_ROWS));
      int lo = TOKENS, hi = 0;
      for (int r = i; r < i + m; r++)
        if (from[r] < to[r]) lo = imin(lo, from[r]), hi = imax(hi, to[r]);
      if (lo < hi)
        weigh_in<T>(m, std::make_integer_sequence<int, WEIGH_ROWS>())(scores + (int64_t)i * TOKENS, tile.values, lo,
                                                                      hi, o + i * ld, ld, size);
    }
  }
  for (int i = 0; i < n; i++) {
    Input* target = out + ((int64_t)(first + i / group) * a.heads + head * group + i % group) * size;
    V inverse = all(1.0f / total[i]);
    for (int d = 0; d < size; d += VL) store_upto(target + d, mul(load(o + i * ld + d), inverse), size - d);
  }
}

// This thread's share of the units of all sequences.
template <class W>
static void attend(const baton_attention& a, const baton_sequences& sequences, const typename W::Input* query,
                   typename W::Input* out, void* scratch, int thread, int threads) {
  const int rows = vectors_per_unit(a.heads / a.kv_heads) / (a.heads / a.kv_heads);
  int unit = 0;
  int64_t row = 0;
  for (int s = 0; s < sequences.count; s++) {
    const int length = sequences.lengths[s];
    const int64_t at = row * a.heads * a.head_dim;
    for (int first = 0; first < length; first += rows)
      for (int head = 0; head < a.kv_heads; head++)
        if (unit++ % threads == thread)
          attend_unit<W>(a, sequences.tables + (int64_t)s * sequences.table_width, sequences.starts[s], first,
                         imin(first + rows, length), head, query + at, out + at, scratch);
    row += length;
  }
}

}  // namespace BATON_ISA
}  // namespace baton
