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

// `rows` of x by `count` rows of w, both `depth` long: act(m, n, sums) with the sums of a block of kSide rows from m and
// kSide outputs from n.
template <typename Act>
void small_product(const Word* x, int64_t x_step, int64_t rows, const Word* w, int64_t w_step, int64_t count,
                   int64_t depth, Act act) {
  for (int64_t n = 0; n < count; n += kSide)
    for (int64_t m = 0; m < rows; m += kSide) {
      const Word *inputs[kSide], *weights[kSide];
      for (int64_t i = 0; i < kSide; ++i) {
        inputs[i] = x + std::min(m + i, rows - 1) * x_step;
        weights[i] = w + std::min(n + i, count - 1) * w_step;
      }
      float out[kSide * kSide];
      block<false>(inputs, weights, 0, depth, out);
      act(m, n, out);
    }
}

// down x of every row, rounded to bf16 as between two layers: (rows, rank) into `low`.
void lower(const Linear& call, c10::BFloat16* low) {
  small_product(static_cast<const Word*>(call.x.data), call.x.stride0, call.rows,
                static_cast<const Word*>(call.down.data), call.down.stride0, call.rank, call.in_features,
                [&](int64_t m, int64_t n, const float* out) {
                  for (int64_t i = 0; i < std::min<int64_t>(kSide, call.rows - m); ++i)
                    for (int64_t j = 0; j < std::min<int64_t>(kSide, call.rank - n); ++j)
                      low[(m + i) * call.rank + n + j] = out[i * kSide + j];
                });
}

// sums += scaling * up low for `count` outputs of every row.
void raise(const Linear& call, int64_t first, int64_t count, const c10::BFloat16* low, float* sums) {
  small_product(reinterpret_cast<const Word*>(low), call.rank, call.rows,
                static_cast<const Word*>(call.up.data) + first * call.up.stride0, call.up.stride0, count, call.rank,
                [&](int64_t m, int64_t n, const float* out) {
                  for (int64_t i = 0; i < std::min<int64_t>(kSide, call.rows - m); ++i)
                    for (int64_t j = 0; j < kSide; ++j)
                      sums[(m + i) * kTask + n + j] += call.scaling * out[i * kSide + j];
                });
}

// One piece of work: `count` outputs of every row. sums: (rows, kTask) to work in; low: `lower`, if there is an adapter.
void work(const Linear& call, int64_t first, int64_t count, const c10::BFloat16* low, float* sums) {
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
  if (call.rank) raise(call, first, count, low, sums);
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

namespace {

Piece made(const Linear& call, int64_t piece, const c10::BFloat16* low) {
  thread_local std::vector<float> sums;
  sums.resize((call.rows + kSide) * kTask);
  const int64_t first = piece * kTask, count = std::min(kTask, call.out_features - first);
  work(call, first, count, low, sums.data());
  return {0, call.rows, first, count};
}

}  // namespace

void dot_lower(const Linear& call) { lower(call, static_cast<c10::BFloat16*>(call.low)); }

Piece dot_piece(const Linear& call, int64_t piece) {
  return made(call, piece, static_cast<const c10::BFloat16*>(call.low));
}

// Guided: long runs of neighbours first, for each asks for the next one's memory, and single pieces in the end.
void dot_linear(const Linear& call) {
  const int64_t pieces = dot_pieces(call);
#pragma omp parallel num_threads(call.threads)
  {
    thread_local std::vector<c10::BFloat16> low;  // by each thread for itself: less than waiting for another's
    if (call.rank) {
      low.resize(call.rows * call.rank);
      lower(call, low.data());
    }
#pragma omp for schedule(guided, 1)
    for (int64_t piece = 0; piece < pieces; ++piece) made(call, piece, low.data());
  }
}

#else

bool has_dot_linear() { return false; }

void dot_linear(const Linear&) {}

int64_t dot_pieces(const Linear&) { return 0; }

void dot_lower(const Linear&) {}

Piece dot_piece(const Linear&, int64_t) { return {}; }

#endif

}  // namespace hybrid
