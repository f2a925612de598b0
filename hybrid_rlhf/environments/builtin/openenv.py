"""A client for environments behind an OpenEnv server: reset, step, observations as JSON."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from hybrid_rlhf.core.errors import UserError, check
from hybrid_rlhf.core.strict_json import loads, to_json
from hybrid_rlhf.rewards import text_of
from hybrid_rlhf.rewards.service import Status, post


class _Refused(Exception):
    """The server rejects an action or a reset as invalid."""


@dataclass
class OpenEnv:
    """Each message of the model is an action; the observation is the answer to it, with the server's reward.

    A server or address that fails is a UserError in one line.

    Attributes:
        url: Of the server, such as http://localhost:8000.
        transport: websocket keeps one session per episode. http is for servers that keep their environment from one
            request to the next: OpenEnv 0.3's own make a new one for every POST, so that only one-step tasks work.
        action_field: The action's field that holds the message's text. None: the message is the action, as JSON; the
            model is shown the error of a message that is not a JSON object, or that the server refuses.
        observation_field: The observation's field that is shown. None: all of it as JSON, or the text of its only one.
        reset_columns: Columns of the row that are passed to the server's reset, if they exist.
        timeout: Seconds for each answer of the server.
        max_bytes: Of an answer.
    """

    url: str
    transport: str = "websocket"
    action_field: str | None = "message"
    observation_field: str | None = None
    reset_columns: list[str] = field(default_factory=lambda: ["seed", "episode_id"])
    timeout: float = 30.0
    max_bytes: int = 1_000_000

    def __post_init__(self) -> None:
        parts, at = urlsplit(self.url), "environment.options of openenv"
        check(parts.scheme in ("http", "https", "ws", "wss") and bool(parts.hostname),
              f"{at}: url is {self.url!r:.80}; give an address such as http://localhost:8000")
        check(self.transport in ("websocket", "http"), f"{at}: transport is {self.transport!r:.40}; it must be "
                                                       "websocket or http")
        check(self.timeout > 0 and self.max_bytes > 0, f"{at}: timeout and max_bytes must be above 0")
        self._shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        self._socket: Any = None  # a websocket.WebSocket

    def reset(self, **row: Any) -> str | None:
        columns = {name: row[name] for name in self.reset_columns if row.get(name) is not None}
        try:
            observation, is_over, _ = self._result(self._asked("reset", columns))
        except _Refused as error:
            raise self._failure(f"refused to reset: {error}; fix the columns that it gets (reset_columns)") from None
        check(not is_over, f"openenv at {self._shown}: the episode is over before it began; fix the row or the server")
        return f"\n{observation}" if observation else None

    def step(self, messages: list[dict]) -> tuple[list[dict], bool, float | None]:
        text = text_of(messages)
        try:
            action = {self.action_field: text} if self.action_field is not None else _action(text)
            observation, is_over, reward = self._result(self._asked("step", action))
        except _Refused as error:
            if self.action_field is not None:
                raise self._failure(f"refused an action: {error}; fix action_field or the server") from None
            observation, is_over, reward = f"error: {error}", False, None
        return [{"role": "user", "content": observation}], is_over, reward

    def _asked(self, what: str, data: dict) -> object:
        """The server's answer to a reset or a step. Raises _Refused, or UserError for a server that does not answer."""
        try:
            answer = self._by_socket(what, data) if self.transport == "websocket" else self._by_post(what, data)
        except (OSError, HTTPException, ValueError) as error:
            self._drop()
            reason = " ".join(str(error).split()) or type(error).__name__
            raise self._failure(f"{reason:.300}; fix the url or the server") from error
        if self.transport == "http" or not isinstance(answer, dict):
            return answer
        if answer.get("type") != "error":
            return answer.get("data")
        details = answer["data"] if isinstance(answer.get("data"), dict) else {}
        message = " ".join(f"{details.get('message', answer)} {details.get('errors', '')}".split())[:300]
        if details.get("code") in ("VALIDATION_ERROR", "EXECUTION_ERROR"):
            raise _Refused(message)
        self._drop()
        raise self._failure(f"{message}; fix the server (or its bound on sessions)")

    def _by_socket(self, what: str, data: dict) -> object:
        import websocket

        was_open, deadline = self._socket is not None, time.monotonic() + self.timeout
        try:
            if self._socket is None:
                address = "ws" + self.url.removeprefix("http") if self.url.startswith("http") else self.url
                # A host and no_proxy together make it ignore the environment variable http_proxy.
                no_proxy: dict[str, Any] = {"http_proxy_host": "none", "http_no_proxy": ["*"]}
                self._socket = websocket.create_connection(f"{address.rstrip('/')}/ws", self.timeout, **no_proxy)
            self._socket.settimeout(self.timeout)
            self._socket.send(to_json({"type": what, "data": data}))
            kind, content = websocket.ABNF.OPCODE_PING, b""
            while kind in (websocket.ABNF.OPCODE_PING, websocket.ABNF.OPCODE_PONG):
                self._socket.settimeout(max(deadline - time.monotonic(), 0.01))
                kind, content = self._socket.recv_data(control_frame=True)
            if kind == websocket.ABNF.OPCODE_CLOSE:
                reason = content[2:].decode("utf-8", "replace")
                raise ConnectionResetError(f"the server closed the connection {reason}".rstrip())
        except (OSError, websocket.WebSocketException) as error:
            self._drop()
            if what == "reset" and was_open:  # an expired session is reopened for a new episode
                return self._by_socket(what, data)
            if isinstance(error, websocket.WebSocketBadStatusException):
                raise ConnectionError(f"no WebSocket there (status {error.status_code}); a server without sessions "
                                      "needs transport http") from error
            raise ConnectionError(str(error)) from error
        if len(content) > self.max_bytes:
            raise ValueError(f"an answer of more than {self.max_bytes} bytes")
        return loads(content.decode())

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close(timeout=0)
            self._socket = None

    def _by_post(self, what: str, data: dict) -> object:
        address = "http" + self.url.removeprefix("ws") if self.url.startswith("ws") else self.url
        try:
            return post(f"{address.rstrip('/')}/{what}", data if what == "reset" else {"action": data}, self.timeout,
                        max_bytes=self.max_bytes)
        except Status as error:
            if error.code == 422:
                raise _Refused(f"{error!s:.300}") from None
            raise ValueError(str(error)) from None

    def _result(self, answer: object) -> tuple[str, bool, float | None]:
        """The observation's text, whether the episode is over, and the reward, None where the server gives none."""
        fields = answer if isinstance(answer, dict) else {}
        observation, reward = fields.get("observation"), fields.get("reward")
        if not isinstance(observation, dict) or not isinstance(fields.get("done", False), bool):
            raise self._failure(f"answered {answer!r:.100}; an object with observation, reward and done is needed")
        if reward is not None and not (isinstance(reward, (int, float)) and math.isfinite(reward)):
            raise self._failure(f"gave the reward {reward!r:.40}, where a finite number or null is needed")
        return self._text(observation), fields.get("done", False), None if reward is None else float(reward)

    def _text(self, observation: dict) -> str:
        if self.observation_field is not None:
            check(self.observation_field in observation,
                  f"openenv at {self._shown}: its observation has no {self.observation_field}; there are "
                  f"{', '.join(observation)[:200]}")
            value = observation[self.observation_field]
        else:
            value = next(iter(observation.values())) if len(observation) == 1 else observation
        return value if isinstance(value, str) else to_json(value)

    def _failure(self, what: str) -> UserError:
        return UserError(f"openenv at {self._shown}: {what}")


def _action(text: str) -> dict:
    """The message as a JSON object. Raises _Refused for anything else."""
    try:
        action = loads(text)
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "it cannot be read"
        raise _Refused(f"the message must be a JSON object: {reason}") from None
    if not isinstance(action, dict):
        raise _Refused("the message must be a JSON object")
    return action
