"""Episodes of several turns: how `Actor.generate` samples a model with tools or an environment."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.image_files import ImageRef, open_image
from hybrid_rlhf.core.tensors import KeptSets, pad_right
from hybrid_rlhf.data import chat
from hybrid_rlhf.data.added_turns import added_tokens
from hybrid_rlhf.data.messages import with_tools
from hybrid_rlhf.data.turns import in_parts
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.engine.decode.multi_turn import Turns
from hybrid_rlhf.engine.decode.request import Request, following
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.environments.calls import CallPool, Outcome, shown
from hybrid_rlhf.environments.contract import Environments, Instance
from hybrid_rlhf.environments.open import EnvironmentConfig
from hybrid_rlhf.models.template import carried, special_ids
from hybrid_rlhf.models.template_kwargs import KWARGS
from hybrid_rlhf.models.tokenizer import Tokenizer, completion_text, turn_ends
from hybrid_rlhf.models.tool_calls import parse_turn
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.rollout.episode_record import DONE, LENGTH, MAX_TURNS, NO_ROOM, Episode


@dataclass
class EpisodePlayer:
    """Samples episodes. Environments are constructed once and reset often, one for each episode of a rollout; all
    rollouts use one event loop, so that an environment may keep a session of it."""

    environments: Environments
    config: EnvironmentConfig
    tokenizer: Tokenizer
    _idle: dict[str, list[Instance]] = field(default_factory=dict)
    _used: list[Instance] = field(default_factory=list)
    _pool: CallPool | None = None

    def play(self, engine: HybridEngine, prompts: Prompts, sampling: SamplingConfig, seed: int,
             numbers: Sequence[int], keep_candidates: bool = False) -> Rollout:
        """One episode for each prompt. sampling.max_new_tokens: most tokens of a response, added messages included.
        keep_candidates: as of `Actor.generate`.

        Inside `inference()`. Raises UserError if reset, step or get_reward of an environment fails.
        """
        plays = self._begin(prompts, numbers)
        with self._calls() as pool:
            with before_update():
                self._reset(plays, prompts, pool)
            if plays:
                capacity = max(len(play.ids) for play in plays) + sampling.max_new_tokens
                with before_update():
                    turns = engine.open_turns(len(plays), capacity, sampling, keep_candidates)
                    for play, images in zip(plays, prompts.images, strict=True):
                        play.numbered = engine.prompt(play.ids, images) if images else play.ids
                EpisodeTurns(self.config, self.tokenizer, turns, pool, sampling).run(plays, seed)
        rollout = _rollout(plays, prompts, engine.pad_id, sampling)
        if keep_candidates and sampling.is_truncated:
            rollout.kept = KeptSets.of_rows([play.kept for play in plays])
        return rollout

    @contextmanager
    def _calls(self) -> Iterator[CallPool]:
        """The pool of all rollouts; a new one if the last rollout was interrupted and left calls behind."""
        if self._pool is None:
            self._pool = CallPool(self.config.num_workers, self.config.timeout)
            weakref.finalize(self, self._pool.close)  # a deleted player leaves no threads
        try:
            yield self._pool
        except BaseException:
            self._pool.close()
            self._pool = None
            raise

    def _begin(self, prompts: Prompts, numbers: Sequence[int]) -> list[Play]:
        for instance in self._used:  # the rewards of the last rollout have been computed
            if not instance.is_busy:
                self._idle.setdefault(instance.environment.name, []).append(instance)
        self._used = []
        plays = []
        for i, number in enumerate(numbers):
            row = _row(prompts, i)
            kind = self.environments.of(row)
            idle = self._idle.get(kind.name)
            self._used.append(idle.pop(0) if idle else kind.new())
            asked = chat.as_turn(self.tokenizer, row.get("prompt", prompts.texts[i]))
            plays.append(Play(number, self._used[-1], asked if isinstance(asked, list) else []))
            episode = plays[-1].episode
            episode.environment = None if self.config.isolate else self._used[-1].object
            episode.has_tools = bool(kind.schemas)
        return plays

    def _reset(self, plays: list[Play], prompts: Prompts, pool: CallPool) -> None:
        """Reset all environments concurrently, and render the prompts."""
        read = cache(open_image)  # once for all episodes of a prompt
        for i, play in enumerate(plays):
            row = self.environments.columns_of(_shown_row(prompts, i, read))
            pool.start(i, partial(play.instance.reset, row), lane=play.instance.lane)
        added: dict[int, str | None] = {}
        while pool.num_waiting:
            for i, outcome in pool.finished(wait=True):
                added[i] = value_of(outcome, plays[i].instance, "reset")
        known: dict[str, tuple[list[int], str]] = {}
        for i, play in enumerate(plays):
            schemas = play.instance.environment.schemas
            if added[i]:
                play.asked = _with_text(play.asked, added[i] or "")
            if not added[i] and not schemas:
                play.ids, play.text = prompts.ids[i], prompts.texts[i]
                continue
            key = json.dumps([play.instance.environment.name, play.asked], sort_keys=True, default=str)
            if key not in known:
                known[key] = _written(self.tokenizer, play.asked, schemas)
            play.ids, play.text = known[key]


def _row(prompts: Prompts, i: int) -> dict:
    return {name: values[i] for name, values in prompts.columns.items()}


def _shown_row(prompts: Prompts, i: int, read: Callable[[ImageRef], Any]) -> dict:
    """A row as an environment gets it: images as Pillow's in the column `images`, and as parts of messages."""
    row, images = _row(prompts, i), prompts.images[i]
    if not images:
        return row
    return row | {"prompt": in_parts(row["prompt"]), "images": list(map(read, images))}


def _written(tokenizer: Tokenizer, asked: list[dict], schemas: list[dict]) -> tuple[list[int], str]:
    """A prompt's tokens, with the tools in it, and its readable text. UserError if the template cannot render it."""
    try:
        rendered = chat.compose_prompt(tokenizer, with_tools(asked, schemas) or asked)
    except chat.SkipRow as error:
        raise UserError(f"environment: a prompt cannot be written with what the environment adds: {error}; it asks "
                        f"{asked[-1]['content']!r:.80}; leave that row out, or give another data.chat_template"
                        ) from error
    return chat.encode_all(tokenizer, [rendered])[0].ids, rendered.shown


def _with_text(asked: list[dict], text: str) -> list[dict]:
    """The prompt with an environment's text at the end of its last user message, as TRL puts it."""
    check(bool(asked) and asked[-1]["role"] == "user",
          "environment: reset answered text, and the prompt does not end with a user message to put it in; give "
          "prompts of messages, or reset that returns None")
    return [*asked[:-1], {**asked[-1], "content": asked[-1]["content"] + text}]


def _rollout(plays: list[Play], prompts: Prompts, pad_id: int, sampling: SamplingConfig) -> Rollout:
    columns = dict(prompts.columns)
    if "prompt" in columns:  # the model's prompt, with the environment's text in it
        columns["prompt"] = [text if isinstance(text, str) and play.asked[-1:] == [{"role": "user", "content": text}]
                             else play.asked or text for play, text in zip(plays, columns["prompt"], strict=True)]
    asked = Prompts([play.ids for play in plays], [play.text for play in plays], columns, prompts.images)
    episodes = [play.episode for play in plays]
    rollout = Rollout.from_responses(
        asked, [play.tokens for play in plays], [e.ended == DONE for e in episodes], pad_id,
        [e.last_text for e in episodes], [play.is_sampled for play in plays], float(sampling.temperature) or 1.0)
    rollout.sampled_logprobs = pad_right([play.logprobs for play in plays], 0.0, torch.float32)
    rollout.episodes = episodes
    return rollout


# -- The turns of episodes: the model's messages, the tool calls in them, and the answers that it reads next -----------
#
# A slow tool does not stall the other episodes: they are sampled meanwhile, and a sequence goes on when its answer has
# come. The model's turns stay the tokens that were sampled; added messages are tokenised once.


_PREFIX = 64  # tokens before a turn: a generation prompt may open a thought


@dataclass
class Play:
    """An episode in progress. number: of its draws, with the seed. asked: the prompt's messages; ids: its tokens;
    numbered: as the engine has them (HybridEngine.prompt); text: for people. tokens, is_sampled, logprobs: of the
    response so far; kept: the candidate tokens of each sampled one, if they are recorded; request: its last turn.
    to_call: calls of that turn still to be made; answers: the messages of those before. awaited: the call of the
    environment that runs."""

    number: int
    instance: Instance
    asked: list[dict] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    numbered: list[int] = field(default_factory=list)
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
            self.turns.submit(Request(play.number, play.numbered or play.ids, self._limit(play), seed, may_go_on=True))
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
            messages = in_parts([*play.asked, *episode.messages])
            assert isinstance(messages, list)
            self._ask(play, "step", partial(play.instance.step, messages))
        else:
            self._end(play, DONE)

    def _parsed(self, play: Play, request: Request) -> tuple[dict, list[str]]:
        schemas = play.instance.environment.schemas
        if schemas:
            prefix = self.tokenizer.decode([token for token in request.prompt[-_PREFIX:] if token >= 0])  # no image's
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


# -- Replay of recorded episodes without their environments: to see what a model did, and why --------------------------


def replay(engine: HybridEngine, records: Sequence[dict], sampling: SamplingConfig) -> list[tuple[list, list]]:
    """Sample the turns of each episode again: ([tokens of each turn], [logprobs of each]) per episode.

    records: `Episode.replay_record`, which samples.jsonl has for the samples that it shows ("replay"). With the weights
    and settings of the original, the same tokens are drawn; the environment's messages are taken from the record. An
    episode that is drawn differently ends at the turn that differs. Only inside `inference()`.
    """
    drawn: list[tuple[list, list]] = [([], []) for _ in records]
    if not records:
        return drawn
    length = max(len(r["prompt_ids"]) + sum(len(t["added"]) + t["limit"] for t in r["turns"]) for r in records)
    turns = engine.open_turns(len(records), length, sampling)
    places = {}
    for place, record in enumerate(records):
        request = Request(record["number"], record["prompt_ids"], record["turns"][0]["limit"], record["seed"],
                          may_go_on=True)
        places[id(request)] = place, 0
        turns.submit(request)
    while turns.is_busy:
        for request in turns.step():
            place, number = places.pop(id(request))
            drawn[place][0].append(list(request.tokens))
            drawn[place][1].append(list(request.logprobs))
            left = records[place]["turns"][number:]
            if len(left) < 2 or list(request.tokens) != left[0]["said"]:
                turns.release(request)
                continue
            after = following(request, left[1]["added"], left[1]["limit"])
            places[id(after)] = place, number + 1
            turns.submit(after)
    return drawn
