"""A disk that is full or may not be written: nothing that was there is lost, and a person is told in one line."""

from __future__ import annotations

import errno
import re
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from safetensors import SafetensorError

from hybrid_rlhf.cli import main
from hybrid_rlhf.core.own_files import refusal
from hybrid_rlhf.export import folder as model_folder
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from hybrid_rlhf.run import checkpoint, runfile, tensor_file
from hybrid_rlhf.run.checkpoint import SaveError
from hybrid_rlhf.training import supervised
from tests.factories.counting import left, runner
from tests.factories.stage_options import short_sft
from tests.factories.tiny import chatml_tokenizer, save_tiny, tiny_causal_lm


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


# --- A disk that takes no more at the end of a run: plots and reports are a warning, a folder is whole or not there

@contextmanager
def files_of_at_most(num_bytes: int):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def no_room(*_given, **_named):
    raise OSError(errno.ENOSPC, "No space left on device")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(("error", "said"), [
    (OSError(errno.ENOSPC, "x"), "No space left on device"), (OSError("a model is not there"), None),
    (SafetensorError("I/O error: No space left on device (os error 28)"), "No space left on device"),
    (Exception("Read-only file system (os error 30)"), "Read-only file system"),
    (RuntimeError("the service said: No space left on device (os error 28)"), None),
    (RuntimeError("the service said: Too many open files"), None),
    (ValueError("28"), None),
    (FileNotFoundError(errno.ENOENT, "x"), None), (RuntimeError("gone (os error 2)"), None)])
def test_the_disks_own_words_are_found_whichever_library_wrote(error, said):
    found = refusal(error)
    assert (found and found.partition("; ")[0]) == said
    assert found is None or ("make room" in found) == ("space" in said)


@pytest.fixture
def kept(tmp_path) -> Path:
    """A run's folder with the model and adapter of an earlier export."""
    for name in ("model", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return tmp_path


def with_adapter() -> torch.nn.Module:
    model = tiny_causal_lm()
    add_lora(model, LoraConfig(r=4))
    return model


def rust_error(*_given):
    raise Exception("No space left on device (os error 28)")  # as tokenizers raises


@pytest.mark.parametrize("fails", ["weights", "tokenizer", "adapter"])
def test_a_model_that_does_not_fit_on_the_disk_leaves_the_one_that_was_there(fails, kept, monkeypatch):
    tokenizer, before = chatml_tokenizer(), contents(kept)
    if fails == "tokenizer":
        monkeypatch.setattr(tokenizer, "save_pretrained", rust_error)
    if fails == "adapter":
        monkeypatch.setattr(model_folder, "save_adapter", no_room)
    words = "File too large" if fails == "weights" else "No space left on device"
    with pytest.raises(Exception, match=words), files_of_at_most(20_000 if fails == "weights" else 2**30):
        model_folder.export(with_adapter(), tokenizer, kept / "model", [3])
    assert contents(kept) == before
    assert sorted(p.name for p in kept.iterdir()) == ["adapter", "model"]


def test_the_export_command_says_it_in_one_line_and_leaves_nothing(tmp_path, capsys):
    base = save_tiny(tmp_path / "base")
    with files_of_at_most(20_000):
        assert main(["export", "--model", str(base), "--output_dir", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "error: File too large; make room, and give the same command again"
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


def half_a_picture(_figure, path, **_given):
    Path(path).write_bytes(b"half")
    no_room()


def no_font(*_given, **_named):
    raise RuntimeError("no\nfont")


@pytest.mark.plots
@pytest.mark.parametrize(("fault", "words"), [
    (half_a_picture, "No space left on device"), (no_font, "RuntimeError: no font")])
def test_plots_that_cannot_be_drawn_are_a_warning_and_the_run_ends_well(go, tmp_path, monkeypatch, capfd, fault, words):
    monkeypatch.setattr(Figure, "savefig", fault)
    assert go("run").is_finished
    assert f"warning: cannot draw {tmp_path / 'run' / 'plots'}: {words}\n" in capfd.readouterr().err
    assert f"No plots: {words}." in (tmp_path / "run" / "report.md").read_text()
    assert not list((tmp_path / "run" / "plots").iterdir())


def test_a_report_that_cannot_be_written_is_a_warning_too(go, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("hybrid_rlhf.report.summary.write_file", no_room)
    assert go("run").is_finished
    said = capfd.readouterr().err
    for name in ("report.md", "report.html"):
        assert f"warning: cannot write {tmp_path / 'run' / name}: No space left on device\n" in said


def test_a_run_without_room_for_its_model_says_so_in_run_json_and_goes_on_when_there_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*short_sft(tmp_path), "--train.num_fixed_prompts", "0"]

    def confined(*given):
        with files_of_at_most(20_000):
            return model_folder.export(*given)

    with monkeypatch.context() as patch:
        patch.setattr(supervised, "export", confined)
        assert main(words) == 2
    said = capsys.readouterr().err.splitlines()
    line = "error: File too large; make room, and the same command goes on from the last checkpoint"
    assert said[-4:-1] == [line, "report: run/report.html", "checkpoint: run/checkpoints/step-00000002"]
    record = runfile.read_run("run")
    assert record.status == "failed" and "File too large" in record.error
    assert not list(Path("run").glob("model*"))
    assert main(words) == 0
    assert runfile.read_run("run").is_finished and Path("run/model/model.safetensors").exists()
    assert "goes on after step 2" in capsys.readouterr().err


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "x", "cache/rows"), OSError(errno.EDQUOT, "x", "cache/rows")])
def test_a_full_disk_anywhere_is_one_line(error, monkeypatch, capsys):
    def full(*_given):
        raise error

    monkeypatch.setattr("hybrid_rlhf.cli._train", full)
    assert main(["--stage", "sft"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and line.startswith("error: cache/rows: ") and "; make room" in line
