"""Sampling settings, and the record of what was sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.options import check_values, within

_MOST = 2**31 - 1  # the kernels count in int32


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling settings. The defaults draw from the model's own distribution, as on-policy methods need.

    Attributes:
        max_new_tokens: Longest response, in tokens.
        min_new_tokens: No end-of-sequence token before this many tokens.
        temperature: Divides the logits; 0 means greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches p; 1 keeps all.
        min_p: Drop tokens less likely than min_p times the likeliest; 0 keeps all.
        repetition_penalty: Divides the logits of tokens already present (CTRL, arXiv 1909.05858); 1 is off.
        num_samples: Responses per prompt (the group size).
        stop_token_ids: Further tokens that end a response, beside the model's own.
    """

    max_new_tokens: int = within(256, f"[1, {_MOST}]")
    min_new_tokens: int = 0
    temperature: float = within(1.0, "[0,")
    top_k: int = within(0, f"[0, {_MOST}]")
    top_p: float = within(1.0, "(0, 1]")
    min_p: float = within(0.0, "[0, 1)")
    repetition_penalty: float = within(1.0, "(0,")
    num_samples: int = within(1, "[1,")
    stop_token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_values(self, "")
        check(0 <= self.min_new_tokens <= self.max_new_tokens,
              f"min_new_tokens is {self.min_new_tokens}; it must lie in [0, max_new_tokens {self.max_new_tokens}]")

    def check_groups(self, section: str) -> None:
        """Raise UserError where several responses to one prompt are to be compared and all of them will be the same."""
        for name, value, cure in (("temperature", self.temperature, 1), ("top_k", self.top_k - 1, 0)):
            check(self.num_samples == 1 or value != 0,
                  f"{section}.sampling.{name} is {getattr(self, name):g}: greedy responses to one prompt are all the "
                  f"same; take {cure}")

    @property
    def is_truncated(self) -> bool:
        """Whether top-k, top-p or min-p may cut tokens off, so that draws are from the remaining tokens only."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass
class Generation:
    """B responses: token ids up to and including the stop token, and why each ended ("eos" or "length").

    logprobs: of each token, log softmax(logits / temperature) when it was drawn, before repetition penalty and
    truncation (top-k, top-p, min-p), as the training forward computes it. Greedy: of the logits.
    kept: with keep_candidates, where sampling was truncated, the candidate ids (int32) that each token was drawn from;
    the logprobs are then normalised over these candidates alone.
    """

    tokens: list[list[int]]
    finish_reasons: list[str]
    logprobs: list[list[float]]
    kept: list[list[Tensor]] | None = None

    def __len__(self) -> int:
        return len(self.tokens)
