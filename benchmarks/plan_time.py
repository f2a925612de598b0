"""Predicted seconds of a PPO step beside measured ones: how far `--plan` is off on this machine.

    python benchmarks/plan_time.py [--cases llama4m_bf16 ...] [--json FILE] [--page docs/results/plan_time.md]

Four roles, 8 sequences of 64 + 64 tokens of one length, random weights. Each repeat calibrates as --plan does,
predicts, and measures one step; a ratio is predicted over measured. full: four models, actor and critic trained whole;
lora: rank 16, one base for all. The aim: a median error of at most 20% over all cases and phases.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
from harness import add_clock, machine, measuring, parse, parser_of, shown, sizes_of, table_of, write_rows, write_tables
from random_models import TimedStep, make_folders, policy_config, prompts_of, roles_of, trainer_of

from hybrid_rlhf.core import metrics
from hybrid_rlhf.core.allocator import keep_freed_blocks
from hybrid_rlhf.memory_plan import machine_rates
from hybrid_rlhf.memory_plan.plan import Generation, Role
from hybrid_rlhf.memory_plan.step_time import StepTime, step_time

CPU = torch.device("cpu")
ROWS, PROMPT, RESPONSE = 8, 64, 64
PHASES = ("generate", "score", "update")
AIM = 0.2  # the median error, of all ratios


class Case(NamedTuple):
    shape: str
    dtype: str
    is_lora: bool


CASES = {f"{shape}_{short}{'_lora' * is_lora}": Case(shape, dtype, is_lora)
         for shape in ("llama4m", "llama34m", "llama134m", "opt125m")
         for short, dtype in (("bf16", "bfloat16"), ("fp32", "float32")) for is_lora in (False, True)}


def roles_for(place: Path, case: Case, rows: int, prompt: int, response: int) -> list[Role]:
    """What --plan has for this step: every eighth response is scored by the actor too (rollout/old_logprobs.py)."""
    base = "actor" if case.is_lora else None
    frozen, trained = (policy_config(place, lora, case.dtype) for lora in (False, case.is_lora))
    shape = dict(length=prompt + response, rows=rows)
    generation = Generation(rows, prompt, response, sequences=rows)
    return [Role("actor", trained, **shape, predicted=response, trains=True, entropy=True, generation=generation,
                 scored=-(-rows // 8), trained=rows),
            Role("ref", frozen, **shape, predicted=response, base=base, scored=rows),
            Role("critic", trained, **shape, trains=True, base=base, scored=rows, trained=rows),
            Role("reward", trained if case.is_lora else frozen, **shape, base=base, scored=rows)]


def predicted(place: Path, case: Case, sizes: Sequence[int]) -> StepTime:
    """With rates measured anew."""
    machine_rates.machine_rates.cache_clear()
    return step_time(roles_for(place, case, *sizes), CPU, machine_rates.machine_rates(getattr(torch, case.dtype)))


def by_phase(found: StepTime) -> dict[str, float]:
    update = sum(v for name, v in found.phases.items() if name.startswith(("train", "step")))
    return {"generate": found.phases["generate"], "score": found.phases["score"], "update": update}


def row_of(name: str, options: argparse.Namespace, folder: Path) -> dict:
    """A case's ratios: predicted over measured, of each repeat."""
    case, sizes = CASES[name], sizes_of(options, ROWS, PROMPT, RESPONSE)
    case = case._replace(shape="tiny") if options.quick else case
    place = folder / case.shape
    if not place.exists():
        make_folders(case.shape, place)
    roles, reward = roles_of(place, lora=case.is_lora, share="all" if case.is_lora else "none", dtype=case.dtype,
                             micro_batch_tokens=8192)
    step = TimedStep(trainer_of(roles, reward, sizes[2]), roles.actor.engine, prompts_of(place, sizes[0], sizes[1]),
                     [sizes[2]] * sizes[0])
    step.step()
    taken: list[dict[str, float]] = []
    said: list[dict[str, float]] = []
    for _ in range(options.repeats):
        said.append(by_phase(predicted(place, case, sizes)))
        with patch.object(metrics, "time", SimpleNamespace(perf_counter=measuring.clock)):
            step.step()
        seconds = step.seconds
        taken.append({"generate": seconds["time/generate"], "score": seconds["time/score"],
                      "update": seconds["time/train"]})
    ratios = {p: [s[p] / t[p] for s, t in zip(said, taken, strict=True)] for p in PHASES}
    row = {"case": name, "shape": case.shape, "dtype": case.dtype, "way": "lora" if case.is_lora else "full",
           "predicted": {p: statistics.median(s[p] for s in said) for p in PHASES},
           "measured": {p: statistics.median(t[p] for t in taken) for p in PHASES}, "ratios": ratios,
           "machine": machine()}
    print(f"{name:20}" + "   ".join(f"{p} {shown(row['predicted'][p])}/{shown(row['measured'][p])} s = "
                                    f"{shown(statistics.median(ratios[p]))}" for p in PHASES), flush=True)
    return row


def rows_of(options: argparse.Namespace) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cases:
            yield row_of(name, options, Path(folder))


def errors(rows: Sequence[dict], phases: Sequence[str] = PHASES) -> list[float]:
    """|ratio - 1| of every case and phase, by the median of its repeats."""
    return [abs(statistics.median(row["ratios"][p]) - 1) for row in rows for p in phases]


def tables_of(rows: Sequence[dict]) -> list[str]:
    def cell(row: dict, phase: str) -> str:
        found = row["ratios"][phase]
        return (f"{row['predicted'][phase]:.3g} / {row['measured'][phase]:.3g} = **{statistics.median(found):.2f}** "
                f"({min(found):.2f} to {max(found):.2f})")

    whole = statistics.median(errors(rows))
    summary = [(p, f"{statistics.median(errors(rows, [p])):.0%}", f"{max(errors(rows, [p])):.0%}") for p in PHASES]
    summary.append(("all", f"{'' if whole <= AIM else '**'}{whole:.0%}{'' if whole <= AIM else '**'}",
                    f"{max(errors(rows)):.0%}"))
    return [table_of(("model", "dtype", "trained", *(f"{p}: predicted / measured s" for p in PHASES)),
                     [(row["shape"], row["dtype"], row["way"], *(cell(row, p) for p in PHASES)) for row in rows]),
            table_of(("phase", f"median error (asked <= {AIM:.0%})", "largest"), summary),
            table_of(("machine",), [(rows[0]["machine"],)])]


def main(argv: Sequence[str] | None = None) -> None:
    parser = add_clock(parser_of(__doc__, CASES, repeats=3))
    parser.add_argument("--page", help="write the tables to this Markdown page")
    options = parse(parser, argv)
    machine_rates.clock = measuring.clock
    keep_freed_blocks()  # as the launcher does
    rows = write_rows(rows_of(options), options.json)
    print(f"median error {statistics.median(errors(rows)):.0%} (asked: at most {AIM:.0%})")
    if options.page:
        write_tables(Path(options.page), *tables_of(rows))


if __name__ == "__main__":
    main()
