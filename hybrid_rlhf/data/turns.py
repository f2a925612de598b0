"""Render a conversation as training texts: each answer follows the prompt that generation sees.

If a template keeps history unchanged, one text contains all answers. If it rewrites history (Qwen3 removes earlier
thoughts), one text cannot: the model's context at the second answer differs from its first answer. Such a conversation
becomes one text for each answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

from hybrid_rlhf.models import template
from hybrid_rlhf.models.template import dialect_of, stripped_marks
from hybrid_rlhf.models.template_kwargs import KWARGS
from hybrid_rlhf.models.thoughts import MARKERS, THOUGHT_FIELDS, thought_of, words_of

Text = str | list  # a plain string, or messages: a list of {"role", "content"}
_MARKER_LENGTH = 64  # characters at the end of a generation prompt for thinking markers
BREAK = "\ufdd0"  # a noncharacter, which Unicode reserves for internal use: it is not in texts
IMAGE = "\ufdd1"  # another: an image's place in the content of a message with the key IMAGES (row_images.py)
IMAGES, IMAGE_SHOWN = "images", "[image]"
_known: WeakKeyDictionary = WeakKeyDictionary()  # tokenizer -> (cache key, its control tokens)


class SkipRow(Exception):  # noqa: N818 - not a fault: the row is dropped and counted
    """A row that cannot be rendered; the message is the reason under which it is counted."""


def with_kwargs(messages: Text | None, kwargs: Mapping) -> Text | None:
    """Messages with variables of the chat template in the first; a string unchanged."""
    if not isinstance(messages, list) or not messages or not kwargs:
        return messages
    return [{**messages[0], KWARGS: dict(kwargs)}, *messages[1:]]


class Answer(NamedTuple):
    """prompt: the text that generation continues; text: the answer after it, to its end of turn."""

    prompt: str
    text: str


def render(tokenizer, messages: Sequence[dict], add_generation_prompt: bool = False,  # noqa: ANN001
           continues: bool = False) -> str:
    """Messages as text, in the dialect of the tokenizer's template (models/template.py). Raises SkipRow if that fails.

    Content never becomes a special token: text like one is `broken`.
    """
    try:
        adapted = template.adapted(messages, dialect_of(tokenizer))
        written = [_in_parts(message) for message in broken_messages(tokenizer, adapted)]
        return template.apply(tokenizer, written, add_generation_prompt, continues)
    except template.FAULTS as error:
        raise SkipRow(f"the chat template refuses it ({' '.join(str(error).split())[:200]})") from error


def _in_parts(message: dict) -> dict:
    """A message with images as parts; any other unchanged."""
    if not message.get(IMAGES):
        return message
    content = message["content"] if isinstance(message["content"], str) else message["content"][0]["text"]
    parts = [part for piece in content.split(IMAGE) for part in
             ({"type": "image"}, {"type": "text", "text": piece}) if part.get("text") != ""][1:]
    return {k: v for k, v in message.items() if k != IMAGES} | {"content": parts}


def in_parts(prompt: Text) -> Text:
    """A prompt as TRL has it: messages with images in parts; strings and other messages unchanged."""
    return prompt if isinstance(prompt, str) else [_in_parts(message) for message in prompt]


def readable(prompt: Text) -> Text:
    """A prompt with a word in place of each image, for what reads text alone."""
    return prompt if isinstance(prompt, str) else [
        {k: v for k, v in m.items() if k != IMAGES} | {"content": m["content"].replace(IMAGE, IMAGE_SHOWN)}
        if m.get(IMAGES) else m for m in prompt]


def is_begun(messages: Sequence[dict]) -> bool:
    """Whether the last message is the beginning of the assistant's answer, with some text or thought."""
    return _is_answer(messages) and bool(_words(messages[-1]) or thought_of(messages[-1])[0])


def without_blank(messages: Sequence[dict]) -> Sequence[dict]:
    """Messages without an empty last message of the assistant (no text, no thought)."""
    return messages[:-1] if _is_answer(messages) and not is_begun(messages) else messages


def _is_answer(messages: Sequence[dict]) -> bool:
    return bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def render_prompt(tokenizer, messages: Sequence[dict], continues: bool = True) -> str:  # noqa: ANN001
    """The text that generation continues. With `continues` a last message of the assistant is the answer's beginning.
    Raises SkipRow where the template leaves out the text of a message."""
    messages = without_blank(messages) if continues else messages
    is_open = continues and is_begun(messages)
    text = _begun(tokenizer, messages) if is_open else render(tokenizer, messages, True)
    _check_history(messages, unbroken(text))
    return text


def _begun(tokenizer, messages: Sequence[dict]) -> str:  # noqa: ANN001
    """The text to the end of the last message's content. An unfinished thought follows the generation prompt, where the
    model writes one; a template would treat it as answer text and write an empty thought before it."""
    content, (opening, closing) = messages[-1]["content"].lstrip(), stripped_marks(tokenizer)
    if dialect_of(tokenizer).thought_marks and content.startswith(opening) and closing not in content:
        prompt = render(tokenizer, messages[:-1], True)
        is_open = prompt.rstrip().endswith(opening)
        text = content.removeprefix(opening).lstrip("\n") if is_open else content
        if not prompt.rstrip().endswith(closing):
            return prompt + broken(tokenizer, text, is_own=True)
    return render(tokenizer, messages, continues=True)


def answers_of(tokenizer, messages: Sequence[dict], first: int = 0,  # noqa: ANN001
               begun: dict | None = None) -> list[Answer]:
    """The answers of a conversation from message `first` on, each after the prompt that generation sees there. begun:
    the beginning of message `first`, if that is part of its prompt."""
    turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    if not turns:
        raise SkipRow("no assistant turn")
    return [_answer(tokenizer, messages, turn) if turn > first or begun is None else
            _rest(tokenizer, messages[:turn], messages[turn], begun) for turn in turns]


def _rest(tokenizer, history: Sequence[dict], message: dict, begun: dict) -> Answer:  # noqa: ANN001
    """The rest of a begun answer, and what the template writes after an answer."""
    prompt = render_prompt(tokenizer, [*history, begun])
    rest = {**message, "content": message["content"].removeprefix(begun["content"])}
    full = render(tokenizer, [*history, message])
    if full.startswith(prompt) and broken(tokenizer, rest["content"].strip(), is_own=True) in full[len(prompt) :]:
        return Answer(prompt, _cut_at_end(tokenizer, full[len(prompt) :], rest))
    if message.get("tool_calls") or any(message.get(name) != begun.get(name) for name in THOUGHT_FIELDS):
        raise SkipRow("the chat template writes an answer otherwise than its beginning")
    behind = render(tokenizer, [*history, {"role": "assistant", "content": template.SAID}]).rpartition(template.SAID)[2]
    text = broken(tokenizer, rest["content"], is_own=True)
    return Answer(prompt, text + _cut_at_end(tokenizer, behind, {"content": ""}))


def _answer(tokenizer, messages: Sequence[dict], turn: int) -> Answer:  # noqa: ANN001
    message, history = messages[turn], messages[:turn]
    prompt = render(tokenizer, history, True) if history else _opening(tokenizer, message)
    _check_history(history, unbroken(prompt))
    text = _answer_text(tokenizer, prompt, [*history, message])
    text = _with_thought(tokenizer, prompt, text, message)
    _check_answer(message, unbroken(text))
    return Answer(prompt, _cut_at_end(tokenizer, text, message))


def _opening(tokenizer, message: dict) -> str:  # noqa: ANN001
    """The text before an answer that is the first message."""
    try:
        return render(tokenizer, [], True)
    except SkipRow:
        text, content = render(tokenizer, [message]), _words(message)
        return text[: max(0, text.find(content))] if content else ""


def _answer_text(tokenizer, prompt: str, messages: Sequence[dict]) -> str:  # noqa: ANN001
    """The last message as the template renders it after its prompt."""
    *history, message = messages
    marks = stripped_marks(tokenizer)
    text = _behind(prompt, render(tokenizer, messages), marks)
    if text is None:  # the answer changes the rendered history: render it after the question alone
        asked = max((i for i, m in enumerate(history) if m["role"] == "user"), default=0)
        short = [m for i, m in enumerate(history) if i == asked or (i < asked and m["role"] in template.INSTRUCTIONS)]
        if short:
            short[0] = {**short[0], **template.carried(history)}
            text = _behind(render(tokenizer, short, True), render(tokenizer, [*short, message]), marks)
    if text is None:
        raise SkipRow("the chat template rewrites earlier turns")
    return text


def _behind(prompt: str, text: str, marks: tuple[str, str]) -> str | None:
    """The text after the prompt in `text`; None if `text` begins differently.

    A generation prompt may contain more than history does: thinking markers, after which the answer continues.
    """
    if text.startswith(prompt):
        return text[len(prompt) :]
    same = num_shared(prompt, text)
    tail = max(0, len(prompt) - _MARKER_LENGTH)
    opening, closing = map(re.escape, marks)
    marker = tail + re.search(rf"\s*({opening}\s*)?({closing}\s*)?$", prompt[tail:]).start()
    edges = (i for i in range(len(prompt) - 1, marker - 1, -1)
             if prompt[i].isspace() or prompt.startswith(marks, i))
    return next((text[edge:] for edge in edges if edge <= same), None)


def num_shared(first: Sequence, second: Sequence) -> int:
    """How many items both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _with_thought(tokenizer, prompt: str, answer: str, message: dict) -> str:  # noqa: ANN001
    """The answer with its thought in the template's markers, if the template left that out; after a generation prompt
    that opens a thought, with the closing marker. Raises SkipRow for a thought after a prompt that has closed it."""
    thought, marks = thought_of(message)[0], dialect_of(tokenizer).thought_marks
    opening, closing = marks or MARKERS[0]
    if thought and prompt.rstrip().endswith(closing.strip()):
        raise SkipRow("the chat template ends the thought before the answer, and this answer has one")
    is_open = prompt.rstrip().endswith(opening.strip())
    words = broken(tokenizer, thought_of(message)[1].strip(), is_own=True)
    if closing.strip() in answer[: answer.rfind(words)] or not (is_open or (thought and marks)):
        return answer
    lead = opening if not is_open else "" if prompt.endswith("\n") else "\n"
    return f"{lead}{broken(tokenizer, thought, is_own=True)}{closing}" + answer.lstrip("\n")


def _words(message: Mapping) -> str:
    return (message.get("content") or "").strip()


def _cut_at_end(tokenizer, answer: str, message: Mapping) -> str:  # noqa: ANN001
    """The answer to its end of turn; text after that (a newline, an end of text) is cut. If the template writes no end
    of turn after the last answer, the token that begins the next message is added."""
    words = broken(tokenizer, thought_of(message)[1].strip(), is_own=True)
    ends, calls = dialect_of(tokenizer).ends, message.get("tool_calls")
    place = answer.rfind(words) if words and not calls else 0
    if not any(end in answer[place:] for end in ends):  # the text was found inside an end marker: "d" in <|im_end|>
        place = 0
    starts = [(answer.rfind if calls else answer.find)(end, place) for end in ends]
    places = [at + len(end) for at, end in zip(starts, ends, strict=True) if at >= 0]
    implied = ends[-1 if calls else 0] if ends else ""
    return answer[: places[0]] if places else answer.rstrip() + implied


def _check_answer(message: Mapping, text: str) -> None:
    """SkipRow if a part of the answer is missing in its rendered text."""
    place = 0
    for piece in thought_of(message):
        piece = piece.replace(BREAK, "\ufffd").strip()
        start = text.find(piece, place)
        if start < 0:
            raise SkipRow("the chat template leaves out what the assistant says")
        place = start + len(piece)
    if not all(_shows(word, text) for call in message.get("tool_calls") or () for word in _of_call(call)):
        raise SkipRow("the chat template leaves out tool calls")


def _check_history(messages: Sequence[Mapping], text: str) -> None:
    """SkipRow if the text of a message is missing in the prompt, or out of order. Thoughts and tool calls of earlier
    turns may be left out: the model would not see them either."""
    place = 0
    for message in messages:
        words = (thought_of(message)[1] if message["role"] == "assistant" else _words(message)).replace(BREAK, "\ufffd")
        is_anywhere = message["role"] in template.INSTRUCTIONS
        for piece in words.split(IMAGE) if message.get(IMAGES) else (words,):
            start = _find(piece.strip(), text, 0 if is_anywhere else place)
            if start < 0 and not message.get("tool_calls"):
                raise SkipRow(f"the chat template leaves out what the {message['role']} says")
            place = place if is_anywhere else max(place, start)
    tools = next((m["tools"] for m in messages if m.get("tools")), ())
    if not all(_shows(str((tool.get("function") or tool).get("name", "")), text) for tool in tools):
        raise SkipRow("the chat template leaves out the tools")


def _of_call(call: Mapping) -> Iterator[str]:
    """A call's function and arguments, as texts that its rendering must contain."""
    call = call.get("function") or call
    yield str(call.get("name", ""))
    yield from _values(call.get("arguments"))


def _values(value: object) -> Iterator[str]:
    """Keys and values in a JSON value, without true, false and null, which are rendered in many ways."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _values(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _values(inner)
    elif value is not None and not isinstance(value, bool):
        yield str(value).replace(BREAK, "\ufffd").strip()


def _shows(words: str, text: str) -> bool:
    return _find(words, text) >= 0


def _find(words: str, text: str, begin: int = 0) -> int:
    """The index of the words in the text, as they are or JSON-escaped; -1 if they are not in it."""
    start = text.find(words, begin)
    if start < 0:
        start = max(text.find(json.dumps(words, ensure_ascii=is_ascii)[1:-1], begin) for is_ascii in (False, True))
    return start


def control_tokens(tokenizer, is_own: bool = False) -> tuple[str, ...]:  # noqa: ANN001
    """The texts that `tokenizer` reads as special tokens, longest first, without the markers of thoughts; is_own: for
    text of the assistant, where the markers of tool calls are left out too."""
    size = len(tokenizer.get_added_vocab()) if not hasattr(tokenizer, "__len__") else len(tokenizer)
    key = (size, getattr(tokenizer, "chat_template", None), *map(str, tokenizer.all_special_tokens))
    if tokenizer not in _known or _known[tokenizer][0] != key:
        texts = {str(t) for t in tokenizer.all_special_tokens}
        texts |= {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        texts = {t for t in texts if len(t) > 1}.difference(words_of(), words_of([template.stripped_marks(tokenizer)]))
        user, model = (tuple(sorted(t, key=len, reverse=True)) for t in (texts, texts - template.call_words(tokenizer)))
        _known[tokenizer] = (key, user, model)
    return _known[tokenizer][1 + is_own]


@lru_cache(32)
def _pattern(tokens: tuple[str, ...]) -> re.Pattern:
    return re.compile(f"(?={_branches(tokens)})")  # lookahead: one may begin inside another


def _branches(ends: Sequence[str]) -> str:
    """A regular expression that matches any of `ends`, as a trie: some tokenizers have a thousand special tokens, and
    trying each of them at every place would be slow."""
    if "" in ends:
        return ""
    following: dict[str, list[str]] = {}
    for end in ends:
        following.setdefault(end[0], []).append(end[1:])
    branches = [re.escape(first) + _branches(rest) for first, rest in following.items()]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def broken(tokenizer, text: str, is_own: bool = False) -> str:  # noqa: ANN001
    """`text` with a BREAK after the first character of any control token in it. is_own: it is text of the assistant.

    A user who writes <|im_end|> could end their turn and begin another, as system or as assistant. The two parts are
    tokenized separately: the same characters, as ordinary tokens. Markers of thoughts (<think>) are kept.
    """
    text = text.replace(BREAK, "\ufffd")
    tokens = control_tokens(tokenizer, is_own)
    if not tokens:
        return text
    starts = [match.start() for match in _pattern(tokens).finditer(text)]
    edges = [0, *(start + 1 for start in starts), len(text)]
    return BREAK.join(text[a:b] for a, b in pairwise(edges)) if starts else text


def broken_messages(tokenizer, messages: Sequence[dict]) -> list[dict]:  # noqa: ANN001
    """Messages with all texts but the role `broken`, nested ones too."""

    def walk(value: object, is_own: bool) -> object:
        if isinstance(value, str):
            return broken(tokenizer, value, is_own)
        if isinstance(value, dict):
            return {walk(k, is_own): walk(v, is_own) for k, v in value.items()}
        return [walk(v, is_own) for v in value] if isinstance(value, list) else value

    return [{k: v if k == "role" else walk(v, message["role"] == "assistant" and k not in ("tool_calls", "tools"))
             for k, v in message.items()} for message in messages]


def unbroken(text: str) -> str:
    """The text without breaks."""
    return text.replace(BREAK, "")
