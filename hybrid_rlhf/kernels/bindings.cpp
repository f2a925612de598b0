// Tensors to the kernels' plain interface. Signatures and meaning: kernels/reference.py.
#include "bindings.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <vector>

#include "tiles.h"

namespace {

using at::Tensor;
using hybrid::dense, hybrid::dtype_of, hybrid::flags, hybrid::Maybe, hybrid::numbers, hybrid::rows, hybrid::stride_of;

Tensor decode_attention(const Tensor& new_query, const Tensor& new_key, const Tensor& new_value, const Tensor& keys,
                        const Tensor& values, const Tensor& slots, const Tensor& positions, int64_t width,
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
  const Tensor slot_numbers = numbers(slots, "slots", call.batch);
  const Tensor columns = numbers(positions, "positions", call.batch);
  call.slots = slot_numbers.const_data_ptr<int64_t>(), call.positions = columns.const_data_ptr<int64_t>();
  hybrid::check_slots(call, keys.size(0), keys.size(2));
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
        py::arg("values"), py::arg("slots"), py::arg("positions"), py::arg("width"), py::kw_only(), py::arg("scaling"),
        py::arg("softcap") = py::none(), py::arg("sinks") = py::none(), py::arg("mask") = py::none());
  hybrid::bind_sequences(m);
  hybrid::bind_gradients(m);
  hybrid::bind_layers(m);
  hybrid::bind_updates(m);
  m.def("sample", &sample, py::arg("logits"), py::arg("streams"), py::arg("positions"), py::kw_only(),
        py::arg("temperature") = 1.0, py::arg("top_k") = 0, py::arg("top_p") = 1.0, py::arg("min_p") = 0.0,
        py::arg("repetition_penalty") = 1.0, py::arg("seen") = py::none(), py::arg("forbidden") = py::none(),
        py::arg("kept") = py::none());
  m.def("rms_norm", &rms_norm, py::arg("input"), py::arg("weight"), py::arg("eps"), py::arg("adds_one") = false);
  m.def("gated", &gated, py::arg("gate"), py::arg("up"), py::arg("is_gelu") = false);
  m.def("rotary", &rotary, py::arg("query"), py::arg("key"), py::arg("cosines"), py::arg("sines"));
  m.def("has_bf16_dots", &has_bf16_dots);
  m.def("compiled_with_tiles", &hybrid::compiled_with_tiles);
  m.def("has_tiles", &hybrid::has_tiles);
  m.def("linear", &linear, py::arg("input"), py::arg("weight"), py::arg("bias") = py::none());
  m.def("packed_linear", &packed_linear, py::arg("input"), py::arg("weight"), py::arg("bias") = py::none());
  m.def("adapted_linear", &adapted_linear, py::arg("input"), py::arg("weight"), py::arg("bias"), py::arg("down"),
        py::arg("up"), py::arg("scaling"));
}
