// What the bindings share: tensors checked and taken apart into the kernels' plain interface.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <tuple>

#include "kernels.h"

namespace hybrid {

using at::Tensor;
using Maybe = std::optional<Tensor>;

constexpr int64_t kFewDots = 48;  // rows above which another product, torch's or the packed one, is faster

inline DType dtype_of(const Tensor& x, const char* name) {
  TORCH_CHECK_TYPE(x.device().is_cpu(), name, " is on ", x.device(), "; this kernel reads cpu tensors");
  switch (x.scalar_type()) {
    case at::kFloat: return DType::kFloat32;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kHalf: return DType::kHalf;
    default:
      TORCH_CHECK_TYPE(false, name, " is ", x.scalar_type(), "; this kernel reads float32, bfloat16 and float16");
  }
}

inline Rows rows(const Tensor& x, const char* name, int64_t dims) {
  TORCH_CHECK_VALUE(x.dim() == dims, name, " has ", x.dim(), " dimensions, not ", dims);
  TORCH_CHECK_VALUE(x.size(-1) <= 1 || x.stride(-1) == 1, name, ": its last dimension must be dense");
  return {x.data_ptr(), dtype_of(x, name), x.stride(0), dims > 2 ? x.stride(1) : 0};
}

// A new token's tensor as the kernel can read it; models hand on views of any strides.
inline Tensor dense(const Tensor& x) { return x.size(-1) <= 1 || x.stride(-1) == 1 ? x : x.contiguous(); }

inline Tensor numbers(const Tensor& x, const char* name, int64_t count) {
  TORCH_CHECK_VALUE(x.dim() == 1 && x.size(0) == count && x.scalar_type() == at::kLong && x.device().is_cpu(), name,
                    " must be (", count, ",) int64 on the cpu");
  return x.contiguous();
}

inline const bool* flags(const Maybe& x, const char* name, int64_t batch, int64_t count) {
  if (!x) return nullptr;
  TORCH_CHECK_VALUE(x->dim() == 2 && x->size(0) == batch && x->size(1) == count && x->scalar_type() == at::kBool &&
                        x->device().is_cpu() && (count <= 1 || x->stride(1) == 1),
                    name, " must be (", batch, ", ", count, ") bool on the cpu with a dense last dimension");
  return x->const_data_ptr<bool>();
}

inline int64_t stride_of(const Maybe& x) { return x ? x->stride(0) : 0; }

void bind_sequences(pybind11::module_& m);
void bind_gradients(pybind11::module_& m);
void bind_layers(pybind11::module_& m);

// Slots and positions of a decode step lie in the cache, or an error.
void check_slots(const Attention& call, int64_t slots, int64_t columns);
void bind_updates(pybind11::module_& m);

}  // namespace hybrid
