"""A disk that is full or may not be written: nothing that was there is lost, and a person is told in one line."""

from __future__ import annotations

import errno
import os
import re

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.run import checkpoint, runfile, tensor_file
from hybrid_rlhf.run.checkpoint import SaveError
from tests.factories.counting import Killed, killed, left, runner


@pytest.fixture
def go(tmp_path):
    return runner(tmp_path)


def full_disk(monkeypatch, fails) -> None:
    """tensor_file.write raises ENOSPC while fails() says so."""
    write = tensor_file.write

    def refused(path, tensors):
        if fails():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, tensors)

    monkeypatch.setattr(tensor_file, "write", refused)


def test_a_full_disk_is_a_warning_and_the_old_checkpoint_stays(go, tmp_path, monkeypatch, capfd):
    steps: list[int] = []
    full_disk(monkeypatch, lambda: (steps.append(1), 2 <= len(steps) <= 3)[1])
    go("run", max_failed_saves=3)
    said = capfd.readouterr().err
    assert len(re.findall(r"No space left on device.*; training goes on", said)) == 2
    assert checkpoint.latest(tmp_path / "run" / "checkpoints").name == "step-00000009"
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_a_disk_that_stays_full_ends_the_run_and_room_lets_it_go_on(go, tmp_path, monkeypatch):
    go("straight")
    with monkeypatch.context() as patch:
        steps: list[int] = []
        full_disk(patch, lambda: (steps.append(1), len(steps) > 1)[1])
        with pytest.raises(SaveError, match=r"cannot save .*No space left on device.*; that was the 2\. time in a row"):
            go("run", max_failed_saves=2)
    assert runfile.read_run(tmp_path / "run").status == "failed"
    assert checkpoint.latest(tmp_path / "run" / "checkpoints").name == "step-00000002"
    go("run")
    assert left(tmp_path / "run") == left(tmp_path / "straight")


def test_lines_that_a_full_disk_refuses_wait_and_none_is_lost_or_doubled(go, tmp_path, monkeypatch, capfd):
    from hybrid_rlhf.run import reporter

    go("straight")

    class Full:
        """A file that takes three bytes of a line and no more, for some time."""

        def __init__(self, file) -> None:
            self.file, self.calls = file, 0

        def write(self, data: bytes) -> int:
            self.calls += 1
            if 4 <= self.calls <= 9:
                if self.calls % 2:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return self.file.write(data[:3])
            return self.file.write(data)

        def __getattr__(self, name: str):
            return getattr(self.file, name)

    monkeypatch.setattr(reporter, "open", lambda *given, **named: Full(open(*given, **named)), raising=False)  # noqa: SIM115
    go("run")
    assert left(tmp_path / "run") == left(tmp_path / "straight")
    assert "its lines wait for room" in capfd.readouterr().err


@pytest.mark.parametrize(("left_over", "kept"), [
    ('{"a": 1}\n{"b"', '{"a": 1}\n'), ('{"a"', ""), ('{"a": 1}\n', '{"a": 1}\n')])
def test_lines_that_have_lost_their_end_go_on_after_the_last_whole_one(tmp_path, left_over, kept):
    from hybrid_rlhf.run.reporter import Lines

    (tmp_path / "lines").write_text(left_over)
    said: list[str] = []
    lines = Lines(tmp_path / "lines", said.append, 40)
    lines.write('{"c": 3}')
    lines.close()
    assert (tmp_path / "lines").read_text() == f'{kept}{{"c": 3}}\n'
    assert f"has lost its end since the checkpoint was made ({len(left_over)} of 40 bytes)" in said[0]


def test_an_output_folder_that_became_read_only_ends_in_one_line(go, tmp_path, monkeypatch):
    def refuse(*_given, **_named):
        raise OSError(errno.EROFS, "Read-only file system")

    with pytest.raises(Killed):
        go("run", {5: killed})
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(UserError, match=r"cannot write to output_dir .*Read-only file system") as error:
        go("run")
    assert "\n" not in str(error.value)
