// x W^T for few rows, reading W once in its own dtype; sums in fp32. torch has no vectorised bf16 product for x86
// processors without AVX-512: there it multiplies one row after the other. A sum's order depends on in_features only,
// so a row's result does not depend on the rows beside it.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "products.h"

namespace hybrid {
namespace {

constexpr int kOutputs = 4, kRows = 2;  // 8 sums keep two multiply-adds a cycle busy, and all fits 16 registers
constexpr int64_t kDepth = 1024;        // of a chunk: four rows of W in fp32 stay in the first-level cache
constexpr int64_t kStep = kDepth + 16;  // from row to row, so that they do not share that cache's sets
constexpr int64_t kTask = 48;           // outputs of one piece of work, a multiple of kOutputs

int64_t padded(int64_t count) { return rounded_up(count, kLanes); }

// out[m][n] += x[m] . w[n] for Rows x Outputs over `depth`, a multiple of kLanes.
template <int Outputs, int Rows>
void block(const float* x, int64_t x_step, const float* w, int64_t depth, float* out) {
  Floats sums[Rows][Outputs] = {};
  for (int64_t k = 0; k < depth; k += kLanes) {
    Floats weights[Outputs];
    for (int n = 0; n < Outputs; ++n) weights[n] = load(w + n * kStep + k);
    for (int m = 0; m < Rows; ++m) {
      const Floats value = load(x + m * x_step + k);
      for (int n = 0; n < Outputs; ++n) sums[m][n] += value * weights[n];
    }
  }
  for (int m = 0; m < Rows; ++m) {
    float totals[Outputs];
    if constexpr (Outputs == 4) sums_of_four(sums[m], totals);
    else
      for (int n = 0; n < Outputs; ++n) totals[n] = sum(sums[m][n]);
    for (int n = 0; n < Outputs; ++n) out[m * kTask + n] += totals[n];
  }
}

template <int Outputs>
void panel(int64_t rows, const float* x, int64_t x_step, const float* w, int64_t depth, float* out) {
  int64_t m = 0;
  for (; m + kRows <= rows; m += kRows) block<Outputs, kRows>(x + m * x_step, x_step, w, depth, out + m * kTask);
  for (; m < rows; ++m) block<Outputs, 1>(x + m * x_step, x_step, w, depth, out + m * kTask);
}

template <typename T>
void work(const Linear& call, const float* x, int64_t first, int64_t count, float* w, float* out) {
  std::fill(out, out + call.rows * kTask, 0.0f);
  const T* weight = static_cast<const T*>(call.weight.data) + first * call.weight.stride0;
  const int64_t x_step = padded(call.in_features);
  for (int64_t n = 0; n < count; n += kOutputs) {
    const int64_t outputs = std::min<int64_t>(kOutputs, count - n);
    for (int64_t k = 0; k < call.in_features; k += kDepth) {
      const int64_t depth = std::min(kDepth, call.in_features - k);
      for (int64_t i = 0; i < outputs; ++i)
        pack_row(weight + (n + i) * call.weight.stride0 + k, depth, padded(depth), w + i * kStep);
      if (outputs == kOutputs) panel<kOutputs>(call.rows, x + k, x_step, w, padded(depth), out + n);
      else
        for (int64_t i = 0; i < outputs; ++i)
          panel<1>(call.rows, x + k, x_step, w + i * kStep, padded(depth), out + n + i);
    }
  }
}

void finish(const Linear& call, int64_t first, int64_t count, const float* sums) {
  with_type(call.out.dtype, [&](auto type) {
    for (int64_t m = 0; m < call.rows; ++m) {
      auto* out = static_cast<decltype(type)*>(call.out.data) + m * call.out.stride0 + first;
      for (int64_t n = 0; n < count; ++n)
        out[n] = static_cast<decltype(type)>(sums[m * kTask + n] + (call.bias ? call.bias[first + n] : 0.0f));
    }
  });
}

}  // namespace

void linear(const Linear& call) {
  const int64_t x_step = padded(call.in_features);
  std::vector<float> x(call.rows * x_step);
  with_type(call.x.dtype, [&](auto type) {
    for (int64_t m = 0; m < call.rows; ++m)
      pack_row(static_cast<const decltype(type)*>(call.x.data) + m * call.x.stride0, call.in_features, x_step,
               x.data() + m * x_step);
  });
  const int64_t tasks = (call.out_features + kTask - 1) / kTask;
#pragma omp parallel num_threads(call.threads)
  {
    thread_local std::vector<float> w, out;
    w.resize(kOutputs * kStep);
    out.resize(call.rows * kTask);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t first = task * kTask, count = std::min(kTask, call.out_features - first);
      with_type(call.weight.dtype, [&](auto type) {
        work<decltype(type)>(call, x.data(), first, count, w.data(), out.data());
      });
      finish(call, first, count, out.data());
    }
  }
}

}  // namespace hybrid
