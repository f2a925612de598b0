"""What a card's compute capability decides, on cards that are only said to be there."""

from __future__ import annotations

import pytest
import torch

from hybrid_rlhf.core import nvidia
from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.models.load import resolve_dtype

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
# What pip install torch brings for CUDA 13.0 and 12.6 (pytorch/pytorch, RELEASE.md, "PyTorch CUDA Support Matrix").
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]


@pytest.fixture
def card(monkeypatch):
    """Says that a card of a capability is there, and what torch is built for."""
    nvidia._warn_once.cache_clear()

    def there(name, capability, built=CU130):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)

    return there


@pytest.mark.parametrize("capability, dtype", [((6, 1), torch.float16), ((7, 0), torch.float16),
                                               ((7, 5), torch.float16), ((8, 0), torch.bfloat16),
                                               ((8, 9), torch.bfloat16), ((12, 0), torch.bfloat16)])
def test_auto_is_the_16_bit_type_that_the_card_computes_in(card, capability, dtype):
    card("a card", capability)
    assert resolve_dtype("auto", CUDA) == dtype
    assert resolve_dtype("auto", CPU) == torch.float32


def test_auto_says_once_that_it_is_float16_and_why(card, caplog):
    card("Tesla T4", (7, 5))
    for _ in range(3):
        resolve_dtype("auto", CUDA)
    line, = caplog.messages
    assert line == ("model.dtype auto is float16 here: Tesla T4 (compute capability 7.5) computes bfloat16 by "
                    "emulation only")


def test_a_chosen_bfloat16_is_kept_and_said_to_be_slow_where_it_is_emulated(card, caplog):
    card("Tesla T4", (7, 5))
    assert resolve_dtype("bfloat16", CUDA) == torch.bfloat16
    assert "model.dtype bfloat16 is slow here: Tesla T4" in caplog.text
    card("RTX 3060", (8, 6))
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
def test_a_card_runs_what_is_built_for_its_generation_up_to_its_own_number(card, capability, built, runs):
    card("a card", capability, built)
    assert (nvidia.lacks_kernels(CUDA) is None) == runs


def test_a_card_without_kernels_is_one_line_with_the_build_that_has_them(card):
    card("Tesla V100", (7, 0))
    with pytest.raises(UserError, match=r"^Tesla V100 \(compute capability 7.0\) has no kernels in torch [^;]*, which "
                       r"is built for sm_75, .*; pip install --force-reinstall torch --index-url \S*/cu126$"):
        nvidia.check_kernels(CUDA)
    card("RTX 5090", (12, 0), CU126)
    with pytest.raises(UserError, match=r"cu130$"):
        nvidia.check_kernels(CUDA)


def test_processors_and_other_makers_cards_are_not_asked(card, monkeypatch):
    card("Tesla V100", (7, 0))
    nvidia.check_kernels(CPU)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    nvidia.check_kernels(CUDA)
    assert resolve_dtype("auto", CUDA) == torch.bfloat16


def test_a_run_and_a_model_stop_at_a_card_without_kernels(card, monkeypatch, tmp_path):
    from hybrid_rlhf.core import distributed
    from hybrid_rlhf.models import load

    card("Tesla V100", (7, 0))
    monkeypatch.setattr(distributed, "is_initialized", lambda: False)
    with pytest.raises(UserError, match="no kernels"):
        distributed.init_process_group()
    monkeypatch.setattr(load, "configuration", lambda _config: None)
    with pytest.raises(UserError, match="no kernels"):
        load.load_causal_lm(load.ModelConfig("org/model"), CUDA)
