// The C interface of the native engine: what `baton/engine/native/library.py` declares once more for ctypes.
//
// dtype is that of weights and KV cache: 0 float32, 1 bfloat16. Norms, biases, logits and the residual stream are
// always float32. Pointers are borrowed for the call (decoder and batch) and never kept.
#pragma once
#include <cstdint>

extern "C" {

typedef struct {
  const void* weight;  // packed by `pack`
  const float* bias;   // [outs], or null
  int32_t outs, ins;
} baton_linear;

typedef struct {
  baton_linear qkv, out, gate_up, down;
  const float *attention_norm, *query_norm, *key_norm, *post_attention_norm, *mlp_norm, *post_mlp_norm;  // or null
  int32_t window;  // tokens that a token attends to, itself included; 0: all
  int32_t rope;    // which of the batch's rotary tables
} baton_layer;

typedef struct {
  int32_t dtype, vocab, hidden, intermediate, heads, kv_heads, head_dim, rotary_dim, num_layers;
  int32_t activation;    // 0 SiLU, 1 GELU (tanh)
  int32_t embed_packed;  // `embed` is lm_head's packed weight; else plain rows
  float norm_eps, embed_scale, attention_scale, attention_softcap, logits_softcap;  // softcap 0: none
  const void* embed;
  const float* norm;
  baton_linear lm_head;
  const baton_layer* layers;
} baton_decoder;

// Which rows there are: sequence after sequence, `lengths[i]` rows that follow `starts[i]` earlier tokens.
typedef struct {
  int32_t count, table_width;
  const int32_t *starts, *lengths;
  const int32_t* tables;  // [count, table_width]: block ids
} baton_sequences;

typedef struct {
  baton_sequences sequences;
  int32_t rows, num_logits;
  const int64_t* tokens;       // [rows]
  const int64_t* logits_rows;  // [num_logits]
  const float *cos, *sin;      // [ropes, rows, rotary_dim / 2]
} baton_batch;

// Keys and values of one layer: element (block, head, offset, d) at block * block_stride + ((head * block_size) +
// offset) * head_dim + d.
typedef struct {
  void *keys, *values;
  int64_t block_stride;
  int32_t heads, kv_heads, head_dim, block_size, window;
  float softcap;
} baton_attention;

typedef struct baton_team baton_team;  // compute threads

typedef struct {
  const char* name;
  int32_t panel;  // outputs per packed panel
  // Bytes of a packed weight; and packing: `source` is row-major [outs, ins] in dtype.
  int64_t (*packed_bytes)(int32_t dtype, int32_t outs, int32_t ins);
  void (*pack)(int32_t dtype, const void* source, int32_t outs, int32_t ins, void* packed);
  int64_t (*workspace_bytes)(const baton_decoder*, int32_t rows, int32_t threads);
  // pool: [blocks, layers, 2, kv_heads, block_size, head_dim] in dtype. logits: [num_logits, vocab].
  void (*forward)(const baton_decoder*, const baton_batch*, void* pool, int32_t block_size, float* logits,
                  void* workspace, baton_team*);
  // The kernels one by one, single-threaded; x and out are float32.
  void (*linear)(int32_t dtype, const baton_linear*, const float* x, int32_t rows, float* out);
  void (*rms_norm)(const float* x, int32_t rows, int32_t size, const float* weight, float eps, float* out);
  void (*gated)(int32_t activation, const float* gate_up, int32_t rows, int32_t size, float* out);
  // query is scaled already. [rows, heads, head_dim] -> [rows, heads, head_dim].
  void (*attend)(int32_t dtype, const baton_attention*, const baton_sequences*, const float* query, float* out);
  // Rotates the first rotary_dim of each head; x is [rows, heads, head_dim], cos and sin [rows, rotary_dim / 2].
  void (*rotate)(const float* x, int32_t rows, int32_t heads, int32_t head_dim, int32_t rotary_dim, const float* cos,
                 const float* sin, float* out);
  // Writes keys and values [rows, kv_heads, head_dim] into the pool.
  void (*write_kv)(int32_t dtype, const baton_attention*, const baton_sequences*, const float* key, const float* value);
} baton_kernels;

// Null where this CPU, or this build, has no such kernels. Names: avx512bf16, avx512, avx2, portable.
const baton_kernels* baton_kernels_named(const char* name);

// `threads` compute threads, the caller's included. They inherit its affinity and sleep between calls. Null where they
// cannot be started. One call of `forward` at a time may use a team.
baton_team* baton_team_create(int32_t threads);
void baton_team_destroy(baton_team*);
}
