"""Estimate of a run's remaining time, for its header, its lines and its progress bar.

Before the first step it is based on the rehearsal, within it on the second part of its training, then on the steps
taken, scaled by their tokens; phases beside the steps count by their last time or by a guess.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hybrid_rlhf.core import activity

# Names of the phases beside the steps, as shown.
ANSWER, EVALUATE, SAVE = "answering the fixed prompts", "evaluating on held-out rows", "saving a checkpoint"
REPORT, EXPORT = "writing the report", "exporting the model"
COLD = 5.0  # seconds; in a first step at least so long the warm-up of compilers and caches hardly counts
RECENT = 10  # the next steps are estimated from so many of the last, or from half of all if more
FORWARD = 1 / 3  # share of a step's time for the same rows in evaluation without sampling: no backward pass


@dataclass
class Forecast:
    """What is known of a run before its first step.

    ahead: step -> how often each phase still comes after that step. guesses: seconds of a phase until it has been
    measured. tokens: mean of a step (0: not known); source: where that number is from, to show. warmup: steps at the
    beginning that train the critic alone. eval_batches, eval_share: batches of an evaluation, and the rows of a batch
    over those of a step.
    """

    ahead: Callable[[int], Mapping[str, int]] = lambda _step: {}
    guesses: Mapping[str, float] = field(default_factory=dict)
    tokens: float = 0.0
    source: str = ""
    warmup: int = 0
    eval_batches: int = 0
    eval_share: float = 1.0


class Pace:
    """Clock of a run. total: steps of the run; max_seconds: its time limit; first: steps done before this process."""

    def __init__(self, total: int, max_seconds: float | None = None) -> None:
        self.total, self.max_seconds, self.first, self.forecast = total, max_seconds, 0, Forecast()
        self.rehearsed, self.is_rehearsed = float("inf"), False  # seconds of a step; whether a rehearsal measured them
        self._steps: list[tuple[float, float]] = []  # (seconds, tokens) of each step of this process
        self._last, self.tokens = 0, 0  # tokens: of the current step, where they are known
        self._measured: dict[str, float] = {}  # phase -> seconds
        self._over: set[str] = set()  # phases since the last step
        self.phase = ""  # the current one
        self._sampled = self._trained = 0.0  # seconds of a step before its training and in it, where known
        self._training_since: float | None = None
        self._first_part: float | None = None  # when the first part of the first step's training was over
        self._started = self._event = time.perf_counter()

    def begin(self) -> None:
        """Start the clock."""
        self._started = self._event = time.perf_counter()
        self._last = self.first

    def begin_steps(self) -> None:
        """Start the first step's clock: what came before it, such as its rehearsal, does not count."""
        self._event, self._over = time.perf_counter(), set()

    def mark(self, step: int) -> None:
        """Record the end of `step`, which had `self.tokens` tokens."""
        if step == self._last:
            return
        now, count = time.perf_counter(), max(1, step - self._last)
        self._steps += [((now - self._event) / count, self.tokens)] * count
        if self._training_since is not None:
            self._trained = now - self._training_since
        if step == self.forecast.warmup and self._steps:  # from now on the actor is trained too
            self.rehearsed, self.is_rehearsed, self._steps = self._steps[-1][0] + self._trained, True, []
        self._last, self._event, self._training_since, self._over = step, now, None, set()

    def begin_phase(self, name: str) -> None:
        """Start a phase beside the steps."""
        self.phase, self._event = name, time.perf_counter()

    def end_phase(self) -> None:
        """End that phase."""
        now = time.perf_counter()
        self._measured[self.phase] = now - self._event
        self._over.add(self.phase)
        self.phase, self._event = "", now

    @property
    def phase_age(self) -> float:
        """Seconds since the current phase began."""
        return time.perf_counter() - self._event

    def hear(self) -> None:
        """A new activity within a step: reads how many parts of its training are done (core/activity.py)."""
        done, count = activity.parts_done()
        now = time.perf_counter()
        if count and self._training_since is None:
            self._training_since, self._sampled = now, now - self._event
        elif done == 1 and self._first_part is None:  # not measured: the optimizer allocated its state in it
            self._first_part = now
        elif done > 1 and self._first_part is not None and not self._steps and self.rehearsed == float("inf"):
            self._trained = (now - self._first_part) * count / (done - 1)
            self.rehearsed = self._sampled + self._trained

    @property
    def passed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    @property
    def before_step(self) -> float:
        """Seconds from the start to the beginning of the current step."""
        return self._event - self._started

    def step_seconds(self) -> float:
        """Seconds of a step to come. Infinite where only one short step, or a part of one, was measured: compilers and
        caches warm up in it."""
        steps = self._steps[1:][-max(RECENT, len(self._steps) // 2):]
        if not steps:
            only = self._steps[0][0] if self._steps and self.rehearsed == float("inf") else self.rehearsed
            return only if self.is_rehearsed or only > COLD else float("inf")
        seconds, tokens = (sum(column) for column in zip(*steps, strict=True))
        return seconds / tokens * self.forecast.tokens if tokens and self.forecast.tokens else seconds / len(steps)

    def phase_seconds(self, name: str) -> float | None:
        """Seconds of a phase: as measured, from the steps, or as guessed; None where nothing is known."""
        if name in self._measured:
            return self._measured[name]
        step, forecast = self.step_seconds(), self.forecast
        if name != EVALUATE or step == float("inf"):
            return forecast.guesses.get(name)
        if self._sampled:  # decoding time grows less than linearly with the number of sequences
            return forecast.eval_batches * self._sampled * forecast.eval_share ** 0.5
        return forecast.eval_batches * step * forecast.eval_share * FORWARD

    def phases_left(self) -> dict[str, float]:
        """Seconds of each phase ahead, summed over its occurrences, as far as known."""
        ahead = self.forecast.ahead(self._last)
        counts = {name: count - (name in self._over) for name, count in ahead.items()}
        return {name: count * (self.phase_seconds(name) or 0.0) for name, count in counts.items() if count > 0}

    def steps_left(self) -> tuple[int, float]:
        """The steps ahead, the one that is going on in full, and their seconds, whatever max_seconds is."""
        left = self.total - self._last
        warmup = min(left, max(0, self.forecast.warmup - self._last))
        return left, left * self.step_seconds() + (left - warmup) * self._trained * bool(warmup) if left else 0.0

    def seconds_left(self) -> float:
        """Seconds until the run ends. Infinite where nothing is known; steps never exceed what max_seconds leaves."""
        now, (_, steps) = time.perf_counter(), self.steps_left()
        others, gone = sum(self.phases_left().values()), now - self._event
        if self.phase:
            others -= min(gone, others, self.phase_seconds(self.phase) or 0.0)
        else:
            steps = max(0.0, steps - gone)
        if self.max_seconds is not None:
            steps = max(0.0, min(steps, self.max_seconds - (now - self._started)))
        return steps + others

    def share(self, step: int) -> float:
        """Share of the run that is done after `step`, 0 to 1, by steps or by time, whichever is larger."""
        share = step / self.total
        return max(share, min(1.0, self.passed / self.max_seconds)) if self.max_seconds else share
