// Scores of tokens and optimizer steps as Python sees them.
#include "bindings.h"

namespace hybrid {
namespace {

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

float* numbers_of(const Tensor& x, const char* name, int64_t count) {
  TORCH_CHECK_VALUE(x.dim() == 1 && x.size(0) == count && x.is_contiguous() && x.scalar_type() == at::kFloat, name,
                    " must be (", count, ",) float32, dense");
  return x.data_ptr<float>();
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
  call.normalisers = numbers_of(normalisers, "normalisers", call.rows);
  Tensor first, second;
  if (by_logprobs) first = by_logprobs->contiguous(), call.by_logprobs = numbers_of(first, "by_logprobs", call.rows);
  if (by_entropy) {
    second = by_entropy->contiguous(), call.by_entropy = numbers_of(second, "by_entropy", call.rows);
    call.entropy = numbers_of(entropy, "entropy", call.rows);
  }
  Tensor gradient = at::empty(logits.sizes(), logits.options());
  call.gradient = gradient.data_ptr();
  pybind11::gil_scoped_release unlocked;
  score_tokens_backward(call);
  return gradient;
}

float* state_of(const Tensor& x, const char* name, const Tensor& gradient) {
  TORCH_CHECK_VALUE(x.is_contiguous() && x.scalar_type() == at::kFloat && x.numel() == gradient.numel() &&
                        x.device().is_cpu(), name, " must be float32, dense, of ", gradient.numel(), " numbers");
  return x.data_ptr<float>();
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
  call.master = state_of(master, "master", gradient), call.average = state_of(average, "exp_avg", gradient);
  call.square = state_of(square, "exp_avg_sq", gradient);
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

void bind_updates(pybind11::module_& m) {
  namespace py = pybind11;
  m.def("token_scores", &scores, py::arg("logits"), py::arg("targets"), py::arg("temperature"), py::arg("with_entropy"));
  m.def("token_scores_backward", &scores_backward, py::arg("logits"), py::arg("targets"), py::arg("normalisers"),
        py::arg("entropy"), py::arg("by_logprobs"), py::arg("by_entropy"), py::arg("temperature"));
  m.def("adamw", &step, py::arg("weight"), py::arg("master"), py::arg("gradient"), py::arg("exp_avg"),
        py::arg("exp_avg_sq"), py::kw_only(), py::arg("step"), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
        py::arg("eps"), py::arg("weight_decay"), py::arg("factor") = 1.0);
  m.def("sum_of_squares", &squares, py::arg("x"));
}

}  // namespace hybrid
