"""Our operations in place of a model's own: fused ones for its chains of small ones (norms, gated MLPs, rotary
positions), and our matrix products for nn.Linear's, in the dtypes in which the CPU kernels are faster.

A fused candidate is run on random numbers beside the original, and replaced only where both agree to rounding.
Everything else stays as its authors wrote it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybrid_rlhf.core.memory import is_out_of_memory
from hybrid_rlhf.core.torch_compat import copy_with
from hybrid_rlhf.kernels.ops import Fused

_ROTARY = "apply_rotary_pos_emb"  # transformers' name in every model file whose halves are paired
_IN_PLACE: dict[ModuleType, list[Callable]] = {}  # file -> its own function, and those in its place: the last runs
_LOCK = threading.Lock()


@contextmanager
def forwards_by(replaced: Sequence[tuple[nn.Module, Callable]]) -> Iterator[int]:
    """Within the block each module computes by the function beside it; yields how many do."""
    try:
        for module, forward in replaced:
            module.forward = forward
        yield len(replaced)
    finally:
        for module, _ in replaced:
            vars(module).pop("forward", None)


@dataclass
class Fusions:
    """The parts of one model that may be replaced: modules and model files, with their replacements."""

    modules: list[tuple[nn.Module, Callable]] = field(default_factory=list)
    files: list[tuple[ModuleType, Callable]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)  # operation -> places

    def add(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Within the block the fused operations run; modules whose forward has been replaced meanwhile stay."""
        with ExitStack() as stack:
            stack.enter_context(forwards_by([(m, f) for m, f in self.modules if "forward" not in vars(m)]))
            for file, function in self.files:
                stack.enter_context(_rotary_of(file, function))
            yield


@contextmanager
def _rotary_of(file: ModuleType, function: Callable) -> Iterator[None]:
    """Within the block a model file calls `function`, in every thread. Blocks of several models may end in any order:
    the file has its own again after the last."""
    with _LOCK:
        _IN_PLACE.setdefault(file, [getattr(file, _ROTARY)]).append(function)
        setattr(file, _ROTARY, function)
    try:
        yield
    finally:
        with _LOCK:
            functions = _IN_PLACE[file]
            functions.remove(function)
            setattr(file, _ROTARY, functions[-1])
            if len(functions) == 1:
                del _IN_PLACE[file]


def _own_rotary(file: ModuleType) -> Callable:
    with _LOCK:  # another thread's block may end
        return _IN_PLACE.get(file, [getattr(file, _ROTARY)])[0]


@torch.no_grad()
def find_fusions(model: nn.Module, ops: Fused | None, trial: Fused | None = None) -> Fusions:
    """The places of `model` where `ops` compute the same as its own code. Draws nothing from the global generator.

    trial: is tried in place of `ops` on narrow copies of the modules, where neither they nor `ops` have numbers.
    """
    fusions = Fusions()
    if ops is None:
        return fusions
    first = next(model.parameters())
    serves = None if trial else first.device.type  # tensors without numbers are on any device
    with torch.random.fork_rng(devices=[first.device] if first.device.type == "cuda" else []):
        _seed(first.device)
        for module in model.modules():
            if "forward" in vars(module):
                continue
            for name, fusion in (("rms_norm", _norm), ("gated", _gated_mlp)):
                forward = fusion(module, ops, trial)
                if forward is not None:
                    fusions.modules.append((module, forward))
                    fusions.add(name)
        files = {id(f): f for m in model.modules() if hasattr(f := sys.modules.get(type(m).__module__), _ROTARY)}
        for file in files.values():
            if _agrees(_own_rotary(file), (trial or ops).rotary,
                       _rotary_example(first.dtype, torch.device("cpu") if trial else first.device), num_leaves=2):
                fusions.files.append((file, _rotary(_own_rotary(file), ops.rotary, serves)))
                fusions.add("rotary")
    return fusions


def _agrees(original: Callable, ours: Callable, example: tuple[Tensor, ...], num_leaves: int | None = None) -> bool:
    """Whether both return the same on the example, and the same gradients by its first tensors, up to rounding."""
    try:
        (wants, their_gradients), (gots, our_gradients) = (
            with_gradients(f, example, num_leaves) for f in (original, ours))
    except Exception as error:  # third-party code may raise anything; it keeps its own operation
        if is_out_of_memory(error):
            raise
        return False
    is_wide = example[0].dtype == torch.float32
    return (are_close(wants, gots, 1e-5 if is_wide else 2.0**-6)
            and are_close(their_gradients, our_gradients, 5e-5 if is_wide else 2.0**-5))


def _seed(device: torch.device) -> None:
    """Seed the generators that may be drawn from; torch.manual_seed would seed those of every kind of device."""
    torch.default_generator.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(0)


@torch.enable_grad()
def with_gradients(function: Callable, example: tuple[Tensor, ...],
                   num_leaves: int | None = None) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The outputs of `function`, and the gradients of a weighted sum of them by the first tensors of the example."""
    leaves = [t.detach().clone().requires_grad_() for t in example[:num_leaves]]
    _seed(leaves[0].device)  # equally many dropouts draw alike
    outputs = function(*leaves, *example[len(leaves):])
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [torch.linspace(-1, 1, t.numel(), device=t.device).to(t.dtype).view(t.shape) for t in outputs]
    return outputs, torch.autograd.grad(outputs, leaves, weights)


def are_close(wants: tuple[Tensor, ...], gots: tuple[Tensor, ...], bound: float) -> bool:
    """Whether shapes and dtypes are equal, and no number differs by more than `bound` of its tensor's largest."""
    return len(wants) == len(gots) and all(
        want.shape == got.shape and want.dtype == got.dtype
        and bool((want.float() - got.float()).abs().max() <= bound * want.float().abs().max())
        for want, got in zip(wants, gots, strict=False))


def _norm(module: nn.Module, ops: Fused, trial: Fused | None = None) -> Callable | None:
    """The fused forward of an RMSNorm, or None."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return None
    if not isinstance(eps, float) or not weight.numel() or len(list(module.parameters())) != 1:
        return None
    original = type(module).forward
    tried = module if trial is None else copy_with(module, {"weight": nn.Parameter(torch.randn(8).to(weight.dtype))})
    by, weight = trial or ops, tried.weight
    example = (3 * torch.randn(3, 5, len(weight), dtype=torch.float32).to(weight),)
    for adds_one in (False, True):
        if _agrees(partial(original, tried), lambda x, one=adds_one: by.rms_norm(x, weight, eps, one), example):
            def forward(x: Tensor) -> Tensor:
                if x.dtype != module.weight.dtype:
                    return original(module, x)
                return ops.rms_norm(x, module.weight, eps, adds_one)  # noqa: B023 - returned at once

            return forward
    return None


def _gated_mlp(module: nn.Module, ops: Fused, trial: Fused | None = None) -> Callable | None:
    """The fused forward of an MLP that computes down_proj(act_fn(gate_proj(x)) * up_proj(x)), or None."""
    names = ("gate_proj", "up_proj", "down_proj")
    parts = [getattr(module, n, None) for n in names]
    if not all(isinstance(p, nn.Module) for p in parts) or not hasattr(module, "act_fn"):
        return None
    activation = activation_of(module.act_fn)
    weight = getattr(parts[0], "weight", None)
    if activation not in ("silu", "gelu") or not isinstance(weight, Tensor) or not weight.is_floating_point():
        return None

    def fused(x: Tensor, of: nn.Module = module, by: Fused = ops) -> Tensor:
        return of.down_proj(by.gated(of.gate_proj(x), of.up_proj(x), activation == "gelu"))

    tried = module
    if trial:
        tried = copy_with(module, {n: nn.Linear(*shape, dtype=weight.dtype)
                                 for n, shape in zip(names, ((8, 16), (8, 16), (16, 8)), strict=True)})
        weight = tried.gate_proj.weight
    modes = {m: m.training for m in module.modules()}
    module.train()  # an MLP with a dropout of its own must not match
    try:
        example = (torch.randn(2, 3, weight.shape[-1]).to(weight),)
        agrees = _agrees(partial(type(module).forward, tried), lambda x: fused(x, tried, trial or ops), example)
        return fused if agrees else None
    finally:
        for each, mode in modes.items():
            each.training = mode


def activation_of(act: Callable) -> str | None:
    """"silu", "gelu" (by tanh's formula) or "relu"; None for any other activation."""
    example = (torch.linspace(-6, 6, 49),)
    known = {"silu": F.silu, "gelu": partial(F.gelu, approximate="tanh"), "relu": F.relu}
    return next((name for name, function in known.items() if _agrees(act, function, example)), None)


def _rotary_example(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    shapes = (2, 4, 3, 16), (2, 2, 3, 16), (2, 3, 16), (2, 3, 16)
    return tuple(torch.randn(shape).to(device, dtype) for shape in shapes)


def _rotary(original: Callable, ours: Callable, device_type: str | None) -> Callable:
    """A replacement for the function of a model file, which other models call too: those on other devices, and tensors
    without numbers, of another thread's memory plan, keep their own (None: all use ours)."""

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: object, **named: object):  # noqa: ANN202
        is_plain = (not others and not named and q.dim() == 4 and cos.dim() == 3 and cos.shape[-1] == q.shape[-1]
                    and q.dtype == k.dtype == cos.dtype == sin.dtype
                    and (device_type is None or (device_type == q.device.type and type(q) is Tensor)))
        return ours(q, k, cos, sin) if is_plain else original(q, k, cos, sin, *others, **named)

    return apply


# -- matrix products ---------------------------------------------------------------------------------------------------


def own_products(model: nn.Module, linear: Callable | None, dtypes: frozenset[torch.dtype],
                 apart: Collection[str] = ()) -> AbstractContextManager[int]:
    """Within the block every plain nn.Linear of `model` with weights in `dtypes` multiplies by
    `linear(input, weight, bias)`, which reads the weights in place; yields how many do. apart: names of modules whose
    layers do not.

    Left alone: layers of other dtypes, quantized ones, other subclasses, modules whose forward is replaced already
    (offloading hooks), and every call that needs gradients or mixes dtypes. linear None: nothing is done.
    """
    left_out = {id(m) for name in apart for m in model.get_submodule(name).modules()}
    return forwards_by([(m, _forward(m, linear)) for m in model.modules()
                        if linear and id(m) not in left_out and _is_plain(m, dtypes)])


def _is_plain(module: nn.Module, dtypes: frozenset[torch.dtype]) -> bool:
    return (type(module) is nn.Linear and module.weight.dtype in dtypes
            and module.weight.device.type == "cpu" and "forward" not in vars(module))


def _forward(module: nn.Linear, linear: Callable) -> Callable[[Tensor], Tensor]:
    weight, bias = module.weight, module.bias  # looked up once: nn.Module's look-up is slow beside a small product
    dtype = weight.dtype

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's own name for it
        if torch.is_grad_enabled() or input.dtype != dtype or not input.numel():
            return F.linear(input, weight, bias)
        return linear(input, weight, bias)

    return forward
