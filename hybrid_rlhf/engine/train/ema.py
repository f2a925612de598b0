"""A moving average of trained weights (Polyak and Juditsky 1992; DeepSpeed-Chat's EMA of the actor), in fp32.

Each process averages what its own optimizer steps: the full fp32 masters or weights at ZeRO 0, its flat part of them at
ZeRO 1 to 3. So an update needs no communication, and an adapter's average is as small as the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from hybrid_rlhf.engine.hybrid import HybridEngine
from hybrid_rlhf.engine.train import zero_state
from hybrid_rlhf.engine.train.deepspeed_compat import flat_masters, spread_masters
from hybrid_rlhf.engine.train.repartition import PROCESSES


class WeightAverage:
    """average <- decay average + (1 - decay) weight, starting from the weights at construction."""

    def __init__(self, engine: HybridEngine, decay: float) -> None:
        if engine.training is None or not 0 <= decay < 1:
            raise ValueError(f"an average with decay {decay} of {'' if engine.training else 'un'}trained weights")
        self.engine, self.decay = engine, decay
        with engine.active():
            self._averages = {name: weight.detach().clone() for name, weight in self._stepped().items()}

    def _stepped(self) -> dict[str, Tensor]:
        """The fp32 weights that this process's optimizer steps, by parameter, or flat by group."""
        training = self.engine.training
        if training.stage == 0:
            state = training._optimizer.state
            return {name: state.get(p, {}).get("master", p.data) for name, p in training.parameters.items()}
        parts = flat_masters(training.engine.optimizer, training.stage)
        return {f"group {i}": part.data for i, part in enumerate(parts)}

    @torch.no_grad()
    def update(self) -> None:
        """Call it after an optimizer step."""
        with self.engine.active():
            for name, weight in self._stepped().items():
                self._averages[name].lerp_(weight.float(), 1 - self.decay)

    def weights(self) -> dict[str, Tensor]:
        """The full average, by parameter, in fp32 on the CPU. Every process calls it, for each may hold a part."""
        with self.engine.active():
            self._exchange()
            try:
                return self.engine.training.state()["weights"]
            finally:
                self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap the optimizer's weights with their average, bit for bit."""
        for name, weight in self._stepped().items():
            current = weight.clone()
            weight.copy_(self._averages[name])
            self._averages[name].copy_(current)

    @torch.no_grad()
    def _exchange_in_parts(self) -> None:
        self._exchange()
        spread_masters(self.engine.training.engine.optimizer, stage=3)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Within the block the model's weights are the average, rounded to their dtype; afterwards they are restored.

        Every process enters; nothing may be trained inside.
        """
        if self.engine.training.stage == 3:  # never gathered: each process swaps its part with its average
            with self.engine.active():
                self._exchange_in_parts()
                try:
                    yield
                finally:
                    self._exchange_in_parts()
            return
        averages = self.weights()
        with self.engine.active(), torch.no_grad():
            parameters = self.engine.training.parameters
            before = [(p, p.data.clone()) for p in parameters.values()]
            for name, parameter in parameters.items():
                parameter.copy_(averages[name])
            try:
                yield
            finally:
                for weight, original in before:
                    weight.copy_(original)

    def state(self) -> dict:
        """This process's part, for a checkpoint; no copies."""
        return {"averages": dict(self._averages), "partition": zero_state.partition(self.engine.training).state()}

    def load_state(self, state: Mapping) -> None:
        """Restore `state`, or the states of all processes in it together."""
        if PROCESSES not in state:
            for name, average in self._averages.items():
                average.copy_(state["averages"][name])
            return
        saved = state[PROCESSES]
        parts = zero_state.regrouped(self.engine.training, saved, lambda each, part: each["averages"][part].numel(),
                                     self._averages)
        for name, average in self._averages.items():
            tensor = parts.tensor(name, average.numel(), lambda r, part: saved[r]["averages"][part])
            average.copy_(tensor.view(average.shape))
