"""Slash commands of the chat. A command is one function and one row of COMMANDS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from hybrid_rlhf.core.config import UserError, check, nearest

if TYPE_CHECKING:
    from hybrid_rlhf.inference.chat.session import Session

SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "min_new_tokens", "seed")


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
    for model in session.chat_models.values():
        model.reset()
    return Effect("the conversation starts anew")


def save(session: Session, rest: str) -> Effect:
    check(bool(rest), "/save takes a file name")
    session.model.save(rest)
    return Effect(f"saved to {rest}")


def load(session: Session, rest: str) -> Effect:
    check(bool(rest), "/load takes a file name")
    return Effect(f"{session.load(rest)} messages read; go on from here")


def system(session: Session, rest: str) -> Effect:
    session.set_system(rest)
    return Effect("the conversation starts anew under this system message" if rest else
                  "the conversation starts anew without a system message")


def again(session: Session, _rest: str) -> Effect:
    return Effect(question=session.take_back())


def edit(session: Session, rest: str) -> Effect:
    check(bool(rest), "/edit takes the question as it should have been")
    session.take_back()
    return Effect(question=rest)


def undo(session: Session, _rest: str) -> Effect:
    return Effect(f"taken back: {session.take_back()}")


def history(session: Session, _rest: str) -> Effect:
    return Effect("\n".join(session.history()) or "nothing was said yet")


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
    waiting = session.answer_call(rest)
    return Effect(f"/tool TEXT answers {waiting} too") if waiting else Effect(goes_on=True)


def go_on(session: Session, _rest: str) -> Effect:
    check(bool(session.answered()), "there is no answer to continue")
    return Effect(goes_on=True)


def show_help(_session: Session, _rest: str) -> Effect:
    width = max(len(name) + len(row.help.split("  ")[0]) for name, row in COMMANDS.items()) + 1
    rows = []
    for name, row in COMMANDS.items():
        takes, _, text = row.help.partition("  ")
        rows.append(f"{f'{name} {takes}'.strip():{width}}  {text}")
    rows += ["Ctrl-C stops an answer. A message that begins with a slash: put a space before it.",
             'Three double quotes begin a message of several lines and end it; a line that ends in \\ goes on.']
    return Effect("\n".join(rows))


COMMANDS = {
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
    check(word in COMMANDS, f"no command {word}{nearest(word, COMMANDS)}; /help lists them")
    return COMMANDS[word].run(session, rest.strip())
