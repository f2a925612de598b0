"""However a run ends, it leaves a report, a model that says its step, and the lines that say what is where."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hybrid_rlhf.cli import main
from hybrid_rlhf.commands import export
from hybrid_rlhf.core.errors import NotFinite
from hybrid_rlhf.core.startup import lasting_streams
from hybrid_rlhf.report.alarms import Alarm
from hybrid_rlhf.rewards import BadAnswer
from hybrid_rlhf.run import checkpoint, reporter, runfile, signals
from hybrid_rlhf.run.ending import Leaving, Stopped
from hybrid_rlhf.run.loop import TrainConfig, fit
from tests.factories.counting import Config, Loader, Trainer, left, runner
from tests.factories.stage_options import short_sft


class Left:
    """What a run leaves, which counts: `updates` of the weights are those of the trainer's steps and of `more`."""

    def __init__(self, folder: Path, trainer: Trainer, on_export=lambda: None) -> None:  # noqa: ANN001
        self.folder, self.trainer, self.on_export, self.exported, self.more = folder, trainer, on_export, [], 0
        trainer.at = {batch: self._counted(act) for batch, act in trainer.at.items()}

    def _counted(self, act):  # noqa: ANN001, ANN202
        def acts() -> None:
            act(self)
        return acts

    def export(self) -> None:
        self.on_export()
        (self.folder / "model").mkdir(exist_ok=True)
        self.exported.append(float(self.trainer.total.sum()))

    def leaving(self) -> Leaving:
        return Leaving(None, self.export, lambda: {"base_model": "base"}, lambda: self.more)


@pytest.fixture
def go(tmp_path):
    def run(at=None, steps: int = 9, resume: str = "auto", on_export=lambda: None, command: str = "train.py --x 1",  # noqa: ANN001, ANN202
            held_out=None, **train):  # noqa: ANN001, ANN003
        config = Config(str(tmp_path), resume, train=TrainConfig(**dict(logging_steps=4) | train))
        record = runfile.start(config.output_dir, "sft", config, command)
        left = Left(tmp_path, Trainer(at), on_export)
        left.record = record
        run.left = left
        fit(left.trainer, Loader(), held_out, config.train, record, steps, lambda: [{"prompt": "p", "completion": "c"}],
            leaving=left.leaving())
        return left

    return run


def interrupt(_left: Left | None = None) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def rows(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_stopped_run_leaves_model_report_samples_and_answers_of_its_last_step(go, tmp_path):
    with pytest.raises(Stopped) as error:
        go({3: interrupt})
    record = runfile.read_run(tmp_path)
    assert (record.status, record.facts["model_step"], record.facts["num_steps"]) == ("stopped", 3, 9)
    assert len(go.left.exported) == 1 and record.facts["base_model"] == "base"
    assert [row["step"] for row in rows(tmp_path, "samples.jsonl")] == [1, 3]
    assert [row["step"] for row in rows(tmp_path, "answers.jsonl")] == [0, 3]
    assert "**Stopped after step 3 of 9.**" in (tmp_path / "report.md").read_text()
    assert "Stopped after step 3 of 9." in (tmp_path / "report.html").read_text()
    assert "after step 3 of 9" in (tmp_path / "model" / "README.md").read_text()
    assert error.value.__notes__ == [
        f"model: {tmp_path}/model (of step 3 of 9)", f"report: {tmp_path}/report.html",
        f"checkpoint: {tmp_path}/checkpoints/step-00000003", "go on: train.py --x 1"]


def test_a_stopped_run_says_that_its_held_out_rows_were_not_measured(go, tmp_path, capfd):
    with pytest.raises(Stopped):
        go({3: interrupt}, held_out=Loader())
    assert "**Stopped after step 3 of 9. The held-out rows were not measured.**" in (tmp_path / "report.md").read_text()
    assert capfd.readouterr().err.count("the held-out rows were not measured") == 1


def test_the_run_that_goes_on_replaces_all_of_it(go, tmp_path):
    with pytest.raises(Stopped):
        go({3: interrupt})
    assert go().record.is_finished
    record = runfile.read_run(tmp_path)
    assert "model_step" not in record.facts and "early" not in (tmp_path / "model" / "README.md").read_text()
    assert [row["step"] for row in rows(tmp_path, "answers.jsonl")] == [0, 9]
    assert [row["step"] for row in rows(tmp_path, "samples.jsonl")] == [1, 4, 8, 9], "as of a run that went through"
    assert "topped" not in (tmp_path / "report.md").read_text()


def test_a_failure_between_two_updates_leaves_the_model_of_the_step_before(go, tmp_path):
    def fail(_left: Left) -> None:
        raise RuntimeError("the judge\nhas left")

    with pytest.raises(RuntimeError, match="the judge") as error:
        go({3: fail}, save_steps=1)
    record = runfile.read_run(tmp_path)
    assert (record.status, record.facts["model_step"]) == ("failed", 2)
    assert "**Failed after step 2 of 9: RuntimeError: the judge has left**" in (tmp_path / "report.md").read_text()
    assert error.value.__notes__[0] == f"model: {tmp_path}/model (of step 2 of 9)"
    assert error.value.__notes__[-1] == "go on: train.py --x 1"


def update_then_fail(left: Left) -> None:
    left.more += 1
    raise RuntimeError("within the step")


def not_finite(_left: Left) -> None:
    raise NotFinite("no number")


@pytest.mark.parametrize("fault", [update_then_fail, not_finite])
def test_weights_within_a_step_or_not_finite_are_not_exported(go, tmp_path, fault):
    with pytest.raises(Exception, match=r"within the step|no number") as error:
        go({3: fault}, save_steps=1)
    assert not go.left.exported and not any(note.startswith("model:") for note in error.value.__notes__)
    assert (tmp_path / "report.md").exists()
    assert f"checkpoint: {tmp_path}/checkpoints/step-00000002" in error.value.__notes__


def test_a_second_interrupt_while_the_model_is_exported_ends_at_once(go, tmp_path):
    with pytest.raises(KeyboardInterrupt) as error:
        go({3: interrupt}, on_export=interrupt)
    assert runfile.read_run(tmp_path).status == "stopped" and not go.left.exported
    assert error.value.__notes__ == [f"checkpoint: {tmp_path}/checkpoints/step-00000003", "go on: train.py --x 1"]


def test_an_interrupt_in_the_last_export_waits_for_it_and_ends_a_finished_run(go, tmp_path):
    with pytest.raises(Stopped, match="the run is finished") as error:
        go(on_export=interrupt)
    assert runfile.read_run(tmp_path).is_finished and len(go.left.exported) == 1
    assert error.value.__notes__[0] == f"model: {tmp_path}/model"
    assert not any(note.startswith("go on: ") for note in error.value.__notes__), "it would answer: nothing to do"


def test_a_disk_that_takes_no_checkpoint_ends_the_run_with_what_still_fits(go, tmp_path, monkeypatch, capfd):
    def full(*_given, **_named):  # noqa: ANN002, ANN003, ANN202
        raise checkpoint.SaveError("cannot save a checkpoint in x: No space left on device; make room")

    def no_room() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(checkpoint.SaveError, match=r"3\. time in a row") as error:
        go(save_steps=1, on_export=no_room)
    assert "warning: of the model of step 3 not all could be left: [Errno 28] No space left" in capfd.readouterr().err
    assert runfile.read_run(tmp_path).status == "failed" and (tmp_path / "report.html").exists()
    assert error.value.__notes__ == [f"report: {tmp_path}/report.html", "go on: train.py --x 1 (it begins again: there "
                                                                        "is no checkpoint)"]


@pytest.mark.parametrize(("fault", "is_said"), [(BadAnswer("reward source mine: raised KeyError"), False),
                                                (OSError("the disk is gone"), True)])
def test_a_reward_s_own_error_is_not_preceded_by_alarms_that_blame_the_training(go, tmp_path, monkeypatch, capfd, fault,
                                                                                is_said):
    def alarms(folder, stage, warn, pictures, state):  # noqa: ANN001, ANN202
        return [Alarm("hardly trained", "the updates are too small")]

    def fail(_left):  # noqa: ANN001, ANN202
        raise fault

    monkeypatch.setattr(reporter, "conclude", alarms)
    with pytest.raises(type(fault)):
        go({3: fail})
    assert ("the updates are too small" in capfd.readouterr().err) == is_said


def test_the_report_of_a_checkpoint_says_that_the_run_had_not_ended(go, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(reporter, "FIRST_REPORT", 0.0)
    with pytest.raises(Stopped):
        go({3: lambda _left: seen.append((tmp_path / "report.md").read_text()), 4: interrupt}, save_steps=2)
    assert "**After step 2 of 9; the run had not ended.**" in seen[0]


@pytest.mark.parametrize(("resume", "command", "expected"), [
    ("never", "train.py --resume never", "train.py --resume never --resume auto"),
    ("never", "from Python: stage sft", "call train(resume_from_checkpoint=True) again"),
    ("auto", "from Python: stage sft", "call train() again")])
def test_the_command_that_goes_on_does_not_begin_again(go, resume, command, expected):
    with pytest.raises(Stopped) as error:
        go({3: interrupt}, resume=resume, command=command)
    assert error.value.__notes__[-1] == f"go on: {expected}"


def test_a_run_that_ended_early_serves_the_next_stage_with_a_line(go, tmp_path, capsys):
    with pytest.raises(Stopped):
        go({3: interrupt})
    capsys.readouterr()
    for _ in range(2):
        assert runfile.require_finished(tmp_path, "sft").facts["model_step"] == 3
    assert capsys.readouterr().err == (f"note: the sft run in {tmp_path} is not finished (stopped): its model is that "
                                       "of step 3 of 9\n")


# --- The terminal, or whoever read the output, goes away: a run goes on or stops in order, and nothing complains

@pytest.fixture
def counting(tmp_path):
    return runner(tmp_path)


@contextmanager
def unread(*names: str) -> Iterator[list]:
    """sys.stdout and sys.stderr (or those of `names`) are pipes that nobody reads."""
    names, before = names or ("stdout", "stderr"), (sys.stdout, sys.stderr)
    files = []
    for name in names:
        reader, writer = os.pipe()
        os.close(reader)
        files.append(open(writer, "w", encoding="utf-8", buffering=1))  # noqa: SIM115
        setattr(sys, name, files[-1])
    try:
        yield files
    finally:
        sys.stdout, sys.stderr = before
        for file in files:
            with suppress(OSError):
                file.close()


@pytest.fixture
def hangup():
    """Send this process SIGHUP, which it heeds (under nohup it would not); afterwards it is handled as before."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield lambda: os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)


def test_what_nobody_reads_is_dropped_and_the_other_stream_goes_on(monkeypatch, tmp_path):
    with (tmp_path / "log").open("w") as log, unread("stdout") as (pipe,):
        monkeypatch.setattr(sys, "stderr", log)
        with lasting_streams():
            for i in range(3):
                print(i, "x" * 100_000)
                print(i, file=sys.stderr)
            os.write(sys.stdout.fileno(), b"written past Python")
        assert (sys.stdout, sys.stderr) == (pipe, log)
    assert (tmp_path / "log").read_text() == "0\n1\n2\n"


@pytest.mark.parametrize("flags", [[], ["-u"]])
def test_a_line_is_read_while_the_program_still_runs(flags):
    """python -u (and PYTHONUNBUFFERED, which containers set) has no line buffering of its own."""
    code = ("import sys\nfrom hybrid_rlhf.core.startup import lasting_streams\n"
            "with lasting_streams():\n    print('step 1', file=sys.stderr)\n    sys.stdin.read()\n")
    given = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen([sys.executable, *flags, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, env=given) as child:
        timer = threading.Timer(240, child.kill)  # where it waits for ever, its input is never closed
        timer.start()
        try:
            assert select.select([child.stderr], [], [], 200)[0], "nothing was written before the end"
            assert child.stderr.readline() == "step 1\n"
        finally:
            child.stdin.close()
            timer.cancel()


def test_a_run_whose_output_nobody_reads_trains_to_its_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sft = [*short_sft(tmp_path), "--train.logging_steps", "1"]
    with unread():
        assert main(sft) == 0
    record = runfile.read_run("run")
    assert (record.status, record.error) == ("finished", None)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    with unread():
        assert main([*sft, "--preview"]) == 0
    with unread():
        assert main(["chat", "--model", "run", "--prompt", "hi", "--max_new_tokens", "3"]) == 0


def test_an_export_that_is_interrupted_says_how_to_go_on(monkeypatch, capsys):
    monkeypatch.setattr(export, "export", lambda _options: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["export", "--model", "a", "--output_dir", "b"]) == 130
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "stopped" and lines[1].startswith("go on: ") and "export --model a --output_dir b" in lines[1]


def test_a_terminal_that_is_gone_stops_the_run_with_a_checkpoint(counting, tmp_path, hangup):
    """Shell and system each send a signal: the second one does not stop at once."""
    counting("straight")

    def twice() -> None:
        hangup(), hangup()

    with unread(), lasting_streams(), pytest.raises(Stopped, match="stopped after step 5 of 9"):
        counting("broken", {5: twice})
    assert runfile.read_run(tmp_path / "broken").status == "stopped"
    counting("broken")
    assert left(tmp_path / "broken") == left(tmp_path / "straight")


def test_under_nohup_a_run_goes_on(counting, tmp_path, hangup):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    counting("run", {5: hangup})
    assert runfile.read_run(tmp_path / "run").is_finished
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.fixture(autouse=True)
def as_before():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("processes", "after"), [(1, signal.SIG_DFL), (2, signal.SIG_IGN)])
def test_the_launcher_s_signal_does_not_cut_off_what_one_of_several_has_to_say_when_it_fails(
        monkeypatch, processes, after):
    monkeypatch.setattr(signals, "world_size", lambda: processes)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pytest.raises(RuntimeError), signals.interruptible(print):
        raise RuntimeError("Connection closed by peer")
    assert signal.getsignal(signal.SIGTERM) == after


def test_a_run_of_several_that_ends_well_leaves_the_signals_as_they_were(monkeypatch):
    monkeypatch.setattr(signals, "world_size", lambda: 2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with signals.interruptible(print):
        assert callable(signal.getsignal(signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_function_that_leaves_the_program_is_on_the_record(counting, tmp_path):
    with pytest.raises(SystemExit):
        counting("run", {5: lambda: sys.exit(7)})
    assert (runfile.read_run(tmp_path / "run").status, runfile.read_run(tmp_path / "run").error) == (
        "failed", "SystemExit: 7")
