// Attention of whole sequences as Python sees it.
#include "bindings.h"

namespace hybrid {
namespace {

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
  TORCH_CHECK_VALUE(normalisers.is_contiguous() && normalisers.scalar_type() == at::kFloat &&
                        normalisers.numel() == call.batch * call.heads * call.length,
                    "normalisers must be (B, H, T) float32, dense");
  call.out = tokens(gradient, "gradient", call.dtype), call.normalisers = normalisers.data_ptr<float>();
  const Tensor by_query = like(query), by_key = like(key), by_value = like(value);
  call.query_gradient = tokens(by_query, "query", call.dtype);
  call.key_gradient = tokens(by_key, "key", call.dtype), call.value_gradient = tokens(by_value, "value", call.dtype);
  pybind11::gil_scoped_release unlocked;
  hybrid::causal_attention_backward(call);
  return {by_query, by_key, by_value};
}

}  // namespace

void bind_sequences(pybind11::module_& m) {
  namespace py = pybind11;
  m.def("causal_attention", &attended, py::arg("query"), py::arg("key"), py::arg("value"), py::kw_only(),
        py::arg("scaling"), py::arg("with_normalisers") = false);
  m.def("causal_attention_backward", &gradients, py::arg("gradient"), py::arg("query"), py::arg("key"),
        py::arg("value"), py::arg("normalisers"), py::kw_only(), py::arg("scaling"));
}

}  // namespace hybrid
