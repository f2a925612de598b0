"""What a plan adds to the tensors on a card, and the file that says it better."""

from __future__ import annotations

import json

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import device
from hybrid_rlhf.memory_plan import trace
from hybrid_rlhf.memory_plan.calibration import FILE, Calibration, read_calibration
from hybrid_rlhf.memory_plan.plan import Role, make_plan
from hybrid_rlhf.memory_plan.trace import Activations, Sizes
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.training import memory_options

GIB = 2**30
CARD, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def role(monkeypatch) -> Role:
    """10 GiB of weights that only score, with 1 GiB beside them."""
    monkeypatch.setattr(trace, "sizes",
                        lambda *_args, **_named: Sizes(10 * GIB, 0, 0, torch.bfloat16, 300, 2, GIB))
    monkeypatch.setattr(trace, "activations", lambda *_args, **_named: Activations(0, 0, GIB))
    return Role("reward", ModelConfig("somewhere", dtype="bfloat16"), 24, 2)


def test_a_card_has_libraries_and_fragmentation_and_a_cpu_as_much_as_ever(role):
    plan = make_plan("t", [role], CARD, None)
    lines = {line.kind: line.phases["score"] for line in plan.lines if line.role == "process"}
    assert lines == {"libraries": round(1.2 * GIB - 0.8), "fragmentation": round(0.07 * 11 * GIB)}
    assert plan.peak == 11 * GIB + sum(lines.values())
    assert make_plan("t", [role], CPU, None).peak == 11 * GIB + (64 << 20)


def test_what_was_measured_replaces_it_on_this_machine_and_not_on_others(role, tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_RLHF_CACHE", str(tmp_path))
    assert read_calibration() == Calibration(12 * GIB // 10, 0.07)
    (tmp_path / FILE).write_text(json.dumps({"libraries_bytes": 100, "fragmentation": 0.5, "matmul": 1e13}))
    assert read_calibration() == Calibration(100, 0.5)
    here, there = memory_options.Place.here(GIB), memory_options.Place.of(memory_options.Cards(1, 1, GIB))
    assert (here.calibration, there.calibration) == (Calibration(100, 0.5), None)
    assert make_plan("t", [role], CARD, None, calibration=here.calibration).peak == 11 * GIB * 3 // 2 + 100
    (tmp_path / FILE).write_text('{"fragmentation": 0}')
    assert read_calibration() == Calibration(fragmentation=0)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"libraries_bytes": 1.5}', '{"libraries_bytes": true}',
                                  '{"libraries_bytes": -1}', '{"fragmentation": "0.1"}', '{"fragmentation": 1}',
                                  '{"fragmentation": NaN}', "[" * 5000, "\udcff"])
def test_a_file_that_says_nothing_right_is_one_line(tmp_path, text):
    (tmp_path / FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"calibration\.json.*; measure it again by hybrid-rlhf qualify, or remove "
                                        r"the file$"):
        read_calibration(tmp_path)


def test_windows_share_is_not_planned_with(monkeypatch):
    monkeypatch.setattr(memory_options, "free_bytes", lambda _: 100 * GIB)
    monkeypatch.setattr(memory_options, "device", lambda: CARD)
    assert memory_options.Place.here(None).available == 100 * GIB
    monkeypatch.setattr(memory_options, "is_wsl", lambda: True)
    assert memory_options.Place.here(None).available == 95 * GIB
    assert memory_options.Place.here(GIB).available == GIB
    assert device() == CPU
