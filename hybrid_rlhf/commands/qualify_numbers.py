"""Check that a GPU computes the right numbers: kernels against their definitions, the engine against transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from hybrid_rlhf import kernels
from hybrid_rlhf.commands.qualify_page import NO_TIME, Row, State, Task, first_line
from hybrid_rlhf.core import accelerator
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.kernels import reference
from hybrid_rlhf.kernels.fusions import are_close, with_gradients
from hybrid_rlhf.kernels.ops import PAGE_COLUMNS, Fused, Ops
from hybrid_rlhf.models import quantize
from hybrid_rlhf.models.load import ModelConfig, load_causal_lm, random_model
from hybrid_rlhf.models.lora import LoraConfig, add_lora

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Largest difference of attention's outputs, which are about 1 in size, from the definition.
ATTENTION_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
# Of fused operations and their gradients, as a share of a tensor's largest number (both sides round).
FUSED_BOUNDS = {torch.float32: 5e-5, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
LOGPROB_BOUND = 1e-5
# Query heads, key heads, head size.
HEADS = ((32, 8, 64), (12, 12, 64), (32, 8, 128), (14, 2, 64), (6, 2, 80), (6, 2, 96), (6, 2, 112), (8, 4, 256))
DRAWS = ({}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05},
         {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 1.3})
DEFINITIONS = Fused(reference.rms_norm, reference.gated, reference.rotary)
# Sampler-trainer mismatch in 16 bits: mean and largest difference of a sampled token's log-probability.
MEAN_DRIFT, MOST_DRIFT = 0.02, 0.3
# Weights are drawn on the CPU, so that every card gets the same: at the tokens compared, the two most likely ones are
# at least 3e-4 apart in logits of size 1, and fp32 rounds in the sixth digit.
_SMALL = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 997,
          "max_position_embeddings": 256, "initializer_range": 0.06, "pad_token_id": 0, "bos_token_id": 1,
          "eos_token_id": 2}
SHAPES = {"OPT": _SMALL | {"word_embed_proj_dim": 256, "ffn_dim": 512, "init_std": 0.06},
          "Llama": _SMALL | {"num_key_value_heads": 2, "intermediate_size": 512, "tie_word_embeddings": True}}
_DRY = {"hidden_size": 64, "num_hidden_layers": 2, "word_embed_proj_dim": 64, "ffn_dim": 64, "intermediate_size": 64}
PROMPT_LENGTHS = (9, 3, 17, 1, 6)
LEAST_SECONDS = 5  # that must be left to begin another check

Result = tuple[State, str]  # state and line of a row


def equality(task: Task) -> Iterator[Row]:
    """A row for every check for which there is time."""
    ops = kernels.ops_for(task.device.type)
    if task.device.type == "cuda" and ops.name.startswith("reference ("):
        yield task.row("kernels", State.NOTE, f"the card's own kernels cannot be used: {ops.name}")
    capability = accelerator.capability(task.device)
    has_bf16 = capability is None or capability >= accelerator.AMPERE
    dtypes = {name: dtype for name, dtype in DTYPES.items() if has_bf16 or name != "bf16"}
    checks: dict[str, Callable[[], Result]] = {
        **{f"attention, {name}": partial(_attention, task, ops, dtype) for name, dtype in dtypes.items()},
        "sampling": partial(_sampling, task, ops),
        **{f"fused operations, {name}": partial(_fused, task, ops, dtype) for name, dtype in dtypes.items()},
        **{f"most likely tokens, {kind}{' with LoRA' * is_lora}": partial(_greedy, task, kind, is_lora)
           for kind in SHAPES for is_lora in (False, True)},
        "log-probabilities when sampling and training": partial(_drift, task, is_quantised=False),
        "the same with a 4-bit base": partial(_drift, task, is_quantised=True)}
    for name, check in checks.items():
        if task.left < LEAST_SECONDS:
            yield task.row(name, State.SKIPPED, NO_TIME)
            continue
        try:
            yield task.row(name, *check())
        except UserError as error:
            yield task.row(name, State.SKIPPED, first_line(error))
        except Exception as error:  # any error of torch, Triton or the driver
            yield task.failed(name, error)


def _judged(faults: list[str], text: str) -> Result:
    return (State.DIFFERS, "; ".join(faults[:3])) if faults else (State.PASSED, text)


def _draw(task: Task, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(task.device, dtype)


# -- kernels -----------------------------------------------------------------------------------------------------------


def _attention(task: Task, ops: Ops, dtype: torch.dtype) -> Result:
    faults, worst, bound = [], 0.0, ATTENTION_BOUNDS[dtype]
    shapes = HEADS[:2] if task.is_dry else HEADS
    for i, shape in enumerate((shapes[0], *shapes)):  # the first twice: also with a mask, a soft cap and sinks
        gap = _attention_gap(task, ops, dtype, shape, has_options=i == 0)
        worst = max(worst, gap)
        if not gap <= bound:
            faults.append(f"{shape[0]} heads of {shape[2]} differ by {gap:.2g}, and rounding is at most {bound:.2g}")
    return _judged(faults, f"{len(shapes)} head sizes, largest difference {worst:.2g}")


@torch.no_grad()
def _attention_gap(task: Task, ops: Ops, dtype: torch.dtype, shape: tuple[int, int, int], has_options: bool) -> float:
    """The largest difference of one call from the definition; infinity where the caches differ afterwards."""
    heads, groups, size = shape
    positions = [0, 3, -1, 40] if task.is_dry else [0, 3, -1, 40, 140, 63, 64, 65, 1500, 127, 128, 129]
    rows, width = len(positions), max(positions) + 1
    new = [_draw(task, dtype, rows, n, 1, size, seed=i) for i, n in enumerate((heads, groups, groups))]
    per_row = -(-width // PAGE_COLUMNS)
    pages = torch.randperm(rows * per_row, generator=torch.Generator().manual_seed(5)).view(rows, -1).to(task.device)
    options: dict = {"scaling": size**-0.5}
    if has_options:
        random = torch.Generator().manual_seed(6)
        options |= {"mask": (torch.rand(rows, width, generator=random) < 0.7).to(task.device), "softcap": 5.0,
                    "sinks": torch.randn(heads, generator=random).to(task.device)}
    outputs, caches = [], []
    for attend in (ops.decode_attention, reference.decode_attention):
        caches.append([_draw(task, dtype, rows * per_row, groups, PAGE_COLUMNS, size, seed=3 + i) for i in range(2)])
        outputs.append(attend(*new, *caches[-1], pages, torch.tensor(positions, device=task.device), width, **options))
    if not all(torch.equal(*pair) for pair in zip(*caches, strict=True)):
        return float("inf")
    gap = float((outputs[0].float() - outputs[1].float()).abs().max())
    return gap if gap == gap else float("inf")


@torch.no_grad()
def _sampling(task: Task, ops: Ops) -> Result:
    """Compare draws with the definition's, and draws that report their candidate tokens with those that do not."""
    faults, rows, sizes = [], 33, (300, 5003) if task.is_dry else (300, 50257, 151936)
    for vocab in sizes:
        logits = 3 * _draw(task, torch.float32, rows, vocab)
        streams = torch.arange(rows, device=task.device) * 7919 - 4000
        for settings in DRAWS:
            tokens, logprobs = ops.sample(logits, streams, streams + 3, **settings)
            expected, expected_logprobs = reference.sample(logits, streams, streams + 3, **settings)
            gap = float((logprobs - expected_logprobs).abs().where(tokens == expected, 0.0).max())
            candidates = torch.empty_like(logits, dtype=torch.bool)
            replayed, replayed_logprobs = ops.sample(logits, streams, streams + 3, **settings, kept=candidates)
            among = (logits / (settings.get("temperature") or 1.0)).masked_fill(~candidates, float("-inf"))
            truth = among.log_softmax(-1).gather(1, replayed[:, None])[:, 0]
            # on a GPU the definition itself sums in another order: the last token that top-p keeps may differ
            spared, what = int("top_p" in settings), f"{vocab} words with {settings or 'no limits'}"
            if (other := int((tokens != expected).sum())) > spared or not gap <= LOGPROB_BOUND:
                faults.append(f"{what}: {other} of {rows} tokens are others, the log-probabilities of the rest differ "
                              f"by {gap:.2g}")
            gap = float((replayed_logprobs - truth).abs().max())
            if int((replayed != tokens).sum()) > spared or not gap <= LOGPROB_BOUND:
                faults.append(f"{what}: where the candidate tokens are asked for, another token is drawn, or its "
                              f"log-probability among them differs, by {gap:.2g}")
    return _judged(faults, f"{len(DRAWS)} settings over {', '.join(map(str, sizes))} words: the same tokens")


def _fused(task: Task, ops: Ops, dtype: torch.dtype) -> Result:
    """Compare norm, gate and rotary positions with their definitions, results and gradients."""
    if ops.fused is None:
        return State.NOTE, "none on this device; the models' own code runs"
    width, faults = 64 if task.is_dry else 2048, []
    x, weight, gate = _draw(task, dtype, 3, 7, width), _draw(task, dtype, width), _draw(task, dtype, 3, 7, width)
    heads = [_draw(task, dtype, 2, count, 7, 64) for count in (4, 2)]
    angles = [_draw(task, dtype, 2, 7, 64, seed=i) for i in (1, 2)]
    cases: dict[str, tuple[Callable, list[Tensor]]] = {
        "norm": (lambda by, x, w: by.rms_norm(x, w, 1e-5), [x, weight]),
        "gate": (lambda by, x, g: by.gated(g, x), [x, gate]),
        "rotary positions": (lambda by, q, k: by.rotary(q, k, *angles), heads)}
    for name, (call, inputs) in cases.items():
        ours, want = ((*results, *gradients) for results, gradients in (
            with_gradients(partial(call, by), tuple(inputs)) for by in (ops.fused, DEFINITIONS)))
        if not are_close(want, ours, FUSED_BOUNDS[dtype]):
            gap = max(float((a.float() - b.float()).abs().max()) for a, b in zip(ours, want, strict=True))
            faults.append(f"{name}: results or gradients differ by up to {gap:.2g}")
    return _judged(faults, "norm, gate and rotary positions, with gradients")


# -- the engine --------------------------------------------------------------------------------------------------------


def _shape(task: Task, kind: str) -> dict:
    shape = SHAPES[kind]
    return shape | {k: v for k, v in _DRY.items() if k in shape} if task.is_dry else shape


def _prompts(lengths: Iterable[int], vocab: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab, (n,), generator=random).tolist() for n in lengths]


@torch.no_grad()
def _greedy(task: Task, kind: str, is_lora: bool) -> Result:
    """Compare tokens of captured and uncaptured steps with those of transformers' generate, in fp32."""
    shape, length = _shape(task, kind), 12
    model = random_model(kind.lower(), shape, 0).to(task.device).eval()
    if is_lora:
        add_lora(model, LoraConfig(r=8))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(_draw(task, torch.float32, *parameter.shape) * 0.1)
    prompts, faults, ways = _prompts(PROMPT_LENGTHS, shape["vocab_size"]), [], ""
    expected = [_by_transformers(model, prompt, length, task.device) for prompt in prompts]
    for capture in ("auto", None):
        engine = HybridEngine(model, model, max_batch=4, capture=capture)
        with engine.inference():
            drawn = engine.generate(prompts, SamplingConfig(max_new_tokens=length, temperature=0)).tokens
        description = engine.describe()
        is_captured = bool(capture and description["captured"])
        ways = ways or ", with CUDA graphs and without" * is_captured
        if drawn != expected:
            others = sum(a != b for a, b in zip(drawn, expected, strict=True))
            faults.append(f"with{'' if is_captured else 'out'} CUDA graphs: {others} of {len(expected)} responses are "
                          "others than transformers'")
        if capture and task.device.type == "cuda" and not is_captured:
            faults.append(f"CUDA graphs were refused: {description.get('refused')}")
    return _judged(faults, f"the tokens of transformers' generate{ways}")


def _by_transformers(model: nn.Module, prompt: list[int], length: int, device: torch.device) -> list[int]:
    ids = torch.tensor([prompt], device=device)
    model.generation_config.eos_token_id = None
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length,
                         min_new_tokens=length, pad_token_id=0)
    return out[0, len(prompt):].tolist()


@torch.no_grad()
def _drift(task: Task, is_quantised: bool) -> Result:
    """Compare the sampler's log-probabilities of its tokens with those of the training forward, in 16 bits."""
    automatic = accelerator.automatic_dtype(task.device)
    dtype = torch.bfloat16 if automatic == torch.float32 else automatic
    shape = _shape(task, "Llama") | {"initializer_range": 0.04}  # an entropy as of a trained model
    model = random_model("llama", shape, 0, dtype).to(task.device).eval()
    if is_quantised:
        quantize.require("a 4-bit base")
        folder = task.folder / "small"
        model.save_pretrained(folder)
        config = ModelConfig(str(folder), dtype=str(dtype).removeprefix("torch."), load_in_4bit=True)
        model = load_causal_lm(config, task.device).eval()
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
    name = next(name for name, each in DTYPES.items() if each == dtype)
    text = f"{name}: they differ by {mean:.2g} on average, {most:.2g} at most"
    if mean <= MEAN_DRIFT and most <= MOST_DRIFT:
        return State.PASSED, text
    return State.DIFFERS, f"{text} (expected: at most {MEAN_DRIFT:g} and {MOST_DRIFT:g})"
