"""A judge behind an OpenAI-compatible address: POST {url}/chat/completions, several requests at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from socket import gaierror
from threading import Event
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from hybrid_rlhf.core.config import check
from hybrid_rlhf.data.row_images import sources_in
from hybrid_rlhf.rewards.judge.asking import Arriving, Budget, Failure
from hybrid_rlhf.rewards.judge.judge_prompts import Chat, as_parts
from hybrid_rlhf.rewards.service import TRY_AGAIN, Status, Unanswered, post, retried

T = TypeVar("T")

OF_ONE_CHAT = (400, 413, 422)  # the fault of one request (too long?), perhaps not of the next
SHOWN = 200  # characters of a failure, after the key is masked: no part of it is left at the cut
TOP_LOGPROBS = 20  # candidates of the first token that are requested: OpenAI's maximum
PATH = "/chat/completions"


class _Wrong(Exception):  # noqa: N818 - never leaves this file
    """An answer that is not a chat completion; the message says why."""


@dataclass
class ApiBackend:
    """Replies of `model` at `url` (with or without /chat/completions at its end).

    timeout, retries, back_off: of rewards/service.py's `post` and `retried`. What still fails is a Failure of that chat
    alone, and a fatal one if every other request would fail too. key_env: the variable that holds the key, which is
    read when this is made and never shown.
    """

    url: str
    model: str
    budget: Budget
    key_env: str | None = None
    options: dict[str, object] = field(default_factory=dict)
    temperature: float = 0.0
    concurrency: int = 8
    timeout: float = 60.0
    retries: int = 3
    back_off: float = 0.5
    reads_images: bool = False
    _key: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        check(parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.username,
              "reward.judge.url is not an http address without a name or password in it; give one such as "
              "http://localhost:8000/v1, and the key by reward.judge.api_key_env")
        path = parts.path.rstrip("/")
        path = path if path.endswith(PATH) else path + PATH
        self._address = urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))
        self.name = f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{path}"
        self.identity = ["url", self.name, self.model, self.options, self.temperature]
        if self.key_env is not None:
            self._key = _key_of(self.key_env)

    def open(self) -> None:
        """Nothing to load."""

    def complete(self, chats: Sequence[Chat], max_new_tokens: int, seed: int) -> Arriving[str]:
        return self._all(chats, {"max_tokens": max_new_tokens, "seed": seed}, self._text)

    def choose(self, chats: Sequence[Chat], words: Sequence[str]) -> Arriving[list[float]]:
        return self._all(chats, {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP_LOGPROBS},
                         lambda choice: _probabilities(choice, words))

    def _all(self, chats: Sequence[Chat], fields: dict[str, object], read: Callable[[dict[str, Any]], T]
             ) -> Arriving[T]:
        """What `read` makes of the answer to each chat, several requests at a time; none is sent after a fatal
        failure, nor in the place of one whose answer the caller has not kept yet."""
        ended = Event()

        def one(chat: Chat) -> T | Failure:
            result = self._tried(chat, fields, read, ended)
            if isinstance(result, Failure) and result.is_fatal:
                ended.set()
            return result

        if not chats:
            return
        pool = ThreadPoolExecutor(min(self.concurrency, len(chats)), thread_name_prefix="judge")
        try:
            waiting = iter(enumerate(chats))
            places = {pool.submit(one, chat): i for i, chat in islice(waiting, self.concurrency)}
            while places:
                for done in wait(places, return_when=FIRST_COMPLETED).done:
                    yield places.pop(done), done.result()
                    places |= {pool.submit(one, chat): i for i, chat in islice(waiting, 1)}
        finally:
            ended.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _tried(self, chat: Chat, fields: dict[str, object], read: Callable[[dict[str, Any]], T],
               ended: Event) -> T | Failure:
        most, not_asked = self._most_tokens(chat, fields), Failure("not asked, as others failed")

        def ask() -> T | Failure:
            if ended.is_set():
                return not_asked
            with self.budget.call(*most) as spent:
                if spent is not None:
                    return spent
                return not_asked if ended.is_set() else read(self._choice(chat, fields))

        try:
            return retried(ask, self.retries, self.back_off)
        except _Wrong as error:
            return Failure(self._clean(str(error))[:SHOWN])
        except Unanswered as error:
            code = error.fault.code if isinstance(error.fault, Status) else None
            cure = ("see to that" if code is None else
                    f"set the variable that reward.judge.api_key_env names{' to another key' * bool(self._key)}"
                    if code in (401, 403) else "give another reward.judge.url or reward.judge.api_model")
            reason = getattr(error.fault, "reason", error.fault)
            is_fatal = (isinstance(reason, (ConnectionRefusedError, gaierror)) if code is None else
                        code not in (*TRY_AGAIN, *OF_ONE_CHAT))
            return Failure(self._clean(str(error))[:SHOWN], is_fatal, cure)

    def _choice(self, chat: Chat, fields: dict[str, object]) -> dict[str, Any]:
        """The one choice of the answer to a chat; its tokens go to the budget."""
        body = {"model": self.model, "messages": as_parts(chat), "temperature": self.temperature}
        body = body | fields | self.options
        answer = post(self._address, {name: value for name, value in body.items() if value is not None}, self.timeout,
                      {"Authorization": f"Bearer {self._key}"} if self._key else {})
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise _Wrong(f"answered no choices: {answer!r}")
        if len(choices) != 1:
            raise _Wrong(f"answered {len(choices)} choices, and one was asked for")
        usage = answer.get("usage")
        self.budget.pay(_tokens(usage, "prompt_tokens", chat), _tokens(usage, "completion_tokens", choices))
        return choices[0]

    def _most_tokens(self, chat: Chat, fields: dict[str, object]) -> tuple[int, int | None]:
        """The most tokens that a request may read and write: one per byte of the chat and per 16 x 16 pixels of its
        images, and the bound of the reply, None if api_options leaves it out."""
        body = fields | self.options
        bounds = [n for n in (body.get("max_completion_tokens"), body.get("max_tokens")) if isinstance(n, int)]
        pixels = sum(image.width * image.height for image in sources_in(chat))
        num_bytes = len(json.dumps(chat, ensure_ascii=False).encode("utf-8", "replace"))
        return num_bytes + pixels // 256, min(bounds, default=None)

    def _text(self, choice: dict[str, Any]) -> str:
        message = choice.get("message")
        text = message.get("content") if isinstance(message, dict) else None
        if not isinstance(text, str) and choice.get("finish_reason") == "length":
            raise _Wrong("answered nothing within reward.judge.max_new_tokens, which thoughts may have taken")
        if not isinstance(text, str):
            raise _Wrong(f"answered a choice without text: {choice!r}")
        return self._clean(text)

    def _clean(self, text: str) -> str:
        """The text with the key masked, in case the server echoes it."""
        return text.replace(self._key, "[key]") if self._key else text


def _key_of(variable: str) -> str:
    """The key in an environment variable. No message shows the variable's name, which may be a key given by mistake."""
    key = os.environ.get(variable, "").strip()
    check(bool(key), "the environment variable that reward.judge.api_key_env names is not set; export it, or leave "
                     "reward.judge.api_key_env out")
    check(key.isascii() and key.isprintable() and " " not in key,
          "the environment variable that reward.judge.api_key_env names holds no key; it must be one word of ASCII")
    return key


def _tokens(usage: object, name: str, content: object) -> int:
    """The server's count of tokens; without one, a quarter of the characters."""
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) and count >= 0 else len(json.dumps(content)) // 4


def _probabilities(choice: dict[str, Any], words: Sequence[str]) -> list[float]:
    """The probability of each word, summed over the top first tokens, stripped; 0 for one that is not among them."""
    try:
        tops = choice["logprobs"]["content"][0]["top_logprobs"]
        candidates = [(str(each["token"]).strip(), float(each["logprob"])) for each in tops]
    except (KeyError, IndexError, TypeError, ValueError):
        raise _Wrong("answered without top_logprobs, which reward.judge.score probability needs") from None
    if any(math.isnan(value) for _, value in candidates):
        raise _Wrong("answered with a log-probability that is not a number")
    return [sum(math.exp(min(value, 0.0)) for token, value in candidates if _begins(token, word)) for word in words]


def _begins(token: str, word: str) -> bool:
    """Whether a first token is the word or, if it has several letters, its beginning: yes, Y (but not a for A)."""
    return token == word or (len(word) > 1 and bool(token) and word.lower().startswith(token.lower()))
