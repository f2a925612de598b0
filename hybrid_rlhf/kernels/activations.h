// Activations of gated MLPs on vectors, and their slopes.
#pragma once

#include <utility>

#include "simd.h"

namespace hybrid {

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
