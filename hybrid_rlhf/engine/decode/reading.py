"""Hidden states of given sequences in inference mode, from which a server computes the likelihood of each token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.tensors import SequenceBatch
from hybrid_rlhf.engine.decode.image_prompts import has_images
from hybrid_rlhf.engine.decode.kv_cache import SlotCache
from hybrid_rlhf.engine.decode.runner import Runner
from hybrid_rlhf.models.backbone import hidden_states


class Reader:
    """Reads one sequence at a time by one prefill, in a slot of `capacity` columns.

    The slot keeps the columns of the last sequence, so that one that begins like it (the next answer to a question) is
    computed from where they differ. One with images among its new tokens is read from its start, and so is each by a
    model with recurrent states, or that runs by `generate`.
    """

    def __init__(self, runner: Runner, capacity: int) -> None:
        self._runner, self._capacity = runner, capacity
        self._cache: SlotCache | None = None
        self._held: list[int] = []

    def num_held(self, ids: Sequence[int]) -> int:
        """How many of the first tokens of `ids` have their columns in the slot."""
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, self._held, strict=False)))

    def states(self, ids: Sequence[int], first: int = 0) -> Tensor:
        """(N - first, H): the last hidden states of ids[first:], the N tokens of a sequence; row i predicts what
        follows ids[first + i]. Raises ValueError where ids[:first] are not all held, or the slot is too small, and
        UserError for a model that does not return its states."""
        if first > self.num_held(ids) or len(ids) > self._capacity:
            raise ValueError(f"{len(ids)} tokens from {first}, of which {self.num_held(ids)} are held, in a slot of "
                             f"{self._capacity}")
        if self._runner.path == "generate":  # the model runs by its own code there
            tokens = torch.tensor([list(ids)], device=self._runner.device)
            real = torch.ones_like(tokens, dtype=torch.bool)
            return hidden_states(self._runner.model, SequenceBatch(tokens, real, real))[0, first:]
        if self._cache is None:
            self._cache = self._runner.new_cache(1, self._capacity)
        self._held = []  # a forward that fails leaves the slot half written
        self._cache.clear_states(self._cache.all_slots)
        begin = 0 if has_images(ids[first:]) else first
        out = self._runner.prefill(self._cache, [ids[begin:]], [0], [0], offset=begin,
                                   shifts=self._runner.shifts([ids[:begin]]))
        check(hasattr(out, "last_hidden_state"), f"{type(self._runner.model).__name__} does not give its hidden states "
                                                 "behind a cache; leave logprobs out")
        if not self._runner.is_stateful:
            self._held = list(ids)
        return out.last_hidden_state[0, first - begin :]
