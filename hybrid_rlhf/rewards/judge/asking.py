"""Questions to a judge: each asked once, read strictly, asked again where it cannot be read, cached and counted."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import is_main
from hybrid_rlhf.core.strict_json import to_json
from hybrid_rlhf.core.text_safety import escape_control
from hybrid_rlhf.rewards import BadAnswer
from hybrid_rlhf.rewards.judge.judge_backend import Backend, Failure
from hybrid_rlhf.rewards.judge.judge_prompts import Chat, correction
from hybrid_rlhf.rewards.judge.verdicts import Unreadable

T = TypeVar("T")
SHOWN = 80  # characters of a reply
KEPT = 20_000  # replies in memory, where no folder is given


def _end(reply: str) -> str:
    """What a message shows of a reply: its last words, where the verdict should stand."""
    words = escape_control(" ".join(reply.split()))
    return words if len(words) <= SHOWN else f"...{words[-SHOWN:]}"


@dataclass(frozen=True)
class Question(Generic[T]):
    """A chat, and what reads the judge's reply to it (raising Unreadable)."""

    chat: Chat
    read: Callable[[str], T]


@dataclass
class Counts:
    """What became of questions: asked in all, answered by the cache, asked again as the reply could not be read, and
    without an answer in the end."""

    questions: int = 0
    cached: int = 0
    again: int = 0
    failed: int = 0


@dataclass
class Asker:
    """What a backend answers, through a cache. retries: how often it is told that its reply cannot be read."""

    backend: Backend
    cache: AnswerCache
    name: str
    max_new_tokens: int = 512
    retries: int = 1
    seed: int = 0
    counts: Counts = field(default_factory=Counts)

    def verdicts(self, questions: Sequence[Question[T]]) -> list[T | Failure]:
        """What the judge says to each, as read. Raises BadAnswer where nobody answers any more, once all that was
        answered is in the cache."""
        keys = [key_of(self.backend.identity, self.max_new_tokens, self.seed, q.chat) for q in questions]
        found = self._known(keys, lambda i, reply: questions[i].read(reply) if isinstance(reply, str) else None)
        waiting = {key: (questions[i], questions[i].chat) for i, key in enumerate(keys) if key not in found}
        for attempt in range(self.retries + 1):
            self.counts.again += len(waiting) * (attempt > 0)
            waiting = self._round(waiting, found)
        return self._all(keys, found)

    def probabilities(self, chats: Sequence[Chat], words: Sequence[Sequence[str]]) -> list[list[float] | Failure]:
        """For each chat the probability of each of its words as the reply's beginning. Raises BadAnswer as above."""
        keys = [key_of(self.backend.identity, "choose", of, chat) for chat, of in zip(chats, words, strict=True)]
        found = self._known(keys, lambda i, reply: _numbers(reply, len(words[i])))
        for kind in dict.fromkeys(map(tuple, words)):
            asked = {key: chat for key, chat, of in zip(keys, chats, words, strict=True)
                     if key not in found and tuple(of) == kind}
            places = list(asked)
            with closing(self.backend.choose(list(asked.values()), kind)) as answers:
                for i, answer in answers:
                    found[places[i]] = answer
                    if isinstance(answer, Failure):
                        continue
                    if sum(answer) > 0:
                        self.cache.put(places[i], answer)
                    else:
                        found[places[i]] = Failure(f"none of {', '.join(kind)} is likely to be said")
        return self._all(keys, found)

    def _known(self, keys: list[str], read: Callable) -> dict:
        """What the cache knows, by key."""
        found = {}
        for i, key in enumerate(keys):
            reply = self.cache.get(key)
            try:
                value = None if reply is None else read(i, reply)
            except Unreadable:  # the file was edited
                value = None
            if value is not None:
                found[key] = value
        self.counts.questions += len(set(keys))
        self.counts.cached += len(found)
        return found

    def _round(self, waiting: dict[str, tuple[Question, Chat]], found: dict) -> dict[str, tuple[Question, Chat]]:
        """Ask once; returns what is to be asked again, and in which chat. A reply is in the cache as soon as it is
        there: whatever ends the process in the midst of a round, nobody pays for it twice."""
        if not waiting:
            return {}
        again, places = {}, list(waiting)
        chats = [chat for _, chat in waiting.values()]
        with closing(self.backend.complete(chats, self.max_new_tokens, self.seed)) as replies:
            for i, reply in replies:
                key, question = places[i], waiting[places[i]][0]
                if isinstance(reply, Failure):
                    found[key] = reply
                    continue
                try:
                    found[key] = question.read(reply)
                except Unreadable as error:
                    found[key] = Failure(f"the reply cannot be read: {error}; it ends {_end(reply)!r}")
                    again[key] = (question, correction(question.chat, reply, str(error)))
                else:
                    self.cache.put(key, reply)
        return {key: again[key] for key in places if key in again}  # in the order of the questions, not of arrival

    def _all(self, keys: list[str], found: dict) -> list:
        failures = [found[key] for key in dict.fromkeys(keys) if isinstance(found[key], Failure)]
        self.counts.failed += len(failures)
        fatal = next((each for each in failures if each.is_fatal), None)
        if fatal is not None:
            raise BadAnswer(f"reward source {self.name} at {self.backend.name}: {fatal.what}; {fatal.cure}, then run "
                            "the same command again")
        return [found[key] for key in keys]


def _numbers(reply: object, count: int) -> list[float] | None:
    """Cached probabilities, if they are such."""
    if not isinstance(reply, list) or len(reply) != count:
        return None
    is_fine = all(isinstance(x, (int, float)) and math.isfinite(x) and x >= 0 for x in reply) and sum(reply) > 0
    return reply if is_fine else None


def key_of(*content: object) -> str:
    """The name of a question: whoever changes model, rubric, template or response asks another one."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:40]


class AnswerCache:
    """Replies that could be read, by `key_of` the question. folder: where they are kept in `judge.jsonl`, one a line,
    which several processes may append to; None: the newest KEPT of them last while the process does."""

    def __init__(self, folder: str | None = None) -> None:
        self._known: OrderedDict[str, object] = OrderedDict()
        self._file: Path | None = None
        self.num_unreadable = 0
        if folder is None:
            return
        self._file = Path(folder) / "judge.jsonl"
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._read(self._file)
        except OSError as error:
            raise UserError(f"reward.judge.cache {folder} cannot be used ({error.strerror}); give another folder"
                            ) from error

    def get(self, key: str) -> object | None:
        """The reply, or None."""
        return self._known.get(key)

    def put(self, key: str, reply: str | Sequence[float]) -> None:
        self._known[key] = reply
        if self._file is None:
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
            return
        line = to_json({"key": key, "reply": reply}) + "\n"
        handle = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, line.encode())  # one write: lines of several processes do not mix
        except OSError as error:
            raise UserError(f"reward.judge.cache: {self._file} cannot be written ({error.strerror}); make room, or "
                            "give another folder") from error
        finally:
            os.close(handle)

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        text = path.read_bytes()
        for line in text.splitlines():
            try:
                row = json.loads(line)
                self._known[row["key"]] = row["reply"]
            except (ValueError, KeyError, TypeError):
                self.num_unreadable += 1  # the last one of a process that was killed, or someone's edit
        if text and not text.endswith(b"\n"):
            with open(path, "ab") as file:
                file.write(b"\n")
        if self.num_unreadable and is_main():
            print(f"reward.judge.cache: {self.num_unreadable} lines of {path} cannot be read and are asked anew",
                  file=sys.stderr)
