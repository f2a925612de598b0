"""The choices of one request as the engine samples them: pieces of text, tool calls, and log-probabilities."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hybrid_rlhf.data.messages import clean
from hybrid_rlhf.inference.response_text import AnswerText, TurnText
from hybrid_rlhf.inference.sequence_scores import ScoredToken
from hybrid_rlhf.inference.server.protocol import ApiError, GenerationRequest
from hybrid_rlhf.inference.server.served_model import Prompt, Served
from hybrid_rlhf.inference.server.worker import GenerationJob, Stopping, Worker
from hybrid_rlhf.models.tool_calls import parse_turn


class Piece(NamedTuple):
    """New text of a choice, or all of it. reason: why it has ended (None: it has not); calls: its tool calls in
    OpenAI's shape, if it has ended.

    With log-probabilities: drawn, the tokens of this text with the sampler's log-probabilities; ending, the token
    without text after them that ended the choice; offsets, where in the choice's text each of these begins.
    """

    index: int
    text: str = ""
    reason: str | None = None
    calls: Sequence[dict] = ()
    drawn: Sequence[ScoredToken] = ()
    ending: Sequence[ScoredToken] = ()
    offsets: Sequence[int] = ()


@dataclass(frozen=True)
class Asking:
    """One running request. job: its choices, prompt by prompt. encode: run a function in the thread for prompts."""

    model: Served
    asked: GenerationRequest
    prompts: list[Prompt]
    job: GenerationJob
    worker: Worker
    encode: Callable[..., Awaitable[Any]]

    @property
    def ends(self) -> frozenset[int]:
        return self.model.lane.serving.stops if self.model.lane.serving else frozenset()

    def prompt(self, index: int) -> Prompt:
        """The prompt of a choice."""
        return self.prompts[index // self.asked.num_choices]

    def text(self, prompt: Prompt) -> AnswerText | TurnText:
        """An empty text for one choice after `prompt`."""
        before = () if self.asked.is_chat else prompt.ids
        text = AnswerText(self.model.tokenizer, self.asked.stops, self.ends, before, is_turn=self.asked.is_chat)
        return TurnText(self.model.tokenizer, text, prompt.text) if self.asked.tools else text

    async def scores(self, ids: list[int], first: int, with_next: bool = False) -> list[ScoredToken]:
        """SequenceScorer.score, queued in the worker; ApiError if that fails."""
        try:
            return await asyncio.wrap_future(
                self.worker.score(self.model.lane, ids, first, self.asked.num_top, with_next))
        except Exception as error:
            raise failure(error) from None


def failure(error: Exception) -> ApiError:
    return ApiError(503 if isinstance(error, Stopping) else 500, f"the answer failed: {error}; try again")


async def pieces_of(asking: Asking, counts: list[int]) -> AsyncIterator[Piece]:
    """Yield pieces as they are sampled. counts: tokens of each choice, updated in place."""
    requests, ends = asking.job.requests, asking.ends
    texts = [asking.text(asking.prompt(index)) for index in range(len(requests))]
    num_left, num_said = len(texts), [0] * len(texts)
    while num_left:
        news = await asking.job.events.get()
        if isinstance(news, Exception):
            raise failure(news) from None
        index, tokens, is_last = news
        text, request = texts[index], requests[index]
        if text.has_stopped:
            yield Piece(index)
            continue
        piece = Piece(index, text.push(tokens, is_last))
        counts[index] = text.num_tokens
        if text.has_stopped:
            asking.worker.drop(asking.model.lane, asking.job, range(index, index + 1))
            piece = piece._replace(reason="stop")
        elif is_last:
            piece = piece._replace(reason="stop" if tokens[-1] in ends else "length")
        num_left -= piece.reason is not None
        if asking.asked.num_top is not None:
            first, num_said[index] = num_said[index], text.num_said(is_last)
            has_ending = is_last and tokens[-1] in ends and not text.has_stopped
            drawn = [ScoredToken(request.tokens[i], request.logprobs[i])
                     for i in range(first, num_said[index] + has_ending)]
            count = num_said[index] - first
            piece = piece._replace(drawn=drawn[:count], ending=drawn[count:],
                                   offsets=text.offsets[first : num_said[index]] + [text.length] * has_ending)
        yield await _with_calls(asking, text, piece) if piece.reason and isinstance(text, TurnText) else piece


async def _with_calls(asking: Asking, text: TurnText, last: Piece) -> Piece:
    """The last piece with the calls of its turn, or without calls with the text that was held back."""
    turn = await asking.encode(parse_turn, asking.model.encoder, text.ids, asking.asked.tools, asking.prompts[0].text)
    try:
        calls = answered_calls(turn.message.get("tool_calls", ()))
    except ValueError:  # NaN or infinity, which JSON has not
        calls = []
    if not calls:
        return last._replace(text=last.text + text.held)
    return last._replace(text=last.text + text.behind_calls(turn.message["content"]), calls=calls,
                         reason="tool_calls" if last.reason == "stop" else last.reason)


def answered_calls(calls: Sequence[dict]) -> list[dict]:
    """Calls that a model made, in OpenAI's shape. Raises ValueError for arguments that JSON cannot express.

    The id is the model's if it wrote one, else nine letters and digits: Mistral's templates accept no other.
    """
    ids, answered = [call.get("id") for call in calls], []
    for call, own_id in zip(calls, ids, strict=True):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False, allow_nan=False)
        answered.append({"id": own_id if own_id and ids.count(own_id) == 1 else secrets.token_hex(5)[:9],
                         "type": "function",
                         "function": {"name": clean(call["function"]["name"]), "arguments": clean(arguments)}})
    return answered


async def choices_of(asking: Asking, counts: list[int]) -> list[Piece]:
    """Every choice as one piece, when all have ended."""
    parts: list[list[Piece]] = [[] for _ in counts]
    async for piece in pieces_of(asking, counts):
        parts[piece.index].append(piece)
    choices = []
    for index, pieces in enumerate(parts):
        last = next(piece for piece in pieces if piece.reason)
        choices.append(Piece(index, "".join(piece.text for piece in pieces), last.reason, last.calls,
                             [token for piece in pieces for token in piece.drawn], last.ending,
                             [offset for piece in pieces for offset in piece.offsets]))
    return choices


Scored = list[ScoredToken | int]  # the first token of an echoed prompt is its id alone, without a score


async def scored(asking: Asking, choice: Piece) -> Scored | None:
    """The model's scores of the tokens of a full choice, and of an echoed prompt; None without log-probabilities."""
    prompt, asked = asking.prompt(choice.index).ids, asking.asked
    if asked.num_top is None:
        return None
    ids = [*prompt, *(token for token, *_ in choice.drawn)]
    if not asked.is_chat:
        ids += [token for token, *_ in choice.ending]
    if asked.has_echo:
        return [ids[0], *await asking.scores(ids, 1)]
    return [*await asking.scores(ids, len(prompt))]


async def read_choice(asking: Asking, index: int) -> tuple[Piece, Scored | None]:
    """A choice without tokens, or with the likeliest one, and the scores of its prompt."""
    prompt = asking.prompt(index)
    if asking.asked.limit == 0:
        choice = Piece(index, reason="length")
        return choice, await scored(asking, choice)
    scores = await asking.scores(prompt.ids, 1, with_next=True)
    last, text = scores[-1], asking.text(prompt)
    piece = text.push([last.token], is_last=True)
    if last.token in asking.ends:
        return Piece(index, piece, "stop", ending=[last], offsets=[0]), [prompt.ids[0], *scores]
    num_said = text.num_said(is_over=True)
    choice = Piece(index, piece, "stop" if text.has_stopped else "length", drawn=[last][:num_said],
                   offsets=text.offsets[:num_said])
    return choice, [prompt.ids[0], *scores[: len(scores) - 1 + num_said]]
