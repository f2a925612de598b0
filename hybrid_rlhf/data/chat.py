"""Tokenize messages in one way everywhere: a text is tokenized as a whole, and its parts are found by offsets.

Tokenizing a prompt and its response separately gives other tokens than tokenizing them together (a merge may straddle
the boundary); the response then begins with the token that straddles.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.image_files import ImageError, ImageRef
from hybrid_rlhf.core.options import expanded
from hybrid_rlhf.data.messages import NO_READER, is_untrained
from hybrid_rlhf.data.turns import (
    BREAK,
    IMAGE_SHOWN,
    IMAGES,
    SkipRow,
    Text,
    answers_of,
    is_begun,
    num_shared,
    render_prompt,
    unbroken,
    without_blank,
)
from hybrid_rlhf.models.images import ImageReader, reader_of
from hybrid_rlhf.models.template import CARRIED, dialect_of
from hybrid_rlhf.models.template_kwargs import set_defaults
from hybrid_rlhf.models.thoughts import THOUGHT_FIELDS
from hybrid_rlhf.models.tokenizer import CHATML_MARKERS, turn_ends

CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
_CHARACTERS = 16  # of a text tokenized first, per token that counts
_MARGIN = 64  # tokens before a cut that may differ from those without it
LEFT_OUT = "the chat template leaves out an image, or writes another one"
REWRITTEN = "the chat template rewrites earlier turns of a completion of several"


_texts: WeakKeyDictionary = WeakKeyDictionary()  # reader -> size of an image -> its text


class Rendered(NamedTuple):
    """One sequence as text. spans: the (start, end) characters to be trained; is_plain: the tokenizer adds BOS.

    A text without spans is a prompt. The text of messages has a BREAK wherever content looks like a special token.
    images: in the order of their texts; images_end: the character behind the last one; short: the text with a word in
    place of each.
    """

    text: str
    spans: list[tuple[int, int]]
    is_plain: bool
    images: tuple[ImageRef, ...] = ()
    images_end: int = 0
    short: str = ""

    @property
    def shown(self) -> str:
        """The text without breaks, and without the tokens of images."""
        return self.text if self.is_plain else unbroken(self.short or self.text)


class Encoded(NamedTuple):
    """ids (T,), loss_mask (T,) bool over response tokens with EOS, and the tokens before the first response token.
    images: those of the text; images_end: the tokens to the end of the last one, for a text with spans."""

    ids: list[int]
    loss_mask: list[bool]
    num_prompt_tokens: int
    images: tuple[ImageRef, ...] = ()
    images_end: int = 0


def ensure_template(tokenizer, template: str | None = None, set_eos: bool = False,  # noqa: ANN001
                    kwargs: Mapping | None = None) -> bool:
    """Give `tokenizer` a chat template: `template` (text, or a file's path), its own, or ChatML if it has none.

    ChatML adds its two markers as special tokens, and begins with BOS where the tokenizer puts one before every text.
    With set_eos, or without an EOS token, and only if ChatML was chosen, <|im_end|> becomes the end-of-sequence token.
    kwargs: values of the template's variables, which become its defaults. Returns whether tokens were added
    (embeddings must then grow). Raises UserError for a template that does not compile, and for variables that it does
    not read.
    """
    num_tokens = len(tokenizer)
    if template is not None:
        tokenizer.chat_template = _checked(_template_text(template))
    elif not tokenizer.chat_template:
        tokenizer.chat_template = ("{{- bos_token -}}" if _begins_with_bos(tokenizer) else "") + CHATML
        missing = [m for m in CHATML_MARKERS if m not in tokenizer.get_vocab()]
        if missing:
            tokenizer.add_tokens(missing, special_tokens=True)
        if set_eos or tokenizer.eos_token is None:
            tokenizer.eos_token = CHATML_MARKERS[1]
    if kwargs:
        set_defaults(tokenizer, kwargs, "data.chat_template_kwargs")
    return len(tokenizer) > num_tokens


def _begins_with_bos(tokenizer) -> bool:  # noqa: ANN001
    """Whether the tokenizer puts BOS before every text, as Gemma's and Llama 3's do."""
    return tokenizer.bos_token_id is not None and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]


def _template_text(template: str) -> str:
    """The template itself, or the text of the file with that name."""
    if "{" in template:
        return template
    path = Path(expanded(template))
    check(path.is_file(), f"data.chat_template {template} is not a file (nor a template: it has no {{)")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template {template} cannot be read: {error}; give another file") from error


def _checked(text: str) -> str:
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except TemplateSyntaxError as error:
        if "generation" not in str(error):  # transformers' own block tag
            raise UserError(f"data.chat_template line {error.lineno}: {error.message}; fix the template") from error
    return text


def as_turn(tokenizer, prompt: Text, raw: bool = False) -> Text:  # noqa: ANN001
    """A prompt for a model with this tokenizer: a string becomes a user's turn where there is a chat template, unless
    `raw`."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) and tokenizer.chat_template and not raw \
        else prompt


def compose_prompt(tokenizer, prompt: Text, continues: bool = True) -> Rendered:  # noqa: ANN001
    """A prompt as the text that a model continues: a string unchanged, messages with the generation prompt. With
    `continues` a last message of the assistant is the beginning of the answer, and the text ends with it."""
    if isinstance(prompt, str):
        return Rendered(prompt, [], True)
    return _with_images(tokenizer, Rendered(render_prompt(tokenizer, prompt, continues), [], False), prompt)


def compose(tokenizer, prompt: Text, completion: Text) -> Rendered:  # noqa: ANN001
    """Prompt and completion as one text whose spans are the completion's assistant turns.

    Plain strings are concatenated. If either is messages, a string for the other is one user or assistant turn.
    Raises SkipRow where one text cannot hold all turns (see `compose_messages`).
    """
    rendered = compose_all(tokenizer, prompt, completion)
    if len(rendered) > 1:
        raise SkipRow(REWRITTEN)
    return rendered[0]


def compose_all(tokenizer, prompt: Text, completion: Text) -> list[Rendered]:  # noqa: ANN001
    """`compose` as one text or several (see `compose_messages`). An answer that the prompt has begun is continued."""
    if isinstance(prompt, str) and isinstance(completion, str):
        return [Rendered(prompt + completion, [(len(prompt), len(prompt + completion))], True)]
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(without_blank(prompt))
    after = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
    if is_begun(before) and after and after[0]["role"] == "assistant":
        begun = {k: v for k, v in before[-1].items() if k in ("role", "content", *CARRIED, *THOUGHT_FIELDS)}
        after[0] = {**begun, **after[0], "content": begun["content"] + after[0]["content"]}
        return compose_messages(tokenizer, before[:-1] + after, len(before) - 1, begun)
    return compose_messages(tokenizer, before + after, first=len(before))


def compose_messages(tokenizer, messages: Sequence[dict], first: int = 0,  # noqa: ANN001
                     begun: dict | None = None) -> list[Rendered]:
    """A conversation as text whose spans are the assistant turns from message `first` on, each to its end marker,
    except those marked as not trained.

    One text, where the template keeps history unchanged and ends every turn; else one for each answer, after the prompt
    that generation sees at that turn. Text after the last answer is cut. begun: the beginning of message `first` that
    belongs to its prompt.
    """
    turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    trained = [i for i in turns if not is_untrained(messages[i])]
    if turns and not trained:
        raise SkipRow("no answer that is to be trained")
    answers = answers_of(tokenizer, messages[: trained[-1] + 1] if trained else messages, first, begun)
    text = "".join(answers[-1])
    is_one = len(answers) == 1 or (dialect_of(tokenizer).ends and all(text.startswith("".join(a)) for a in answers))
    shown = [(i, a, (len(a.prompt), len(a.prompt) + len(a.text))) for i, a in zip(turns, answers, strict=False)
             if i in trained]
    texts = [(trained[-1], Rendered(text, [span for _, _, span in shown], False))] if is_one else [
        (i, Rendered("".join(a), [span], False)) for i, a, span in shown]
    return [_with_images(tokenizer, row, messages[:i]) for i, row in texts]


def _with_images(tokenizer, row: Rendered, messages: Sequence[dict]) -> Rendered:  # noqa: ANN001
    """The text of these messages, with each image's own text in place of what the template writes for any."""
    images = tuple(ImageRef(*image) for message in messages for image in message.get(IMAGES, ()))
    if not images:
        return row
    reader = reader_of(tokenizer)
    if reader is None:
        raise SkipRow(NO_READER)
    pieces = row.text.split(reader.placeholder)
    if len(pieces) != len(images) + 1:
        raise SkipRow(LEFT_OUT)
    texts = [_image_text(reader, image) for image in images]
    ends = list(accumulate(len(piece) + len(reader.placeholder) for piece in pieces[:-1]))  # in the template's text
    grown = list(accumulate((len(text) - len(reader.placeholder) for text in texts), initial=0))
    spans = [(start + grown[bisect_right(ends, start)], end + grown[bisect_right(ends, end)])
             for start, end in row.spans]
    return row._replace(text=_joined(pieces, texts), spans=spans, images=images, images_end=ends[-1] + grown[-1],
                        short=_joined(pieces, [IMAGE_SHOWN] * len(texts)))


def _joined(pieces: Sequence[str], between: Sequence[str]) -> str:
    return "".join(text for pair in zip(pieces, [*between, ""], strict=True) for text in pair)


def _image_text(reader: ImageReader, image: ImageRef) -> str:
    """The text that stands for an image. It depends on the size alone: no image is processed for it twice."""
    known = _texts.setdefault(reader, {})
    size = image.width, image.height
    if size not in known:
        try:
            known[size] = reader.read(image).text
        except ImageError as error:
            raise SkipRow(f"an image that {error}") from error
    return known[size]


def encode_all(tokenizer, rendered: Sequence[Rendered], append_eos: bool = True) -> list[Encoded]:  # noqa: ANN001
    """Tokenize many texts; each ends with EOS, as a part of its last span. Prompts get no EOS.

    append_eos: whether plain texts get EOS; messages always do, unless their template has its own end of turn.
    """
    out: list[Encoded | None] = [None] * len(rendered)
    bos = getattr(tokenizer, "bos_token", None)
    # the tokenizer adds BOS to plain texts, except to those already rendered that begin with it
    adds = [r.is_plain and not (bos and r.text.startswith(bos)) for r in rendered]
    for special in (False, True):
        rows = [i for i, adds_bos in enumerate(adds) if adds_bos == special]
        for i, (ids, ends) in zip(rows, _tokenize(tokenizer, [rendered[i] for i in rows], special), strict=True):
            out[i] = _mark(tokenizer, rendered[i], ids, ends, append_eos)
    return out


def encode_first(tokenizer, rendered: Sequence[Rendered], num_tokens: int,  # noqa: ANN001
                 append_eos: bool = True) -> list[Encoded]:
    """`encode_all` for callers that need only the first `num_tokens` tokens of a text, and whether there are more.

    Tokenizing takes hundreds of bytes of memory per character. So of a long text only the beginning is tokenized, and
    more of it if that gave too few tokens. A cut changes the last tokens before it, which are not counted.
    """
    encoded: dict[int, Encoded] = {}
    waiting, size = list(range(len(rendered))), num_tokens * _CHARACTERS
    while waiting:
        texts = [_beginning(rendered[i], size) for i in waiting]
        encoded |= zip(waiting, encode_all(tokenizer, texts, append_eos), strict=True)
        waiting = [i for i in waiting if len(rendered[i].text) > size and len(encoded[i].ids) < num_tokens + _MARGIN]
        size *= 8
    return [encoded[i] for i in range(len(rendered))]


def _beginning(row: Rendered, size: int) -> Rendered:
    if len(row.text) <= size:
        return row
    return row._replace(text=row.text[:size], spans=[(min(start, size), min(end, size)) for start, end in row.spans],
                        images_end=min(row.images_end, size))


def encode(tokenizer, prompt: Text, completion: Text) -> Encoded:  # noqa: ANN001
    """One prompt with its completion as tokens; see `compose` and `encode_all`."""
    return encode_all(tokenizer, [compose(tokenizer, prompt, completion)])[0]


def encode_prompt(tokenizer, prompt: Text) -> list[int]:  # noqa: ANN001
    """Tokens of a prompt alone: those in `encode`, unless a merge straddles the boundary there. Never ends in EOS."""
    return encode_all(tokenizer, [compose_prompt(tokenizer, prompt)])[0].ids


def _mark(tokenizer, row: Rendered, ids: list[int], ends: list[int], append_eos: bool = True) -> Encoded:  # noqa: ANN001
    """ends: the character behind each token, in order."""
    eos = tokenizer.eos_token_id
    if not row.spans:
        ends_every_text = row.is_plain and ids[-1:] == [eos] and not row.text.endswith(tokenizer.eos_token or "\0")
        ids = ids[:-1] if ends_every_text else ids  # some tokenizers append EOS to any text
        return Encoded(ids, [False] * len(ids), len(ids), row.images)
    mask = [False] * len(ids)
    for span in row.spans:
        start, end = (bisect_right(ends, char) for char in span)  # tokens that end before it
        mask[start:end] = [True] * (end - start)
    num_prompt_tokens = bisect_right(ends, row.spans[0][0])
    if append_eos or not row.is_plain:
        if not ids or ids[-1] not in (eos, *(() if row.is_plain else turn_ends(tokenizer))):
            if eos is None:
                raise UserError("the tokenizer has no eos_token, so no response could ever end; "
                                "name one in tokenizer_config.json")
            ids, mask = [*ids, eos], [*mask, True]
        mask[-1] = True
    return Encoded(ids, mask, num_prompt_tokens, row.images, bisect_right(ends, row.images_end))


def _tokenize(tokenizer, rows: list[Rendered], special: bool) -> list[tuple[list[int], list[int]]]:  # noqa: ANN001
    """For each text its ids and, if any text has spans, the character behind each token. The parts of a text between
    BREAKs are tokenized one by one."""
    parts = [[row.text] if special else row.text.split(BREAK) for row in rows]
    edges = [[char - start for span in row.spans for char in (*span, *[row.images_end] * bool(row.images))]
             for row, texts in zip(rows, parts, strict=True)
             for start in accumulate((len(part) + 1 for part in texts[:-1]), initial=0)]
    tokenized = iter(_tokenize_texts(tokenizer, [part for texts in parts for part in texts], edges, special))
    out = []
    for texts in parts:
        ids: list[int] = []
        ends: list[int] = []
        start = 0
        for part in texts:
            more, behind = next(tokenized)
            ids += more
            ends += [start + end for end in behind]
            start += len(part) + 1
        out.append((ids, list(accumulate(ends, max))))  # special tokens have the offsets (0, 0)
    return out


def _tokenize_texts(tokenizer, texts: list[str], edges: list[list[int]],  # noqa: ANN001
                    special: bool) -> list[tuple[list[int], list[int]]]:
    """`_tokenize` for texts without breaks; edges: the characters of each that matter."""
    if not texts:
        return []
    if not getattr(tokenizer, "is_fast", False):
        return [_by_prefixes(tokenizer, text, chars, special) for text, chars in zip(texts, edges, strict=True)]
    if not any(edges):  # prompts: computing offsets would double the time
        return [(ids, []) for ids in tokenizer(texts, add_special_tokens=special)["input_ids"]]
    batch = tokenizer(texts, add_special_tokens=special, return_offsets_mapping=True)
    return [(ids, [end for _, end in offsets]) for ids, offsets in
            zip(batch["input_ids"], batch["offset_mapping"], strict=True)]


def _by_prefixes(tokenizer, text: str, chars: list[int], special: bool) -> tuple[list[int], list[int]]:  # noqa: ANN001
    """`_tokenize_texts` without offsets, by the tokens that the text shares with its prefix at each edge."""
    ids, ends = list(tokenizer(text, add_special_tokens=special)["input_ids"]), []
    for char in sorted(char for char in set(chars) if 0 <= char < len(text)):
        part = list(tokenizer(text[:char], add_special_tokens=special)["input_ids"])
        ends += [char] * (num_shared(ids, part) - len(ends))
    return ids, ends + [len(text)] * (len(ids) - len(ends))
