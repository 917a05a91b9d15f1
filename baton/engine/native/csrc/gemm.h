// Matrix products over packed weights. A panel holds NR outputs: [ins][NR] in float32, [ins / 2][NR][2] in bfloat16,
// so that a step over the inputs reads whole vectors, one after the other, and each output is one chain of
// multiply-adds in the order of the inputs, however many rows are computed together.
#include "simd.h"
#include <utility>

namespace baton {
namespace BATON_ISA {

constexpr int NR = 2 * VL;

struct Float32 {
  typedef float Stored;
  typedef float Input;
};
struct BFloat16 {
  typedef bf16 Stored;
#ifdef BATON_DOT
  typedef bf16 Input;  // what the dot-product instruction takes
#else
  typedef float Input;
#endif
};

// Rows per tile: as many as have their two accumulators in registers.
template <class W>
struct TileRows {
  static constexpr int value = VL == 16 ? 12 : sizeof(typename W::Stored) == 4 ? 6 : 5;
};

INLINE int64_t panel_size(int ins) { return (int64_t)(ins + (ins & 1)) * NR; }

constexpr int AHEAD = 2048;  // bytes of weights that are fetched before they are needed

// x: [M] rows, ldx apart; w: one panel; out: [M][NR], rows ldo apart.
template <class W, int M>
static void tile(const typename W::Input* x, int64_t ldx, const typename W::Stored* w, int ins, float* out, int ldo) {
  V acc[M][2];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = zero();
  if constexpr (sizeof(typename W::Stored) == 4) {
    for (int k = 0; k < ins; k++, w += NR) {
      if (M <= 4) {
        prefetch((const char*)w + AHEAD);
        if (VL == 16) prefetch((const char*)w + AHEAD + 64);
      }
      V w0 = load(w), w1 = load(w + VL);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        V xm = all(x[m * ldx + k]);
        acc[m][0] = fma(w0, xm, acc[m][0]);
        acc[m][1] = fma(w1, xm, acc[m][1]);
      }
    }
  } else {
    for (int k = 0; k < ins; k += 2, w += 2 * NR) {
      if (M <= 4) {
        prefetch((const char*)w + AHEAD);
        if (VL == 16) prefetch((const char*)w + AHEAD + 64);
      }
#ifdef BATON_DOT
      __m512bh w0 = (__m512bh)_mm512_loadu_si512((const void*)w), w1 = (__m512bh)_mm512_loadu_si512((const void*)(w + NR));
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        int32_t pair;
        memcpy(&pair, x + m * ldx + k, 4);
        __m512bh xm = (__m512bh)_mm512_set1_epi32(pair);
        acc[m][0] = _mm512_dpbf16_ps(acc[m][0], w0, xm);
        acc[m][1] = _mm512_dpbf16_ps(acc[m][1], w1, xm);
      }
#else
      V e0 = evens(w), o0 = odds(w), e1 = evens(w + NR), o1 = odds(w + NR);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        V xe = all(x[m * ldx + k]);
        acc[m][0] = fma(e0, xe, acc[m][0]);
        acc[m][1] = fma(e1, xe, acc[m][1]);
        V xo = all(x[m * ldx + k + 1]);
        acc[m][0] = fma(o0, xo, acc[m][0]);
        acc[m][1] = fma(o1, xo, acc[m][1]);
      }
#endif
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) {
    store(out + m * ldo, acc[m][0]);
    store(out + m * ldo + VL, acc[m][1]);
  }
}

template <class W>
using Tile = void (*)(const typename W::Input*, int64_t, const typename W::Stored*, int, float*, int);

template <class W, int... M>
INLINE Tile<W> tile_in(int rows, std::integer_sequence<int, M...>) {
  static constexpr Tile<W> tiles[] = {tile<W, M + 1>...};
  return tiles[rows - 1];
}
template <class W>
INLINE Tile<W> tile_of(int rows) {
  return tile_in<W>(rows, std::make_integer_sequence<int, TileRows<W>::value>());
}

// A bfloat16 panel as a float32 one.
INLINE void widen(const bf16* w, int ins, float* wide) {
  for (int k = 0; k < ins; k += 2, w += 2 * NR, wide += 2 * NR) {
    store(wide, evens(w)), store(wide + VL, evens(w + NR));
    store(wide + NR, odds(w)), store(wide + NR + VL, odds(w + NR));
  }
}

// Rows of the next tile out of `left`: evenly sized tiles rather than full ones and a rest.
template <class W>
INLINE int next_rows(int left) {
  return ceil_div(left, ceil_div(left, TileRows<W>::value));
}

constexpr int WIDENED = 64 << 10;  // floats of a bfloat16 panel in float32

// Calls visit(row, rows, panel, multiply) for all rows and panels [first, last), where multiply(shift, out) puts the
// product of these rows with the panel `shift` panels further into out [rows][NR]. Rows are taken in blocks whose inputs
// stay in the second-level cache while all panels pass by.
template <class W, class Visit>
static inline void each_tile(const typename W::Input* x, int64_t ldx, int rows, const void* weight, int ins, int first,
                             int last, int num_shifts, int shift, Visit visit) {
  typedef typename W::Stored T;
  constexpr int most = TileRows<W>::value;
  int fit = (256 << 10) / imax(1, ins * (int)sizeof(typename W::Input));
  int block = imax(1, fit / most) * most;
  for (int begin = 0; begin < rows; begin += block) {
    int end = imin(begin + block, rows);
    for (int p = first; p < last; p++) {
      const T* w = (const T*)weight + p * panel_size(ins);
      if constexpr (sizeof(T) == 2 && sizeof(typename W::Input) == 4) {
        // Bits are moved to make float32 of bfloat16: for many rows do it once, the sums stay the same.
        if (end - begin > 2 * most && num_shifts * panel_size(ins) <= WIDENED) {
          alignas(64) float wide[WIDENED];
          for (int s = 0; s < num_shifts; s++) widen(w + s * shift * panel_size(ins), ins, wide + s * panel_size(ins));
          for (int row = begin, n; row < end; row += n) {
            n = next_rows<Float32>(end - row);
            visit(row, n, p, [&](int s, float* y) {
              tile_of<Float32>(n)(x + row * ldx, ldx, wide + s * panel_size(ins), ins + (ins & 1), y, NR);
            });
          }
          continue;
        }
      }
      for (int row = begin, n; row < end; row += n) {
        n = next_rows<W>(end - row);
        visit(row, n, p, [&](int s, float* y) {
          tile_of<W>(n)(x + row * ldx, ldx, w + s * shift * panel_size(ins), ins, y, NR);
        });
      }
    }
  }
}

// out[row][o] = or += the product with panels [first, last); out has `linear.outs` columns, ldo apart.
template <class W, bool ADD>
static void product(const typename W::Input* x, int64_t ldx, int rows, const baton_linear& linear, int first, int last,
                    float* out, int64_t ldo) {
  each_tile<W>(x, ldx, rows, linear.weight, linear.ins, first, last, 1, 0,
               [&](int row, int n, int p, auto multiply) {
                 alignas(64) float y[TileRows<Float32>::value * NR];
                 multiply(0, y);
                 int columns = imin(NR, linear.outs - p * NR);
                 for (int m = 0; m < n; m++) {
                   float* to = out + (row + m) * ldo + (int64_t)p * NR;
                   for (int c = 0; c < columns; c += VL) {
                     V v = load(y + m * NR + c);
                     int left = columns - c;
                     if (linear.bias) v = add(v, load_upto(linear.bias + p * NR + c, left));
                     if (ADD) v = add(load_upto(to + c, left), v);
                     store_upto(to + c, v, left);
                   }
                 }
               });
}

INLINE V activate(int activation, V x) {
  if (activation == 0)  // SiLU; exp ends at 88, which is not enough for what is far below 0
    return zero_below(x, all(-88.0f), div(x, add(all(1.0f), exp(sub(zero(), x)))));
  V inner = mul(all(0.7978845608f), fma(mul(all(0.044715f), mul(x, x)), x, x));
  return mul(mul(all(0.5f), x), add(all(1.0f), tanh(inner)));  // GELU, tanh form
}

// y[row][i] = activation(gate) * up for panels [first, last) of the gate; outputs are gates, then ups, NR dividing
// their number.
template <class W>
static void gated_product(const typename W::Input* x, int64_t ldx, int rows, const baton_linear& linear, int activation,
                          int first, int last, typename W::Input* out, int64_t ldo) {
  int size = linear.outs / 2;
  each_tile<W>(x, ldx, rows, linear.weight, linear.ins, first, last, 2, size / NR,
               [&](int row, int n, int p, auto multiply) {
                 alignas(64) float gate[TileRows<Float32>::value * NR], up[TileRows<Float32>::value * NR];
                 multiply(0, gate);
                 multiply(1, up);
                 for (int m = 0; m < n; m++)
                   for (int c = 0; c < NR; c += VL) {
                     V g = load(gate + m * NR + c), u = load(up + m * NR + c);
                     if (linear.bias) {
                       g = add(g, load(linear.bias + p * NR + c));
                       u = add(u, load(linear.bias + size + p * NR + c));
                     }
                     store(out + (row + m) * ldo + p * NR + c, mul(activate(activation, g), u));
                   }
               });
}

template <class W>
static void pack(const typename W::Stored* source, int outs, int ins, typename W::Stored* packed) {
  constexpr int step = sizeof(typename W::Stored) == 4 ? 1 : 2;  // inputs that lie beside each other
  int padded = ins + (ins & 1);
  for (int p = 0; p < ceil_div(outs, NR); p++, packed += panel_size(ins))
    for (int n = 0; n < NR; n++)
      for (int k = 0; k < padded; k++) {
        int o = p * NR + n;
        packed[((int64_t)(k / step) * NR + n) * step + k % step] =
            o < outs && k < ins ? source[(int64_t)o * ins + k] : (typename W::Stored)0;
      }
}

// Element k of output o of a packed weight.
template <class W>
INLINE float packed_at(const typename W::Stored* packed, int ins, int o, int k) {
  constexpr int step = sizeof(typename W::Stored) == 4 ? 1 : 2;
  return to_float(packed[(o / NR) * panel_size(ins) + ((int64_t)(k / step) * NR + o % NR) * step + k % step]);
}

}  // namespace BATON_ISA
}  // namespace baton
