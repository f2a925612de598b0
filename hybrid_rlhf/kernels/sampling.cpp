// Sampling from logits, one row at a time in the second-level cache; kernels/reference.py: sample is its definition.
// Top-k, top-p and min-p do without sorting a vocabulary (truncated is their definition): rows of scores x are padded with
// -inf to whole vectors (`padded` numbers).
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "kernels.h"
#include "simd.h"

namespace hybrid {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 32 * kLanes;  // tokens whose weights are summed in fp32 before they join the fp64 sum

struct Scratch {
  std::vector<float> raw, scores, ranked;
  std::vector<int32_t> survivors;
};

// log of the sum of e^(x - most), fp32 inside a block and fp64 over the blocks.
float log_sum(const float* x, int64_t padded, float most) {
  double total = 0;
  for (int64_t start = 0; start < padded; start += kBlock) {
    Floats part{};
    for (int64_t i = start; i < std::min(start + kBlock, padded); i += kLanes) part += exponential(load(x + i) - most);
    total += sum(part);
  }
  return static_cast<float>(std::log(total));
}

// A lower bound of the k-th largest value: the k-th largest of the maxima of blocks. -inf with too few blocks.
float below_kth(const float* x, int64_t padded, int64_t k, std::vector<float>& maxima) {
  constexpr int64_t kSpan = 4 * kLanes;
  maxima.clear();
  for (int64_t start = 0; start < padded; start += kSpan) {
    Floats top = splat(kNothing);
    for (int64_t i = start; i < std::min(start + kSpan, padded); i += kLanes) {
      const Floats v = load(x + i);
      top = v > top ? v : top;
    }
    maxima.push_back(largest(top));
  }
  if (static_cast<int64_t>(maxima.size()) < k) return kNothing;
  std::nth_element(maxima.begin(), maxima.begin() + k - 1, maxima.end(), std::greater<>());
  return maxima[k - 1];
}

// Tokens whose score is not below `floor`, and above -inf, in order.
void keep_from(const float* x, int64_t padded, float floor, std::vector<int32_t>& survivors) {
  survivors.clear();
  for (int64_t start = 0; start < padded; start += kLanes) {
    const Floats v = load(x + start);
    if (!any((v >= floor) & (v > kNothing))) continue;
    for (int64_t i = start; i < start + kLanes; ++i)
      if (x[i] >= floor && x[i] > kNothing) survivors.push_back(static_cast<int32_t>(i));
  }
}

void keep_top_k(const float* x, int64_t padded, int64_t k, Scratch& scratch) {
  auto& survivors = scratch.survivors;
  auto& ranked = scratch.ranked;
  keep_from(x, padded, below_kth(x, padded, k, ranked), survivors);
  if (static_cast<int64_t>(survivors.size()) <= k) return;
  ranked.clear();
  for (int32_t i : survivors) ranked.push_back(x[i]);
  std::nth_element(ranked.begin(), ranked.begin() + k - 1, ranked.end(), std::greater<>());
  const float kth = ranked[k - 1];
  std::erase_if(survivors, [&](int32_t i) { return x[i] < kth; });
}

// Of tokens between `first` and `last`, those needed, likeliest first (the earlier one where equal), for a weight of
// `wanted`; at least one. Returns the end of what is kept.
int32_t* keep_weight(const float* x, float most, double wanted, int32_t* first, int32_t* last) {
  const auto before = [&](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; };
  while (last - first > 1) {
    int32_t* middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, before);
    double upper = 0;
    for (int32_t* it = first; it != middle; ++it) upper += std::exp(x[*it] - most);
    if (upper >= wanted) last = middle;
    else wanted -= upper, first = middle;
  }
  return last;
}

// The smallest set, likeliest first, whose weight, the sum of e^(x - most), reaches p of `total`; of the weight of all
// survivors where total is 0. Bins of equal width in the score find the few tokens among which it ends without a sort.
void keep_top_p(const float* x, float most, float p, double total, Scratch& scratch) {
  constexpr int kBins = 2048;
  constexpr float kPerBin = 100.0f;  // bins to one unit of score; the last takes what is below e^-20
  auto& survivors = scratch.survivors;
  auto& weights = scratch.ranked;
  const int64_t count = survivors.size();
  weights.assign((count + kLanes - 1) / kLanes * kLanes, kNothing);
  for (int64_t j = 0; j < count; ++j) weights[j] = x[survivors[j]] - most;
  for (int64_t j = 0; j < count; j += kLanes) store(&weights[j], exponential(load(&weights[j])));
  const auto bin_of = [&](int32_t i) { return static_cast<int>(std::min((most - x[i]) * kPerBin, kBins - 1.0f)); };
  double bins[kBins] = {};
  for (int64_t j = 0; j < count; ++j) bins[bin_of(survivors[j])] += weights[j];
  if (total == 0)
    for (double bin : bins) total += bin;
  double wanted = p * total;
  int last_bin = 0;
  for (; last_bin < kBins - 1 && bins[last_bin] < wanted; ++last_bin) wanted -= bins[last_bin];
  std::erase_if(survivors, [&](int32_t i) { return bin_of(i) > last_bin; });
  const auto edge = std::partition(survivors.begin(), survivors.end(), [&](int32_t i) { return bin_of(i) < last_bin; });
  int32_t* first = survivors.data() + (edge - survivors.begin());
  int32_t* kept = keep_weight(x, most, wanted, first, survivors.data() + survivors.size());
  survivors.resize(kept - survivors.data());
}

void truncate(const Sampling& call, const float* x, int64_t padded, float most, Scratch& scratch) {
  const bool has_top_p = call.top_p < 1;
  const float min_floor = call.min_p > 0 ? most + std::log(call.min_p) : kNothing;
  double total = 0;
  if (call.top_k > 0 && call.top_k < call.vocabulary) keep_top_k(x, padded, call.top_k, scratch);
  else if (has_top_p) {
    // A token less likely than (1 - p) / V has more than p before it; half of that leaves room for rounding.
    const float log_total = log_sum(x, padded, most);
    total = std::exp(static_cast<double>(log_total));
    const float least = std::log(0.5f * (1 - call.top_p) / static_cast<float>(call.vocabulary));
    keep_from(x, padded, most + log_total + least, scratch.survivors);
  } else keep_from(x, padded, min_floor, scratch.survivors);
  if (has_top_p) keep_top_p(x, most, call.top_p, total, scratch);
  std::erase_if(scratch.survivors, [&](int32_t i) { return x[i] < min_floor; });
}

// -- the draw

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
