"""What the first step's rollout says of a task: its rewards before any update, the first lines of a report."""

from __future__ import annotations

from hybrid_rlhf.algorithms.reward_signal import RewardSignal, figures, verdict

FEW_CALLS, MANY = 0.02, 0.5  # shares


def first_lines(history: list[dict]) -> list[str]:
    """The figures of the first step in one sentence, and what they mean; empty for a stage that does not sample."""
    row = next((r for r in history if r.get("step") == 1 and "completions/clipped_ratio" in r), {})
    if row.get("reward") is None:  # nothing was sampled, or nothing has a finite score
        return []
    signal = _signal(row)
    seconds = f"; the step took {row['time/step']:.3g} s" if "time/step" in row else ""
    told = "; ".join(f"{name}: {text}" for name, text in figures(signal).items())
    found = [*_of_tools(row), *verdict(signal)]
    return [f"Before the first update, {told}{seconds}.", *(f"Verdict: {text}." for text in found)]


def _of_tools(row: dict) -> list[str]:
    """What is wrong with the calls of tools, of which the other figures only show the effects."""
    calls, failed = row.get("tools/call_frequency"), row.get("tools/failure_frequency", 0.0)
    full = row.get("episodes/no_room_ratio", 0.0)
    found = []
    if calls is not None and calls < FEW_CALLS:
        found.append(f"{calls:.0%} of the responses call a tool; begin with SFT on conversations with tool calls")
    if failed > MANY:
        found.append(f"{failed:.0%} of the calls of tools fail; read the answers in samples.jsonl")
    if full > FEW_CALLS:
        found.append(f"in {full:.0%} of the episodes an answer no longer fits; allow more sampling.max_new_tokens")
    return found


def _signal(row: dict) -> RewardSignal:
    """A row of metrics.jsonl as figures. How many prompts there were, and whether all scores were 0 or 1, it does not
    say."""
    mean = row["reward"]
    return RewardSignal(
        num_prompts=0, group_size=round(row.get("prompts/num_responses", 1)), mean=mean,
        best=row.get("prompts/best_score", mean), with_spread=row.get("prompts/with_spread", 0.0),
        is_constant=row.get("reward_std", 1.0) <= 1e-9 * abs(mean), is_binary=False,
        ended=1 - row["completions/clipped_ratio"], empty=row.get("completions/empty_ratio", 0.0),
        length=row["completions/mean_length"])
