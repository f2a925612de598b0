"""The tokens that a chat template writes between two turns of the model, and a check that they are the same in any
conversation.

Sampled tokens are never tokenized again. So the tokens of a tool's or a user's message do not come from tokenizing the
conversation anew: a short conversation that ends in the same messages is rendered, and the text after the assistant's
turn is tokenized once. So each turn's context is a prefix of the next one's, also where the template rewrites earlier
turns (Qwen3 removes their thoughts): they stay as they were sampled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Literal

from hybrid_rlhf.core.errors import UserError, check
from hybrid_rlhf.data.chat import Rendered, encode_all
from hybrid_rlhf.data.turns import SkipRow, num_shared, render, with_kwargs
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
    template refuses these messages (`check_turns` detects that earlier).
    """
    text, end = _behind_turn(tokenizer, message, added, kwargs or {})
    ids, known = encode_all(tokenizer, [Rendered(text, [], False)])[0].ids, special_ids(tokenizer)
    if not end:
        return ids[is_ended and ids[0] in known.values():]
    is_other = not message.get("tool_calls") and end in dialect_of(tokenizer).ends[1:]  # answered like a call
    return ids[ids.index(known[end]) + (is_ended and not is_other):]


def check_turns(tokenizer, role: Literal["tool", "user"], has_tools: bool = False) -> str:  # noqa: ANN001
    """How the chat template rewrites earlier turns of the assistant when messages of `role` follow ("it leaves out
    thoughts"); "" where it keeps them. has_tools: whether the prompt shows tools (it does for role tool).

    UserError, with the cure, where it refuses those messages, or changes more than the assistant's turns: then what it
    writes behind a turn is not what `added_tokens` gives, or the prompt does not stay.
    """
    check(tokenizer.chat_template, "several turns need a chat template, and the tokenizer has none; give "
                                   "data.chat_template, or a model that has one")
    has_tools = has_tools or role == "tool"
    try:
        how = _rewriting(tokenizer, role, has_tools)
        if not _is_exact(tokenizer, role, has_tools):
            is_of_tools = role == "user" and has_tools and _is_exact(tokenizer, role, False)
            what = "the tools move" if is_of_tools else "the prompt or what stands behind a turn reads otherwise"
            raise UserError(f"the chat template rewrites more than the assistant's turns when messages of role {role} "
                            f"follow ({what}); {CURE}")
    except SkipRow as error:
        raise UserError(f"messages of role {role} cannot follow an answer: {error}; {CURE}") from error
    return how


def _is_exact(tokenizer, role: str, has_tools: bool) -> bool:  # noqa: ANN001
    """Whether conversations of two and three turns are the prompt and what `_behind_turn` gives, with nothing but the
    assistant's turns between them."""
    talk = [_asked(has_tools)]
    pattern = re.escape(_shared(render(tokenizer, talk), render(tokenizer, talk, True)))
    for number in (1, 2):
        turn, answer = _turn(role, number, False), _answer(role, number)
        talk = [*talk, turn, answer]
        last, earlier = (_behind_turn(tokenizer, turn, [answer], {}, is_last)[0] for is_last in (True, False))
        pattern += f".*Qsaid{number}.*?"
        if not re.fullmatch(pattern + re.escape(last), render(tokenizer, talk, True), re.DOTALL):
            return False
        pattern += re.escape(_shared(last, earlier))
    return True


def _shared(first: str, second: str) -> str:
    """The text before a generation prompt, and before what a template writes in its place (Phi-3)."""
    return first[: num_shared(first, second)]


def _rewriting(tokenizer, role: str, has_tools: bool) -> str:  # noqa: ANN001
    """How the template rewrites history, or ""; tried on two turns, with thoughts if it shows those."""
    asked = _asked(has_tools)
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
            return "it leaves out what generation begins with"
        answer = _answer(role, number)
        talk = [*talk, answer]
        prompt = render(tokenizer, talk, True)
        if not prompt.startswith(text):
            return "it leaves out thoughts" if thinks and f"Qthought{number}" not in prompt else "they read otherwise"
        if answer["content"] not in prompt:
            return f"it leaves out what the {role} says"
    return ""


def _asked(has_tools: bool) -> dict:
    return {"role": "user", "content": ASKED, **({"tools": [TOOL]} if has_tools else {})}


def _answer(role: str, number: int) -> dict:
    answer = {"role": role, "content": f"Qanswer{number}"}
    return answer if role == "user" else {**answer, "name": SAID, "tool_call_id": _id(number)}


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


def _behind_turn(tokenizer, message: dict, added: Sequence[dict], kwargs: Mapping,  # noqa: ANN001
                 is_last: bool = True) -> tuple[str, str]:
    """The text that the template writes from the end of the turn on, and the marker that it begins with, or "".
    is_last: with the next generation prompt."""
    word = "Qsaid"
    while any(word in str(m) for m in added):
        word += "d"
    calls = list(message.get("tool_calls") or ()) or _calls_for(added)
    short = None
    for some in (calls, calls[-1:]):  # one: for a template for one call at a time
        with suppress(SkipRow):
            short = short or _short(tokenizer, some, added, word, kwargs, is_last)
    if short is None:
        raise UserError(f"the chat template refuses {_roles(added)} behind an answer; {CURE}")
    before, text = short
    check(word in text, f"the chat template leaves out what the assistant says before {_roles(added)}; {CURE}")
    start, end = _end_of_turn(tokenizer, text, word)
    if end > start:
        return text[start:], text[start:end]
    history = render(tokenizer, before)
    history = history[: _end_of_turn(tokenizer, history, word)[1]]
    if text.startswith(history):
        return text[len(history) :], ""
    behind = text[text.rindex(word) + len(word) :]  # gpt-oss ends an earlier answer otherwise than the last one
    end = max((token for token in special_ids(tokenizer) if behind.startswith(token)), key=len, default="")
    check(end, f"the chat template rewrites the end of a turn when messages follow; {CURE}")
    return behind, end


def _roles(added: Sequence[dict]) -> str:
    return f"messages of role {' and '.join(dict.fromkeys(m['role'] for m in added))}"


def _calls_for(added: Sequence[dict]) -> list[dict]:
    """Calls for tool messages to answer, where the turn has no readable ones."""
    return [{"function": {"name": m.get("name") or "tool"}} for m in added if m["role"] == "tool"]


def _short(tokenizer, calls: list[dict], added: Sequence[dict], word: str,  # noqa: ANN001
           kwargs: Mapping, is_last: bool) -> tuple[list[dict], str]:
    """A short conversation whose last turn has these calls (or the text `word`), and its text followed by `added`, and
    with is_last by the next generation prompt."""
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
    return before, render(tokenizer, [*before, *messages], is_last)
