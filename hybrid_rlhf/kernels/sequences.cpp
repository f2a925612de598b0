// Causal attention of whole sequences, forward and backward; kernels/reference.py: causal_attention is its definition.
// Scores of a block of queries with all keys before them stay in the cache. Products of bf16 are the processor's own where
// it has them; weights are rounded to bf16 for those, sums and the softmax are fp32. The backward pass takes the weights
// again from the scores and the log-normaliser of each query: with P = softmax(S), S = scaling Q K^T and g the gradient of
// the output O = P V: dV = P^T g, dS = P * (g V^T - rowsum(P * g V^T)), dQ = scaling dS K, dK = scaling dS^T Q.
#include <cmath>
#include <limits>
#include <vector>

#include "kernels.h"
#include "products.h"

namespace hybrid {
namespace {

constexpr int64_t kQueries = 32;  // of a block

template <typename T>
T* at(const Tokens& x, int64_t b, int64_t h, int64_t t = 0) {
  return static_cast<T*>(x.data) + b * x.batch_stride + h * x.head_stride + t * x.step;
}

// One head's rows in the layouts that the products read. `length` rows are zero-padded to a multiple of kQueries.
template <typename U>
struct Packed {
  std::vector<U> rows, turned, paired;  // (T, D) units along D; (D, T) the same units turned; (T, D) units along T
  int64_t length = 0, dim = 0;          // padded

  int64_t row() const { return dim / kNumbers<U>; }
  Left<U> from(int64_t t) const { return {rows.data() + t * row(), row(), 1}; }
  const U* pairs(int64_t t) const { return paired.data() + t / kNumbers<U> * dim; }

  template <typename T>
  void read(const T* x, int64_t step, int64_t count, int64_t width, bool turns, bool pairs) {
    length = rounded_up(count, kQueries), dim = rounded_up(width, kLanes);
    rows.resize(length * row());
    for (int64_t t = 0; t < count; ++t) pack_row(x + t * step, width, dim, rows.data() + t * row());
    std::fill(rows.begin() + count * row(), rows.end(), U{});
    if (turns) {
      turned.resize(rows.size());
      transpose_units(rows.data(), row(), length, row(), turned.data(), length);
    }
    if (pairs) {
      paired.resize(rows.size());
      for (int64_t t = 0; t < length; t += kNumbers<U>)
        pack_pair(rows.data() + t * row(), rows.data() + (t + kNumbers<U> - 1) * row(), dim,
                  paired.data() + t / kNumbers<U> * dim);
    }
  }
};

struct Block {  // queries first .. first + count, and the keys that some of them see, rounded up to whole vectors
  int64_t first, count, rows, keys;

  Block(int64_t first, int64_t length)
      : first(first), count(std::min(kQueries, length - first)), rows(rounded_up(count, kTileRows)),
        keys(rounded_up(first + count, kLanes)) {}
};

Ints lanes() {
  Ints out;
  for (int i = 0; i < kLanes; ++i) out[i] = i;
  return out;
}

// x where the lane is below `count`, else `other`.
Floats below(Floats x, int64_t count, float other) {
  if (count >= kLanes) return x;
  return lanes() < Ints{} + static_cast<int>(count) ? x : splat(other);
}

// exp(scaling * score - most) of a query that sees `count` keys, as units; returns their sum.
template <typename U>
float weigh(const float* scores, int64_t keys, int64_t count, float scaling, float& most, U* weights) {
  Floats top = splat(-std::numeric_limits<float>::infinity()), total{};
  for (int64_t c = 0; c < count; c += kLanes) {
    const Floats x = below(load(scores + c) * scaling, count - c, -std::numeric_limits<float>::infinity());
    top = x > top ? x : top;
  }
  most = largest(top);
  int64_t c = 0;
  for (; c < count; c += kLanes) {
    const Floats e = below(exponential(load(scores + c) * scaling - most), count - c, 0.0f);
    total += e;
    store_units(weights, c, e);
  }
  for (; c < keys; c += kLanes) store_units(weights, c, Floats{});
  return sum(total);
}

template <typename U>
struct Scratch {
  Packed<U> query, key, value, gradient;
  std::vector<float> scores, by_weights, out, key_sums, value_sums;
  std::vector<U> weights, paired_weights, paired_scores;
};

template <typename T, typename U>
void forward(const Sequences& call, int64_t b, int64_t k, Scratch<U>& s) {
  const int64_t group = call.heads / call.kv_heads;
  s.key.read(at<const T>(call.key, b, k), call.key.step, call.length, call.dim, true, false);
  s.value.read(at<const T>(call.value, b, k), call.value.step, call.length, call.value_dim, false, true);
  s.scores.resize(kQueries * s.key.length), s.out.resize(kQueries * s.value.dim);
  s.weights.resize(kQueries * s.key.length);
  for (int64_t h = k * group; h < (k + 1) * group; ++h) {
    s.query.read(at<const T>(call.query, b, h), call.query.step, call.length, call.dim, false, false);
    for (int64_t first = 0; first < call.length; first += kQueries) {
      const Block block(first, call.length);
      const int64_t row = block.keys / kNumbers<U>;
      float sums[kQueries];
      multiply(s.query.from(first), s.key.turned.data(), s.key.length, block.rows, block.keys, s.key.row(),
               s.scores.data(), block.keys, false);
      for (int64_t i = 0; i < block.count; ++i) {
        float most;
        sums[i] = weigh(s.scores.data() + i * block.keys, block.keys, first + i + 1, call.scaling, most,
                        s.weights.data() + i * row);
        if (call.normalisers) call.normalisers[(b * call.heads + h) * call.length + first + i] = most + std::log(sums[i]);
      }
      std::fill(s.weights.data() + block.count * row, s.weights.data() + block.rows * row, U{});
      multiply({s.weights.data(), row, 1}, s.value.pairs(0), s.value.dim, block.rows, s.value.dim, row, s.out.data(),
               s.value.dim, false);
      for (int64_t i = 0; i < block.count; ++i) {
        float* out = s.out.data() + i * s.value.dim;
        for (int64_t d = 0; d < s.value.dim; d += kLanes) store(out + d, load(out + d) * (1.0f / sums[i]));
        narrow(out, at<T>(call.out, b, h, first + i), call.value_dim);
      }
    }
  }
}

// A block's scores and their gradients by the weights, both (queries, keys): into P, and dS times the scaling.
template <typename U>
void differentiate(const Block& block, const float* normalisers, float scaling, Scratch<U>& s) {
  const int64_t keys = block.keys;
  float totals[kQueries] = {};
  for (int64_t i = 0; i < kQueries; ++i) {
    float *p = s.scores.data() + i * keys, *g = s.by_weights.data() + i * keys;
    const int64_t count = i < block.count ? block.first + i + 1 : 0;
    Floats total{};
    for (int64_t c = 0; c < keys; c += kLanes) {
      Floats x{};
      if (c < count) x = below(exponential(load(p + c) * scaling - normalisers[i]), count - c, 0.0f);
      if (c < count) total += x * load(g + c);
      store(p + c, x);
    }
    totals[i] = sum(total);
  }
  for (int64_t i = 0; i < kQueries; i += kNumbers<U>) {
    const int64_t other = i + kNumbers<U> - 1, pair = i / kNumbers<U> * keys;
    const float *p = s.scores.data() + i * keys, *g = s.by_weights.data() + i * keys;
    const float *p2 = s.scores.data() + other * keys, *g2 = s.by_weights.data() + other * keys;
    for (int64_t c = 0; c < keys; c += kLanes) {
      const Floats x = load(p + c), x2 = load(p2 + c);
      const Floats d = i < block.count ? x * (load(g + c) - totals[i]) * scaling : Floats{};
      const Floats d2 = other < block.count ? x2 * (load(g2 + c) - totals[other]) * scaling : Floats{};
      store_units(s.weights.data() + i * keys / kNumbers<U>, c, d);
      if (other != i) store_units(s.weights.data() + other * keys / kNumbers<U>, c, d2);
      if constexpr (kNumbers<U> == 2) {
        store_pair(s.paired_weights.data(), pair + c, x, x2);
        store_pair(s.paired_scores.data(), pair + c, d, d2);
      }
    }
  }
}

template <typename T, typename U>
void backward(const Sequences& call, int64_t b, int64_t k, Scratch<U>& s) {
  const int64_t group = call.heads / call.kv_heads;
  s.key.read(at<const T>(call.key, b, k), call.key.step, call.length, call.dim, true, true);
  s.value.read(at<const T>(call.value, b, k), call.value.step, call.length, call.value_dim, true, false);
  const int64_t padded = s.key.length, dim = s.key.dim, value_dim = s.value.dim;
  for (auto* each : {&s.scores, &s.by_weights}) each->resize(kQueries * padded);
  for (auto* each : {&s.weights, &s.paired_weights, &s.paired_scores}) each->resize(kQueries * padded);
  s.out.resize(kQueries * dim);
  s.key_sums.assign(padded * dim, 0.0f), s.value_sums.assign(padded * value_dim, 0.0f);
  for (int64_t h = k * group; h < (k + 1) * group; ++h) {
    s.query.read(at<const T>(call.query, b, h), call.query.step, call.length, call.dim, false, true);
    s.gradient.read(at<const T>(call.out, b, h), call.out.step, call.length, call.value_dim, false, true);
    for (int64_t first = 0; first < call.length; first += kQueries) {
      const Block block(first, call.length);
      const int64_t keys = block.keys, depth = kQueries / kNumbers<U>;
      multiply(s.query.from(first), s.key.turned.data(), padded, block.rows, keys, s.key.row(), s.scores.data(), keys,
               false);
      multiply(s.gradient.from(first), s.value.turned.data(), padded, block.rows, keys, s.value.row(),
               s.by_weights.data(), keys, false);
      differentiate(block, call.normalisers + (b * call.heads + h) * call.length + first, call.scaling, s);
      multiply({s.weights.data(), keys / kNumbers<U>, 1}, s.key.pairs(0), dim, block.rows, dim, keys / kNumbers<U>,
               s.out.data(), dim, false);
      for (int64_t i = 0; i < block.count; ++i)
        narrow(s.out.data() + i * dim, at<T>(call.query_gradient, b, h, first + i), call.dim);
      const U *scores = s.weights.data(), *weights = nullptr;
      if constexpr (kNumbers<U> == 2) scores = s.paired_scores.data(), weights = s.paired_weights.data();
      else weights = s.scores.data();
      multiply({scores, 1, keys}, s.query.pairs(first), dim, keys, dim, depth, s.key_sums.data(), dim, true);
      multiply({weights, 1, keys}, s.gradient.pairs(first), value_dim, keys, value_dim, depth, s.value_sums.data(),
               value_dim, true);
    }
  }
  for (int64_t t = 0; t < call.length; ++t) {
    narrow(s.key_sums.data() + t * dim, at<T>(call.key_gradient, b, k, t), call.dim);
    narrow(s.value_sums.data() + t * value_dim, at<T>(call.value_gradient, b, k, t), call.value_dim);
  }
}

template <typename Act>
void each_key_head(const Sequences& call, Act act) {
  with_type(call.dtype, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel num_threads(call.threads)
    {
      thread_local Scratch<UnitOf<T>> scratch;
#pragma omp for schedule(dynamic, 1)
      for (int64_t task = 0; task < call.batch * call.kv_heads; ++task)
        act(type, task / call.kv_heads, task % call.kv_heads, scratch);
    }
  });
}

}  // namespace

void causal_attention(const Sequences& call) {
  each_key_head(call, [&](auto type, int64_t b, int64_t k, auto& scratch) {
    forward<decltype(type)>(call, b, k, scratch);
  });
}

void causal_attention_backward(const Sequences& call) {
  each_key_head(call, [&](auto type, int64_t b, int64_t k, auto& scratch) {
    backward<decltype(type)>(call, b, k, scratch);
  });
}

}  // namespace hybrid
