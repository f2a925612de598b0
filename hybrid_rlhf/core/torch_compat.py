"""The only use of torch's private parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid_rlhf.core.compat import Dependency

TORCH = Dependency("torch")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def launcher_store() -> dist.Store:
    """A separate handle on the key-value store by which the processes of the default group found each other."""
    return TORCH.part(dist.distributed_c10d, "_get_default_store")().clone()


def num_writes(tensor: Tensor) -> int:
    """How often a tensor was written in place."""
    return TORCH.part(tensor, "_version")


def fake_mode() -> Any:  # a private class of torch
    """The block in which operations make tensors with a shape, a dtype and a device, but no memory. The device must be
    present: for a card that is not, torch's own mode has every thread install a substitute for the whole process, which
    torch 2.11 frees with the thread, so that the next thread's mode reads freed memory.
    """
    mode = TORCH.part(TORCH.module("torch._subclasses.fake_tensor"), "FakeTensorMode")

    def dispatch(self: Any, func: Any, types: Any, inputs: Any = (), named: Any = None) -> Any:  # torch's signature
        if str(func) != "aten._grouped_mm.default" or inputs[0].dtype == torch.bfloat16:
            return mode.__torch_dispatch__(self, func, types, inputs, named)
        # the products of experts, whose shape torch knows for bfloat16 only
        halves = [value.bfloat16() if index < 2 else value for index, value in enumerate(inputs)]
        return mode.__torch_dispatch__(self, func, types, halves, named).to(inputs[0].dtype)

    return type("FakeMode", (mode,), {"avoid_device_init": False, "__torch_dispatch__": dispatch})()


def dispatch_mode() -> type:
    """The class whose method __torch_dispatch__ sees every operation of a block."""
    return TORCH.part(TORCH.module("torch.utils._python_dispatch"), "TorchDispatchMode")


def of_many(operation: str) -> Callable:
    """torch's "copy_", "mul_" or "norm" of lists of tensors, in few launches on a card."""
    return TORCH.part(torch, f"_foreach_{operation}")


def fused_adamw() -> Callable:
    """torch's kernel for a step of many tensors, which does not count its steps."""
    return TORCH.part(torch, "_fused_adamw_")


def parts_of(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of a buffer (N,), in the shapes of `like` and in their order."""
    return list(TORCH.part(TORCH.module("torch._utils"), "_unflatten_dense_tensors")(flat, like))


def end_graph_pool(pool: object) -> None:
    """Close the memory pool of a graph whose capture could not be ended. Releases of torch before pull request 180395
    leave it open, and the next empty_cache() ends the process with an internal assertion."""
    device, core = torch.cuda.current_device(), TORCH.part(torch, "_C")
    with suppress(RuntimeError):  # torch has closed it, and will give it back itself
        TORCH.part(core, "_cuda_endAllocateToPool")(device, pool)
        TORCH.part(core, "_cuda_releasePool")(device, pool)


def leaves_of(tree: object) -> list:
    """The leaves of nested tuples, lists and dicts."""
    return TORCH.part(TORCH.module("torch.utils._pytree"), "tree_leaves")(tree)


def is_hooked(module: nn.Module) -> bool:
    """Whether the forward of `module` has hooks, before or after it."""
    return any(TORCH.part(module, name) for name in _HOOKS)


@contextmanager
def hooks_kept(module: nn.Module, is_kept: Callable[[Callable], bool]) -> Iterator[None]:
    """Within the block only those forward hooks of `module` and its submodules run for which `is_kept` is true. Hooks
    that are added within stay: transformers adds its own, which record states, at the first forward that needs them."""
    before = [(m, name, TORCH.part(m, name)) for m in module.modules() for name in _HOOKS]
    for each, name, hooks in before:
        setattr(each, name, type(hooks)({key: hook for key, hook in hooks.items() if is_kept(hook)}))
    try:
        yield
    finally:
        for each, name, hooks in before:
            hooks.update({key: hook for key, hook in TORCH.part(each, name).items() if key not in hooks})
            setattr(each, name, hooks)


def copy_with(module: nn.Module, parts: Mapping[str, Tensor | nn.Module]) -> nn.Module:
    """A shallow copy of `module` with `parts` in the place of its own parameters and submodules of these names. A
    tensor that stands for a parameter keeps its gradient."""
    copied = copy.copy(module)
    for kind in ("_parameters", "_modules"):
        setattr(copied, kind, {name: parts.get(name, part) for name, part in TORCH.part(module, kind).items()})
    return copied
