// Decode attention at query length 1 over pages; kernels/reference.py: decode_attention is its definition.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "simd.h"

namespace hybrid {
namespace {

constexpr int64_t kTile = 64;  // columns: their keys stay in the first-level cache while every query head reads them
constexpr int64_t kAhead = 16;  // columns asked for before they are read, for the processor foresees little
constexpr int kSums = 8;       // accumulators that fit the registers beside what they are fed from
constexpr int64_t kWorthThreads = 1 << 17;  // products below which waking other threads costs more than it saves

template <typename From, typename To>
void convert(const From* from, To* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<To>(static_cast<float>(from[i]));
}

void copy(const Rows& from, int64_t from_at, const Rows& to, int64_t to_at, int64_t count) {
  with_type(from.dtype, [&](auto f) {
    with_type(to.dtype, [&](auto t) {
      convert(static_cast<const decltype(f)*>(from.data) + from_at, static_cast<decltype(t)*>(to.data) + to_at, count);
    });
  });
}

// scores[h][c] = query[h] . keys[c] for Heads query heads and `count` columns.
template <int Heads, typename T>
void dots(const float* query, int64_t dim, const T* keys, int64_t step, int64_t count, float* scores, int64_t row) {
  constexpr int kColumns = kSums / Heads;
  const int64_t whole = dim / kLanes * kLanes;
  for (int64_t c = 0; c < count; c += kColumns) {
    const T* column[kColumns];
    for (int j = 0; j < kColumns; ++j) column[j] = keys + std::min(c + j, count - 1) * step;
    Floats sums[Heads][kColumns] = {};
    for (int64_t d = 0; d < whole; d += kLanes) {
      Floats q[Heads];
      for (int h = 0; h < Heads; ++h) q[h] = load(query + h * dim + d);
      for (int j = 0; j < kColumns; ++j) {
        prefetch(column[j] + kAhead * step + d);
        const Floats k = load(column[j] + d);
        for (int h = 0; h < Heads; ++h) sums[h][j] += q[h] * k;
      }
    }
    float totals[kSums];
    for (int i = 0; i < kSums; i += 4) sums_of_four(&sums[0][0] + i, totals + i);
    for (int64_t d = whole; d < dim; ++d)
      for (int i = 0; i < kSums; ++i)
        totals[i] += query[i / kColumns * dim + d] * static_cast<float>(column[i % kColumns][d]);
    const int columns = static_cast<int>(std::min<int64_t>(kColumns, count - c));
    for (int h = 0; h < Heads; ++h)
      for (int j = 0; j < columns; ++j) scores[h * row + c + j] = totals[h * kColumns + j];
  }
}

#if defined(__AVX512F__)
template <typename T>
Floats multiplied(Floats sum, const float* q, const T* k) {
  return load(q) * load(k) + sum;
}

#if defined(__AVX512BF16__)
inline Floats multiplied(Floats sum, const c10::BFloat16* q, const c10::BFloat16* k) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(q), (__m512bh)_mm512_loadu_si512(k));
}
#endif

// scores[c] = query . keys[c], sixteen columns at once, whose sums are then added up together. `dim` is a multiple of
// the numbers in a register: 32 where both are bf16, which the processor multiplies itself, else 16.
template <typename Q, typename T>
void dots_by_sixteen(const Q* query, int64_t dim, const T* keys, int64_t step, int64_t count, float* scores) {
  constexpr int64_t kNumbers = sizeof(Q) == 2 ? 32 : 16;
  for (int64_t c = 0; c < count; c += 16) {
    Floats sums[16] = {};
    const T* column[16];
    for (int j = 0; j < 16; ++j) column[j] = keys + std::min(c + j, count - 1) * step;
    for (int64_t d = 0; d < dim; d += kNumbers)
      for (int j = 0; j < 16; ++j) {
        prefetch(column[j] + kAhead * step + d);
        sums[j] = multiplied(sums[j], query + d, column[j] + d);
      }
    const auto inside = static_cast<__mmask16>(count - c >= 16 ? 0xFFFF : (1 << (count - c)) - 1);
    _mm512_mask_storeu_ps(scores + c, inside, sums_of_sixteen((const __m512*)sums));
  }
}
#endif

// out[h][d...] += sum over `count` columns of weights[h][c] * values[c][d...], for Blocks vectors of d.
template <int Heads, int Blocks, typename T>
void mix_block(const float* weights, int64_t row, const T* values, int64_t step, int64_t count, float* out,
               int64_t dim) {
  Floats sums[Heads][Blocks];
  for (int h = 0; h < Heads; ++h)
    for (int j = 0; j < Blocks; ++j) sums[h][j] = load(out + h * dim + j * kLanes);
  for (int64_t c = 0; c < count; ++c)
    for (int j = 0; j < Blocks; ++j) {
      prefetch(values + (c + kAhead) * step + j * kLanes);
      const Floats v = load(values + c * step + j * kLanes);
      for (int h = 0; h < Heads; ++h) sums[h][j] += weights[h * row + c] * v;
    }
  for (int h = 0; h < Heads; ++h)
    for (int j = 0; j < Blocks; ++j) store(out + h * dim + j * kLanes, sums[h][j]);
}

// out[h] += sum over `count` columns of weights[h][c] * values[c].
template <int Heads, int Blocks = kSums / Heads, typename T>
void mix(const float* weights, int64_t row, const T* values, int64_t step, int64_t count, float* out, int64_t dim,
         int64_t d = 0) {
  for (; d + Blocks * kLanes <= dim; d += Blocks * kLanes)
    mix_block<Heads, Blocks>(weights, row, values + d, step, count, out + d, dim);
  if constexpr (Blocks > 1) {
    mix<Heads, Blocks / 2>(weights, row, values, step, count, out, dim, d);
  } else {
    for (int64_t c = 0; c < count && d < dim; ++c)
      for (int h = 0; h < Heads; ++h)
        for (int64_t e = d; e < dim; ++e)
          out[h * dim + e] += weights[h * row + c] * static_cast<float>(values[c * step + e]);
  }
}

// Calls act(first head, block size as a constant) for blocks of 4, 2 and 1 that cover `heads`.
template <typename Act>
void by_blocks(int64_t heads, Act act) {
  int64_t h = 0;
  for (; h + 4 <= heads; h += 4) act(h, std::integral_constant<int, 4>{});
  for (; h + 2 <= heads; h += 2) act(h, std::integral_constant<int, 2>{});
  for (; h < heads; ++h) act(h, std::integral_constant<int, 1>{});
}

void hide(float* scores, const bool* mask, int64_t count) {
  for (int64_t c = 0; c < count; ++c)
    if (!mask[c]) scores[c] = -std::numeric_limits<float>::infinity();
}

// Scores to softmax weights in place, `sink` (or -inf) joining the sum. The buffer reaches to a multiple of kLanes.
void softmax(float* scores, int64_t count, float softcap, float scaling, const bool* mask, float sink) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  for (int64_t c = 0; c < count; ++c) scores[c] *= scaling;
  if (softcap != 0)
    for (int64_t c = 0; c < count; ++c) scores[c] = softcap * std::tanh(scores[c] / softcap);
  if (mask) hide(scores, mask, count);
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  std::fill(scores + count, scores + padded, kNothing);
  Floats top = splat(sink);
  for (int64_t c = 0; c < padded; c += kLanes) {
    const Floats x = load(scores + c);
    top = x > top ? x : top;
  }
  const float most = largest(top);
  Floats total{};
  for (int64_t c = 0; c < padded; c += kLanes) {
    const Floats e = exponential(load(scores + c) - most);
    store(scores + c, e);
    total += e;
  }
  const float inverse = 1.0f / (sum(total) + (sink == kNothing ? 0.0f : std::exp(sink - most)));
  for (int64_t c = 0; c < padded; c += kLanes) store(scores + c, load(scores + c) * inverse);
}

struct Scratch {
  std::vector<float> query, out, scores;
};

// scores[h][c] = query[h] . keys[c] for `group` query heads `query_step` apart, with rows of `row` numbers.
template <typename Q, typename T>
void score(const Q* query, int64_t query_step, int64_t group, int64_t dim, const T* keys, int64_t step, int64_t count,
           float* scores, int64_t row) {
#if defined(__AVX512F__)
  if (dim % (sizeof(Q) == 2 ? 32 : 16) == 0) {
    for (int64_t c = 0; c < count; c += kTile)
      for (int64_t h = 0; h < group; ++h)
        dots_by_sixteen(query + h * query_step, dim, keys + c * step, step, std::min(kTile, count - c),
                        scores + h * row + c);
    return;
  }
#endif
  if constexpr (std::is_same_v<Q, float>)
    for (int64_t c = 0; c < count; c += kTile)
      by_blocks(group, [&](int64_t h, auto heads) {
        dots<heads>(query + h * dim, dim, keys + c * step, step, std::min(kTile, count - c), scores + h * row + c, row);
      });
}

// Calls act(numbers of the first column, that column after `first`, columns) for the pieces of head k's columns first to
// first + count - 1 of row b that lie side by side, in their order. step: of a column of `cache`.
template <typename T, typename Act>
void by_pages(const Attention& call, const Rows& cache, int64_t step, T* numbers, int64_t b, int64_t k, int64_t first,
              int64_t count, Act act) {
  const int64_t* pages = call.pages + b * call.pages_stride;
  for (int64_t c = first; c < first + count;) {
    const int64_t page = c / call.page_columns, place = c % call.page_columns;
    const int64_t columns = std::min(call.page_columns - place, first + count - c);
    act(numbers + pages[page] * cache.stride0 + k * cache.stride1 + place * step, c - first, columns);
    c += columns;
  }
}

// Whether a query of these is read by bf16 products, of which the processor makes two at once.
template <typename T>
bool is_read_in_bf16(const Attention& call) {
#if defined(__AVX512BF16__)
  return std::is_same_v<T, c10::BFloat16> && call.query.dtype == DType::kBFloat16 && call.dim % 32 == 0;
#else
  return false;
#endif
}

template <typename T>
void score_row(const Attention& call, int64_t b, int64_t k, const T* keys, int64_t first, int64_t count, int64_t row,
               Scratch& scratch) {
  const int64_t group = call.heads / call.kv_heads, query = b * call.query.stride0 + k * group * call.query.stride1;
  float* scores = scratch.scores.data();
  if (!is_read_in_bf16<T>(call))
    for (int64_t h = 0; h < group; ++h)
      copy(call.query, query + h * call.query.stride1, {scratch.query.data(), DType::kFloat32, 0, 0}, h * call.dim,
           call.dim);
  by_pages(call, call.keys, call.key_step, keys, b, k, first, count, [&](const T* some, int64_t at, int64_t columns) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, c10::BFloat16>)
      if (is_read_in_bf16<T>(call)) {
        score(static_cast<const c10::BFloat16*>(call.query.data) + query, call.query.stride1, group, call.dim, some,
              call.key_step, columns, scores + at, row);
        return;
      }
#endif
    score(scratch.query.data(), call.dim, group, call.dim, some, call.key_step, columns, scores + at, row);
  });
}

void attend(const Attention& call, int64_t b, int64_t k, int64_t first, int64_t count, Scratch& scratch) {
  const int64_t group = call.heads / call.kv_heads, value_dim = call.value_dim;
  const int64_t row = (count + kLanes - 1) / kLanes * kLanes;
  scratch.query.resize(group * call.dim);
  scratch.out.assign(group * value_dim, 0.0f);
  scratch.scores.resize(group * row);
  float *out = scratch.out.data(), *scores = scratch.scores.data();
  with_type(call.keys.dtype, [&](auto type) {
    score_row(call, b, k, static_cast<const decltype(type)*>(call.keys.data), first, count, row, scratch);
  });
  const bool* mask = call.mask ? call.mask + b * call.mask_stride + first : nullptr;
  with_type(call.values.dtype, [&](auto type) {
    using T = decltype(type);
    const auto with_pieces = [&](int64_t most, auto act) {
      by_pages(call, call.values, call.value_step, static_cast<const T*>(call.values.data), b, k, first,
               std::min(most, count), act);
    };
    with_pieces(kAhead, [&](const T* values, int64_t, int64_t columns) {
      for (int64_t c = 0; c < columns; ++c)
        for (int64_t d = 0; d < value_dim; d += kLanes) prefetch(values + c * call.value_step + d);
    });
    for (int64_t h = 0; h < group; ++h)
      softmax(scores + h * row, count, call.softcap, call.scaling, mask,
              call.sinks ? call.sinks[k * group + h] : -std::numeric_limits<float>::infinity());
    with_pieces(count, [&](const T* values, int64_t at, int64_t columns) {
      for (int64_t c = 0; c < columns; c += kTile)
        by_blocks(group, [&](int64_t h, auto heads) {
          mix<heads>(scores + h * row + at + c, row, values + c * call.value_step, call.value_step,
                     std::min(kTile, columns - c), out + h * value_dim, value_dim);
        });
    });
  });
}

void write_out(const Attention& call, int64_t b, int64_t k, const Scratch& scratch) {
  const int64_t group = call.heads / call.kv_heads;
  for (int64_t h = 0; h < group; ++h)
    copy({const_cast<float*>(scratch.out.data()), DType::kFloat32, 0, 0}, h * call.value_dim, call.out,
         b * call.out.stride0 + (k * group + h) * call.out.stride1, call.value_dim);
}

// One (row, key head): write the new token, then attend, and write the group's outputs.
void work(const Attention& call, int64_t b, int64_t k, Scratch& scratch) {
  const int64_t position = call.positions[b], group = call.heads / call.kv_heads;
  int64_t first = 0, end = position + 1;  // of the columns that may be read; none where idle
  if (position >= 0) {
    const int64_t page = call.pages[b * call.pages_stride + position / call.page_columns];
    const int64_t place = position % call.page_columns;
    copy(call.key, b * call.key.stride0 + k * call.key.stride1, call.keys,
         page * call.keys.stride0 + k * call.keys.stride1 + place * call.key_step, call.dim);
    copy(call.value, b * call.value.stride0 + k * call.value.stride1, call.values,
         page * call.values.stride0 + k * call.values.stride1 + place * call.value_step, call.value_dim);
    if (call.mask) {
      const bool* mask = call.mask + b * call.mask_stride;
      while (first < end && !mask[first]) ++first;
      while (end > first && !mask[end - 1]) --end;
    }
  }
  if (end > first) attend(call, b, k, first, end - first, scratch);
  else scratch.out.assign(group * call.value_dim, 0.0f);
  write_out(call, b, k, scratch);
}

}  // namespace

void attend_one(const Attention& call, int64_t task) {
  thread_local Scratch scratch;
  work(call, task / call.kv_heads, task % call.kv_heads, scratch);
}

void decode_attention(const Attention& call) {
  int64_t columns = 0;
  for (int64_t b = 0; b < call.batch; ++b) columns += call.positions[b] + 1;
  const bool is_small = columns * call.heads * (call.dim + call.value_dim) < kWorthThreads;
  const int64_t tasks = call.batch * call.kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(is_small ? 1 : call.threads)
  for (int64_t task = 0; task < tasks; ++task) attend_one(call, task);
}

}  // namespace hybrid
