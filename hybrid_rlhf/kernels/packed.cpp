// x W^T in fp32 for many rows: W is packed panel by panel so that its outputs lie side by side, then read by
// every block of rows. torch's own product is MKL's, which on other makers' processors leaves AVX-512 unused (measured
// on one Zen 5 core: 100 against 250 GFLOP/s at 2048 rows). Each sum runs over in_features in order, whatever the
// number of rows, so a row's result does not depend on the rows beside it.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "simd.h"

namespace hybrid {
namespace {

constexpr int kPanel = 3 * kLanes;             // outputs side by side: three vectors
constexpr int kRows = kLanes == 16 ? 8 : 4;    // kRows times three sums fit the registers
constexpr int64_t kDepth = 512;                // of a packed panel, which stays in the second-level cache
constexpr int64_t kChunk = 256;                // rows of one piece of work
constexpr int kAhead = 4 * kLanes;             // elements: too many rows at once for the processor to foresee

// panel[k][n] = w[n][k] for kLanes rows of w and kLanes columns.
void transpose(const float* w, int64_t step, float* panel) {
#if defined(__AVX512F__)
  __m512 a[16], b[16];
  for (int i = 0; i < 16; ++i) {
    a[i] = _mm512_loadu_ps(w + i * step);
    prefetch(w + i * step + kAhead);
  }
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  const auto pairs = [](__m512 x) { return _mm512_castps_pd(x); };
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(pairs(b[i + j]), pairs(b[i + j + 2])));
      a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pairs(b[i + j]), pairs(b[i + j + 2])));
    }
  for (int i = 0; i < 4; ++i) {
    const __m512 low = _mm512_shuffle_f32x4(a[i], a[4 + i], 0x88), high = _mm512_shuffle_f32x4(a[i], a[4 + i], 0xdd);
    const __m512 low2 = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0x88);
    const __m512 high2 = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0xdd);
    _mm512_storeu_ps(panel + i * kPanel, _mm512_shuffle_f32x4(low, low2, 0x88));
    _mm512_storeu_ps(panel + (4 + i) * kPanel, _mm512_shuffle_f32x4(high, high2, 0x88));
    _mm512_storeu_ps(panel + (8 + i) * kPanel, _mm512_shuffle_f32x4(low, low2, 0xdd));
    _mm512_storeu_ps(panel + (12 + i) * kPanel, _mm512_shuffle_f32x4(high, high2, 0xdd));
  }
#else
  for (int k = 0; k < kLanes; ++k)
    for (int n = 0; n < kLanes; ++n) panel[k * kPanel + n] = w[n * step + k];
#endif
}

// `outputs` rows of w, `depth` long, as panel[k][n]; up to `padded`, outputs that are missing are zero.
void pack(const float* w, int64_t step, int64_t outputs, int64_t padded, int64_t depth, float* panel) {
  const int64_t whole = depth / kLanes * kLanes;
  for (int64_t n = 0; n < padded; n += kLanes) {
    const bool is_whole = n + kLanes <= outputs;
    if (is_whole)
      for (int64_t k = 0; k < whole; k += kLanes) transpose(w + n * step + k, step, panel + k * kPanel + n);
    for (int64_t k = is_whole ? whole : 0; k < depth; ++k)
      for (int64_t i = n; i < n + kLanes; ++i) panel[k * kPanel + i] = i < outputs ? w[i * step + k] : 0.0f;
  }
}

struct RowsOf {  // what a block reads and writes, with the distance from row to row
  const float* x;
  int64_t x_step;
  float* out;
  int64_t out_step;
};

// out[m][n] = (is_first ? 0 : out[m][n]) + x[m] . panel[:, n] for Rows rows and Vectors * kLanes outputs.
template <int Rows, int Vectors>
void block(const RowsOf& at, const float* panel, int64_t depth, bool is_first) {
  Floats sums[Rows][Vectors];
  for (int m = 0; m < Rows; ++m)
    for (int j = 0; j < Vectors; ++j) sums[m][j] = is_first ? Floats{} : load(at.out + m * at.out_step + j * kLanes);
  for (int64_t k = 0; k < depth; ++k) {
    Floats w[Vectors];
    for (int j = 0; j < Vectors; ++j) w[j] = load(panel + k * kPanel + j * kLanes);
    for (int m = 0; m < Rows; ++m) {
      const Floats value = splat(at.x[m * at.x_step + k]);
      for (int j = 0; j < Vectors; ++j) sums[m][j] += value * w[j];
    }
  }
  for (int m = 0; m < Rows; ++m)
    for (int j = 0; j < Vectors; ++j) store(at.out + m * at.out_step + j * kLanes, sums[m][j]);
}

template <int Rows, int Vectors>
void blocks(int64_t rows, RowsOf at, const float* panel, int64_t depth, bool is_first) {
  for (; rows >= Rows; rows -= Rows) {
    block<Rows, Vectors>(at, panel, depth, is_first);
    at.x += Rows * at.x_step, at.out += Rows * at.out_step;
  }
  if constexpr (Rows > 1)
    if (rows > 0) blocks<Rows / 2, Vectors>(rows, at, panel, depth, is_first);
}

struct Panel {
  std::vector<float> weights = std::vector<float>(kDepth * kPanel), edge;
};

// The outputs first..first + count of `rows` rows from `row` on.
void work(const Linear& call, int64_t row, int64_t rows, int64_t first, int64_t count, Panel& panel) {
  const auto* weight = static_cast<const float*>(call.weight.data) + first * call.weight.stride0;
  float* out = static_cast<float*>(call.out.data) + row * call.out.stride0 + first;
  RowsOf at{static_cast<const float*>(call.x.data) + row * call.x.stride0, call.x.stride0, out, call.out.stride0};
  const int64_t vectors = (count + kLanes - 1) / kLanes;
  if (count % kLanes) {  // whole vectors would write past the row
    panel.edge.resize(rows * kPanel);
    at.out = panel.edge.data(), at.out_step = kPanel;
  }
  for (int64_t k = 0; k < call.in_features; k += kDepth, at.x += kDepth) {
    const int64_t depth = std::min(kDepth, call.in_features - k);
    pack(weight + k, call.weight.stride0, count, vectors * kLanes, depth, panel.weights.data());
    if (vectors == 3) blocks<kRows, 3>(rows, at, panel.weights.data(), depth, k == 0);
    else if (vectors == 2) blocks<kRows, 2>(rows, at, panel.weights.data(), depth, k == 0);
    else blocks<kRows, 1>(rows, at, panel.weights.data(), depth, k == 0);
  }
  if (at.out == out && !call.bias) return;
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t n = 0; n < count; ++n)
      out[m * call.out.stride0 + n] = at.out[m * at.out_step + n] + (call.bias ? call.bias[first + n] : 0.0f);
}

// Outputs of a piece of work: three vectors, or two where the busiest thread has less to do then.
int64_t width(const Linear& call, int64_t chunks) {
  const auto busiest = [&](int64_t outputs) {
    const int64_t pieces = (call.out_features + outputs - 1) / outputs * chunks;
    return (pieces + call.threads - 1) / call.threads * outputs;
  };
  return busiest(2 * kLanes) < busiest(kPanel) ? 2 * kLanes : kPanel;
}

}  // namespace

void packed_linear(const Linear& call) {
  const int64_t chunks = (call.rows + kChunk - 1) / kChunk, outputs = width(call, chunks);
  const int64_t panels = (call.out_features + outputs - 1) / outputs;
#pragma omp parallel for schedule(dynamic, 1) num_threads(call.threads)
  for (int64_t piece = 0; piece < panels * chunks; ++piece) {
    thread_local Panel panel;
    const int64_t first = piece % panels * outputs, row = piece / panels * kChunk;
    work(call, row, std::min(kChunk, call.rows - row), first, std::min(outputs, call.out_features - first), panel);
  }
}

}  // namespace hybrid
