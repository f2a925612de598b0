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
from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.memory import CONFIGURED_BY
from hybrid_rlhf.models.load import resolve_dtype

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
    assert "at most 95% of the memory that is free" in found.detail and "Sysmem Fallback" in found.cure


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
    cli.prepare_device(is_bounded=is_bounded)
    assert called == expected


# -- what a card's compute capability decides, on cards that are only said to be there --------------------------------


CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
# What pip install torch brings for CUDA 13.0 and 12.6 (pytorch/pytorch, RELEASE.md, "PyTorch CUDA Support Matrix").
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]


@pytest.fixture
def generation(monkeypatch):
    """Says that a generation of a capability is there, and what torch is built for."""
    accelerator._warn_once.cache_clear()

    def there(name, capability, built=CU130):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)

    return there


@pytest.mark.parametrize("capability, dtype", [((6, 1), torch.float16), ((7, 0), torch.float16),
                                               ((7, 5), torch.float16), ((8, 0), torch.bfloat16),
                                               ((8, 9), torch.bfloat16), ((12, 0), torch.bfloat16)])
def test_auto_is_the_16_bit_type_that_the_card_computes_in(generation, capability, dtype):
    generation("a card", capability)
    assert resolve_dtype("auto", CUDA) == dtype
    assert resolve_dtype("auto", CPU) == torch.float32


def test_auto_says_once_that_it_is_float16_and_why(generation, caplog):
    generation("Tesla T4", (7, 5))
    for _ in range(3):
        resolve_dtype("auto", CUDA)
    line, = caplog.messages
    assert line == ("model.dtype auto is float16 here: Tesla T4 (compute capability 7.5) computes bfloat16 by "
                    "emulation only")


def test_a_chosen_bfloat16_is_kept_and_said_to_be_slow_where_it_is_emulated(generation, caplog):
    generation("Tesla T4", (7, 5))
    assert resolve_dtype("bfloat16", CUDA) == torch.bfloat16
    assert "model.dtype bfloat16 is slow here: Tesla T4" in caplog.text
    generation("RTX 3060", (8, 6))
    caplog.clear()
    assert (resolve_dtype("bfloat16", CUDA), resolve_dtype("float32", CUDA)) == (torch.bfloat16, torch.float32)
    assert not caplog.messages


def test_a_plan_for_a_card_that_is_not_here_is_in_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_dtype("auto", CUDA) == torch.bfloat16


@pytest.mark.parametrize("capability, built, runs", [
    ((8, 9), CU130, True),  # by sm_86
    ((8, 7), ["sm_89"], False), ((12, 1), CU130, True), ((10, 3), CU130, True),
    ((13, 0), CU130, True),  # by compute_120, which the driver compiles
    ((12, 0), CU126, False), ((7, 0), CU130, False), ((6, 1), CU130, False), ((6, 1), CU126, True),
    ((9, 0), ["sm_90a"], True), ((10, 3), ["sm_100a"], False), ((10, 3), ["sm_100f"], True),
    ((7, 0), [], True)])  # nothing is known of the build
def test_a_card_runs_what_is_built_for_its_generation_up_to_its_own_number(generation, capability, built, runs):
    generation("a card", capability, built)
    assert (accelerator.lacks_kernels(CUDA) is None) == runs


def test_a_card_without_kernels_is_one_line_with_the_build_that_has_them(generation):
    generation("Tesla V100", (7, 0))
    with pytest.raises(UserError, match=r"^Tesla V100 \(compute capability 7.0\) has no kernels in torch [^;]*, which "
                       r"is built for sm_75, .*; pip install --force-reinstall torch --index-url \S*/cu126$"):
        accelerator.check_kernels(CUDA)
    generation("RTX 5090", (12, 0), CU126)
    with pytest.raises(UserError, match=r"cu130$"):
        accelerator.check_kernels(CUDA)


def test_processors_and_other_makers_cards_are_not_asked(generation, monkeypatch):
    generation("Tesla V100", (7, 0))
    accelerator.check_kernels(CPU)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    accelerator.check_kernels(CUDA)
    assert resolve_dtype("auto", CUDA) == torch.bfloat16


def test_a_run_and_a_model_stop_at_a_card_without_kernels(generation, monkeypatch, tmp_path):
    from hybrid_rlhf.core import distributed
    from hybrid_rlhf.models import load

    generation("Tesla V100", (7, 0))
    monkeypatch.setattr(distributed, "is_initialized", lambda: False)
    with pytest.raises(UserError, match="no kernels"):
        distributed.init_process_group()
    monkeypatch.setattr(load, "configuration", lambda _config: None)
    with pytest.raises(UserError, match="no kernels"):
        load.load_causal_lm(load.ModelConfig("org/model"), CUDA)


# -- what the processor multiplies, by the flags that Linux gives; the dtype of training and doctor go by it ----------


# of a Xeon with AMX, an EPYC of Zen 4, and one of Zen 3
FLAGS = {"amx": "fpu avx2 avx512f avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8",
         "zen4": "fpu avx2 avx512f avx512_bf16", "zen3": "fpu sse2 avx avx2 fma"}


@pytest.fixture
def computer(tmp_path, monkeypatch):
    def use(name: str) -> None:
        path = tmp_path / "cpuinfo"
        path.write_text(f"processor\t: 0\nmodel name\t: a: b\nflags\t\t: {FLAGS[name]}\nbugs\t\t: amx_bf16\n")
        monkeypatch.setattr(accelerator, "_CPUINFO", path)

    return use


@pytest.mark.parametrize(("name", "unit"), [("amx", "AMX"), ("zen4", "AVX512-BF16"), ("zen3", None)])
def test_the_unit_for_bfloat16_is_read_from_the_flags(computer, name, unit) -> None:
    computer(name)
    assert accelerator.bf16_unit() == unit


def test_a_system_without_flags_has_no_unit(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(accelerator, "_CPUINFO", tmp_path / "none")
    assert accelerator.bf16_unit() is None
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    monkeypatch.setattr(accelerator, "_CPUINFO", tmp_path / "arm")
    assert accelerator.bf16_unit() is None


def test_doctor_says_in_which_dtype_a_cpu_trains_and_why(computer) -> None:
    computer("zen3")
    finding, = (f for f in doctor.examine(compile_kernels=False) if f.name == "processor")
    assert (finding.state, finding.detail) == ("ok", "no AMX or AVX512-BF16, so bfloat16 is emulated: "
                                                    "model.dtype auto trains in float32 on it")
    computer("amx")
    finding, = (f for f in doctor.examine(compile_kernels=False) if f.name == "processor")
    assert finding.detail == "AMX multiplies bfloat16: model.dtype auto trains in bfloat16 with fp32 masters on it"
