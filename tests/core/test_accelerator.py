"""Which device is taken and why, torch's allocator on a card, and Windows' memory, which is none of the card's."""

from __future__ import annotations

import os
import platform
import sys
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf import cli
from hybrid_rlhf.commands import doctor
from hybrid_rlhf.core import accelerator, memory
from hybrid_rlhf.core.memory import CONFIGURED_BY

GIB = 2**30
NATIVE, WSL = "6.8.0-45-generic", "5.15.167.4-microsoft-standard-WSL2"
GROWING = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.fixture
def system(monkeypatch):
    """Sets what the system says of itself; Linux that runs by itself, and no variable of the allocator's, to begin."""
    for name in CONFIGURED_BY:
        monkeypatch.setenv(name, "")  # so that what is set here is undone
        monkeypatch.delenv(name)

    def becomes(release=NATIVE, kind="linux"):
        monkeypatch.setattr(sys, "platform", kind)
        monkeypatch.setattr(platform, "uname", lambda: SimpleNamespace(release=release))

    becomes()
    return becomes


@pytest.fixture
def card(monkeypatch):
    """A card of 8 GiB of which 6 are free and 1 GiB is torch's already; the list of fractions that were set."""
    fractions = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (6 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: GIB)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: fractions.append(share))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda *_: (fractions or [1.0])[-1])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA GeForce RTX 3070")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=8 * GIB))
    return fractions


def configured():
    return {name: os.environ[name] for name in CONFIGURED_BY if name in os.environ}


def test_segments_grow_on_linux_from_the_first_moment_of_the_program(system, capsys):
    assert cli.main(["--version"]) == 0
    assert configured() == GROWING


@pytest.mark.parametrize("named", CONFIGURED_BY)
def test_a_variable_of_the_users_stays_as_it_is(system, monkeypatch, named):
    monkeypatch.setenv(named, "max_split_size_mb:128")
    assert not memory.grow_segments()
    assert configured() == {named: "max_split_size_mb:128"}


@pytest.mark.parametrize(("release", "kind"), [(WSL, "linux"), ("10", "win32"), ("24.0", "darwin")])
def test_segments_do_not_grow_inside_windows_and_elsewhere(system, release, kind):
    system(release, kind)
    assert not memory.grow_segments() and configured() == {}


def test_on_wsl2_torch_is_held_to_what_is_free_and_on_linux_to_nothing(system, card, monkeypatch):
    assert accelerator.keep_within_card() is None and card == []
    system(WSL)
    assert accelerator.keep_within_card() == int(0.95 * 6 * GIB) + GIB
    assert card == [pytest.approx((0.95 * 6 + 1) / 8)]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "per_process_memory_fraction:0.5")
    assert accelerator.keep_within_card() is None and len(card) == 1
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert accelerator.keep_within_card() is None and len(card) == 1


def test_doctor_tells_of_windows_memory_only_there(system, card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
    assert not [f for f in doctor._device() if f.name == "WSL2"]
    system(WSL)
    (found,) = [f for f in doctor._device() if f.name == "WSL2"]
    assert "at most 95% of the memory that is free" in found.found and "Sysmem Fallback" in found.cure


def test_the_line_of_a_card_says_what_is_not_used_and_what_was_not_tried(system, card, monkeypatch):
    assert accelerator.device_line() == "device: cuda:0, NVIDIA GeForce RTX 3070, 8.0 GiB"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert accelerator.device_line().endswith("; 1 more here, for torchrun --nproc_per_node 2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert accelerator.device_line().endswith("; by ROCm, on which this has not been tried")
    monkeypatch.setattr(torch.version, "hip", None)
    system(WSL)
    accelerator.keep_within_card()
    assert "; WSL2: at most 6.7 GiB of it" in accelerator.device_line()  # 0.95 x 6 + 1


@pytest.mark.parametrize(("there", "said"), [
    ({"mps": True}, "the GPU of this Mac (MPS) is not supported"),
    ({"xpu": True}, "the Intel GPU (XPU) is not supported"),
    ({"cuda": "13.0"}, "is built for CUDA 13.0 and finds no card"),
    ({"hip": "6.4"}, "is built for ROCm 6.4 and finds no card"),
    ({"cuda": "13.0", "hidden": "-1"}, "CUDA_VISIBLE_DEVICES=-1 hides the cards"),
    ({"driver": True}, "is built without CUDA, and there is an NVIDIA driver: pip install torch --index-url"),
    ({}, "is built without CUDA"),
], ids=str)
def test_the_line_of_a_cpu_says_why_not_a_card(monkeypatch, tmp_path, there, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: there.get("mps", False))
    monkeypatch.setattr(torch.xpu, "is_available", lambda: there.get("xpu", False))
    monkeypatch.setattr(torch.version, "cuda", there.get("cuda"))
    monkeypatch.setattr(torch.version, "hip", there.get("hip"))
    monkeypatch.setattr(accelerator, "_DRIVERS", (tmp_path,) if there.get("driver") else ())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if "hidden" in there:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", there["hidden"])
    line = accelerator.device_line()
    assert line.startswith("device: the CPU; ") and said in line and "\n" not in line


@pytest.mark.parametrize(("is_card", "is_bounded", "expected"), [
    (False, False, ["keep_freed_blocks"]), (False, True, ["give_back_freed_blocks"]),
    (True, False, []), (True, True, [])])
def test_the_c_library_keeps_what_is_freed_only_where_a_cpu_computes(system, card, monkeypatch, is_card, is_bounded,
                                                                     expected):
    called = []
    for name in ("keep_freed_blocks", "give_back_freed_blocks"):
        monkeypatch.setattr(memory, name, lambda name=name: called.append(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_card)
    cli._prepare_device(is_bounded=is_bounded)
    assert called == expected
