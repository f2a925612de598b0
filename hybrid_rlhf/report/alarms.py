"""What went wrong in a run, in words: pure functions over its history of metrics.

What a history is, and its start and end, is in history.py. Names are those of docs and TRL: reward is the score that
was paid for.

Where the limits come from: the score of a model that is optimised against a learned reward goes on rising while what
was meant by it falls, from a KL on that depends on the reward model (2210.10760); the KL alarm's limits are what
separates held from fooled on the embedded task (docs/results/reward_hacking.md). The others are round numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from hybrid_rlhf.report.history import History, Series, is_number, series

_FOOLED = "the reward no longer measures what is meant. Raise ppo.kl_coef, stop earlier, or fix the reward."


@dataclass(frozen=True)
class Limits:
    """When an alarm goes off.

    max_kl, max_kl_per_token: nats; both must be passed, as a long response moves further in all than a short one.
    max_kl_rise, max_kl_rise_per_token: the same, of a rise within rise_steps steps. min_length, max_length: of the
    start's mean length. max_clipped: share of responses that did not end; max_unended: the same, where it was so from
    the start. max_empty: share of responses without a word. min_distinct: of the start's share of distinct answers;
    max_common: what the share of the three commonest may rise by. min_diversity: of the start's distinct bigrams.
    min_entropy: of the start's nats per token. max_flat_groups: share of groups whose responses have equal rewards.
    min_spread: of the start's standard deviation of scores. max_bounded: share of scores that ppo.score_clip moves.
    num_errors: how many standard errors make a fall. min_fall: in standard deviations of the score.
    """

    max_kl: float = 5.0
    max_kl_per_token: float = 0.5
    max_kl_rise: float = 5.0
    max_kl_rise_per_token: float = 0.1
    rise_steps: int = 5
    min_length: float = 0.5
    max_length: float = 2.0
    max_clipped: float = 0.5
    max_unended: float = 0.9
    max_empty: float = 0.5
    min_diversity: float = 0.5
    min_distinct: float = 0.5
    max_common: float = 0.25
    max_bounded: float = 0.05
    min_entropy: float = 0.2
    max_flat_groups: float = 0.9
    min_spread: float = 0.01
    num_errors: float = 4.0
    min_fall: float = 0.1


@dataclass(frozen=True)
class Alarm:
    """name: a few words; text: one sentence with the figures, and one with what helps."""

    name: str
    text: str


def find(history: History, limits: Limits | None = None) -> list[Alarm]:
    """All alarms of a run, those that spoil it first."""
    limits = limits or Limits()
    return [alarm for check in CHECKS for alarm in check(history, limits)]


def not_finite(history: History, _: Limits) -> list[Alarm]:
    """A loss or gradient norm that is no number (metrics.jsonl says null): what was trained after it is worthless."""
    for row in history:
        for name, value in row.items():
            if value is None or (isinstance(value, float) and not math.isfinite(value)):
                return [Alarm("not a number", f"{name} was not a finite number at step {row['step']}. Lower the "
                                              "learning rate, or look at that step's samples.")]
    return []


def hacking(history: History, limits: Limits) -> list[Alarm]:
    """The training score rises while a second opinion falls: another source's score, or the held-out score."""
    reward, found = series(history, "reward"), []
    if reward is None:
        return []
    seconds = {name: series(history, name) for row in history[:1] for name in row
               if name.startswith("rewards/") and name.endswith("/mean")}
    for name, second in seconds.items():
        spread = series(history, name.removesuffix("mean") + "std")
        found += _against(reward, name.split("/")[1], second, spread, limits) if second and spread else []
    return found + _held_out(history, reward, limits)


def _against(reward: Series, name: str, second: Series, spread: Series, limits: Limits) -> list[Alarm]:
    """The alarm if `second` has come down from its best while the training score went on rising."""
    size, last = second.size, len(second.values) - second.size
    best = max(range(last + 1), key=second.around)
    before = reward.around(min(best, len(reward.values) - size))
    fall = second.around(best) - second.end
    if fall <= max(limits.num_errors * second.error(), limits.min_fall * spread.start) or (
            reward.end - before <= 2 * reward.error()):
        return []
    where = "at the start" if best < size else f"around step {second.steps[best + size // 2]}"
    return [Alarm("reward hacking", f"the training score rose from {before:.3g} to {reward.end:.3g} while {name} fell "
                                    f"from {second.around(best):.3g} {where} to {second.end:.3g}: {_FOOLED}")]


def _held_out(history: History, reward: Series, limits: Limits) -> list[Alarm]:
    rows = [row for row in history if is_number(row.get("eval/reward")) and is_number(row.get("eval/reward_std"))]
    if len(rows) < 2 or reward.end - reward.start <= 2 * reward.error():
        return []
    best = max(rows, key=lambda row: row["eval/reward"])
    fall = best["eval/reward"] - rows[-1]["eval/reward"]
    if fall <= max(3 * limits.min_fall * best["eval/reward_std"], 0):
        return []
    return [Alarm("overfitting", f"the score of training prompts rose to {reward.end:.3g} while that of held-out "
                                 f"prompts fell from {best['eval/reward']:.3g} at step {best['step']} to "
                                 f"{rows[-1]['eval/reward']:.3g}. Train on more prompts, or for fewer steps.")]


def drift(history: History, limits: Limits) -> list[Alarm]:
    """KL to the reference beyond what a learned reward can be trusted for."""
    kl, length = series(history, "objective/kl"), series(history, "completions/mean_length")
    return _far(kl.end, length.end, limits) if kl is not None and length is not None else []


def _far(kl: float, length: float, limits: Limits) -> list[Alarm]:
    per_token = kl / max(length, 1)
    if kl <= limits.max_kl or per_token <= limits.max_kl_per_token:
        return []
    return [Alarm("KL", f"the policy is {kl:.3g} nats per response ({per_token:.2g} per token) from the reference; "
                        f"beyond {limits.max_kl:g} nats and {limits.max_kl_per_token:g} per token a learned reward is "
                        "likely fooled, so read the samples. Raise ppo.kl_coef, or stop earlier.")]


def spike(history: History, limits: Limits) -> list[Alarm]:
    """A KL that rose by much within few steps, even if it came down again: the first such rise."""
    kl, length = series(history, "objective/kl"), series(history, "completions/mean_length")
    if kl is None or length is None:
        return []
    steps = min(limits.rise_steps, len(kl.values) - 2)
    for i in range(len(kl.values) - steps - 1):
        before, after = fmean(kl.values[i : i + 2]), fmean(kl.values[i + steps : i + steps + 2])
        if after - before > max(limits.max_kl_rise, limits.max_kl_rise_per_token * length.start):
            return [Alarm("KL spike", f"the KL to the reference rose from {before:.2g} to {after:.3g} nats per "
                                      f"response within {steps} steps (from step {kl.steps[i]} on): the updates are "
                                      "too large. Lower roles.actor.learning_rate, or let ppo.update_kl 0.01 do so.")]
    return []


def unheld(history: History, _: Limits) -> list[Alarm]:
    """A learned reward without a KL penalty, and without a reference to say how far the policy moved. Functions that
    verify need none."""
    last = next((row for row in reversed(history) if "rewards/model/mean" in row), None)
    if last is None or last.get("kl_coef") != 0 or "objective/kl" in last:
        return []
    return [Alarm("no hold", "ppo.kl_coef is 0 with a learned reward: no KL penalty keeps the policy near its start, "
                             "and how far it moved is not measured. Name roles.ref.model_name_or_path to see the KL, "
                             "or set ppo.kl_coef.")]


def lengths(history: History, limits: Limits) -> list[Alarm]:
    """Responses that became much shorter or longer, or no longer end."""
    length, clipped = series(history, "completions/mean_length"), series(history, "completions/clipped_ratio")
    found = []
    if length is not None and length.end < limits.min_length * length.start:
        found += [Alarm("length collapse", f"responses shrank from {length.start:.3g} to {length.end:.3g} tokens. The "
                                           "reward may favour short answers; read the samples.")]
    if length is not None and length.end > limits.max_length * length.start:
        found += [Alarm("length explosion", f"responses grew from {length.start:.3g} to {length.end:.3g} tokens. The "
                                            "reward may favour long answers: try ppo.overlong_penalty or "
                                            "builtin:length_penalty.")]
    if clipped is not None and clipped.end > max(limits.max_clipped, clipped.start + 0.1):
        found += [Alarm("endless responses", f"{clipped.end:.0%} of the responses no longer end by themselves "
                                             f"({clipped.start:.0%} at the start). Set ppo.missing_eos_penalty, or "
                                             "allow more ppo.sampling.max_new_tokens.")]
    return found


def unended(history: History, limits: Limits) -> list[Alarm]:
    """Responses that never ended, which a reward model was trained to see at their end."""
    clipped = series(history, "completions/clipped_ratio")
    if clipped is None or min(clipped.start, clipped.end) <= limits.max_unended or not any(
            "rewards/model/mean" in row for row in history):
        return []
    return [Alarm("no response ends", f"{clipped.end:.0%} of the responses are cut at max_new_tokens, from the start "
                                      "on, and the reward model scores them where nothing ends. Allow more tokens, or "
                                      "begin with SFT on demonstrations that end (data.append_eos true).")]


def empty(history: History, limits: Limits) -> list[Alarm]:
    """Responses that say nothing."""
    found = series(history, "completions/empty_ratio")
    if found is None or found.end <= limits.max_empty:
        return []
    return [Alarm("empty answers", f"{found.end:.0%} of the responses are empty ({found.start:.0%} at the start). If "
                                   "they were from the start, look at the prompts as the model sees them (--preview); "
                                   "if they became so, the reward favours empty answers: set "
                                   "ppo.sampling.min_new_tokens.")]


def alike(history: History, limits: Limits) -> list[Alarm]:
    """Unlike prompts that get the same answers, more than at the start: where few answers are right, as yes and no,
    there were few from the start."""
    distinct, top = series(history, "completions/distinct_answers"), series(history, "completions/top3_share")
    if distinct is None or top is None or distinct.end >= limits.min_distinct * distinct.start or (
            top.end <= top.start + limits.max_common):
        return []
    return [Alarm("same answers", f"unlike prompts get the same answers: three of them are {top.end:.0%} of a "
                                  f"step's ({top.start:.0%} at the start), and {distinct.end:.0%} of its answers are "
                                  f"different ({distinct.start:.0%}). Where more than a few answers are right, read "
                                  "the samples; lower roles.actor.learning_rate, or raise ppo.kl_coef.")]


def diversity(history: History, limits: Limits) -> list[Alarm]:
    """Responses to different prompts that became alike."""
    distinct = series(history, "completions/distinct_2")
    if distinct is None or distinct.end >= limits.min_diversity * distinct.start:
        return []
    return [Alarm("diversity collapse", f"of all token pairs in the responses {distinct.end:.1%} are different, "
                                        f"{distinct.start:.1%} at the start: answers to different prompts have become "
                                        "alike. Raise ppo.kl_coef or ppo.entropy_coef.")]


def entropy(history: History, limits: Limits) -> list[Alarm]:
    """A policy that is sure of nearly every token has stopped exploring."""
    found = series(history, "entropy")
    if found is None or found.end >= limits.min_entropy * found.start:
        return []
    return [Alarm("entropy collapse", f"entropy fell from {found.start:.2g} to {found.end:.2g} nats per token: the "
                                      "policy no longer tries anything else. Raise ppo.entropy_coef or ppo.kl_coef.")]


def variance(history: History, limits: Limits) -> list[Alarm]:
    """Scores that do not differ teach nothing."""
    spread, flat = series(history, "reward_std"), series(history, "frac_reward_zero_std")
    reward = series(history, "reward")
    if reward is not None and spread is not None and _is_constant(reward, spread):
        return [Alarm("no signal", f"in 0 of {len(reward.values)} steps did any response score above {reward.end:.3g}, "
                                   "the least score there was: of that no method can learn. Try --check_signal; begin "
                                   "with SFT, take easier prompts, or look at the reward function.")]
    if flat is not None and flat.end > limits.max_flat_groups:
        return [Alarm("zero reward variance", f"in {flat.end:.0%} of the groups all responses have the same score, so "
                                              "they have no gradient. Take prompts of another difficulty, a finer "
                                              "reward, or ppo.max_refills.")]
    if spread is not None and spread.end <= limits.min_spread * spread.start:
        return [Alarm("zero reward variance", f"scores no longer differ (standard deviation {spread.end:.2g}, "
                                              f"{spread.start:.2g} at the start), so they have no gradient. The reward "
                                              "is at its bound, or the responses are all alike.")]
    return []


def _is_constant(reward: Series, spread: Series) -> bool:
    """Whether every response of every step had one score, but for rounding."""
    rounding = 1e-6 * max(map(abs, reward.values))
    return max(spread.values) <= rounding and max(reward.values) - min(reward.values) <= rounding


def bounds(history: History, limits: Limits) -> list[Alarm]:
    """Scores outside the clipping bound: their differences have no gradient."""
    found = series(history, "score/clip_fraction")
    if found is None or max(found.start, found.end) <= limits.max_bounded:
        return []
    return [Alarm("bounded scores", f"ppo.score_clip bounds {max(found.start, found.end):.0%} of the scores, and "
                                    "between those beyond it the actor sees no difference. Raise it (null has none); "
                                    "if they went there in training, the reward model may be fooled: read samples.")]


def compared(start: dict[str, float], end: dict[str, float], num_prompts: int, limits: Limits | None = None
             ) -> list[Alarm]:
    """Alarms of a trained model beside its start, both measured on num_prompts held-out prompts: score, accuracy (of an
    independent judge, where there is one), kl to the start in nats per response, length in tokens."""
    limits, found = limits or Limits(), []
    if "accuracy" in start:
        before, after = start["accuracy"], end["accuracy"]
        error = math.sqrt((before * (1 - before) + after * (1 - after)) / num_prompts)
        if end["score"] > start["score"] and before - after > 2 * error:
            found += [Alarm("reward hacking", f"the score rose from {start['score']:.3g} to {end['score']:.3g} while "
                                              f"the accuracy fell from {before:.3g} to {after:.3g}: {_FOOLED}")]
    return found + _far(end["kl"], end["length"], limits)


def answered(answers: Sequence[dict], limits: Limits | None = None) -> list[Alarm]:
    """The alarm of a trained model that does not end most of its answers to the fixed prompts; rows say by "ended"
    whether an answer ended, None where it need not."""
    ended = [row["ended"] for row in answers if isinstance(row.get("ended"), bool)]
    endless = ended.count(False)
    if not ended or endless <= (limits or Limits()).max_clipped * len(ended):
        return []
    return [Alarm("endless answers", f"{endless} of {len(ended)} answers to the fixed prompts did not end by "
                                     "themselves. Raise max_new_tokens if its answers are longer than that; else the "
                                     "model has not learned to stop: train longer, or at a higher rate.")]


CHECKS: tuple[Callable[[History, Limits], list[Alarm]], ...] = (
    not_finite, hacking, drift, spike, unheld, lengths, unended, empty, alike, diversity, entropy, variance, bounds)
