"""Whether a card computes what it should: kernels beside their definitions, the engine beside transformers."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from hybrid_rlhf import kernels
from hybrid_rlhf.commands.qualification.findings import DIFFERS, FAILED, NOTE, PASSED, SKIPPED, Row, Task, first_line
from hybrid_rlhf.core import nvidia
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.kernels import reference
from hybrid_rlhf.kernels.fusions import are_close
from hybrid_rlhf.kernels.ops import Fused, Ops
from hybrid_rlhf.models import quantize
from hybrid_rlhf.models.load import DTYPES, ModelConfig, load_causal_lm, random_model
from hybrid_rlhf.models.lora import LoraConfig, add_lora

# Largest difference from the definition: of attention's outputs, which are of size about 1; of fused operations and
# their gradients, as a share of a tensor's largest number (both sides round).
ATTENTION_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
FUSED_BOUNDS = {torch.float32: 5e-5, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
LOGPROB_BOUND = 1e-5
# Query heads, key heads, head size.
HEADS = ((32, 8, 64), (12, 12, 64), (32, 8, 128), (14, 2, 64), (6, 2, 80), (6, 2, 96), (6, 2, 112), (8, 4, 256))
DRAWS = ({}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05},
         {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 1.3})
DEFINITIONS = Fused(reference.rms_norm, reference.gated, reference.rotary)
# A sampled token's log-probability in 16 bits beside that of the training forward: mean and largest difference.
MEAN_DRIFT, MOST_DRIFT = 0.02, 0.3
# Made on the processor, so that every card meets the same numbers: along the tokens that are compared, the two most
# likely ones are 3e-4 or more apart in logits of size 1, and fp32 rounds in the sixth digit.
SMALL = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 997,
         "max_position_embeddings": 256, "initializer_range": 0.06, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}
SHAPES = {"opt": SMALL | {"word_embed_proj_dim": 256, "ffn_dim": 512, "init_std": 0.06},
          "llama": SMALL | {"num_key_value_heads": 2, "intermediate_size": 512, "tie_word_embeddings": True}}
NAMES = {"opt": "OPT", "llama": "Llama"}
DRY = {"hidden_size": 64, "num_hidden_layers": 2, "word_embed_proj_dim": 64, "ffn_dim": 64, "intermediate_size": 64}
PROMPT_LENGTHS = (9, 3, 17, 1, 6)
LEAST = 5  # seconds without which no further check is begun


def equality(task: Task) -> Iterator[Row]:
    """Rows of every check for which there is time."""
    ops = kernels.ops_for(task.device.type)
    if task.device.type == "cuda" and ops.name.startswith("reference ("):
        yield task.row("kernels", NOTE, f"the card's own kernels cannot be used: {ops.name}")
    checks: list[tuple[str, Callable[[], tuple[str, str]]]] = [
        *((f"attention, {_short(dtype)}", lambda d=dtype: _attention(task, ops, d)) for dtype in _dtypes(task)),
        ("sampling", lambda: _sampling(task, ops)),
        *((f"fused operations, {_short(dtype)}", lambda d=dtype: _fused(task, ops, d)) for dtype in _dtypes(task)),
        *((f"most likely tokens, {NAMES[kind]}{' with LoRA' * is_lora}",
           lambda k=kind, lora=is_lora: _greedy(task, k, lora)) for kind in SHAPES for is_lora in (False, True)),
        ("log-probabilities when sampling and training", lambda: _drift(task, "none")),
        ("the same with a 4-bit base", lambda: _drift(task, "4bit"))]
    for name, check in checks:
        if task.left < LEAST:
            yield task.row(name, SKIPPED, "no time left; give more --minutes")
            continue
        try:
            yield task.row(name, *check())
        except UserError as error:
            yield task.row(name, SKIPPED, first_line(error))
        except Exception as error:  # a row of the page, whatever torch, Triton or the driver raise
            with task.log.open("a", encoding="utf-8") as log:
                traceback.print_exc(file=log)
            yield task.row(name, FAILED, first_line(error))


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def _dtypes(task: Task) -> list[torch.dtype]:
    """Those that the device computes itself."""
    found = nvidia.capability(task.device)
    is_old = found is not None and found < nvidia.AMPERE
    return [d for d in DTYPES.values() if not (is_old and d == torch.bfloat16)]


def _half(task: Task) -> torch.dtype:
    """The 16-bit type of the device."""
    found = nvidia.automatic_dtype(task.device)
    return torch.bfloat16 if found == torch.float32 else found


def _judged(faults: list[str], what: str) -> tuple[str, str]:
    """State and line of a check that found these faults."""
    return (DIFFERS, "; ".join(faults[:3])) if faults else (PASSED, what)


# -- kernels -----------------------------------------------------------------------------------------------------------


def _draw(task: Task, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(task.device, dtype)


def _attention(task: Task, ops: Ops, dtype: torch.dtype) -> tuple[str, str]:
    faults, worst = [], 0.0
    shapes = HEADS[:2] if task.is_dry else HEADS
    for heads, groups, size in shapes:
        for has_more in (False, True) if (heads, size) == (32, 64) else (False,):
            gap = _attention_gap(task, ops, dtype, (heads, groups, size), has_more)
            worst = max(worst, gap)
            if not gap <= ATTENTION_BOUNDS[dtype]:
                faults.append(f"{heads} heads of {size} differ by {gap:.2g}, and rounding is at most "
                              f"{ATTENTION_BOUNDS[dtype]:.2g}")
    return _judged(faults, f"{len(shapes)} head sizes, largest difference {worst:.2g}")


@torch.no_grad()
def _attention_gap(task: Task, ops: Ops, dtype: torch.dtype, shape: tuple[int, int, int], has_more: bool) -> float:
    """The largest difference of one call from the definition; infinity where the cache left behind differs."""
    heads, groups, size = shape
    positions = [0, 3, -1, 40] if task.is_dry else [0, 3, -1, 40, 140, 63, 64, 65, 1500, 127, 128, 129]
    rows, width = len(positions), max(positions) + 1
    new = [_draw(task, dtype, rows, n, 1, size, seed=i) for i, n in enumerate((heads, groups, groups))]
    caches = [_draw(task, dtype, rows + 2, groups, width + 5, size, seed=3 + i) for i in range(2)]
    slots = torch.randperm(rows + 2, generator=torch.Generator().manual_seed(5))[:rows].to(task.device)
    columns = torch.tensor(positions, device=task.device)
    more: dict = {"scaling": size**-0.5}
    if has_more:
        random = torch.Generator().manual_seed(6)
        more |= {"mask": (torch.rand(rows, width, generator=random) < 0.7).to(task.device), "softcap": 5.0,
                 "sinks": torch.randn(heads, generator=random).to(task.device)}
    results = []
    for attend in (ops.decode_attention, reference.decode_attention):
        own = [c.clone() for c in caches]
        results.append((attend(*new, *own, slots, columns, width, **more).float(), own))
    (ours, mine), (want, theirs) = results
    if not all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)):
        return float("inf")
    gap = float((ours - want).abs().max())
    return gap if gap == gap else float("inf")


@torch.no_grad()
def _sampling(task: Task, ops: Ops) -> tuple[str, str]:
    faults, rows, sizes = [], 33, (300, 5003) if task.is_dry else (300, 50257, 151936)
    for vocab in sizes:
        logits = 3 * _draw(task, torch.float32, rows, vocab)
        streams = torch.arange(rows, device=task.device) * 7919 - 4000
        for settings in DRAWS:
            tokens, logprobs = ops.sample(logits, streams, streams + 3, **settings)
            want, want_logprobs = reference.sample(logits, streams, streams + 3, **settings)
            other = int((tokens != want).sum())
            gap = float((logprobs - want_logprobs).abs().where(tokens == want, 0.0).max())
            # on a card the definition itself sums in another order: the last token that top-p keeps may differ
            if other > ("top_p" in settings) or not gap <= LOGPROB_BOUND:
                faults.append(f"{vocab} words with {settings or 'no limits'}: {other} of {rows} tokens are others, the "
                              f"log-probabilities of the rest differ by {gap:.2g}")
            kept = torch.empty_like(logits, dtype=torch.bool)
            drawn, logprobs = ops.sample(logits, streams, streams + 3, **settings, kept=kept)
            among = (logits / (settings.get("temperature") or 1.0)).masked_fill(~kept, float("-inf"))
            gap = float((logprobs - among.log_softmax(-1).gather(1, drawn[:, None])[:, 0]).abs().max())
            if int((drawn != tokens).sum()) > ("top_p" in settings) or not gap <= LOGPROB_BOUND:
                faults.append(f"{vocab} words with {settings or 'no limits'}: what is drawn where the words kept are "
                              f"asked for is another, or its log-probability among them differs, by {gap:.2g}")
    return _judged(faults, f"{len(DRAWS)} settings over {', '.join(map(str, sizes))} words: the same tokens")


def _fused(task: Task, ops: Ops, dtype: torch.dtype) -> tuple[str, str]:
    if ops.fused is None:
        return NOTE, "none on this device; the models' own code runs"
    faults = []
    width = 64 if task.is_dry else 2048
    x, weight, gate = _draw(task, dtype, 3, 7, width), _draw(task, dtype, width), _draw(task, dtype, 3, 7, width)
    angles = [_draw(task, dtype, 2, 7, 64, seed=i) for i in (1, 2)]
    cases: list[tuple[str, Callable, tuple[Tensor, ...], int]] = [
        ("norm", lambda by, x, w: by.rms_norm(x, w, 1e-5), (x, weight), 2),
        ("gate", lambda by, x, g: by.gated(g, x), (x, gate), 2),
        ("rotary positions", lambda by, *given: by.rotary(*given),
         (_draw(task, dtype, 2, 4, 7, 64), _draw(task, dtype, 2, 2, 7, 64), *angles), 2)]
    for name, call, given, num_leaves in cases:
        ours, want = (_with_gradients(call, by, given, num_leaves) for by in (ops.fused, DEFINITIONS))
        if not are_close(want, ours, FUSED_BOUNDS[dtype]):
            gap = max(float((a.float() - b.float()).abs().max()) for a, b in zip(ours, want, strict=True))
            faults.append(f"{name}: results or gradients differ by up to {gap:.2g}")
    return _judged(faults, "norm, gate and rotary positions, with gradients")


def _with_gradients(call: Callable, by: Fused, given: tuple[Tensor, ...], num_leaves: int) -> tuple[Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in given[:num_leaves]]
    found = call(by, *leaves, *given[num_leaves:])
    found = found if isinstance(found, tuple) else (found,)
    total = torch.stack([(f.float() * torch.linspace(-1, 1, f.numel(), device=f.device).view(f.shape)).sum()
                         for f in found]).sum()
    return (*(f.detach() for f in found), *torch.autograd.grad(total, leaves))


# -- the engine --------------------------------------------------------------------------------------------------------


def _shape(task: Task, kind: str) -> dict:
    shape = SHAPES[kind]
    return shape | {k: v for k, v in DRY.items() if k in shape} if task.is_dry else shape


def _prompts(lengths: Iterable[int], vocab: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab, (n,), generator=random).tolist() for n in lengths]


@torch.no_grad()
def _greedy(task: Task, kind: str, is_lora: bool) -> tuple[str, str]:
    """Tokens of captured and uncaptured steps beside those of transformers' generate, in fp32."""
    shape = _shape(task, kind)
    model = random_model(kind, shape, 0).to(task.device).eval()
    if is_lora:
        add_lora(model, LoraConfig(r=8))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(_draw(task, torch.float32, *parameter.shape) * 0.1)
    prompts, length, faults, captured = _prompts(PROMPT_LENGTHS, shape["vocab_size"]), 12, [], False
    want = [_by_transformers(model, prompt, length, task.device) for prompt in prompts]
    for capture in ("auto", None):
        engine = HybridEngine(model, model, max_batch=4, capture=capture)
        with engine.inference():
            drawn = engine.generate(prompts, SamplingConfig(max_new_tokens=length, temperature=0)).tokens
        said = engine.describe()
        captured = captured or said["captured"]
        steps = "with CUDA graphs" if capture and said["captured"] else "without CUDA graphs"
        if drawn != want:
            others = sum(a != b for a, b in zip(drawn, want, strict=True))
            faults.append(f"{steps}: {others} of {len(want)} responses are others than transformers'")
        if capture and task.device.type == "cuda" and not said["captured"]:
            faults.append(f"CUDA graphs were refused: {said.get('refused')}")
    ways = ", with CUDA graphs and without" if captured else ""
    return _judged(faults, f"the tokens of transformers' generate{ways}")


def _by_transformers(model: nn.Module, prompt: list[int], length: int, device: torch.device) -> list[int]:
    ids = torch.tensor([prompt], device=device)
    model.generation_config.eos_token_id = None
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length,
                         min_new_tokens=length, pad_token_id=0)
    return out[0, len(prompt):].tolist()


@torch.no_grad()
def _drift(task: Task, bits: str) -> tuple[str, str]:
    """Log-probabilities that the sampler gave its tokens beside those of the forward that trains, in 16 bits."""
    dtype, shape = _half(task), _shape(task, "llama") | {"initializer_range": 0.04}  # as unsure as a trained model
    model = random_model("llama", shape, 0, dtype).to(task.device).eval()
    if bits != "none":
        quantize.require("a 4-bit base")
        folder = task.folder / "small"
        model.save_pretrained(folder)
        held = ModelConfig(str(folder), dtype=str(dtype).removeprefix("torch."), load_in_4bit=True)
        model = load_causal_lm(held, task.device).eval()
    prompts = _prompts(PROMPT_LENGTHS * 4, shape["vocab_size"])
    engine = HybridEngine(model, model, max_batch=8)
    with engine.inference():
        drawn = engine.generate(prompts, SamplingConfig(max_new_tokens=24), seed=3)
    gaps: list[float] = []
    for prompt, tokens, logprobs in zip(prompts, drawn.tokens, drawn.logprobs, strict=True):
        ids = torch.tensor([prompt + tokens], device=task.device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        truth = logits.log_softmax(-1).gather(1, ids[0, len(prompt):, None])[:, 0].cpu()
        gaps += (torch.as_tensor(logprobs) - truth).abs().tolist()
    mean, most = sum(gaps) / len(gaps), max(gaps)
    is_close = mean <= MEAN_DRIFT and most <= MOST_DRIFT
    return (PASSED if is_close else DIFFERS,
            f"{_short(dtype)}: they differ by {mean:.2g} on average, {most:.2g} at most"
            + ("" if is_close else f" (expected: at most {MEAN_DRIFT:g} and {MOST_DRIFT:g})"))
