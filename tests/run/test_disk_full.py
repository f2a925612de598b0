"""A disk that takes no more at the end of a run: plots and reports are a warning, a folder is whole or not there.

Files may not grow beyond a limit (RLIMIT_FSIZE): real writes fail, in Python and in libraries written in Rust.
"""

from __future__ import annotations

import errno
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from safetensors import SafetensorError

from hybrid_rlhf.cli import main
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.own_files import refusal, replacing
from hybrid_rlhf.export import folder as model_folder
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from hybrid_rlhf.run import runfile
from hybrid_rlhf.training import supervised
from tests.factories.counting import runner
from tests.factories.stage_options import short_sft
from tests.factories.tiny import chatml_tokenizer, save_tiny, tiny_causal_lm

pytestmark = pytest.mark.plots


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


# --- a folder --------------------------------------------------------------------------------------------------------

def test_what_could_not_be_written_whole_leaves_what_was_there(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").write_text("old")
    (tmp_path / "file").write_text("old")
    before = contents(tmp_path)

    def write(text: str) -> None:
        with replacing(tmp_path / "folder", tmp_path / "file") as (folder, file):
            folder.mkdir()
            (folder / "new").write_text("new")
            file.write_text(text)

    with files_of_at_most(10), pytest.raises(OSError, match="File too large"):
        write("longer than ten")
    assert contents(tmp_path) == before
    write("new")
    assert contents(tmp_path) == {"folder/new": b"new", "file": b"new"}


@pytest.mark.parametrize(("error", "said"), [
    (OSError(errno.ENOSPC, "x"), "No space left on device"), (OSError("a model is not there"), None),
    (SafetensorError("I/O error: No space left on device (os error 28)"), "No space left on device"),
    (Exception("Read-only file system (os error 30)"), "Read-only file system"),
    (RuntimeError("[enforce fail at gloo/transport/tcp/device.cc:186] rv != -1. -1 vs -1. Too many open files"),
     "Too many open files"),
    (RuntimeError("the service said: No space left on device (os error 28)"), None),
    (RuntimeError("the service said: Too many open files"), None),
    ("OSError: [Errno 30] Read-only file system: 'x'", "Read-only file system"), (ValueError("28"), None),
    (FileNotFoundError(errno.ENOENT, "x"), None), (RuntimeError("gone (os error 2)"), None)])
def test_the_disks_own_words_are_found_whichever_library_wrote(error, said):
    found = refusal(error)
    assert (found and found.words) == said
    assert found is None or (found.remedy == "make room") == ("space" in said)


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
    with pytest.raises(UserError) as error, files_of_at_most(20_000 if fails == "weights" else 2**30):
        model_folder.export(with_adapter(), tokenizer, kept / "model", [3])
    words = "File too large" if fails == "weights" else "No space left on device"
    assert str(error.value) == (f"cannot write {kept / 'model'}: {words}; make room, and give the same command again")
    assert contents(kept) == before
    assert sorted(p.name for p in kept.iterdir()) == ["adapter", "model"]


def test_an_error_that_is_not_the_disks_stays_an_error_and_leaves_nothing_either(kept, monkeypatch):
    before = contents(kept)
    monkeypatch.setattr(model_folder, "save_adapter", lambda *_given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model_folder.export(with_adapter(), chatml_tokenizer(), kept / "model", [3])
    assert contents(kept) == before


def test_the_export_command_says_it_in_one_line_and_leaves_nothing(tmp_path, capsys):
    base = save_tiny(tmp_path / "base")
    with files_of_at_most(20_000):
        assert main(["export", "--model", str(base), "--output_dir", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == (f"error: export: cannot write {tmp_path / 'out'}: File too large; make room, or give another "
                        "--output_dir")
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


# --- a run -----------------------------------------------------------------------------------------------------------

@pytest.fixture
def go(tmp_path):
    return runner(tmp_path)


def half_a_picture(_figure, path, **_given):
    Path(path).write_bytes(b"half")
    no_room()


def no_font(*_given, **_named):
    raise RuntimeError("no\nfont")


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
    line = "cannot write run/model: File too large; make room, and give the same command again"
    assert said[-4:-1] == [f"error: {line}", "report: run/report.html", "checkpoint: run/checkpoints/step-00000002"]
    record = runfile.read_run("run")
    assert (record.status, record.error) == ("failed", f"UserError: {line}")
    assert not list(Path("run").glob("model*"))
    assert main(words) == 0
    assert runfile.read_run("run").is_finished and Path("run/model/model.safetensors").exists()
    assert "goes on after step 2" in capsys.readouterr().err


def test_a_run_that_cannot_say_that_it_is_finished_ends_in_one_line(go, tmp_path, monkeypatch, capsys):
    config = runfile.read_run(go("run").output_dir)
    monkeypatch.setattr(runfile.RunRecord, "write", no_room)
    with pytest.raises(UserError, match=r"cannot write in .*run: No space left on device; make room, and give"):
        config.finish({}, tokenizer=chatml_tokenizer())


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "x", "cache/rows"), OSError(errno.EDQUOT, "x", "cache/rows")])
def test_a_full_disk_anywhere_is_one_line(error, monkeypatch, capsys):
    def full(*_given):
        raise error

    monkeypatch.setattr("hybrid_rlhf.cli._train", full)
    assert main(["--stage", "sft"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1 and "(cache/rows); make room" in line


def test_a_process_that_has_died_counts_before_what_its_error_may_say_of_a_disk(monkeypatch, capsys):
    def lost(*_given):
        raise Exception("connection closed: Input/output error (os error 5)")

    for several, said in ((False, "error: Input/output error; the disk fails: check it, and the same"), (True, "died")):
        monkeypatch.setattr("hybrid_rlhf.cli._train", lost)
        monkeypatch.setattr("hybrid_rlhf.cli._lost_process", lambda _error, several=several: "died" * several or None)
        assert main(["--stage", "sft"]) == (1 if several else 2)
        assert capsys.readouterr().err.startswith(said)
