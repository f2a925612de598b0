"""How tokens are drawn: the settings, and nothing hidden behind them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hybrid_rlhf.core.config import check

_MOST = 2**31 - 1  # what kernels count with


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

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    num_samples: int = 1
    stop_token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        check(1 <= self.max_new_tokens <= _MOST,
              f"max_new_tokens is {self.max_new_tokens}; it must lie in [1, {_MOST}]")
        check(0 <= self.min_new_tokens <= self.max_new_tokens,
              f"min_new_tokens is {self.min_new_tokens}; it must lie in [0, max_new_tokens {self.max_new_tokens}]")
        check(self.temperature >= 0, f"temperature is {self.temperature}; it must be 0 (greedy) or positive")
        check(0 <= self.top_k <= _MOST, f"top_k is {self.top_k}; it must be 0 (off) or lie in [1, {_MOST}]")
        check(0 < self.top_p <= 1, f"top_p is {self.top_p}; it must lie in (0, 1]")
        check(0 <= self.min_p < 1, f"min_p is {self.min_p}; it must lie in [0, 1)")
        check(self.repetition_penalty > 0, f"repetition_penalty is {self.repetition_penalty}; it must be positive")
        check(self.num_samples >= 1, f"num_samples is {self.num_samples}; at least one response per prompt")

    def check_groups(self, section: str) -> None:
        """UserError where several responses to one prompt are to be compared and all of them will be the same."""
        for name, value, cure in (("temperature", self.temperature, 1), ("top_k", self.top_k - 1, 0)):
            check(self.num_samples == 1 or value != 0,
                  f"{section}.sampling.{name} is {getattr(self, name):g}: greedy responses to one prompt are all the "
                  f"same; take {cure}")

    @property
    def is_truncated(self) -> bool:
        """Whether tokens may be cut off: what is drawn then follows not the logits, but those of the tokens left."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass
class Generation:
    """B responses: token ids up to and including the stop token, and why each ended ("eos" or "length").

    logprobs: of each token, log softmax(logits / temperature) at the moment of the draw, before repetition penalty and
    truncation (top-k, top-p, min-p): what the training forward says of the tempered policy. Greedy: of the logits.
    kept: where it was asked for and sampling was truncated, the words (int32) that each token was drawn from; the
    logprobs are then of that softmax over these words alone.
    """

    tokens: list[list[int]]
    finish_reasons: list[str]
    logprobs: list[list[float]]
    kept: list[list[Tensor]] | None = None

    def __len__(self) -> int:
        return len(self.tokens)
