"""What a run writes while it runs: metrics.jsonl, samples.jsonl, trackers, and lines for the terminal."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from hybrid_rlhf.distributed import is_main
from hybrid_rlhf.run.runfile import RunRecord, to_json
from hybrid_rlhf.run.summary import conclude
from hybrid_rlhf.run.terminal import Progress
from hybrid_rlhf.run.trackers import start_trackers

METRICS, SAMPLES, TRACKERS = "metrics.jsonl", "samples.jsonl", "trackers"


class Reporter:
    """Every step goes to metrics.jsonl; every config.logging_steps also to terminal, samples.jsonl and trackers.

    A context manager. Only the main process writes; the others' calls do nothing.
    """

    def __init__(self, record: RunRecord, keys: tuple[str, ...], total_steps: int, config) -> None:  # noqa: ANN001
        self.record, self.every, self.total = record, config.logging_steps, total_steps
        self.progress = Progress(record.stage, keys, total_steps, config.max_seconds)
        self._files: dict = {}
        self._trackers: list = []

    def __enter__(self) -> Reporter:
        folder = Path(self.record.output_dir)
        names = self.record.config.get("report_to") or []
        self._trackers = start_trackers(names, self.record.stage, folder / TRACKERS, self.record.config)
        for name in (METRICS, SAMPLES):
            path = folder / name if is_main() else os.devnull
            self._files[name] = open(path, "a", encoding="utf-8", buffering=1)
        self.progress.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.progress.__exit__(*exc)
        for file in self._files.values():
            file.close()
        for tracker in self._trackers:
            tracker.finish()

    def conclude(self) -> None:
        """The run ended well: its alarms go to report.md and to the terminal."""
        for file in self._files.values():
            file.flush()
        if is_main():
            found = conclude(Path(self.record.output_dir), self.record.stage, METRICS)
            self.progress.alarms([f"{alarm.name}: {alarm.text}" for alarm in found])

    def step(self, step: int, values: dict[str, float], samples: Callable[[], list[dict]]) -> None:
        """One trainer step is done. samples is called only for steps that are logged."""
        self._write(METRICS, {"step": step, **values})
        is_logged = step % self.every == 0 or step in (1, self.total)
        newest = samples() if is_logged else []
        for sample in newest:
            self._write(SAMPLES, {"step": step, **sample})
        if is_logged:
            self._track(step, values)
        self.progress.step(step, values, is_logged=is_logged, samples=newest)

    def evaluated(self, step: int, values: dict[str, float]) -> None:
        """The held-out metrics after `step`, names beginning with eval/."""
        self._write(METRICS, {"step": step, **values})
        self._track(step, values)
        self.progress.evaluated(step, values)

    def _write(self, name: str, row: dict) -> None:
        self._files[name].write(to_json(row) + "\n")

    def _track(self, step: int, values: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(values, step=step)
