"""Is a folder the model it was made from? A fresh process that knows only transformers says what it computes."""

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
from hybrid_rlhf.core.disk import refusal
from hybrid_rlhf.export.folder import BOUNDS, ExportDiffers, difference_of, has_experts
from hybrid_rlhf.models.backbone import text_logits
from hybrid_rlhf.models.text_part import text_forward

PROMPTS = ("Once upon a time", "What is the capital of France?", "1 2 3 4")
NUM_TOKENS = 16
_SCRIPT = """
import json, sys, torch, transformers
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from safetensors.torch import load_file, save_file


@IN_FLOAT32@
folder, given, out, kind, prompts = sys.argv[1:6]
transformers.logging.set_verbosity_error(); transformers.logging.disable_progress_bar()
model = getattr(transformers, kind).from_pretrained(folder, dtype="auto", use_safetensors=True).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
found = {f"prompt.{i}": tokenizer(text, return_tensors="pt").input_ids for i, text in enumerate(json.loads(prompts))}
with torch.no_grad(), InFloat32():
    for name, ids in load_file(given).items():
        try:
            told = model(input_ids=ids, use_cache=False)
        except AttributeError:  # Llama 4's in transformers 5.24, which fails on text alone
            told = model.language_model(input_ids=ids, use_cache=False)
        found["logits." + name] = told.logits.float().contiguous()
save_file(found, out)
"""


class InFloat32(TorchFunctionMode):
    """Within the block every operation takes 16-bit numbers, and parameters of whatever type, as fp32: a model that is
    mapped from 16-bit files computes as one that was read in fp32, and one weight at a time is held as that."""

    def __torch_function__(self, func, types, given=(), named=None):  # noqa: ANN001, ANN204 - torch's own
        if getattr(func, "__name__", "") == "__get__":
            is_dtype = func == torch.Tensor.dtype.__get__ and self._is_narrow(given[0])
            return torch.float32 if is_dtype else func(*given)
        if func is F.embedding:  # a table stays as it is
            return self._widened(func(*given, **(named or {})))
        return func(*self._widened(given), **self._widened(named or {}))

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
    """What `model` computes: prompt.I (1, P) ids, sequence.I (1, T) with NUM_TOKENS greedy ones (none of a scalar
    model), logits.I (1, T, V) or (1, 1) fp32; routed (): whether it has experts."""
    found = {f"prompt.{i}": tokenizer(text, return_tensors="pt").input_ids for i, text in enumerate(PROMPTS)}
    sequences = list(found.values())
    with InFloat32():
        for i, ids in enumerate(sequences if hasattr(model, "score") else _continued(model, sequences)):
            found[f"sequence.{i}"] = ids
            found[f"logits.{i}"] = _logits(model, ids).float()
    return found | {"routed": torch.tensor(has_experts(model))}


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    if hasattr(model, "score"):
        return model(input_ids=ids, use_cache=False).logits
    return text_logits(model, text_forward(model)(input_ids=ids, use_cache=False))


def _continued(model: nn.Module, prompts: list[Tensor]) -> list[Tensor]:
    """Each of (1, P) with NUM_TOKENS greedy ones, all prompts in one forward a token: every forward reads all weights.
    What stands behind a row's end, which its tokens do not see, is of no effect."""
    ends = [ids.shape[1] for ids in prompts]
    rows = torch.stack([torch.cat([ids[0], ids[0, -1:].expand(max(ends) + NUM_TOKENS - ids.shape[1])])
                        for ids in prompts])  # filled up with no padding token, which models warn of
    for step in range(NUM_TOKENS):
        logits = _logits(model, rows[:, :max(ends) + step].contiguous())
        for row, found, end in zip(rows, logits, ends, strict=True):
            row[end + step] = found[end + step - 1].argmax()
    return [row[None, :end + NUM_TOKENS] for row, end in zip(rows, ends, strict=True)]


def compare(live: dict[str, Tensor], folder: str | Path, class_name: str, dtype: torch.dtype) -> float:
    """Load `folder`, whose weights are `dtype`, in a fresh process by transformers' `class_name` and compare.

    live: `answers` of the model it was made from, in fp32. Returns the largest relative difference of the logits.
    Raises ExportDiffers where prompts become other tokens, logits differ by more than rounding, or a greedy token
    differs that was no tie within that rounding.
    """
    fresh = _fresh(live, folder, class_name)
    bound, largest = BOUNDS[dtype], 0.0
    for i, text in enumerate(PROMPTS):
        if not torch.equal(live[f"prompt.{i}"], fresh[f"prompt.{i}"]):
            raise ExportDiffers(f"{folder}: {text!r} becomes other tokens when the tokenizer is loaded again; "
                                "give another tokenizer")
        mine, theirs = live[f"logits.{i}"], fresh[f"logits.{i}"]
        scale = float(mine.abs().max().clamp(min=1e-6))
        difference = difference_of(mine, theirs, bool(live["routed"]))
        if not difference <= bound:
            raise ExportDiffers(f"{folder}: reloaded in a fresh process its outputs differ by {difference:.3g} "
                                f"(relative); at most {bound} is rounding: please report it")
        largest = max(largest, difference)
        if mine.ndim == 3:
            top = mine.topk(2, -1).values
            is_sure = top[..., 0] - top[..., 1] > 2 * bound * scale
            others = (mine.argmax(-1) != theirs.argmax(-1)) & is_sure
            if float(others.float().mean()) > (0.25 if live["routed"] else 0.0):
                raise ExportDiffers(f"{folder}: reloaded in a fresh process it chooses other tokens; please report it")
    return largest


def _fresh(live: dict[str, Tensor], folder: str | Path, class_name: str) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as place:
        given, out = Path(place) / "given.safetensors", Path(place) / "out.safetensors"
        save_file({name.removeprefix("sequence."): value.contiguous() for name, value in live.items()
                   if name.startswith("sequence.")}, given)
        script = _SCRIPT.replace("@IN_FLOAT32@", inspect.getsource(InFloat32))
        done = subprocess.run([sys.executable, "-c", script, str(folder), str(given), str(out), class_name,
                               json.dumps(PROMPTS)], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            if found := refusal(reason):
                raise UserError(f"{folder} cannot be compared in a fresh process: {found.words}; {found.remedy} "
                                f"({tempfile.gettempdir()}, TMPDIR)")
            raise ExportDiffers(f"{folder} cannot be loaded in a fresh process: {reason}; please report it")
        return load_file(out)
