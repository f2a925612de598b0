"""Rollout speed: our decode engine beside transformers, on the same weights, prompts and machine, in one run.

    python benchmarks/rollout.py [--cases fixed fixed_fp32 stories3M ragged ...] [--json FILE] [--stories FOLDER]

The peer is `generate`, in the cases named *_batch transformers' own continuous batching (`generate_batch`), and in
llama_cpp llama.cpp (rollout_llama.py). Both sides sample at temperature 1 from the same module (beside llama.cpp both
are greedy), alternating, after one unmeasured run each; figures are medians, with the least and the most. Prompts are
distinct. Useful tokens per second count responses only, and of each no more than was asked for. floor_ratio is the time
of the case over its floor (rollout_floor.py). step_ratio is the time of one of our decode steps over that of the
matrix products of its weights alone, as torch multiplies them; own_step_ratio is the same over our own products, which
are faster on some processors.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import rollout_llama
import torch
from harness import Times, alternate, machine, seconds, write_rows
from peers.continuous_batching import continuous_batching
from peers.process import python_for
from rollout_floor import floor_of
from torch import nn

from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.engine.hybrid import HybridEngine

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
    is_batch: bool = False  # the peer is generate_batch

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
    "fixed_batch": lambda _: replace(even("fixed_batch", llama(SHAPE_134M, torch.bfloat16), 16, 128, 64),
                                     is_batch=True),
    "ragged_batch": lambda _: replace(ragged(llama(SHAPE_134M, torch.bfloat16)), name="ragged_batch", is_batch=True),
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


def step_seconds(engine: HybridEngine, case: Case, repeats: int) -> float:
    """Seconds of a decode step: the difference between long and short responses.

    All rows have the longest prompt, so that the engine reads it once and prefilling does not drown the difference.
    """
    prompts, steps = [max(case.prompts, key=len)] * case.rows, 32
    short, long = (Case(case.name, case.model, prompts, [n] * case.rows, case.rows) for n in (2, 2 + steps))
    times = alternate(repeats, lambda: by_engine(engine, short), lambda: by_engine(engine, long))
    return (times[1].median - times[0].median) / steps


def check_equal(engine: HybridEngine, case: Case) -> None:
    """Greedy tokens of both sides are equal, or there is nothing to compare. fp32 only: bf16 has ties."""
    if next(case.model.parameters()).dtype == torch.float32:
        few = Case(case.name, case.model, case.prompts[:4], [8] * 4, 4)
        if by_engine(engine, few, 0.0) != by_transformers(few, 0.0):
            raise SystemExit(f"{case.name}: greedy tokens differ from transformers' generate; not measured")


def sides(engine: HybridEngine, case: Case, repeats: int) -> list[Times]:
    """Seconds of the engine and of the peer."""
    if not case.is_batch:
        return alternate(repeats, lambda: by_engine(engine, case), lambda: by_transformers(case))
    # its manager patches the model and keeps a thread, so it is made anew for each turn and only its work is measured
    ours, theirs = [], []
    for _ in range(repeats + 1):
        ours.append(seconds(lambda: by_engine(engine, case)))
        with continuous_batching(case.model, case.prompts, case.limits, case.rows) as peer:
            theirs.append(seconds(peer))
    return [Times(statistics.median(t[1:]), min(t[1:]), max(t[1:])) for t in (ours, theirs)]


def measure(case: Case, repeats: int) -> list[dict]:
    engine = engine_for(case)
    check_equal(engine, case)
    ours, peer = sides(engine, case, repeats)
    step = step_seconds(engine, case, repeats)
    by_engine(engine, case)  # the cache that the floor asks about is the case's
    floor = floor_of(engine, case, repeats)
    row = {"case": case.name, "ours": case.useful / ours.median, "peer": case.useful / peer.median,
           "ratio": peer.median / ours.median, "floor_ratio": ours.median / floor.whole,
           "step_ratio": step / floor.step_torch, "own_step_ratio": step / floor.step_own,
           "unit": "tokens/s", "machine": machine(), "ours_range": [case.useful / t for t in ours[1:][::-1]],
           "peer_range": [case.useful / t for t in peer[1:][::-1]], "seconds": ours.median, "step_seconds": step,
           "floor_seconds": floor._asdict()}
    engine_is, theirs = engine.describe(), "generate_batch" if case.is_batch else "generate"
    ranges = [f"{row[k]:.1f} ({row[k + '_range'][0]:.0f}-{row[k + '_range'][1]:.0f})" for k in ("ours", "peer")]
    print(f"{case.name:12} ours {ranges[0]}  {theirs} {ranges[1]} tokens/s  ratio {row['ratio']:.2f}  "
          f"floor_ratio {row['floor_ratio']:.2f}  step / products: torch's {row['step_ratio']:.2f}, ours "
          f"{row['own_step_ratio']:.2f}  ({engine_is['path']}, {engine_is['kernels']}, {engine_is['fused']})",
          flush=True)
    return [row]


def measure_llama(options: argparse.Namespace) -> list[dict]:
    """Decoding and prompts beside llama.cpp, bf16; no rows where it is not installed."""
    if not rollout_llama.is_installed(options.peer_python):
        rollout_llama.skipped(options.peer_python)
        return []
    def work_of(model: nn.Module, response: int) -> tuple[HybridEngine, Case, rollout_llama.Work]:
        case = even("llama_cpp", model, 16, 128, response)
        engine = engine_for(case)
        return engine, case, rollout_llama.Work(
            model, case.prompts, response, lambda n: by_engine(engine, replace(case, limits=[n] * case.rows), 0.0))

    equal = rollout_llama.check_same(work_of(llama(SHAPE_134M, torch.float32), 8)[2], options.peer_python)
    engine, case, work = work_of(llama(SHAPE_134M, torch.bfloat16), 64)
    sides = rollout_llama.beside_llama(work, options.repeats, options.peer_python, options.peer_cache)
    return rollout_llama.rows_of(sides, work, floor_of(engine, case, options.repeats), equal)


def rows_of(name: str, options: argparse.Namespace) -> list[dict]:
    return measure_llama(options) if name == "llama_cpp" else measure(CASES[name](options), options.repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*CASES, "llama_cpp"]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each side; the median counts")
    parser.add_argument("--threads", type=int, default=None, help="torch threads; torch's own choice if not given")
    parser.add_argument("--stories", help="folder of stories3M; random weights of its shape if not given")
    parser.add_argument("--peer_python", default=python_for("llama_cpp") or sys.executable,
                        help="a Python that has llama-cpp-python; the peers' own if `make bench-peers` made it")
    parser.add_argument("--peer_cache", default="f16", choices=["f16", "bf16"], help="dtype of llama.cpp's cache")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    write_rows((row for name in options.cases for row in rows_of(name, options)), options.json)


if __name__ == "__main__":
    main()
