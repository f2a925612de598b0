"""Write a run's metrics.jsonl, samples.jsonl and answers.jsonl, trackers, and lines for the terminal; and tell its
watchers, functions of the program that started the run, of its events."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from hybrid_rlhf.core import activity
from hybrid_rlhf.core.distributed import is_main
from hybrid_rlhf.core.metrics import RECOMPUTED
from hybrid_rlhf.core.random_state import undisturbed
from hybrid_rlhf.core.strict_json import to_json
from hybrid_rlhf.report.alarms import memory_growth
from hybrid_rlhf.report.notebook import display
from hybrid_rlhf.report.pace import ANSWER, REPORT
from hybrid_rlhf.report.summary import ANSWERS, METRICS, SAMPLES, conclude, first_lines
from hybrid_rlhf.report.terminal import forecast_line, one_line
from hybrid_rlhf.report.trackers import start_trackers
from hybrid_rlhf.run.runfile import TRACKERS, RunRecord

REPORTS_AT_MOST, FIRST_REPORT = 0.05, 3.0  # share of the run's time; seconds assumed for the first report


class Reporter:
    """Writes every step to metrics.jsonl; every few (config.logging_steps) also to terminal, samples.jsonl, trackers.

    A context manager. Only the main process writes; calls in others do nothing. first: steps that were done before.
    positions: the result of `state` at the checkpoint from which the run resumes; the files are truncated to it.
    """

    @undisturbed()
    def __init__(self, record: RunRecord, keys: tuple[str, ...], total_steps: int, config,  # noqa: ANN001
                 first: int = 0, positions: Mapping[str, int] | None = None) -> None:
        self.every = config.logging_steps or max(1, min(10, total_steps // 10))
        self.record, self.total = record, total_steps
        self._positions = positions or {}
        self.progress = display(record.stage, keys, total_steps, config.max_seconds)
        self.progress.pace.first = first
        self._has_estimate, self._hearing = first >= total_steps, ExitStack()
        self._num_steps = self._num_recomputed = 0
        self._files: dict[str, Lines] = {}
        self._last_sampled = 0
        self._reported, self._took = time.monotonic(), FIRST_REPORT  # when the last report was written; its seconds
        self._trackers: list = []
        self._memory: list[dict] | None = []  # of every fifth step, until the warning that it grows

    @undisturbed()
    def __enter__(self) -> Reporter:
        folder = Path(self.record.output_dir)
        names = self.record.config.get("report_to") or []
        self._trackers = start_trackers(names, self.record.stage, folder / TRACKERS, self.record.config)
        for name in (METRICS, SAMPLES, ANSWERS):
            path, position = (folder / name, self._positions.get(name)) if is_main() else (os.devnull, None)
            self._files[name] = Lines(path, self.announce, position)
        self.progress.__enter__()
        self._hearing.enter_context(activity.listening(self._hear))
        return self

    def __exit__(self, *exc: object) -> None:
        self._hearing.close()
        if self._num_recomputed and is_main():
            self.progress.print_line(
                f"{self.record.stage}: the old log-probabilities of {self._num_recomputed} of {self._num_steps} steps "
                "are a training forward's, for the sampler's were more than max_logprob_drift off "
                "(engine/logprob_drift in metrics.jsonl)")
        self.progress.__exit__(*exc)
        for file in self._files.values():
            file.close()
        self._each_tracker(lambda tracker: tracker.finish())

    @undisturbed()
    def conclude(self, state: str = "", *, says_alarms: bool = True) -> None:
        """At the end of the run: write the report, and print the alarms. state: how it ended, where not well.
        says_alarms: not where the reward failed, whose error follows and comes first in the report."""
        if is_main():
            warnings: list[str] = []
            with self.phase(REPORT):
                alarms = conclude(Path(self.record.output_dir), self.record.stage, warnings.append,
                                  self.progress.pictures, state)
            for alarm in alarms if says_alarms else ():
                self.progress.print_line(f"{self.record.stage} alarm, {alarm.name}: {alarm.text}", "bold red")
            for text in warnings:
                self.progress.print_line(f"warning: {text}", "yellow")

    @undisturbed()
    def checkpointed(self, step: int) -> None:
        """Write the report at the checkpoint after `step`, unless reports would take more than 5% of the time."""
        began = time.monotonic()
        if is_main() and began - self._reported >= self._took / REPORTS_AT_MOST:
            with self.phase(REPORT):
                conclude(Path(self.record.output_dir), self.record.stage,
                         state=f"After step {step} of {self.total}; the run had not ended.")
            self._reported = time.monotonic()
            self._took = self._reported - began

    @undisturbed()
    def step(self, step: int, values: dict[str, float], samples: Callable[[], list[dict]]) -> None:
        """After a trainer step: write and show its metrics. samples is called only for steps that are logged."""
        self._write(METRICS, {"step": step, **values})
        self._num_steps, self._num_recomputed = self._num_steps + 1, self._num_recomputed + (RECOMPUTED in values)
        is_logged = step % self.every == 0 or step in (1, self.total)
        newest = samples() if is_logged or self.progress.is_live else []
        if is_logged:
            self._sampled(step, newest)
            self._track(step, values)
        self.progress.pace.mark(step)
        self.estimate()
        self.progress.step(step, values, is_logged=is_logged, samples=newest)
        self._warn_of_growth(step, values)
        for line in first_lines([{"step": step, **values}]):  # of the first step only
            if line.startswith("Verdict: ") and not line.startswith("Verdict: healthy"):
                self.announce(f"warning: before the first update: {line.removeprefix('Verdict: ')}")

    def _warn_of_growth(self, step: int, values: dict[str, float]) -> None:
        """Warn once of growing memory, by every fifth step; checked more rarely the more steps there are."""
        if self._memory is None or step % 5:
            return
        self._memory.append({"step": step, **{k: v for k, v in values.items() if k.startswith("memory/")}})
        if (count := len(self._memory)) % (1 + count // 20):
            return
        for alarm in memory_growth(self._memory):
            self.announce(f"warning: {alarm.name}: {alarm.text}")
            self._memory = None

    def sampled(self, step: int, samples: Callable[[], list[dict]]) -> None:
        """Write the samples of `step`, unless they are written already."""
        self._sampled(step, samples() if step != self._last_sampled else [])

    def _sampled(self, step: int, samples: list[dict]) -> None:
        self._last_sampled = step
        for sample in samples:
            self._write(SAMPLES, {"step": step, **sample})

    @undisturbed()
    def answered(self, step: int, answers: Callable[[], list[dict]] | None) -> None:
        """Write the model's answers to the fixed prompts after `step`."""
        if answers:
            with self.phase(ANSWER):
                for row in answers():
                    self._write(ANSWERS, {"step": step, **row})

    @undisturbed()
    def evaluated(self, step: int, values: dict[str, float]) -> None:
        """Write and show the held-out metrics after `step`; their names begin with eval/."""
        self._write(METRICS, {"step": step, **values})
        self._track(step, values)
        self.progress.evaluated(step, values)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of the run beside its steps: shown where it takes long, and timed for the next estimate."""
        activity.doing(name)
        self.progress.pace.begin_phase(name)
        try:
            yield
        finally:
            self.progress.pace.end_phase()
        activity.doing("")  # not after an error, whose message has the activity

    @undisturbed()
    def estimate(self) -> None:
        """Print one line with the run's estimated time, as soon as there is an estimate."""
        pace = self.progress.pace
        if self._has_estimate or pace.step_seconds() == float("inf") or not pace.steps_left()[0]:
            return
        self._has_estimate = True
        if is_main():
            self.progress.print_line(forecast_line(pace))

    def _hear(self, _text: str) -> None:
        self.progress.pace.hear()
        self.estimate()

    def announce(self, text: str) -> None:
        """Print a line, in the main process."""
        if is_main():
            self.progress.announce(text)

    def state(self) -> dict[str, int]:
        """Sync the files to the disk; returns their lengths. Raises OSError on a full disk."""
        return {name: file.sync() for name, file in self._files.items()}

    def _write(self, name: str, row: dict) -> None:
        self._files[name].write(to_json(row))

    def _track(self, step: int, values: dict[str, float]) -> None:
        self._each_tracker(lambda tracker: tracker.log(values, step=step))
        tell("log", step=step, values=values)

    def _each_tracker(self, act: Callable) -> None:
        """Call each tracker; one that fails (no network, full disk) is dropped with a warning, and training goes on."""
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except Exception as error:  # other people's code
                self._trackers.remove(tracker)
                self.announce(f"warning: report_to {tracker.name} has failed and gets nothing more "
                              f"({type(error).__name__}: {one_line(str(error), 200)}); {METRICS} has every step")


class Lines:
    """JSON lines appended to `path`. A line that the disk refuses is retried with the next one: training goes on, and
    no line is lost or written twice while the process lives. position: of a checkpoint, to which the file is truncated;
    warn: gets a message at the first failure."""

    def __init__(self, path: str | Path, warn: Callable[[str], None], position: int | None = None) -> None:
        self.path, self._warn, self._waiting, self._is_refused = path, warn, b"", False
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        if position is not None:
            os.truncate(self._file.fileno(), min(position, self._file.tell()))

    def write(self, line: str) -> None:
        self._waiting += line.encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting):]
            self._is_refused = False
        except OSError as error:
            if not self._is_refused:
                self._warn(f"warning: cannot write to {self.path}: {error.strerror}; its lines wait for room")
            self._is_refused = True

    def sync(self) -> int:
        """Flush to the disk; returns the number of bytes written. OSError while some lines wait."""
        self._flush()
        if self._waiting:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({Path(self.path).name} waits for room)")
        if os.path.isfile(self.path):  # /dev/null has no fsync
            os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._flush()
        self._file.close()


# -- watchers ----------------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """What a watcher asks for. After step_end and evaluate: to stop after this step as after the last one, to save, to
    evaluate (not again after evaluate). After end: to export the best checkpoint (train.save_best), not the last step.
    """

    stop: bool = False
    save: bool = False
    evaluate: bool = False
    best: bool = False


# (event, what belongs to it). begin: trainer, step, total_steps. step_begin, step_end: step; the latter with values, as
# log and evaluate have them. save: step. end: step, after which the model is written.
Watcher = Callable[[str, dict], Asked]
_watchers: list[Watcher] = []


@contextmanager
def watched_by(watcher: Watcher | None) -> Iterator[None]:
    """Within the block runs tell `watcher` of their events. Every process of a run has its own, asking for the same."""
    if watcher is None:
        yield
        return
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def tell(event: str, **facts: object) -> Asked:
    """Tell the watchers of an event; returns what any of them asks for."""
    asked = [watcher(event, facts) for watcher in _watchers]
    return Asked(*(any(each) for each in zip(*asked, strict=True))) if asked else Asked()
