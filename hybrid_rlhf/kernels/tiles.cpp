// The matrix unit's part of dots.cpp. W is read as it lies; of x, which is small, neighbours are laid in pairs beside
// those of the other rows, as the unit wants its right side. Measured on a Xeon with AMX, one core, W of 32,000 x 768
// in bf16, milliseconds by the unit, by dot products, and by torch, which uses the unit too: 4 rows 2.4, 2.0, 3.5; 8
// rows 2.5, 3.7, 3.8; 16 rows 2.7, 7.2, 4.1; 32 rows 3.0, 14.4, 4.2. Few rows take no other way, so that a row's sums
// do not depend on how many there are.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "simd.h"

#ifdef HYBRID_TILES
#include <sys/syscall.h>
#include <unistd.h>

namespace hybrid {
namespace {

constexpr long kAskPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, which older headers lack
constexpr long kTileData = 18;           // the number of the tiles' state

struct alignas(64) Layout {  // of the tiles, as the processor reads it
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

// Everything is in memory before the next instruction: compilers do not know all that those of the unit read and write.
inline void settle() { asm volatile("" ::: "memory"); }

// The unit laid out for our tiles; in the end as it was before, for torch's products keep a layout of their own.
class Tiles {
 public:
  Tiles() {
    _tile_storeconfig(&before_);
    Layout ours{};
    ours.palette = 1;
    for (int i = 0; i < 8; ++i) ours.bytes[i] = 64, ours.rows[i] = kTileSide;
    settle();
    _tile_loadconfig(&ours);
  }
  ~Tiles() {
    settle();
    if (before_.palette) _tile_loadconfig(&before_);
    else _tile_release();
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  Layout before_;
};

// to[j * to_row + i] = from[i][j], 16 by 16 words.
void transpose(const __m512i* from, void* to, int64_t to_row) {
  __m512i pairs[16], quads[16];
  for (int i = 0; i < 8; ++i) {
    pairs[2 * i] = _mm512_unpacklo_epi32(from[2 * i], from[2 * i + 1]);
    pairs[2 * i + 1] = _mm512_unpackhi_epi32(from[2 * i], from[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j) {
      quads[4 * i + 2 * j] = _mm512_unpacklo_epi64(pairs[4 * i + j], pairs[4 * i + j + 2]);
      quads[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[4 * i + j], pairs[4 * i + j + 2]);
    }
  for (int j = 0; j < 4; ++j) {  // quads[4 i + j]: of each fourth of the columns the j-th, rows 4 i to 4 i + 3
    const auto fourths = [&](int i, auto which) { return _mm512_shuffle_i32x4(quads[i + j], quads[i + j + 4], which); };
    const std::integral_constant<int, 0x88> even;
    const std::integral_constant<int, 0xdd> odd;
    const __m512i evens[2] = {fourths(0, even), fourths(8, even)}, odds[2] = {fourths(0, odd), fourths(8, odd)};
    auto* out = static_cast<uint32_t*>(to) + j * to_row;
    _mm512_storeu_si512(out, _mm512_shuffle_i32x4(evens[0], evens[1], even));
    _mm512_storeu_si512(out + 4 * to_row, _mm512_shuffle_i32x4(odds[0], odds[1], even));
    _mm512_storeu_si512(out + 8 * to_row, _mm512_shuffle_i32x4(evens[0], evens[1], odd));
    _mm512_storeu_si512(out + 12 * to_row, _mm512_shuffle_i32x4(odds[0], odds[1], odd));
  }
}

using Sums = float[kTileSide * kTileSide];

// A tile of sums, of each output those of all rows, to `rows` rows of sums.
void put(const Sums& by_output, int64_t rows, float* sums, int64_t row) {
  alignas(64) Sums by_row;
  transpose(reinterpret_cast<const __m512i*>(by_output), by_row, kTileSide);
  for (int64_t m = 0; m < rows; ++m) std::memcpy(sums + m * row, by_row + m * kTileSide, kTileSide * sizeof(float));
}

}  // namespace

bool compiled_with_tiles() { return true; }

bool has_tiles() {
  static const bool is_allowed = syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
  return is_allowed;
}

void turn_for_tiles(const Rows& x, int64_t rows, int64_t k, void* turned) {
  const int64_t row = turned_size(rows, 1);
  auto* to = static_cast<uint32_t*>(turned) + k / 2 * row;
  for (int64_t m = 0; m < rows; m += kTileSide) {
    __m512i words[kTileSide] = {};
    for (int64_t i = 0; i < kTileSide && m + i < rows; ++i)
      words[i] = _mm512_loadu_si512(static_cast<const c10::BFloat16*>(x.data) + (m + i) * x.stride0 + k);
    transpose(words, to + m, row);
  }
}

void product_by_tiles(const void* turned, int64_t rows, const void* w, int64_t w_step, int64_t depth, float* sums,
                      int64_t row) {
  const int64_t width = turned_size(rows, 1);
  const auto* weight = static_cast<const c10::BFloat16*>(w);
  const Tiles laid_out;
  for (int64_t m = 0; m < rows; m += 2 * kTileSide) {
    const bool has_two = m + kTileSide < rows;
    const auto* x = static_cast<const uint32_t*>(turned) + m;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; k += kTileDepth) {
      if (m == 0)  // into the second-level cache: the first is full of x
        for (int i = 0; i < kTileOutputs; ++i) __builtin_prefetch(weight + (kTileOutputs + i) * w_step + k, 0, 2);
      _tile_loadd(4, weight + k, w_step * 2);
      _tile_loadd(5, weight + kTileSide * w_step + k, w_step * 2);
      _tile_loadd(6, x + k / 2 * width, width * 4);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      if (!has_two) continue;
      _tile_loadd(7, x + k / 2 * width + kTileSide, width * 4);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    alignas(64) Sums found[4];  // two of outputs for the first rows, two for those behind them
    _tile_stored(0, found[0], 64);
    _tile_stored(1, found[1], 64);
    _tile_stored(2, found[2], 64);
    _tile_stored(3, found[3], 64);
    for (int64_t i = 0; i < (has_two ? 4 : 2); ++i) {
      const int64_t from = m + i / 2 * kTileSide;
      put(found[i], std::min(kTileSide, rows - from), sums + from * row + i % 2 * kTileSide, row);
    }
  }
}

}  // namespace hybrid

#else

namespace hybrid {

bool compiled_with_tiles() { return false; }
bool has_tiles() { return false; }
void turn_for_tiles(const Rows&, int64_t, int64_t, void*) {}
void product_by_tiles(const void*, int64_t, const void*, int64_t, int64_t, float*, int64_t) {}

}  // namespace hybrid
#endif
