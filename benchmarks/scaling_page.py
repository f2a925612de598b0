"""The page and the pictures of scaling.py: how each work's time and memory grow along each axis."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

COLOURS = {"rollout": "#1b6ca8", "ppo": "#c4501b", "grpo": "#3f7d20"}
NAMES = {"rollout": "rollout", "ppo": "PPO step", "grpo": "GRPO step"}

HEAD = """# How time and memory grow

`python benchmarks/scaling.py --repeats {repeats} --page docs/results`: Llama shapes in bf16 with random weights, hidden
size 128, 4 layers, a vocabulary of 2,048, 8 sequences of 64 + 32 tokens (GRPO: 2 prompts, 4 samples each), of which
each axis changes one. {machine}.

*Last step*: the power of the size by which the cost grows from the last size but one to the last; 1 is in proportion,
and below 1 a part of the cost is constant. *Curve*: the share of the largest size's cost that a fit with a square puts
into the square. *Too fast*: a last step above what is allowed (1.15; 1.5 for prompt and response, over which attention
is quadratic) whose curve is above 0.15. Memory is what a step holds at most beyond what the process held before its
models were made: weights, optimizer, cache, activations.

![seconds](scaling_time.png)

![memory](scaling_memory.png)
"""


def write(rows: Sequence[dict], folder: Path, repeats: int) -> None:
    (folder / "scaling.md").write_text(page(rows, repeats), encoding="utf-8")
    (folder / "scaling.json").write_text(json.dumps(list(rows), indent=1) + "\n", encoding="utf-8")
    picture(rows, "seconds", 1, "s", folder / "scaling_time.png")
    picture(rows, "bytes", 1e6, "MB", folder / "scaling_memory.png")


def page(rows: Sequence[dict], repeats: int) -> str:
    parts = [HEAD.format(repeats=repeats, machine=rows[0]["machine"])]
    for what, title, key, unit in (("time", "Seconds", "seconds", 1), ("memory", "Memory in MB", "bytes", 1e6)):
        parts.append(f"## {title}\n\n| work | axis | sizes | cost at each | constant + slope x size (R²) | "
                     "power (R²) | last step | curve | |\n|---|---|---|---|---|---|---|---|---|")
        parts += [line(row, what, key, unit) for row in rows]
        parts.append("")
    too_fast = [f"{row['case']} ({what})" for row in rows for what, fit in row["fits"].items() if fit["is_too_fast"]]
    parts.append("Too fast: " + (", ".join(too_fast) if too_fast else "none") + ".")
    return "\n".join(parts) + "\n"


def line(row: dict, what: str, key: str, unit: float) -> str:
    fit, (work, _, axis) = row["fits"][what], row["case"].split()
    costs = ", ".join(f"{c / unit:.3g}" for c in row[key])
    straight, law = fit["line"], fit["power"]
    return (f"| {NAMES[work]} | {axis} | {', '.join(f'{s:,}' for s in row['sizes'])} | {costs} | "
            f"{straight['constant'] / unit:.3g} + {straight['slope'] / unit:.2g} n ({straight['r2']:.3f}) | "
            f"n^{law['exponent']:.2f} ({law['r2']:.3f}) | n^{fit['last']:.2f} | {fit['bend']:.2f} | "
            f"{'**too fast**' if fit['is_too_fast'] else ''} |")


def picture(rows: Sequence[dict], key: str, unit: float, name: str, path: Path) -> None:
    """Small multiples, one for each axis; dots are measured, lines are constant + slope x size, the dashed one grows in
    proportion."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    axes = list(dict.fromkeys(row["case"].split()[2] for row in rows))
    columns = min(4, len(axes))
    count = -(-(len(axes) + 1) // columns)
    figure, grid = plt.subplots(count, columns, figsize=(3.3 * columns, 2.9 * count), squeeze=False, dpi=130)
    for axis, place in zip(axes, grid.flat, strict=False):
        shown = [row for row in rows if row["case"].split()[2] == axis]
        _draw(place, shown, key, unit)
        place.set_title(axis, fontsize=11, loc="left")
        place.set_xlabel(shown[0]["of"] or axis, fontsize=8)
    grid.flat[0].set_ylabel(name)
    for place in grid.flat[len(axes):]:
        place.axis("off")
    _legend(grid.flat[len(axes)], [work for work in COLOURS if any(r["case"].startswith(work) for r in rows)])
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _draw(place, rows: Sequence[dict], key: str, unit: float) -> None:  # noqa: ANN001
    what = "time" if key == "seconds" else "memory"
    for row in rows:
        work, sizes, costs = row["case"].split()[0], row["sizes"], [c / unit for c in row[key]]
        fit = row["fits"][what]["line"]
        dense = [sizes[0] * (sizes[-1] / sizes[0]) ** (i / 40) for i in range(41)]
        fitted = [(fit["constant"] + fit["slope"] * x) / unit for x in dense]
        place.plot(dense, [y if y > 0 else float("nan") for y in fitted], color=COLOURS[work], lw=1.2, alpha=0.8)
        place.plot(sizes, costs, "o", color=COLOURS[work], ms=4)
        if row is rows[0]:
            low = costs[-1] * sizes[0] / sizes[-1]
            place.plot([sizes[0], sizes[-1]], [low, costs[-1]], "--", color="#999999", lw=0.9)
    place.set_xscale("log", base=2)
    place.set_yscale("log")
    sizes = rows[0]["sizes"]
    place.set_xticks(sizes, [_short(s) for s in sizes])
    place.minorticks_off()
    place.tick_params(labelsize=8)
    place.grid(True, color="#e6e6e6", lw=0.6)
    for side in ("top", "right"):
        place.spines[side].set_visible(False)


def _legend(place, works: Sequence[str]) -> None:  # noqa: ANN001
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=COLOURS[w], marker="o", ms=5, label=NAMES[w]) for w in works]
    handles.append(Line2D([], [], color="#999999", ls="--", label="in proportion"))
    place.legend(handles=handles, loc="center left", frameon=False, fontsize=10,
                 title="dots: measured\nlines: constant + slope x size", title_fontsize=8.5, alignment="left")


def _short(size: int) -> str:
    if size < 10**5:
        return str(size)
    return f"{size / 1e6:.2g}M"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", help="what scaling.py wrote by --json")
    parser.add_argument("folder")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    write(json.loads(Path(options.rows).read_text(encoding="utf-8")), Path(options.folder), options.repeats)


if __name__ == "__main__":
    main()
