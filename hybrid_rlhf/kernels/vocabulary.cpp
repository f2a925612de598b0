// Log-probabilities and entropies of rows of logits, and their gradients, one row at a time: a row in 16 bits stays in a
// processor's second-level cache, so each pass reads memory once and writes nothing but its result.
// kernels/reference.py: token_scores is the definition. With p = softmax(logits / T): d logprob / d logits_j =
// (1[j = target] - p_j) / T and d entropy / d logits_j = -p_j (log p_j + entropy) / T.
#include <cmath>
#include <limits>

#include "kernels.h"
#include "simd.h"

namespace hybrid {
namespace {

constexpr float kLow = -1e30f;  // of a word ruled out by -inf: it adds 0, not the NaN of 0 * -inf

// The numbers of a row as fp32 vectors, divided by the temperature; what lies past the end is -inf.
template <typename T>
struct Row {
  const T* data;
  int64_t count;
  float temperature;

  Floats operator()(int64_t i) const {
    Floats x;
    if (i + kLanes <= count) {
      x = load(data + i);
    } else {
      x = splat(-std::numeric_limits<float>::infinity());
      for (int64_t j = i; j < count; ++j) x[j - i] = static_cast<float>(data[j]);
    }
    return temperature == 1.0f ? x : x / temperature;
  }

  float at(int64_t i) const { return static_cast<float>(data[i]) / temperature; }
};

template <typename T>
void score(const Vocabulary& call, int64_t n) {
  const Row<T> row{static_cast<const T*>(call.logits.data) + n * call.logits.stride0, call.size, call.temperature};
  Floats top = splat(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < call.size; i += kLanes) {
    const Floats x = row(i);
    top = x > top ? x : top;
  }
  const float most = largest(top);
  Floats total{}, weighted{};
  for (int64_t i = 0; i < call.size; i += kLanes) {
    const Floats x = row(i) - most, e = exponential(x);
    total += e;
    if (call.entropy) weighted += e * (x < kLow ? splat(kLow) : x);
  }
  const float z = sum(total), target = row.at(call.targets[n]);
  call.logprobs[n] = target - most - std::log(z);
  call.normalisers[n] = most + std::log(z);
  if (call.entropy) call.entropy[n] = std::log(z) - sum(weighted) / z;
  bool is_best = target == most;  // and the first such word
  for (int64_t i = 0; is_best && i < call.targets[n]; ++i) is_best = row.at(i) != most;
  call.correct[n] = is_best;
}

template <typename T>
void differentiate(const Vocabulary& call, int64_t n) {
  const Row<T> row{static_cast<const T*>(call.logits.data) + n * call.logits.stride0, call.size, call.temperature};
  T* out = static_cast<T*>(call.gradient) + n * call.size;
  const float by_logprob = call.by_logprobs ? call.by_logprobs[n] / call.temperature : 0.0f;
  const float by_entropy = call.by_entropy ? call.by_entropy[n] / call.temperature : 0.0f;
  const float entropy = call.by_entropy ? call.entropy[n] : 0.0f, normaliser = call.normalisers[n];
  const auto slope = [&](int64_t i) {
    const Floats x = row(i) - normaliser;
    Floats factor = splat(-by_logprob);
    if (call.by_entropy) factor -= by_entropy * ((x < kLow ? splat(kLow) : x) + entropy);
    return exponential(x) * factor;
  };
  int64_t i = 0;
  for (; i + kLanes <= call.size; i += kLanes) store(out + i, slope(i));
  if (i < call.size) store_part(out + i, slope(i), call.size - i);
  const int64_t target = call.targets[n];
  out[target] = static_cast<T>(slope(target / kLanes * kLanes)[target % kLanes] + by_logprob);
}

}  // namespace

void score_tokens(const Vocabulary& call) {
  with_type(call.logits.dtype, [&](auto type) {
#pragma omp parallel for num_threads(call.threads) schedule(dynamic, 1)
    for (int64_t n = 0; n < call.rows; ++n) score<decltype(type)>(call, n);
  });
}

void score_tokens_backward(const Vocabulary& call) {
  with_type(call.logits.dtype, [&](auto type) {
#pragma omp parallel for num_threads(call.threads) schedule(dynamic, 1)
    for (int64_t n = 0; n < call.rows; ++n) differentiate<decltype(type)>(call, n);
  });
}

}  // namespace hybrid
