"""How fast a card is at what a run does: copies, products, launches, a decode step, a rollout."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F

from hybrid_rlhf.commands.qualification.findings import DIFFERS, NOTE, PASSED, SKIPPED, Row, Task, wait_for
from hybrid_rlhf.core import nvidia
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.memory_plan import machine_rates
from hybrid_rlhf.memory_plan.amounts import size_text
from hybrid_rlhf.memory_plan.rates import SHARES, Points, Rates
from hybrid_rlhf.models.load import random_model

RATES = "rates"  # the name of the row whose numbers are those of Rates
LLAMA_1B = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 4096,
            "tie_word_embeddings": True}
LLAMA_134M = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
              "num_key_value_heads": 12, "vocab_size": 32000, "max_position_embeddings": 4096}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 499, "max_position_embeddings": 256}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL_CARD = 6 << 30  # below, the smaller model
SLOW = 3.0  # times of reading the weights that a recorded decode step may take
REPEATS = 3


def speed(task: Task) -> Iterator[Row]:
    """Rows of the rates, a decode step and a rollout."""
    rates = _machine(task)
    if rates is not None:
        yield task.row(RATES, NOTE, _described(rates), rates=rates.stored())
    if task.left < 20 and not task.is_dry:
        yield task.row("decode step", SKIPPED, "no time left; give more --minutes")
        return
    yield from _decoding(task, rates)


def half_of(task: Task) -> torch.dtype:
    """What model.dtype auto is here; its width decides the bytes that a step reads."""
    return nvidia.automatic_dtype(task.device)


def _described(rates: Rates) -> str:
    products = ", ".join(f"{points[-1][1] / 1e12:.3g} TFLOPS {name}" for name, points in rates.products.items())
    return (f"a copy moves {rates.peak_memory / 1e9:.3g} GB/s; products {products}; the host needs "
            f"{1e6 * rates.launch:.3g} us for an operation")


# -- rates -------------------------------------------------------------------------------------------------------------


def _machine(task: Task) -> Rates | None:
    """The rates of the card; on a processor those that --plan measures itself, where nothing has to be compiled."""
    if task.device.type == "cpu":
        return machine_rates.machine_rates(half_of(task)) if machine_rates.can_measure() else None
    return card_rates(task.device, half_of(task), is_dry=task.is_dry)


@torch.no_grad()
def card_rates(device: torch.device, dtype: torch.dtype, *, is_dry: bool = False) -> Rates:
    """Measured; the shortest kernel and the gap between two are assumed, as for cards that are not here."""
    products = {str(d).removeprefix("torch."): _products(device, d, is_dry) for d in (dtype, torch.float32)}
    attention = {str(dtype).removeprefix("torch."): _attention(device, dtype, is_dry)}
    forward, backward = _launches(device)
    own_forward, own_backward = _launches(torch.device("cpu"))
    code = machine_rates.CODE - 1  # a model's own Python around each operation, by what this processor takes for one
    return Rates(torch.cuda.get_device_name(device), ((1.0, bandwidth(device, is_dry)),), products, attention=attention,
                 launch=forward + code * own_forward, gradient_launch=backward + code * own_backward, overlaps=True,
                 kernel=SHARES["kernel"], gap=SHARES["gap"], captures=True)


def seconds_of(act: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Of one call, after one that is not counted: the median."""
    act()
    taken = []
    for _ in range(repeats):
        wait_for(device)
        start = time.perf_counter()
        act()
        wait_for(device)
        taken.append(time.perf_counter() - start)
    return max(statistics.median(taken), 1e-9)


def bandwidth(device: torch.device, is_dry: bool) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.ones(2**16 if is_dry else 2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(10):
            target.copy_(source)

    return 20 * source.numel() / seconds_of(copy, device)


def _products(device: torch.device, dtype: torch.dtype, is_dry: bool) -> Points:
    """By rows, which are the shortest side."""
    width, found = 64 if is_dry else 4096, []
    weight = torch.ones(width, width, dtype=dtype, device=device)
    for rows in (8, 32) if is_dry else (64, 512, 4096):
        given = torch.ones(rows, width, dtype=dtype, device=device)

        def multiply(given: torch.Tensor = given) -> None:
            for _ in range(10):
                F.linear(given, weight)

        found.append((float(rows), 10 * 2 * rows * width * width / seconds_of(multiply, device)))
    return tuple(found)


def _attention(device: torch.device, dtype: torch.dtype, is_dry: bool) -> float:
    """Operations per second of causal attention, forward, counted as the plan counts them."""
    rows, heads, length, width = (1, 2, 32, 16) if is_dry else (4, 16, 512, 64)
    query, key, value = (torch.ones(rows, heads, length, width, dtype=dtype, device=device) for _ in range(3))

    def attend() -> None:
        for _ in range(10):
            F.scaled_dot_product_attention(query, key, value, is_causal=True)

    return 10 * 2 * rows * heads * length * length * width / seconds_of(attend, device)


def _launches(device: torch.device) -> tuple[float, float]:
    """Seconds of the host for a small module's call: without gradients, and of forward and backward each."""
    model, count = nn.Sequential(*(nn.SiLU() for _ in range(32))), 32
    given = torch.ones(1, 8, device=device).requires_grad_()

    def forward() -> None:
        model(given)

    def both() -> None:
        model(given).sum().backward()

    with torch.no_grad():
        plain = seconds_of(forward, device, 10)
    with torch.enable_grad():
        return plain / count, seconds_of(both, device, 10) / (2 * count)


# -- the engine --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _decoding(task: Task, rates: Rates | None) -> Iterator[Row]:
    """A decode step of 8 sequences over the time of reading its weights, and tokens per second of a rollout."""
    device, (name, shape) = task.device, _model_for(task)
    rows, prompt, response = (4, 8, 16) if task.is_dry else (8, 256, 128)
    with torch.device(device if device.type == "cuda" and not task.is_dry else "cpu"):
        model = random_model("llama", shape | IDS, 0, half_of(task)).to(device).eval()
    random = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, shape["vocab_size"], (rows, prompt), generator=random).tolist()
    engine = HybridEngine(model, model, max_batch=rows)

    def generate(length: int) -> None:
        engine.generate(prompts, SamplingConfig(max_new_tokens=length), seed=0)

    def rollout() -> None:
        with engine.inference():
            generate(response)

    whole = seconds_of(rollout, device)
    with engine.inference():
        long, short = (seconds_of(lambda n=n: generate(n), device) for n in (response, response // 2))
        said = engine.describe()
    step = max(long - short, 1e-9) / (response - response // 2)
    rate = rates.peak_memory if rates else bandwidth(device, task.is_dry)
    read = weight_bytes(model) / rate  # seconds
    case = f"{name}, {rows} sequences of {prompt} + {response} tokens"
    is_slow = not task.is_dry and step > SLOW * read
    is_wrong = is_slow or not (task.is_dry or said["captured"])
    yield task.row("decode step", NOTE if task.is_dry else DIFFERS if is_wrong else PASSED,
                   f"{1000 * step:.3g} ms for a token of each, {step / read:.3g} times what reading the weights "
                   f"({size_text(weight_bytes(model))}) takes ({case})" + _ways(said, device, is_slow),
                   seconds=step, over_reading=step / read, case=case, engine={k: str(v) for k, v in said.items()})
    yield task.row("rollout", NOTE, f"{rows * response / whole:.4g} tokens/s",
                   tokens_per_second=rows * response / whole, seconds=whole)


def _ways(said: dict, device: torch.device, is_slow: bool) -> str:
    """What is unusual about the way in which tokens were made."""
    slow = f"; more than {SLOW:g} times is slow" if is_slow else ""
    return slow + ("" if said["captured"] or device.type == "cpu" else
                   f"; without CUDA graphs, which is slow: {said.get('refused')}")


def _model_for(task: Task) -> tuple[str, dict]:
    if task.is_dry:
        return "tiny Llama", TINY
    _, total = torch.cuda.mem_get_info(task.device)
    return ("Llama-134M shape", LLAMA_134M) if total < SMALL_CARD else ("Llama-1B shape", LLAMA_1B)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the matrices that a decode step reads, each once."""
    weights = {m.weight.data_ptr(): m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    return sum(w.numel() * w.element_size() for w in weights.values())
