"""The terminal, or whoever read the output, goes away: a run goes on or stops in order, and nothing complains."""

from __future__ import annotations

import json
import os
import pty
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
from hybrid_rlhf.core.lasting_streams import lasting_streams
from hybrid_rlhf.inference.chat import repl
from hybrid_rlhf.run import checkpoint, runfile
from hybrid_rlhf.run.loop import Stopped
from tests.factories.counting import left, runner
from tests.factories.stage_options import short_sft
from tests.factories.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def go(tmp_path):
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


def test_on_a_full_disk_a_log_goes_on_when_there_is_room_again(monkeypatch, tmp_path):
    with open("/dev/full", "w") as log:  # every write fails with ENOSPC
        monkeypatch.setattr(sys, "stderr", log)
        with lasting_streams():
            print("lost", file=sys.stderr, flush=True)
            room = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
            os.dup2(room, log.fileno())
            os.close(room)
            print("kept", file=sys.stderr)
    assert (tmp_path / "log").read_text() == "kept\n"


@pytest.mark.parametrize("flags", [[], ["-u"]])
def test_a_line_is_read_while_the_program_still_runs(flags):
    """python -u (and PYTHONUNBUFFERED, which containers set) has no line buffering of its own."""
    code = ("import sys\nfrom hybrid_rlhf.core.lasting_streams import lasting_streams\n"
            "with lasting_streams():\n    print('step 1', file=sys.stderr)\n    sys.stdin.read()\n")
    given = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen([sys.executable, *flags, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, env=given) as child:
        timer = threading.Timer(60, child.kill)  # where it waits for ever, its input is never closed
        timer.start()
        try:
            assert select.select([child.stderr], [], [], 20)[0], "nothing was written before the end"
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
        assert repl.main(["--model", "run", "--prompt", "hi", "--max_new_tokens", "3"]) == 0


@pytest.mark.parametrize("argv", [[], ["--stage", "no such"], ["export"], ["doctor", "--help"], ["serve"], ["chat"]])
def test_what_a_command_prints_and_nobody_reads_changes_no_exit_code(argv, capsys):
    def code() -> int:
        try:
            return main(argv)
        except SystemExit as end:  # --help
            return end.code

    with unread():
        found = code()
    assert found == code()


def test_an_export_whose_output_nobody_reads_is_done(monkeypatch):
    monkeypatch.setattr(export, "export", lambda _options: [Path("made")])
    with unread():
        assert main(["export", "--model", "a", "--output_dir", "b"]) == 0


def test_an_export_that_is_interrupted_says_how_to_go_on(monkeypatch, capsys):
    monkeypatch.setattr(export, "export", lambda _options: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["export", "--model", "a", "--output_dir", "b"]) == 130
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "stopped" and lines[1].startswith("go on: ") and "export --model a --output_dir b" in lines[1]


def test_a_terminal_that_is_gone_stops_the_run_with_a_checkpoint(go, tmp_path, hangup):
    """Shell and system each send a signal: the second one does not stop at once."""
    go("straight")

    def twice() -> None:
        hangup(), hangup()

    with unread(), lasting_streams(), pytest.raises(Stopped, match="stopped after step 5 of 9"):
        go("broken", {5: twice})
    assert runfile.read_run(tmp_path / "broken").status == "stopped"
    go("broken")
    assert left(tmp_path / "broken") == left(tmp_path / "straight")


def test_under_nohup_a_run_goes_on(go, tmp_path, hangup):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    go("run", {5: hangup})
    assert runfile.read_run(tmp_path / "run").is_finished
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_signals_of_two_kinds_at_once_are_one_wish(go, tmp_path):
    def both() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Stopped, match="stopped after step 5 of 9"):
        go("run", {5: both})
    assert checkpoint.latest(tmp_path / "run" / "checkpoints").name == "step-00000005"


def test_a_function_that_leaves_the_program_is_on_the_record(go, tmp_path):
    with pytest.raises(SystemExit):
        go("run", {5: lambda: sys.exit(7)})
    assert runfile.read_run(tmp_path / "run").status == "failed"
    assert runfile.read_run(tmp_path / "run").error == "SystemExit: 7"


@pytest.mark.slow
def test_a_run_at_a_terminal_that_is_closed_saves_and_stops(tmp_path):
    """In a pseudo-terminal whose other end is closed: SIGHUP, and every write fails."""
    save_tiny(tmp_path / "base")
    rows = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}] * 8
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, str(ROOT / "train.py"), "--stage", "sft", "--model", "base",
                                  "--data.sources", "rows.jsonl", "--data.max_length", "64", "--train.max_steps",
                                  "100000", "--output_dir", "run"])
    seen = b""
    while b"1/100000" not in seen:
        seen = seen[-1000:] + os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert runfile.read_run(tmp_path / "run").status == "stopped"
    assert checkpoint.latest(tmp_path / "run" / "checkpoints") is not None
