"""Questions to a judge: asked of a backend within a budget, cached, counted, and asked again after a reply that cannot
be parsed. The backends are a local model (local_backend.py) and an address (api_backend.py)."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import is_main
from hybrid_rlhf.core.errors import escape_control
from hybrid_rlhf.core.strict_json import to_json
from hybrid_rlhf.rewards import BadAnswer
from hybrid_rlhf.rewards.judge.judge_prompts import Chat, keyed
from hybrid_rlhf.rewards.judge.verdicts import Unreadable, without_thoughts

T = TypeVar("T")
SHOWN = 80  # characters of a reply
KEPT = 20_000  # replies in memory, without a cache folder


# -- a backend and its budget ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """A question without an answer. is_fatal: whether every later question would fail too (unknown address, refused
    key, spent budget). cure: what the user can do then."""

    what: str
    is_fatal: bool = False
    cure: str = "see to that"


Arriving = Generator[tuple[int, T | Failure], None, None]  # a chat's index and its answer, as it arrives


class Backend(Protocol):
    """name: for messages. identity: all that its answers depend on, as JSON, for the cache's keys. reads_images:
    whether it takes chats with images; known once it is open.

    Answers are yielded one by one, in any order, so that the caller can cache each at once; `close` of the generator
    cancels the requests that are not sent yet.
    """

    name: str
    identity: list
    reads_images: bool

    def open(self) -> None:
        """Load what there is to load, once."""
        ...

    def complete(self, chats: Sequence[Chat], max_new_tokens: int, seed: int) -> Arriving[str]:
        """The reply to each chat."""
        ...

    def choose(self, chats: Sequence[Chat], words: Sequence[str]) -> Arriving[list[float]]:
        """For each chat the probability that the reply begins with each word."""
        ...


@dataclass
class Budget:
    """Calls and costs of one process; thread-safe. None: no bound. Prices are per million tokens.

    The most that a call may cost is reserved while it is in flight. A call that does not fit beside the others waits
    for them, in the end until it is alone: so max_cost is exceeded by less than that one call.
    """

    max_calls: int | None = None
    max_cost: float | None = None
    input_price: float = 0.0
    output_price: float = 0.0
    calls: int = 0
    cost: float = 0.0
    num_input: int = 0
    num_output: int = 0
    _longest: int = field(default=0, repr=False)  # tokens of the longest answer so far
    _in_flight: list[float] = field(default_factory=list, repr=False)  # the most that each call may cost
    _lock: threading.Condition = field(default_factory=threading.Condition, repr=False)

    @contextmanager
    def call(self, most_input: int = 0, most_output: int | None = 0) -> Iterator[Failure | None]:
        """Reserve one more call of at most so many tokens for the block, in which `pay` records its tokens; yields a
        Failure if the budget is spent. most_output: None if there is no bound: the longest answer so far counts."""
        most = 0.0
        with self._lock:
            while (spent := self._spent()) is None:
                most = self._price(most_input, self._longest if most_output is None else most_output)
                if self.max_cost is None or not self._in_flight or (
                        self.cost + sum(self._in_flight) + most <= self.max_cost):
                    self.calls += 1
                    self._in_flight.append(most)
                    break
                self._lock.wait()
        try:
            yield spent
        finally:
            if spent is None:
                with self._lock:
                    self._in_flight.remove(most)
                    self._lock.notify_all()

    def pay(self, num_input: int, num_output: int) -> None:
        """Record the tokens of one answer."""
        with self._lock:
            self.num_input += num_input
            self.num_output += num_output
            self._longest = max(self._longest, num_output)
            self.cost += self._price(num_input, num_output)

    def _spent(self) -> Failure | None:
        if self.max_calls is not None and self.calls >= self.max_calls:
            return Failure(f"reward.judge.max_calls is spent ({self.calls} calls)", True, "raise it")
        if self.max_cost is not None and self.cost >= self.max_cost:
            return Failure(f"reward.judge.max_cost is spent ({self.cost:.4g} of {self.max_cost:g})", True, "raise it")
        return None

    def _price(self, num_input: int, num_output: int) -> float:
        return (num_input * self.input_price + num_output * self.output_price) / 1e6


# -- questions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question(Generic[T]):
    """A chat, and the parser of the judge's reply to it (which raises Unreadable)."""

    chat: Chat
    read: Callable[[str], T]


@dataclass
class Counts:
    """Numbers of questions: in all, answered by the cache, asked again after an unreadable reply, and without an answer
    in the end."""

    questions: int = 0
    cached: int = 0
    again: int = 0
    failed: int = 0


@dataclass
class Asker:
    """Asks a backend, through a cache. retries: how often it is asked again after a reply that cannot be read."""

    backend: Backend
    cache: AnswerCache
    max_new_tokens: int = 512
    retries: int = 1
    seed: int = 0
    counts: Counts = field(default_factory=Counts)

    def verdicts(self, questions: Sequence[Question[T]]) -> list[T | Failure]:
        """The parsed reply to each question. Raises BadAnswer after a fatal failure, when all replies are in the
        cache."""
        keys = [key_of(self.backend.identity, self.max_new_tokens, self.seed, keyed(q.chat)) for q in questions]
        results = self._known(keys, lambda i, reply: questions[i].read(reply))
        waiting = {key: (each, each.chat) for key, each in zip(keys, questions, strict=True) if key not in results}
        for attempt in range(self.retries + 1):
            if not waiting:
                break
            again: dict[str, tuple[Question[T], Chat]] = {}
            places, chats = list(waiting), [chat for _, chat in waiting.values()]
            self.counts.again += len(waiting) * (attempt > 0)
            with closing(self.backend.complete(chats, self.max_new_tokens, self.seed)) as replies:
                for i, reply in replies:
                    key, question = places[i], waiting[places[i]][0]
                    if isinstance(reply, Failure):
                        results[key] = reply
                        continue
                    try:
                        results[key] = question.read(reply)
                    except Unreadable as error:
                        results[key] = Failure(f"the reply cannot be read: {error}; it ends {_end(reply)!r}")
                        again[key] = (question, correction(question.chat, reply, str(error)))
                    else:  # at once: it is not paid for twice if the process dies before the others arrive
                        self.cache.put(key, reply)
            waiting = {key: again[key] for key in places if key in again}  # in the order of the questions
        return self._all(keys, results)

    def probabilities(self, chats: Sequence[Chat], words: Sequence[Sequence[str]]) -> list[list[float] | Failure]:
        """For each chat the probability that the reply begins with each word. Raises BadAnswer as `verdicts`."""
        keys = [key_of(self.backend.identity, "choose", of, keyed(chat)) for chat, of in zip(chats, words, strict=True)]
        results = self._known(keys, lambda _, reply: reply)
        for kind in dict.fromkeys(map(tuple, words)):
            asked = {key: chat for key, chat, of in zip(keys, chats, words, strict=True)
                     if key not in results and tuple(of) == kind}
            places = list(asked)
            with closing(self.backend.choose(list(asked.values()), kind)) as answers:
                for i, answer in answers:
                    results[places[i]] = answer
                    if isinstance(answer, Failure):
                        continue
                    if sum(answer) > 0:
                        self.cache.put(places[i], answer)
                    else:
                        results[places[i]] = Failure(f"none of {', '.join(kind)} is likely to be said")
        return self._all(keys, results)

    def _known(self, keys: list[str], read: Callable) -> dict:
        """The cached results, by key."""
        results = {}
        for i, key in enumerate(keys):
            reply = self.cache.get(key)
            with suppress(Unreadable):  # the file was edited
                if reply is not None:
                    results[key] = read(i, reply)
        self.counts.questions += len(set(keys))
        self.counts.cached += len(results)
        return results

    def _all(self, keys: list[str], results: dict) -> list:
        failures = [results[key] for key in dict.fromkeys(keys) if isinstance(results[key], Failure)]
        self.counts.failed += len(failures)
        fatal = next((each for each in failures if each.is_fatal), None)
        if fatal is not None:
            raise BadAnswer(f"reward source judge at {self.backend.name}: {fatal.what}; {fatal.cure}, then run the "
                            "same command again")
        return [results[key] for key in keys]


def _end(reply: str) -> str:
    """The end of a reply, for a message: the verdict should stand there."""
    words = escape_control(" ".join(reply.split()))
    return words if len(words) <= SHOWN else f"...{words[-SHOWN:]}"


def correction(chat: Chat, reply: str, what: str) -> Chat:
    """The chat that asks again, after a reply that could not be read for the reason `what`. It omits the judge's
    thoughts, as chat templates do in earlier turns."""
    again = (f"Your reply cannot be read: {what}. Answer once more, and end with the one JSON object that was asked "
             "for, with nothing behind it.")
    answer = without_thoughts(reply).strip() or "(nothing)"
    return [*chat, {"role": "assistant", "content": answer}, {"role": "user", "content": again}]


def key_of(*content: object) -> str:
    """The cache key of a question: another model, rubric, template or response gives another key."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:40]


class AnswerCache:
    """Replies that could be read, by `key_of` the question. folder: where `judge.jsonl` keeps them, one a line; several
    processes may append to it. None: the newest KEPT replies are kept in memory."""

    def __init__(self, folder: str | None = None) -> None:
        self._known: OrderedDict[str, object] = OrderedDict()
        self._file: Path | None = None
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
        with open(self._file, "ab", 0, opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(line.encode())  # one write: lines of several processes do not mix

    def _read(self, path: Path) -> None:
        if not path.exists():
            return
        text, num_unreadable = path.read_bytes(), 0
        for line in text.splitlines():
            try:
                row = json.loads(line)
                self._known[row["key"]] = row["reply"]
            except ValueError:
                num_unreadable += 1  # the last one of a process that was killed
        if text and not text.endswith(b"\n"):
            with open(path, "ab") as file:
                file.write(b"\n")
        if num_unreadable and is_main():
            print(f"reward.judge.cache: {num_unreadable} lines of {path} cannot be read and are asked anew",
                  file=sys.stderr)
