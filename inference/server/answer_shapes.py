"""What the server answers, in OpenAI's shapes: chat completions, completions, and the log-probabilities of both."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence

from hybrid_rlhf.data.transcripts import clean
from hybrid_rlhf.inference.sequence_scores import ScoredToken
from hybrid_rlhf.inference.token_text import TokenText

_LEAST = -9999.0  # OpenAI's number for what is as good as impossible; JSON has none for minus infinity


class ChatShapes:
    """The objects of one chat completion, all under one id. counts: (prompt tokens, completion tokens)."""

    def __init__(self, model: str) -> None:
        self._frame = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def chunk(self, index: int, delta: dict, finish_reason: str | None = None, logprobs: dict | None = None) -> dict:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._frame | {"object": "chat.completion.chunk", "choices": [choice]}

    def usage_chunk(self, counts: tuple[int, int]) -> dict:
        return self._frame | {"object": "chat.completion.chunk", "choices": [], "usage": usage(counts)}

    def whole(self, said: list[tuple[str, Sequence[dict]]], finish_reasons: list[str | None],
              counts: tuple[int, int], logprobs: Sequence[dict | None]) -> dict:
        """said: text and tool calls of each choice."""
        messages = [{"role": "assistant", "content": text or None, "refusal": None, "tool_calls": calls} if calls else
                    {"role": "assistant", "content": text, "refusal": None} for text, calls in said]
        choices = [{"index": i, "message": message, "logprobs": numbers, "finish_reason": reason}
                   for i, (message, reason, numbers) in enumerate(zip(messages, finish_reasons, logprobs, strict=True))]
        return self._frame | {"object": "chat.completion", "choices": choices, "usage": usage(counts)}


class CompletionShapes:
    """The same of one completion, whose whole and whose chunks have one shape."""

    def __init__(self, model: str) -> None:
        self._frame = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()),
                       "model": model}

    def of(self, choices: list[dict], counts: tuple[int, int] | None = None) -> dict:
        """counts: of a whole answer, or of a stream's last chunk."""
        return self._frame | {"choices": choices} | ({} if counts is None else {"usage": usage(counts)})


def completion_choice(index: int, text: str, reason: str | None, logprobs: dict | None) -> dict:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def answered_calls(calls: Sequence[dict]) -> list[dict]:
    """Calls that a model made, in OpenAI's shape. Raises ValueError for arguments that JSON has no word for.

    An id is the model's own where it said one, else of nine letters and figures: Mistral's templates take no other.
    """
    given = [call.get("id") for call in calls]
    return [{"id": own if own and given.count(own) == 1 else secrets.token_hex(5)[:9], "type": "function", "function": {
        "name": clean(call["function"]["name"]),
        "arguments": clean(json.dumps(call["function"]["arguments"], ensure_ascii=False, allow_nan=False))}}
        for call, own in zip(calls, given, strict=True)]


def usage(counts: tuple[int, int]) -> dict:
    return {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}


def event(found: dict) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(found, ensure_ascii=False).encode() + b"\n\n"


def chat_logprobs(texts: TokenText, scored: Sequence[ScoredToken]) -> dict:
    """`choices[].logprobs` of a chat completion or of a chunk of its stream."""

    def shown(token: int, logprob: float) -> dict:
        text, data = texts.of(token)
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": data}

    return {"content": [shown(each.token, each.logprob) | {"top_logprobs": [shown(*pair) for pair in each.top]}
                        for each in scored], "refusal": None}


def completion_logprobs(texts: TokenText, scored: Sequence[ScoredToken | int], offsets: Sequence[int]) -> dict:
    """`choices[].logprobs` of a completion. scored: a token that nothing stands before is its id alone, and has null
    for its numbers. offsets: where in the choice's text each token begins.

    The likeliest tokens are a dict by text, with the token itself beside them; of two tokens of one text it has the
    likelier.
    """

    def tops(each: ScoredToken) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, logprob in (*each.top, (each.token, each.logprob)):
            found.setdefault(texts.of(token)[0], max(logprob, _LEAST))
        return found

    return {"tokens": [texts.of(each if isinstance(each, int) else each.token)[0] for each in scored],
            "token_logprobs": [None if isinstance(each, int) else max(each.logprob, _LEAST) for each in scored],
            "top_logprobs": [None if isinstance(each, int) else tops(each) for each in scored],
            "text_offset": list(offsets)}
