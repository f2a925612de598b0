"""The weights of a checkpoint packed as publishers of quantised ones do it, by the names of their files.

Sources: the block formats of DeepSeek-V3 (fp8, 128 x 128) and of OCP MX (fp4, blocks of 32), and the files of
bitsandbytes, AutoAWQ and GPTQ.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

Weights = dict[str, Tensor]
_PROJECTION = re.compile(r"_proj(_with_mqa)?\.weight$")
_E4M3_LARGEST = 448.0
GROUP, PER_INT = 128, 8  # numbers that share a scale; of 4 bits in an int32


def _linear(weights: Weights, within: str = "layers.") -> list[str]:
    return [name for name, w in weights.items() if within in name and w.ndim == 2 and _PROJECTION.search(name)]


def fp8_in_blocks(weights: Weights) -> Weights:
    """DeepSeek's: each block of 128 x 128 with its factor beside it, weight_scale_inv."""
    packed = dict(weights)
    for name in _linear(weights):
        if "eh_proj" in name:
            continue
        weight = weights[name].float()
        scale = torch.stack([torch.stack([tile.abs().max() for tile in row.split(GROUP, 1)])
                             for row in weight.split(GROUP, 0)]) / _E4M3_LARGEST
        whole = scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)[: weight.shape[0], : weight.shape[1]]
        packed[name] = (weight / whole).to(torch.float8_e4m3fn)
        packed[f"{name}_scale_inv"] = scale
    return packed


def fp8_per_tensor(weights: Weights) -> Weights:
    """Mistral's: a factor for each tensor and one for its activations, both without dimensions; the towers stay."""
    packed = dict(weights)
    for name in _linear(weights, "language_model"):
        weight = weights[name].float()
        scale = weight.abs().max() / _E4M3_LARGEST
        packed[name] = (weight / scale).to(torch.float8_e4m3fn)
        packed[f"{name}_scale_inv"] = scale.bfloat16()
        packed[name.replace(".weight", ".activation_scale")] = torch.tensor(0.05, dtype=torch.bfloat16)
    return packed


def mxfp4(weights: Weights) -> Weights:
    """gpt-oss's: the experts' weights, transposed, in blocks of 32 4-bit numbers and a power of two each."""
    packed = {}
    for name, weight in weights.items():
        if not re.search(r"experts\.(gate_up|down)_proj$", name):
            packed[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        packed[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        packed[f"{name}_scales"] = torch.randint(122, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
    return packed


def bnb_4bit(weights: Weights) -> Weights:
    """bitsandbytes' NF4 with doubly quantised scales, as save_pretrained of a quantised model writes it."""
    from bitsandbytes.functional import quantize_4bit

    packed = dict(weights)
    for name in _linear(weights):
        values, state = quantize_4bit(weights[name], blocksize=64, compress_statistics=True, quant_type="nf4")
        packed[name] = values
        packed |= {f"{name}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
    return packed


def awq(weights: Weights) -> Weights:
    """AutoAWQ's: eight 4-bit outputs in each int32 of (inputs, outputs / 8)."""
    return _grouped(weights, lambda inputs, outputs: {"qweight": (inputs, outputs // PER_INT)})


def gptq(weights: Weights) -> Weights:
    """GPTQ's: eight 4-bit inputs in each int32 of (inputs / 8, outputs), and each input's group."""
    return _grouped(weights, lambda inputs, outputs: {"qweight": (inputs // PER_INT, outputs)}, has_index=True)


def _grouped(weights: Weights, shapes, has_index: bool = False) -> Weights:  # noqa: ANN001
    packed = {name: w.half() for name, w in weights.items()}
    for name in _linear(weights):
        del packed[name]
        layer, (outputs, inputs) = name.removesuffix("weight"), weights[name].shape
        integers = shapes(inputs, outputs) | {"qzeros": (inputs // GROUP, outputs // PER_INT)}
        packed |= {layer + part: torch.randint(-2**31, 2**31 - 1, shape).int() for part, shape in integers.items()}
        packed[f"{layer}scales"] = torch.rand(inputs // GROUP, outputs).half() * 0.01
        if has_index:
            packed[f"{layer}g_idx"] = (torch.arange(inputs) // GROUP).int()
    return packed
