"""A run and an export remove nothing that they did not make, and write to nothing that lies elsewhere."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybrid_rlhf import cli
from hybrid_rlhf.api_inputs import Rows
from hybrid_rlhf.commands import export as command
from hybrid_rlhf.core import own_files
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.chat import CHATML
from hybrid_rlhf.export import folder as model_folder
from hybrid_rlhf.inference.conversation import Conversation
from hybrid_rlhf.report import plots
from hybrid_rlhf.run import checkpoint, loop, runfile
from tests.factories.tiny import save_tiny, tiny_causal_lm, tiny_tokenizer

MINE = "years of work"


@dataclass(frozen=True)
class Config:
    resume: str = "auto"
    report_to: list[str] = field(default_factory=list)


def mine(path: Path) -> Path:
    """A file of the user's; returns it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MINE)
    return path


# --- what is removed -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fails", [False, True])
def test_an_export_leaves_a_folder_whose_name_is_almost_its_own(tmp_path, monkeypatch, fails, capsys):
    base, near = save_tiny(tmp_path / "base"), mine(tmp_path / "exp" / "mine.tmp" / "thesis.tex")

    def write(_source, _base, made, _record):
        if fails:
            raise OSError(28, "No space left on device")
        (made / "config.json").write_text("{}")

    monkeypatch.setattr(command, "_write", write)
    words = ["export", "--model", base, "--output_dir", str(tmp_path / "exp" / "mine")]
    assert cli.main(words) == (2 if fails else 0)
    assert near.read_text() == MINE
    assert sorted(os.listdir(tmp_path / "exp")) == (["mine.tmp"] if fails else ["mine", "mine.tmp"])


def test_an_export_into_an_empty_folder_behind_a_link_is_there(tmp_path, monkeypatch):
    base = save_tiny(tmp_path / "base")
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    monkeypatch.setattr(command, "_write", lambda _source, _base, made, _record: mine(made / "a"))
    assert command.main(["--model", base, "--output_dir", str(tmp_path / "out")]) == 0
    assert (tmp_path / "disk" / "a").read_text() == MINE and sorted(os.listdir(tmp_path)) == ["base", "disk", "out"]


def test_a_run_s_model_leaves_what_lies_beside_it_and_replaces_its_own(tmp_path):
    near, tokenizer = mine(tmp_path / "model.tmp" / "thesis.tex"), tiny_tokenizer()
    tokenizer.chat_template = CHATML
    for seed in (0, 1):
        model_folder.export(tiny_causal_lm(seed), tokenizer, tmp_path / "model", [3])
    assert near.read_text() == MINE and sorted(os.listdir(tmp_path)) == ["model", "model.tmp"]


def test_a_checkpoint_leaves_folders_that_look_like_half_of_one(tmp_path):
    near = [mine(tmp_path / name / "thesis.tex") for name in (
        ".step-00000002.tmp", ".step-00000001.old.tmp", ".hybrid_rlhf-mine", "best/.step-00000002.tmp")]
    for step in (1, 2):
        checkpoint.keep_best(checkpoint.save(tmp_path, step, {"n": step}, keep=1))
    checkpoint.clear(tmp_path)
    assert all(path.read_text() == MINE for path in near)


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path):
    folder, near = tmp_path / "run", mine(tmp_path / "run" / ".hybrid_rlhf-0123456789abcdefg" / "thesis.tex")
    near.parent.rename(tmp_path / "near")
    runfile.start(folder, "sft", Config(), "")
    (tmp_path / "near").rename(near.parent)
    torn = mine(folder / f".hybrid_rlhf-{7:016x}" / "model.safetensors")
    runfile.start(folder, "sft", Config(resume="never"), "")
    assert near.read_text() == MINE and not torn.parent.exists()


def test_plots_and_a_batch_that_was_kept_leave_other_files_of_their_folders(tmp_path):
    pytest.importorskip("matplotlib")
    near = [mine(tmp_path / name) for name in ("plots/mine.png", "not_finite/notes.txt")]
    history = [{"step": i, "loss": 1.0 / i, "entropy": 1.0 * i} for i in (1, 2)]
    assert {p.name for p in plots.draw(history, tmp_path)} == {"loss.png", "entropy.png"}
    assert {p.name for p in plots.draw([{"step": 1, "loss": 1.0}], tmp_path)} == {"loss.png"}
    assert sorted(os.listdir(tmp_path / "plots")) == ["loss.png", "mine.png"], "a plot of an earlier run is not kept"
    for batch in (4, 5):
        loop.keep_batch(tmp_path, batch=batch)
    assert json.loads((tmp_path / "not_finite" / "rest.json").read_text()) == {"dict": {"batch": {"value": 5}}}
    assert [path.read_text() for path in near] == [MINE] * 2


# --- links -----------------------------------------------------------------------------------------------------------

def refused(folder: Path, resume: str = "never") -> str:
    with pytest.raises(UserError) as caught:
        runfile.start(folder, "sft", Config(resume), "")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_link_to_another_run_s_checkpoints_is_refused_and_they_stay(tmp_path, resume):
    for name in ("one", "other"):
        runfile.start(tmp_path / name, "sft", Config(), "").close("failed")
    kept = checkpoint.save(tmp_path / "other" / "checkpoints", 3, {"n": 3})
    (tmp_path / "one" / "checkpoints").symlink_to(tmp_path / "other" / "checkpoints")
    assert f"output_dir {tmp_path / 'one'} holds a link (checkpoints)" in refused(tmp_path / "one", resume)
    assert checkpoint.damage(kept) is None


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "model/config.json", "checkpoints/step-00000004"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_in_an_output_folder_is_refused_and_what_it_leads_to_is_untouched(tmp_path, name, is_there):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    runfile.start(folder, "sft", Config(), "").close("failed")
    if is_there:
        mine(outside)
        if name == "run.json":
            outside.write_bytes((folder / name).read_bytes())
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    before = outside.read_bytes() if is_there else None
    assert f"holds a link ({name})" in refused(folder)
    assert (outside.read_bytes() if outside.exists() else None) == before
    with pytest.raises(UserError, match="holds a link"):
        Rows("{}\n").write(str(folder))


def test_the_output_folder_itself_may_be_a_link_and_trackers_make_their_own(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    runfile.start(tmp_path / "run", "sft", Config(), "").close("failed")
    (tmp_path / "disk" / "trackers" / "wandb").mkdir(parents=True)
    (tmp_path / "disk" / "trackers" / "wandb" / "latest-run").symlink_to("run-1")
    assert runfile.start(tmp_path / "run", "sft", Config("never"), "").status == "running"
    assert runfile.read_run(tmp_path / "disk").status == "running"


def test_a_conversation_is_not_saved_through_a_link(tmp_path):
    (tmp_path / "talk.jsonl").symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match=r"talk\.jsonl exists"):
        Conversation.save(SimpleNamespace(messages=[{"role": "user", "content": "a"}]), str(tmp_path / "talk.jsonl"))
    assert not (tmp_path / "outside").exists()


def test_what_was_replaced_and_cannot_be_removed_stops_nothing(tmp_path, monkeypatch):
    """All that is new has its name before anything old goes, as a file that is open on NFS cannot."""
    seen = []

    def busy(path, ignore_errors=False, **_):
        seen.append([(tmp_path / name / "a").read_text() for name in ("one", "two")])
        if not ignore_errors:
            raise OSError(16, "Device or resource busy")

    for name in ("one", "two"):
        mine(tmp_path / name / "a")
    monkeypatch.setattr("hybrid_rlhf.core.own_files.shutil.rmtree", busy)
    with own_files.replacing(tmp_path / "one", tmp_path / "two") as made:
        for folder in made:
            folder.mkdir()
            (folder / "a").write_text("new")
    assert seen == [["new", "new"]] * 2
