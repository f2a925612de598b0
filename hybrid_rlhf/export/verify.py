"""Verify an exported folder: load it by plain transformers in a fresh process, and compare its outputs."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.own_files import refusal
from hybrid_rlhf.export.folder import BOUNDS, ExportDiffers, difference_of, has_experts
from hybrid_rlhf.models.backbone import text_forward, text_logits

PROMPTS = ("Once upon a time", "What is the capital of France?", "1 2 3 4")
NUM_TOKENS = 16
_SCRIPT = """
import json, sys, torch, transformers
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from safetensors.torch import load_file, save_file


@IN_FLOAT32@
folder, sequences, out, kind, prompts = sys.argv[1:6]
transformers.logging.set_verbosity_error(); transformers.logging.disable_progress_bar()
model = getattr(transformers, kind).from_pretrained(folder, dtype="auto", use_safetensors=True).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
tensors = {f"prompt.{i}": tokenizer(text, return_tensors="pt").input_ids for i, text in enumerate(json.loads(prompts))}
with torch.no_grad(), InFloat32():
    for name, ids in load_file(sequences).items():
        try:
            outputs = model(input_ids=ids, use_cache=False)
        except AttributeError:  # Llama 4 in transformers 5.24 fails on text alone
            outputs = model.language_model(input_ids=ids, use_cache=False)
        tensors["logits." + name] = outputs.logits.float().contiguous()
save_file(tensors, out)
"""


class InFloat32(TorchFunctionMode):
    """Cast 16-bit inputs, and parameters of any float type, to fp32 in every operation within the block: a model that
    is mapped from 16-bit files computes as one loaded in fp32, with one weight at a time in fp32."""

    def __torch_function__(self, func, types, inputs=(), named=None):  # noqa: ANN001, ANN204 - torch's own
        if getattr(func, "__name__", "") == "__get__":
            is_dtype = func == torch.Tensor.dtype.__get__ and self._is_narrow(inputs[0])
            return torch.float32 if is_dtype else func(*inputs)
        if func is F.embedding:  # the table is not cast, only the rows
            return self._widened(func(*inputs, **(named or {})))
        return func(*self._widened(inputs), **self._widened(named or {}))

    def _is_narrow(self, value):  # noqa: ANN001, ANN202
        return value.dtype in (torch.bfloat16, torch.float16) or (
            isinstance(value, nn.Parameter) and value.is_floating_point() and value.dtype != torch.float32)

    def _widened(self, value):  # noqa: ANN001, ANN202
        if isinstance(value, torch.Tensor):
            return value.float() if self._is_narrow(value) else value
        if type(value) in (list, tuple):
            return type(value)(map(self._widened, value))
        return {k: self._widened(v) for k, v in value.items()} if type(value) is dict else value


@torch.no_grad()
def answers(model: nn.Module, tokenizer) -> dict[str, Tensor]:  # noqa: ANN001
    """Outputs of `model`: prompt.I (1, P) ids, sequence.I (1, T) with NUM_TOKENS greedy ones (none of a scalar
    model), logits.I (1, T, V) or (1, 1) fp32; routed (): whether it has experts."""
    tensors = {f"prompt.{i}": tokenizer(text, return_tensors="pt").input_ids for i, text in enumerate(PROMPTS)}
    sequences = list(tensors.values())
    with InFloat32():
        for i, ids in enumerate(sequences if hasattr(model, "score") else _continued(model, sequences)):
            tensors[f"sequence.{i}"] = ids
            tensors[f"logits.{i}"] = _logits(model, ids).float()
    return tensors | {"routed": torch.tensor(has_experts(model))}


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    if hasattr(model, "score"):
        return model(input_ids=ids, use_cache=False).logits
    return text_logits(model, text_forward(model)(input_ids=ids, use_cache=False))


def _continued(model: nn.Module, prompts: list[Tensor]) -> list[Tensor]:
    """Each prompt (1, P) with NUM_TOKENS greedy tokens; all prompts in one forward per token, as every forward reads
    all weights. Tokens after a row's end have no effect, as attention is causal."""
    ends = [ids.shape[1] for ids in prompts]
    rows = torch.stack([torch.cat([ids[0], ids[0, -1:].expand(max(ends) + NUM_TOKENS - ids.shape[1])])
                        for ids in prompts])  # padded by its last token: models warn of padding tokens
    for step in range(NUM_TOKENS):
        logits = _logits(model, rows[:, :max(ends) + step].contiguous())
        for row, output, end in zip(rows, logits, ends, strict=True):
            row[end + step] = output[end + step - 1].argmax()
    return [row[None, :end + NUM_TOKENS] for row, end in zip(rows, ends, strict=True)]


def compare(live: dict[str, Tensor], folder: str | Path, class_name: str, dtype: torch.dtype) -> float:
    """Load `folder`, whose weights are `dtype`, in a fresh process by transformers' `class_name` and compare.

    live: `answers` of the original model, in fp32. Returns the largest relative difference of the logits. Raises
    ExportDiffers where prompts become other tokens, logits differ by more than rounding, or a greedy token differs that
    was not a tie within that rounding.
    """
    fresh = _fresh(live, folder, class_name)
    bound, largest = BOUNDS[dtype], 0.0
    for i, text in enumerate(PROMPTS):
        if not torch.equal(live[f"prompt.{i}"], fresh[f"prompt.{i}"]):
            raise ExportDiffers(f"{folder}: {text!r} becomes other tokens when the tokenizer is loaded again; "
                                "give another tokenizer")
        ours, reloaded = live[f"logits.{i}"], fresh[f"logits.{i}"]
        scale = float(ours.abs().max().clamp(min=1e-6))
        difference = difference_of(ours, reloaded, bool(live["routed"]))
        if not difference <= bound:
            raise ExportDiffers(f"{folder}: reloaded in a fresh process its outputs differ by {difference:.3g} "
                                f"(relative); at most {bound} is rounding: please report it")
        largest = max(largest, difference)
        if ours.ndim == 3:
            top = ours.topk(2, -1).values
            is_sure = top[..., 0] - top[..., 1] > 2 * bound * scale
            others = (ours.argmax(-1) != reloaded.argmax(-1)) & is_sure
            if float(others.float().mean()) > (0.25 if live["routed"] else 0.0):
                raise ExportDiffers(f"{folder}: reloaded in a fresh process it chooses other tokens; please report it")
    return largest


def _fresh(live: dict[str, Tensor], folder: str | Path, class_name: str) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as place:
        sequences, out = Path(place) / "sequences.safetensors", Path(place) / "out.safetensors"
        save_file({name.removeprefix("sequence."): value.contiguous() for name, value in live.items()
                   if name.startswith("sequence.")}, sequences)
        script = _SCRIPT.replace("@IN_FLOAT32@", inspect.getsource(InFloat32))
        done = subprocess.run([sys.executable, "-c", script, str(folder), str(sequences), str(out), class_name,
                               json.dumps(PROMPTS)], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            if refused := refusal(Exception(reason)):
                raise UserError(f"{folder} was not compared in a fresh process ({refused}); set TMPDIR to a folder "
                                f"with more room than {tempfile.gettempdir()}")
            raise ExportDiffers(f"{folder} cannot be loaded in a fresh process: {reason}; please report it")
        return load_file(out)
