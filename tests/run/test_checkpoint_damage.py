"""Whatever happens to a checkpoint on the disk is found, said, and the one before is taken."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_rlhf.run import checkpoint

FILES = ("state.safetensors", "state.json", "manifest.json")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        checkpoint.save(folder, step, {"weight": torch.arange(40.0) + step, "half": torch.ones(3, dtype=torch.bfloat16),
                                       "step": step, "text": "ä", "kl": 0.1})
    return folder


@st.composite
def damages(draw) -> tuple:
    """(file, what, where as a share of its length, a value)."""
    return (draw(st.sampled_from(FILES)), draw(st.sampled_from(
        ["flip", "cut", "grown", "gone", "empty", "zeroed", "swapped", "folder"])),
        draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(0, 7)))


def apply(folder: Path, name: str, what: str, share: float, number: int) -> None:
    path, raw = folder / name, (folder / name).read_bytes()
    place = int(share * len(raw))
    if what == "flip":
        raw = raw[:place] + bytes([raw[place] ^ (1 << number)]) + raw[place + 1:]
    elif what == "cut":
        raw = raw[:place]
    elif what == "grown":
        raw = raw + bytes([number]) * (place + 1)
    elif what == "zeroed":  # what a power cut leaves of a page
        end = place + 1 + number * 8
        raw = raw[:place] + bytes(len(raw[place:end])) + raw[end:]
    elif what == "swapped":  # another checkpoint's file, whole and valid
        raw = (folder.parent / "step-00000001" / name).read_bytes()
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what != "gone":
        path.write_bytes(b"" if what == "empty" else raw)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damages())
def test_a_damaged_checkpoint_is_found_and_said_and_the_one_before_is_taken(saved, tmp_path_factory, damage):
    folder = tmp_path_factory.mktemp("damaged")
    for each in saved.iterdir():
        shutil.copytree(each, folder / each.name)
    newer, before = folder / "step-00000002", {p.name: p.read_bytes() for p in (folder / "step-00000002").iterdir()}
    apply(newer, *damage)
    is_same = {p.name: p.is_file() and p.read_bytes() for p in newer.iterdir()} == before  # zeros over zeros
    said: list[str] = []
    found = checkpoint.latest(folder, said.append)
    if is_same:
        assert found == newer and not said
    else:
        assert found == folder / "step-00000001" and len(said) == 1 and str(newer) in said[0] and "\n" not in said[0]
        with pytest.raises(ValueError, match="not a complete checkpoint"):
            checkpoint.load(newer)
        assert checkpoint.load(found)["step"] == 1
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["../outside.json", "/etc/passwd", "state.json/../../x", "state-9.json"])
def test_a_manifest_leads_nowhere_else(saved, tmp_path, name):
    import json

    shutil.copytree(saved / "step-00000002", tmp_path / "step-00000002")
    path = tmp_path / "step-00000002" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = manifest["files"]["state.json"]
    manifest["sha256"] = checkpoint._sum_of(manifest)
    path.write_text(json.dumps(manifest))
    assert checkpoint.damage(path.parent) == "manifest.json names other files"
