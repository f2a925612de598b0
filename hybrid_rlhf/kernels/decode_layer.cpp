// A whole decoder layer for one token of each row, by threads that are woken once: between two operations they meet and
// nothing is handed back to Python. kernels/reference.py: decode_layer is its definition. Everything is rounded where the
// separate kernels round it, so both give the same bits; LayerNorm and ReLU have no kernels of their own beside torch's.
#include <cstdint>
#include <initializer_list>

#include "kernels.h"
#include "simd.h"

namespace hybrid {
namespace {

constexpr int64_t kWorthThreads = 1 << 17;  // products below which waking other threads costs more than it saves

// `count` elements of a tensor, from element `at` on.
void* element(const Rows& of, int64_t at) {
  return static_cast<char*>(of.data) + at * (of.dtype == DType::kFloat32 ? 4 : 2);
}

// A piece of a product, added to the numbers of `residual` at its place.
void multiply_and_add(const Linear& call, const Rows& residual, int64_t piece) {
  const Piece done = dot_piece(call, piece);
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

// Before products of the same rows: these are turned for the matrix unit, and what the adapters make of them is computed.
// By all threads, which meet at the end.
void begin_all(std::initializer_list<const Linear*> products) {
  const Linear* turned = nullptr;  // any that is of the matrix unit: the rows are the same
  for (const Linear* product : products)
    if (product->turned) turned = product;
  if (turned) {
#pragma omp for
    for (int64_t part = 0; part < dot_turns(*turned); ++part) dot_turn(*turned, part);
  }
  int64_t adapters = 0;
  for (const Linear* product : products) adapters += product->rank > 0;
  if (!adapters) return;
  const Linear* const* first = products.begin();
#pragma omp for schedule(dynamic, 1)
  for (size_t i = 0; i < products.size(); ++i)
    if (first[i]->rank) dot_lower(*first[i]);
}

// A piece of the inner numbers, in the place of up's: act(gate) * up, or act(up) where there is no gate.
void multiply_and_activate(const DecodeLayer& call, int64_t piece) {
  const Piece done = dot_piece(call.up, piece);
  if (call.gate.weight.data) dot_piece(call.gate, piece);
  for (int64_t m = done.row; m < done.row + done.rows; ++m) {
    void* up = element(call.up.out, m * call.up.out.stride0 + done.first);
    if (call.gate.weight.data)
      gate_all({done.count, element(call.gate.out, m * call.gate.out.stride0 + done.first), up, up, call.dtype,
                call.activation == Activation::kGelu, 1});
    else activate_all(call.activation, call.dtype, up, done.count);
  }
}

// A head of one row, in place: its norm and its turn, if there are such.
void turn(const DecodeLayer& call, Norm norm, const Rows& heads, int64_t row, int64_t head) {
  const int64_t dim = call.attention.dim;
  void* x = element(heads, row * heads.stride0 + head * heads.stride1);
  if (norm.weight) {
    norm.x.data = norm.out.data = x;
    norm_one(norm, 0);
  }
  if (!call.cosines.data) return;
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
  const int64_t queries = dot_pieces(call.query), keys = dot_pieces(call.key), values = dot_pieces(call.value);
  const int64_t outputs = dot_pieces(call.output), inner = dot_pieces(call.up), downs = dot_pieces(call.down);
  const int64_t heads = call.rows * call.attention.kv_heads;
  const int64_t work = call.rows * call.up.in_features * (call.query.out_features + 3 * call.up.out_features);
#pragma omp parallel num_threads(work < kWorthThreads ? 1 : call.threads)
  {
#pragma omp for
    for (int64_t row = 0; row < call.rows; ++row) norm_one(call.before_attention, row);
    begin_all({&call.query, &call.key, &call.value});
#pragma omp for schedule(guided, 1)
    for (int64_t piece = 0; piece < queries + keys + values; ++piece) {
      if (piece < queries) dot_piece(call.query, piece);
      else if (piece < queries + keys) dot_piece(call.key, piece - queries);
      else dot_piece(call.value, piece - queries - keys);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < heads; ++task) attend(call, task);
    begin_all({&call.output});
#pragma omp for schedule(guided, 1)
    for (int64_t piece = 0; piece < outputs; ++piece) multiply_and_add(call.output, call.before_attention.x, piece);
#pragma omp for
    for (int64_t row = 0; row < call.rows; ++row) norm_one(call.before_mlp, row);
    begin_all({&call.gate, &call.up});
#pragma omp for schedule(guided, 1)
    for (int64_t piece = 0; piece < inner; ++piece) multiply_and_activate(call, piece);
    begin_all({&call.down});
#pragma omp for schedule(guided, 1)
    for (int64_t piece = 0; piece < downs; ++piece) multiply_and_add(call.down, call.before_mlp.x, piece);
  }
}

}  // namespace hybrid
