"""Plots of a run's history, one PNG per subject. The only module that imports matplotlib."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid_rlhf.core.own_files import replacing

PLOTS = "plots"
# Colour-blind safe palette of Okabe and Ito.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555")
_SIZE, _DPI = (5.6, 3.2), 120  # inches
_PLACE = (0.13, 0.13, 0.85, 0.78)  # left, bottom, width, height: fixed, as automatic layout takes longer than drawing


@dataclass(frozen=True)
class Subject:
    """One plot. names: regular expressions that match whole metric names; their held-out values (eval/...) are drawn as
    points. what: label of the vertical axis. is_stacked: parts of a sum. is_exact: drawn without smoothing."""

    title: str
    names: tuple[str, ...]
    what: str = ""
    is_stacked: bool = False
    is_exact: bool = False


SUBJECTS = (
    Subject("loss", (r"loss", r"policy/loss", r"value/loss")),
    Subject("accuracy", (r"accuracy", r"mean_token_accuracy", r"rewards/accuracies")),
    Subject("reward", (r"reward", r"mean_reward", r"rewards/[^/]+/mean", r"rewards/(chosen|rejected)"), "score"),
    Subject("KL to the reference", (r"objective/kl", r"kl"), "nats"),
    Subject("entropy", (r"entropy",), "nats per token"),
    Subject("response length", (r"completions/(mean|min|max)_length",), "tokens"),
    Subject("value explained variance", (r"value/explained_variance",)),
    Subject("clipped updates", (r"policy/clip_fraction", r"value/clip_fraction", r"clip_ratio/(low|high)_mean"),
            "share"),
    Subject("gradient norm", (r"grad_norm", r"value/grad_norm")),
    Subject("learning rate", (r"learning_rate", r"value/learning_rate"), is_exact=True),
    Subject("where a step's time goes", (r"time/(generate|score|train|switch)",), "seconds", is_stacked=True),
    Subject("memory", (r"memory/[^/]+/[^/]+",), "GiB"),
)


def draw(history: Sequence[dict], folder: str | Path) -> list[Path]:
    """Write folder/plots/*.png for the subjects that `history` has metrics of; returns them in order.

    Raises ImportError where matplotlib is not installed, OSError on a full disk.
    """
    import matplotlib.figure

    place = Path(folder) / PLOTS
    place.mkdir(parents=True, exist_ok=True)
    drawn = []
    for subject in SUBJECTS:
        lines = lines_of(history, subject)
        path = place / f"{re.sub('[^a-z]+', '_', subject.title.lower()).strip('_')}.png"
        if not lines:
            path.unlink(missing_ok=True)  # a plot of an earlier run
            continue
        figure = matplotlib.figure.Figure(figsize=_SIZE, dpi=_DPI)
        _draw(figure.add_axes(_PLACE), subject, lines)
        with replacing(path) as (beside,):
            figure.savefig(beside, format="png")
        drawn.append(path)
    return drawn


def draw_two(history: Sequence[dict], first: tuple[str, str], second: tuple[str, str], mark: int | None,
             path: Path) -> None:
    """Write a PNG of two metrics, each (its name in the rows of `history`, its label) with an axis of its own, and a
    line at step `mark`. Raises ImportError where matplotlib is not installed, OSError on a full disk."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(_SIZE[0] * 1.2, _SIZE[1]), dpi=_DPI)
    left = figure.add_axes((0.1, 0.14, 0.8, 0.76))
    for axes, (name, label), colour in ((left, first, COLOURS[0]), (left.twinx(), second, COLOURS[1])):
        rows = [row for row in history if row.get(name) is not None]
        steps, values = [row["step"] for row in rows], [row[name] for row in rows]
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smooth(values), color=colour, linewidth=1.6)
        axes.set_ylabel(label, fontsize=9, color=colour)
        axes.tick_params(labelsize=8)
        axes.spines[["top"]].set_visible(False)
    left.set_xlabel("step", fontsize=8)
    if mark is not None:
        left.axvline(mark, color=COLOURS[-1], linestyle="--", linewidth=1)
        left.set_title(f"hacking began around step {mark}", loc="left", fontsize=10, fontweight="bold")
    with replacing(path) as (beside,):
        figure.savefig(beside, format="png")


def lines_of(history: Sequence[dict], subject: Subject) -> dict[str, tuple[list[int], list[float]]]:
    """metric -> (steps, values) of the metrics of a subject, without those that are 0 throughout or equal to another
    (with one reward source: the reward)."""
    lines: dict[str, tuple[list[int], list[float]]] = {}
    for row in history:
        for name, value in row.items():
            plain = name.removeprefix("eval/")
            if value is not None and any(re.fullmatch(pattern, plain) for pattern in subject.names):
                steps, values = lines.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(value / 2**30 if subject.what == "GiB" else value)
    kept: dict[str, tuple[list[int], list[float]]] = {}
    for name, line in lines.items():
        if any(line[1]) and line not in kept.values():
            kept[name] = line
    return kept


def smooth(values: Sequence[float], share: float = 0.05) -> list[float]:
    """Moving average over a centred window, `share` of the length wide (at least 3 values), narrower at the ends."""
    half = max(1, round(share * len(values) / 2))
    return [sum(part) / len(part) for i in range(len(values))
            for part in [values[max(0, i - half): i + half + 1]]]


def _draw(axes, subject: Subject, lines: dict[str, tuple[list[int], list[float]]]) -> None:  # noqa: ANN001
    trained = {name: line for name, line in lines.items() if not name.startswith("eval/")}
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(
        n.removeprefix("eval/") for n in lines))}
    if subject.is_stacked and len({len(steps) for steps, _ in trained.values()}) == 1:
        axes.stackplot(next(iter(trained.values()))[0], *(smooth(values) for _, values in trained.values()),
                       labels=[n.split("/")[-1] for n in trained], colors=[colours[n] for n in trained], alpha=0.85)
    else:
        for name, (steps, values) in trained.items():
            is_long = len(values) >= 20 and not subject.is_exact
            if is_long:
                axes.plot(steps, values, color=colours[name], alpha=0.25, linewidth=0.8)
            axes.plot(steps, smooth(values) if is_long else values, color=colours[name], linewidth=1.6, label=name)
    held_out = {name: line for name, line in lines.items() if name.startswith("eval/")}
    for name, (steps, values) in held_out.items():
        axes.plot(steps, values, "o", color=colours[name.removeprefix("eval/")], markersize=4,
                  label="held out" if name == next(iter(held_out)) else None)
    axes.set_title(subject.title, loc="left", fontsize=10, fontweight="bold", y=1.0)
    axes.yaxis.set_offset_position("right")  # the offset text ("1e-5") goes beside the title
    axes.yaxis.get_offset_text().set_fontsize(8)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(subject.what, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if len(lines) > 1:
        axes.legend(fontsize=7, frameon=False, loc="best", ncols=1 + (len(lines) > 6))
