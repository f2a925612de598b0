"""A checkpoint is complete or absent, gives back what was put in, and runs no code when it is read."""

from __future__ import annotations

import json
import struct
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.run import checkpoint

STATE = {"trainer": {"actor": {"weights": {"a.weight": torch.arange(6.0).view(2, 3)}, "num_steps": 7},
                     "rng": torch.Generator().manual_seed(3).get_state(), "kl_coef": {"value": 0.1 + 0.2}},
         "loader": {"epoch": 1, "position": 4}, "step": 7, "none": None, "flag": True, "text": "ä\n\x1b",
         "list": [1, [2.5]]}


def equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, list) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def test_what_was_saved_comes_back_bit_for_bit(tmp_path):
    path = checkpoint.save(tmp_path, 7, STATE)
    assert path == tmp_path / "step-00000007" == checkpoint.latest(tmp_path)
    assert equal(checkpoint.load(path), STATE)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
TENSORS = st.builds(lambda values, dtype: torch.tensor(values).to(dtype), st.lists(st.integers(0, 9), max_size=3),
                    st.sampled_from(DTYPES))
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | TENSORS


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=3), st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3))))
def test_any_nested_state_comes_back(state):
    with tempfile.TemporaryDirectory() as folder:
        assert equal(checkpoint.load(checkpoint.save(folder, 1, state)), state)


def test_names_that_look_like_paths_do_not_meet(tmp_path):
    state = {"a": {"b": torch.zeros(1)}, "a/b": torch.ones(1), "a~1b": torch.full((1,), 2.0)}
    assert equal(checkpoint.load(checkpoint.save(tmp_path, 1, state)), state)


def test_content_that_looks_like_a_reference_stays_content(tmp_path):
    state = {"a": {"tensor": "/x", "value": 1, "dict": {}}, "x": torch.zeros(1)}
    assert equal(checkpoint.load(checkpoint.save(tmp_path, 1, state)), state)


def test_tied_tensors_and_views_are_saved_each_in_full(tmp_path):
    base = torch.arange(6.0).view(2, 3)
    state = {"tied": base, "again": base, "view": base[0], "transposed": base.t()}
    assert equal(checkpoint.load(checkpoint.save(tmp_path, 1, state)), state)


def test_the_tensors_are_a_safetensors_file_and_the_rest_is_json(tmp_path):
    """Read by hand from the format's definition: 8 bytes of length, a JSON header, raw little-endian numbers."""
    path = checkpoint.save(tmp_path, 1, {"w": torch.tensor([1.0, -2.0]), "n": 3})
    raw = (path / "state.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8: 8 + length])
    assert header["/w"]["dtype"] == "F32" and header["/w"]["shape"] == [2]
    assert struct.unpack("<2f", raw[8 + length:]) == (1.0, -2.0)
    assert json.loads((path / "state.json").read_text()) == {"dict": {"w": {"tensor": "/w"}, "n": {"value": 3}}}
    assert {p.name for p in path.iterdir()} == {"state.safetensors", "state.json", "manifest.json"}


@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, name, damage):
    older, newer = (checkpoint.save(tmp_path, step, STATE) for step in (1, 2))
    file, raw = newer / name, (newer / name).read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(raw[:-3] if damage == "cut" else bytes([raw[0] ^ 1]) + raw[1:])
    assert checkpoint.latest(tmp_path) == older
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        checkpoint.load(newer)


@pytest.mark.parametrize("moment", ["_write_files", "_sync", "_finish", "_replace"])
def test_a_crash_while_saving_leaves_the_older_ones_and_no_half(tmp_path, monkeypatch, moment):
    older = checkpoint.save(tmp_path, 1, STATE)

    class Killed(BaseException):
        pass

    def die(*_given):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, moment, die)
        with pytest.raises(Killed):
            checkpoint.save(tmp_path, 2, STATE)
    assert checkpoint.latest(tmp_path) == older
    assert [p.name for p in tmp_path.glob("step-*")] == [older.name]
    checkpoint.save(tmp_path, 3, STATE)
    assert not list(tmp_path.glob(".step-*")), "what the crash left is cleared by the next save"


def test_the_newest_are_kept_by_number_not_by_spelling(tmp_path):
    for step in (9, 99_999_999, 100_000_000):
        checkpoint.save(tmp_path, step, STATE, keep=2)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-100000000", "step-99999999"]
    assert checkpoint.latest(tmp_path).name == "step-100000000"


def test_clear_removes_checkpoints_only(tmp_path):
    checkpoint.save(tmp_path, 1, STATE)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-by-step").mkdir()
    checkpoint.clear(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-by-step"]


@pytest.mark.parametrize(("state", "message"), [
    ({"a": {"b": {1, 2}}}, "state/a/b is a set"),
    ({"a": {3: 1}}, "state/a has the key 3"),
    ({"a": [print]}, "state/a/0 is a builtin_function_or_method"),
])
def test_what_cannot_be_saved_without_pickle_is_refused_by_name(tmp_path, state, message):
    with pytest.raises(TypeError, match=message):
        checkpoint.save(tmp_path, 1, state)
    assert checkpoint.latest(tmp_path) is None


def test_a_disk_that_refuses_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot save a checkpoint in"):
        checkpoint.save(tmp_path / "file", 1, STATE)


def test_a_copy_has_the_values_that_were_changed_and_the_rest_and_the_original_stays(tmp_path) -> None:
    state = {"run": {"settings": {"a": 1}, "step": 4}, "kl": {"value": 0.04}, "weights": torch.arange(3.0)}
    path = checkpoint.save(tmp_path / "old", 4, state)
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    made = checkpoint.copy_changed(path, tmp_path / "new", {("run", "settings"): {"b": None, "c": [0.5]},
                                                            ("kl", "value"): 0.7})
    assert made == tmp_path / "new" / "step-00000004" and checkpoint.damage(made) is None
    loaded = checkpoint.load(made)
    assert torch.equal(loaded.pop("weights"), torch.tensor([0.0, 1, 2]))
    assert loaded == {"run": {"settings": {"b": None, "c": [0.5]}, "step": 4}, "kl": {"value": 0.7}}
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    with pytest.raises(KeyError):
        checkpoint.copy_changed(path, tmp_path / "new", {("no", "such"): 1})
