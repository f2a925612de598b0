"""Episodes whose every word is written down before: conversations with calls of a tool that takes its time.

The model is random and draws what it draws; when a turn has its length, what was drawn is replaced by what is written
(`WrittenTurns`; peers/trl_episodes.py does the same). So both sides decode, parse, call and read the same tokens, with
turns of any lengths, and a step of decoding costs what it costs. The template is Qwen2.5's as TRL ships it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import harness  # noqa: F401 - the checkout on the path

from hybrid_rlhf.engine.decode.multi_turn import Turns
from hybrid_rlhf.engine.decode.request import Request
from hybrid_rlhf.environments.contract import Environments, environment_of
from hybrid_rlhf.models.tokenizer import train_tokenizer
from hybrid_rlhf.rollout import Prompts

END, CALLED = "<|im_end|>", '<tool_call>\n{"name": "look", "arguments": {"place": "kabor"}}\n</tool_call>'
CALL_TOKENS = 21  # of CALLED, the line before it and END
WORDS = [a + b + c for a in ("ka", "lo", "mi", "ne", "ru", "sa") for b in ("bo", "de", "fi", "gu", "ta", "vo")
         for c in ("r", "n", "l", "s", "")]


class Place:
    """The environment of both sides: a row's `seconds` say how long each call takes, `answer` what it answers."""

    def reset(self, seconds: list, answer: str, **_row: object) -> None:
        self.seconds, self.answer = list(seconds), answer

    def look(self, place: str) -> str:
        """Looks at a place.

        Args:
            place: The place's name.
        """
        if seconds := self.seconds.pop(0):
            time.sleep(seconds)
        return self.answer


class Talk(NamedTuple):
    """rows: one for each episode, as TRL's dataset has them: prompt, seconds, answer. turns: the tokens of each turn of
    the model, by row. added: those that stand between two turns."""

    tokenizer: object
    environments: Environments
    rows: list[dict]
    turns: list[list[list[int]]]
    added: list[int]

    @property
    def prompts(self) -> Prompts:
        columns = {name: [row[name] for row in self.rows] for name in self.rows[0]}
        return Prompts([[1]] * len(self.rows), [row["prompt"][0]["content"] for row in self.rows], columns)

    @property
    def responses(self) -> list[list[int]]:
        """All tokens behind the prompt, by row."""
        return [list(chain(turns[0], *([*self.added, *turn] for turn in turns[1:]))) for turns in self.turns]

    @property
    def most(self) -> int:
        """Tokens of the longest response."""
        return max(map(len, self.responses))


class WrittenTurns:
    """Turns (engine/decode/multi_turn.py) whose requests end where the talk's do, and then say what is written there.
    The engine under them knows no stop tokens."""

    def __init__(self, turns: Turns, talk: Talk) -> None:
        self._turns, self._talk = turns, talk
        self.release, self.stops = turns.release, frozenset([talk.tokenizer.eos_token_id])  # type: ignore[attr-defined]
        self._num_said = [0] * len(talk.rows)

    @property
    def is_busy(self) -> bool:
        return self._turns.is_busy

    def submit(self, request: Request) -> None:
        request.limit = len(self._written(request))
        self._turns.submit(request)

    def step(self) -> list[Request]:
        ended = self._turns.step()
        for request in ended:
            request.tokens[:] = self._written(request)
            self._num_said[request.number] += 1
        return ended

    def _written(self, request: Request) -> list[int]:
        return self._talk.turns[request.number][self._num_said[request.number]]


def write(lengths: Sequence[Sequence[int]], group: int, num_added: int, longest: float) -> Talk:
    """lengths: tokens of each turn, of each episode; the last turn calls nothing. group: episodes of one prompt.
    num_added: tokens between two turns. longest: seconds of the slowest call; they are drawn evenly from 0 on."""
    draws, tokenizer = random.Random(0), _tokenizer()
    environments = Environments([environment_of("place", Place, {}, "place")], False)
    count = num_added - len(ids_of(tokenizer, _between("")))
    answer = " ".join(draws.choices(WORDS, k=count))
    rows, turns = [], []
    for number, (*calls, last) in enumerate(lengths):
        asked = [{"role": "user", "content": f"Where is the {WORDS[number // group]}?"}]
        rows.append({"prompt": asked, "seconds": [draws.uniform(0, longest) for _ in calls], "answer": answer})
        texts = [" ".join(draws.choices(WORDS, k=size - CALL_TOKENS)) + f"\n{CALLED}{END}" for size in calls]
        texts.append(" ".join(draws.choices(WORDS, k=last - 1)) + END)
        turns.append([ids_of(tokenizer, text) for text in texts])
        if list(map(len, turns[-1])) != list(lengths[number]):
            raise ValueError(f"turns of {lengths[number]} tokens are not to be had: {texts}")
    return Talk(tokenizer, environments, rows, turns, ids_of(tokenizer, _between(answer)))


def ids_of(tokenizer, text: str) -> list[int]:  # noqa: ANN001
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _between(answer: str) -> str:
    """What Qwen2.5's template writes between a call and the next turn."""
    return (f"\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response>{END}\n"
            "<|im_start|>assistant\n")


def _tokenizer():  # noqa: ANN202
    """Byte-level BPE that knows all words of the conversations, and Qwen2.5's markers and template."""
    folder = find_spec("trl").submodule_search_locations[0]
    template = (Path(folder) / "chat_templates/qwen2_5.jinja").read_text(encoding="utf-8")
    texts = [template.replace("\\n", "\n"), "".join(f" {w}" for w in WORDS), *WORDS, f'"{WORDS[0]}"', CALLED,
             _between("")]
    tokenizer = train_tokenizer(texts * 3, 2000)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = template
    return tokenizer
