"""Decoding on a card beside transformers' generate, on random weights of real shapes: where a step spends its time, and
what the card holds beside tensors.

    python benchmarks/card.py [--cases opt-8 qwen-64 qwen-64-cut llama8-16-nf4 qwen-ragged] [--products] [--quick]
        [--json FILE]

Both sides sample at temperature 1 from the same module and prompts, without stop tokens. A step is the difference
between a whole and a half response, over their tokens; over_weights is its time over that of reading every product's
weight once at the measured rate of a copy. The peer is measured once after a short call, ours three times (the median).
The command for one of PPO's steps is in docs/results/gpu.md. --products: microseconds of single products of a decode
layer by torch and by ours in place of the cases, recorded over weights that no cache holds, the least of two replays.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import harness
import torch
from harness import alternate, device, measuring, parse, parser_of, write_json
from random_models import ragged_limits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.models.load import ModelConfig, load_causal_lm
from hybrid_rlhf.models.lora import LoraConfig, add_lora

SHAPES = {
    "qwen2.5-0.5b": ("qwen2", dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, vocab_size=151936,
                                   num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True)),
    "opt-1.3b": ("opt", dict(hidden_size=2048, ffn_dim=8192, num_hidden_layers=24, num_attention_heads=32,
                             vocab_size=50272, word_embed_proj_dim=2048)),
    "llama-3-8b, 8 layers": ("llama", dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=8,
                                           num_attention_heads=32, num_key_value_heads=8, vocab_size=128256)),
    "tiny": ("llama", dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=2, vocab_size=499)),
}


@dataclass(frozen=True)
class Sizes:
    """rows sequences of prompt + response tokens; is_4bit: NF4, with adapters of rank 16. is_ragged: groups of 8, and
    responses of a geometric law's lengths, 256 at once over pages beside 64 in whole slots' place. is_truncated: draws
    are cut by top-k and top-p, with a record of what is left, as PPO's are (the peer's are not)."""

    shape: str
    rows: int
    prompt: int
    response: int
    is_4bit: bool = False
    is_ragged: bool = False
    is_truncated: bool = False


CASES = {"opt-8": Sizes("opt-1.3b", 8, 256, 128), "qwen-64": Sizes("qwen2.5-0.5b", 64, 256, 256),
         "qwen-64-cut": Sizes("qwen2.5-0.5b", 64, 256, 256, is_truncated=True),
         "llama8-16-nf4": Sizes("llama-3-8b, 8 layers", 16, 256, 64, is_4bit=True),
         "qwen-ragged": Sizes("qwen2.5-0.5b", 512, 256, 512, is_ragged=True)}


def seconds(act: Callable[[], object], repeats: int = 3) -> float:
    return statistics.median(harness.seconds(act) for _ in range(repeats))


def copy_rate(size: int) -> float:
    """Bytes per second that a copy on the device reads and writes."""
    source = torch.empty(size, dtype=torch.uint8, device=device()).random_(0, 255)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), 9)


def model_of(case: Sizes) -> nn.Module:
    kind, settings = SHAPES[case.shape]
    config = AutoConfig.for_model(kind, **settings, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    torch.manual_seed(0)
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    if case.is_4bit:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            del model
            model = load_causal_lm(ModelConfig(folder, dtype="bfloat16", load_in_4bit=True), device())
        add_lora(model, LoraConfig(r=16))
        model.eval()
    model.generation_config.eos_token_id = None
    return model


def measure(name: str, case: Sizes, rate: float) -> dict:
    model = model_of(case)
    draws = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 300, (case.rows, case.prompt), generator=draws).tolist()
    engine = HybridEngine(model, model, max_batch=case.rows)
    cut = dict(top_k=50, top_p=0.9) if case.is_truncated else {}

    def generate(length: int) -> None:
        engine.generate(prompts, SamplingConfig(max_new_tokens=length, **cut), seed=0, keep_candidates=bool(cut))

    def rollout() -> None:
        with engine.inference():
            generate(case.response)

    with torch.no_grad():
        rollout()
        whole = seconds(rollout)
        with engine.inference():
            half = case.response // 2
            step = (seconds(lambda: generate(case.response)) - seconds(lambda: generate(half))) / (case.response - half)
            kernels = kernels_of(lambda: generate(half), half)
            said = {key: str(value) for key, value in engine.describe().items()}
    weights = {m.weight.data_ptr(): m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    read = sum(w.numel() * w.element_size() for w in weights.values())
    row = {"case": name, "rows": case.rows, "prompt": case.prompt, "response": case.response, "seconds": whole,
           "tokens_per_second": case.rows * case.response / whole, "step_seconds": step, "read_bytes": read,
           "over_weights": step * rate / read, "engine": said, "kernels": kernels} | beside()
    if not case.is_4bit:
        taken = by_transformers(model, torch.tensor(prompts, device=device()), case.response)
        row |= {"peer_seconds": taken, "ratio": taken / whole}
    return row


@torch.no_grad()
def measure_ragged(name: str, case: Sizes) -> dict:
    """Tokens per second with 64 and with 256 sequences at once in the same memory, in turns."""
    model, draws = model_of(case), torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 300, (case.rows // 8, case.prompt), generator=draws).repeat_interleave(8, 0).tolist()
    limits = ragged_limits(case.rows, max(2, case.response // 4), case.response, draws)
    engines = {str(count): HybridEngine(model, model, max_batch=count) for count in (64, 256)}

    def rollout(engine: HybridEngine) -> None:
        with engine.inference():
            engine.generate(prompts, SamplingConfig(max_new_tokens=case.response), seed=0, limits=limits)

    for engine in engines.values():
        rollout(engine)
    times = alternate(3, *(partial(rollout, engine) for engine in engines.values()))
    rates = {count: sum(limits) / each.median for count, each in zip(engines, times, strict=True)}
    said = engines["256"].describe()
    return {"case": name, "tokens_per_second": rates["256"], "by_rows": rates, "ratio": rates["256"] / rates["64"],
            "kv_bytes": {count: engine.kv_bytes for count, engine in engines.items()},
            "engine": {key: str(value) for key, value in said.items()}} | beside()


@torch.no_grad()
def by_transformers(model: nn.Module, ids: Tensor, response: int) -> float:
    def generate(length: int) -> None:
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
                       top_p=1.0, max_new_tokens=length, min_new_tokens=length, pad_token_id=0)

    generate(4)
    return seconds(lambda: generate(response), 1)


def kernels_of(act: Callable[[], object], steps: int) -> list[list]:
    """[name, microseconds a step, calls a step] of the kernels that take the most time, the prompts' among them."""
    if not torch.cuda.is_available():
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        act()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
    return [[row.key[:110], row.self_device_time_total / steps, row.count / steps] for row in rows[:16]]


def beside() -> dict[str, int]:
    """What a card holds beside what torch has reserved of it."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"beside_bytes": total - free - torch.cuda.memory_reserved()}


# in, out, whether with a gate: of SmolLM2, Qwen2.5-0.5B, OPT-1.3B and Llama-3-8B
PRODUCTS = ((576, 1536, True), (1536, 576, False), (896, 1152, False), (896, 896, False), (896, 4864, True),
            (4864, 896, False), (2048, 2048, False), (2048, 6144, False), (2048, 8192, False), (8192, 2048, False),
            (4096, 6144, False), (4096, 4096, False), (4096, 14336, True), (14336, 4096, False))


@torch.no_grad()
def measure_products(rate: float) -> list[dict]:
    """A row for each shape at 8 and 64 rows; floor: reading the weights at `rate`."""
    from hybrid_rlhf.kernels.triton_layer import Matrix, product

    rows = []
    for count, (size_in, size_out, is_gated) in itertools.product((8, 64), PRODUCTS):
        size = 2 * size_in * size_out * (1 + is_gated)
        x = torch.randn(count, size_in, device="cuda", dtype=torch.bfloat16)
        sets = [[torch.randn(size_out, size_in, device="cuda", dtype=torch.bfloat16) for _ in range(1 + is_gated)]
                for _ in range(min(48, max(2, 150_000_000 // size)))]

        def by_torch(weights: list[Tensor], x: Tensor = x) -> Tensor:
            out = F.linear(x, weights[0])
            return F.silu(out) * F.linear(x, weights[1]) if len(weights) == 2 else out

        def by_us(weights: list[Tensor], x: Tensor = x) -> Tensor:
            return product(x, [*map(Matrix, weights)], activation="silu" * (len(weights) == 2),
                           is_gated=len(weights) == 2)

        row = {"rows": count, "in": size_in, "out": size_out, "gate": is_gated, "floor": 1e6 * size / rate,
               "torch": recorded_microseconds(by_torch, sets), "ours": recorded_microseconds(by_us, sets)}
        print(", ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        rows.append(row)
    return rows


def recorded_microseconds(act: Callable[[list[Tensor]], Tensor], sets: list[list[Tensor]]) -> float:
    """Of one call of `act`, recorded over all of `sets`."""
    act(sets[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weights in sets:
            act(weights)
    graph.replay()
    return 1e6 * min(harness.seconds(graph.replay) for _ in range(2)) / len(sets)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, CASES)
    parser.add_argument("--products", action="store_true", help="single products; needs a card")
    options = parse(parser, argv)
    if torch.cuda.is_available():
        measuring.wait = torch.cuda.synchronize
    rate, rows = copy_rate(2**20 if options.quick else 2**31), []
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "the processor"
    print(f"{name}, torch {torch.__version__}: a copy moves {rate / 1e9:.0f} GB/s", flush=True)
    rows += measure_products(rate) if options.products else []
    for case in () if options.products else options.cases:
        sizes = CASES[case]
        if options.quick:
            sizes = replace(sizes, shape="tiny", rows=16 if sizes.is_ragged else 2, prompt=8, response=4)
        if sizes.is_ragged:
            rows.append(measure_ragged(case, sizes) | {"device": name})
            rates = ", ".join(f"{n} at once {speed:.0f} tokens/s" for n, speed in rows[-1]["by_rows"].items())
            print(f"{case:14} {rates}; ratio {rows[-1]['ratio']:.2f}", flush=True)
            continue
        row = measure(case, sizes, rate)
        rows.append(row | {"device": name, "copy_bytes_per_second": rate})
        peer = f", {row['ratio']:.1f} times transformers'" if "ratio" in row else ""
        print(f"{case:14} {row['tokens_per_second']:.0f} tokens/s in {row['seconds']:.3f} s{peer}; a step "
              f"{1e3 * row['step_seconds']:.2f} ms, {row['over_weights']:.2f} of reading the weights; "
              f"{row['engine']['path']}, recorded: {row['engine']['captured']}", flush=True)
    if options.json:
        write_json(Path(options.json), rows)


if __name__ == "__main__":
    main()
