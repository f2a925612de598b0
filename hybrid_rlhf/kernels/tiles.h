// Products of bf16 rows by the processor's matrix unit (Intel AMX), which multiplies whole tiles: 16 rows of 32 numbers
// by 16 rows of 32 numbers, sums in fp32. dots.cpp uses it where there is one.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace hybrid {

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define HYBRID_TILES  // the compiler has them; has_tiles says whether the process does
#endif

constexpr int64_t kTileSide = 16;     // rows of a tile
constexpr int64_t kTileDepth = 32;    // numbers of a row in a tile
constexpr int64_t kTileOutputs = 32;  // of one product_by_tiles: two tiles of W for each load of x

// Whether there is a unit, and whether the operating system lets this process use it; asked once, when the kernels are
// loaded, for it may refuse a process whose threads have too small a stack for signals.
bool compiled_with_tiles();
bool has_tiles();

// Numbers that x takes when it is turned: pairs of neighbours of all rows side by side, zeros up to whole tiles.
constexpr int64_t turned_size(int64_t rows, int64_t in_features) {
  return (rows + kTileSide - 1) / kTileSide * kTileSide * in_features;
}

// Turns kTileDepth numbers of every row of x, from number `k` on: the pair k, k + 1 of row m goes to [k / 2][m].
void turn_for_tiles(const Rows& x, int64_t rows, int64_t k, void* turned);

// sums[m * row + n] = x[m] . w[n] for kTileOutputs outputs and every row; depth: a multiple of kTileDepth. On the way
// the weights of the next outputs are asked for.
void product_by_tiles(const void* turned, int64_t rows, const void* w, int64_t w_step, int64_t depth, float* sums,
                      int64_t row);

}  // namespace hybrid
