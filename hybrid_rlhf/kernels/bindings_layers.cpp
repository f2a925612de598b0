// A decoder layer as an object that knows its weights; kernels/reference.py: DecodeLayer says what it does.
#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"

namespace hybrid {
namespace {

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
             const Tensor& slots, const Tensor& positions, int64_t width) const {
    const Tensor x = dense(hidden.reshape({-1, weights_[0].size(1)}));
    const int64_t count = x.size(0), dim = keys.size(3), kv_heads = keys.size(1);
    const int64_t heads = weights_[0].size(0) / dim, inner = weights_[5].size(0), size = weights_[0].size(1);
    check(x, cosines, sines, keys, values, count, dim, kv_heads);
    const Tensor slot_numbers = numbers(slots, "slots", count), columns = numbers(positions, "positions", count);
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
                      slot_numbers.const_data_ptr<int64_t>(), columns.const_data_ptr<int64_t>(), scaling_, 0.0f,
                      nullptr, nullptr, 0, attended, call.threads};
    check_slots(call.attention, keys.size(0), keys.size(2));
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

}  // namespace

void check_slots(const Attention& call, int64_t slots, int64_t columns) {
  TORCH_CHECK_VALUE(call.width <= columns, "width is ", call.width, "; the slots have ", columns, " columns");
  for (int64_t b = 0; b < call.batch; ++b) {
    TORCH_CHECK_INDEX(call.positions[b] >= -1 && call.positions[b] < call.width, "row ", b, " is at position ",
                      call.positions[b], "; width is ", call.width);
    TORCH_CHECK_INDEX(call.slots[b] >= 0 && call.slots[b] < slots, "row ", b, " is in slot ", call.slots[b], " of ",
                      slots);
  }
}

void bind_layers(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<Layer>(m, "DecodeLayer")
      .def(py::init<const std::vector<Maybe>&, const std::vector<Maybe>&, std::vector<Maybe>, std::vector<Maybe>,
                    std::vector<MaybeAdapter>, double, bool, double, const std::string&>(),
           py::arg("weights"), py::arg("biases"), py::arg("norms"), py::arg("norm_biases"), py::arg("adapters"),
           py::arg("eps"), py::arg("adds_one"), py::arg("scaling"), py::arg("activation"))
      .def_property_readonly("max_rows", &Layer::max_rows)
      .def("__call__", &Layer::run, py::arg("hidden"), py::arg("cosines"), py::arg("sines"), py::arg("keys"),
           py::arg("values"), py::arg("slots"), py::arg("positions"), py::arg("width"));
}

}  // namespace hybrid
