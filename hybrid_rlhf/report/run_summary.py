"""Contents of a run's report: alarms, curves, the first step's rewards, samples before and after, metrics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybrid_rlhf.algorithms.reward_signal import RewardSignal, figures, verdict
from hybrid_rlhf.report.alarms import Alarm
from hybrid_rlhf.report.terminal import number, remarks

FEW_CALLS, MANY_FAILED = 0.02, 0.5  # shares


@dataclass(frozen=True)
class RunSummary:
    """Contents of a run's report.

    history: rows of metrics.jsonl. pictures: PNG files; no_pictures: why there are none. before, after: samples, of the
    same prompts if the run has fixed ones. record: the contents of run.json. state: how far the run got, if it failed.
    """

    stage: str
    alarms: list[Alarm]
    history: list[dict]
    pictures: list[Path]
    no_pictures: str
    before: list[dict]
    after: list[dict]
    record: dict
    state: str = ""

    @property
    def header(self) -> list[str]:
        """The run's first lines: data, model, settings, steps."""
        return (self.record.get("facts") or {}).get("header") or []

    @property
    def last_step(self) -> dict | None:
        return next((row for row in reversed(self.history) if not _is_evaluation(row)), None)

    @property
    def held_out(self) -> dict | None:
        return next((row for row in reversed(self.history) if _is_evaluation(row)), None)

    @property
    def first_step(self) -> list[str]:
        """Lines about the first step's rollout, before any update; empty where nothing was sampled."""
        return first_lines(self.history)

    @property
    def samples(self) -> list[tuple[str, list[dict]]]:
        """Tables with their titles: one table if both sets of samples answer the same prompts, else one for each."""
        before, after = self.before, self.after
        prompts, again = ([row.get("prompt") for row in rows] for rows in (before, after))
        if not before or prompts != again or None in prompts:
            return [(f"Samples at the {when} (step {rows[0]['step']})",
                     [{"prompt": row.get("prompt"), "response": _ended(row), "score": row.get("score")}
                      for row in rows]) for when, rows in (("start", before), ("end", after)) if rows]
        both = [(f"step {rows[0]['step']}", rows) for rows in (before, after)]
        if "side" in before[0]:  # a reward model: the same responses, other scores
            return [("The same responses, scored before and after", [
                {"prompt": row["prompt"], "response": row["completion"], "was": row.get("side", "")}
                | {f"score, {step}": rows[i].get("score") for step, rows in both} for i, row in enumerate(before)])]
        return [("The same prompts before and after", [
            {"prompt": row["prompt"]} | {step: _scored(rows[i]) for step, rows in both}
            for i, row in enumerate(before)])]

    @property
    def versions(self) -> str:
        return ", ".join(f"{name} {text}" for name, text in sorted((self.record.get("versions") or {}).items()))


def _scored(row: dict) -> str:
    """A response with its remarks in a line below, and the judge's text in another."""
    parts = [f"{name} {number(value)}" for name, value in (row.get("scores") or {}).items()]
    notes = ", ".join([*remarks(row), *parts])
    judge = f"\njudge: {row['judge']}" if row.get("judge") else ""
    return f"{row['completion']}" + (f"\n({notes})" if notes else "") + judge


def _ended(row: dict) -> str | None:
    """A response, and whether it is empty or did not end; its score is in another column."""
    return _scored(row | {"score": None}) if "completion" in row else None


def _is_evaluation(row: dict) -> bool:
    return any(name.startswith("eval/") for name in row)


def first_lines(history: list[dict]) -> list[str]:
    """The figures of the first step in one sentence, and what they mean; empty for a stage that does not sample."""
    row = next((r for r in history if r.get("step") == 1 and "completions/clipped_ratio" in r), {})
    if row.get("reward") is None:  # nothing was sampled, or nothing has a finite score
        return []
    signal = _signal(row)
    seconds = f"; the step took {row['time/step']:.3g} s" if "time/step" in row else ""
    listed = "; ".join(f"{name}: {text}" for name, text in figures(signal).items())
    verdicts = [*_of_tools(row), *verdict(signal)]
    return [f"Before the first update, {listed}{seconds}.", *(f"Verdict: {text}." for text in verdicts)]


def _of_tools(row: dict) -> list[str]:
    """Problems with tool calls, whose effects alone the other figures show."""
    calls, failed = row.get("tools/call_frequency"), row.get("tools/failure_frequency", 0.0)
    full = row.get("episodes/no_room_ratio", 0.0)
    problems = []
    if calls is not None and calls < FEW_CALLS:
        problems.append(f"{calls:.0%} of the responses call a tool; begin with SFT on conversations with tool calls")
    if failed > MANY_FAILED:
        problems.append(f"{failed:.0%} of the calls of tools fail; read the answers in samples.jsonl")
    if full > FEW_CALLS:
        problems.append(f"in {full:.0%} of the episodes an answer no longer fits; allow more sampling.max_new_tokens")
    return problems


def _signal(row: dict) -> RewardSignal:
    """A row of metrics.jsonl as a RewardSignal; without the number of prompts and whether all scores were 0 or 1, which
    a row does not have."""
    mean = row["reward"]
    return RewardSignal(
        num_prompts=0, group_size=round(row.get("prompts/num_responses", 1)), mean=mean,
        best=row.get("prompts/best_score", mean), with_spread=row.get("prompts/with_spread", 0.0),
        is_constant=row.get("reward_std", 1.0) <= 1e-9 * abs(mean), is_binary=False,
        ended=1 - row["completions/clipped_ratio"], empty=row.get("completions/empty_ratio", 0.0),
        length=row["completions/mean_length"])
