// A whole decoder layer for one token of each row, by threads that are woken once: between two operations they meet and
// nothing is handed back to Python. kernels/reference.py: decode_layer is its definition. Everything is rounded where the
// separate operations round it, so both give the same bits.
#include <cstdint>

#include "kernels.h"
#include "simd.h"

namespace hybrid {
namespace {

constexpr int64_t kWorthThreads = 1 << 17;  // products below which waking other threads costs more than it saves

// `count` elements of a tensor, from element `at` on.
void* element(const Rows& of, int64_t at) {
  return static_cast<char*>(of.data) + at * (of.dtype == DType::kFloat32 ? 4 : 2);
}

int64_t pieces(const Linear& call) {
  return call.weight.dtype == DType::kBFloat16 ? dot_pieces(call) : packed_pieces(call);
}

Piece multiply(const Linear& call, int64_t piece) {
  return call.weight.dtype == DType::kBFloat16 ? dot_piece(call, piece) : packed_piece(call, piece);
}

// A piece of a product, added to the numbers of `residual` at its place.
void multiply_and_add(const Linear& call, const Rows& residual, int64_t piece) {
  const Piece done = multiply(call, piece);
  with_type(call.out.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t m = done.row; m < done.row + done.rows; ++m) {
      auto* out = static_cast<T*>(call.out.data) + m * call.out.stride0 + done.first;
      const auto* before = static_cast<const T*>(residual.data) + m * residual.stride0 + done.first;
      int64_t n = 0;
      for (; n + kLanes <= done.count; n += kLanes) store(out + n, load(before + n) + load(out + n));
      for (; n < done.count; ++n) out[n] = static_cast<T>(static_cast<float>(before[n]) + static_cast<float>(out[n]));
    }
  });
}

// The same piece of both products, and act(gate) * up in the place of the first.
void multiply_and_gate(const DecodeLayer& call, int64_t piece) {
  const Piece done = multiply(call.gate, piece);
  multiply(call.up, piece);
  for (int64_t m = done.row; m < done.row + done.rows; ++m) {
    void* gate = element(call.gate.out, m * call.gate.out.stride0 + done.first);
    gate_all({done.count, gate, element(call.up.out, m * call.up.out.stride0 + done.first), gate, call.dtype,
              call.is_gelu, 1});
  }
}

// A head of one row, in place: its norm, if there is one, and its turn.
void turn(const DecodeLayer& call, Norm norm, const Rows& heads, int64_t row, int64_t head) {
  const int64_t dim = call.attention.dim;
  void* x = element(heads, row * heads.stride0 + head * heads.stride1);
  if (norm.weight) {
    norm.x.data = norm.out.data = x;
    norm_one(norm, 0);
  }
  rotate_one(call.dtype, x, element(call.cosines, row * call.cosines.stride0),
             element(call.sines, row * call.sines.stride0), x, dim);
}

void attend(const DecodeLayer& call, int64_t task) {
  const Attention& attention = call.attention;
  const int64_t row = task / attention.kv_heads, head = task % attention.kv_heads;
  const int64_t group = attention.heads / attention.kv_heads;
  for (int64_t h = head * group; h < (head + 1) * group; ++h) turn(call, call.query_norm, attention.query, row, h);
  turn(call, call.key_norm, attention.key, row, head);
  attend_one(attention, task);
}

}  // namespace

void decode_layer(const DecodeLayer& call) {
  const int64_t queries = pieces(call.query), keys = pieces(call.key), values = pieces(call.value);
  const int64_t outputs = pieces(call.output), gates = pieces(call.gate), downs = pieces(call.down);
  const int64_t heads = call.rows * call.attention.kv_heads;
  const int64_t work = call.rows * call.gate.in_features * (call.query.out_features + 3 * call.gate.out_features);
#pragma omp parallel num_threads(work < kWorthThreads ? 1 : call.threads)
  {
#pragma omp for
    for (int64_t row = 0; row < call.rows; ++row) norm_one(call.before_attention, row);
#pragma omp for schedule(guided, 1)
    for (int64_t piece = 0; piece < queries + keys + values; ++piece) {
      if (piece < queries) multiply(call.query, piece);
      else if (piece < queries + keys) multiply(call.key, piece - queries);
      else multiply(call.value, piece - queries - keys);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < heads; ++task) attend(call, task);
#pragma omp for schedule(guided, 1)
    for (int64_t piece = 0; piece < outputs; ++piece) multiply_and_add(call.output, call.before_attention.x, piece);
#pragma omp for
    for (int64_t row = 0; row < call.rows; ++row) norm_one(call.before_mlp, row);
#pragma omp for schedule(guided, 1)
    for (int64_t piece = 0; piece < gates; ++piece) multiply_and_gate(call, piece);
#pragma omp for schedule(guided, 1)
    for (int64_t piece = 0; piece < downs; ++piece) multiply_and_add(call.down, call.before_mlp.x, piece);
  }
}

}  // namespace hybrid
