// x W^T for few rows, in bf16 by the processor's own dot product (AVX-512 BF16) or in fp32: W is read once and never
// packed, which for few rows takes longer than the product. Sums are in fp32 and in the same order whatever the number
// of rows. Where the processor has a matrix unit, whole pieces of bf16 are its (tiles.cpp), for any number of rows.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"
#include "simd.h"

namespace hybrid {
namespace {

constexpr int kSide = 4;          // a block is kSide rows by kSide outputs
constexpr int64_t kAhead = 8;     // outputs from a block to that whose weights it asks for
constexpr int64_t kTask = 16;     // outputs of one piece of work
constexpr int64_t kRow = kTileOutputs;  // from row to row of a piece's sums: room for the outputs of a piece of tiles

// Of numbers of one type: how many a register holds, its loads, and the sum of products.
template <typename T>
struct Dots;

template <>
struct Dots<float> {
  static constexpr int64_t kVector = kLanes;
  static Floats whole(const float* from) { return load(from); }
  static Floats part(const float* from, int64_t count) { return load_part(from, count); }
  static Floats add(Floats total, Floats a, Floats b) { return total + a * b; }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
constexpr bool kHasBf16 = true;

template <>
struct Dots<c10::BFloat16> {
  static constexpr int64_t kVector = 32;
  static __m512bh whole(const c10::BFloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static __m512bh part(const c10::BFloat16* from, int64_t count) {
    return (__m512bh)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << count) - 1), from);
  }
  static Floats add(Floats total, __m512bh a, __m512bh b) { return (Floats)_mm512_dpbf16_ps((__m512)total, a, b); }
};
#else
constexpr bool kHasBf16 = false;
#endif

// act with a value of the C++ type of `dtype`, which has dot products.
template <typename Act>
void with_dots(DType dtype, Act act) {
  if (dtype == DType::kFloat32) act(float{});
  else if constexpr (kHasBf16) act(c10::BFloat16{});
}

// out[m][n] = x[m] . w[n]. Rows and outputs past the last repeat it: x and w are lists of pointers. On the way `Ahead`
// rows of weights of a later block are asked for.
template <int Ahead, typename T>
void block(const T* const* x, const T* const* w, const T* const* ahead, int64_t depth, float* out) {
  using D = Dots<T>;
  Floats sums[kSide * kSide] = {};
  int64_t k = 0;
  for (; k + D::kVector <= depth; k += D::kVector) {
    decltype(D::whole(nullptr)) weights[kSide];
    for (int n = 0; n < kSide; ++n) weights[n] = D::whole(w[n] + k);
    for (int n = 0; n < Ahead; ++n) prefetch(ahead[n] + k);
    for (int m = 0; m < kSide; ++m) {
      const auto value = D::whole(x[m] + k);
      for (int n = 0; n < kSide; ++n) sums[m * kSide + n] = D::add(sums[m * kSide + n], value, weights[n]);
    }
  }
  if (k < depth)
    for (int m = 0; m < kSide; ++m)
      for (int n = 0; n < kSide; ++n)
        sums[m * kSide + n] = D::add(sums[m * kSide + n], D::part(x[m] + k, depth - k), D::part(w[n] + k, depth - k));
#if defined(__AVX512F__)
  _mm512_storeu_ps(out, sums_of_sixteen((const __m512*)sums));
#else
  for (int m = 0; m < kSide; ++m) sums_of_four(sums + m * kSide, out + m * kSide);
#endif
}

// `rows` of x by `count` rows of w, both `depth` long: act(m, n, sums) with the sums of a block of kSide rows from m and
// kSide outputs from n.
template <typename T, typename Act>
void small_product(const T* x, int64_t x_step, int64_t rows, const T* w, int64_t w_step, int64_t count, int64_t depth,
                   Act act) {
  for (int64_t n = 0; n < count; n += kSide)
    for (int64_t m = 0; m < rows; m += kSide) {
      const T *inputs[kSide], *weights[kSide];
      for (int64_t i = 0; i < kSide; ++i) {
        inputs[i] = x + std::min(m + i, rows - 1) * x_step;
        weights[i] = w + std::min(n + i, count - 1) * w_step;
      }
      float out[kSide * kSide];
      block<0>(inputs, weights, weights, depth, out);
      act(m, n, out);
    }
}

// down x of every row, rounded as between two layers: (rows, rank) into `low`.
template <typename T>
void lower(const Linear& call, T* low) {
  small_product(static_cast<const T*>(call.x.data), call.x.stride0, call.rows,
                static_cast<const T*>(call.down.data), call.down.stride0, call.rank, call.in_features,
                [&](int64_t m, int64_t n, const float* out) {
                  for (int64_t i = 0; i < std::min<int64_t>(kSide, call.rows - m); ++i)
                    for (int64_t j = 0; j < std::min<int64_t>(kSide, call.rank - n); ++j)
                      low[(m + i) * call.rank + n + j] = out[i * kSide + j];
                });
}

// sums += scaling * up low for `count` outputs of every row.
template <typename T>
void raise(const Linear& call, int64_t first, int64_t count, const T* low, float* sums) {
  small_product(low, call.rank, call.rows,
                static_cast<const T*>(call.up.data) + first * call.up.stride0, call.up.stride0, count, call.rank,
                [&](int64_t m, int64_t n, const float* out) {
                  for (int64_t i = 0; i < std::min<int64_t>(kSide, call.rows - m); ++i)
                    for (int64_t j = 0; j < kSide; ++j)
                      sums[(m + i) * kRow + n + j] += call.scaling * out[i * kSide + j];
                });
}

// sums = x w^T for `count` outputs of every row by the processor's dot products.
template <typename T>
void multiply_blocks(const Linear& call, const T* weight, int64_t count, float* sums) {
  const auto* x = static_cast<const T*>(call.x.data);
  for (int64_t n = 0; n < count; n += kSide) {
    const T *inputs[kSide], *weights[kSide], *next[kSide];
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
        std::memcpy(sums + (m + i) * kRow + n, out + i * kSide, kSide * sizeof(float));
    }
  }
}

// One piece of work: `count` outputs of every row. sums: (rows, kRow) to work in; low: `lower`, if there is an adapter.
template <typename T>
void work(const Linear& call, int64_t first, int64_t count, const T* low, float* sums) {
  const auto* weight = static_cast<const T*>(call.weight.data) + first * call.weight.stride0;
  if (call.turned && count == kTileOutputs)
    product_by_tiles(call.turned, call.rows, weight, call.weight.stride0, call.in_features, sums, kRow);
  else multiply_blocks(call, weight, count, sums);
  if (call.rank) raise(call, first, count, low, sums);
  auto* to = static_cast<T*>(call.out.data) + first;
  for (int64_t m = 0; m < call.rows; ++m) {
    float* row = sums + m * kRow;
    if (call.bias)
      for (int64_t n = 0; n < count; ++n) row[n] += call.bias[first + n];
    narrow(row, to + m * call.out.stride0, count);
  }
}

int64_t outputs_of_piece(const Linear& call) { return call.turned ? kTileOutputs : kTask; }

template <typename T>
Piece made(const Linear& call, int64_t piece, const T* low) {
  thread_local std::vector<float> sums;
  sums.resize((call.rows + kSide) * kRow);
  const int64_t most = outputs_of_piece(call), first = piece * most, count = std::min(most, call.out_features - first);
  work(call, first, count, low, sums.data());
  return {0, call.rows, first, count};
}

}  // namespace

bool has_dot_linear(DType dtype) { return dtype == DType::kFloat32 || (kHasBf16 && dtype == DType::kBFloat16); }

int64_t dot_pieces(const Linear& call) {
  const int64_t most = outputs_of_piece(call);
  return (call.out_features + most - 1) / most;
}

int64_t turned_numbers(const Linear& call) {
  const bool by_tiles = call.weight.dtype == DType::kBFloat16 && call.in_features % kTileDepth == 0 &&
                        call.out_features >= kTileOutputs && has_tiles();
  return by_tiles ? turned_size(call.rows, call.in_features) : 0;
}

int64_t dot_turns(const Linear& call) { return call.turned ? call.in_features / kTileDepth : 0; }

void dot_turn(const Linear& call, int64_t part) { turn_for_tiles(call.x, call.rows, part * kTileDepth, call.turned); }

void dot_lower(const Linear& call) {
  with_dots(call.weight.dtype, [&](auto type) { lower(call, static_cast<decltype(type)*>(call.low)); });
}

Piece dot_piece(const Linear& call, int64_t piece) {
  Piece done{};
  with_dots(call.weight.dtype,
            [&](auto type) { done = made(call, piece, static_cast<const decltype(type)*>(call.low)); });
  return done;
}

// Guided: long runs of neighbours first, for each asks for the next one's memory, and single pieces in the end.
void dot_linear(const Linear& asked) {
  struct alignas(64) Line {
    uint16_t numbers[kTileDepth];
  };
  const auto turned = std::make_unique_for_overwrite<Line[]>(turned_numbers(asked) / kTileDepth);
  Linear call = asked;
  call.turned = turned_numbers(asked) ? turned.get() : nullptr;
  const int64_t pieces = dot_pieces(call), turns = dot_turns(call);
  with_dots(call.weight.dtype, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel num_threads(call.threads)
    {
      thread_local std::vector<T> low;  // by each thread for itself: less than waiting for another's
      if (call.rank) {
        low.resize(call.rows * call.rank);
        lower(call, low.data());
      }
      if (turns) {
#pragma omp for
        for (int64_t part = 0; part < turns; ++part) dot_turn(call, part);
      }
#pragma omp for schedule(guided, 1)
      for (int64_t piece = 0; piece < pieces; ++piece) made(call, piece, static_cast<const T*>(low.data()));
    }
  });
}

}  // namespace hybrid
