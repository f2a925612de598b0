// The gradients of elementwise.cpp's chains, in one pass over memory each; sums are in fp32 and rounded once.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "activations.h"
#include "kernels.h"

namespace hybrid {
namespace {

constexpr int64_t kWorthThreads = 1 << 15;  // numbers below which waking other threads costs more than it saves

// Vectors at the end of a row may be in part: what lies beyond the end is zero, and is not stored.
template <typename T>
Floats load_part(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T part[kLanes] = {};
  std::copy(from, from + count, part);
  return load(part);
}

template <typename T>
void store_part(T* to, Floats x, int64_t count) {
  if (count >= kLanes) {
    store(to, x);
    return;
  }
  T part[kLanes];
  store(part, x);
  std::copy(part, part + count, to);
}

// y = n w (or n (1 + w)) with n = x r, r = 1 / sqrt(mean x^2 + eps): dx = r (h - n mean(h n)), h = g w; dw = sum g n.
template <typename T>
void norm_row(const T* x, const T* weight, const T* gradient, T* out, float* by_weight, int64_t dim, float eps,
              bool adds_one) {
  const float one = adds_one ? 1.0f : 0.0f;
  Floats squares{}, products{};
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Floats v = load_part(x + i, dim - i), w = load_part(weight + i, dim - i) + one;
    squares += v * v;
    products += v * w * load_part(gradient + i, dim - i);
  }
  const float width = static_cast<float>(dim), scale = 1.0f / std::sqrt(sum(squares) / width + eps);
  const float along = sum(products) * scale / width;
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Floats n = load_part(x + i, dim - i) * scale, g = load_part(gradient + i, dim - i);
    const Floats w = load_part(weight + i, dim - i) + one;
    store_part(out + i, scale * (g * w - n * along), dim - i);
    if (by_weight)
      store_part(by_weight + i, load_part(by_weight + i, dim - i) + g * (adds_one ? n : rounded<T>(n)), dim - i);
  }
}

template <typename T>
void gate_piece(const T* gate, const T* up, const T* gradient, T* by_gate, T* by_up, int64_t count, bool is_gelu) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats g = load_part(gate + i, count - i), out = load_part(gradient + i, count - i);
    const auto [value, slope] = is_gelu ? gelu_tanh_and_slope(g) : silu_and_slope(g);
    store_part(by_up + i, out * rounded<T>(value), count - i);
    store_part(by_gate + i, out * load_part(up + i, count - i) * slope, count - i);
  }
}

}  // namespace

void rms_norm_backward(const NormGradient& call) {
  const Norm& norm = call.norm;
  with_type(norm.x.dtype, [&](auto type) {
    using T = decltype(type);
    // always as many shares as threads: a sum must not depend on how many of them happened to work
#pragma omp parallel for num_threads(norm.threads) schedule(static)
    for (int share = 0; share < norm.threads; ++share) {
      float* by_weight = call.by_weight ? call.by_weight + share * norm.dim : nullptr;
      if (by_weight) std::fill(by_weight, by_weight + norm.dim, 0.0f);
      for (int64_t row = norm.rows * share / norm.threads; row < norm.rows * (share + 1) / norm.threads; ++row)
        norm_row(static_cast<const T*>(norm.x.data) + row * norm.x.stride0, static_cast<const T*>(norm.weight),
                 static_cast<const T*>(call.gradient.data) + row * call.gradient.stride0,
                 static_cast<T*>(norm.out.data) + row * norm.out.stride0, by_weight, norm.dim, norm.eps, norm.adds_one);
    }
  });
}

void gated_backward(const GateGradient& call) {
  with_type(call.gate.dtype, [&](auto type) {
    using T = decltype(type);
    const int threads = call.gate.count < kWorthThreads ? 1 : call.gate.threads;
    const int64_t piece = 4096, pieces = (call.gate.count + piece - 1) / piece;
#pragma omp parallel for num_threads(threads)
    for (int64_t p = 0; p < pieces; ++p) {
      const int64_t at = p * piece;
      gate_piece(static_cast<const T*>(call.gate.gate) + at, static_cast<const T*>(call.gate.up) + at,
                 static_cast<const T*>(call.gradient) + at, static_cast<T*>(call.gate.out) + at,
                 static_cast<T*>(call.by_up) + at, std::min(piece, call.gate.count - at), call.gate.is_gelu);
    }
  });
}

}  // namespace hybrid
