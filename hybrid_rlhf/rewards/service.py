"""JSON over HTTP, with retries; and a reward service as a source: POST {"prompts": [...], "completions": [...]} ->
{"scores": [...]}."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.parse import urlsplit

from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.errors import escape_control
from hybrid_rlhf.core.strict_json import loads, to_json, why
from hybrid_rlhf.rewards import BadAnswer
from hybrid_rlhf.rewards.functions import inputs
from hybrid_rlhf.rollout import Rollout

T = TypeVar("T")

TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # too busy or gone for now (RFC 9110, RFC 6585)
MAX_WAIT = 60.0  # seconds before a request is made again
MAX_BYTES = 1 << 24  # of an answer


# -- JSON over HTTP ----------------------------------------------------------------------------------------------------


class Status(Exception):  # noqa: N818 - an answer
    """An answer with a status that is not success; the message has the server's explanation, on one line."""

    def __init__(self, error: urllib.error.HTTPError) -> None:
        text = error.read(10_000).decode("utf-8", "replace")
        with suppress(ValueError, LookupError, TypeError):  # vLLM, Mistral and Google have other forms than OpenAI's
            fault = json.loads(text)["error"]
            text = str(fault["message"] if isinstance(fault, dict) else fault)
        words = escape_control(" ".join(text.split()))
        super().__init__(f"answered status {error.code} ({error.reason}){': ' * bool(words)}{words}")
        self.code, self.retry_after = error.code, error.headers.get("Retry-After")


class Unanswered(Exception):  # noqa: N818 - raised for the last error of several
    """A request that failed for good after `num_tries`. fault: the last error."""

    def __init__(self, fault: Exception, num_tries: int) -> None:
        super().__init__(" ".join(str(fault).split()) or type(fault).__name__)
        self.fault, self.num_tries = fault, num_tries


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follow no redirect: a key goes to the configured address only."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirect)


def post(url: str, data: object, timeout: float, headers: Mapping[str, str] = {}, max_bytes: int = MAX_BYTES) -> Any:
    """The JSON that answers a POST of `data`. Raises Status; ValueError for an answer that is too long or not JSON;
    OSError or HTTPException where there is none within `timeout` seconds."""
    request = urllib.request.Request(url, to_json(data).encode(), {"Content-Type": "application/json", **headers})
    try:
        with _opener.open(request, timeout=timeout) as answer:
            text, missing = answer.read(max_bytes + 1), answer.length
    except urllib.error.HTTPError as error:
        with error:
            raise Status(error) from None
    if len(text) > max_bytes:
        raise ValueError(f"answered more than {max_bytes} bytes")
    if missing or not text:
        raise ConnectionResetError("the connection was closed in the midst of the answer")
    try:
        return loads(text.decode())
    except ValueError as error:
        raise ValueError(f"answered no JSON ({why(error)})") from None


def retried(ask: Callable[[], T], retries: int, back_off: float) -> T:
    """`ask()`, repeated up to `retries` times after a failed connection and a status of TRY_AGAIN, each time after
    twice the wait, or the server's Retry-After in seconds. Raises Unanswered."""
    num_tries = 0
    while True:
        num_tries += 1
        wait = back_off * 2 ** (num_tries - 1)
        try:
            return ask()
        except (Status, ValueError) as error:
            fault: Exception = error
            is_final = not isinstance(error, Status) or error.code not in TRY_AGAIN
            with suppress(ValueError):  # a date
                wait = max(wait, float(getattr(error, "retry_after", None) or 0))
        except (OSError, HTTPException) as error:  # refused, reset, unknown host, timeout, half an answer
            fault, is_final = error, False
        if is_final or num_tries > retries:
            raise Unanswered(fault, num_tries) from fault
        time.sleep(min(wait, MAX_WAIT))


# -- the reward service ------------------------------------------------------------------------------------------------


@dataclass
class ServiceSource:
    """Scores of a service, `batch_size` responses per request; prompts and completions in the form of `FunctionSource`.

    A score may be null: the response is skipped. timeout, retries, back_off: of `post` and `retried`. A request that
    fails for good is BadAnswer with the service and the responses.
    """

    url: str
    name: str = "service"
    timeout: float = 60.0
    retries: int = 3
    batch_size: int = 64
    back_off: float = 0.5

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        check(parts.scheme in ("http", "https") and bool(parts.hostname),
              f"reward.url is {self.url!r}; give an address such as http://localhost:8000/score")
        self._shown = f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"

    def score(self, rollout: Rollout) -> list:
        columns, out = inputs(rollout), []
        for first in range(0, len(rollout), self.batch_size):
            part = {name: columns[name][first : first + self.batch_size] for name in ("prompts", "completions")}
            out += self._asked(part, first)
        return out

    def _asked(self, part: dict[str, list], first: int) -> list:
        """The scores of the responses from number `first` on."""
        size = len(part["completions"])
        try:
            answer = retried(lambda: post(self.url, part, self.timeout), self.retries, self.back_off)
            scores = answer.get("scores") if isinstance(answer, dict) else None
            if isinstance(scores, list) and len(scores) == size:
                return scores
            what = (f"answered {len(scores)} scores" if isinstance(scores, list) else
                    f'answered {answer!r:.80}, and not {{"scores": [...]}}')
        except Unanswered as error:
            what = f"{error!s:.300}" + (f" after {error.num_tries} tries" if error.num_tries > 1 else "")
        raise BadAnswer(f"reward source {self.name} at {self._shown}: {what}, for {size} responses from response "
                        f"{first} on; fix the service, then run the same command again")
