"""The tokens that a chat template writes between two turns of the model, and a check that it keeps earlier turns.

Sampled tokens are never tokenized again. So the tokens of a tool's or a user's message do not come from tokenizing the
conversation anew: a short conversation that ends in the same messages is rendered, and the text after the assistant's
turn is tokenized once. That is what the model would read, if the template does not rewrite history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Literal

from hybrid_rlhf.core.errors import UserError, check
from hybrid_rlhf.data.chat import Rendered, encode_all
from hybrid_rlhf.data.turns import SkipRow, render, with_kwargs
from hybrid_rlhf.models.template import ASKED, SAID, TOOL, dialect_of, special_ids, stripped_marks

CURE = ("give data.chat_template a template that writes history as it was said: TRL has such for many models "
        "(trl.chat_template_utils.get_training_chat_template)")


def added_tokens(tokenizer, message: dict, added: Sequence[dict], is_ended: bool,  # noqa: ANN001
                 kwargs: Mapping | None = None) -> list[int]:
    """The tokens between the assistant's turn `message`, as `parse_turn` reads it, and the model's next turn, where the
    messages `added` (of roles tool and user) follow. They end with the generation prompt of the next turn.

    is_ended: the turn ended with the template's end of turn, which the model sampled; else that marker is the first of
    the added tokens. Where a template writes no end of turn (GLM), the header of the next message ends it. Tool
    messages need neither name nor id: they answer the calls in order, unless they have a tool_call_id. Text of `added`
    never becomes a control token. kwargs: variables of the template in this conversation. Raises UserError where the
    template refuses these messages, or rewrites the end of the turn (`check_keeps_history` detects that earlier).
    """
    text, is_marked = _behind_turn(tokenizer, message, added, kwargs or {})
    ids = encode_all(tokenizer, [Rendered(text, [], False)])[0].ids
    if not is_marked:
        return ids[is_ended and ids[0] in special_ids(tokenizer).values():]
    known = special_ids(tokenizer)
    ends = [known[end] for end in dialect_of(tokenizer).ends]
    first = next(i for i, token in enumerate(ids) if token in ends)
    is_other = not message.get("tool_calls") and ids[first] != ends[0]  # not a call, but answered like one
    return ids[first + (is_ended and not is_other):]


def check_keeps_history(tokenizer, role: Literal["tool", "user"], has_tools: bool = False) -> None:  # noqa: ANN001
    """UserError, with the cure, where the chat template rewrites earlier turns of the assistant, or their thoughts,
    when messages of `role` follow. has_tools: whether the prompt shows tools (it does for role tool)."""
    check(tokenizer.chat_template, "several turns need a chat template, and the tokenizer has none; give "
                                   "data.chat_template, or a model that has one")
    problem = f"the chat template rewrites earlier turns when messages of role {role} follow"
    try:
        fault = _rewriting(tokenizer, role, has_tools or role == "tool")
    except SkipRow as error:
        raise UserError(f"messages of role {role} cannot follow an answer: {error}; {CURE}") from error
    check(not fault, f"{problem} ({fault}); {CURE}")


def _rewriting(tokenizer, role: str, has_tools: bool) -> str:  # noqa: ANN001
    """How the template rewrites history, or ""; tried on two turns, with thoughts if it shows those."""
    asked = {"role": "user", "content": ASKED, **({"tools": [TOOL]} if has_tools else {})}
    prompt = render(tokenizer, [asked], True)
    thinks = not prompt.rstrip().endswith(stripped_marks(tokenizer)[1]) and _shows_thought(tokenizer, asked, role)
    talk = [asked]
    for number in (1, 2):
        talk = [*talk, _turn(role, number, thinks)]
        text = render(tokenizer, talk)
        if f"Qsaid{number}" not in text:
            return "it leaves out what the assistant says"
        text = text[: _end_of_turn(tokenizer, text, f"Qsaid{number}")[1]]
        if not text.startswith(prompt):
            return "what generation begins with is not in them"
        answer = {"role": role, "content": f"Qanswer{number}"}
        talk = [*talk, answer if role == "user" else {**answer, "name": SAID, "tool_call_id": _id(number)}]
        prompt = render(tokenizer, talk, True)
        if not prompt.startswith(text):
            return "it leaves out thoughts" if thinks and f"Qthought{number}" not in prompt else "they read otherwise"
        if answer["content"] not in prompt:
            return f"it leaves out what the {role} says"
    return ""


def _turn(role: str, number: int, thinks: bool) -> dict:
    """A turn of the assistant after which messages of `role` may follow."""
    content = f"<think>\nQthought{number}\n</think>\n\n" if thinks else ""
    if role == "user":
        return {"role": "assistant", "content": f"{content}Qsaid{number}"}
    call = {"type": "function", "id": _id(number), "function": {"name": SAID, "arguments": {ASKED: f"Qsaid{number}"}}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _shows_thought(tokenizer, asked: dict, role: str) -> bool:  # noqa: ANN001
    """Whether the last turn is rendered with its thought before its answer."""
    text = render(tokenizer, [asked, _turn(role, 1, True)])
    return 0 <= text.find("Qthought1") < text.rfind("Qsaid1")


def _id(number: int) -> str:
    return f"call{number:05d}"  # nine letters and digits: Mistral's templates refuse any other


def _end_of_turn(tokenizer, text: str, word: str) -> tuple[int, int]:  # noqa: ANN001
    """Start and end, in `text`, of the end-of-turn marker after the last `word`; both are the end of the text, without
    white space, where no marker follows."""
    place = text.rfind(word) + len(word)
    ends = [(at, at + len(end)) for end in dialect_of(tokenizer).ends if (at := text.find(end, place)) >= 0]
    return min(ends) if ends else (len(text.rstrip()),) * 2


def _behind_turn(tokenizer, message: dict, added: Sequence[dict], kwargs: Mapping) -> tuple[str, bool]:  # noqa: ANN001
    """The text that the template writes from the end of the turn on, and whether it begins with a marker."""
    word = "Qsaid"
    while any(word in str(m) for m in added):
        word += "d"
    calls = list(message.get("tool_calls") or ()) or _calls_for(added)
    short = None
    for some in (calls, calls[-1:]):  # one: for a template for one call at a time
        with suppress(SkipRow):
            short = short or _short(tokenizer, some, added, word, kwargs)
    if short is None:
        raise UserError(f"the chat template refuses {_roles(added)} behind an answer; {CURE}")
    before, text = short
    check(word in text, f"the chat template leaves out what the assistant says before {_roles(added)}; {CURE}")
    start, end = _end_of_turn(tokenizer, text, word)
    if end > start:
        return text[start:], True
    history = render(tokenizer, before)
    history = history[: _end_of_turn(tokenizer, history, word)[1]]
    check(text.startswith(history), f"the chat template rewrites the end of a turn when messages follow; {CURE}")
    return text[len(history) :], False


def _roles(added: Sequence[dict]) -> str:
    return f"messages of role {' and '.join(dict.fromkeys(m['role'] for m in added))}"


def _calls_for(added: Sequence[dict]) -> list[dict]:
    """Calls for tool messages to answer, where the turn has no readable ones."""
    return [{"function": {"name": m.get("name") or "tool"}} for m in added if m["role"] == "tool"]


def _short(tokenizer, calls: list[dict], added: Sequence[dict], word: str,  # noqa: ANN001
           kwargs: Mapping) -> tuple[list[dict], str]:
    """A short conversation whose last turn has these calls (or the text `word`), and its text followed by `added`."""
    ids = [call.get("id") or _id(i) for i, call in enumerate(calls)]
    made = [{"type": "function", "id": ids[i], "function": {"name": call["function"]["name"],
             "arguments": {ASKED: word}}} for i, call in enumerate(calls)]
    turn = {"role": "assistant", "content": "", "tool_calls": made} if made else {"role": "assistant", "content": word}
    before: list = with_kwargs([{"role": "user", "content": ASKED}, turn], kwargs)
    messages, count = [], 0
    for answer in added:
        if answer["role"] == "tool" and calls:
            call_id = answer.get("tool_call_id")
            place = ids.index(call_id) if call_id in ids else min(count, len(ids) - 1)
            answer = {"name": calls[place]["function"]["name"], **answer, "tool_call_id": ids[place]}
            count += 1
        messages.append(answer)
    return before, render(tokenizer, [*before, *messages], True)
