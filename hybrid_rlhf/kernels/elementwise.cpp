// Chains of small operations in one pass over memory; kernels/reference.py defines them. What a model rounds to its own
// dtype between two operations is rounded here too. Sums of the gradients are in fp32 and rounded once.
#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels.h"
#include "simd.h"

namespace hybrid {
namespace {

constexpr int64_t kWorthThreads = 1 << 15;  // numbers below which waking other threads costs more than it saves

// `act(vector, width)` for every vector of `count` numbers, the last of which may be in part.
template <typename T, typename Act>
void each(const T* a, const T* b, T* out, int64_t count, Act act) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, act(load(a + i), load(b + i)));
  if (i < count) store_part(out + i, act(load_part(a + i, count - i), load_part(b + i, count - i)), count - i);
}

template <typename T>
void norm_row(const T* x, const T* weight, T* out, int64_t dim, float eps, bool adds_one) {
  Floats squares{};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) squares += load(x + i) * load(x + i);
  float total = sum(squares);
  for (; i < dim; ++i) total += static_cast<float>(x[i]) * static_cast<float>(x[i]);
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(dim) + eps);
  if (adds_one) each(x, weight, out, dim, [=](Floats v, Floats w) { return v * scale * (w + 1.0f); });
  else each(x, weight, out, dim, [=](Floats v, Floats w) { return rounded<T>(v * scale) * w; });
}

// 1607.06450: (x - mean) / sqrt(variance + eps) * weight + bias, rounded once.
template <typename T>
void layer_norm_row(const T* x, const T* weight, const T* bias, T* out, int64_t dim, float eps) {
  const auto number = [](T value) { return static_cast<float>(value); };
  Floats sums{}, squares{};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) sums += load(x + i);
  float total = sum(sums);
  for (; i < dim; ++i) total += number(x[i]);
  const float mean = total / static_cast<float>(dim);
  for (i = 0; i + kLanes <= dim; i += kLanes) squares += (load(x + i) - mean) * (load(x + i) - mean);
  total = sum(squares);
  for (; i < dim; ++i) total += (number(x[i]) - mean) * (number(x[i]) - mean);
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(dim) + eps);
  for (i = 0; i + kLanes <= dim; i += kLanes)
    store(out + i, (load(x + i) - mean) * scale * load(weight + i) + load(bias + i));
  for (; i < dim; ++i) out[i] = static_cast<T>((number(x[i]) - mean) * scale * number(weight[i]) + number(bias[i]));
}

// One head of one token: the two halves turn by the angles whose cosines and sines are given.
template <typename T>
void rotate(const T* x, const T* cosines, const T* sines, T* out, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Floats a = load(x + i), b = load(x + half + i);
    store(out + i, rounded<T>(a * load(cosines + i)) - rounded<T>(b * load(sines + i)));
    store(out + half + i, rounded<T>(b * load(cosines + half + i)) + rounded<T>(a * load(sines + half + i)));
  }
  const auto narrow = [](float value) { return static_cast<float>(static_cast<T>(value)); };
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    out[i] = static_cast<T>(narrow(a * static_cast<float>(cosines[i])) - narrow(b * static_cast<float>(sines[i])));
    out[half + i] = static_cast<T>(narrow(b * static_cast<float>(cosines[half + i])) +
                                   narrow(a * static_cast<float>(sines[half + i])));
  }
}

// -- gradients, in one pass over memory each

// y = n w (or n (1 + w)) with n = x r, r = 1 / sqrt(mean x^2 + eps): dx = r (h - n mean(h n)), h = g w; dw = sum g n.
template <typename T>
void norm_row_gradient(const T* x, const T* weight, const T* gradient, T* out, float* by_weight, int64_t dim, float eps,
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

void norm_one(const Norm& call, int64_t row) {
  with_type(call.x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto *x = static_cast<const T*>(call.x.data) + row * call.x.stride0, *weight = static_cast<const T*>(call.weight);
    auto* out = static_cast<T*>(call.out.data) + row * call.out.stride0;
    if (call.bias) layer_norm_row(x, weight, static_cast<const T*>(call.bias), out, call.dim, call.eps);
    else norm_row(x, weight, out, call.dim, call.eps, call.adds_one);
  });
}

void rms_norm(const Norm& call) {
  const int threads = call.rows * call.dim < kWorthThreads ? 1 : call.threads;
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < call.rows; ++row) norm_one(call, row);
}

void activate_all(Activation kind, DType dtype, void* x, int64_t count) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    auto* at = static_cast<T*>(x);
    const auto act = [&](auto function) {
      each(at, at, at, count, [=](Floats v, Floats) { return function(v); });
    };
    if (kind == Activation::kRelu) act([](Floats v) { return v < 0 ? Floats{} : v; });
    else if (kind == Activation::kGelu) act([](Floats v) { return gelu_tanh(v); });
    else act([](Floats v) { return silu(v); });
  });
}

void gate_all(const Gate& call) {
  with_type(call.dtype, [&](auto type) {
    using T = decltype(type);
    const auto act = [&](auto function) {
      each(static_cast<const T*>(call.gate), static_cast<const T*>(call.up), static_cast<T*>(call.out), call.count,
           [=](Floats g, Floats u) { return rounded<T>(function(g)) * u; });
    };
    if (call.is_gelu) act([](Floats g) { return gelu_tanh(g); });
    else act([](Floats g) { return silu(g); });
  });
}

void gated(const Gate& call) {
  const int threads = call.count < kWorthThreads ? 1 : call.threads;
  const int64_t piece = 4096, pieces = (call.count + piece - 1) / piece;
  with_type(call.dtype, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for num_threads(threads)
    for (int64_t p = 0; p < pieces; ++p) {
      const int64_t at = p * piece;
      gate_all({std::min(piece, call.count - at), static_cast<const T*>(call.gate) + at,
                static_cast<const T*>(call.up) + at, static_cast<T*>(call.out) + at, call.dtype, call.is_gelu, 1});
    }
  });
}

void rotate_one(DType dtype, const void* x, const void* cosines, const void* sines, void* out, int64_t dim) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    rotate(static_cast<const T*>(x), static_cast<const T*>(cosines), static_cast<const T*>(sines),
           static_cast<T*>(out), dim / 2);
  });
}

void rotary(const Rotary& call) {
  with_type(call.x.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t rows = call.batch * call.length;
    const int threads = rows * call.heads * call.dim < kWorthThreads ? 1 : call.threads;
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t b = row / call.length, q = row % call.length;
      const int64_t angle = b * call.cosines.stride0 + q * call.cosines.stride1;
      const int64_t sine = b * call.sines.stride0 + q * call.sines.stride1;
      for (int64_t h = 0; h < call.heads; ++h)
        rotate(static_cast<const T*>(call.x.data) + b * call.x.stride0 + h * call.x.stride1 + q * call.x_step,
               static_cast<const T*>(call.cosines.data) + angle, static_cast<const T*>(call.sines.data) + sine,
               static_cast<T*>(call.out) + (row * call.heads + h) * call.dim, call.dim / 2);
    }
  });
}

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
        norm_row_gradient(static_cast<const T*>(norm.x.data) + row * norm.x.stride0,
                          static_cast<const T*>(norm.weight),
                          static_cast<const T*>(call.gradient.data) + row * call.gradient.stride0,
                          static_cast<T*>(norm.out.data) + row * norm.out.stride0, by_weight, norm.dim, norm.eps,
                          norm.adds_one);
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
