"""Is a folder the model it was made from? A fresh process that knows only transformers says what it computes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.disk import refusal
from hybrid_rlhf.export.folder import BOUNDS, ExportDiffers

PROMPTS = ("Once upon a time", "What is the capital of France?", "1 2 3 4")
NUM_TOKENS = 16
_SCRIPT = """
import json, sys, torch, transformers
from safetensors.torch import load_file, save_file
folder, given, out, kind, prompts = sys.argv[1:6]
transformers.logging.set_verbosity_error(); transformers.logging.disable_progress_bar()
model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32, use_safetensors=True).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
found = {f"prompt.{i}": tokenizer(text, return_tensors="pt").input_ids for i, text in enumerate(json.loads(prompts))}
with torch.no_grad():
    for name, ids in load_file(given).items():
        found["logits." + name] = model(input_ids=ids, use_cache=False).logits.float().contiguous()
save_file(found, out)
"""


@torch.no_grad()
def answers(model: nn.Module, tokenizer) -> dict[str, Tensor]:  # noqa: ANN001
    """What `model` computes: prompt.I (1, P) ids, sequence.I (1, T) with NUM_TOKENS greedy ones (none of a scalar
    model), logits.I (1, T, V) or (1, 1) fp32."""
    found, is_scalar = {}, hasattr(model, "score")
    for i, text in enumerate(PROMPTS):
        ids = tokenizer(text, return_tensors="pt").input_ids
        found[f"prompt.{i}"] = ids
        for _ in range(0 if is_scalar else NUM_TOKENS):
            best = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)
            ids = torch.cat([ids, best[:, None]], 1)
        found[f"sequence.{i}"] = ids
        found[f"logits.{i}"] = model(input_ids=ids, use_cache=False).logits.float()
    return found


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
        difference = float((mine - theirs).abs().max()) / scale
        if not difference <= bound:
            raise ExportDiffers(f"{folder}: reloaded in a fresh process its outputs differ by {difference:.3g} "
                                f"(relative); at most {bound} is rounding: please report it")
        largest = max(largest, difference)
        if mine.ndim == 3:
            top = mine.topk(2, -1).values
            is_sure = top[..., 0] - top[..., 1] > 2 * bound * scale
            if bool(((mine.argmax(-1) != theirs.argmax(-1)) & is_sure).any()):
                raise ExportDiffers(f"{folder}: reloaded in a fresh process it chooses other tokens; please report it")
    return largest


def _fresh(live: dict[str, Tensor], folder: str | Path, class_name: str) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as place:
        given, out = Path(place) / "given.safetensors", Path(place) / "out.safetensors"
        save_file({name.removeprefix("sequence."): value.contiguous() for name, value in live.items()
                   if name.startswith("sequence.")}, given)
        done = subprocess.run([sys.executable, "-c", _SCRIPT, str(folder), str(given), str(out), class_name,
                               json.dumps(PROMPTS)], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            if found := refusal(reason):
                raise UserError(f"{folder} cannot be compared in a fresh process: {found.words}; {found.remedy} "
                                f"({tempfile.gettempdir()}, TMPDIR)")
            raise ExportDiffers(f"{folder} cannot be loaded in a fresh process: {reason}; please report it")
        return load_file(out)
