"""A private part of a dependency that is gone is one line for the user, before anything has been computed with it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import nn

from hybrid_rlhf.core import compat, torch_compat
from hybrid_rlhf.core.compat import Dependency
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.models import peft_compat, transformers_compat
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from tests.factories.tiny import tiny_causal_lm

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = [p for folder in ("hybrid_rlhf", "training", "inference") for p in sorted((ROOT / folder).rglob("*.py"))]


def test_a_part_that_is_gone_is_named_with_the_release_in_use_and_the_one_that_has_it(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.TESTED, "torch", "1.0.0")
    torch_of_old = Dependency("torch")
    with pytest.raises(UserError) as caught:
        torch_of_old.part(nn.Linear(1, 1), "_gone")
    assert str(caught.value) == (f"torch {version('torch')} has no Linear._gone, which hybrid-rlhf needs and "
                                 "torch 1.0.0 has; pip install 'torch==1.0.0'")
    with pytest.raises(UserError, match=r"has no torch\.gone, "):
        torch_of_old.module("torch.gone")
    with pytest.raises(UserError, match=r"has no torch\.nn\._gone, "):
        torch_of_old.require(nn, "Linear", "_gone")
    assert torch_of_old.part(nn, "Linear") is nn.Linear


def _zero(stage: int) -> Callable[[], object]:
    return lambda: HybridEngine(nn.Linear(2, 2)).prepare_training(OptimizerConfig(), lambda _: 1.0, ZeroConfig(stage))


GONE = [
    ("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.update_lp_params", _zero(1)),
    ("deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3._partition_all_parameters", _zero(3)),
    ("deepspeed.comm.torch:build_shm_op", _zero(0)),
    ("peft.utils.transformers_weight_conversion:convert_peft_config_for_transformers",
     lambda: add_lora(tiny_causal_lm(), LoraConfig(r=2))),
    ("transformers.modeling_utils:AttentionInterface",
     lambda: transformers_compat.sdpa_replaced(lambda *_: None).__enter__()),
    ("transformers.masking_utils:find_packed_sequence_indices",
     lambda: transformers_compat.never_packed().__enter__()),
    ("torch.distributed.distributed_c10d:_get_default_store", torch_compat.launcher_store),
    ("torch._subclasses.fake_tensor:FakeTensorMode", torch_compat.fake_mode),
]


@pytest.mark.parametrize(("path", "use"), GONE, ids=[path.rpartition(".")[2] for path, _ in GONE])
def test_each_file_says_so(path: str, use: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    package, name = path.split(":")[0].split(".")[0], path.split(":")[1].split(".")[-1]
    module, _, owner = path.partition(":")
    holder = reduce(getattr, owner.split(".")[:-1], import_module(module))
    monkeypatch.delattr(holder, name)
    release = re.escape(version(package))
    with pytest.raises(UserError, match=rf"^{package} {release} has no \S*\.{name}, .*; pip install"):
        use()


def test_objects_without_their_parts_are_refused_too() -> None:
    with pytest.raises(UserError, match=r"peft .* has no Linear\._active_adapter"):  # written, it would change nothing
        peft_compat.activate(nn.Linear(1, 1), ["default"])


@pytest.mark.parametrize("name", sorted(compat.TESTED))
def test_pins_were_tested_and_untested_minor_releases_are_not_admitted(name: str) -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    tested = Version(compat.TESTED[name])
    assert Version(pinned[name]) <= tested
    bounds = re.search(rf'"{name}(\[\w+\])?([<>=.,\d]+)"', (ROOT / "setup.py").read_text()).group(2)
    assert SpecifierSet(bounds).contains(tested)
    if name in ("transformers", "deepspeed", "peft"):
        assert not SpecifierSet(bounds).contains(f"{tested.major}.{tested.minor + 1}.0")


@pytest.mark.parametrize(("installed", "is_newer"), [
    ("5.24.0", False), ("5.24.1", True), ("5.24.0+cpu", False), ("5.25.0.dev0", True), ("6.0", True), ("5.9.9", False)])
def test_a_release_newer_than_the_tested_one_is_named(installed: str, is_newer: bool,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "TESTED", {"transformers": "5.24.0"})
    monkeypatch.setattr(compat, "version", lambda _name: installed)
    line = f"releases: newer than tested here: transformers {installed} (tested up to 5.24.0)"
    assert compat.releases_line() == (line if is_newer else None)


def _foreign(tree: ast.Module) -> set[str]:
    """Private names that a file reads or writes on something else than itself, but for those that it gives."""
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
             and re.fullmatch(r"_[a-z]\w*", node.attr) and ast.unparse(node.value) not in ("self", "cls")}
    return names - {"_replace", "_asdict", "_fields"}  # public ones of a NamedTuple


def test_nothing_else_reaches_into_private_parts() -> None:
    given = {name for path in PRODUCT for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
             for name in [getattr(node, "name", None), *([node.attr] if isinstance(node, ast.Attribute)
                          and ast.unparse(node.value) == "self" else [])] if name}
    given |= {"_peft_wrapper", "_exit"}  # one that we hang on a model; os._exit
    faults = {str(path.relative_to(ROOT)): names for path in PRODUCT if not path.stem.endswith("_compat")
              and (names := _foreign(ast.parse(path.read_text(encoding="utf-8"))) - given)}
    assert not faults
    assert "_modules" in _foreign(ast.parse("model._modules['a'] = 1")) - given  # what it must not miss


def test_a_copy_with_parts_leaves_the_original_and_keeps_gradients() -> None:
    layer = nn.Linear(2, 2, bias=False)
    weight = torch.ones(2, 2, requires_grad=True)
    copied = torch_compat.copy_with(layer, {"weight": 2 * weight})
    copied(torch.ones(1, 2)).sum().backward()
    assert weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert copied.weight is not layer.weight
    assert isinstance(layer.weight, nn.Parameter)


def test_threads_that_counted_without_a_card_and_ended_take_nothing_from_those_after() -> None:
    """In a process of its own: with a CUDA build of torch 2.11 and no card, this ended it by a segmentation fault."""
    program = """
import threading, torch
from hybrid_rlhf.core.torch_compat import fake_mode
def count():
    with fake_mode():
        made.append(torch.empty(3).shape)
made = []
for _ in range(40):
    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
print(len(made))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "40\n"), done.stderr


@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="this torch has no products of experts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_experts_have_the_shapes_that_are_computed(dtype) -> None:
    """torch's own shape function refuses float32, in which they are computed on a CPU; with their backward."""
    def grads(mode):
        with mode:
            rows, experts = torch.ones(6, 8, dtype=dtype), torch.ones(2, 8, 16, dtype=dtype)
            rows.requires_grad_(), experts.requires_grad_()
            out = nn.functional.grouped_mm(rows, experts, offs=torch.tensor([2, 6], dtype=torch.int32))
            (out * out).sum().backward()
        return [(t.shape, t.dtype) for t in (out, rows.grad, experts.grad)]

    assert grads(torch_compat.fake_mode()) == grads(nullcontext())
