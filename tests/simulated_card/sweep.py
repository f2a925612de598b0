"""Out of memory at the allocations of a small PPO run in turn: the run must go on to the same numbers, or end with one
line that says in which phase, and what would help.

    python -m tests.simulated_card.sweep [--cases full lora qlora] [--page docs/results/out_of_memory.md]

Tried are the first and the last allocation of every line of the product that makes some; with --all, all of them.
"""

from __future__ import annotations

import argparse
import io
import logging
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from hybrid_rlhf.cli import main
from tests.simulated_card import runs, simulated_card
from tests.simulated_card.card import place

CASES = {"full": [], "lora": [*runs.LORA], "qlora": [*runs.LORA, "--model.load_in_4bit", "true"]}
PHASES = r"while loading|while preparing|while generating|while scoring|while updating|while saving|" \
         r"while trying the export|while exporting|while evaluating|in the .*optimizer|in the .*update|in the .*score"
CURE = r"--preset|--plan|shorten|lower|micro_batch|smaller|gradient_checkpointing|max_new_tokens|fewer"

INTRO = """# Out of memory, allocation by allocation

PPO with a reward model on the simulated card (`tests/simulated_card`): two steps, checkpoints, export, a tiny model.
The first and the last allocation of every line that makes some fails once, as on a full card. The run goes on to the
same numbers, or ends with one line that names the phase and what would help. Made by
`python -m tests.simulated_card.sweep --page docs/results/out_of_memory.md`.

Of two processes one fails, at every ZeRO stage: in the first pass and in later ones, forward and backward, between two
sums over processes, with checkpointing, with offloading, and scoring by weights in parts. Both go on under one limit to
plain torch's weights, and to those of a run under that limit from the start, to 1e-5
(`pytest -m slow tests/distributed/test_memory_together.py`, gloo on CPUs; NCCL was not tried).

| case | allocations | tried | go on, same numbers | one line | anything else |
|---|---|---|---|---|---|"""


class Outcome(NamedTuple):
    """kind: "goes on", "explained" or what is wrong."""

    at: int
    line: str
    kind: str
    said: str


def words(case: str) -> list[str]:
    return runs.words("ppo", "--roles.reward.model_name_or_path", "reward", *CASES[case], "--train.save_steps", "1")


def prepare(folder: Path, case: str) -> tuple[list[dict], list[str]]:
    """(metrics of a run with enough memory, the line of each of its allocations)."""
    runs.prepare(folder)
    lines: list[str] = []
    with runs.inside(folder), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        with simulated_card():
            assert main([*runs.words("reward", *CASES[case]), "--output_dir", "reward"]) == 0
        with simulated_card() as card, pytest.MonkeyPatch.context() as patch:
            take = card.memory.take
            patch.setattr(card.memory, "take", lambda size: (size and lines.append(place()), take(size))[1])
            assert main([*words(case), "--output_dir", "plain"]) == 0
    return runs.metrics(folder / "plain"), lines


def tried(folder: Path, case: str, at: int, line: str, expected: list[dict]) -> Outcome:
    """What becomes of the run whose allocation number `at` (from 0) fails."""
    shutil.rmtree(folder / "tried", ignore_errors=True)
    said = io.StringIO()
    with runs.inside(folder), redirect_stdout(said), redirect_stderr(said), simulated_card() as card:
        card.memory.fail_at = at + 1
        try:
            code = main([*words(case), "--output_dir", "tried"])
        except BaseException:
            return Outcome(at, line, "traceback", traceback.format_exc())
        failed = card.memory.count > at
    logging.shutdown()
    return Outcome(at, line, _kind(code, said.getvalue(), folder, expected, failed), said.getvalue())


def _kind(code: int, said: str, folder: Path, expected: list[dict], failed: bool) -> str:
    if not failed:
        return "not reached"
    if code == 0:
        found = runs.metrics(folder / "tried")
        same = len(found) == len(expected) and all(
            left == pytest.approx(right, rel=1e-3, abs=1e-4) for left, right in zip(found, expected, strict=True))
        return "goes on" if same else "other numbers"
    errors = [text for text in said.splitlines() if text.startswith("error: ")]
    if code != 2 or len(errors) != 1:
        return f"ends with code {code} and {len(errors)} lines"
    if "out of memory" not in errors[0] or not re.search(PHASES, errors[0]) or not re.search(CURE, errors[0]):
        return "a line without phase or cure"
    return "explained"


def chosen(lines: list[str], is_all: bool) -> Iterable[int]:
    """The first allocation and the last one of every line."""
    if is_all:
        return range(len(lines))
    first, last = {}, {}
    for at, line in enumerate(lines):
        first.setdefault(line, at)
        last[line] = at
    return sorted({*first.values(), *last.values()})


def sweep(folder: Path, case: str, *, is_all: bool = False, every: int = 1) -> tuple[int, list[Outcome]]:
    """(allocations of a run, what became of those that were tried: of the chosen ones every so-manieth)."""
    expected, lines = prepare(folder, case)
    found = []
    for at in list(chosen(lines, is_all))[::every]:
        found.append(tried(folder, case, at, lines[at], expected))
        print(f"{case} {at}/{len(lines)} {found[-1].kind}: {lines[at]}", file=sys.__stderr__, flush=True)
    return len(lines), found


def page(found: dict[str, tuple[int, list[Outcome]]]) -> str:
    """What became of the runs, by case and by the module whose allocation failed."""
    rows = [INTRO]
    for case, (total, outcomes) in found.items():
        kinds = Counter(outcome.kind for outcome in outcomes)
        good = kinds["goes on"], kinds["explained"]
        rows.append(f"| {case} | {total} | {len(outcomes)} | {good[0]} | {good[1]} | {len(outcomes) - sum(good)} |")
    rows += ["", "| where the allocation failed | go on | one line |", "|---|---|---|"]
    by_module: dict[str, Counter] = {}
    for _, outcomes in found.values():
        for outcome in outcomes:
            by_module.setdefault(outcome.line.split(":")[0], Counter())[outcome.kind] += 1
    rows += [f"| {module} | {kinds['goes on'] or ''} | {kinds['explained'] or ''} |"
             for module, kinds in sorted(by_module.items())]
    return "\n".join(rows) + "\n"


def run() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES])
    options.add_argument("--all", action="store_true")
    options.add_argument("--page", type=Path)
    given = options.parse_args()
    found: dict[str, tuple[int, list[Outcome]]] = {}
    for case in given.cases:
        with tempfile.TemporaryDirectory() as folder:
            found[case] = sweep(Path(folder), case, is_all=given.all)
        print(case, Counter(outcome.kind for outcome in found[case][1]))
        for outcome in found[case][1]:
            if outcome.kind not in ("goes on", "explained"):
                print(f"--- {outcome.at} {outcome.line}: {outcome.kind}\n{outcome.said[-1500:]}")
    if given.page:
        given.page.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    run()
