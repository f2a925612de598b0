// A step of AdamW on fp32 masters, in one pass over memory: gradient, moments and master are read, all but the gradient
// written, and the 16-bit weight with them. kernels/reference.py: adamw is the definition.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "simd.h"

namespace hybrid {
namespace {

constexpr int64_t kPiece = 1 << 14;  // numbers of one piece of work
constexpr int64_t kAdded = 1 << 10;  // squares that are added in fp32

template <typename Act>
void each_piece(int64_t count, int threads, Act act) {
  const int64_t pieces = (count + kPiece - 1) / kPiece;
#pragma omp parallel for num_threads(pieces == 1 ? 1 : threads) schedule(static)
  for (int64_t p = 0; p < pieces; ++p) act(p, p * kPiece, std::min(count, (p + 1) * kPiece));
}

struct Rates {  // of one step
  float decay, beta1, beta2, step, root, epsilon, factor;
};

// One vector of numbers: the moments m and s and the master w are changed.
inline void advance(const Rates& rates, Floats g, Floats& m, Floats& s, Floats& w) {
  g *= rates.factor;
  w *= rates.decay;
  m += (1.0f - rates.beta1) * (g - m);
  s = rates.beta2 * s + (1.0f - rates.beta2) * g * g;
  Floats root;
#if defined(__AVX512F__)
  root = (Floats)_mm512_sqrt_ps((__m512)s);
#else
  for (int i = 0; i < kLanes; ++i) root[i] = std::sqrt(s[i]);
#endif
  w -= rates.step * m / (root / rates.root + rates.epsilon);
}

template <typename W, typename G>
void advance(const Adam& call, const Rates& rates, int64_t first, int64_t end) {
  const auto* gradient = static_cast<const G*>(call.gradient);
  auto* weight = static_cast<W*>(call.weight);
  int64_t i = first;
  for (; i + kLanes <= end; i += kLanes) {
    Floats m = load(call.average + i), s = load(call.square + i), w = load(call.master + i);
    advance(rates, load(gradient + i), m, s, w);
    store(call.average + i, m), store(call.square + i, s), store(call.master + i, w);
    if (weight) store(weight + i, w);
  }
  for (; i < end; ++i) {
    Floats g = splat(static_cast<float>(gradient[i])), m = splat(call.average[i]), s = splat(call.square[i]);
    Floats w = splat(call.master[i]);
    advance(rates, g, m, s, w);
    call.average[i] = m[0], call.square[i] = s[0], call.master[i] = w[0];
    if (weight) weight[i] = static_cast<W>(w[0]);
  }
}

}  // namespace

void adamw(const Adam& call) {
  const double step = static_cast<double>(call.step);
  const Rates rates{static_cast<float>(1.0 - call.rate * call.weight_decay),
                    static_cast<float>(call.beta1),
                    static_cast<float>(call.beta2),
                    static_cast<float>(call.rate / (1.0 - std::pow(call.beta1, step))),
                    static_cast<float>(std::sqrt(1.0 - std::pow(call.beta2, step))),
                    static_cast<float>(call.epsilon),
                    call.factor};
  with_type(call.weight_dtype, [&](auto weight) {
    with_type(call.gradient_dtype, [&](auto gradient) {
      each_piece(call.count, call.threads, [&](int64_t, int64_t first, int64_t end) {
        advance<decltype(weight), decltype(gradient)>(call, rates, first, end);
      });
    });
  });
}

double sum_of_squares(const void* data, DType dtype, int64_t count, int threads) {
  std::vector<double> parts((count + kPiece - 1) / kPiece);  // added in one order, whoever has made them
  with_type(dtype, [&](auto type) {
    const auto* x = static_cast<const decltype(type)*>(data);
    each_piece(count, threads, [&](int64_t piece, int64_t first, int64_t end) {
      double total = 0;
      for (int64_t at = first; at < end; at += kAdded) {
        const int64_t last = std::min(end, at + kAdded);
        Floats squares{};
        int64_t i = at;
        for (; i + kLanes <= last; i += kLanes) squares += load(x + i) * load(x + i);
        total += sum(squares);
        for (; i < last; ++i) total += static_cast<double>(static_cast<float>(x[i])) * static_cast<float>(x[i]);
      }
      parts[piece] = total;
    });
  });
  double out = 0;
  for (double part : parts) out += part;
  return out;
}

}  // namespace hybrid
