"""Rollout speed: our decode engine beside transformers, on the same weights, prompts and machine, in one run.

    python benchmarks/rollout.py [--cases fixed fixed_fp32 stories3M ragged ...] [--json FILE]

The peer is `generate`, in the cases named *_batch transformers' own continuous batching (`generate_batch`), and in
llama_cpp llama.cpp (rollout_llama.py). Both sides sample at temperature 1 from the same module (beside llama.cpp both
are greedy), alternating, after one unmeasured run each; figures are medians, with the least and the most. Prompts are
distinct. Useful tokens per second count responses only, and of each no more than was asked for. floor_ratio is the time
of the case over its floor (rollout_floor.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace

import rollout_llama
import torch
from harness import Case, add_clock, parse, parser_of, seconds, sizes_of, timed_row, with_floors, write_rows
from peers.continuous_batching import continuous_batching
from peers.process import python_for
from random_models import SHAPES, ragged_limits
from rollout_floor import Requests, floor_of
from torch import nn

from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.engine.hybrid import HybridEngine

SHAPE_134M = SHAPES["llama134m"][1]
SHAPE_3M = dict(hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6, head_dim=32,
                num_key_value_heads=2, vocab_size=4096, max_position_embeddings=512, tie_word_embeddings=True)


# -- the requests ------------------------------------------------------------------------------------------------------


def llama(options: argparse.Namespace, shape: dict, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = SHAPES["tiny"][1] if options.quick else shape
    config = AutoConfig.for_model("llama", **shape, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def random_prompts(lengths: list[int], model: nn.Module) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, model.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]


def even(options: argparse.Namespace, shape: dict = SHAPE_134M, dtype: torch.dtype = torch.bfloat16,
         sizes: Sequence[int] = (16, 128, 64)) -> Requests:
    """sizes: requests, which all run at once, and the lengths of their prompts and responses."""
    model, (rows, prompt, response) = llama(options, shape, dtype), sizes_of(options, *sizes)
    return Requests(model, random_prompts([prompt] * rows, model), [response] * rows, rows)


def ragged(options: argparse.Namespace) -> Requests:
    """64 requests, prompts of 16-128 tokens, responses geometric with mean 24, at most 128; 16 run at once."""
    model, generator = llama(options, SHAPE_134M, torch.bfloat16), torch.Generator().manual_seed(2)
    count, shortest, longest, rows = sizes_of(options, 64, 16, 128, 16)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return Requests(model, random_prompts(lengths, model), ragged_limits(count, 24, longest, generator), rows)


# -- the two sides -----------------------------------------------------------------------------------------------------


def engine_for(requests: Requests) -> HybridEngine:
    """An engine without stop tokens, so that lengths are those of the requests."""
    requests.model.generation_config.eos_token_id = None
    engine = HybridEngine.for_inference(requests.model, SimpleNamespace(eos_token_id=None, pad_token_id=0))
    engine.max_batch = requests.rows
    return engine


def by_engine(engine: HybridEngine, requests: Requests, temperature: float = 1.0) -> list[list[int]]:
    sampling = SamplingConfig(max_new_tokens=max(requests.limits), temperature=temperature)
    with engine.inference():
        return engine.generate(requests.prompts, sampling, seed=0, limits=requests.limits).tokens


def by_transformers(requests: Requests, temperature: float = 1.0) -> list[list[int]]:
    """generate in batches of `rows`, padded on the left; a sequence at its limit is stopped, a batch at its longest."""
    tokens = []
    for start in range(0, len(requests.prompts), requests.rows):
        prompts, limits = (each[start : start + requests.rows] for each in (requests.prompts, requests.limits))
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        drawn = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0) if temperature else {}
        with torch.no_grad():
            out = requests.model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=max(limits), pad_token_id=0,
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


def batch_seconds(requests: Requests) -> float:
    """Of generate_batch. Its manager patches the model and keeps a thread, so it is made anew for each turn and only
    its work is measured."""
    model, prompts, limits, rows = requests
    with continuous_batching(model, prompts, limits, rows) as run:
        return seconds(run)


# -- measuring ---------------------------------------------------------------------------------------------------------


def check_equal(name: str, engine: HybridEngine, requests: Requests) -> None:
    """Greedy tokens of both sides are equal, or there is nothing to compare. fp32 only: bf16 has ties."""
    if next(requests.model.parameters()).dtype == torch.float32:
        few = requests._replace(prompts=requests.prompts[:4], limits=[8] * 4, rows=4)
        if by_engine(engine, few, 0.0) != by_transformers(few, 0.0):
            raise SystemExit(f"{name}: greedy tokens differ from transformers' generate; not measured")


def measure(name: str, options: argparse.Namespace) -> dict:
    requests, case = CASES[name].prepare(options), CASES[name]
    engine = engine_for(requests)
    check_equal(name, engine, requests)
    peer = partial(batch_seconds, requests) if name.endswith("_batch") else partial(seconds, lambda: by_transformers(
        requests))
    times, floors = with_floors(options.repeats, lambda: floor_of(engine, requests, 1),
                                partial(seconds, lambda: by_engine(engine, requests)), peer)
    floor = sorted(floors, key=lambda found: found.whole)[(len(floors) - 1) // 2]
    return timed_row(name, case, times, {"floor_ratio": floor.whole}, requests.num_tokens,
                     seconds=times[0].median, floor_seconds=floor._asdict(),
                     engine={key: engine.describe()[key] for key in ("path", "kernels", "fused")})


def measure_llama(options: argparse.Namespace) -> Iterator[dict]:
    """Decoding and prompts beside llama.cpp, bf16; no rows where it is not installed."""
    if not rollout_llama.is_installed(options.peer_python):
        rollout_llama.skipped(options.peer_python)
        return

    def work_of(dtype: torch.dtype, sizes: Sequence[int]) -> tuple[HybridEngine, Requests, rollout_llama.Work]:
        requests = even(options, dtype=dtype, sizes=sizes)
        engine = engine_for(requests)
        return engine, requests, rollout_llama.Work(requests.model, requests.prompts, requests.limits[0], lambda n: (
            by_engine(engine, requests._replace(limits=[n] * requests.rows), 0.0)))

    equal = rollout_llama.check_same(work_of(torch.float32, (16, 128, 8))[2], options.peer_python)
    engine, requests, work = work_of(torch.bfloat16, (16, 128, 64))
    sides = rollout_llama.beside_llama(work, options.repeats, options.peer_python, options.peer_cache)
    floor = floor_of(engine, requests, options.repeats)
    for name, phase in (("llama_cpp", "decode"), ("llama_cpp_prompt", "prompt")):
        yield rollout_llama.row_of(name, LLAMA[name], phase, sides, work, floor, equal_tokens_fp32=equal)


GENERATE, BATCH = "transformers generate", "transformers generate_batch"
CASES = {
    "fixed": Case("rollout, 134M bf16, equal lengths", GENERATE, 2.4, 1.4, even),
    "fixed_fp32": Case("rollout, 134M fp32, equal lengths", GENERATE, 1.3, None, partial(even, dtype=torch.float32)),
    "stories3M": Case("rollout, 3.1M fp32, 64 at once", GENERATE, 3, 1.4,
                      partial(even, shape=SHAPE_3M, dtype=torch.float32, sizes=(64, 64, 64))),
    "ragged": Case("rollout, 134M bf16, ragged", GENERATE, 6, 1.4, ragged),
    "fixed_batch": Case("rollout, 134M bf16, equal lengths", BATCH, 3, 1.4, even),
    "ragged_batch": Case("rollout, 134M bf16, ragged", BATCH, 1, None, ragged),
}
LLAMA = {
    "llama_cpp": Case("decode, 134M bf16, 16 streams", "llama.cpp, bf16", 1, 1.4),
    "llama_cpp_prompt": Case("the same, reading the prompts", "llama.cpp, bf16", None, 1.4),
}


def rows_of(options: argparse.Namespace) -> Iterator[dict]:
    for name in options.cases:
        if name == "llama_cpp":
            yield from measure_llama(options)
        else:
            yield measure(name, options)


def main(argv: Sequence[str] | None = None) -> None:
    parser = add_clock(parser_of(__doc__, [*CASES, "llama_cpp"], repeats=5), threads=None)
    parser.add_argument("--peer_python", default=python_for("llama_cpp") or sys.executable,
                        help="a Python that has llama-cpp-python; the peers' own if `make bench-peers` made it")
    parser.add_argument("--peer_cache", default="f16", choices=["f16", "bf16"], help="dtype of llama.cpp's cache")
    options = parse(parser, argv)
    write_rows(rows_of(options), options.json)


if __name__ == "__main__":
    main()
