"""What happens in a chat: the models that answer, their histories, and the reward model that judges."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.given_paths import check_file, expanded

if TYPE_CHECKING:
    from hybrid_rlhf.inference.conversation import Conversation
    from hybrid_rlhf.inference.scorer import Scorer

ROLES = ("system", "user", "assistant")


@dataclass
class Session:
    """chat_models: the models by name, each with a history of its own; current: who answers when not all do.

    is_comparing: every question goes to all of them. scorer: a reward model, whose score is shown while is_scoring.
    """

    chat_models: dict[str, Conversation]
    current: str = ""
    is_comparing: bool = False
    scorer: Scorer | None = None
    is_scoring: bool = False
    asked: list[str] = field(default_factory=list)  # who answered the last question

    def __post_init__(self) -> None:
        self.current = self.current or list(self.chat_models)[-1]

    @property
    def model(self) -> Conversation:
        return self.chat_models[self.current]

    def speakers(self) -> list[str]:
        """Who answers the next question."""
        self.asked = list(self.chat_models) if self.is_comparing else [self.current]
        return self.asked

    def score(self, name: str) -> float | None:
        """The reward model's score of the last answer of `name`; None where none is wanted or there is no answer."""
        messages = self.chat_models[name].messages
        if not self.is_scoring or self.scorer is None or not messages or messages[-1]["role"] != "assistant":
            return None
        return self.scorer.score([messages[:-1]], [messages[-1]["content"]])[0]

    def take_back(self) -> str:
        """Forget the last question and its answers; returns the question. UserError if there is none."""
        found = [last_question(self.chat_models[name].messages) for name in self.asked or [self.current]]
        check(bool(found) and found[0] is not None, "there is no question to take back")
        for name in self.asked or [self.current]:
            messages = self.chat_models[name].messages
            place = last_question(messages)
            if place is not None:
                question = messages[place]["content"]
                del messages[place:]
        return question

    def load(self, path: str) -> int:
        """Go on from a conversation that /save wrote (or any jsonl row with messages); returns how many were read."""
        messages = read_conversation(path)
        for model in self.chat_models.values():
            model.messages = [dict(m) for m in messages]
        return len(messages)

    def set_system(self, text: str) -> None:
        """A new system message for every model; each conversation starts anew."""
        for model in self.chat_models.values():
            model.system = text or None
            model.reset()

    def history(self) -> Iterator[str]:
        for message in self.model.messages:
            yield f"{message['role']}: {message['content']}"


def last_question(messages: list[dict[str, str]]) -> int | None:
    return next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), None)


def read_conversation(path: str) -> list[dict[str, str]]:
    """The messages in the first row of a jsonl file. Raises UserError for anything else."""
    from hybrid_rlhf.data.transcripts import clean
    from hybrid_rlhf.inference.conversation import BAD_PATH

    path = expanded(path)
    check_file(path, "/load:")
    try:
        with Path(path).open("rb") as file:
            line = file.readline(2**24)
    except BAD_PATH as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}; give a file that /save "
                        "wrote") from error
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} holds no conversation: its first line is no JSON; "
                        "give a file that /save wrote") from error
    messages = row.get("messages") if isinstance(row, dict) else None
    is_fine = isinstance(messages, list) and messages and all(
        isinstance(m, dict) and m.get("role") in ROLES and isinstance(m.get("content"), str) for m in messages)
    check(bool(is_fine), f"{path} holds no conversation: its first row has no messages of role and content; "
                         "give a file that /save wrote")
    return [{"role": m["role"], "content": clean(m["content"])} for m in messages]
