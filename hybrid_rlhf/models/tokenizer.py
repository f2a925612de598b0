"""Tokenizers: loading them, training one, and the pad token that must not be the end of sequence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from hybrid_rlhf.core.config import check
from hybrid_rlhf.models.folder_files import CONFIG, check_tokenizer_config, read_object, refusing, tokenizer_files
from hybrid_rlhf.models.load import check_folder
from hybrid_rlhf.models.template import dialect_of, special_ids

CHATML_MARKERS = ("<|im_start|>", "<|im_end|>")
_PIECE = 10_000  # characters of a text that the training of a tokenizer reads at once
_known: WeakKeyDictionary = WeakKeyDictionary()  # tokenizer -> the ids and the chat template that it was loaded with


class Tokenizer(Protocol):
    """What is asked of a tokenizer of transformers, whose own class would be a heavy import."""

    chat_template: Any
    pad_token_id: int
    eos_token_id: int

    def __call__(self, *texts: str, **options: object) -> Any: ...

    def __len__(self) -> int: ...

    def decode(self, ids: Sequence[int], **options: object) -> str: ...

    def batch_decode(self, ids: Sequence[Sequence[int]], **options: object) -> list[str]: ...

    def get_vocab(self) -> dict[str, int]: ...


def load_tokenizer(path: str, trust_remote_code: bool = False, cure: str = "give model.tokenizer_name_or_path"):  # noqa: ANN201 - a transformers class
    """The tokenizer at a hub id or folder, with a pad token that is not an end-of-sequence token.

    pad == eos hides the end of every response from whoever masks by id, plain transformers included, so another
    token is chosen: unk, a token the vocabulary reserves for padding, or a new one. cure: what the error of one that
    cannot be loaded advises.
    """
    from transformers import AutoTokenizer

    check_folder(path, needs=("tokenizer",))
    check_tokenizer_config(path)
    file = Path(path) / "tokenizer.json"
    place = file if file.exists() else path if Path(path).exists() else f"{path} (no folder here, so taken as a hub id)"
    with refusing(f"cannot load a tokenizer from {place}", cure, tokenizer_files(path)):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        tokenizer("a")  # what is wrong with its rules may come out only now
    _check_ids(tokenizer, path)
    given = tokenizer.chat_template
    texts = list(given.values()) if isinstance(given, dict) else [given]
    check(all(text is None or isinstance(text, str) for text in texts),
          f"{path}/tokenizer_config.json: chat_template is {given!r:.60}; it must be text, or several texts by name")
    set_pad_token(tokenizer)
    # of which every stage says itself what becomes of what is too long
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    _known[tokenizer] = frozenset(tokenizer.get_vocab().values()), tokenizer.chat_template
    return tokenizer


def _check_ids(tokenizer, path: str) -> None:  # noqa: ANN001
    """UserError for ids that the model beside the tokenizer, which may grow by the tokens that were added, has no row
    for."""
    file = Path(path) / CONFIG
    if not file.exists():
        return
    found = read_object(file)
    inner = found.get("text_config")
    size = (inner if isinstance(inner, dict) else found).get("vocab_size")
    added = set(tokenizer.added_tokens_decoder)
    own = max((i for i in tokenizer.get_vocab().values() if i not in added), default=-1)
    if type(size) is int:
        check(own < size, f"{path}: the tokenizer has ids up to {own}, and vocab_size in {CONFIG} is {size}; give the "
                          "tokenizer that the model was made with")
        check(max(added, default=-1) < max(size, len(tokenizer)),
              f"{path}: the tokenizer has an added token of id {max(added, default=-1)}, and vocab_size in {CONFIG} is "
              f"{size}; give the tokenizer that the model was made with")


def added_ids(tokenizer) -> list[int]:  # noqa: ANN001
    """Ids of the tokens that mean nothing to the model yet: those that `tokenizer` has been given since
    `load_tokenizer`, and the special ones of its first chat template, which a base may have (SmolLM2's has ChatML's
    markers) and was never trained on."""
    ids, template = _known.get(tokenizer, (None, None))
    if ids is None:
        return []
    found = set(tokenizer.get_vocab().values()) - ids
    if not template and (now := str(tokenizer.chat_template or "")):
        found |= {i for token, i in special_ids(tokenizer).items() if token in now and token != tokenizer.bos_token}
    return sorted(found)


def set_pad_token(tokenizer) -> bool:  # noqa: ANN001
    """Give `tokenizer` a pad token other than eos; True if a token had to be added to the vocabulary."""
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        return False
    token = next(_spare_tokens(tokenizer), None)
    if token is not None:
        tokenizer.pad_token = token
        return False
    return tokenizer.add_special_tokens({"pad_token": "<|pad|>"}) > 0


def _spare_tokens(tokenizer) -> Iterator[str]:  # noqa: ANN001
    """Tokens that may pad, best first: those named for it, unk, reserved ones, and other special ones that no text of
    ours holds. One that must be added makes the embeddings a row larger, and their size odd."""
    used = [t for t in (tokenizer.eos_token, tokenizer.bos_token, *CHATML_MARKERS) if t]
    template = str(getattr(tokenizer, "chat_template", None) or "")

    def is_free(token: str) -> bool:
        return token not in used and token not in template and not re.search(r"(?i)image|video|audio|vision", token)

    yield from filter(is_free, sorted(t for t in tokenizer.get_vocab()
                                      if re.search(r"(?i)^<[|\[]?.*pad.*[|\]]?>$|^\[PAD\]$", t)))
    if tokenizer.unk_token and tokenizer.unk_token != tokenizer.eos_token:
        yield tokenizer.unk_token
    special = [t for t in special_ids(tokenizer) if is_free(t)]
    yield from sorted(special, key=lambda t: not re.search(r"(?i)reserved|unused|extra|empty|filler", t))


def train_tokenizer(texts: Iterable[str], vocab_size: int):  # noqa: ANN201
    """A byte-level BPE tokenizer trained on `texts`, with pad, eos and bos tokens of its own.

    Long texts come in pieces: memory grows with the longest one, and time with the square of the longest word.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    pieces = (text[i : i + _PIECE] for text in texts for i in range(0, len(text), _PIECE))
    backend.train_from_iterator(pieces, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|im_end|>",
                                   clean_up_tokenization_spaces=False)


def completion_text(tokenizer, ids: Sequence[int], is_ended: bool = False) -> str:  # noqa: ANN001
    """The text of a response as reward functions, judges and people read it: without the tokens that end it (EOS, an
    end of turn, pad; the last one if `is_ended`) and those that frame it, and with every other special token, such as
    <think>, as text."""
    lead, behind = answer_frame(tokenizer)
    endings = {tokenizer.eos_token_id, tokenizer.pad_token_id, *turn_ends(tokenizer), *behind}
    last = len(ids) - is_ended
    while last and ids[last - 1] in endings:
        last -= 1
    return tokenizer.decode(list(ids[:last]), skip_special_tokens=False).removeprefix(lead) if last else ""


def answer_frame(tokenizer) -> tuple[str, frozenset[int]]:  # noqa: ANN001
    """What the chat template writes around an answer's words, which is no part of them: the text before, and the
    special tokens behind, as ids."""
    dialect = dialect_of(tokenizer)
    ids = special_ids(tokenizer) if dialect.behind else {}
    return dialect.lead, frozenset(ids[token] for token in dialect.behind)


def turn_ends(tokenizer) -> list[int]:  # noqa: ANN001
    """The special tokens that the chat template writes behind an answer (Gemma's <end_of_turn>) and behind a tool call,
    as ids; none where it writes none.

    A response ends with one of them, and with nothing else: a second marker behind it would teach the model to go on.
    """
    ends = dialect_of(tokenizer).ends
    ids = special_ids(tokenizer) if ends else {}
    return [ids[end] for end in ends]
