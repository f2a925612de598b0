"""A reward service over HTTP as a source: POST {"prompts": [...], "completions": [...]} -> {"scores": [...]}."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import NoReturn
from urllib.parse import urlsplit

from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.function_worker import one_line
from hybrid_rlhf.rewards import BadAnswer
from hybrid_rlhf.rewards.functions import inputs
from hybrid_rlhf.rewards.user_code import within
from hybrid_rlhf.rollout import Rollout

TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # too busy or gone for now (RFC 9110, RFC 6585)


@dataclass
class ServiceSource:
    """Scores of a service, `batch_size` responses per request; prompts and completions in the form of `FunctionSource`.

    A score may be null: the response is skipped. A request without an answer in `timeout` seconds, or with a status of
    TRY_AGAIN, is retried up to `retries` times after back_off, 2 back_off, 4 back_off ... seconds. Any other failure,
    and the last one, is BadAnswer with the service and the responses.
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
        size, attempt = len(part["completions"]), 0
        while True:
            try:
                answer = within(self.timeout, lambda: self._post(part))
            except urllib.error.HTTPError as error:
                if error.code not in TRY_AGAIN or attempt >= self.retries:
                    self._fail(f"answered status {error.code} ({error.reason})", first, size, attempt)
            except (OSError, HTTPException) as error:  # refused, reset, unknown host, timeout, half an answer
                if attempt >= self.retries:
                    self._fail(one_line(error), first, size, attempt)
            except Exception as error:  # not HTTP, not JSON
                self._fail(f"{type(error).__name__}: {one_line(error)}", first, size, attempt)
            else:
                return self._scores_of(answer, first, size, attempt)
            time.sleep(self.back_off * 2**attempt)
            attempt += 1

    def _scores_of(self, answer: object, first: int, size: int, attempt: int) -> list:
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list):
            self._fail(f"answered {answer!r:.80}, and not {{\"scores\": [...]}}", first, size, attempt)
        if len(scores) != size:
            self._fail(f"answered {len(scores)} scores", first, size, attempt)
        return scores

    def _post(self, part: dict[str, list]) -> object:
        request = urllib.request.Request(self.url, json.dumps(part).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self.timeout) as answer:
            return json.loads(read_body(answer))

    def _fail(self, what: str, first: int, size: int, attempt: int) -> NoReturn:
        tries = f" after {attempt + 1} tries" if attempt else ""
        raise BadAnswer(f"reward source {self.name} at {self._shown}: {what}{tries}, for {size} responses from "
                        f"response {first} on; fix the service, then run the same command again") from None


def read_body(answer: HTTPResponse, most: int | None = None) -> bytes:
    """The body, stripped; at most `most` + 1 bytes are read. ConnectionResetError for an incomplete one."""
    text = answer.read() if most is None else answer.read(most + 1)
    is_cut = most is not None and len(text) > most  # by us
    text = text.strip()
    if not text or (text.startswith(b"{") and not text.endswith(b"}") and not is_cut):  # of one without Content-Length
        raise ConnectionResetError("the connection was closed in the midst of the answer")
    return text
