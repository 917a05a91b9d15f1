// The table of one instruction set's kernels: include it with BATON_ISA and its switches defined, see isa_*.cpp.
#include "decoder.h"
#include <cstdlib>

namespace baton {
namespace BATON_ISA {

template <class W>
static void forward_as(const baton_decoder* model, const baton_batch* batch, void* pool, int32_t block_size,
                       float* logits, void* workspace, baton_team* team) {
  Forward<W> forward = {*model, *batch, (typename W::Stored*)pool, block_size, logits, team, team ? team->threads : 1};
  forward.lay_out(workspace);
  if (forward.threads == 1)
    forward.run(0);
  else
    team->run([](void* f, int thread) { ((Forward<W>*)f)->run(thread); }, &forward);
}

static void forward(const baton_decoder* model, const baton_batch* batch, void* pool, int32_t block_size, float* logits,
                    void* workspace, baton_team* team) {
  (model->dtype ? forward_as<BFloat16> : forward_as<Float32>)(model, batch, pool, block_size, logits, workspace, team);
}

static int64_t workspace_bytes(const baton_decoder* model, int32_t rows, int32_t threads) {
  return model->dtype ? Forward<BFloat16>::workspace_bytes(*model, rows, threads)
                      : Forward<Float32>::workspace_bytes(*model, rows, threads);
}

static int64_t packed_bytes(int32_t dtype, int32_t outs, int32_t ins) {
  return ceil_div(outs, NR) * panel_size(ins) * (dtype ? 2 : 4);
}

static void pack_any(int32_t dtype, const void* source, int32_t outs, int32_t ins, void* packed) {
  if (dtype)
    pack<BFloat16>((const bf16*)source, outs, ins, (bf16*)packed);
  else
    pack<Float32>((const float*)source, outs, ins, (float*)packed);
}

template <class Input>
static Input* converted(const float* x, int64_t rows, int size, int padded) {
  Input* y = (Input*)calloc(rows * padded + VL, sizeof(Input));
  for (int64_t r = 0; r < rows; r++)
    for (int i = 0; i < size; i++) from_float(y + r * padded + i, x[r * size + i]);
  return y;
}

template <class W>
static void linear_as(const baton_linear* linear, const float* x, int32_t rows, float* out) {
  int padded = linear->ins + (linear->ins & 1);
  auto input = converted<typename W::Input>(x, rows, linear->ins, padded);
  product<W, false>(input, padded, rows, *linear, 0, ceil_div(linear->outs, NR), out, linear->outs);
  free(input);
}

static void linear_any(int32_t dtype, const baton_linear* linear, const float* x, int32_t rows, float* out) {
  (dtype ? linear_as<BFloat16> : linear_as<Float32>)(linear, x, rows, out);
}

static void rms_norm(const float* x, int32_t rows, int32_t size, const float* weight, float eps, float* out) {
  for (int64_t r = 0; r < rows; r++) rms_norm_row(x + r * size, size, weight, eps, out + r * size);
}

static void gated(int32_t activation, const float* gate_up, int32_t rows, int32_t size, float* out) {
  for (int64_t r = 0; r < rows; r++)
    Forward<Float32>::gate_row(activation, gate_up + r * 2 * size, size, out + r * size);
}

template <class W>
static void attend_as(const baton_attention* a, const baton_sequences* sequences, const float* query, float* out) {
  typedef typename W::Input Input;
  int64_t rows = 0, width = (int64_t)a->heads * a->head_dim;
  for (int i = 0; i < sequences->count; i++) rows += sequences->lengths[i];
  Input* q = converted<Input>(query, rows, width, width);
  Input* y = (Input*)calloc(rows * width + VL, sizeof(Input));
  void* scratch = malloc(AttentionScratch::bytes(vectors_per_unit(a->heads / a->kv_heads), a->head_dim));
  attend<W>(*a, *sequences, q, y, scratch, 0, 1);
  for (int64_t i = 0; i < rows * width; i++) out[i] = to_float(y[i]);
  free(scratch);
  free(y);
  free(q);
}

static void attend_any(int32_t dtype, const baton_attention* a, const baton_sequences* sequences, const float* query,
                       float* out) {
  (dtype ? attend_as<BFloat16> : attend_as<Float32>)(a, sequences, query, out);
}

static void rotate(const float* x, int32_t rows, int32_t heads, int32_t head_dim, int32_t rotary_dim, const float* cos,
                   const float* sin, float* out) {
  const int half = rotary_dim / 2;
  for (int64_t r = 0; r < rows; r++)
    for (int h = 0; h < heads; h++) {
      int64_t at = (r * heads + h) * head_dim;
      rotate_head(x + at, head_dim, half, cos + r * half, sin + r * half, 1.0f, out + at);
    }
}

template <class T>
static void write_kv_as(const baton_attention* a, const baton_sequences* s, const float* key, const float* value) {
  for (int i = 0; i < s->count; i++)
    for (int r = 0; r < s->lengths[i]; r++)
      for (int h = 0; h < a->kv_heads; h++, key += a->head_dim, value += a->head_dim) {
        int64_t at = pool_offset(*a, s->tables + (int64_t)i * s->table_width, s->starts[i] + r, h);
        copy_row(key, a->head_dim, (T*)a->keys + at);
        copy_row(value, a->head_dim, (T*)a->values + at);
      }
}

static void write_kv(int32_t dtype, const baton_attention* a, const baton_sequences* sequences, const float* key,
                     const float* value) {
  (dtype ? write_kv_as<bf16> : write_kv_as<float>)(a, sequences, key, value);
}

}  // namespace BATON_ISA
}  // namespace baton

#define BATON_TABLE_OF(name) BATON_TABLE_NAMED(name)
#define BATON_TABLE_NAMED(name) baton_table_##name
#define BATON_TEXT_OF(name) BATON_TEXT(name)
#define BATON_TEXT(name) #name

extern "C" __attribute__((visibility("hidden"))) const baton_kernels BATON_TABLE_OF(BATON_ISA);
const baton_kernels BATON_TABLE_OF(BATON_ISA) = {
    BATON_TEXT_OF(BATON_ISA),
    baton::BATON_ISA::NR,
    baton::BATON_ISA::packed_bytes,
    baton::BATON_ISA::pack_any,
    baton::BATON_ISA::workspace_bytes,
    baton::BATON_ISA::forward,
    baton::BATON_ISA::linear_any,
    baton::BATON_ISA::rms_norm,
    baton::BATON_ISA::gated,
    baton::BATON_ISA::attend_any,
    baton::BATON_ISA::rotate,
    baton::BATON_ISA::write_kv,
};
