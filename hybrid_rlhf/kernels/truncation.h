// Top-k, top-p and min-p without sorting a vocabulary; kernels/reference.py: truncated is the definition.
// Rows of scores x are padded with -inf to whole vectors (`padded` numbers).
#pragma once

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

}  // namespace
}  // namespace hybrid
