"""The hybrid engine: one module, one set of weights, two modes, and `inference()` as the only switch between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from hybrid_rlhf.config import UserError
from hybrid_rlhf.engine import generate as hf_generate
from hybrid_rlhf.engine.sampling import SamplingConfig
from hybrid_rlhf.engine.zero import OptimizerConfig, ZeroConfig, ZeroTraining

Piece = TypeVar("Piece")


@dataclass
class Generation:
    """B responses: token ids up to and including the stop token, and why each ended ("eos" or "length")."""

    tokens: list[list[int]]
    finish_reasons: list[str]

    def __len__(self) -> int:
        return len(self.tokens)


class HybridEngine:
    """One module in training or inference mode, over the same tensors.

    module: what training calls; its forward returns the numbers of a role. model: the Hugging Face causal model inside
    it that generates (None for a module that only scores). A fresh engine is in training mode; without an optimizer
    it can be called but not updated.
    """

    def __init__(self, module: nn.Module, model: nn.Module | None = None, *, eos_ids: Sequence[int] = (),
                 pad_id: int = 0, max_batch: int = 64) -> None:
        self.module, self.model = module, model
        self.eos_ids, self.pad_id, self.max_batch = list(eos_ids), pad_id, max_batch
        self.training: ZeroTraining | None = None
        self.is_inference = False

    @classmethod
    def for_inference(cls, model: nn.Module, tokenizer) -> HybridEngine:  # noqa: ANN001
        """An engine that only generates: no optimizer, no DeepSpeed."""
        return cls(model, model, eos_ids=stop_ids(model, tokenizer), pad_id=tokenizer.pad_token_id)

    def prepare_training(self, optimizer: OptimizerConfig, schedule: Callable[[int], float],
                         zero: ZeroConfig) -> HybridEngine:
        """Put the trainable parameters under ZeRO; after this `update` works."""
        self.training = ZeroTraining(self.module, optimizer, schedule, zero)
        return self

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @contextmanager
    def inference(self) -> Iterator[HybridEngine]:
        """Inference mode for the block; the mode before is restored whatever happens inside. Does not nest."""
        if self.is_inference:
            raise RuntimeError("inference() inside inference(): the engine is in inference mode already")
        modes = {m: m.training for m in self.module.modules()}
        checkpointing = [m for m in self.module.modules() if getattr(m, "gradient_checkpointing", False)]
        self.module.eval()
        for module in checkpointing:
            module.gradient_checkpointing = False  # with it on, transformers refuses to keep a cache
        self.is_inference = True
        try:
            with torch.no_grad():
                yield self
        finally:
            self.is_inference = False
            for module, mode in modes.items():
                module.training = mode
            for module in checkpointing:
                module.gradient_checkpointing = True

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seed: int = 0) -> Generation:
        """Sample one response to each prompt (token ids). Only inside `inference()`.

        Raises UserError for a prompt that leaves no room for max_new_tokens in the model's context.
        """
        self._require_inference("generate")
        self._check_lengths(prompts, sampling)
        tokens: list[list[int]] = []
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for start in range(0, len(prompts), self.max_batch):
                batch = prompts[start : start + self.max_batch]
                tokens += hf_generate.generate_batch(self.model, batch, sampling, self.eos_ids, self.pad_id)
        stops = {*self.eos_ids, *sampling.stop_token_ids}
        return Generation(tokens, ["eos" if row[-1] in stops else "length" for row in tokens])

    def stream(self, prompt: list[int], sampling: SamplingConfig, seed: int = 0) -> Iterator[int]:
        """Yield the tokens of one response one by one, stop tokens excluded. Only inside `inference()`."""
        self._require_inference("stream")
        self._check_lengths([prompt], sampling)
        return hf_generate.stream(self.model, prompt, sampling, self.eos_ids, self.pad_id, seed)

    def __call__(self, *inputs: object, **named: object):  # noqa: ANN204 - the module's own
        """The module's forward in training mode, with or without gradients as the caller has it."""
        if self.is_inference:
            raise RuntimeError("the training forward was called inside inference()")
        return (self.training.engine if self.training else self.module)(*inputs, **named)

    def update(self, pieces: Sequence[Piece], loss: Callable[[Piece], Tensor]) -> float:
        """Forward and backward for each piece of a minibatch, then one optimizer step; returns the gradient norm.

        `loss(piece)` is that piece's share of the minibatch's loss, so that the split does not move the gradient.
        """
        if self.training is None:
            raise RuntimeError("update() on an engine without an optimizer")
        self.module.train()
        for i, piece in enumerate(pieces):
            self.training.backward(loss(piece), is_last=i == len(pieces) - 1)
        return self.training.step()

    def _require_inference(self, what: str) -> None:
        if not self.is_inference:
            raise RuntimeError(f"{what}() outside inference(): enter the mode first")
        if self.model is None:
            raise RuntimeError(f"{what}() on an engine whose module has no language model head")

    def _check_lengths(self, prompts: list[list[int]], sampling: SamplingConfig) -> None:
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        longest = max(map(len, prompts), default=0)
        if min(map(len, prompts), default=1) == 0:
            raise UserError("an empty prompt: there is no token to continue from")
        if limit is not None and longest + sampling.max_new_tokens > limit:
            raise UserError(f"a prompt of {longest} tokens and max_new_tokens {sampling.max_new_tokens} exceed the "
                            f"model's {limit} positions; shorten one of them")


def stop_ids(model: nn.Module, tokenizer) -> list[int]:  # noqa: ANN001
    """All tokens that end a response: the tokenizer's eos and those of the model's generation_config."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    configured = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in [tokenizer.eos_token_id, *configured] if i is not None})
