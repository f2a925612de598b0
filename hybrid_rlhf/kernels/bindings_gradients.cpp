// The backward passes of elementwise.cpp's chains as Python sees them.
#include "bindings.h"

namespace hybrid {
namespace {

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

}  // namespace

void bind_gradients(pybind11::module_& m) {
  namespace py = pybind11;
  m.def("rms_norm_backward", &norm_gradients, py::arg("gradient"), py::arg("input"), py::arg("weight"), py::arg("eps"),
        py::arg("adds_one"), py::arg("with_weight"));
  m.def("gated_backward", &gate_gradients, py::arg("gradient"), py::arg("gate"), py::arg("up"), py::arg("is_gelu"));
}

}  // namespace hybrid
