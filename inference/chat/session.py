"""State of a chat (its models with their histories, and a reward model), and the slash commands that change it. A
command is one function and one row of COMMANDS."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hybrid_rlhf.core.config import UserError, check, nearest
from hybrid_rlhf.core.image_files import MAX_PIXELS, ImageError, ImageRef, look_at, scaled
from hybrid_rlhf.core.options import expanded
from hybrid_rlhf.core.strict_json import loads
from hybrid_rlhf.data import cache
from hybrid_rlhf.data.messages import clean, messages_of, tools_of
from hybrid_rlhf.data.row_images import Files, column_of, listed, placed, resolved, sources_in
from hybrid_rlhf.data.turns import IMAGE, IMAGES, SkipRow
from hybrid_rlhf.inference.conversation import Conversation, image_reader, shown_call
from hybrid_rlhf.models.images import ImageReader
from hybrid_rlhf.models.template_kwargs import check_kwargs, set_defaults, split_kwargs
from hybrid_rlhf.models.tool_calls import check_tools

if TYPE_CHECKING:
    from hybrid_rlhf.inference.scorer import Scorer

SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "min_new_tokens", "seed")
ROLES = ("system", "user", "assistant", "tool")
_KEYS = ("role", "content", "tool_calls", "name", "tool_call_id")  # of a message
_TOOLS = 'give a JSON list of {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'


@dataclass
class Session:
    """chat_models: the models by name, each with its own history; current: the one that answers, unless all do.

    is_comparing: every question goes to all of them. scorer: a reward model, whose score is shown while is_scoring.
    images: go with the next question. more: commands of a model that learns (teaching.py); choice: the messages before
    an answer, and the answer, where a second one is there to choose between.
    """

    chat_models: dict[str, Conversation]
    current: str = ""
    is_comparing: bool = False
    scorer: Scorer | None = None
    is_scoring: bool = False
    asked: list[str] = field(default_factory=list)  # the models that answered the last question
    images: list[ImageRef] = field(default_factory=list)
    more: dict[str, Command] = field(default_factory=dict)
    choice: tuple[list[dict], str, bool] | None = None

    @property
    def commands(self) -> dict[str, Command]:
        return self.more | {name: row for name, row in COMMANDS.items() if name not in self.more}

    def __post_init__(self) -> None:
        self.current = self.current or list(self.chat_models)[-1]

    @property
    def model(self) -> Conversation:
        return self.chat_models[self.current]

    def speakers(self) -> list[str]:
        """The models that answer the next question."""
        self.asked = self._next_speakers()
        return self.asked

    def _next_speakers(self) -> list[str]:
        return list(self.chat_models) if self.is_comparing else [self.current]

    def add_images(self, paths: Sequence[str]) -> str:
        """Let pictures go with the next question; returns a line about them. UserError for one that cannot be read, and
        for models that read none."""
        readers = self.image_readers()
        images, notes = [], []
        for path in paths:
            try:
                whole = look_at(os.path.abspath(expanded(path)))
                image = scaled(whole, MAX_PIXELS)
                count = readers[0].read(image).num_tokens
            except ImageError as error:
                raise UserError(f"{path} {error}; give the file of a picture") from error
            less = "" if image == whole else f" (read as {image.width} x {image.height})"
            notes.append(f"{os.path.basename(path)}, {whole.width} x {whole.height}{less}, {count} tokens")
            images.append(image)
        self.images += images
        return f"{'; '.join(notes)}; {'it goes' if len(notes) == 1 else 'they go'} with your next question"

    def image_readers(self) -> list[ImageReader]:
        """Of the models that answer next; UserError where one reads no images."""
        return [image_reader(name, self.chat_models[name].engine.model, self.chat_models[name].tokenizer)
                for name in self._next_speakers()]

    def score(self, name: str) -> float | None:
        """The reward model's score of the last answer of `name`; None if scoring is off or there is no answer."""
        messages = self.chat_models[name].messages
        if not self.is_scoring or self.scorer is None or not messages or messages[-1]["role"] != "assistant":
            return None
        if messages[-1].get("tool_calls") or sources_in(messages):  # no answer yet; not text alone
            return None
        return self.scorer.score([messages[:-1]], [messages[-1]["content"]])[0]

    def take_back(self) -> dict:
        """Forget the last question and its answers; returns its message. UserError if there is none."""
        histories = [self.chat_models[name].messages for name in self.asked or [self.current]]
        check(last_question(histories[0]) is not None, "there is no question to take back")
        for messages in histories:
            place = last_question(messages)
            if place is not None:
                question = messages[place]
                del messages[place:]
        return question

    def set_tools(self, tools: list[dict]) -> None:
        """Set the tools of every model. UserError for a model whose template does not support tools."""
        for model in self.chat_models.values() if tools else ():
            check_tools(model.tokenizer)
        for model in self.chat_models.values():
            model.tools = tools

    def set_template(self, text: str | None) -> dict[str, list[str]]:
        """Set variables of the chat templates, as JSON; returns, by model, those that its template does not read."""
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

    def answered(self) -> list[str]:
        """The models whose tool calls have been answered, and which are to continue; without any, those whose last
        answer can be continued."""
        last = {name: model.messages[-1] for name, model in self.chat_models.items() if model.messages}
        called = [name for name, message in last.items() if message["role"] == "tool"]
        return called or [name for name in self.asked or [self.current]
                          if name in last and last[name]["role"] == "assistant" and not last[name].get("tool_calls")]


def last_question(messages: list[dict]) -> int | None:
    return next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), None)


def read_conversation(path: str) -> tuple[list[dict], list[dict]]:
    """The messages and the tools in the first row of a jsonl file. Raises UserError for anything else."""
    cure, folder = "give a file that /save wrote", Path(expanded(path)).parent
    row = _read(path, "/load:", "conversation", cure, is_row=True)
    rows = row.get("messages") if isinstance(row, dict) else None
    check(isinstance(rows, list) and bool(rows) and all(map(_is_message, rows)),
          f"{path} holds no conversation: its first row has no messages of role and content; {cure}")
    try:
        messages = messages_of([{key: m[key] for key in _KEYS if key in m} for m in rows], "messages")
        column = column_of(row)
        messages, _ = resolved(placed(messages, listed(row[column]) if column else []),
                               Files(folder, cache.folder(None) / "images", MAX_PIXELS, allow_urls=False))
        tools = tools_of(row.get("tools"))
    except (SkipRow, TypeError, ValueError) as error:
        raise UserError(f"{path} holds no conversation: {error}; {cure}") from error
    _check_tools(tools, path)
    return messages, tools


def _is_message(message: object) -> bool:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        return False
    content = message.get("content")
    return isinstance(content, str | list) or (content is None and bool(message.get("tool_calls")))


def read_tools(path: str) -> list[dict]:
    """The list of tools in a file. Raises UserError for anything else."""
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


# -- slash commands ----------------------------------------------------------------------------------------------------


class Effect(NamedTuple):
    """The effect of a command: text for the user, a question to be answered (again), and whether models continue, such
    as after answers to their tool calls."""

    text: str = ""
    question: str | None = None
    goes_on: bool = False


class Command(NamedTuple):
    run: Callable[[Session, str], Effect]
    help: str


def set_values(session: Session, rest: str) -> Effect:
    """Apply name=value pairs to the sampling settings; nothing changes if one of them is wrong."""
    model = session.model
    values = {name: getattr(model if name == "seed" else model.sampling, name) for name in SETTINGS}
    changed = {}
    for pair in rest.split():
        name, equals, text = pair.partition("=")
        check(name in values, f"/set knows no {name}{nearest(name, values)}; there are {', '.join(values)}")
        check(bool(equals), f"/set takes {name}=VALUE")
        try:
            changed[name] = type(values[name])(text)
        except ValueError as error:
            kind = "a whole number" if isinstance(values[name], int) else "a number"
            raise UserError(f"/set {name}={text}: it takes {kind}") from error
    sampling = replace(model.sampling, **{k: v for k, v in changed.items() if k != "seed"})
    for conversation in session.chat_models.values():
        conversation.sampling, conversation.seed = sampling, changed.get("seed", conversation.seed)
    return Effect("  ".join(f"{name}={value}" for name, value in (values | changed).items()))


def reset(session: Session, _rest: str) -> Effect:
    session.images = []
    for model in session.chat_models.values():
        model.reset()
    return Effect("the conversation starts anew")


def save(session: Session, rest: str) -> Effect:
    check(bool(rest), "/save takes a file name")
    session.model.save(rest)
    return Effect(f"saved to {rest}")


def load(session: Session, rest: str) -> Effect:
    """Continue a conversation that /save wrote (or any jsonl row with messages); the row's tools, if it has any,
    replace the current ones."""
    check(bool(rest), "/load takes a file name")
    messages, tools = read_conversation(rest)
    if tools:
        session.set_tools(tools)
    if sources_in(messages):
        session.image_readers()
    session.images = []
    for model in session.chat_models.values():
        model.messages, model.was_cut = [dict(m) for m in messages], False
    return Effect(f"{len(messages)} messages read; go on from here")


def image(session: Session, rest: str) -> Effect:
    check(bool(rest), "/image takes the path of a picture, or several")
    try:
        paths = [rest] if os.path.isfile(expanded(rest)) else shlex.split(rest)
    except ValueError as error:
        raise UserError(f"/image: {error}; put a path with spaces in two quotes") from error
    return Effect(session.add_images(paths))


def system(session: Session, rest: str) -> Effect:
    session.images = []
    for model in session.chat_models.values():
        model.system = rest or None
        model.reset()
    return Effect("the conversation starts anew under this system message" if rest else
                  "the conversation starts anew without a system message")


def again(session: Session, _rest: str) -> Effect:
    message = session.take_back()
    question = IMAGE * len(session.images) + message["content"]
    session.images += message.get(IMAGES, [])
    return Effect(question=question)


def edit(session: Session, rest: str) -> Effect:
    check(bool(rest), "/edit takes the question as it should have been")
    session.images += session.take_back().get(IMAGES, [])
    return Effect(question=rest)


def undo(session: Session, _rest: str) -> Effect:
    return Effect(f"taken back: {_shown(session.take_back())}")


def history(session: Session, _rest: str) -> Effect:
    rows = [(message["role"], _shown(message), *map(shown_call, message.get("tool_calls", ())))
            for message in session.model.messages]
    return Effect("\n".join(f"{role}: {chr(10).join(filter(None, texts))}" for role, *texts in rows)
                  or "nothing was said yet")


def _shown(message: dict) -> str:
    """The text of a message with the names of its images."""
    text = message["content"]
    for image in message.get(IMAGES, ()):
        text = text.replace(IMAGE, f"[image {os.path.basename(image.path)}] ", 1)
    return text


def model(session: Session, rest: str) -> Effect:
    if rest:
        check(rest in session.chat_models, f"no model {rest}{nearest(rest, session.chat_models)}; there are "
              f"{', '.join(session.chat_models)}")
        session.current, session.is_comparing = rest, False
    return Effect("  ".join(f"[{name}]" if name == session.current else name for name in session.chat_models))


def compare(session: Session, rest: str) -> Effect:
    """on, off, a question for all (which turns it on), or nothing: switch."""
    check(len(session.chat_models) > 1, "/compare needs several models: start with --model base=DIR sft=DIR ppo=DIR")
    if rest in ("", "on", "off"):
        session.is_comparing = rest == "on" if rest else not session.is_comparing
        return Effect(f"{', '.join(session.chat_models)} answer side by side" if session.is_comparing
                      else f"{session.current} answers alone")
    session.is_comparing = True
    return Effect(question=rest)


def score(session: Session, rest: str) -> Effect:
    check(rest in ("", "on", "off"), "/score takes on or off")
    check(session.scorer is not None, "/score needs a reward model: start with --reward_model DIR")
    session.is_scoring = rest == "on" if rest else not session.is_scoring
    return Effect("each answer is scored" if session.is_scoring else "answers are not scored")


def tool(session: Session, rest: str) -> Effect:
    """Answer the first open tool call of each model; they continue when none is open."""
    callers = [model for model in session.chat_models.values() if model.open_calls()]
    check(bool(callers), "/tool: no model has called a tool; ask something first (--tools FILE gives it tools)")
    for model in callers:
        model.answer_call(rest)
    waiting = [call["function"]["name"] for model in callers for call in model.open_calls()]
    return Effect(f"/tool TEXT answers {waiting[0]} too") if waiting else Effect(goes_on=True)


def go_on(session: Session, _rest: str) -> Effect:
    check(bool(session.answered()), "there is no answer to continue")
    return Effect(goes_on=True)


def show_help(session: Session, _rest: str) -> Effect:
    width = max(len(name) + len(row.help.split("  ")[0]) for name, row in session.commands.items()) + 1
    rows = []
    for name, row in session.commands.items():
        takes, _, text = row.help.partition("  ")
        rows.append(f"{f'{name} {takes}'.strip():{width}}  {text}")
    rows += ["Ctrl-C stops an answer. A message that begins with a slash: put a space before it.",
             'Three double quotes begin a message of several lines and end it; a line that ends in \\ goes on.']
    return Effect("\n".join(rows))


COMMANDS = {
    "/image": Command(image, "PATH  pictures for the next question (several paths: several)"),
    "/again": Command(again, "  another answer to the last question (/regen too)"),
    "/regen": Command(again, "  the same"),
    "/edit": Command(edit, "QUESTION  ask this instead of the last question"),
    "/undo": Command(undo, "  take the last question and its answer back"),
    "/history": Command(history, "  what was said"),
    "/reset": Command(reset, "  forget what was said"),
    "/system": Command(system, "TEXT  another system message (none: without), and start anew"),
    "/set": Command(set_values, "temperature=0.7 top_p=0.9  change settings; /set alone shows them"),
    "/model": Command(model, "NAME  who answers, of the models given; alone, who there is"),
    "/compare": Command(compare, "on|off|QUESTION  all models answer, side by side"),
    "/continue": Command(go_on, "  the last answer goes on from where it ended"),
    "/tool": Command(tool, "TEXT  what the function that the model has called returns"),
    "/score": Command(score, "on|off  the reward model's score of each answer"),
    "/save": Command(save, "FILE  write the conversation as a jsonl row, which --stage sft reads"),
    "/load": Command(load, "FILE  go on from such a row"),
    "/help": Command(show_help, "  this"),
    "/exit": Command(lambda *_: Effect(), "  leave (so do /quit and Ctrl-D)"),
    "/quit": Command(lambda *_: Effect(), "  the same"),
}


def obey(session: Session, line: str) -> Effect:
    """Run a line that begins with a slash. Raises UserError for an unknown command or wrong arguments."""
    word, _, rest = line.strip().partition(" ")
    check(word not in ("/two", "/marks", "/retry") or word in session.commands,
          f"{word} is of a chat that learns from your marks; start it with --learn OUTPUT")
    check(word in session.commands, f"no command {word}{nearest(word, session.commands)}; /help lists them")
    return session.commands[word].run(session, rest.strip())
