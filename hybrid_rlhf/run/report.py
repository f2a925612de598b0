"""What a run says while it runs: metrics.jsonl, samples.jsonl, trackers, and the terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from hybrid_rlhf.config import UserError
from hybrid_rlhf.distributed import is_main
from hybrid_rlhf.run.runfile import RunRecord
from hybrid_rlhf.run.terminal import Progress


class Reporter:
    """Writes every step's metrics; shows, samples and tracks every config.logging_steps. A context manager."""

    def __init__(self, record: RunRecord, keys: tuple[str, ...], total_steps: int, config) -> None:  # noqa: ANN001
        self.record, self.every, self.total = record, config.logging_steps, total_steps
        self.progress = Progress(record.stage, keys, total_steps, config.max_seconds)
        self._trackers: list = []

    def __enter__(self) -> Reporter:
        folder = Path(self.record.output_dir)
        self._metrics, self._samples = (_open(folder / n) for n in ("metrics.jsonl", "samples.jsonl"))
        self._trackers = _trackers(self.record)
        self.progress.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.progress.__exit__(*exc)
        for file in (self._metrics, self._samples):
            file.close()
        for tracker in self._trackers:
            tracker.finish()

    def step(self, step: int, values: dict[str, float], samples: Callable[[], list[dict]]) -> None:
        shown = step % self.every == 0 or step in (1, self.total)
        self._write(step, values)
        if is_main() and shown:
            for sample in samples():
                self._samples.write(json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n")
            self._samples.flush()
        self.progress.step(step, values, is_shown=shown)

    def evaluated(self, step: int, values: dict[str, float]) -> dict[str, float]:
        """Report an evaluation; returns its values."""
        self._write(step, values)
        self.progress.note("held out: " + "  ".join(f"{k.removeprefix('eval/')} {v:.4g}" for k, v in values.items()))
        return values

    def _write(self, step: int, values: dict[str, float]) -> None:
        if is_main():
            self._metrics.write(json.dumps({"step": step, **values}) + "\n")
            self._metrics.flush()
        for tracker in self._trackers:
            tracker.log(values, step=step)


def _open(path: Path) -> TextIO:
    """The file, or nowhere in the processes that write nothing."""
    return (path if is_main() else Path(os.devnull)).open("a", encoding="utf-8")


def _trackers(record: RunRecord) -> list:
    """accelerate's trackers named by report_to, started; UserError for one that is unknown or not installed."""
    names = record.config.get("report_to") or []
    if not names or not is_main():
        return []
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers

    unknown = [n for n in names if n not in LOGGER_TYPE_TO_CLASS]
    if unknown:
        raise UserError(f"report_to {unknown[0]!r} is no tracker; there are {', '.join(LOGGER_TYPE_TO_CLASS)}")
    made = []
    for name in names:
        kind = LOGGER_TYPE_TO_CLASS[name]
        if not filter_trackers([name], record.output_dir):
            raise UserError(f"report_to {name}: its package is not installed")
        where = {"logging_dir": record.output_dir} if kind.requires_logging_directory else {}
        made.append(kind(record.stage, **where))
        if hasattr(made[-1], "start"):
            made[-1].start()
    return made
