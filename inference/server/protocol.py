"""What the server is asked and answers: OpenAI's chat completions, and the scores that rewards/service.py asks for."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.transcripts import clean
from hybrid_rlhf.engine.decode.sampling import SamplingConfig

MAX_MESSAGES, MAX_STOPS, MAX_CHOICES, MAX_SCORES = 4096, 4, 8, 256
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class ApiError(Exception):
    """A refusal in OpenAI's shape: an HTTP status, one line, the parameter at fault, a code; seconds to wait."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def body(self) -> dict:
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else (
            "rate_limit_error" if self.status == 429 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)

    type: str = "text"
    text: str | None = None


class _Message(BaseModel):
    model_config = ConfigDict(strict=True)

    role: str
    content: str | list[_Part] | None = None


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class _ChatBody(BaseModel):
    """Fields that are not named here are ignored, as OpenAI's clients expect; those that would change the answer in a
    way we have no means for are refused (_REFUSED)."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str | None = Field(None, max_length=1000)
    messages: list[_Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=10**9)
    min_p: float | None = Field(None, ge=0, lt=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    max_tokens: int | None = Field(None, ge=1, le=10**9)
    max_completion_tokens: int | None = Field(None, ge=1, le=10**9)
    min_tokens: int | None = Field(None, ge=0, le=10**9)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    tools: Any = None
    functions: Any = None
    response_format: Any = None
    logprobs: Any = None
    logit_bias: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None


_REFUSED = ("tools", "functions", "response_format", "logprobs", "logit_bias", "frequency_penalty", "presence_penalty")


class _ScoreBody(BaseModel):
    model_config = ConfigDict(strict=True)

    prompts: list[str | list[_Message]] = Field(max_length=MAX_SCORES)
    completions: list[str | list[_Message]] = Field(max_length=MAX_SCORES)


@dataclass(frozen=True)
class ChatRequest:
    """One question. sampling: without limits of tokens. limit: the most tokens (None: the server's). stops: strings."""

    model: str | None
    messages: list[dict[str, str]]
    sampling: SamplingConfig
    limit: int | None
    least: int
    stops: tuple[str, ...]
    seed: int
    num_choices: int
    is_stream: bool
    wants_usage: bool


def read_json(body: bytes) -> dict:
    """The body as a JSON object; ApiError 400 for whatever else the bytes are."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    try:
        found = json.loads(body.decode("utf-8"), parse_constant=refuse)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 (byte {error.start}); "
                            "send JSON in UTF-8", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply; send a flatter one", code="invalid_json") from None
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        raise ApiError(400, f"the body is not valid JSON: {' '.join(str(error).split())[:200]}; send a JSON object",
                       code="invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return found


def read_chat(found: dict) -> ChatRequest:
    """A chat completion's body. Raises ApiError 400 that names the parameter."""
    body = _validated(_ChatBody, found)
    for name in _REFUSED:
        value = getattr(body, name)
        if value and value != {"type": "text"}:
            raise ApiError(400, f"{name} is not supported here; leave it out", param=name, code="unsupported_parameter")
    given = {name: getattr(body, name) for name in ("temperature", "top_p", "min_p", "repetition_penalty")}
    if body.top_k is not None:
        given["top_k"] = max(body.top_k, 0)  # -1 is another server's word for off
    try:
        sampling = SamplingConfig(**{k: v for k, v in given.items() if v is not None})
    except UserError as error:
        raise ApiError(400, str(error)) from None
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS or not all(0 < len(s) <= 1000 for s in stops):
        raise ApiError(400, f"stop takes at most {MAX_STOPS} strings of 1 to 1000 characters", param="stop")
    messages = [_message(m, f"messages.{i}") for i, m in enumerate(body.messages)]
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    seed = secrets.randbits(63) if body.seed is None else body.seed
    return ChatRequest(body.model, messages, sampling, limit, body.min_tokens or 0, tuple(map(clean, stops)), seed,
                       body.n or 1, bool(body.stream), bool(body.stream_options and body.stream_options.include_usage))


def read_score(found: dict) -> tuple[list[str | list[dict]], list[str]]:
    """Prompts (text, or messages) and their completions as text. Raises ApiError 400."""
    body = _validated(_ScoreBody, found)
    if len(body.prompts) != len(body.completions):
        raise ApiError(400, f"{len(body.prompts)} prompts but {len(body.completions)} completions; "
                            "give one completion for each prompt", param="completions")
    prompts = [clean(p) if isinstance(p, str) else [_message(m, f"prompts.{i}") for m in p]
               for i, p in enumerate(body.prompts)]
    for i, prompt in enumerate(prompts):
        if prompt == []:
            raise ApiError(400, f"prompts.{i} has no messages; give one at least", param="prompts")
    completions = ["".join(m["content"] for m in (_message(m, f"completions.{i}") for m in c))
                   if isinstance(c, list) else clean(c) for i, c in enumerate(body.completions)]
    return prompts, completions


def _validated(shape: type[BaseModel], found: dict) -> Any:
    try:
        return shape.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        raise ApiError(400, f"{where}: {first['msg']}; fix it or leave it out",
                       param=str(first["loc"][0]) if first["loc"] else None) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply; send a flatter one", code="invalid_json") from None


def _message(message: _Message, where: str) -> dict[str, str]:
    if message.role not in _ROLES:
        raise ApiError(400, f"{where}.role: {message.role[:40]!r} is no role; choose {', '.join(_ROLES)}",
                       param="messages")
    parts = message.content if isinstance(message.content, list) else [_Part(text=message.content or "")]
    if any(part.type != "text" for part in parts):
        raise ApiError(400, f"{where}.content: only text can be read here", param="messages")
    return {"role": _ROLES[message.role], "content": clean("".join(part.text or "" for part in parts))}


class Shapes:
    """The objects of one answer, all under one id. counts: (prompt tokens, completion tokens)."""

    def __init__(self, model: str) -> None:
        self._frame = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def chunk(self, index: int, delta: dict, finish_reason: str | None = None) -> dict:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._frame | {"object": "chat.completion.chunk", "choices": [choice]}

    def usage_chunk(self, counts: tuple[int, int]) -> dict:
        return self._frame | {"object": "chat.completion.chunk", "choices": [], "usage": usage(counts)}

    def whole(self, texts: list[str], finish_reasons: list[str | None], counts: tuple[int, int]) -> dict:
        choices = [{"index": i, "message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": None,
                    "finish_reason": reason}
                   for i, (text, reason) in enumerate(zip(texts, finish_reasons, strict=True))]
        return self._frame | {"object": "chat.completion", "choices": choices, "usage": usage(counts)}


def usage(counts: tuple[int, int]) -> dict:
    return {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}


def event(found: dict) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(found, ensure_ascii=False).encode() + b"\n\n"
