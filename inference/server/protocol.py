"""Parse and validate requests: OpenAI's chat completions and completions, and scores for rewards/service.py."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.strict_json import loads, why
from hybrid_rlhf.data.messages import clean, tools_of, with_tools
from hybrid_rlhf.data.row_images import source_of, sources_in
from hybrid_rlhf.data.turns import IMAGE, IMAGES, is_begun, with_kwargs
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.inference.teaching import TEXT_ALONE, Mark
from hybrid_rlhf.models.template_kwargs import KWARGS

MAX_MESSAGES, MAX_CHOICES, MAX_SCORES, MAX_TOOLS, MAX_TOP, MAX_PROMPTS = 4096, 8, 256, 128, 20, 256
MAX_IMAGES = 16
MAX_STOPS, MAX_COMPLETION_STOPS = 4, 16  # evaluation suites send more than OpenAI's 4 to /v1/completions
_COMPLETION_TOKENS = 16  # OpenAI's default
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class ApiError(Exception):
    """An error in OpenAI's shape: HTTP status, message (one line), parameter, code, and retry_after in seconds."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def body(self) -> dict:
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else (
            "rate_limit_error" if self.status == 429 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class _Part(BaseModel, strict=True):
    type: str = "text"
    text: str | None = None
    image_url: Any = None


class _Called(BaseModel, strict=True):
    name: str = Field(max_length=1000)
    arguments: str | dict


class _Call(BaseModel, strict=True):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _Called


class _Message(BaseModel, strict=True):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Function(BaseModel, strict=True):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict | None = None
    strict: bool | None = None


class _Tool(BaseModel, strict=True):
    type: Literal["function"]
    function: _Function


class StreamOptions(BaseModel, strict=True):
    include_usage: bool = False


class _Body(BaseModel, strict=True, allow_inf_nan=False):
    """What both kinds of completions have. Unknown fields are ignored, as OpenAI's clients expect; fields that would
    change the answer but are not supported are refused (_UNREAD)."""

    model: str | None = Field(None, max_length=1000)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=10**9)
    min_p: float | None = Field(None, ge=0, lt=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0, le=10**9)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class _ChatBody(_Body):
    messages: list[_Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, le=10**9)
    max_completion_tokens: int | None = Field(None, ge=1, le=10**9)
    tools: list[_Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)


class _CompletionBody(_Body):
    prompt: Any = None
    max_tokens: int | None = Field(None, ge=0, le=10**9)
    best_of: int | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    echo: bool | None = None
    add_special_tokens: bool | None = None


_UNSUPPORTED = "unsupported_parameter"
_UNREAD = ("logit_bias", "frequency_penalty", "presence_penalty", "stop_token_ids", "ignore_eos")


class _ScoreBody(BaseModel, strict=True):
    prompts: list[str | list[_Message]] = Field(max_length=MAX_SCORES)
    completions: list[str | list[_Message]] = Field(max_length=MAX_SCORES)


class _MarkBody(BaseModel, strict=True):
    kind: Literal["pair", "thumb"]
    how: Literal["edited", "compared"] = "compared"  # of a pair
    prompt: list[_Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    chosen: str = ""
    rejected: str = ""
    completion: str = ""  # of a thumb
    is_cut: bool = False  # whether chosen or completion reached the longest length, or was stopped; and rejected
    is_other_cut: bool = False
    is_good: bool = True


@dataclass(frozen=True)
class GenerationRequest:
    """A chat completion (with messages) or a completion (with prompts).

    Attributes:
        sampling: Settings without limits of tokens.
        limit: Maximum tokens of an answer; None: the server's limit; 0: only the prompts.
        least: Minimum tokens of an answer.
        num_top: Number of top tokens to return with each token and its log-probability; None: no
            log-probabilities.
        messages: Of a chat; the first one has the tools.
        tools: Schemas of the functions that the model may call.
        continues: Whether a chat's answer continues the last message, if that is the assistant's.
        prompts: Of a completion, each as text or as token ids.
        has_echo: Whether answers begin with their prompts.
        adds_special: Whether the tokenizer's BOS, if it has one, is added to text prompts.
    """

    model: str | None
    sampling: SamplingConfig
    limit: int | None
    least: int
    stops: tuple[str, ...]
    seed: int
    num_choices: int
    is_stream: bool
    wants_usage: bool
    num_top: int | None
    messages: list[dict] = field(default_factory=list)
    tools: list[dict] = field(default_factory=list)
    continues: bool = True
    prompts: list[str | list[int]] = field(default_factory=list)
    has_echo: bool = False
    adds_special: bool = True

    @property
    def is_chat(self) -> bool:
        return not self.prompts

    @property
    def is_read_only(self) -> bool:
        """Whether only prompts are scored: no token is sampled, or only the likeliest one."""
        is_greedy = self.sampling.temperature == 0 and self.sampling.repetition_penalty == 1 and self.least == 0
        return self.limit == 0 or (self.limit == 1 and is_greedy and self.has_echo and self.num_top is not None)


def _need(is_right: object, param: str, message: str, code: str | None = None) -> None:
    """ApiError 400 unless the field `param` (or one within it, a.b) is right."""
    if not is_right:
        raise ApiError(400, message, param=param.split(".")[0], code=code)


def read_json(body: bytes) -> dict:
    """The body as a JSON object; ApiError 400 for anything else."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    try:
        data = json.loads(body.decode("utf-8"), parse_constant=refuse)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 (byte {error.start}); "
                            "send JSON in UTF-8", code="invalid_json") from None
    except (ValueError, RecursionError) as error:  # not JSON, integers of thousands of digits, nested lists
        raise ApiError(400, f"the body is not valid JSON: {' '.join(str(error).split())[:200]}; send a JSON object",
                       code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return data


def read_chat(data: dict) -> GenerationRequest:
    """A chat completion's body. Raises ApiError 400 that names the parameter."""
    body = _validated(_ChatBody, data, ("functions", "response_format", *_UNREAD))
    tools = _tools(body, data.get("tools"))
    messages = with_tools(_messages(body.messages, "messages", MAX_IMAGES), tools)
    if body.chat_template_kwargs:
        messages = with_kwargs(messages, _as_json(body.chat_template_kwargs, KWARGS))
    _need(not body.continue_final_message or is_begun(messages), "continue_final_message",
          "continue_final_message goes on from an assistant's message, and the last one is none or says nothing; "
          "leave it out")
    _need(body.top_logprobs is None or body.logprobs, "top_logprobs",
          "top_logprobs needs logprobs true; send it too")
    _need(not body.logprobs or not tools, "logprobs",
          "logprobs cannot be had beside tools; leave one of them out", _UNSUPPORTED)
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return GenerationRequest(**_common(body, MAX_STOPS, num_top, "top_logprobs"), limit=limit, messages=messages,
                             tools=tools, continues=body.continue_final_message is not False)


def read_completion(data: dict) -> GenerationRequest:
    """A completion's body. Raises ApiError 400 that names the parameter."""
    body = _validated(_CompletionBody, data, ("suffix", *_UNREAD))
    _need(body.best_of in (None, body.n or 1), "best_of",
          "best_of other than n is not supported here; leave it out", _UNSUPPORTED)
    limit, has_echo = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens, bool(body.echo)
    _need(limit or (has_echo and not body.stream), "max_tokens",
          "max_tokens 0 asks for the prompt alone; send echo true with it, and no stream")
    common = _common(body, MAX_COMPLETION_STOPS, body.logprobs, "logprobs")
    _need(not (body.stream and has_echo) or body.logprobs is None, "logprobs",
          "logprobs of an echoed prompt cannot be had in a stream; leave stream out", _UNSUPPORTED)
    return GenerationRequest(**common, limit=limit, prompts=_prompts(body.prompt), has_echo=has_echo,
                             adds_special=body.add_special_tokens is not False)


def _common(body: Any, max_stops: int, num_top: int | None, top_name: str) -> dict:
    """Fields of both requests. top_name: the field for the number of top tokens."""
    sampling = _sampling(body)
    # in a stream log-probabilities are the sampler's
    _need(not (body.stream and num_top), top_name, f"{top_name} above 0 cannot be had in a stream: the likeliest "
          "tokens are found when the answer is whole; leave stream out", _UNSUPPORTED)
    _need(not body.stream or num_top is None or sampling.temperature in (0, 1), "logprobs",
          f"logprobs in a stream are those of temperature 0 or 1, not {sampling.temperature:g}; leave stream out",
          _UNSUPPORTED)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    _need(len(stops) <= max_stops and all(0 < len(s) <= 1000 for s in stops), "stop",
          f"stop takes at most {max_stops} strings of 1 to 1000 characters")
    return dict(model=body.model, sampling=sampling, least=body.min_tokens or 0, stops=tuple(map(clean, stops)),
                seed=secrets.randbits(63) if body.seed is None else body.seed, num_choices=body.n or 1,
                is_stream=bool(body.stream), num_top=num_top,
                wants_usage=bool(body.stream_options and body.stream_options.include_usage))


def _prompts(value: Any) -> list[str | list[int]]:
    """A list of prompts from a string, token ids, or a list of either (or of both)."""
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    _need(isinstance(prompts, list) and prompts, "prompt",
          "prompt must be a string, a list of strings, a list of token ids, or a list of such lists; send one")
    _need(len(prompts) <= MAX_PROMPTS, "prompt",
          f"there are {len(prompts)} prompts; send at most {MAX_PROMPTS} at once")
    for i, prompt in enumerate(prompts):
        _need(isinstance(prompt, str) or _is_ids(prompt), "prompt",
              f"prompt.{i} is neither a string nor a list of token ids, or it is empty; fix it")
    return [clean(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _sampling(body: Any) -> SamplingConfig:
    """The settings of a body, without limits of tokens."""
    settings = {name: getattr(body, name) for name in ("temperature", "top_p", "min_p", "repetition_penalty")}
    if body.top_k is not None:
        settings["top_k"] = max(body.top_k, 0)  # -1 is off in other servers
    try:
        return SamplingConfig(**{name: value for name, value in settings.items() if value is not None})
    except UserError as error:
        raise ApiError(400, str(error)) from None


def read_score(data: dict) -> tuple[list[str | list[dict]], list[str]]:
    """Prompts (text, or messages) and their completions as text. Raises ApiError 400."""
    body = _validated(_ScoreBody, data)
    _need(len(body.prompts) == len(body.completions), "completions",
          f"{len(body.prompts)} prompts but {len(body.completions)} completions; give one completion for each prompt")
    prompts = [clean(p) if isinstance(p, str) else _messages(p, f"prompts.{i}") for i, p in enumerate(body.prompts)]
    for i, prompt in enumerate(prompts):
        _need(prompt != [], "prompts", f"prompts.{i} has no messages; give one at least")
    completions = [_completion(c, f"completions.{i}") for i, c in enumerate(body.completions)]
    return prompts, completions


def read_mark(data: dict) -> Mark:
    """A mark on an answer, as the studio's page writes it. Raises ApiError 400."""
    body = _validated(_MarkBody, data)
    for name in ("completion", "is_good") if body.kind == "thumb" else ("chosen", "rejected"):
        _need(name in body.model_fields_set, name, f"{name}: a {body.kind} needs it; give it")
    prompt = _messages(body.prompt, "prompt", MAX_IMAGES)
    _need(not sources_in(prompt) and not any(m.get("tool_calls") or m["role"] == "tool" for m in prompt), "prompt",
          TEXT_ALONE)
    if body.kind == "thumb":
        return Mark("thumb", prompt, body.completion, is_good=body.is_good, is_cut=body.is_cut)
    return Mark("text" if body.how == "edited" else "pair", prompt, body.chosen, body.rejected, is_cut=body.is_cut,
                is_other_cut=body.is_other_cut)


def _completion(completion: str | list[_Message], where: str) -> str:
    if isinstance(completion, str):
        return clean(completion)
    messages = _messages(completion, where)
    _need(not any(message.get("tool_calls") for message in messages), where,
          f"{where}: a tool call in a completion cannot be scored; send the completion as text")
    return "".join(message["content"] for message in messages)


def _validated(shape: type[BaseModel], data: dict, unsupported: Sequence[str] = ()) -> Any:
    """The body in this shape. ApiError 400 for the first fault, and for an unsupported field that is not at its
    default."""
    try:
        body = shape.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        raise ApiError(400, f"{where}: {first['msg']}; fix it or leave it out",
                       param=str(first["loc"][0]) if first["loc"] else None) from None
    for name in unsupported:
        _need(not data.get(name) or data[name] == {"type": "text"}, name,
              f"{name} is not supported here; leave it out", _UNSUPPORTED)
    return body


def _messages(bodies: Sequence[_Message], where: str, max_images: int = 0) -> list[dict]:
    """Messages as templates read them; tool messages get the name of the called function."""
    messages, called = [], {}
    for i, body in enumerate(bodies):
        message = _message(body, f"{where}.{i}")
        for call in message.get("tool_calls", ()):
            called[call.get("id")] = call["function"]["name"]
        call_id = message.get("tool_call_id")
        if call_id is not None:
            _need(call_id in called, where, f"{where}.{i}.tool_call_id: {call_id[:40]!r} is the id of no call before "
                  "it; send the assistant's message with that call too")
            message["name"] = called[call_id]
        messages.append(message)
    count = len(sources_in(messages))
    _need(count <= max_images, where, f"{where}: there are {count} images, and at most {max_images} are read at once; "
          "send fewer" if max_images else f"{where}: only text is scored here; leave the images out")
    return messages


def _message(message: _Message, where: str) -> dict:
    _need(message.role in _ROLES, where,
          f"{where}.role: {message.role[:40]!r} is not a role; choose {', '.join(_ROLES)}")
    parts = message.content if isinstance(message.content, list) else [_Part(text=message.content or "")]
    _need(all(part.type in ("text", "image_url") for part in parts), where,
          f"{where}.content: only text and image_url can be read here")
    urls = [source_of(part.image_url) for part in parts if part.type == "image_url"]
    row: dict = {"role": _ROLES[message.role], "content": clean("".join(
        IMAGE if part.type == "image_url" else (part.text or "").replace(IMAGE, "\ufffd") for part in parts))}
    if urls:
        _need(message.role != "assistant", where, f"{where}.content: an answer has no images; send them as the user's")
        _need(all(isinstance(url, str) and re.match("data:image/[^,]{,80};base64,", url) for url in urls), where,
              f"{where}.content: an image is read from a data URL (data:image/png;base64,...), never from an address "
              "or a file; send the image itself")
        row[IMAGES] = urls
    _need(not message.tool_calls or message.role == "assistant", where,
          f"{where}.tool_calls: only the assistant calls tools; leave them out")
    if message.tool_calls:
        row["tool_calls"] = [_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(message.tool_calls)]
    if message.role == "tool":
        names = {"name": message.name, "tool_call_id": message.tool_call_id}
        row |= {key: clean(value) for key, value in names.items() if value is not None}
    return row


def _call(call: _Call, where: str) -> dict:
    """A call with its arguments as an object, as in templates and rows for SFT."""
    arguments = _as_json(call.function.arguments, f"{where}.function.arguments")
    _need(isinstance(arguments, dict), where, f"{where}.function.arguments: the arguments must be a JSON object; "
          'send {"name": value, ...} as text')
    names = {} if call.id is None else {"id": clean(call.id)}
    return names | {"type": "function", "function": {"name": clean(call.function.name), "arguments": arguments}}


def _tools(body: _ChatBody, value: Any) -> list[dict]:
    """The tools in the form of rows for SFT; empty if none may be called. ApiError 400 for unsupported options."""
    _need(body.tool_choice in (None, "auto", "none"), "tool_choice",
          "tool_choice can be auto or none here: the model cannot be made to call a tool; leave it out", _UNSUPPORTED)
    _need(body.parallel_tool_calls is not False, "parallel_tool_calls",
          "parallel_tool_calls false is not supported here; leave it out", _UNSUPPORTED)
    functions = [tool.function for tool in body.tools or ()]
    for i, function in enumerate(functions):
        _need(not function.strict, "tools", f"tools.{i}.function.strict is not supported here: arguments are not "
              "forced into the schema; leave it out", _UNSUPPORTED)
        _need(all(function.name != other.name for other in functions[:i]), "tools",
              f"tools.{i}.function.name: there are two tools called {function.name}; name each once")
    tools = tools_of(_as_json(value, "tools")) if functions else []
    return [] if body.tool_choice == "none" else tools


def _as_json(value: Any, where: str) -> Any:
    """A JSON value, possibly as text ("" means no arguments), within bounds of depth and without lone surrogates."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return loads(clean(json.dumps(loads(text or "{}"), ensure_ascii=False)))
    except (ValueError, RecursionError) as error:  # a parsed value may be too deep to be written
        raise ApiError(400, f"{where}: not valid JSON ({why(error)[:200]}); fix it",
                       param=where.split(".")[0]) from None
