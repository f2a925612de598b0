"""Switch between several low-rank adapters on one frozen base, with checks against lost gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from hybrid_rlhf.models import peft_compat
from hybrid_rlhf.models.added_rows import holders
from hybrid_rlhf.models.lora import lora_layers
from hybrid_rlhf.models.text_part import text_backbone


class Adapters:
    """The adapters of one frozen base, of which `use(name)` makes one active, or none (the base itself).

    A forward and its backward belong into one block of `use`, and every forward of the backbone into some block. What
    breaks this raises RuntimeError: nested blocks, a forward outside of a block, a backward after its block has ended
    or after another switch. peft's own switch, which toggles requires_grad, is not used: it silently loses the
    gradients of what was computed before it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers, self._rows = lora_layers(model), holders(model)
        self.names = sorted({n for layer in self._layers.values() for n in layer.lora_A})
        self._entries, self._entry = itertools.count(1), 0  # 0: outside
        self._select([])
        backbone = text_backbone(model)
        backbone.register_forward_pre_hook(lambda *_: self._require(self._entry))
        backbone.register_forward_hook(lambda _module, _inputs, output: self._watch(output))

    @contextmanager
    def use(self, name: str | Sequence[str] | None) -> Iterator[None]:
        """Within the block `name` is active (None: no adapter; several: their updates add). Blocks do not nest."""
        names = [] if name is None else [name] if isinstance(name, str) else list(name)
        if self._entry:
            raise RuntimeError(f"adapter {name!r} inside the block of {self._active}: roles take turns on one base")
        for adapter in names:
            if adapter not in self.names:
                raise RuntimeError(f"there is no adapter {adapter!r}; the base has {', '.join(self.names)}")
        self._entry = next(self._entries)
        self._select(names)
        try:
            yield
        finally:
            self._entry = 0
            self._select([])

    def train_only(self, names: Iterable[str]) -> None:
        """Once, before any optimizer is made: the adapters `names` are trained, the others and the base are frozen."""
        names = set(names)
        for layer in self._layers.values():
            for part in (layer.lora_A, layer.lora_B):
                for name, linear in part.items():
                    linear.requires_grad_(name in names)
        for table in self._rows.values():
            for name, rows in table.adapters.items():
                rows.requires_grad_(name in names)

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """The parameters of one adapter by name."""
        weights = {f"{place}.{kind}.weight": getattr(layer, kind)[name].weight
                   for place, layer in self._layers.items() for kind in ("lora_A", "lora_B") if name in layer.lora_A}
        return weights | {f"{place}.added_rows.weight": table.adapters[name].weight
                          for place, table in self._rows.items() if name in table.adapters}

    def _select(self, names: list[str]) -> None:
        self._active = names
        for layer in self._layers.values():
            peft_compat.activate(layer, names)
        for table in self._rows.values():
            table.active = names

    def _require(self, entry: int) -> None:
        if not entry:
            raise RuntimeError("a forward of a shared base outside use(): no role has said whose adapter is meant")
        if entry != self._entry:
            raise RuntimeError("a backward outside the block of its forward: another adapter may be active by now")
        if any(peft_compat.active(layer) is not self._active for layer in self._layers.values()):
            raise RuntimeError("the active adapter was changed behind the back of use(); gradients would be lost")

    def _watch(self, output: object) -> None:
        """Check in the backward pass that gradients reach the backbone's output in the block of its forward."""
        entry, hidden = self._entry, output.last_hidden_state
        if hidden.requires_grad:
            hidden.register_hook(lambda _grad: self._require(entry))
