"""Alarms: detect what went wrong in a run, by pure functions over its history of metrics.

A history is the list of rows in metrics.jsonl: {"step": int, name: number}, one for each step, and one with names that
begin with eval/ for each evaluation. The start and the end of a run are means over a tenth of its steps (at least two).
Metric names are those of the docs and TRL: reward is the score being optimised.

Limits: a policy optimised against a learned reward over-optimises it from a KL on that depends on the reward model
(2210.10760): the score rises while the true quality falls. The KL alarm's limits separate good from hacked runs on the
embedded task (docs/results/reward_hacking.md). The others are round numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

NUM_ERRORS = 4.0  # standard errors from which a fall is significant
MIN_FALL = 0.1  # standard deviations of the score
MIN_RISE, MIN_ROOM = 0.5, 0.5  # standard deviations: rise of the training score; possible rise of the second score
MIN_AGREED = 0.2  # correlation of the two at the start: with less they never measured the same
MIN_FOLLOWED = 1 / 3  # share of the rise that this correlation predicts
MAX_CLIPPED = 0.5  # share of responses that did not end
MAX_KL, MAX_KL_PER_TOKEN = 5.0, 0.5  # nats; both must be exceeded, as the KL of a long response is larger
MAX_KL_RISE, MAX_KL_RISE_PER_TOKEN, RISE_STEPS = 5.0, 0.1, 5  # the same for a rise within so many steps
FREE = "memory/free"  # the metric; peaks of a step's phases are memory/ROLE/PHASE
MIN_GROWTH_STEPS, MIN_GROWN = 50, 0.025  # steps before growth is reported; its share from each quarter to the next
MAX_LOWERED = 0.2  # factor on the rate, in more than a quarter of the steps
FEW_STEPS, MIN_KL, MIN_KL_PER_TOKEN = 20, 0.05, 0.005  # a policy hardly moved: after so many steps below both, in nats
_FOOLED = "the reward no longer measures what is meant. Raise ppo.kl_coef, stop earlier, or fix the reward."
History = Sequence[dict]


@dataclass(frozen=True)
class Series:
    """One metric's values and their steps, with the means of its start and end."""

    steps: list[int]
    values: list[float]

    @property
    def size(self) -> int:
        """Number of steps that start and end are means over."""
        return max(2, len(self.values) // 10)

    @property
    def start(self) -> float:
        return fmean(self.values[: self.size])

    @property
    def end(self) -> float:
        return fmean(self.values[-self.size :])

    @property
    def higher(self) -> float:
        """The larger of start and end."""
        return max(self.start, self.end)

    def error(self) -> float:
        """Standard error of end minus start, from differences of neighbouring steps, to which a trend adds little."""
        jumps = [(b - a) ** 2 / 2 for a, b in zip(self.values, self.values[1:], strict=False)]
        return math.sqrt(2 * fmean(jumps) / self.size)

    def around(self, place: int) -> float:
        """Mean of the `size` values from index `place` on."""
        return fmean(self.values[place : place + self.size])


def series(history: History, name: str) -> Series | None:
    """The values of a metric; None where fewer than four steps have it, too few for a start and an end."""
    rows = [(row["step"], row[name]) for row in history if is_number(row.get(name))]
    return Series([s for s, _ in rows], [v for _, v in rows]) if len(rows) >= 4 else None


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


@dataclass(frozen=True)
class Alarm:
    """name: a few words; text: a sentence with the figures, and one with the remedy."""

    name: str
    text: str


class Rule(NamedTuple):
    """An alarm on the start and end of a few metrics, all of which must be there. is_on: condition on their series;
    text: a format string with fields such as {0.end:.3g}, the end of the first one."""

    name: str
    metrics: tuple[str, ...]
    is_on: Callable[..., bool]
    text: str

    def __call__(self, history: History) -> list[Alarm]:
        values = [series(history, name) for name in self.metrics]
        is_on = None not in values and self.is_on(*values)
        return [Alarm(self.name, self.text.format(*values))] if is_on else []


def find(history: History) -> list[Alarm]:
    """All alarms of a run, the most severe first."""
    return [alarm for checks in CHECKS for alarm in next(filter(None, (check(history) for check in checks)), [])]


def not_finite(history: History) -> list[Alarm]:
    """A metric that is not finite (null in metrics.jsonl): what was trained after it is worthless."""
    for row in history:
        for name, value in row.items():
            if value is None or (isinstance(value, float) and not math.isfinite(value)):
                return [Alarm("not a number", f"{name} was not a finite number at step {row['step']}. Lower the "
                                              "learning rate, or look at that step's samples.")]
    return []


def hacking(history: History) -> list[Alarm]:
    """Reward hacking: the training score rises while another source's score, or the held-out score, falls or does not
    follow."""
    reward, alarms = series(history, "reward"), []
    if reward is None:
        return []
    seconds = {name: series(history, name) for row in history[:1] for name in row
               if name.startswith("rewards/") and name.endswith("/mean")}
    for name, second in seconds.items():
        spread = series(history, name.removesuffix("mean") + "std")
        whose = name.removeprefix("rewards/").removesuffix("/mean")
        alarms += (_against(reward, whose, second, spread) or _unfollowed(history, reward, whose, second, spread)
                   ) if second and spread else []
    return alarms + _held_out(history, reward)


def _against(reward: Series, name: str, second: Series, spread: Series) -> list[Alarm]:
    """The alarm if `second` has fallen from its best while the training score kept rising."""
    size, best = second.size, turning(reward, second, spread.start)
    if best is None:
        return []
    before = reward.around(min(best, len(reward.values) - size))
    where = "at the start" if best < size else f"around step {second.steps[best + size // 2]}"
    return [Alarm("reward hacking", f"the training score rose from {before:.3g} to {reward.end:.3g} while {name} fell "
                                    f"from {second.around(best):.3g} {where} to {second.end:.3g}: {_FOOLED}")]


def turning(reward: Series, second: Series, spread: float) -> int | None:
    """Index of the first of those `second.size` steps in a row whose mean of `second` is the highest, if `second` fell
    from there to the end (by more than NUM_ERRORS standard errors, and MIN_FALL of `spread`, the standard deviation of
    its scores) while `reward` rose (by more than two standard errors); else None."""
    last = len(second.values) - second.size
    best = max(range(last + 1), key=second.around)
    fall = second.around(best) - second.end
    rise = reward.end - reward.around(min(best, len(reward.values) - second.size))
    is_fooled = fall > max(NUM_ERRORS * second.error(), MIN_FALL * spread) and rise > 2 * reward.error()
    return best if is_fooled else None


def _unfollowed(history: History, reward: Series, name: str, second: Series, spread: Series) -> list[Alarm]:
    """The alarm if `second`, which is not optimised and correlated with the training score at the start, has not risen.

    With correlation r, responses that are one standard deviation better by the first score are r standard deviations
    better by the second. So r at the start gives the expected rise, up to the best score seen. The second score has not
    followed where its rise plus two standard errors is less than a third of that.
    """
    spread_of_reward, agreed, best = (series(history, what) for what in (
        "reward_std", f"rewards/{name}/correlation", f"rewards/{name}/max"))
    if spread_of_reward is None or agreed is None or best is None:
        return []
    rise, moved, room = reward.end - reward.start, second.end - second.start, max(best.values) - second.start
    if (rise <= max(NUM_ERRORS * reward.error(), MIN_RISE * spread_of_reward.start) or agreed.start < MIN_AGREED
            or room < MIN_ROOM * spread.start):
        return []
    expected = min(agreed.start * rise / spread_of_reward.start * spread.start, room)
    if moved + 2 * second.error() >= MIN_FOLLOWED * expected:
        return []
    return [Alarm("reward hacking", f"the training score rose from {reward.start:.3g} to {reward.end:.3g} and {name}, "
                                    f"which went with it at the start (correlation {agreed.start:.2f}), did not "
                                    f"follow: {second.start:.3g} then, {second.end:.3g} now, where about "
                                    f"{second.start + expected:.3g} was to be expected: {_FOOLED}")]


def _held_out(history: History, reward: Series) -> list[Alarm]:
    rows = [row for row in history if is_number(row.get("eval/reward")) and is_number(row.get("eval/reward_std"))]
    if len(rows) < 2 or reward.end - reward.start <= 2 * reward.error():
        return []
    best = max(rows, key=lambda row: row["eval/reward"])
    fall = best["eval/reward"] - rows[-1]["eval/reward"]
    if fall <= max(3 * MIN_FALL * best["eval/reward_std"], 0):
        return []
    return [Alarm("overfitting", f"the score of training prompts rose to {reward.end:.3g} while that of held-out "
                                 f"prompts fell from {best['eval/reward']:.3g} at step {best['step']} to "
                                 f"{rows[-1]['eval/reward']:.3g}. Train on more prompts, or for fewer steps.")]


def drift(history: History) -> list[Alarm]:
    """KL to the reference beyond which a learned reward is likely over-optimised."""
    kl, length = series(history, "objective/kl"), series(history, "completions/mean_length")
    return _far(kl.end, length.end) if kl is not None and length is not None else []


def _far(kl: float, length: float) -> list[Alarm]:
    per_token = kl / max(length, 1)
    if kl <= MAX_KL or per_token <= MAX_KL_PER_TOKEN:
        return []
    return [Alarm("KL", f"the policy is {kl:.3g} nats per response ({per_token:.2g} per token) from the reference; "
                        f"beyond {MAX_KL:g} nats and {MAX_KL_PER_TOKEN:g} per token a learned reward is likely fooled, "
                        "so read the samples. Raise ppo.kl_coef, or stop earlier.")]


def spike(history: History) -> list[Alarm]:
    """The first large rise of the KL within few steps, even if it fell again."""
    kl, length = series(history, "objective/kl"), series(history, "completions/mean_length")
    if kl is None or length is None:
        return []
    steps = min(RISE_STEPS, len(kl.values) - 2)
    for i in range(len(kl.values) - steps - 1):
        before, after = fmean(kl.values[i : i + 2]), fmean(kl.values[i + steps : i + steps + 2])
        if after - before > max(MAX_KL_RISE, MAX_KL_RISE_PER_TOKEN * length.start):
            return [Alarm("KL spike", f"the KL to the reference rose from {before:.2g} to {after:.3g} nats per "
                                      f"response within {steps} steps (from step {kl.steps[i]} on): the updates are "
                                      "too large. Lower roles.actor.learning_rate, or let ppo.update_kl do so (0.01, "
                                      "or less than it is).")]
    return []


def unmoved(history: History) -> list[Alarm]:
    """After many steps the policy is where it began, and the score has not risen."""
    values = [series(history, name) for name in ("objective/kl", "completions/mean_length", "reward")]
    if None in values or len((kl := values[0]).values) < FEW_STEPS:
        return []
    _, length, reward = values
    if abs(kl.end) >= min(MIN_KL, MIN_KL_PER_TOKEN * length.end) or reward.end - reward.start > 2 * reward.error():
        return []
    return [Alarm("hardly trained", f"after {kl.steps[-1]} steps the policy is {kl.end:.2g} nats per response from the "
                                    f"reference, and the score went from {reward.start:.3g} to {reward.end:.3g}, which "
                                    "may be chance: the updates are too small or too few. Raise "
                                    "roles.actor.learning_rate (3 times) or train.max_steps.")]


def lowered(history: History) -> list[Alarm]:
    """ppo.update_kl kept the learning rate far below its schedule for more than a quarter of the steps."""
    factor = series(history, "policy/rate_factor")
    if factor is None or sorted(factor.values)[len(factor.values) // 4] >= MAX_LOWERED:
        return []
    return [Alarm("rate lowered", f"ppo.update_kl lowered the actor's rate to {min(factor.values):.1%} of what is "
                                  f"scheduled, and to less than {MAX_LOWERED:.0%} in more than a quarter of the "
                                  "steps: the updates would have moved the policy too far. It held; a lower "
                                  "roles.actor.learning_rate loses less in the first steps.")]


def unheld(history: History) -> list[Alarm]:
    """A learned reward without a KL penalty, and without a reference to measure the KL. Functions that verify answers
    need none."""
    last = next((row for row in reversed(history) if {"rewards/model/mean", "rewards/judge/mean"} & row.keys()), None)
    if last is None or last.get("kl_coef") != 0 or "objective/kl" in last:
        return []
    return [Alarm("no hold", "ppo.kl_coef is 0 with a learned reward: no KL penalty keeps the policy near its start, "
                             "and how far it moved is not measured. Name roles.ref.model_name_or_path to see the KL, "
                             "or set ppo.kl_coef.")]


def memory_growth(history: History) -> list[Alarm]:
    """The peak memory of a step rises from quarter to quarter of the steps, though earlier ones had all lengths, and
    will exhaust the free memory within a hundred times as many steps."""
    rows = [(row["step"], max(peaks), row[FREE]) for row in history if is_number(row.get(FREE))
            if (peaks := [v for k, v in row.items() if k.startswith("memory/") and k != FREE and is_number(v)])]
    if len(rows) < 4 or rows[-1][0] - rows[0][0] < MIN_GROWTH_STEPS:
        return []
    ends = [len(rows) * i // 4 for i in range(5)]
    peaks = [max(peak for _, peak, _ in rows[i:j]) for i, j in pairwise(ends)]
    (middle, _, _), (step, _, free), grown = rows[ends[2] - 1], rows[-1], peaks[3] - peaks[1]
    if any(later < (1 + MIN_GROWN) * earlier for earlier, later in pairwise(peaks)):
        return []
    left = free * (step - middle) / grown
    if left > 100 * step:
        return []
    return [Alarm("memory grows", f"a step took {peaks[1] / 2**30:.2f} GiB at most up to step {middle} and "
                                  f"{peaks[3] / 2**30:.2f} up to step {step}: {grown / (grown + free):.0%} of what was "
                                  f"free. At this pace the other {free / 2**30:.1f} GiB are full in about {left:.0f} "
                                  "steps. Save more often (train.save_steps): the same command goes on from a "
                                  "checkpoint with fresh memory; --memory bounds what a step takes.")]


def no_signal(history: History) -> list[Alarm]:
    """Every response of every step had the same score, up to rounding."""
    reward, spread = series(history, "reward"), series(history, "reward_std")
    if reward is None or spread is None:
        return []
    rounding = 1e-6 * max(map(abs, reward.values))
    if max(spread.values) > rounding or max(reward.values) - min(reward.values) > rounding:
        return []
    return [Alarm("no signal", f"in 0 of {len(reward.values)} steps did any response score above {reward.end:.3g}, "
                               "the least score there was: of that no method can learn. Try --check_signal; begin "
                               "with SFT, take easier prompts, or look at the reward function.")]


def compared(start: dict[str, float], end: dict[str, float], num_prompts: int) -> list[Alarm]:
    """Alarms of a trained model against its start, both measured on num_prompts held-out prompts: score, accuracy (of
    an independent judge, where there is one), kl to the start in nats per response, length in tokens."""
    alarms = []
    if "accuracy" in start:
        before, after = start["accuracy"], end["accuracy"]
        error = math.sqrt((before * (1 - before) + after * (1 - after)) / num_prompts)
        if end["score"] > start["score"] and before - after > 2 * error:
            alarms += [Alarm("reward hacking", f"the score rose from {start['score']:.3g} to {end['score']:.3g} while "
                                              f"the accuracy fell from {before:.3g} to {after:.3g}: {_FOOLED}")]
    return alarms + _far(end["kl"], end["length"])


def answered(answers: Sequence[dict]) -> list[Alarm]:
    """The alarm of a trained model that does not end most of its fixed-prompt samples. "ended" of a row: whether its
    answer ended, None where it need not."""
    ended = [row["ended"] for row in answers if isinstance(row.get("ended"), bool)]
    endless = ended.count(False)
    if not ended or endless <= MAX_CLIPPED * len(ended):
        return []
    return [Alarm("endless answers", f"{endless} of {len(ended)} answers to the fixed prompts did not end by "
                                     "themselves. If they are only cut the model may be fine (chat, --max_new_tokens); "
                                     "if they repeat themselves it has not learned to stop: train for longer, or, "
                                     "where grad_norm is large, at a lower rate.")]


_LENGTH, _CLIPPED = ("completions/mean_length",), ("completions/clipped_ratio",)
# Of the checks in one row only the first that finds an alarm counts.
CHECKS: tuple[tuple[Callable[[History], list[Alarm]], ...], ...] = (
    (not_finite,), (memory_growth,), (hacking,), (drift,), (spike,), (lowered,), (unheld,),
    (Rule("the judge says nothing", ("judge/failed",), lambda failed: failed.end > 0.2,
          "{0.end:.0%} of the responses have no verdict of the judge ({0.start:.0%} at the start), and were given the "
          "mean of others. Raise reward.judge.max_new_tokens, take a judge that follows the template, or "
          "reward.judge.score probability."),
     Rule("the judge says something else", ("judge/word_mass",), lambda mass: mass.end < 0.05,
          "the words that the judge may answer with have a probability of {0.end:.2g} together: it wants to say "
          "something else, and their ratio means little. Take another judge, or a template that it follows.")),
    (Rule("the judge goes by the place", ("judge/order_changed",), lambda changed: changed.end > 0.5,
          "of {0.end:.0%} of the pairs the judge thinks otherwise when the two are shown in the other order, so that "
          "most comparisons are ties. Take another judge, or reward.judge.mode absolute."),),
    (Rule("no tool is called", ("tools/call_frequency",), lambda calls: max(calls.start, calls.end) < 0.02,
          "{0.end:.1%} of the responses call a tool, so nothing can be learned about calling. Bring the model to the "
          "format by SFT on conversations with tool calls, or say in the prompt that there are tools."),),
    (Rule("tools fail", ("tools/failure_frequency",), lambda failed: failed.end > 0.5,
          "{0.end:.0%} of the calls of tools fail ({0.start:.0%} at the start). Read the answers in the samples; "
          "tools/malformed_frequency and tools/late_frequency say how many cannot be read or take too long."),),
    (Rule("length collapse", _LENGTH, lambda length: length.end < 0.5 * length.start,
          "responses shrank from {0.start:.3g} to {0.end:.3g} tokens. The reward may favour short answers; read the "
          "samples."),),
    (Rule("length explosion", _LENGTH, lambda length: length.end > 2 * length.start,
          "responses grew from {0.start:.3g} to {0.end:.3g} tokens. The reward may favour long answers: try "
          "ppo.overlong_penalty or builtin:length_penalty."),),
    (Rule("no room for answers", ("episodes/no_room_ratio",), lambda full: full.end > 0.2,
          "in {0.end:.0%} of the episodes an answer no longer fits. Allow more sampling.max_new_tokens, which counts "
          "the answers too, or lower environment.max_answer_chars."),
     Rule("endless responses", _CLIPPED, lambda clipped: clipped.end > max(MAX_CLIPPED, clipped.start + 0.1),
          "{0.end:.0%} of the responses no longer end by themselves ({0.start:.0%} at the start). Set "
          "ppo.missing_eos_penalty (or raise it), or allow more ppo.sampling.max_new_tokens."),),
    (Rule("no response ends", (*_CLIPPED, "rewards/model/mean"),
          lambda clipped, _: min(clipped.start, clipped.end) > 0.9,
          "{0.end:.0%} of the responses are cut at max_new_tokens, from the start on, and the reward model scores them "
          "where nothing ends. Allow more tokens, or begin with SFT on demonstrations that end (data.append_eos "
          "true)."),),
    (Rule("empty answers", ("completions/empty_ratio",), lambda empty: empty.end > 0.5,
          "{0.end:.0%} of the responses are empty ({0.start:.0%} at the start). If they were from the start, look at "
          "the prompts as the model sees them (--preview); if they became so, the reward favours empty answers: set "
          "ppo.sampling.min_new_tokens."),),
    (Rule("unscored answers", ("completions/unscored_ratio",), lambda unscored: unscored.end > 0.5,
          "every reward source skipped {0.end:.0%} of the responses (None), which teach nothing. Give a source that "
          "scores them."),),
    # tasks with few possible answers, such as yes and no, have few distinct ones from the start
    (Rule("same answers", ("completions/distinct_answers", "completions/top3_share"),
          lambda distinct, top: distinct.end < 0.5 * distinct.start and top.end > top.start + 0.25,
          "unlike prompts get the same answers: three of them are {1.end:.0%} of a step's ({1.start:.0%} at the "
          "start), and {0.end:.0%} of its answers are different ({0.start:.0%}). Where more than a few answers are "
          "right, read the samples; lower roles.actor.learning_rate, or raise ppo.kl_coef."),),
    (Rule("same endings", ("completions/same_ending",), lambda same: same.end > max(0.3, same.start + 0.25),
          "{0.end:.0%} of the responses end with the same sentence ({0.start:.0%} at the start): the reward likes this "
          "form whatever is asked. Read the samples; lower roles.actor.learning_rate, raise ppo.kl_coef, or give "
          "the reward model pairs whose rejected answer has it."),),
    (Rule("diversity collapse", ("completions/distinct_2",), lambda distinct: distinct.end < 0.5 * distinct.start,
          "of all token pairs in the responses {0.end:.1%} are different, {0.start:.1%} at the start: answers to "
          "different prompts have become alike. Raise ppo.kl_coef or ppo.entropy_coef."),),
    (Rule("entropy collapse", ("entropy",), lambda entropy: entropy.end < 0.2 * entropy.start,
          "entropy fell from {0.start:.2g} to {0.end:.2g} nats per token: the policy no longer tries anything else. "
          "Raise ppo.entropy_coef or ppo.kl_coef."),),
    (no_signal,
     Rule("zero reward variance", ("frac_reward_zero_std",), lambda flat: flat.end > 0.9,
          "in {0.end:.0%} of the groups all responses have the same score, so they have no gradient. Take prompts of "
          "another difficulty, a finer reward, or ppo.max_refills."),
     Rule("zero reward variance", ("reward_std",), lambda spread: spread.end <= 0.01 * spread.start,
          "scores no longer differ (standard deviation {0.end:.2g}, {0.start:.2g} at the start), so they have no "
          "gradient. The reward is at its bound, or the responses are all alike."),
     unmoved),
    (Rule("responses left out", ("policy/masked_sequences",), lambda share: share.end > 0.5,
          "{0.end:.0%} of the responses ({0.start:.0%} at the start) are left out of the loss, for sampler and "
          "training disagree on them (engine/logprob_drift): little or nothing is learned. Raise "
          "ppo.importance_cap, or take ppo.importance token."),),
    (Rule("bounded scores", ("score/clip_fraction",), lambda clipped: clipped.higher > 0.05,
          "ppo.score_clip bounds {0.higher:.0%} of the scores, and between those beyond it the actor sees no "
          "difference. Raise it (null has none); if they went there in training, the reward model may be fooled: read "
          "samples."),),
)
