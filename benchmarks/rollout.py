"""Rollout speed: our decode engine beside transformers' generate, on the same weights, prompts and machine, in one run.

    python benchmarks/rollout.py [--cases fixed fixed_fp32 stories3M ragged] [--json FILE] [--stories FOLDER]

Both sides sample at temperature 1 from the same module, alternating, after one unmeasured run each; figures are
medians. Prompts are distinct. Useful tokens per second count responses only, and of each no more than was asked for.
floor_ratio is the time of one of our decode steps over that of the matrix products of its weights alone: 1 is the
floor.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from hybrid_rlhf.engine.hybrid import HybridEngine
from hybrid_rlhf.engine.sampling import SamplingConfig

SHAPE_134M = dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
                  num_key_value_heads=12, vocab_size=32000, max_position_embeddings=512)
SHAPE_3M = dict(hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6, head_dim=32,
                num_key_value_heads=2, vocab_size=4096, max_position_embeddings=512, tie_word_embeddings=True)


@dataclass
class Case:
    """A model and its requests; `rows` run at once, each response has exactly its limit of tokens."""

    name: str
    model: nn.Module
    prompts: list[list[int]]
    limits: list[int]
    rows: int

    @property
    def useful(self) -> int:
        return sum(self.limits)


# -- the cases ---------------------------------------------------------------------------------------------------------


def llama(shape: dict, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **shape, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def stories(folder: str | None) -> nn.Module:
    if folder is None:
        return llama(SHAPE_3M, torch.float32)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def random_prompts(lengths: list[int], model: nn.Module) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, model.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]


def even(name: str, model: nn.Module, rows: int, prompt: int, response: int) -> Case:
    return Case(name, model, random_prompts([prompt] * rows, model), [response] * rows, rows)


def ragged(model: nn.Module) -> Case:
    """64 requests, prompts of 16-128 tokens, responses geometric with mean 24, at most 128; 16 run at once."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(16, 129, (64,), generator=generator).tolist()
    limits = torch.empty(64).geometric_(1 / 24, generator=generator).clamp(1, 128).int().tolist()
    return Case("ragged", model, random_prompts(lengths, model), limits, 16)


CASES: dict[str, Callable[[argparse.Namespace], Case]] = {
    "fixed": lambda _: even("fixed", llama(SHAPE_134M, torch.bfloat16), 16, 128, 64),
    "fixed_fp32": lambda _: even("fixed_fp32", llama(SHAPE_134M, torch.float32), 16, 128, 64),
    "stories3M": lambda options: even("stories3M", stories(options.stories), 64, 64, 64),
    "ragged": lambda _: ragged(llama(SHAPE_134M, torch.bfloat16)),
}


# -- the two sides -----------------------------------------------------------------------------------------------------


def engine_for(case: Case) -> HybridEngine:
    """An engine without stop tokens, so that lengths are those of the case."""
    case.model.generation_config.eos_token_id = None
    engine = HybridEngine.for_inference(case.model, SimpleNamespace(eos_token_id=None, pad_token_id=0))
    engine.max_batch = case.rows
    return engine


def by_engine(engine: HybridEngine, case: Case, temperature: float = 1.0) -> list[list[int]]:
    sampling = SamplingConfig(max_new_tokens=max(case.limits), temperature=temperature)
    with engine.inference():
        return engine.generate(case.prompts, sampling, seed=0, limits=case.limits).tokens


def by_transformers(case: Case, temperature: float = 1.0) -> list[list[int]]:
    """generate in batches of `rows`, padded on the left; a sequence at its limit is stopped, a batch at its longest."""
    tokens = []
    for start in range(0, len(case.prompts), case.rows):
        prompts, limits = case.prompts[start : start + case.rows], case.limits[start : start + case.rows]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        drawn = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0) if temperature else {}
        with torch.no_grad():
            out = case.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max(limits), pad_token_id=0,
                                      stopping_criteria=stops(limits, width), **({"do_sample": False} | drawn))
        tokens += [row[:n] for row, n in zip(out[:, width:].tolist(), limits, strict=True)]
    return tokens


def stops(limits: list[int], width: int):  # noqa: ANN201
    from transformers import StoppingCriteria, StoppingCriteriaList

    ends = torch.tensor(limits) + width

    class AtLimit(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: object, **_others: object) -> torch.Tensor:
            return input_ids.shape[1] >= ends

    return StoppingCriteriaList([AtLimit()])


# -- measuring ---------------------------------------------------------------------------------------------------------


def seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def alternate(repeats: int, *acts: Callable[[], object]) -> list[float]:
    """Median seconds of each, taken in turns after one unmeasured round."""
    for act in acts:
        act()
    rounds = [[seconds(act) for act in acts] for _ in range(repeats)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def products(engine: HybridEngine, rows: int) -> Callable[[], float]:
    """The matrix products of one decode step as the engine computes them, and nothing else; returns seconds."""
    layers = [m for m in engine.model.modules() if isinstance(m, nn.Linear)]
    inputs = {m.in_features: torch.randn(rows, m.in_features).to(m.weight.dtype) for m in layers}

    def run() -> None:
        for layer in layers:
            layer(inputs[layer.in_features])

    def timed() -> float:
        with engine.inference():
            return seconds(run)

    return timed


def floor_ratio(engine: HybridEngine, case: Case, repeats: int) -> float:
    """Time of a decode step, as the difference between long and short responses, over its matrix products.

    All rows have the longest prompt, so that the engine reads it once and prefilling does not drown the difference.
    """
    prompts, steps = [max(case.prompts, key=len)] * case.rows, 32
    short, long = (Case(case.name, case.model, prompts, [n] * case.rows, case.rows) for n in (2, 2 + steps))
    multiply = products(engine, case.rows)
    times = alternate(repeats, lambda: by_engine(engine, short), lambda: by_engine(engine, long))
    floor = statistics.median(multiply() for _ in range(2 * repeats + 1))
    return (times[1] - times[0]) / steps / floor


def check_equal(engine: HybridEngine, case: Case) -> None:
    """Greedy tokens of both sides are equal, or there is nothing to compare. fp32 only: bf16 has ties."""
    if next(case.model.parameters()).dtype == torch.float32:
        few = Case(case.name, case.model, case.prompts[:4], [8] * 4, 4)
        if by_engine(engine, few, 0.0) != by_transformers(few, 0.0):
            raise SystemExit(f"{case.name}: greedy tokens differ from transformers' generate; not measured")


def measure(case: Case, repeats: int) -> dict:
    engine = engine_for(case)
    check_equal(engine, case)
    ours, peer = alternate(repeats, lambda: by_engine(engine, case), lambda: by_transformers(case))
    row = {"case": case.name, "ours": case.useful / ours, "peer": case.useful / peer, "ratio": peer / ours,
           "floor_ratio": floor_ratio(engine, case, repeats), "unit": "tokens/s", "machine": machine()}
    engine_is = getattr(engine, "describe", dict)()
    print(f"{case.name:12} ours {row['ours']:8.1f}  transformers {row['peer']:8.1f} tokens/s  ratio {row['ratio']:5.2f}"
          f"  decode step / its products {row['floor_ratio']:5.2f}  "
          f"({engine_is.get('path')}, {engine_is.get('kernels')})", flush=True)
    return row


def machine() -> str:
    import transformers

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    kind = torch.backends.cpu.get_cpu_capability()
    return (f"{name}, {torch.get_num_threads()} threads of {os.cpu_count()}, {kind}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each side; the median counts")
    parser.add_argument("--threads", type=int, default=None, help="torch threads; torch's own choice if not given")
    parser.add_argument("--stories", help="folder of stories3M; random weights of its shape if not given")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = [measure(CASES[name](options), options.repeats) for name in options.cases]
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
