"""The turns of episodes: the model's messages, the tool calls in them, and the answers that it reads next.

A slow tool does not stall the other episodes: they are sampled meanwhile, and a sequence goes on when its answer has
come. The model's turns stay the tokens that were sampled; added messages are tokenised once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

from torch import Tensor

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.added_turns import added_tokens
from hybrid_rlhf.engine.decode.multi_turn import Turns
from hybrid_rlhf.engine.decode.request import Request, following
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.environments.calls import CallPool, Outcome
from hybrid_rlhf.environments.contract import Instance
from hybrid_rlhf.environments.settings import EnvironmentConfig
from hybrid_rlhf.environments.text_of_answers import shown
from hybrid_rlhf.models.template import carried, special_ids
from hybrid_rlhf.models.template_kwargs import KWARGS
from hybrid_rlhf.models.tokenizer import Tokenizer, completion_text, turn_ends
from hybrid_rlhf.models.tool_calls import parse_turn
from hybrid_rlhf.rollout.episode_record import DONE, LENGTH, MAX_TURNS, NO_ROOM, Episode

_PREFIX = 64  # tokens before a turn: a generation prompt may open a thought


@dataclass
class Play:
    """An episode in progress. number: of its draws, with the seed. asked: the prompt's messages; ids: its tokens; text:
    the same for people. tokens, is_sampled, logprobs: of the response so far; kept: the candidate tokens of each
    sampled one, if they are recorded; request: its last turn. to_call: calls of that turn still to be made; answers:
    the messages of those before. awaited: the call of the environment that runs."""

    number: int
    instance: Instance
    asked: list[dict] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    episode: Episode = field(default_factory=Episode)
    tokens: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    request: Request | None = None
    to_call: list[dict] = field(default_factory=list)
    answers: list[dict] = field(default_factory=list)
    awaited: str = ""


@dataclass
class EpisodeTurns:
    """Plays episodes to their ends. sampling.max_new_tokens: most tokens of a response, added messages included."""

    config: EnvironmentConfig
    tokenizer: Tokenizer
    turns: Turns
    pool: CallPool
    sampling: SamplingConfig

    def run(self, plays: Sequence[Play], seed: int) -> None:
        """Raises UserError if an environment's step or get_reward fails, or the template refuses its messages."""
        by_number = {play.number: play for play in plays}
        for play in plays:
            play.episode.seed, play.episode.number = seed, play.number
            self.turns.submit(Request(play.number, play.ids, self._limit(play), seed, may_go_on=True))
        while self.turns.is_busy or self.pool.num_waiting:
            ended = self.turns.step() if self.turns.is_busy else ()
            with before_update():
                for request in ended:
                    self._turn_ended(by_number[request.number], request)
                for number, outcome in self.pool.finished(wait=not self.turns.is_busy):
                    self._answered(by_number[number], outcome)

    def _limit(self, play: Play, num_added: int = 0) -> int:
        """Most tokens of the next turn."""
        left = self.sampling.max_new_tokens - len(play.tokens) - num_added
        return min(left, self.config.max_new_tokens_per_turn or left)

    # -- the model's turn --------------------------------------------------------------------------------------------

    def _turn_ended(self, play: Play, request: Request) -> None:
        episode, kind, play.request = play.episode, play.instance.environment, request
        episode.turn_starts.append(len(play.tokens))
        episode.limits.append(request.limit)
        play.tokens += request.tokens
        play.is_sampled += [True] * len(request.tokens)
        play.logprobs += request.logprobs
        play.kept += request.kept
        episode.turn_ends.append(len(play.tokens))
        if kind.has_step or self.config.malformed_penalty:
            episode.turn_rewards.append(0.0)
        message, errors = self._parsed(play, request)
        episode.messages.append(message)
        if request.tokens[-1] not in self.turns.stops:
            self._end(play, LENGTH)
        elif errors:
            episode.num_malformed += len(errors)
            if self.config.malformed_penalty:
                episode.turn_rewards[-1] -= self.config.malformed_penalty
            self._go_on(play, message, [_answer("tool", f"error: {error}") for error in errors])
        elif message.get("tool_calls"):
            episode.num_calls += len(message["tool_calls"])
            play.to_call, play.answers = list(message["tool_calls"]), []
            self._call(play)
        elif kind.has_step:
            self._ask(play, "step", partial(play.instance.step, [*play.asked, *episode.messages]))
        else:
            self._end(play, DONE)

    def _parsed(self, play: Play, request: Request) -> tuple[dict, list[str]]:
        schemas = play.instance.environment.schemas
        if schemas:
            prefix = self.tokenizer.decode(list(request.prompt[-_PREFIX:]))
            return parse_turn(self.tokenizer, self._without_stop(request.tokens), schemas, prefix)
        text = completion_text(self.tokenizer, request.tokens, request.tokens[-1] in self.turns.stops)
        return {"role": "assistant", "content": text}, []

    def _without_stop(self, tokens: list[int]) -> list[int]:
        """A turn without a special token that ends it by the model's settings but not in its template (GLM's
        <|observation|>, the header of the next message): that is not part of the message."""
        is_foreign = tokens[-1] in self.turns.stops and tokens[-1] not in turn_ends(self.tokenizer)
        return tokens[:-1] if is_foreign and tokens[-1] in special_ids(self.tokenizer).values() else tokens

    # -- the environment's -------------------------------------------------------------------------------------------

    def _call(self, play: Play) -> None:
        call = play.to_call[0]["function"]
        self._ask(play, "tool", partial(play.instance.call, call["name"], call["arguments"]),
                  partial(shown, max_chars=self.config.max_answer_chars))

    def _ask(self, play: Play, what: str, call: Any, then: Any = None) -> None:
        play.awaited = what
        self.pool.start(play.number, call, then, play.instance.lane)

    def _answered(self, play: Play, outcome: Outcome) -> None:
        if play.awaited == "tool":
            self._tool_answered(play, outcome)
        elif play.awaited == "step":
            added, is_done, reward = value_of(outcome, play.instance, "step")
            play.episode.turn_rewards[-1] += reward or 0.0
            if is_done:
                play.episode.messages += added
                self._end(play, DONE)
            else:
                self._go_on(play, play.episode.messages[-1], added)
        else:
            play.episode.reward = _number(value_of(outcome, play.instance, "get_reward"), play.instance)

    def _tool_answered(self, play: Play, outcome: Outcome) -> None:
        episode, call = play.episode, play.to_call.pop(0)
        text = outcome.value if outcome.error is None else f"error: {outcome.error}"
        episode.num_late += outcome.is_late
        episode.num_failed += outcome.error is not None and not outcome.is_late
        episode.num_cut += outcome.error is None and len(text) > self.config.max_answer_chars
        play.answers.append(_answer(call["function"]["name"], text))
        if play.to_call:
            self._call(play)
        else:
            self._go_on(play, episode.messages[-1], play.answers)

    def _go_on(self, play: Play, message: dict, added: list[dict]) -> None:
        """Start the model's next turn after the messages `added`, unless the episode ends and they are dropped."""
        request = play.request
        assert request is not None
        if len(play.episode.turn_ends) >= self.config.max_turns:
            return self._end(play, MAX_TURNS)
        ids = added_tokens(self.tokenizer, message, added, request.tokens[-1] in turn_ends(self.tokenizer),
                           carried(play.asked).get(KWARGS))
        ids = ids[ids[:1] == request.tokens[-1:]:]  # a header that the model has already begun
        limit = self._limit(play, len(ids))
        if limit < 1:
            return self._end(play, NO_ROOM)
        play.episode.messages += added
        play.tokens += ids
        play.is_sampled += [False] * len(ids)
        play.logprobs += [0.0] * len(ids)
        self.turns.submit(following(request, ids, limit))
        return None

    def _end(self, play: Play, reason: str) -> None:
        play.episode.ended = reason
        assert play.request is not None
        self.turns.release(play.request)
        if play.instance.environment.has_reward:
            self._ask(play, "get_reward", play.instance.reward)


@contextmanager
def before_update() -> Iterator[None]:
    """Mark a UserError of the block as raised before the update: no weight has changed, so the run can resume before
    this step. Broken logits of the model are not such an error."""
    try:
        yield
    except UserError as error:
        error.is_before_update = True
        raise


def value_of(outcome: Outcome, instance: Instance, what: str) -> Any:
    """The value of a call that an episode cannot do without; UserError if it failed."""
    if outcome.error is None:
        return outcome.value
    cure = f"{what} needs longer: raise environment.timeout" if outcome.is_late else "fix the environment"
    raise UserError(f"environment {instance.environment.name}: {outcome.error}; {cure}")


def _number(value: Any, instance: Instance) -> float | None:
    value = value.item() if hasattr(value, "item") else value
    if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
        raise UserError(f"environment {instance.environment.name}: get_reward answered {value!r:.60}, where a finite "
                        "number or None is needed")
    return None if value is None else float(value)


def _answer(name: str, content: str) -> dict:
    return {"role": "tool", "name": name, "content": content}
