// Tensors to the kernels' plain interface. Signatures and meaning: kernels/reference.py.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels.h"

namespace hybrid {
namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

constexpr int64_t kFewDots = 48;  // rows above which another product, torch's or the packed one, is faster

DType dtype_of(const Tensor& x, const char* name) {
  TORCH_CHECK_TYPE(x.device().is_cpu(), name, " is on ", x.device(), "; this kernel reads cpu tensors");
  switch (x.scalar_type()) {
    case at::kFloat: return DType::kFloat32;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kHalf: return DType::kHalf;
    default:
      TORCH_CHECK_TYPE(false, name, " is ", x.scalar_type(), "; this kernel reads float32, bfloat16 and float16");
  }
}

Rows rows(const Tensor& x, const char* name, int64_t dims) {
  TORCH_CHECK_VALUE(x.dim() == dims, name, " has ", x.dim(), " dimensions, not ", dims);
  TORCH_CHECK_VALUE(x.size(-1) <= 1 || x.stride(-1) == 1, name, ": its last dimension must be dense");
  return {x.data_ptr(), dtype_of(x, name), x.stride(0), dims > 2 ? x.stride(1) : 0};
}

// A new token's tensor as the kernel can read it; models hand on views of any strides.
Tensor dense(const Tensor& x) { return x.size(-1) <= 1 || x.stride(-1) == 1 ? x : x.contiguous(); }

Tensor numbers(const Tensor& x, const char* name, int64_t count) {
  TORCH_CHECK_VALUE(x.dim() == 1 && x.size(0) == count && x.scalar_type() == at::kLong && x.device().is_cpu(), name,
                    " must be (", count, ",) int64 on the cpu");
  return x.contiguous();
}

float* floats(const Tensor& x, const char* name, int64_t count) {
  TORCH_CHECK_VALUE(x.is_contiguous() && x.scalar_type() == at::kFloat && x.numel() == count && x.device().is_cpu(),
                    name, " must be float32 on the cpu, dense, of ", count, " numbers");
  return x.data_ptr<float>();
}

const bool* flags(const Maybe& x, const char* name, int64_t batch, int64_t count) {
  if (!x) return nullptr;
  TORCH_CHECK_VALUE(x->dim() == 2 && x->size(0) == batch && x->size(1) == count && x->scalar_type() == at::kBool &&
                        x->device().is_cpu() && (count <= 1 || x->stride(1) == 1),
                    name, " must be (", batch, ", ", count, ") bool on the cpu with a dense last dimension");
  return x->const_data_ptr<bool>();
}

int64_t stride_of(const Maybe& x) { return x ? x->stride(0) : 0; }

// The pages of each row of a decode step.
Tensor page_table(const Tensor& x, int64_t count) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(0) == count && x.scalar_type() == at::kLong && x.device().is_cpu(),
                    "pages must be (", count, ", N) int64 on the cpu");
  return x.contiguous();
}

// Pages and positions of a decode step lie in the cache, or an error.
void check_pages(const Attention& call, int64_t most) {
  const int64_t columns = call.pages_stride * call.page_columns;
  TORCH_CHECK_VALUE(call.width <= columns, "width is ", call.width, "; the rows' pages have ", columns, " columns");
  for (int64_t b = 0; b < call.batch; ++b) {
    TORCH_CHECK_INDEX(call.positions[b] >= -1 && call.positions[b] < call.width, "row ", b, " is at position ",
                      call.positions[b], "; width is ", call.width);
    for (int64_t i = 0; i * call.page_columns <= call.positions[b]; ++i) {
      const int64_t page = call.pages[b * call.pages_stride + i];
      TORCH_CHECK_INDEX(page >= 0 && page < most, "row ", b, " is in page ", page, " of ", most);
    }
  }
}

// -- Attention of whole sequences as Python sees it

Tokens tokens(const Tensor& x, const char* name, DType dtype) {
  TORCH_CHECK_VALUE(x.dim() == 4 && (x.size(3) <= 1 || x.stride(3) == 1), name, " must be (B, H, T, D), D dense");
  TORCH_CHECK_TYPE(dtype_of(x, name) == dtype, name, " is ", x.scalar_type(), ", unlike query");
  return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

Tensor like(const Tensor& x) {  // (B, H, T, D), each token's heads side by side as models have them
  return at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options()).transpose(1, 2);
}

Sequences call_of(const Tensor& query, const Tensor& key, const Tensor& value, double scaling) {
  Sequences call{};
  call.dtype = dtype_of(query, "query");
  call.query = tokens(query, "query", call.dtype), call.key = tokens(key, "key", call.dtype);
  call.value = tokens(value, "value", call.dtype);
  call.batch = query.size(0), call.heads = query.size(1), call.length = query.size(2), call.dim = query.size(3);
  call.kv_heads = key.size(1), call.value_dim = value.size(3), call.scaling = static_cast<float>(scaling);
  TORCH_CHECK_VALUE(key.size(0) == call.batch && value.size(0) == call.batch && value.size(1) == call.kv_heads &&
                        key.size(2) == call.length && value.size(2) == call.length && key.size(3) == call.dim &&
                        call.kv_heads > 0 && call.heads % call.kv_heads == 0 && call.dim > 0 && call.value_dim > 0,
                    "shapes do not fit: query ", query.sizes(), ", key ", key.sizes(), ", value ", value.sizes());
  call.threads = at::get_num_threads();
  return call;
}

std::tuple<Tensor, Tensor> attended(const Tensor& new_query, const Tensor& new_key, const Tensor& new_value,
                                    double scaling, bool with_normalisers) {
  const Tensor query = dense(new_query), key = dense(new_key), value = dense(new_value);
  Sequences call = call_of(query, key, value, scaling);
  Tensor out = at::empty({call.batch, call.length, call.heads, call.value_dim}, query.options());
  call.out = tokens(out.transpose(1, 2), "out", call.dtype);
  Tensor normalisers;
  if (with_normalisers) {
    normalisers = at::empty({call.batch, call.heads, call.length}, query.options().dtype(at::kFloat));
    call.normalisers = normalisers.data_ptr<float>();
  }
  pybind11::gil_scoped_release unlocked;
  hybrid::causal_attention(call);
  return {out, normalisers};
}

std::tuple<Tensor, Tensor, Tensor> gradients(const Tensor& new_gradient, const Tensor& new_query,
                                            const Tensor& new_key, const Tensor& new_value,
                                            const Tensor& normalisers, double scaling) {
  const Tensor query = dense(new_query), key = dense(new_key), value = dense(new_value);
  const Tensor gradient = dense(new_gradient.transpose(1, 2));
  Sequences call = call_of(query, key, value, scaling);
  TORCH_CHECK_VALUE(gradient.dim() == 4 && gradient.size(0) == call.batch && gradient.size(1) == call.heads &&
                        gradient.size(2) == call.length && gradient.size(3) == call.value_dim,
                    "the gradient must be (B, T, H, Dv), not ", new_gradient.sizes());
  call.out = tokens(gradient, "gradient", call.dtype);
  call.normalisers = floats(normalisers, "normalisers", call.batch * call.heads * call.length);
  const Tensor by_query = like(query), by_key = like(key), by_value = like(value);
  call.query_gradient = tokens(by_query, "query", call.dtype);
  call.key_gradient = tokens(by_key, "key", call.dtype), call.value_gradient = tokens(by_value, "value", call.dtype);
  pybind11::gil_scoped_release unlocked;
  hybrid::causal_attention_backward(call);
  return {by_query, by_key, by_value};
}

// -- The backward passes of elementwise.cpp's chains as Python sees them

std::tuple<Tensor, Maybe> norm_gradients(const Tensor& gradient, const Tensor& input, const Tensor& weight, double eps,
                                         bool adds_one, bool with_weight) {
  TORCH_CHECK_VALUE(weight.dim() == 1 && weight.is_contiguous() && input.dim() > 0 && input.size(-1) == weight.size(0) &&
                        gradient.sizes() == input.sizes() && weight.scalar_type() == input.scalar_type() &&
                        gradient.scalar_type() == input.scalar_type(),
                    "shapes or dtypes do not fit: gradient ", gradient.sizes(), ", input ", input.sizes());
  const Tensor x = dense(input.reshape({-1, weight.size(0)})), by_out = dense(gradient.reshape({-1, weight.size(0)}));
  const Tensor out = at::empty({x.size(0), x.size(1)}, x.options());
  const int threads = at::get_num_threads();
  Tensor shares;
  NormGradient call{};
  if (with_weight) {
    shares = at::empty({threads, x.size(1)}, x.options().dtype(at::kFloat));
    call.by_weight = shares.data_ptr<float>();
  }
  call.norm = {x.size(0), x.size(1), rows(x, "input", 2), rows(out, "out", 2), weight.data_ptr(),
               static_cast<float>(eps), adds_one, threads};
  call.gradient = rows(by_out, "gradient", 2);
  rms_norm_backward(call);
  Maybe by_weight;
  if (with_weight) by_weight = shares.sum(0).to(weight.scalar_type());
  return {out.view(input.sizes()), by_weight};
}

std::tuple<Tensor, Tensor> gate_gradients(const Tensor& new_gradient, const Tensor& new_gate, const Tensor& new_up,
                                          bool is_gelu) {
  for (const Tensor& other : {new_up, new_gradient})
    TORCH_CHECK_VALUE(new_gate.sizes() == other.sizes() && new_gate.scalar_type() == other.scalar_type(),
                      "shapes or dtypes do not fit: gate ", new_gate.sizes(), " and ", other.sizes());
  const Tensor gate = new_gate.contiguous(), up = new_up.contiguous(), gradient = new_gradient.contiguous();
  const Tensor by_gate = at::empty(gate.sizes(), gate.options()), by_up = at::empty(gate.sizes(), gate.options());
  gated_backward({{gate.numel(), gate.data_ptr(), up.data_ptr(), by_gate.data_ptr(), dtype_of(gate, "gate"), is_gelu,
                   at::get_num_threads()},
                  gradient.data_ptr(),
                  by_up.data_ptr()});
  return {by_gate, by_up};
}

// -- A decoder layer as an object that knows its weights; kernels/reference.py: DecodeLayer says what it does

// Multiplications of a layer (weights times rows) whose slower product costs less than going back to Python between the
// operations: about 0.1 ms a layer, beside 1 to 2 ps more for each multiplication.
constexpr int64_t kSmallWork = 50'000'000;

using MaybeAdapter = std::optional<std::tuple<Tensor, Tensor, double>>;  // down, up, scaling

Activation activation_of(const std::string& name, bool has_gate) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  TORCH_CHECK_VALUE(name == "relu" && !has_gate, "no kernel has the activation ", name, has_gate ? " of a gate" : "");
  return Activation::kRelu;
}

class Layer {
 public:
  Layer(const std::vector<Maybe>& weights, const std::vector<Maybe>& biases, std::vector<Maybe> norms,
        std::vector<Maybe> norm_biases, std::vector<MaybeAdapter> adapters, double eps, bool adds_one, double scaling,
        const std::string& activation)
      : norms_(std::move(norms)), norm_biases_(std::move(norm_biases)), adapters_(std::move(adapters)),
        eps_(static_cast<float>(eps)), adds_one_(adds_one), scaling_(static_cast<float>(scaling)) {
    TORCH_CHECK_VALUE(weights.size() == 7 && biases.size() == 7 && norms_.size() == 4 && norms_[0] && norms_[1] &&
                          norm_biases_.size() == 4 && adapters_.size() == 7,
                      "a layer has seven matrices, seven biases and adapters or none, and four norms and biases of "
                      "norms, of which two norms must be there");
    for (int i = 0; i < 7; ++i) {
      TORCH_CHECK_VALUE(weights[i] || i == kGate, "only the gate of a layer may be missing");
      weights_.push_back(weights[i] ? *weights[i] : Tensor());
    }
    activation_ = activation_of(activation, weights_[kGate].defined());
    for (size_t i = 0; i < 7; ++i) {
      check_matrix(i, biases[i]);
      if (adapters_[i]) {  // some ways to begin an adapter leave it transposed
        auto& [down, up, scaling] = *adapters_[i];
        down = dense(down), up = dense(up);
      }
      biases_.push_back(biases[i] ? Maybe(biases[i]->to(at::kFloat).contiguous()) : Maybe());
    }
    check_norms();
    const int64_t hidden = weights_[0].size(1);
    TORCH_CHECK_VALUE(weights_[1].size(1) == hidden && weights_[2].size(1) == hidden && weights_[5].size(1) == hidden &&
                          (!weights_[kGate].defined() || weights_[kGate].sizes() == weights_[5].sizes()) &&
                          weights_[3].size(0) == hidden && weights_[6].size(0) == hidden &&
                          weights_[6].size(1) == weights_[5].size(0) && norms_[0]->numel() == hidden &&
                          norms_[1]->numel() == hidden,
                      "the weights of the layer do not fit each other");
  }

  int64_t max_rows() const {
    const at::ScalarType dtype = weights_[0].scalar_type();
    if (dtype != at::kFloat && (dtype != at::kBFloat16 || !has_dot_linear(DType::kBFloat16))) return 0;
    int64_t count = 0;
    for (const Tensor& weight : weights_) count += weight.defined() ? weight.numel() : 0;
    return std::max(kFewDots, kSmallWork / std::max<int64_t>(count, 1));
  }

  Tensor run(const Tensor& hidden, const Maybe& cosines, const Maybe& sines, const Tensor& keys, const Tensor& values,
             const Tensor& pages, const Tensor& positions, int64_t width) const {
    const Tensor x = dense(hidden.reshape({-1, weights_[0].size(1)}));
    const int64_t count = x.size(0), dim = keys.size(3), kv_heads = keys.size(1);
    const int64_t heads = weights_[0].size(0) / dim, inner = weights_[5].size(0), size = weights_[0].size(1);
    check(x, cosines, sines, keys, values, count, dim, kv_heads);
    const Tensor table = page_table(pages, count), columns = numbers(positions, "positions", count);
    // what one operation writes and a later one reads, side by side
    const int64_t room = 3 * size + 2 * heads * dim + 2 * kv_heads * dim + 2 * inner + ranks();
    Tensor out = at::empty({count, size}, x.options()), scratch = at::empty({room, count}, x.options());
    int64_t used = 0;
    const auto part = [&](int64_t wide, int64_t stride1) {
      char* at = static_cast<char*>(scratch.data_ptr()) + used * count * x.element_size();
      used += wide;
      return Rows{at, dtype_of(x, "hidden"), wide, stride1};
    };
    DecodeLayer call{};
    call.rows = count, call.dtype = dtype_of(x, "hidden"), call.activation = activation_, call.threads = at::get_num_threads();
    const Rows normed = part(size, 0), middle = part(size, 0), normed2 = part(size, 0);
    const Rows query = part(heads * dim, dim), attended = part(heads * dim, dim);
    const Rows key = part(kv_heads * dim, dim), value = part(kv_heads * dim, dim);
    const Rows gate = part(inner, 0), up = part(inner, 0);
    call.before_attention = norm(0, count, size, rows(x, "hidden", 2), normed);
    call.before_mlp = norm(1, count, size, middle, normed2);
    call.query_norm = norm(2, 1, dim, {}, {}), call.key_norm = norm(3, 1, dim, {}, {});
    call.query_norm.x.dtype = call.key_norm.x.dtype = call.dtype;
    call.query = product(0, count, normed, query), call.key = product(1, count, normed, key);
    call.value = product(2, count, normed, value), call.output = product(3, count, attended, middle);
    if (weights_[kGate].defined()) call.gate = product(kGate, count, normed2, gate);
    call.up = product(5, count, normed2, up), call.down = product(6, count, up, rows(out, "out", 2));
    Linear* products[7] = {&call.query, &call.key, &call.value, &call.output, &call.gate, &call.up, &call.down};
    for (size_t i = 0; i < 7; ++i)
      if (adapters_[i]) adapt(*adapters_[i], part(std::get<0>(*adapters_[i]).size(0), 0), *products[i]);
    int64_t room_to_turn = 0;  // one after the other: products of other rows begin when those before have ended
    for (const Linear* each : products) room_to_turn = std::max(room_to_turn, turned_numbers(*each));
    Tensor turned = at::empty({room_to_turn}, x.options());
    for (Linear* each : products) each->turned = turned_numbers(*each) ? turned.data_ptr() : nullptr;
    if (cosines) {
      call.cosines = rows(*cosines, "cosines", 3), call.sines = rows(*sines, "sines", 3);
      if (cosines->size(0) == 1) call.cosines.stride0 = 0;
      if (sines->size(0) == 1) call.sines.stride0 = 0;
    }
    call.attention = {count, heads, kv_heads, dim, dim, width, query, key, value, rows(keys, "keys", 4),
                      rows(values, "values", 4), keys.stride(2), values.stride(2),
                      keys.size(2), table.const_data_ptr<int64_t>(), columns.const_data_ptr<int64_t>(), table.size(1),
                      scaling_, 0.0f, nullptr, nullptr, 0, attended, call.threads};
    check_pages(call.attention, keys.size(0));
    pybind11::gil_scoped_release unlocked;
    decode_layer(call);
    return out.view(hidden.sizes());
  }

 private:
  void check_matrix(size_t i, const Maybe& bias) const {
    const Tensor& weight = weights_[i];
    TORCH_CHECK_VALUE(weight.defined() || (!bias && !adapters_[i]), "a matrix that is not there has a bias or adapter");
    if (!weight.defined()) return;
    TORCH_CHECK_VALUE(weight.dim() == 2 && weight.scalar_type() == weights_[0].scalar_type() && weight.stride(1) == 1,
                      "weights must be dense rows of one dtype");
    TORCH_CHECK_VALUE(!bias || bias->numel() == weight.size(0), "a bias does not fit its weight");
    if (!adapters_[i]) return;
    const auto& [down, up, scaling] = *adapters_[i];
    TORCH_CHECK_VALUE(down.scalar_type() == weight.scalar_type() &&
                          up.scalar_type() == weight.scalar_type() && down.dim() == 2 && up.dim() == 2 && down.size(0) > 0 &&
                          down.size(1) == weight.size(1) && up.size(0) == weight.size(0) && up.size(1) == down.size(0),
                      "an adapter must be of its weight's dtype and fit it");
  }

  void check_norms() const {
    for (size_t i = 0; i < 4; ++i)
      for (const Maybe& part : {norms_[i], norm_biases_[i]})
        TORCH_CHECK_VALUE(!part || (part->dim() == 1 && part->is_contiguous() && norms_[i] &&
                                    part->numel() == norms_[i]->numel() &&
                                    part->scalar_type() == weights_[0].scalar_type()),
                          "norms and their biases must be dense and of the weights' dtype");
  }

  int64_t ranks() const {
    int64_t sum = 0;
    for (const MaybeAdapter& adapter : adapters_) sum += adapter ? std::get<0>(*adapter).size(0) : 0;
    return sum;
  }

  static void adapt(const std::tuple<Tensor, Tensor, double>& adapter, Rows low, Linear& product) {
    const auto& [down, up, scaling] = adapter;
    product.down = rows(down, "down", 2), product.up = rows(up, "up", 2);
    product.rank = down.size(0), product.scaling = static_cast<float>(scaling), product.low = low.data;
  }

  void check(const Tensor& x, const Maybe& cosines, const Maybe& sines, const Tensor& keys, const Tensor& values,
             int64_t count, int64_t dim, int64_t kv_heads) const {
    TORCH_CHECK_VALUE(x.scalar_type() == weights_[0].scalar_type() && count <= max_rows(), "hidden states are ",
                      x.scalar_type(), ", ", count, " rows; this layer takes ", weights_[0].scalar_type(), ", at most ",
                      max_rows(), " rows");
    TORCH_CHECK_VALUE(keys.dim() == 4 && values.sizes() == keys.sizes() && weights_[1].size(0) == kv_heads * dim &&
                          weights_[2].size(0) == kv_heads * dim && weights_[0].size(0) % (kv_heads * dim) == 0 &&
                          weights_[3].size(1) == weights_[0].size(0) && dim % 2 == 0,
                      "the cache's columns ", keys.sizes(), " do not fit the layer");
    TORCH_CHECK_VALUE(cosines.has_value() == sines.has_value(), "angles are cosines and sines, or neither");
    for (const Maybe& angles : {cosines, sines})
      TORCH_CHECK_VALUE(!angles || (angles->dim() == 3 && (angles->size(0) == count || angles->size(0) == 1) &&
                                    angles->size(1) == 1 && angles->size(2) == dim &&
                                    angles->scalar_type() == x.scalar_type()),
                        "angles ", angles->sizes(), " do not fit ", count, " rows of heads of ", dim);
    for (int i : {2, 3})
      TORCH_CHECK_VALUE(!norms_[i] || norms_[i]->numel() == dim, "a norm of heads does not have ", dim, " weights");
  }

  Norm norm(int i, int64_t count, int64_t size, Rows from, Rows to) const {
    return {count, size, from, to, norms_[i] ? norms_[i]->data_ptr() : nullptr, eps_, adds_one_, 1,
            norm_biases_[i] ? norm_biases_[i]->data_ptr() : nullptr};
  }

  Linear product(int i, int64_t count, Rows from, Rows to) const {
    return {count, weights_[i].size(1), weights_[i].size(0), from, rows(weights_[i], "weight", 2), to,
            biases_[i] ? biases_[i]->const_data_ptr<float>() : nullptr, at::get_num_threads()};
  }

  static constexpr int kGate = 4;

  std::vector<Tensor> weights_;  // the gate may be undefined
  std::vector<Maybe> biases_, norms_, norm_biases_;
  std::vector<MaybeAdapter> adapters_;
  float eps_;
  bool adds_one_;
  float scaling_;
  Activation activation_;
};

// -- Scores of tokens and optimizer steps as Python sees them

Vocabulary call_of(const Tensor& logits, const Tensor& targets, double temperature) {
  Vocabulary call{};
  call.logits = rows(logits, "logits", 2);
  call.rows = logits.size(0), call.size = logits.size(1);
  call.temperature = static_cast<float>(temperature), call.threads = at::get_num_threads();
  call.targets = targets.const_data_ptr<int64_t>();
  for (int64_t n = 0; n < call.rows; ++n)
    TORCH_CHECK_INDEX(call.targets[n] >= 0 && call.targets[n] < call.size, "target ", call.targets[n], " of ", call.size,
                      " words");
  return call;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> scores(const Tensor& logits, const Tensor& new_targets, double temperature,
                                                  bool with_entropy) {
  const Tensor targets = numbers(new_targets, "targets", logits.size(0));
  Vocabulary call = call_of(logits, targets, temperature);
  const auto wide = logits.options().dtype(at::kFloat);
  Tensor logprobs = at::empty({call.rows}, wide), normalisers = at::empty({call.rows}, wide);
  Tensor entropy = at::empty({with_entropy ? call.rows : 0}, wide);
  Tensor correct = at::empty({call.rows}, logits.options().dtype(at::kBool));
  call.logprobs = logprobs.data_ptr<float>(), call.normalisers = normalisers.data_ptr<float>();
  call.entropy = with_entropy ? entropy.data_ptr<float>() : nullptr, call.correct = correct.data_ptr<bool>();
  pybind11::gil_scoped_release unlocked;
  score_tokens(call);
  return {logprobs, entropy, correct, normalisers};
}

Tensor scores_backward(const Tensor& logits, const Tensor& new_targets, const Tensor& normalisers, const Tensor& entropy,
                       const Maybe& by_logprobs, const Maybe& by_entropy, double temperature) {
  const Tensor targets = numbers(new_targets, "targets", logits.size(0));
  Vocabulary call = call_of(logits, targets, temperature);
  call.normalisers = floats(normalisers, "normalisers", call.rows);
  Tensor first, second;
  if (by_logprobs) first = by_logprobs->contiguous(), call.by_logprobs = floats(first, "by_logprobs", call.rows);
  if (by_entropy) {
    second = by_entropy->contiguous(), call.by_entropy = floats(second, "by_entropy", call.rows);
    call.entropy = floats(entropy, "entropy", call.rows);
  }
  Tensor gradient = at::empty(logits.sizes(), logits.options());
  call.gradient = gradient.data_ptr();
  pybind11::gil_scoped_release unlocked;
  score_tokens_backward(call);
  return gradient;
}

void step(const Maybe& weight, const Tensor& master, const Tensor& gradient, const Tensor& average, const Tensor& square,
          int64_t number, double rate, double beta1, double beta2, double epsilon, double weight_decay, double factor) {
  TORCH_CHECK_VALUE(gradient.is_contiguous() && (!weight || (weight->is_contiguous() &&
                                                             weight->numel() == gradient.numel())),
                    "weight and gradient must be dense, and of one size");
  Adam call{};
  call.count = gradient.numel(), call.step = number;
  call.gradient = gradient.data_ptr(), call.gradient_dtype = dtype_of(gradient, "gradient");
  call.weight = weight ? weight->data_ptr() : nullptr;
  call.weight_dtype = weight ? dtype_of(*weight, "weight") : DType::kFloat32;
  call.master = floats(master, "master", call.count), call.average = floats(average, "exp_avg", call.count);
  call.square = floats(square, "exp_avg_sq", call.count);
  call.rate = rate, call.beta1 = beta1, call.beta2 = beta2, call.epsilon = epsilon, call.weight_decay = weight_decay;
  call.factor = static_cast<float>(factor), call.threads = at::get_num_threads();
  pybind11::gil_scoped_release unlocked;
  adamw(call);
}

double squares(const Tensor& x) {
  TORCH_CHECK_VALUE(x.is_contiguous(), "a dense tensor is needed");
  return sum_of_squares(x.data_ptr(), dtype_of(x, "x"), x.numel(), at::get_num_threads());
}

}  // namespace
}  // namespace hybrid

// -- attention, sampling, products and the module

namespace {

using at::Tensor;
using hybrid::dense, hybrid::dtype_of, hybrid::flags, hybrid::Maybe, hybrid::numbers, hybrid::rows, hybrid::stride_of;

Tensor decode_attention(const Tensor& new_query, const Tensor& new_key, const Tensor& new_value, const Tensor& keys,
                        const Tensor& values, const Tensor& pages, const Tensor& positions, int64_t width,
                        double scaling, std::optional<double> softcap, const Maybe& sinks, const Maybe& mask) {
  hybrid::Attention call{};
  const Tensor query = dense(new_query), key = dense(new_key), value = dense(new_value);
  call.query = rows(query, "query", 4), call.key = rows(key, "key", 4), call.value = rows(value, "value", 4);
  call.keys = rows(keys, "keys", 4), call.values = rows(values, "values", 4);
  call.batch = query.size(0), call.heads = query.size(1), call.kv_heads = keys.size(1);
  call.dim = query.size(3), call.value_dim = value.size(3), call.width = width;
  TORCH_CHECK_VALUE(query.size(2) == 1 && key.size(2) == 1 && value.size(2) == 1, "one new token per row is attended");
  TORCH_CHECK_VALUE(key.size(0) == call.batch && value.size(0) == call.batch && key.size(1) == call.kv_heads &&
                        value.size(1) == call.kv_heads && values.size(1) == call.kv_heads && key.size(3) == call.dim &&
                        keys.size(3) == call.dim && values.size(3) == call.value_dim && call.kv_heads > 0 &&
                        call.heads % call.kv_heads == 0 && values.size(0) == keys.size(0) &&
                        values.size(2) == keys.size(2),
                    "shapes do not fit: query ", query.sizes(), ", key ", key.sizes(), ", value ", value.sizes(),
                    ", keys ", keys.sizes(), ", values ", values.sizes());
  const Tensor table = hybrid::page_table(pages, call.batch);
  const Tensor columns = numbers(positions, "positions", call.batch);
  call.pages = table.const_data_ptr<int64_t>(), call.positions = columns.const_data_ptr<int64_t>();
  call.pages_stride = table.size(1), call.page_columns = keys.size(2);
  hybrid::check_pages(call, keys.size(0));
  call.key_step = keys.stride(2), call.value_step = values.stride(2);
  call.scaling = static_cast<float>(scaling), call.softcap = static_cast<float>(softcap.value_or(0));
  Tensor sink_scores;
  if (sinks) {
    TORCH_CHECK_VALUE(sinks->numel() == call.heads, "sinks has ", sinks->numel(), " numbers for ", call.heads,
                      " heads");
    sink_scores = sinks->detach().to(at::kFloat).contiguous();
    call.sinks = sink_scores.const_data_ptr<float>();
  }
  call.mask = flags(mask, "mask", call.batch, width), call.mask_stride = stride_of(mask);
  Tensor out = at::empty({call.batch, 1, call.heads, call.value_dim}, query.options());
  call.out = {out.data_ptr(), call.query.dtype, call.heads * call.value_dim, call.value_dim};
  call.threads = at::get_num_threads();
  pybind11::gil_scoped_release unlocked;
  hybrid::decode_attention(call);
  return out;
}

std::tuple<Tensor, Tensor> sample(const Tensor& logits, const Tensor& streams, const Tensor& positions,
                                  double temperature, int64_t top_k, double top_p, double min_p,
                                  double repetition_penalty, const Maybe& seen, const Maybe& forbidden,
                                  const Maybe& kept) {
  hybrid::Sampling call{};
  call.logits = rows(logits, "logits", 2);
  call.batch = logits.size(0), call.vocabulary = logits.size(1);
  TORCH_CHECK_VALUE(call.vocabulary > 0, "logits have no vocabulary");
  const Tensor requests = numbers(streams, "streams", call.batch), draws = numbers(positions, "positions", call.batch);
  call.streams = requests.const_data_ptr<int64_t>(), call.positions = draws.const_data_ptr<int64_t>();
  call.temperature = static_cast<float>(temperature), call.top_k = top_k, call.top_p = static_cast<float>(top_p);
  call.min_p = static_cast<float>(min_p), call.repetition_penalty = static_cast<float>(repetition_penalty);
  call.seen = flags(seen, "seen", call.batch, call.vocabulary), call.seen_stride = stride_of(seen);
  call.forbidden = flags(forbidden, "forbidden", call.batch, call.vocabulary);
  call.forbidden_stride = stride_of(forbidden);
  TORCH_CHECK_VALUE(!flags(kept, "kept", call.batch, call.vocabulary) || kept->is_contiguous(), "kept is not dense");
  call.kept = kept ? kept->data_ptr<bool>() : nullptr;
  Tensor tokens = at::empty({call.batch}, streams.options());
  Tensor logprobs = at::empty({call.batch}, logits.options().dtype(at::kFloat));
  call.tokens = tokens.data_ptr<int64_t>(), call.logprobs = logprobs.data_ptr<float>();
  call.threads = at::get_num_threads();
  pybind11::gil_scoped_release unlocked;
  hybrid::sample(call);
  return {tokens, logprobs};
}

constexpr int64_t kFewRows = 64;  // above, torch's fp32 product is faster, conversion of the weights included
constexpr int64_t kAtOnce = 4096;  // rows of the weights that are converted at a time

void wide_linear(const Tensor& x, const Tensor& weight, const Maybe& bias, Tensor& out) {
  const Tensor wide = x.to(at::kFloat);
  for (int64_t first = 0; first < weight.size(0); first += kAtOnce) {
    const int64_t count = std::min(kAtOnce, weight.size(0) - first);
    Tensor part = at::mm(wide, weight.narrow(0, first, count).to(at::kFloat).t());
    if (bias) part.add_(bias->narrow(0, first, count));
    out.narrow(1, first, count).copy_(part);
  }
}

using Product = void (*)(const hybrid::Linear&);

bool has_bf16_dots() { return hybrid::has_dot_linear(hybrid::DType::kBFloat16); }

// Whether torch's fp32 product of many rows, which is MKL's, is slow on this x86 processor.
bool is_not_intel() {
#if defined(__x86_64__)
  return !__builtin_cpu_is("intel");
#else
  return false;
#endif
}

// The product for these dtypes and this number of rows; null where torch's own is faster.
Product product_for(at::ScalarType x, at::ScalarType weight, int64_t rows) {
  const bool is_wide = weight == at::kFloat;
  if (x != weight || !(is_wide || (weight == at::kBFloat16 && has_bf16_dots()))) return hybrid::linear;
  if (rows <= hybrid::kFewDots) return hybrid::dot_linear;
  return is_wide && is_not_intel() ? hybrid::packed_linear : nullptr;
}

struct Adapter {
  const Tensor &down, &up;
  double scaling;
};

Tensor product(const Tensor& input, const Tensor& weight, const Maybe& bias, const Adapter* adapter,
               bool is_packed = false) {
  at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(weight.dim() == 2 && input.dim() > 0 && input.size(-1) == weight.size(1),
                    "shapes do not fit: input ", input.sizes(), ", weight ", weight.sizes());
  TORCH_CHECK_VALUE(!bias || bias->numel() == weight.size(0), "bias has ", bias ? bias->numel() : 0, " numbers, not ",
                    weight.size(0));
  std::vector<int64_t> shape = input.sizes().vec();
  shape.back() = weight.size(0);
  const Tensor x = dense(input.reshape({-1, weight.size(1)}));
  const Product chosen =
      is_packed ? hybrid::packed_linear : product_for(x.scalar_type(), weight.scalar_type(), x.size(0));
  if (!chosen) return (bias ? at::addmm(*bias, x, weight.t()) : at::mm(x, weight.t())).view(shape);
  Tensor out = at::empty({x.size(0), weight.size(0)}, x.options());
  if (chosen == hybrid::linear && x.size(0) > kFewRows) {
    wide_linear(x, weight, bias, out);
    return out.view(shape);
  }
  hybrid::Linear call{};
  call.rows = x.size(0), call.in_features = x.size(1), call.out_features = weight.size(0);
  call.x = rows(x, "input", 2), call.weight = rows(weight, "weight", 2), call.out = rows(out, "out", 2);
  Tensor wide_bias;
  if (bias) {
    wide_bias = bias->to(at::kFloat).contiguous();
    call.bias = wide_bias.const_data_ptr<float>();
  }
  if (adapter) {
    call.down = rows(adapter->down, "down", 2), call.up = rows(adapter->up, "up", 2);
    call.rank = adapter->down.size(0), call.scaling = static_cast<float>(adapter->scaling);
  }
  call.threads = at::get_num_threads();
  pybind11::gil_scoped_release unlocked;
  chosen(call);
  return out.view(shape);
}

Tensor linear(const Tensor& input, const Tensor& weight, const Maybe& bias) {
  return product(input, weight, bias, nullptr);
}

// linear by the product of many rows, in fp32 alone, whatever the number and the processor.
Tensor packed_linear(const Tensor& input, const Tensor& weight, const Maybe& bias) {
  TORCH_CHECK_VALUE(input.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat, "not fp32");
  return product(input, weight, bias, nullptr, true);
}

// linear, and scaling * up (down x): a layer with its low-rank adapter, in one call because each costs more than its work.
Tensor adapted_linear(const Tensor& input, const Tensor& weight, const Maybe& bias, const Tensor& down, const Tensor& up,
                      double scaling) {
  TORCH_CHECK_VALUE(down.dim() == 2 && up.dim() == 2 && down.size(1) == weight.size(1) && up.size(0) == weight.size(0) &&
                        up.size(1) == down.size(0),
                    "shapes do not fit: weight ", weight.sizes(), ", down ", down.sizes(), ", up ", up.sizes());
  const int64_t rows = input.numel() / std::max<int64_t>(1, input.size(-1));
  const bool are_dots = down.scalar_type() == weight.scalar_type() && up.scalar_type() == weight.scalar_type() && down.size(0) > 0 &&
                        product_for(input.scalar_type(), weight.scalar_type(), rows) == hybrid::dot_linear;
  if (are_dots) {
    const Tensor dense_down = dense(down), dense_up = dense(up);
    const Adapter adapter{dense_down, dense_up, scaling};
    return product(input, weight, bias, &adapter);
  }
  at::NoGradGuard no_grad;
  return linear(input, weight, bias).add_(linear(linear(input, down, {}), up, {}), scaling);
}

Tensor rms_norm(const Tensor& input, const Tensor& weight, double eps, bool adds_one) {
  TORCH_CHECK_VALUE(weight.dim() == 1 && weight.is_contiguous() && input.dim() > 0 && input.size(-1) == weight.size(0) &&
                        weight.scalar_type() == input.scalar_type(),
                    "shapes or dtypes do not fit: input ", input.sizes(), ", weight ", weight.sizes());
  const Tensor x = dense(input.reshape({-1, weight.size(0)}));
  Tensor out = at::empty({x.size(0), x.size(1)}, x.options());
  hybrid::rms_norm({x.size(0), x.size(1), rows(x, "input", 2), rows(out, "out", 2), weight.data_ptr(),
                    static_cast<float>(eps), adds_one, at::get_num_threads()});
  return out.view(input.sizes());
}

Tensor gated(const Tensor& new_gate, const Tensor& new_up, bool is_gelu) {
  TORCH_CHECK_VALUE(new_gate.sizes() == new_up.sizes() && new_gate.scalar_type() == new_up.scalar_type(),
                    "shapes or dtypes do not fit: gate ", new_gate.sizes(), ", up ", new_up.sizes());
  const Tensor gate = new_gate.contiguous(), up = new_up.contiguous();
  Tensor out = at::empty(gate.sizes(), gate.options());
  hybrid::gated({gate.numel(), gate.data_ptr(), up.data_ptr(), out.data_ptr(), dtype_of(gate, "gate"), is_gelu,
                 at::get_num_threads()});
  return out;
}

Tensor rotated(const Tensor& input, const Tensor& new_cosines, const Tensor& new_sines) {
  const Tensor x = dense(input), cosines = dense(new_cosines), sines = dense(new_sines);
  const int64_t batch = x.size(0), heads = x.size(1), length = x.size(2), dim = x.size(3);
  for (const Tensor& angles : {cosines, sines})
    TORCH_CHECK_VALUE(angles.dim() == 3 && (angles.size(0) == batch || angles.size(0) == 1) &&
                          angles.size(1) == length && angles.size(2) == dim && dim % 2 == 0 &&
                          angles.scalar_type() == x.scalar_type(),
                      "shapes or dtypes do not fit: input ", x.sizes(), ", angles ", angles.sizes());
  Tensor out = at::empty({batch, length, heads, dim}, x.options());
  hybrid::Rotary call{batch, heads, length, dim, rows(x, "input", 4), x.stride(2), rows(cosines, "cosines", 3),
                      rows(sines, "sines", 3), out.data_ptr(), at::get_num_threads()};
  if (cosines.size(0) == 1) call.cosines.stride0 = 0;
  if (sines.size(0) == 1) call.sines.stride0 = 0;
  hybrid::rotary(call);
  return out.transpose(1, 2);
}

std::tuple<Tensor, Tensor> rotary(const Tensor& query, const Tensor& key, const Tensor& cosines, const Tensor& sines) {
  TORCH_CHECK_VALUE(query.dim() == 4 && key.dim() == 4, "query and key must be (B, H, Q, D)");
  return {rotated(query, cosines, sines), rotated(key, cosines, sines)};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  m.def("decode_attention", &decode_attention, py::arg("query"), py::arg("key"), py::arg("value"), py::arg("keys"),
        py::arg("values"), py::arg("pages"), py::arg("positions"), py::arg("width"), py::kw_only(), py::arg("scaling"),
        py::arg("softcap") = py::none(), py::arg("sinks") = py::none(), py::arg("mask") = py::none());
  m.def("causal_attention", &hybrid::attended, py::arg("query"), py::arg("key"), py::arg("value"), py::kw_only(),
        py::arg("scaling"), py::arg("with_normalisers") = false);
  m.def("causal_attention_backward", &hybrid::gradients, py::arg("gradient"), py::arg("query"), py::arg("key"),
        py::arg("value"), py::arg("normalisers"), py::kw_only(), py::arg("scaling"));
  m.def("rms_norm_backward", &hybrid::norm_gradients);
  m.def("gated_backward", &hybrid::gate_gradients);
  using hybrid::Layer, hybrid::MaybeAdapter;
  py::class_<Layer>(m, "DecodeLayer")
      .def(py::init<const std::vector<Maybe>&, const std::vector<Maybe>&, std::vector<Maybe>, std::vector<Maybe>,
                    std::vector<MaybeAdapter>, double, bool, double, const std::string&>(),
           py::arg("weights"), py::arg("biases"), py::arg("norms"), py::arg("norm_biases"), py::arg("adapters"),
           py::arg("eps"), py::arg("adds_one"), py::arg("scaling"), py::arg("activation"))
      .def_property_readonly("max_rows", &Layer::max_rows)
      .def("__call__", &Layer::run, py::arg("hidden"), py::arg("cosines"), py::arg("sines"), py::arg("keys"),
           py::arg("values"), py::arg("pages"), py::arg("positions"), py::arg("width"));
  m.def("token_scores", &hybrid::scores);
  m.def("token_scores_backward", &hybrid::scores_backward);
  m.def("adamw", &hybrid::step, py::arg("weight"), py::arg("master"), py::arg("gradient"), py::arg("exp_avg"),
        py::arg("exp_avg_sq"), py::kw_only(), py::arg("step"), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
        py::arg("eps"), py::arg("weight_decay"), py::arg("factor") = 1.0);
  m.def("sum_of_squares", &hybrid::squares, py::arg("x"));
  m.def("sample", &sample, py::arg("logits"), py::arg("streams"), py::arg("positions"), py::kw_only(),
        py::arg("temperature") = 1.0, py::arg("top_k") = 0, py::arg("top_p") = 1.0, py::arg("min_p") = 0.0,
        py::arg("repetition_penalty") = 1.0, py::arg("seen") = py::none(), py::arg("forbidden") = py::none(),
        py::arg("kept") = py::none());
  m.def("rms_norm", &rms_norm, py::arg("input"), py::arg("weight"), py::arg("eps"), py::arg("adds_one") = false);
  m.def("gated", &gated, py::arg("gate"), py::arg("up"), py::arg("is_gelu") = false);
  m.def("rotary", &rotary);
  m.def("has_bf16_dots", &has_bf16_dots);
  m.def("compiled_with_tiles", &hybrid::compiled_with_tiles);
  m.def("has_tiles", &hybrid::has_tiles);
  m.def("linear", &linear, py::arg("input"), py::arg("weight"), py::arg("bias") = py::none());
  m.def("packed_linear", &packed_linear, py::arg("input"), py::arg("weight"), py::arg("bias") = py::none());
  m.def("adapted_linear", &adapted_linear);
}
