"""What the server is asked at /v1/completions: prompts as they are, as text or as tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hybrid_rlhf.data.transcripts import clean
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.inference.server.protocol import (
    MAX_CHOICES,
    MAX_TOP,
    ApiError,
    StreamOptions,
    check_stream_logprobs,
    refuse_given,
    sampling_of,
    seed_of,
    stops_of,
    validated,
    wants_usage,
)

MAX_PROMPTS, MAX_STOPS = 256, 16  # OpenAI's 4 are fewer than evaluation suites send
_DEFAULT_TOKENS = 16  # OpenAI's
_REFUSED = ("suffix", "logit_bias", "frequency_penalty", "presence_penalty", "stop_token_ids", "ignore_eos")


class _CompletionBody(BaseModel):
    """As _ChatBody: unknown fields are ignored, those that would change the answer are refused."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str | None = Field(None, max_length=1000)
    prompt: Any = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=10**9)
    min_p: float | None = Field(None, ge=0, lt=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    max_tokens: int | None = Field(None, ge=0, le=10**9)
    min_tokens: int | None = Field(None, ge=0, le=10**9)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: Any = None
    logit_bias: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    stop_token_ids: Any = None
    ignore_eos: Any = None


@dataclass(frozen=True)
class CompletionRequest:
    """Prompts to go on from, each as text or as token ids. sampling, stops, num_top: as of a ChatRequest. limit: the
    most tokens of an answer; 0: the prompts alone are wanted. has_echo: answers begin with their prompts. adds_special:
    texts begin with the tokenizer's own BOS, where it has one."""

    model: str | None
    prompts: list[str | list[int]]
    sampling: SamplingConfig
    limit: int
    least: int
    stops: tuple[str, ...]
    seed: int
    num_choices: int
    is_stream: bool
    wants_usage: bool
    num_top: int | None
    has_echo: bool
    adds_special: bool

    tools, goes_on = (), True  # see ChatRequest

    @property
    def is_read_only(self) -> bool:
        """Whether the prompts' own scores tell the whole answer: nothing is drawn, or the likeliest token alone."""
        is_greedy = self.sampling.temperature == 0 and self.sampling.repetition_penalty == 1 and self.least == 0
        return self.limit == 0 or (self.limit == 1 and is_greedy and self.has_echo and self.num_top is not None)


def read_completion(found: dict) -> CompletionRequest:
    """A completion's body. Raises ApiError 400 that names the parameter."""
    body = validated(_CompletionBody, found)
    refuse_given(body, _REFUSED)
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, "best_of other than n is not supported here; leave it out", param="best_of",
                       code="unsupported_parameter")
    limit, has_echo = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens, bool(body.echo)
    if limit == 0 and (body.stream or not has_echo):
        raise ApiError(400, "max_tokens 0 asks for the prompt alone; send echo true with it, and no stream",
                       param="max_tokens")
    sampling = sampling_of(body)
    if body.stream:
        check_stream_logprobs(body.logprobs, sampling, "logprobs")
        if has_echo and body.logprobs is not None:
            raise ApiError(400, "logprobs of an echoed prompt cannot be had in a stream; leave stream out",
                           param="logprobs", code="unsupported_parameter")
    return CompletionRequest(body.model, _prompts(body.prompt), sampling, limit, body.min_tokens or 0,
                             stops_of(body, MAX_STOPS), seed_of(body), body.n or 1, bool(body.stream),
                             wants_usage(body), body.logprobs, has_echo,
                             body.add_special_tokens is not False)


def _prompts(given: Any) -> list[str | list[int]]:
    """A string, strings, token ids, or lists of them (or of both), as a list of prompts."""
    prompts = [given] if isinstance(given, str) or _is_ids(given) else given
    if not isinstance(prompts, list) or not prompts:
        raise ApiError(400, "prompt must be a string, a list of strings, a list of token ids, or a list of such lists; "
                            "send one", param="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(400, f"there are {len(prompts)} prompts; send at most {MAX_PROMPTS} at once", param="prompt")
    for i, prompt in enumerate(prompts):
        if not (isinstance(prompt, str) or _is_ids(prompt)):
            raise ApiError(400, f"prompt.{i} is neither a string nor a list of token ids, or it is empty; fix it",
                           param="prompt")
    return [clean(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _is_ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(each) is int for each in given)
