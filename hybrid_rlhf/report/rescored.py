"""A run's rollouts scored by another reward: both curves, and the step at which the run's own began to be hacked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybrid_rlhf.core.own_files import write_file
from hybrid_rlhf.core.strict_json import to_json
from hybrid_rlhf.report.alarms import MIN_FALL, NUM_ERRORS, series, turning
from hybrid_rlhf.report.plots import draw_two
from hybrid_rlhf.report.summary import table
from hybrid_rlhf.report.terminal import number

PAGE, FIGURES, PICTURE = "replay.md", "replay.json", "replay.png"
RULE = ("Hacking began where the other reward, as a mean over a tenth of the steps, was at its highest, if from there "
        f"to the end it fell (by more than {NUM_ERRORS:g} standard errors, and {MIN_FALL:g} of its standard deviation) "
        "while the run's own reward rose (by more than two standard errors).")
MAX_ROWS = 12


def began(history: Sequence[dict]) -> int | None:
    """The step at which hacking began, by RULE; None where it did not, or where fewer than four steps have both.

    history: rows with step, reward (the run's own), other and other_std. The step is the middle one of those whose mean
    is the highest.
    """
    rows = [row for row in history if row["reward"] is not None and row["other"] is not None]
    reward, other, spread = (series(rows, name) for name in ("reward", "other", "other_std"))
    if reward is None or other is None or spread is None:
        return None
    best = turning(reward, other, spread.start)
    return None if best is None else other.steps[best + other.size // 2]


def verdict(history: Sequence[dict], name: str) -> str:
    """What the curves say, in a sentence. name: of the other reward."""
    step = began(history)
    if step is not None:
        return f"hacking began around step {step}: from there on the run's own reward rose while {name} fell"
    if sum(row["reward"] is not None and row["other"] is not None for row in history) < 4:
        return "fewer than four steps have both rewards: too few to say whether hacking began"
    return f"no hacking to be seen: {name} did not fall by more than chance while the run's own reward rose"


def write(folder: Path, history: Sequence[dict], name: str, facts: dict) -> list[Path]:
    """Write replay.md, replay.json and, with matplotlib, replay.png in `folder`; returns their paths. facts: what the
    scores are of, by name."""
    step, paths = began(history), [folder / PAGE, folder / FIGURES]
    try:
        draw_two(history, ("reward", "the run's own reward"), ("other", name), step, folder / PICTURE)
        paths.append(folder / PICTURE)
    except ImportError:
        (folder / PICTURE).unlink(missing_ok=True)  # of an earlier reward
    lines = ["# Rescored rollouts", "", *(f"- {key}: {value}" for key, value in facts.items()), "",
             f"**{verdict(history, name)}.**", "", RULE, "",
             f"![both curves]({PICTURE})" if len(paths) > 2 else
             "No picture: matplotlib is not installed (pip install matplotlib).", "",
             *table(("step", "own reward", name, "responses"), map(_cells, history))]
    write_file(paths[0], "\n".join(lines) + "\n")
    figures = {**facts, "reward": name, "hacking_began": step, "rule": RULE, "curves": list(history)}
    write_file(paths[1], to_json(figures, indent=1) + "\n")
    return paths


def shown(history: Sequence[dict], name: str) -> list[str]:
    """Both curves as lines of a table, at most MAX_ROWS steps."""
    every = -(-len(history) // MAX_ROWS)
    rows = [("step", "own reward", name), *(_cells(row)[:3] for row in history[:: every])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]


def _cells(row: dict) -> list[str]:
    return [str(row["step"]), *("-" if row[k] is None else number(row[k]) for k in ("reward", "other")),
            str(row["responses"])]
