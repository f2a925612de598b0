// Sampling from logits, one row at a time in the second-level cache; kernels/reference.py: sample is its definition.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"
#include "simd.h"
#include "truncation.h"

namespace hybrid {
namespace {


uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The random word of token i; Word is uint32_t or a vector of them.
template <typename Word>
Word random_word(Word i, uint32_t low, uint32_t high) {
  Word x = i * 0x9E3779B9u + low;
  x = (x ^ (x >> 16)) * 0x7FEB352Du + high;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

struct Draw {
  uint32_t low, high;

  Draw(int64_t stream, int64_t position) {
    const uint64_t state = splitmix64(splitmix64(stream) + static_cast<uint64_t>(position));
    low = static_cast<uint32_t>(state);
    high = static_cast<uint32_t>(state >> 32);
  }

  Floats uniforms(Words tokens) const {
    const Floats u = (__builtin_convertvector(random_word(tokens, low, high), Floats) + 0.5f) * 0x1p-32f;
    const Floats most = splat(1.0f - 0x1p-24f);
    return u > most ? most : u;
  }

  float uniform(int64_t token) const {
    const float word = static_cast<float>(random_word(static_cast<uint32_t>(token), low, high));
    return std::min((word + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
  }
};

// The Gumbel variate of a uniform one: -log(exponential).
float gumbel(float uniform) { return -std::log(-std::log1p(-uniform)); }

struct Best {
  int64_t token = 0;
  float value = kNothing;

  void offer(int64_t i, float x) {
    if (x > value) value = x, token = i;
  }
};

void divide(float* x, int64_t count, float by) {
  if (by != 1)
    for (int64_t i = 0; i < count; ++i) x[i] /= by;
}

// The largest value, or NaN if there is one. The buffer is padded with -inf to whole vectors.
float top_of(const float* x, int64_t padded) {
  Floats top = splat(kNothing);
  Ints broken{};
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Floats v = load(x + i);
    top = v > top ? v : top;
    broken |= v != v;
  }
  return any(broken) ? std::numeric_limits<float>::quiet_NaN() : largest(top);
}

// Gumbel-max over a whole row together with log_sum. As -log(1 - u) >= u, a token can only win where
// u <= e^(score - best value); almost none passes that, so almost no logarithm is taken.
float draw_all(const float* x, int64_t padded, float most, const Draw& draw, Best& best) {
  Words lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  double total = 0;
  float chances[kBlock];
  for (int64_t start = 0; start < padded; start += kBlock) {
    const int64_t end = std::min(start + kBlock, padded);
    float limit = 1.0001f * std::exp(most - best.value);  // the rounding of u and e^x is far below 1e-4
    Floats part{};
    Ints hopeful{};
    for (int64_t i = start; i < end; i += kLanes) {
      const Floats chance = exponential(load(x + i) - most);
      store(chances + i - start, chance);
      part += chance;
      hopeful |= draw.uniforms(lanes + static_cast<uint32_t>(i)) <= chance * limit;
    }
    total += sum(part);
    for (int64_t i = any(hopeful) ? start : end; i < end; ++i) {
      const float uniform = draw.uniform(i);
      if (!(uniform <= chances[i - start] * limit)) continue;
      best.offer(i, x[i] + gumbel(uniform));
      limit = 1.0001f * std::exp(most - best.value);
    }
  }
  return static_cast<float>(std::log(total));
}

// Divide or multiply what was seen, forbid, then the temperature: the scores that tokens are drawn by.
void adjust(const Sampling& call, int64_t b, float* x) {
  const bool* seen = call.seen ? call.seen + b * call.seen_stride : nullptr;
  const bool* forbidden = call.forbidden ? call.forbidden + b * call.forbidden_stride : nullptr;
  const float penalty = call.repetition_penalty;
  for (int64_t i = 0; seen && penalty != 1 && i < call.vocabulary; ++i)
    if (seen[i]) x[i] = x[i] > 0 ? x[i] / penalty : x[i] * penalty;
  for (int64_t i = 0; forbidden && i < call.vocabulary; ++i)
    if (forbidden[i]) x[i] = kNothing;
  if (call.temperature != 0) divide(x, call.vocabulary, call.temperature);
}

bool is_truncated(const Sampling& call) {
  return call.temperature != 0 &&
         ((call.top_k > 0 && call.top_k < call.vocabulary) || call.top_p < 1 || call.min_p > 0);
}

// Marks the tokens that may be drawn by the scores `x`, which are the survivors where a draw has truncated, and says
// the log of the sum of e^raw over them.
float keep(const Sampling& call, int64_t b, const float* raw, const float* x, int64_t padded, Scratch& scratch) {
  if (!is_truncated(call)) keep_from(x, padded, kNothing, scratch.survivors);
  float most = kNothing;
  for (int32_t i : scratch.survivors) {
    call.kept[b * call.vocabulary + i] = true;
    most = std::max(most, raw[i]);
  }
  double total = 0;
  for (int32_t i : scratch.survivors) total += std::exp(raw[i] - most);
  return most + static_cast<float>(std::log(total));
}

// Draws by `x` and says log_sum of it (NaN where it was not needed).
Best draw_row(const Sampling& call, int64_t b, const float* x, int64_t padded, float& log_total, Scratch& scratch) {
  Best best;
  const float most = top_of(x, padded);
  scratch.survivors.clear();
  if (most == kNothing) return best;  // nothing is allowed
  if (call.temperature == 0) {
    best.offer(std::find(x, x + call.vocabulary, most) - x, most);
    return best;
  }
  const Draw draw(call.streams[b], call.positions[b]);
  if (!is_truncated(call)) {
    log_total = draw_all(x, padded, most, draw, best);
    return best;
  }
  truncate(call, x, padded, most, scratch);
  std::sort(scratch.survivors.begin(), scratch.survivors.end());  // the earlier token wins a tie
  for (int32_t i : scratch.survivors) best.offer(i, x[i] + gumbel(draw.uniform(i)));
  return best;
}

void widen_row(const Sampling& call, int64_t b, float* to) {
  with_type(call.logits.dtype, [&](auto type) {
    widen(static_cast<const decltype(type)*>(call.logits.data) + b * call.logits.stride0, to, call.vocabulary);
  });
}

void sample_row(const Sampling& call, int64_t b, Scratch& scratch) {
  const int64_t padded = (call.vocabulary + kLanes - 1) / kLanes * kLanes;
  scratch.raw.resize(padded);
  float* raw = scratch.raw.data();
  widen_row(call, b, raw);
  std::fill(raw + call.vocabulary, raw + padded, kNothing);
  const bool is_adjusted = (call.seen && call.repetition_penalty != 1) || call.forbidden;
  float* scores = raw;
  if (is_adjusted) {
    scratch.scores = scratch.raw;
    scores = scratch.scores.data();
    adjust(call, b, scores);
  }
  if (call.temperature != 0) divide(raw, call.vocabulary, call.temperature);
  const float most = top_of(raw, padded);
  call.tokens[b] = 0;
  call.logprobs[b] = std::numeric_limits<float>::quiet_NaN();
  if (call.kept) std::fill_n(call.kept + b * call.vocabulary, call.vocabulary, false);
  if (!std::isfinite(most)) return;
  float log_total = std::numeric_limits<float>::quiet_NaN();
  const Best best = draw_row(call, b, scores, padded, log_total, scratch);
  float normaliser;
  if (call.kept) {
    normaliser = keep(call, b, raw, scores, padded, scratch);
  } else {
    if (is_adjusted || std::isnan(log_total)) log_total = log_sum(raw, padded, most);
    normaliser = most + log_total;
  }
  const float logprob = raw[best.token] - normaliser;
  if (!std::isfinite(logprob)) return;
  call.tokens[b] = best.token;
  call.logprobs[b] = logprob;
}

}  // namespace

void sample(const Sampling& call) {
#pragma omp parallel num_threads(static_cast<int>(std::min<int64_t>(call.threads, call.batch)))
  {
    thread_local Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t b = 0; b < call.batch; ++b) sample_row(call, b, scratch);
  }
}

}  // namespace hybrid
