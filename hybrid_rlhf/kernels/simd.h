// Vectors of fp32 through the compiler's vector extensions: one source for AVX-512, AVX2, NEON and plain machines.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels.h"

namespace hybrid {

// act with a value of the C++ type of `dtype`.
template <typename Act>
void with_type(DType dtype, Act act) {
  if (dtype == DType::kFloat32) act(float{});
  else if (dtype == DType::kBFloat16) act(c10::BFloat16{});
  else act(c10::Half{});
}

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;  // two registers where the machine's are of 128 bits
#endif

using Floats = float __attribute__((vector_size(kLanes * 4)));
using Ints = int32_t __attribute__((vector_size(kLanes * 4)));
using Words = uint32_t __attribute__((vector_size(kLanes * 4)));
using Shorts = uint16_t __attribute__((vector_size(kLanes * 2)));

inline Floats splat(float x) { return Floats{} + x; }

inline Floats load(const float* from) {
  Floats out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

inline Floats load(const c10::BFloat16* from) {
  Shorts bits;
  std::memcpy(&bits, from, sizeof bits);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);  // a cast between vectors keeps the bits
}

inline Floats load(const c10::Half* from) {
  float wide[kLanes];
  for (int i = 0; i < kLanes; ++i) wide[i] = from[i];
  return load(wide);
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

// The number that is left of x when it is stored as a T.
template <typename T>
Floats rounded(Floats x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, c10::BFloat16>) {  // to the nearest, ties to even; NaN stays NaN
    const Words bits = (Words)x;
    const Floats near = (Floats)((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000);
    return x == x ? near : x;
  } else {
    for (int i = 0; i < kLanes; ++i) x[i] = static_cast<float>(static_cast<T>(x[i]));
    return x;
  }
}

inline void store(c10::BFloat16* to, Floats x) {
  const Shorts bits = __builtin_convertvector((Words)rounded<c10::BFloat16>(x) >> 16, Shorts);
  std::memcpy(to, &bits, sizeof bits);
}

inline void store(c10::Half* to, Floats x) {
  for (int i = 0; i < kLanes; ++i) to[i] = x[i];
}

template <typename T>
void widen(const T* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

template <typename T>
void narrow(const float* from, T* to, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = static_cast<T>(from[i]);
}

// Vectors at the end of a row may be in part: what lies beyond the end is zero, and is not stored.
template <typename T>
Floats load_part(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T part[kLanes] = {};
  std::copy(from, from + count, part);
  return load(part);
}

template <typename T>
void store_part(T* to, Floats x, int64_t count) {
  if (count >= kLanes) {
    store(to, x);
    return;
  }
  T part[kLanes];
  store(part, x);
  std::copy(part, part + count, to);
}

inline float sum(Floats x) {
  using Quad = float __attribute__((vector_size(16)));
  Quad parts[kLanes / 4];
  std::memcpy(parts, &x, sizeof x);
  for (int width = kLanes / 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
  return (parts[0][0] + parts[0][1]) + (parts[0][2] + parts[0][3]);
}

// The sums of four vectors, which together cost little more than one alone.
inline void sums_of_four(const Floats* x, float* to) {
#if defined(__AVX__)
  __m256 halves[4];
  for (int i = 0; i < 4; ++i) {
    __m256 parts[kLanes / 8];
    std::memcpy(parts, x + i, sizeof parts);
    halves[i] = kLanes == 8 ? parts[0] : parts[0] + parts[kLanes / 8 - 1];
  }
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(halves[0], halves[1]), _mm256_hadd_ps(halves[2], halves[3]));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
  for (int i = 0; i < 4; ++i) to[i] = sum(x[i]);
#endif
}

// Ask for a line of memory before it is needed; past the end of an array it does nothing.
inline void prefetch(const void* at) { __builtin_prefetch(at, 0, 3); }

#if defined(__AVX512F__)
// The sum of each of sixteen vectors.
inline __m512 sums_of_sixteen(const __m512* x) {
  __m512 pairs[8], quads[4];
  for (int i = 0; i < 8; ++i)
    pairs[i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]) + _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    quads[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  }
  const auto halves = [](__m512 a, __m512 b) {
    return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
  };
  return halves(halves(quads[0], quads[1]), halves(quads[2], quads[3]));
}
#endif

inline float largest(Floats x) {
  float out = x[0];
  for (int i = 1; i < kLanes; ++i) out = x[i] > out ? x[i] : out;
  return out;
}

inline bool any(Ints mask) {
  uint64_t parts[kLanes / 2], all = 0;
  std::memcpy(parts, &mask, sizeof mask);
  for (uint64_t part : parts) all |= part;
  return all != 0;
}

// e^x, relative error below 3e-7 (the Cephes polynomial on [-ln2/2, ln2/2]); 0 below -87, meant for x <= 0; NaN stays.
inline Floats exponential(Floats x) {
  const Floats low = splat(-87.0f), magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats inside = x < low ? low : x;                       // in this order a NaN comes through
  const Floats shifted = inside * 1.44269504f + magic;
  const Floats n = shifted - magic;
  const Floats r = inside - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints power = ((Ints)shifted - 0x4B400000 + 127) << 23;  // 0x4B400000: bits of magic
  return x < low ? Floats{} : p * (Floats)power;
}

// -- activations of gated MLPs, and their slopes

inline Floats magnitude(Floats x) { return x < 0 ? -x : x; }

// x * sigmoid(x), by e^-|x| so that nothing overflows.
inline Floats silu(Floats x) {
  const Floats e = exponential(-magnitude(x));
  return x * (x < 0 ? e : Floats{} + 1.0f) / (e + 1.0f);
}

// x / 2 * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), tanh u = sign(u) (1 - e^-2|u|) / (1 + e^-2|u|)
inline Floats gelu_tanh(Floats x) {
  const Floats u = 0.7978845608f * (x + 0.044715f * x * x * x);
  const Floats e = exponential(-2.0f * magnitude(u)), t = (1.0f - e) / (1.0f + e);
  return 0.5f * x * (1.0f + (u < 0 ? -t : t));
}

// silu(x) and its derivative s (1 + x (1 - s)), s = sigmoid(x).
inline std::pair<Floats, Floats> silu_and_slope(Floats x) {
  const Floats e = exponential(-magnitude(x)), s = (x < 0 ? e : Floats{} + 1.0f) / (e + 1.0f);
  return {x * s, s * (1.0f + x * (1.0f - s))};
}

// gelu_tanh(x) and its derivative (1 + t) / 2 + x / 2 (1 - t^2) u', t = tanh u.
inline std::pair<Floats, Floats> gelu_tanh_and_slope(Floats x) {
  const Floats u = 0.7978845608f * (x + 0.044715f * x * x * x), steep = 0.7978845608f * (1.0f + 0.134145f * x * x);
  const Floats e = exponential(-2.0f * magnitude(u)), size = (1.0f - e) / (1.0f + e), t = u < 0 ? -size : size;
  return {0.5f * x * (1.0f + t), 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * steep};
}

}  // namespace hybrid
