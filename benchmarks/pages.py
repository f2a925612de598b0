"""Pages of keys and values that slots share beside whole slots: time and memory of a rollout, in turns in one run.

    python benchmarks/pages.py [--groups 8] [--samples 8] [--repeats 5] [--json FILE]

A Llama shape of 3.1M or 134M parameters in fp32 samples groups; prompts have 16 to 256 tokens, responses a geometric
law's length with mean 48, at most 256. Memory is what the engine reports of each layout.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from unittest import mock

import torch
from harness import Case, add_clock, alternate, memory_status, parse, parser_of, timed_row, write_rows
from random_models import ragged_limits
from rollout import SHAPE_3M, SHAPE_134M, by_engine, engine_for, llama, random_prompts
from rollout_floor import Requests

from hybrid_rlhf.engine.decode.runner import Runner

CASES = {"3M": (Case("groups, 3.1M fp32, ragged", "whole slots", 1, None), SHAPE_3M),
         "134M": (Case("groups, 134M fp32, ragged", "whole slots", 1, None), SHAPE_134M)}


def requests_of(options: argparse.Namespace, shape: dict) -> Requests:
    model = llama(options, shape | {"max_position_embeddings": 512}, torch.float32)
    draws = torch.Generator().manual_seed(2)
    lengths = torch.randint(16, 257, (options.groups,), generator=draws).tolist()
    prompts = [prompt for prompt in random_prompts(lengths, model) for _ in range(options.samples)]
    return Requests(model, prompts, ragged_limits(len(prompts), 48, 256, draws), min(64, len(prompts)))


def measure(name: str, options: argparse.Namespace) -> dict:
    case, shape = CASES[name]
    requests = requests_of(options, shape)
    engine, tokens, memory = engine_for(requests), {}, {}

    def paged() -> None:
        tokens["pages"] = by_engine(engine, requests)
        memory["pages"] = engine.kv_bytes

    def whole() -> None:
        with mock.patch.object(Runner, "takes_pages", False):
            tokens["whole"] = by_engine(engine, requests)
        memory["whole"] = engine.kv_bytes

    times = alternate(options.repeats, paged, whole)
    if tokens["pages"] != tokens["whole"]:
        raise SystemExit(f"{name}: tokens over pages differ from those of whole slots")
    return timed_row(name, case, times, {}, requests.num_tokens, kv_bytes=memory,
                     memory_ratio=round(memory["pages"] / memory["whole"], 3), most_resident=memory_status("VmHWM"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = add_clock(parser_of(__doc__, CASES, repeats=5))
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    options = parse(parser, argv)
    write_rows((measure(name, options) for name in options.cases), options.json)


if __name__ == "__main__":
    main()
