"""The learning signal of a task's rewards: statistics of several responses to each prompt, and a verdict in words.

Best-of-k over k samples is pass@k (2107.03374) where scores are 0 or 1. Groups without two different scores have no
gradient under group-relative advantages (2503.14476), and a task whose scores are all the same has none at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NEARLY_SOLVED = 0.95  # mean of scores of 0 and 1
FEW_PROMPTS = 0.1  # share of prompts with two different scores
MOST_EMPTY, FEW_ENDED = 0.2, 0.5  # shares of responses


@dataclass(frozen=True)
class RewardSignal:
    """Statistics of G responses to each of P prompts.

    mean: of all scores; best: mean over prompts of the best score; with_spread: share of prompts whose responses have
    different scores; is_constant: whether all scores of all prompts are the same; is_binary: whether they are all 0 or
    1. ended, empty: shares of responses; length: their mean, in tokens. num_prompts: P, 0 if unknown.
    """

    num_prompts: int
    group_size: int
    mean: float
    best: float
    with_spread: float
    is_constant: bool
    is_binary: bool
    ended: float
    empty: float
    length: float


def measure(scores: Tensor, lengths: Tensor, has_eos: Tensor, is_empty: Tensor) -> RewardSignal:
    """The statistics of scores (P, G), NaN where a response was skipped; lengths (P, G) in tokens; has_eos and is_empty
    (P, G) bool. A prompt whose responses were all skipped counts as one without spread and has no best score."""
    known = ~scores.isnan()
    values, is_scored = scores[known], known.any(1)
    highest = scores.masked_fill(~known, -torch.inf).amax(1)
    lowest = scores.masked_fill(~known, torch.inf).amin(1)
    return RewardSignal(
        num_prompts=scores.shape[0], group_size=scores.shape[1], mean=float(values.mean()),
        best=float(highest[is_scored].mean()), with_spread=float((highest > lowest).float().mean()),
        is_constant=bool((values == values[:1]).all()), is_binary=bool(((values == 0) | (values == 1)).all()),
        ended=float(has_eos.float().mean()), empty=float(is_empty.float().mean()), length=float(lengths.float().mean()))


def figures(signal: RewardSignal) -> dict[str, str]:
    """The statistics for people, by name."""
    size = signal.group_size
    rates = (f" (pass@1 {signal.mean:.0%})", f" (pass@{size} {signal.best:.0%})") if signal.is_binary else ("", "")
    groups = {} if size == 1 else {f"best of {size}": f"{signal.best:.4g}{rates[1]}, mean over prompts",
                                   "different scores": f"on {_prompts(signal.with_spread, signal)}"}
    return {"mean score": f"{signal.mean:.4g}{rates[0]}", **groups,
            "ended by itself": f"{signal.ended:.0%} of the responses", "empty": f"{signal.empty:.0%} of the responses",
            "mean length": f"{signal.length:.1f} tokens"}


def verdict(signal: RewardSignal) -> list[str]:
    """What the statistics mean, one sentence each, the gravest first; or one that begins with "healthy"."""
    sentences = [text for text in (_of_scores(signal), _of_responses(signal)) if text]
    if sentences:
        return sentences
    if signal.group_size == 1:
        return ["healthy: the scores differ, and the responses end"]
    return [f"healthy: the responses differ in score on {_prompts(signal.with_spread, signal)}, which is what the "
            "method learns from"]


def _of_scores(signal: RewardSignal) -> str:
    if signal.mean != signal.mean:
        return "no response has a score: every reward source skipped them all; look at the reward"
    if signal.is_constant:
        if signal.mean == 0:
            return (f"{_prompts(0, signal)} ever score above 0: no method can learn this; begin with SFT, or an easier "
                    "task")
        if signal.mean == 1 and signal.is_binary:
            return "solved: every response scores 1, and nothing is left to learn; take harder prompts"
        return f"every response scores {signal.mean:.4g}: no method can learn from that; look at the reward"
    if signal.is_binary and signal.mean >= NEARLY_SOLVED:
        return f"nearly solved: {signal.mean:.0%} of the responses score 1; take harder prompts"
    if signal.group_size > 1 and signal.with_spread < FEW_PROMPTS:
        return (f"the responses differ in score on only {_prompts(signal.with_spread, signal)}: little can be learned "
                f"from the others; draw more than {signal.group_size} responses to each, choose prompts that succeed "
                "sometimes, or begin with SFT")
    return ""


def _of_responses(signal: RewardSignal) -> str:
    if signal.empty >= MOST_EMPTY:
        return (f"{signal.empty:.0%} of the responses are empty: see with --preview whether the prompts are rendered "
                "as the model knows them, or begin with SFT")
    if signal.ended < FEW_ENDED:
        count = f"only {signal.ended:.0%}" if signal.ended else "none"
        return f"{count} of the responses end by themselves: raise max_new_tokens, or teach the model to end by SFT"
    return ""


def _prompts(share: float, signal: RewardSignal) -> str:
    """A share of the prompts: '3 of 32 prompts', or '9% of the prompts' if their number is unknown."""
    if not signal.num_prompts:
        return f"{share:.0%} of the prompts"
    return f"{round(share * signal.num_prompts)} of {signal.num_prompts} prompts"
