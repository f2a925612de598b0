// Small matrix products whose operands stay in cache: fp32 numbers, or pairs of bf16 numbers where the processor has a dot
// product of them. A "unit" is what one multiplication takes from each side: one float, or two bf16 numbers in 32 bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace hybrid {

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

// The unit by which tensors of T are multiplied.
template <typename T>
using UnitOf = std::conditional_t<kHasPairs && std::is_same_v<T, c10::BFloat16>, uint32_t, float>;

template <typename U>
constexpr int64_t kNumbers = std::is_same_v<U, float> ? 1 : 2;  // of a unit

constexpr int kTileRows = 4;
constexpr int kTileVectors = kLanes == 16 ? 4 : 2;  // kTileRows times as many sums fit the registers

inline int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

inline Floats times(Floats total, float a, const float* b) { return total + a * load(b); }

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
inline Floats times(Floats total, uint32_t a, const uint32_t* b) {
  return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)),
                                  (__m512bh)_mm512_loadu_si512(b));
}
#endif

// The left side of a product: the unit (m, k) is at data[m * row + k * step].
template <typename U>
struct Left {
  const U* data;
  int64_t row, step;
};

template <int Vectors, typename U>
void tile(Left<U> a, const U* b, int64_t b_row, int64_t depth, float* c, int64_t c_row, bool adds) {
  Floats sums[kTileRows][Vectors];
  for (int m = 0; m < kTileRows; ++m)
    for (int j = 0; j < Vectors; ++j) sums[m][j] = adds ? load(c + m * c_row + j * kLanes) : Floats{};
  for (int64_t k = 0; k < depth; ++k)
    for (int m = 0; m < kTileRows; ++m) {
      const U unit = a.data[m * a.row + k * a.step];
      for (int j = 0; j < Vectors; ++j) sums[m][j] = times(sums[m][j], unit, b + k * b_row + j * kLanes);
    }
  for (int m = 0; m < kTileRows; ++m)
    for (int j = 0; j < Vectors; ++j) store(c + m * c_row + j * kLanes, sums[m][j]);
}

// c[m][n] = (adds ? c[m][n] : 0) + sum over k < depth of a(m, k) . b[k][n]. rows is a multiple of kTileRows, columns one of
// kLanes; units of b lie side by side along n.
template <typename U>
void multiply(Left<U> a, const U* b, int64_t b_row, int64_t rows, int64_t columns, int64_t depth, float* c, int64_t c_row,
              bool adds) {
  int64_t n = 0;
  for (; n + kTileVectors * kLanes <= columns; n += kTileVectors * kLanes)
    for (int64_t m = 0; m < rows; m += kTileRows)
      tile<kTileVectors>({a.data + m * a.row, a.row, a.step}, b + n, b_row, depth, c + m * c_row + n, c_row, adds);
  for (; n < columns; n += kLanes)
    for (int64_t m = 0; m < rows; m += kTileRows)
      tile<1>({a.data + m * a.row, a.row, a.step}, b + n, b_row, depth, c + m * c_row + n, c_row, adds);
}

// One row of numbers as units along the row; `padded` numbers, those past `count` are zero.
template <typename T, typename U>
void pack_row(const T* from, int64_t count, int64_t padded, U* to) {
  if constexpr (std::is_same_v<U, float>) {
    widen(from, to, count);
    std::fill(to + count, to + padded, 0.0f);
  } else {
    auto* words = reinterpret_cast<T*>(to);
    std::memcpy(words, from, count * sizeof(T));
    std::fill(words + count, words + padded, T(0.0f));
  }
}

// Two rows of units along the row as one row of units that hold a number of each (for fp32: row by row as they are).
inline void pack_pair(const float* first, const float*, int64_t count, float* to) { std::copy(first, first + count, to); }

inline void pack_pair(const uint32_t* first, const uint32_t* second, int64_t count, uint32_t* to) {
  const auto *low = reinterpret_cast<const uint16_t*>(first), *high = reinterpret_cast<const uint16_t*>(second);
  for (int64_t i = 0; i < count; ++i) to[i] = low[i] | static_cast<uint32_t>(high[i]) << 16;
}

// to[k][n] = from[n][k] for `rows` (a multiple of kLanes) rows of `depth` units.
template <typename U>
void transpose_units(const U* from, int64_t from_row, int64_t rows, int64_t depth, U* to, int64_t to_row) {
  for (int64_t n = 0; n < rows; n += kLanes)
    for (int64_t k = 0; k < depth; ++k)
      for (int i = 0; i < kLanes; ++i) to[k * to_row + n + i] = from[(n + i) * from_row + k];
}

// fp32 numbers as units along the row; in pairs they are rounded to bf16.
inline void store_units(float* to, int64_t at, Floats x) { store(to + at, x); }

inline void store_units(uint32_t* to, int64_t at, Floats x) { store(reinterpret_cast<c10::BFloat16*>(to) + at, x); }

// Vectors of two rows as units that hold a number of each.
inline void store_pair(uint32_t* to, int64_t at, Floats first, Floats second) {
  const Words low = (Words)rounded<c10::BFloat16>(first) >> 16, high = (Words)rounded<c10::BFloat16>(second);
  const Words both = low | (high & 0xFFFF0000);
  std::memcpy(to + at, &both, sizeof both);
}

}  // namespace hybrid
