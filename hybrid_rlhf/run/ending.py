"""End of a run: write its report, model and record, whether it finished, was stopped or failed, and say where."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from hybrid_rlhf.core import activity
from hybrid_rlhf.core.distributed import world_size
from hybrid_rlhf.core.errors import NotFinite, UserError, shown
from hybrid_rlhf.core.failure import lost_process, on_failure
from hybrid_rlhf.report.pace import EXPORT
from hybrid_rlhf.report.summary import PAGE
from hybrid_rlhf.report.terminal import one_line
from hybrid_rlhf.rewards import BadScore
from hybrid_rlhf.run import checkpoint
from hybrid_rlhf.run.checkpointing import Saver
from hybrid_rlhf.run.reporter import Reporter
from hybrid_rlhf.run.resume import FOLDER
from hybrid_rlhf.run.runfile import RunRecord

FROM_PYTHON = "from Python: "  # begins the command of a run that was started from Python


class Stopped(Exception):  # noqa: N818 - not a fault: the user asked for it
    """The user stopped the run, which saved a checkpoint; the notes list its files. Entry points exit with 130.
    is_finished: after its last step, with nothing left to do."""

    def __init__(self, message: str, *, is_finished: bool = False) -> None:
        super().__init__(message)
        self.is_finished = is_finished

    def _render_traceback_(self) -> list[str]:
        """Traceback in IPython and notebooks: the message lines alone."""
        return [shown(self)]


class Leaving(NamedTuple):
    """Callbacks for a run's end; every process calls each. export: writes its model; facts: for its record, called
    after that; num_updates: how often the exported weights have been updated so far."""

    tokenizer: object
    export: Callable[[], None]
    facts: Callable[[], dict]
    num_updates: Callable[[], int]


@contextmanager
def leaves(leaving: Leaving | None, saver: Saver, reporter: Reporter,
           answers: Callable[[], list[dict]] | None) -> Iterator[None]:
    """Write the report however the block ends; and the model where it ended well, was stopped, or failed between two
    updates of a single process. KeyboardInterrupt writes nothing: the last checkpoint's files stay."""
    is_over = False
    try:
        yield
        reporter.answered(saver.step, answers)
        reporter.conclude()
        is_over = True
        if leaving is not None:
            with reporter.phase(EXPORT):
                leaving.export()
            saver.record.finish(saver.values, tokenizer=leaving.tokenizer, **leaving.facts())
    except (Exception, SystemExit) as error:
        if is_over:  # the export has failed
            raise
        doing, is_stopped = activity.now(), isinstance(error, Stopped)
        why = one_line(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}", 500)
        state = f"{error}." if is_stopped else f"failed after step {saver.step} of {saver.total_steps}: {why}"
        if is_stopped and saver.held_out and not any(name.startswith("eval/") for name in saver.values):
            reporter.announce("the held-out rows were not measured; the run does so when it goes on and ends")
            state += " The held-out rows were not measured."
        is_between = leaving and saver.step and saver.num_updates == leaving.num_updates()  # no step is half done
        if is_between and (is_stopped or (world_size() == 1 and not isinstance(error, NotFinite))):
            _leave_model(leaving, saver, reporter, answers)
        reporter.conclude(state[0].upper() + state[1:], says_alarms=not isinstance(error, BadScore))
        activity.doing(doing)  # the activity that failed, for the error's line
        raise


def _leave_model(leaving: Leaving, saver: Saver, reporter: Reporter,
                 answers: Callable[[], list[dict]] | None) -> None:
    """Export the model of the last step. A failure in a single process is a warning: the checkpoint is there."""
    record, step = saver.record, saver.step
    try:
        record.status = "stopped"  # before the export, as a launcher may kill the process during it
        record.write()
        with reporter.phase(EXPORT):
            leaving.export()
        record.describe(saver.values, leaving.tokenizer, **leaving.facts(), model_step=step,
                        num_steps=saver.total_steps)
        reporter.answered(step, answers)
        reporter.sampled(step, saver.trainer.samples)
    except (Exception, SystemExit) as failure:
        if world_size() > 1:  # the others wait
            raise
        reporter.announce(f"warning: of the model of step {step} not all could be left: {one_line(str(failure), 300)}")


@contextmanager
def on_record(record: RunRecord) -> Iterator[None]:
    """Write an error that ends the block, or another process's failure, to run.json; the error's notes list the run's
    files and the command that resumes it."""
    try:
        with on_failure(lambda message: _close(record, "failed", message)):
            yield
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # a reward function may call sys.exit()
        is_first = record.finished is None  # the inner one of nested blocks
        if is_first and isinstance(error, (Stopped, KeyboardInterrupt)):
            _close(record, "stopped")
        elif is_first:
            _close(record, "failed", lost_process(error) or f"{type(error).__name__}: {error}")
        if is_first or (record.is_finished and not hasattr(error, "__notes__")):
            for line in what_is_where(record):
                error.add_note(line)
        raise


def what_is_where(record: RunRecord) -> list[str]:
    """Lines with the files of a run and, unless it is finished, the command that resumes it."""
    folder, step = Path(record.output_dir), record.facts.get("model_step")
    of_step = "" if step is None else f" (of step {step} of {record.facts.get('num_steps')})"
    saved = None
    with suppress(OSError):
        saved = checkpoint.latest(folder / FOLDER, is_thorough=False)
    return [*([f"model: {folder / 'model'}{of_step}"] if of_step or record.is_finished else []),
            *([f"report: {folder / PAGE}"] if (folder / PAGE).exists() else []),
            *([f"checkpoint: {saved}"] if saved else []),
            *([] if record.is_finished else [f"go on: {_again(record, saved)}"])]


def _again(record: RunRecord, saved: Path | None) -> str:
    begins = "" if saved else " (it begins again: there is no checkpoint)"
    if record.command.startswith(FROM_PYTHON) or not record.command:
        never = record.config.get("resume") == "never"
        return f"call train({'resume_from_checkpoint=True' if never and saved else ''}) again{begins}"
    launched = "" if world_size() == 1 else f"by the same launcher with {world_size()} processes: "
    auto = "" if record.config.get("resume") == "auto" or not saved else " --resume auto"
    return f"{launched}{record.command}{auto}{begins}"


def _close(record: RunRecord, status: str, error: str | None = None) -> None:
    """Close the record; a full disk is a warning, as the error that ended the run is the one to report."""
    try:
        record.close(status, error)
    except OSError as refusal:
        print(f"warning: run.json still says that the run goes on: {refusal.strerror}", file=sys.stderr)
