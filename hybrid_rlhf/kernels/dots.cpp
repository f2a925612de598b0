// x W^T in bf16 for few rows, by the processor's own bf16 dot product (AVX-512 BF16): W is read once and never packed.
// Sums are in fp32 and in the same order whatever the number of rows.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "simd.h"

namespace hybrid {

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

namespace {

using Word = uint16_t;
constexpr int kSide = 4;          // a block is kSide rows by kSide outputs
constexpr int64_t kAhead = 8;     // outputs from a block to that whose weights it asks for
constexpr int64_t kVector = 32;   // bf16 numbers of one register
constexpr int64_t kTask = 16;     // outputs of one piece of work

__m512bh whole(const Word* from) { return (__m512bh)_mm512_loadu_si512(from); }

__m512bh part(const Word* from, int64_t count) {
  return (__m512bh)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << count) - 1), from);
}

// out[m][n] = x[m] . w[n]. Rows and outputs past the last repeat it: x and w are lists of pointers. On the way `Ahead`
// rows of weights of a later block are asked for.
template <int Ahead>
void block(const Word* const* x, const Word* const* w, const Word* const* ahead, int64_t depth, float* out) {
  __m512 sums[kSide * kSide] = {};
  int64_t k = 0;
  for (; k + kVector <= depth; k += kVector) {
    __m512bh weights[kSide];
    for (int n = 0; n < kSide; ++n) weights[n] = whole(w[n] + k);
    for (int n = 0; n < Ahead; ++n) prefetch(ahead[n] + k);
    for (int m = 0; m < kSide; ++m) {
      const __m512bh value = whole(x[m] + k);
      for (int n = 0; n < kSide; ++n)
        sums[m * kSide + n] = _mm512_dpbf16_ps(sums[m * kSide + n], value, weights[n]);
    }
  }
  if (k < depth)
    for (int m = 0; m < kSide; ++m)
      for (int n = 0; n < kSide; ++n)
        sums[m * kSide + n] = _mm512_dpbf16_ps(sums[m * kSide + n], part(x[m] + k, depth - k),
                                               part(w[n] + k, depth - k));
  _mm512_storeu_ps(out, sums_of_sixteen(sums));
}

// One piece of work: `count` outputs of every row. sums: (rows, kTask) to work in.
void work(const Linear& call, int64_t first, int64_t count, float* sums) {
  const auto* x = static_cast<const Word*>(call.x.data);
  const auto* weight = static_cast<const Word*>(call.weight.data) + first * call.weight.stride0;
  for (int64_t n = 0; n < count; n += kSide) {
    const Word *inputs[kSide], *weights[kSide], *next[kSide];
    for (int64_t i = 0; i < kSide; ++i) {
      weights[i] = weight + std::min(n + i, count - 1) * call.weight.stride0;
      next[i] = weights[i] + kAhead * call.weight.stride0;
    }
    for (int64_t m = 0; m < call.rows; m += kSide) {
      for (int64_t i = 0; i < kSide; ++i) inputs[i] = x + std::min(m + i, call.rows - 1) * call.x.stride0;
      float out[kSide * kSide];
      // each block of rows asks for its share: all at once would fill the queue of reads and stall it
      const int64_t at = m / kSide, blocks = (call.rows + kSide - 1) / kSide;
      if (blocks == 1) block<4>(inputs, weights, next, call.in_features, out);
      else if (blocks == 2) block<2>(inputs, weights, next + 2 * at, call.in_features, out);
      else if (blocks == 3 && at == 2) block<2>(inputs, weights, next + 2, call.in_features, out);
      else if (at < kSide) block<1>(inputs, weights, next + at, call.in_features, out);
      else block<0>(inputs, weights, next, call.in_features, out);
      for (int64_t i = 0; i < std::min<int64_t>(kSide, call.rows - m); ++i)
        std::memcpy(sums + (m + i) * kTask + n, out + i * kSide, kSide * sizeof(float));
    }
  }
  auto* to = static_cast<c10::BFloat16*>(call.out.data) + first;
  for (int64_t m = 0; m < call.rows; ++m) {
    float* row = sums + m * kTask;
    if (call.bias)
      for (int64_t n = 0; n < count; ++n) row[n] += call.bias[first + n];
    int64_t n = 0;
    for (; n + kLanes <= count; n += kLanes) store(to + m * call.out.stride0 + n, load(row + n));
    for (; n < count; ++n) to[m * call.out.stride0 + n] = row[n];
  }
}

}  // namespace

bool has_dot_linear() { return true; }

int64_t dot_pieces(const Linear& call) { return (call.out_features + kTask - 1) / kTask; }

Piece dot_piece(const Linear& call, int64_t piece) {
  thread_local std::vector<float> sums;
  sums.resize((call.rows + kSide) * kTask);
  const int64_t first = piece * kTask, count = std::min(kTask, call.out_features - first);
  work(call, first, count, sums.data());
  return {0, call.rows, first, count};
}

// Guided: long runs of neighbours first, for each asks for the next one's memory, and single pieces in the end.
void dot_linear(const Linear& call) {
  const int64_t pieces = dot_pieces(call);
#pragma omp parallel for schedule(guided, 1) num_threads(call.threads)
  for (int64_t piece = 0; piece < pieces; ++piece) dot_piece(call, piece);
}

#else

bool has_dot_linear() { return false; }

void dot_linear(const Linear&) {}

int64_t dot_pieces(const Linear&) { return 0; }

Piece dot_piece(const Linear&, int64_t) { return {}; }

#endif

}  // namespace hybrid
