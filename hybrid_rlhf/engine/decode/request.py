"""One response to generate, and its random stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine.decode.sampling import SamplingConfig

_WORD = (1 << 64) - 1


@dataclass
class Request:
    """One response to generate: number (of its random stream under the seed), prompt, limit of tokens, and seed.

    is_stored: the columns of the prompt, but for its last token, are in the slot already. sampling: settings of its
    own; None: the scheduler's. may_go_on: its slot is kept when it ends, for a request that `follows` it, whose prompt
    is this prompt, these tokens and more. num_drawn: tokens drawn before under the same number, in earlier turns. kept:
    per token the candidate ids (int32) that it was drawn from, with keep_candidates.
    """

    number: int
    prompt: Sequence[int]
    limit: int
    seed: int = 0
    is_stored: bool = False
    sampling: SamplingConfig | None = None
    may_go_on: bool = False
    follows: Request | None = None
    num_drawn: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)


def following(before: Request, added: Sequence[int], limit: int) -> Request:
    """The next turn of a sequence: its tokens so far, `added` ones from elsewhere, and at most `limit` more."""
    prompt = [*before.prompt, *before.tokens, *added]
    return Request(before.number, prompt, limit, before.seed, sampling=before.sampling, may_go_on=True,
                   follows=before, num_drawn=before.num_drawn + len(before.tokens))


def check_finite(logprob: float, request: Request) -> None:
    """Raise UserError where the logprob of a request's next token is not finite: the model's weights have broken."""
    if not math.isfinite(logprob):
        raise UserError(f"the model's logits are not finite at position {len(request.prompt) + len(request.tokens)} of "
                        f"request {request.number}: its weights have broken (too large a step?); "
                        "go back to an earlier model and lower the learning rate")


def stream(seed: int, number: int) -> int:
    """The random stream (int64) of one request under a seed: splitmix64 of both."""
    return _splitmix64(_splitmix64(seed) + number)


def _splitmix64(x: int) -> int:
    """kernels.reference.splitmix64 of one Python integer, as int64."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x
