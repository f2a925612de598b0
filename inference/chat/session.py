"""State of a chat: the models that answer, their histories, and a reward model that scores answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.options import expanded

if TYPE_CHECKING:
    from hybrid_rlhf.inference.conversation import Conversation
    from hybrid_rlhf.inference.scorer import Scorer

ROLES = ("system", "user", "assistant", "tool")
_KEYS = ("role", "content", "tool_calls", "name", "tool_call_id")  # of a message
_TOOLS = 'give a JSON list of {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'


@dataclass
class Session:
    """chat_models: the models by name, each with its own history; current: the one that answers, unless all do.

    is_comparing: every question goes to all of them. scorer: a reward model, whose score is shown while is_scoring.
    """

    chat_models: dict[str, Conversation]
    current: str = ""
    is_comparing: bool = False
    scorer: Scorer | None = None
    is_scoring: bool = False
    asked: list[str] = field(default_factory=list)  # the models that answered the last question

    def __post_init__(self) -> None:
        self.current = self.current or list(self.chat_models)[-1]

    @property
    def model(self) -> Conversation:
        return self.chat_models[self.current]

    def speakers(self) -> list[str]:
        """The models that answer the next question."""
        self.asked = list(self.chat_models) if self.is_comparing else [self.current]
        return self.asked

    def score(self, name: str) -> float | None:
        """The reward model's score of the last answer of `name`; None if scoring is off or there is no answer."""
        messages = self.chat_models[name].messages
        if not self.is_scoring or self.scorer is None or not messages or messages[-1]["role"] != "assistant":
            return None
        if messages[-1].get("tool_calls"):  # no answer yet
            return None
        return self.scorer.score([messages[:-1]], [messages[-1]["content"]])[0]

    def take_back(self) -> str:
        """Forget the last question and its answers; returns the question. UserError if there is none."""
        histories = [self.chat_models[name].messages for name in self.asked or [self.current]]
        check(last_question(histories[0]) is not None, "there is no question to take back")
        for messages in histories:
            place = last_question(messages)
            if place is not None:
                question = messages[place]["content"]
                del messages[place:]
        return question

    def set_tools(self, tools: list[dict]) -> None:
        """Set the tools of every model. UserError for a model whose template does not support tools."""
        from hybrid_rlhf.models.tool_calls import check_tools

        for model in self.chat_models.values() if tools else ():
            check_tools(model.tokenizer)
        for model in self.chat_models.values():
            model.tools = tools

    def set_template(self, text: str | None) -> dict[str, list[str]]:
        """Set variables of the chat templates, as JSON; returns, by model, those that its template does not read."""
        from hybrid_rlhf.core.strict_json import loads
        from hybrid_rlhf.models.template_kwargs import check_kwargs, set_defaults, split_kwargs

        where = "--chat_template_kwargs"
        try:
            kwargs = loads(text or "{}")
        except ValueError:
            kwargs = text
        check_kwargs(kwargs, where)
        unread = {}
        for name, model in self.chat_models.items():
            values, rest = split_kwargs(model.tokenizer, kwargs)
            set_defaults(model.tokenizer, values, where)
            unread |= {name: rest} if rest else {}
        return unread

    def answer_call(self, text: str) -> str | None:
        """Answer the first open tool call of each model; returns the function of a call that is still open, or None.
        UserError if no model has called a tool."""
        callers = [model for model in self.chat_models.values() if model.open_calls()]
        check(bool(callers), "/tool: no model has called a tool; ask something first (--tools FILE gives it tools)")
        for model in callers:
            model.answer_call(text)
        return next((model.open_calls()[0]["function"]["name"] for model in callers if model.open_calls()), None)

    def answered(self) -> list[str]:
        """The models whose tool calls have been answered, and which are to continue; without any, those whose last
        answer can be continued."""
        last = {name: model.messages[-1] for name, model in self.chat_models.items() if model.messages}
        called = [name for name, message in last.items() if message["role"] == "tool"]
        return called or [name for name in self.asked or [self.current]
                          if name in last and last[name]["role"] == "assistant" and not last[name].get("tool_calls")]

    def load(self, path: str) -> int:
        """Continue a conversation that /save wrote (or any jsonl row with messages); returns the number of messages.
        The row's tools replace the current ones."""
        messages, tools = read_conversation(path)
        if tools:
            self.set_tools(tools)
        for model in self.chat_models.values():
            model.messages = [dict(m) for m in messages]
        return len(messages)

    def set_system(self, text: str) -> None:
        """Set the system message of every model, and reset the conversations."""
        for model in self.chat_models.values():
            model.system = text or None
            model.reset()

    def history(self) -> Iterator[str]:
        from hybrid_rlhf.inference.conversation import shown_call

        for message in self.model.messages:
            calls = map(shown_call, message.get("tool_calls", ()))
            yield f"{message['role']}: {chr(10).join(filter(None, (message['content'], *calls)))}"


def last_question(messages: list[dict]) -> int | None:
    return next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), None)


def read_conversation(path: str) -> tuple[list[dict], list[dict]]:
    """The messages and the tools in the first row of a jsonl file. Raises UserError for anything else."""
    from hybrid_rlhf.data.messages import messages_of, tools_of
    from hybrid_rlhf.data.turns import SkipRow

    cure = "give a file that /save wrote"
    row = _read(path, "/load:", "conversation", cure, is_row=True)
    rows = row.get("messages") if isinstance(row, dict) else None
    check(isinstance(rows, list) and bool(rows) and all(map(_is_message, rows)),
          f"{path} holds no conversation: its first row has no messages of role and content; {cure}")
    try:
        messages = messages_of([{key: m[key] for key in _KEYS if key in m} for m in rows], "messages")
        tools = tools_of(row.get("tools"))
    except (SkipRow, TypeError, ValueError) as error:
        raise UserError(f"{path} holds no conversation: {error}; {cure}") from error
    _check_tools(tools, path)
    return messages, tools


def _is_message(message: object) -> bool:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        return False
    content = message.get("content")
    return isinstance(content, str) or (content is None and bool(message.get("tool_calls")))


def read_tools(path: str) -> list[dict]:
    """The list of tools in a file. Raises UserError for anything else."""
    from hybrid_rlhf.data.messages import tools_of

    tools = _read(path, "--tools", "tools", _TOOLS)
    check(isinstance(tools, list) and bool(tools), f"{path} holds no tools: it is not a list of them; {_TOOLS}")
    _check_tools(tools, path)
    return tools_of(tools)


def _check_tools(tools: list, path: str) -> None:
    for number, tool in enumerate(tools, 1):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        check(isinstance(function, dict) and isinstance(function.get("name"), str),
              f"{path}: tool {number} has no name; {_TOOLS}")


def _read(path: str, where: str, what: str, cure: str, is_row: bool = False) -> object:
    """The JSON value in a file, or in its first line. Raises UserError for a file without one."""
    from hybrid_rlhf.core.strict_json import loads
    from hybrid_rlhf.data.messages import clean

    path = expanded(path)
    try:
        text = Path(path).read_bytes().decode("utf-8")
        value = loads(text.partition("\n")[0] if is_row else text)
        return loads(clean(json.dumps(value, ensure_ascii=False)))  # without lone surrogates
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; {cure}") from error
    except ValueError as error:
        raise UserError(f"{path} holds no {what}: {'its first line' if is_row else 'it'} is not JSON; {cure}"
                        ) from error
