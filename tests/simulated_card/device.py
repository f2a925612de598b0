"""What Python asks of tensors, answered for a simulated card: where they are, how they move, how they are made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from tests.simulated_card.card import DEVICE, Card

_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided")
_FROM_HOST = ("tensor", "as_tensor", "asarray", "new_tensor")  # values come from Python


def names_card(device: object) -> bool:
    return (isinstance(device, int) and not isinstance(device, bool)) or (
        device is not None and torch.device(device).type == "cuda")


class _Moved(torch.autograd.Function):
    """A copy on the other device; its gradient goes back."""

    @staticmethod
    def forward(ctx, tensor: Tensor, card: Card, to_card: bool, dtype: torch.dtype, is_blocking: bool) -> Tensor:
        ctx.card, ctx.to_card, ctx.dtype = card, card.holds(tensor), tensor.dtype
        return moved(card, tensor, to_card, dtype, is_blocking)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return moved(ctx.card, grad, ctx.to_card, ctx.dtype, True), None, None, None, None


def moved(card: Card, tensor: Tensor, to_card: bool, dtype: torch.dtype, is_blocking: bool) -> Tensor:
    if tensor.is_meta:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    with card.quiet():
        copy = tensor.to(dtype=dtype, copy=True)
    if to_card:
        card.put(copy)
    card.copied(tensor.untyped_storage(), copy.untyped_storage(), is_blocking)
    return copy


def _called(plain: Callable, args: tuple, named: dict) -> object:
    return plain(*args, **named)


def _wanted(given: tuple, named: dict) -> tuple[object, torch.dtype | None]:
    """(device, dtype) of the arguments of Tensor.to; None for what is not named."""
    device, dtype = named.get("device"), named.get("dtype")
    for value in given[:2]:
        if isinstance(value, Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, (str, torch.device)) or (isinstance(value, int) and not isinstance(value, bool)):
            device = value
    if isinstance(named.get("other"), Tensor):
        device, dtype = named["other"].device, named["other"].dtype
    return device, dtype


class _Tensors:
    """The methods of torch.Tensor that know the card."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.plain = {name: getattr(torch.Tensor, name)
                      for name in ("to", "numpy", "tolist", "__array__", "get_device", "is_pinned")}
        self.true_device, self.true_is_cuda = torch._C.TensorBase.device, torch._C.TensorBase.is_cuda

    def is_ours(self, tensor: Tensor) -> bool:
        return not self.card.is_quiet and not hasattr(tensor, "fake_mode") and self.card.holds(tensor)

    def device(self, tensor: Tensor) -> torch.device:
        return DEVICE if self.is_ours(tensor) else self.true_device.__get__(tensor)

    def to(self, tensor: Tensor, *given: object, **named: object) -> Tensor:
        target, dtype = _wanted(given, named)
        if self.card.is_quiet or hasattr(tensor, "fake_mode") or target is None:
            return self.plain["to"](tensor, *given, **named)
        to_card = names_card(target)
        if not to_card and torch.device(target).type != "cpu":
            return self.plain["to"](tensor, *given, **named)
        if to_card == self.card.holds(tensor):  # of a device only the dtype is left
            wants = {"dtype": dtype or tensor.dtype} | {k: named[k] for k in ("copy", "memory_format") if k in named}
            return self.plain["to"](tensor, **wants)
        is_blocking = not (named.get("non_blocking") or given[1:2] == (True,) or given[2:3] == (True,))
        return _Moved.apply(tensor, self.card, to_card, dtype or tensor.dtype, is_blocking)

    def cpu(self, tensor: Tensor, **_named: object) -> Tensor:
        return self.to(tensor, "cpu") if self.is_ours(tensor) else tensor

    def cuda(self, tensor: Tensor, _device: object = None, non_blocking: bool = False, **_named: object) -> Tensor:
        return self.to(tensor, DEVICE, non_blocking=non_blocking)

    def numpy(self, tensor: Tensor, *given: object, **named: object):
        if self.is_ours(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                            "host memory first.")
        return self.plain["numpy"](tensor, *given, **named)

    def array(self, tensor: Tensor, *given: object):
        return self.numpy(tensor) if self.is_ours(tensor) else self.plain["__array__"](tensor, *given)

    def tolist(self, tensor: Tensor) -> list:
        if self.is_ours(tensor):
            self.card.waits_for("tolist")
        return self.plain["tolist"](tensor)

    def pin_memory(self, tensor: Tensor, *_given: object) -> Tensor:
        copy = tensor.clone()
        self.card.pin(copy.untyped_storage())
        return copy

    def attributes(self) -> dict[str, object]:
        """Of torch.Tensor: functions, for a bound method would not be bound to a tensor."""
        methods = {"to": self.to, "cpu": self.cpu, "cuda": self.cuda, "numpy": self.numpy, "__array__": self.array,
                   "tolist": self.tolist, "pin_memory": self.pin_memory, "record_stream": lambda _tensor, _stream: None,
                   "get_device": lambda t: 0 if self.is_ours(t) else self.plain["get_device"](t),
                   "is_pinned": lambda t, *_given: self.card.is_pinned(t.untyped_storage())}
        asked = {"device": self.device, "is_cuda": lambda t: self.is_ours(t) or self.true_is_cuda.__get__(t),
                 "is_cpu": lambda t: self.device(t).type == "cpu"}
        return {name: _function(method) for name, method in methods.items()} | {
            name: property(get) for name, get in asked.items()}


def _function(method: Callable) -> Callable:
    return lambda tensor, *given, **named: method(tensor, *given, **named)


def maker(card: Card, name: str, plain: Callable) -> Callable:
    """A function that makes tensors (torch.zeros, Tensor.new_zeros), with `device` and `pin_memory` understood."""

    @functools.wraps(plain)
    def made(*args: object, **named: object) -> Tensor:
        if card.is_quiet:
            return plain(*args, **named)
        asked = named.get("device")
        if asked is None and name in _NEW and card.holds(args[0]):
            asked = DEVICE
        is_pinned = named.pop("pin_memory", False)
        if not names_card(asked):
            out = plain(*args, **named, **({"pin_memory": False} if "pin_memory" in named else {}))
            if asked is None and (name in _LIKE or any(isinstance(a, Tensor) for a in args)):
                return out
            if isinstance(out, Tensor) and not out.is_meta:
                if asked is not None and card.holds(out):  # zeros_like(on the card, device="cpu")
                    return moved(card, out, False, out.dtype, False)
                card.settle(out)
                if is_pinned:
                    card.pin(out.untyped_storage())
            return out
        if name in ("as_tensor", "asarray") and isinstance(args[0], Tensor):
            return args[0].to(DEVICE, named.get("dtype") or args[0].dtype)
        if isinstance(named.get("generator"), torch.Generator) or not name.startswith(("rand", "normal")):
            with card.quiet():
                out = (card.recording.run if card.recording else _called)(plain, args, named | {"device": "cpu"})
        else:
            out = card._drawn(plain, args, named | {"device": "cpu"})
        if name in _FROM_HOST and out.numel():
            card.waits_for("copy to the card of pageable memory")
        if not name.endswith(("empty", "empty_like", "empty_strided")):
            card.launched(name)
        return card.put(out)

    return made


def storage_methods(card: Card) -> dict[str, object]:
    """Attributes of torch.UntypedStorage."""
    plain_resize, plain_copy = torch.UntypedStorage.resize_, torch.UntypedStorage.copy_
    true_device = torch.UntypedStorage.device

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        plain_resize(storage, size)
        if card.holds_storage(storage):
            card.resized(storage)
        return storage

    def copy_(storage: torch.UntypedStorage, source: torch.UntypedStorage, non_blocking: bool = False):
        plain_copy(storage, source, non_blocking)
        if card.holds_storage(storage) or card.holds_storage(source):
            card.copied(source, storage, not non_blocking)
        return storage

    def device(storage: torch.UntypedStorage) -> torch.device:
        return DEVICE if card.holds_storage(storage) and not card.is_quiet else true_device.__get__(storage)

    return {"resize_": resize_, "copy_": copy_, "device": property(device)}


def generator_class(card: Card) -> type:
    class Generator(torch.Generator):
        """torch.Generator that may say that it is the card's."""

        def __new__(cls, device: object = "cpu"):  # noqa: ANN204
            made = super().__new__(cls, "cpu")
            made._asked = torch.device(device)
            return made

        device = property(lambda self: self._asked)

    return Generator


@contextmanager
def answered(card: Card) -> Iterator[None]:
    """Within the block tensors, and what makes them, know the card."""
    with ExitStack() as stack:
        def put(owner: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        for name, value in _Tensors(card).attributes().items():
            put(torch.Tensor, name, value)
        for name in _NEW:
            put(torch.Tensor, name, maker(card, name, getattr(torch.Tensor, name)))
        constructors = {f.__name__: f for f in _device_constructors()}
        for name in (*constructors, *_LIKE):
            plain = getattr(torch, name, None)
            if plain is not None:
                put(torch, name, maker(card, name, plain))
        for name, value in storage_methods(card).items():
            put(torch.UntypedStorage, name, value)
        put(torch, "Generator", generator_class(card))
        yield
