"""Marks on the answers of a chat, and the commands of a chat whose model learns from them.

What learns is behind the Protocol `Learning` (training/live.py), as a chat never imports training.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hybrid_rlhf.core import activity
from hybrid_rlhf.core.config import check
from hybrid_rlhf.data.row_images import sources_in
from hybrid_rlhf.inference.chat.session import COMMANDS, Command, Effect

if TYPE_CHECKING:
    from hybrid_rlhf.inference.chat.session import Session

FIRST = ("it learns from what you say of its answers:\n"
         "  + good    - bad    = TEXT  what you would have said    /two  a second answer, to choose between\n"
         "  /undo takes the last mark back, /save leaves the trained model, /help lists the rest")
TEXT_ALONE = "marks are learnt on text alone, without pictures and tools; start without them"


@dataclass(frozen=True)
class Mark:
    """What the user said of an answer.

    kind: pair (answer is preferred to other, both the model's), text (answer is the user's own, in place of other) or
    thumb (answer is good, or not). prompt: the messages before it. is_cut, is_other_cut: whether answer, other reached
    the longest length; they are then learnt without an end, as a stage learns what it has sampled itself.
    """

    kind: str
    prompt: list[dict]
    answer: str
    other: str = ""
    is_good: bool = True
    is_cut: bool = False
    is_other_cut: bool = False

    def rows(self) -> dict[str, dict]:
        """kind of file -> row, as the stages read them: a text is a demonstration, and a pair with the answer that it
        replaces."""
        answer, other = ([{"role": "assistant", "content": text}] for text in (self.answer, self.other))
        if self.kind == "thumb":
            return {"thumb": {"prompt": self.prompt, "completion": answer, "label": self.is_good}}
        how = "edited" if self.kind == "text" else "compared"
        pair = {"pair": {"prompt": self.prompt, "chosen": answer, "rejected": other, "how": how}}
        return pair | ({"text": {"prompt": self.prompt, "completion": answer}} if self.kind == "text" else {})

    @property
    def sign(self) -> str:
        """What the user wrote for it."""
        return {"text": "=", "pair": "1/2", "thumb": "+" if self.is_good else "-"}[self.kind]

    def shown(self) -> str:
        """The mark in a line."""
        return f"{self.sign:3} {_short(self.prompt[-1]['content'], 32)} | {_short(self.answer, 48)}"


class Changed(Protocol):
    """What a mark changed."""

    def line(self) -> str:
        """As a line for the user."""
        ...


class Learning(Protocol):
    """A model that learns from marks. Each method raises UserError, and then nothing has changed."""

    marks: list[Mark]

    def learn(self, mark: Mark) -> Changed:
        """Train on a mark, and keep it."""
        ...

    def undo(self) -> Mark:
        """Take the last mark back."""
        ...

    def save(self) -> Path:
        """Leave a finished run; returns its model's folder."""
        ...


def saved(learner: Learning) -> str:
    """Save; returns a line about it."""
    return f"saved: {learner.save()}, from {len(learner.marks)} mark{'s' * (len(learner.marks) != 1)}"


def learn(learner: Learning, mark: Mark, undo: str = "undo") -> str:
    """Let it learn a mark that it does not have yet; returns the line of what changed. undo: what takes one back."""
    for number, old in enumerate(learner.marks, 1):
        way = f"{undo} takes it back" if number == len(learner.marks) else "only the last mark can be taken back"
        check((old.kind, old.prompt, old.answer, old.other) != (mark.kind, mark.prompt, mark.answer, mark.other),
              f"this answer is mark {number} already, {old.sign}; {way}")
    return learner.learn(mark).line()


@dataclass
class Teaching:
    """The commands of a chat whose model learns; each is a function of (session, rest of the line)."""

    learner: Learning

    def told(self, session: Session, mark: Mark) -> Effect:
        """Let the model learn a mark that it does not have yet."""
        with activity.slow("learning"):
            line = learn(self.learner, mark, "/undo")
        session.choice = None
        is_cut = mark.is_cut or (mark.is_other_cut and mark.kind == "pair")
        return Effect(line + "\n(an answer that was cut is learnt without an end)" * is_cut)

    def thumb(self, session: Session, is_good: bool) -> Effect:
        prompt, answer = _marked(session)
        return self.told(session, Mark("thumb", prompt, answer, is_good=is_good, is_cut=session.model.was_cut))

    def text(self, session: Session, rest: str) -> Effect:
        prompt, answer = _marked(session)
        check(bool(rest), "= TEXT: give the text that it should have answered")
        effect = self.told(session, Mark("text", prompt, rest, answer, is_other_cut=session.model.was_cut))
        session.model.messages[-1]["content"] = self.learner.marks[-1].answer  # the conversation goes on from it
        session.model.was_cut = False
        return effect

    def two(self, session: Session, _rest: str) -> Effect:
        prompt, answer = _marked(session)
        was_cut, question = session.model.was_cut, session.take_back()
        session.choice = prompt, answer, was_cut
        return Effect(f"1: {answer}\n2:", question=question["content"])

    def choose(self, session: Session, number: int) -> Effect:
        prompt, second = _marked(session)
        check(session.choice is not None and session.choice[0] == prompt,
              "there is no second answer to choose between; /two asks for one")
        both = session.choice[1:], (second, session.model.was_cut)
        (answer, is_cut), (other, is_other_cut) = both[number], both[1 - number]
        effect = self.told(session, Mark("pair", prompt, answer, other, is_cut=is_cut, is_other_cut=is_other_cut))
        session.model.messages[-1]["content"], session.model.was_cut = answer, is_cut
        return effect

    def marks(self, _session: Session, _rest: str) -> Effect:
        lines = [f"{n:3} {mark.shown()}" for n, mark in enumerate(self.learner.marks, 1)]
        return Effect("\n".join(lines) or "no marks yet")

    def undo(self, _session: Session, rest: str) -> Effect:
        number = len(self.learner.marks)
        check(not number or rest in ("", str(number)),
              f"only the last mark can be taken back, and that is mark {number}: /undo does")
        mark = self.learner.undo()
        return Effect(f"mark {number} is taken back: {mark.shown()}\nweights and optimizer are those from before it")

    def save(self, session: Session, rest: str) -> Effect:
        if rest:
            return COMMANDS["/save"].run(session, rest)
        with activity.slow("saving"):
            return Effect(saved(self.learner))


def commands_of(learner: Learning) -> dict[str, Command]:
    """The commands of a chat with a learner, beside (or in place of) those of any chat."""
    teaching = Teaching(learner)
    return {
        "+": Command(lambda session, _: teaching.thumb(session, True), "  the last answer is good"),
        "-": Command(lambda session, _: teaching.thumb(session, False), "  the last answer is bad"),
        "=": Command(teaching.text, "TEXT  what you would have said in its place"),
        "/two": Command(teaching.two, "  a second answer to the last question; then 1 or 2, whichever is better"),
        "1": Command(lambda session, _: teaching.choose(session, 0), "  the first of the two answers is better"),
        "2": Command(lambda session, _: teaching.choose(session, 1), "  the second of the two answers is better"),
        "/marks": Command(teaching.marks, "  your marks"),
        "/undo": Command(teaching.undo, "  take the last mark back"),
        "/retry": Command(_retry, "  answer the last question again, with the same draws"),
        "/save": Command(teaching.save, "  leave the trained model (with FILE: write the conversation as a jsonl row)")}


def is_mark(session: Session, line: str) -> bool:
    """Whether a line without a slash is a mark, and no question: one with a space before it is a question. UserError
    for one that is nearly a mark, as a question could not be taken back."""
    word = line.rstrip()
    if not session.more:
        return False
    if word in ("+", "-", "=") or line.startswith("= ") or (word in ("1", "2") and session.choice is not None):
        return True
    asks = ", or a space before a question"
    check(word[:1] != "=", f"= TEXT has a space behind the =, and this has none; put one there{asks}")
    check(word[:1] not in ("+", "-") or "\n" in word, f"{word[:1]} marks alone on its line; give it alone{asks}")
    check(not word.isdigit() or not _is_choosing(session), f"{word} chooses neither; give 1 or 2{asks}")
    return False


def _is_choosing(session: Session) -> bool:
    return session.choice is not None and session.model.messages[:-1] == session.choice[0]


def hint(session: Session) -> str:
    """A line below an answer: the choice between two, and for a user's first answer what to do with it."""
    if _is_choosing(session):
        return "(which is better? 1 or 2)"
    asked = str(session.model.messages[-2]["content"]) if len(session.model.messages) > 3 else ""
    if not session.more and (asked in ("+", "-") or asked.startswith("= ")):
        return "(asked as a question; it marks an answer where the chat is started with --learn OUTPUT)"
    return "(tell it what you would have said: = TEXT)" if session.more and session.model.num_answers == 1 else ""


def _marked(session: Session) -> tuple[list[dict], str]:
    """The messages before the last answer, and the answer. UserError where there is none to mark."""
    messages = session.model.messages
    check(bool(messages) and messages[-1]["role"] == "assistant", "there is no answer to mark; ask something first")
    has_tools = session.model.tools or any(m.get("tool_calls") or m["role"] == "tool" for m in messages)  # of /load
    check(not has_tools and not sources_in(messages), TEXT_ALONE)
    return [dict(message) for message in messages[:-1]], messages[-1]["content"]


def _retry(session: Session, _rest: str) -> Effect:
    question = session.take_back()
    session.model.num_answers -= 1
    return Effect(question=question["content"])


def _short(text: str, width: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."
