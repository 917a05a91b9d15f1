// A whole decoder step in one call: every thread runs `Forward::run`, and they meet after each phase.
#include "attention.h"
#include "team.h"

namespace baton {
namespace BATON_ISA {

template <class T>
INLINE void rms_norm_row(const float* x, int size, const float* weight, float eps, T* out) {
  V squares = zero();
  for (int i = 0; i < size; i += VL) {
    V v = load_upto(x + i, size - i);
    squares = fma(v, v, squares);
  }
  V scale = all(1.0f / sqrtf(sum(squares) / size + eps));
  for (int i = 0; i < size; i += VL)
    store_upto(out + i, mul(mul(load_upto(x + i, size - i), scale), load_upto(weight + i, size - i)), size - i);
}

// Rotary embedding (Su et al. 2021): pairs are (i, i + half) of the first 2 * half elements; times `scale`.
template <class T>
INLINE void rotate_head(const float* x, int size, int half, const float* cos, const float* sin, float scale, T* out) {
  V s = all(scale);
  for (int i = 0; i < half; i += VL) {
    int left = half - i;
    V a = load_upto(x + i, left), b = load_upto(x + half + i, left);
    V c = load_upto(cos + i, left), n = load_upto(sin + i, left);
    store_upto(out + i, mul(s, sub(mul(a, c), mul(b, n))), left);
    store_upto(out + half + i, mul(s, fma(b, c, mul(a, n))), left);
  }
  for (int i = 2 * half; i < size; i += VL)
    store_upto(out + i, mul(s, load_upto(x + i, size - i)), size - i);
}

template <class T>
INLINE void copy_row(const float* x, int size, T* out) {
  for (int i = 0; i < size; i += VL) store_upto(out + i, load_upto(x + i, size - i), size - i);
}

// Rows and columns are shared out in even, contiguous parts.
INLINE int share(int count, int thread, int threads) { return (int)((int64_t)count * thread / threads); }

template <class W>
struct Forward {
  typedef typename W::Stored T;
  typedef typename W::Input Input;

  const baton_decoder& model;
  const baton_batch& batch;
  T* pool;
  int block_size;
  float* logits;
  baton_team* team;
  int threads;
  // The workspace.
  float *hidden = nullptr, *qkv = nullptr, *part = nullptr, *wide = nullptr;
  Input *x = nullptr, *query = nullptr, *gated = nullptr;
  char* scratch = nullptr;
  int64_t scratch_bytes = 0;

  static int64_t aligned(int64_t bytes) { return (bytes + 63) & ~(int64_t)63; }
  static int row_width(const baton_decoder& m) { return imax(m.hidden, m.heads * m.head_dim); }
  static bool fused(const baton_decoder& m) { return m.intermediate % NR == 0; }

  static int64_t workspace_bytes(const baton_decoder& m, int rows, int threads) {
    int64_t r = rows, qkv_width = (m.heads + 2 * m.kv_heads) * m.head_dim;
    return 64 + aligned(r * m.hidden * 4) * 2 + aligned(r * qkv_width * 4) +
           aligned(fused(m) ? 0 : r * 2 * m.intermediate * 4) + aligned(r * row_width(m) * sizeof(Input)) +
           aligned(r * m.heads * m.head_dim * sizeof(Input)) + aligned(r * m.intermediate * sizeof(Input)) +
           threads * scratch_size(m);
  }
  static int64_t scratch_size(const baton_decoder& m) {
    return aligned(AttentionScratch::bytes(vectors_per_unit(m.heads / m.kv_heads), m.head_dim));
  }

  void lay_out(void* workspace) {
    int64_t r = batch.rows, qkv_width = (model.heads + 2 * model.kv_heads) * model.head_dim;
    char* at = (char*)aligned((int64_t)workspace);
    auto take = [&](int64_t bytes) {
      char* here = at;
      at += aligned(bytes);
      return here;
    };
    hidden = (float*)take(r * model.hidden * 4);
    part = (float*)take(r * model.hidden * 4);
    qkv = (float*)take(r * qkv_width * 4);
    wide = (float*)take(fused(model) ? 0 : r * 2 * model.intermediate * 4);
    x = (Input*)take(r * row_width(model) * sizeof(Input));
    query = (Input*)take(r * model.heads * model.head_dim * sizeof(Input));
    gated = (Input*)take(r * model.intermediate * sizeof(Input));
    scratch_bytes = scratch_size(model);
    scratch = at;
  }

  void meet() {
    if (threads > 1) team->meet();
  }

  void embed(int row) {
    const int64_t token = batch.tokens[row];
    float* to = hidden + (int64_t)row * model.hidden;
    for (int k = 0; k < model.hidden; k++) {
      float e = model.embed_packed ? packed_at<W>((const T*)model.embed, model.hidden, token, k)
                                   : to_float(((const T*)model.embed)[token * model.hidden + k]);
      to[k] = e * model.embed_scale;
    }
  }

  void norm(const float* from, const float* weight, int thread) {
    for (int r = share(batch.rows, thread, threads); r < share(batch.rows, thread + 1, threads); r++)
      rms_norm_row(from + (int64_t)r * model.hidden, model.hidden, weight, model.norm_eps,
                   x + (int64_t)r * model.hidden);
  }

  // hidden += product, by way of a norm where the model has one.
  void add_product(const Input* input, const baton_linear& linear, const float* post_norm, int thread) {
    int panels = ceil_div(linear.outs, NR), first = share(panels, thread, threads),
        last = share(panels, thread + 1, threads);
    if (!post_norm) {
      product<W, true>(input, linear.ins, batch.rows, linear, first, last, hidden, model.hidden);
      return;
    }
    product<W, false>(input, linear.ins, batch.rows, linear, first, last, part, model.hidden);
    meet();
    for (int r = share(batch.rows, thread, threads); r < share(batch.rows, thread + 1, threads); r++) {
      float* p = part + (int64_t)r * model.hidden;
      float* h = hidden + (int64_t)r * model.hidden;
      rms_norm_row(p, model.hidden, post_norm, model.norm_eps, p);
      for (int i = 0; i < model.hidden; i += VL) {
        int left = model.hidden - i;
        store_upto(h + i, add(load_upto(h + i, left), load_upto(p + i, left)), left);
      }
    }
  }

  // Rotates queries and keys of this thread's rows; writes keys and values into the pool.
  void rotate_and_write(const baton_layer& layer, const baton_attention& a, int thread) {
    const int begin = share(batch.rows, thread, threads), end = share(batch.rows, thread + 1, threads);
    const int size = model.head_dim, half = model.rotary_dim / 2;
    const baton_sequences& s = batch.sequences;
    int row = 0;
    for (int i = 0; i < s.count; row += s.lengths[i], i++)
      for (int r = imax(row, begin); r < imin(row + s.lengths[i], end); r++) {
        const int position = s.starts[i] + r - row;
        const int32_t* table = s.tables + (int64_t)i * s.table_width;
        const int64_t angle = ((int64_t)layer.rope * batch.rows + r) * half;
        const float *cos = batch.cos + angle, *sin = batch.sin + angle;
        float* from = qkv + (int64_t)r * (model.heads + 2 * model.kv_heads) * size;
        for (int h = 0; h < model.heads; h++, from += size) {
          if (layer.query_norm) rms_norm_row(from, size, layer.query_norm, model.norm_eps, from);
          rotate_head(from, size, half, cos, sin, model.attention_scale,
                      query + ((int64_t)r * model.heads + h) * size);
        }
        for (int h = 0; h < model.kv_heads; h++, from += size) {
          if (layer.key_norm) rms_norm_row(from, size, layer.key_norm, model.norm_eps, from);
          rotate_head(from, size, half, cos, sin, 1.0f, (T*)a.keys + pool_offset(a, table, position, h));
        }
        for (int h = 0; h < model.kv_heads; h++, from += size)
          copy_row(from, size, (T*)a.values + pool_offset(a, table, position, h));
      }
  }

  void mlp(const baton_layer& layer, int thread) {
    const int size = model.intermediate;
    if (fused(model)) {
      int panels = size / NR;
      gated_product<W>(x, model.hidden, batch.rows, layer.gate_up, model.activation, share(panels, thread, threads),
                       share(panels, thread + 1, threads), gated, size);
      return;
    }
    int panels = ceil_div(2 * size, NR);
    product<W, false>(x, model.hidden, batch.rows, layer.gate_up, share(panels, thread, threads),
                      share(panels, thread + 1, threads), wide, 2 * size);
    meet();
    for (int r = share(batch.rows, thread, threads); r < share(batch.rows, thread + 1, threads); r++)
      gate_row(model.activation, wide + (int64_t)r * 2 * size, size, gated + (int64_t)r * size);
  }

  template <class Out>
  static void gate_row(int activation, const float* gate_up, int size, Out* out) {
    for (int i = 0; i < size; i += VL) {
      int left = size - i;
      store_upto(out + i, mul(activate(activation, load_upto(gate_up + i, left)), load_upto(gate_up + size + i, left)),
                 left);
    }
  }

  void run(int thread) {
    for (int r = share(batch.rows, thread, threads); r < share(batch.rows, thread + 1, threads); r++) embed(r);
    const int64_t heads_size = (int64_t)model.kv_heads * block_size * model.head_dim;
    const int64_t qkv_width = (model.heads + 2 * model.kv_heads) * model.head_dim;
    for (int l = 0; l < model.num_layers; l++) {
      const baton_layer& layer = model.layers[l];
      T* keys = pool + 2 * l * heads_size;
      const baton_attention a = {keys,          keys + heads_size, 2 * model.num_layers * heads_size, model.heads,
                                 model.kv_heads, model.head_dim,   block_size,                        layer.window,
                                 model.attention_softcap};
      norm(hidden, layer.attention_norm, thread);
      meet();
      int panels = ceil_div(layer.qkv.outs, NR);
      product<W, false>(x, model.hidden, batch.rows, layer.qkv, share(panels, thread, threads),
                        share(panels, thread + 1, threads), qkv, qkv_width);
      meet();
      rotate_and_write(layer, a, thread);
      meet();
      attend<W>(a, batch.sequences, query, x, scratch + thread * scratch_bytes, thread, threads);
      meet();
      add_product(x, layer.out, layer.post_attention_norm, thread);
      meet();
      norm(hidden, layer.mlp_norm, thread);
      meet();
      mlp(layer, thread);
      meet();
      add_product(gated, layer.down, layer.post_mlp_norm, thread);
      meet();
    }
    const int n = batch.num_logits;
    for (int i = share(n, thread, threads); i < share(n, thread + 1, threads); i++)
      rms_norm_row(hidden + batch.logits_rows[i] * model.hidden, model.hidden, model.norm, model.norm_eps,
                   x + (int64_t)i * model.hidden);
    meet();
    int panels = ceil_div(model.vocab, NR), first = share(panels, thread, threads),
        last = share(panels, thread + 1, threads);
    product<W, false>(x, model.hidden, n, model.lm_head, first, last, logits, model.vocab);
    if (model.logits_softcap) {
      int end = imin(last * NR, model.vocab);
      for (int i = 0; i < n; i++)
        for (int c = first * NR; c < end; c += VL) {
          float* to = logits + (int64_t)i * model.vocab + c;
          V cap = all(model.logits_softcap);
          store_upto(to, mul(cap, tanh(div(load_upto(to, end - c), cap))), end - c);
        }
    }
  }
};

}  // namespace BATON_ISA
}  // namespace baton
