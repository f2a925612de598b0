"""Episodes of several turns: how `Actor.generate` samples a model with tools or an environment."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.tensors import KeptSets, pad_right
from hybrid_rlhf.data import chat
from hybrid_rlhf.data.messages import with_tools
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.environments.calls import CallPool
from hybrid_rlhf.environments.contract import Environments, Instance
from hybrid_rlhf.environments.settings import EnvironmentConfig
from hybrid_rlhf.models.tokenizer import Tokenizer
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.rollout.episode_record import DONE
from hybrid_rlhf.rollout.episode_turns import EpisodeTurns, Play, before_update, value_of


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
        for i, play in enumerate(plays):
            row = self.environments.columns_of(_row(prompts, i))
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
    asked = Prompts([play.ids for play in plays], [play.text for play in plays], columns)
    episodes = [play.episode for play in plays]
    rollout = Rollout.from_responses(
        asked, [play.tokens for play in plays], [e.ended == DONE for e in episodes], pad_id,
        [e.last_text for e in episodes], [play.is_sampled for play in plays], float(sampling.temperature) or 1.0)
    rollout.sampled_logprobs = pad_right([play.logprobs for play in plays], 0.0, torch.float32)
    rollout.episodes = episodes
    return rollout
