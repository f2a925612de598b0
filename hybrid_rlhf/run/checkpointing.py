"""Save and restore a run's whole state, handle failed saves, and evaluate for the best checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hybrid_rlhf.core import random_state
from hybrid_rlhf.core.config import UserError, check, nearest
from hybrid_rlhf.core.distributed import print_main, rank, world_size
from hybrid_rlhf.report.pace import EVALUATE, SAVE
from hybrid_rlhf.run import checkpoint
from hybrid_rlhf.run.checkpoint import SaveError, load_all
from hybrid_rlhf.run.reporter import Reporter
from hybrid_rlhf.run.resume import FOLDER
from hybrid_rlhf.run.runfile import RunRecord
from hybrid_rlhf.run.train_config import TrainConfig

_SAVES_AT_MOST = 0.05  # share of the time, with train.save_minutes
_SKIPPED = "/skipped_updates"  # suffix of metrics that count skipped updates of the whole run
SMALL_IS_GOOD = ("loss", "perplexity", "kl")


class DoesNotFit(UserError):
    """The state of a checkpoint is not one that this run can take up."""


class Saver:
    """Saves the whole state of a run, and restores it. step, values: the last step taken and its metrics; num_updates:
    updates of the weights until then. owes_evaluation: whether the evaluation after the restored step is still to be
    done."""

    def __init__(self, trainer, loader, held_out, record: RunRecord, config: TrainConfig,  # noqa: ANN001
                 total_steps: int) -> None:
        self.trainer, self.loader, self.held_out, self.record, self.config = trainer, loader, held_out, record, config
        self.total_steps, self.folder = total_steps, Path(record.output_dir) / FOLDER
        self.step, self.values = 0, {}
        self.num_updates, self.num_updates_of = 0, lambda: 0
        self.owes_evaluation = False
        self._best: float | None = None
        self._failed, self._newest = 0, 0  # _newest: the step of the newest checkpoint
        self._before: tuple = ()
        self._spared: list[str] | None = None  # checkpoints from before updates were skipped, while they are
        self._skipped: dict[str, float] = {}  # skipped updates so far, by metric; a step may lack the metric
        self._saved_at, self._took = time.monotonic(), 0.0  # when the last save ended, and its seconds

    def restore(self, saved: Mapping | None) -> int:
        """Restore everything from a checkpoint, if not None; returns the number of steps that are done."""
        if saved is None:
            return 0
        try:
            step = int(saved["step"])
            check(step <= self.total_steps, f"the checkpoint is of step {step}, after the run's last, "
                                            f"{self.total_steps}; raise train.max_steps or give --resume never")
            _check_rows("the rows of the data", self.loader, saved["run"]["data"])
            _check_rows("the held-out rows", self.held_out, saved["run"]["held_out"])
            _warn_of_short_batches(self.loader, saved["run"]["world_size"])
            self.loader.load_state(saved["loader"])
            self.trainer.load_state(saved["trainer"])
            self.values, self._best = load_all(saved["values"]), saved["best"]
            self.owes_evaluation = bool(saved["owes_evaluation"])
            self._spared, self._skipped = saved["spared"], load_all(saved["skipped"])
            random_state.load_state(saved["random"])  # last: code above may draw random numbers
        except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise DoesNotFit(f"the checkpoint {self.record.resumes_from} does not fit this run: {error}; give --resume "
                            "never to start again") from error
        self._newest = self.step = step
        self.num_updates = self.num_updates_of()
        return step

    def mark(self) -> None:
        """Before a step: remember the states of loader and generators, in case the step fails."""
        self._before = self.loader.state(), random_state.state()

    def observe(self, values: dict[str, float]) -> None:
        """After a step: take its metrics. While updates are skipped, earlier checkpoints are not removed: the last
        update may have ruined the weights."""
        counts = {name: value for name, value in values.items() if name.endswith(_SKIPPED)}
        is_skipping = any(value > self._skipped.get(name, 0) for name, value in counts.items())
        if not is_skipping:
            self._spared = None
        elif self._spared is None:
            self._spared = self._names()
        self.step, self.num_updates = self.step + 1, self.num_updates_of()
        self.values, self._skipped = values, self._skipped | counts

    def before_skips(self) -> Path | None:
        """The last checkpoint from before updates were skipped, else the last one; None where there is none."""
        names = [name for name in self._names() if self._spared is None or name in self._spared]
        return self.folder / names[-1] if names else None

    def _names(self) -> list[str]:
        return [path.name for path in checkpoint.steps(self.folder)]

    def save_undone(self, done: int, reporter: Reporter) -> None:
        """Save a checkpoint after `done` steps, before a step that failed without changing a weight."""
        if done > self._newest and world_size() == 1:  # other processes may be anywhere
            try:
                path = self.save(done, reporter, position=self._before)
            except SaveError as error:
                reporter.announce(f"warning: {error}")
            else:
                if path:
                    reporter.announce(f"a checkpoint after step {done} is saved; the same command goes on there")

    def keep_best(self, path: Path, reporter: Reporter) -> None:
        """Keep the checkpoint in `path` as the best so far; a warning where the disk has no room for a copy."""
        try:
            checkpoint.keep_best(path)
        except SaveError as error:
            reporter.announce(f"warning: {error}; the best checkpoint so far, {path}, is not in {checkpoint.BEST}/")

    def is_overdue(self) -> bool:
        """Whether train.save_minutes have passed since the last checkpoint, or since the run began."""
        wait = max(60 * self.config.save_minutes, self._took / _SAVES_AT_MOST)
        return self.config.save_minutes > 0 and time.monotonic() - self._saved_at >= wait

    def save(self, step: int, reporter: Reporter, *, owes_evaluation: bool = False,
             position: tuple[dict, dict] | None = None) -> Path | None:
        """Save a checkpoint after `step`; None, with a warning, where the disk refuses it.

        position: states of loader and generators to save in place of the current ones.
        Raises SaveError after config.max_failed_saves failures in a row.
        """
        with reporter.phase(SAVE):
            began = time.monotonic()
            try:
                positions = checkpoint.together(self.folder, reporter.state)[rank()]
                if self._spared is not None:  # the user may have removed some
                    self._spared = [name for name in self._names() if name in self._spared]
                place, drawn = position or (self.loader.state(), random_state.state())
                state = {"step": step, "trainer": self.trainer.state(), "loader": place, "random": drawn,
                         "reporter": positions, "values": self.values, "best": self._best,
                         "owes_evaluation": owes_evaluation, "spared": self._spared, "skipped": self._skipped,
                         "run": self._run(step)}
                if self._spared and self._spared[-1:] == self._names()[-1:]:  # the first checkpoint since
                    reporter.announce(f"warning: updates are being skipped; {self.before_skips()} is from before and "
                                      "is kept")
                path = checkpoint.save(self.folder, step, state, spare=self._spared or (),
                                       keep=self.config.save_total_limit if self._spared is None else 1)
            except SaveError as error:
                self._failed += 1
                if self._failed >= self.config.max_failed_saves:
                    raise SaveError(f"{error}; that was the {self._failed}. time in a row") from error
                reporter.announce(f"warning: {error}; training goes on, and the checkpoints there were are still there")
                return None
            finally:
                self._saved_at = time.monotonic()  # after a failed save too, so that the next one waits
                self._took = self._saved_at - began
            self._failed, self._newest = 0, step
            return path

    def _run(self, step: int) -> dict:
        """Facts by which a later process decides whether it can resume from here, without reading tensors."""
        return {"stage": self.record.stage, "settings": self.record.config, "world_size": world_size(), "step": step,
                "total_steps": self.total_steps, "versions": self.record.versions, "data": _fingerprint(self.loader),
                "held_out": _fingerprint(self.held_out)}

    def evaluate(self, step: int, reporter: Reporter, interrupts: Sequence[int] = ()) -> bool | None:
        """Evaluate after `step`; returns whether it is the best so far by config.save_best, or None where a single
        process was interrupted: then there is no evaluation."""
        batches, before = self.held_out.once(), random_state.state()
        if self.config.max_eval_batches is not None:
            batches = (b for _, b in zip(range(self.config.max_eval_batches), batches, strict=False))
        try:
            with reporter.phase(EVALUATE):
                metrics = self.trainer.evaluate(_until(interrupts, batches)).compute()
        except _Interrupted:
            random_state.load_state(before)
            return None
        values = {f"eval/{name}": value for name, value in metrics.items()}
        reporter.evaluated(step, values)
        self.values |= values
        return self._is_best(values)

    def _is_best(self, evaluated: dict[str, float]) -> bool:
        name = self.config.save_best
        if name is None:
            return False
        check(name in evaluated, f"train.save_best is {name!r}, and the evaluation has {', '.join(sorted(evaluated))}"
                                 f"{nearest(name, evaluated)}")
        value, sign = evaluated[name], -1 if name.rsplit("/", 1)[-1] in SMALL_IS_GOOD else 1
        if value != value or (self._best is not None and value * sign <= self._best * sign):
            return False
        self._best = value
        return True


class _Interrupted(Exception):  # noqa: N818 - not a fault
    """The user stopped the run during an evaluation."""


def _until(interrupts: Sequence[int], batches: Iterable) -> Iterator:
    for batch in batches:
        if interrupts and world_size() == 1:  # several processes would have to agree
            raise _Interrupted
        yield batch


def _fingerprint(loader) -> str | None:  # noqa: ANN001
    """The fingerprint of a loader's rows; None without rows, or for a loader of another kind."""
    return loader.fingerprint() if hasattr(loader, "fingerprint") else None


def _check_rows(what: str, loader, made_with: str | None) -> None:  # noqa: ANN001
    check(made_with == _fingerprint(loader), f"{what} are not those that the checkpoint was made with; give them as "
                                             "they were, or --resume never to start again")


def _warn_of_short_batches(loader, num_before: int) -> None:  # noqa: ANN001
    """A warning where another number of processes sees other rows: a single process leaves the last batch short."""
    is_unlike = num_before != world_size() and 1 in (num_before, world_size())
    if is_unlike and getattr(loader, "fills_up", False):
        print_main("warning: a step takes more rows than there are, which several processes fill up and one does not: "
                   "the steps from here on differ from an uninterrupted run's")
