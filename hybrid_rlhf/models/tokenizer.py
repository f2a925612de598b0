"""Load and train tokenizers, and choose a pad token that is not the end of sequence."""

from __future__ import annotations

import logging
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
_log = logging.getLogger("transformers.tokenization_utils_tokenizers")
_PIECE = 10_000  # characters of a text that the training of a tokenizer reads at once
_known: WeakKeyDictionary = WeakKeyDictionary()  # tokenizer -> the ids and the chat template that it was loaded with


class Tokenizer(Protocol):
    """The interface used of transformers' tokenizers, whose class would be a heavy import."""

    chat_template: Any
    pad_token_id: int
    eos_token_id: int

    def __call__(self, *texts: str, **options: object) -> Any: ...

    def __len__(self) -> int: ...

    def decode(self, ids: Sequence[int], **options: object) -> str: ...

    def batch_decode(self, ids: Sequence[Sequence[int]], **options: object) -> list[str]: ...

    def get_vocab(self) -> dict[str, int]: ...


def _is_news(record: logging.LogRecord) -> bool:
    """False for a note of transformers on what it leaves undone, which no user has asked for."""
    return "Ignoring clean_up_tokenization_spaces=True" not in record.getMessage()


def load_tokenizer(path: str, trust_remote_code: bool = False, cure: str = "give model.tokenizer_name_or_path"):  # noqa: ANN201 - a transformers class
    """The tokenizer at a hub id or folder, with a pad token that is not an end-of-sequence token.

    pad == eos hides the end of every response from code that masks by id, transformers included, so another token is
    chosen: unk, a token the vocabulary reserves for padding, or a new one. cure: the advice in the error of a tokenizer
    that cannot be loaded.
    """
    from transformers import AutoTokenizer

    check_folder(path, needs=("tokenizer",))
    check_tokenizer_config(path)
    file = Path(path) / "tokenizer.json"
    place = file if file.exists() else path if Path(path).exists() else f"{path} (no folder here, so taken as a hub id)"
    _log.addFilter(_is_news)
    with refusing(f"cannot load a tokenizer from {place}", cure, tokenizer_files(path)):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        tokenizer("a")  # some wrong rules fail only here
    _check_ids(tokenizer, path)
    template = tokenizer.chat_template
    texts = list(template.values()) if isinstance(template, dict) else [template]
    check(all(text is None or isinstance(text, str) for text in texts),
          f"{path}/tokenizer_config.json: chat_template is {template!r:.60}; it must be text, or several texts by name")
    set_pad_token(tokenizer)
    # every stage reports itself what it does with rows that are too long
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    _known[tokenizer] = frozenset(tokenizer.get_vocab().values()), tokenizer.chat_template
    return tokenizer


def _check_ids(tokenizer, path: str) -> None:  # noqa: ANN001
    """UserError for ids without a row in the model beside the tokenizer, whose tables may grow by added tokens."""
    file = Path(path) / CONFIG
    if not file.exists():
        return
    config = read_object(file)
    inner = config.get("text_config")
    size = (inner if isinstance(inner, dict) else config).get("vocab_size")
    added = set(tokenizer.added_tokens_decoder)
    top = max((i for i in tokenizer.get_vocab().values() if i not in added), default=-1)
    if type(size) is int:
        check(top < size, f"{path}: the tokenizer has ids up to {top}, and vocab_size in {CONFIG} is {size}; give the "
                          "tokenizer that the model was made with")
        check(max(added, default=-1) < max(size, len(tokenizer)),
              f"{path}: the tokenizer has an added token of id {max(added, default=-1)}, and vocab_size in {CONFIG} is "
              f"{size}; give the tokenizer that the model was made with")


def added_ids(tokenizer) -> list[int]:  # noqa: ANN001
    """Ids of the tokens that the model is not trained on: those added to `tokenizer` since `load_tokenizer`, and the
    special ones of its first chat template, which a base model may have in its vocabulary (SmolLM2's has ChatML's
    markers)."""
    ids, template = _known.get(tokenizer, (None, None))
    if ids is None:
        return []
    added = set(tokenizer.get_vocab().values()) - ids
    if not template and (now := str(tokenizer.chat_template or "")):
        added |= {i for token, i in special_ids(tokenizer).items() if token in now and token != tokenizer.bos_token}
    return sorted(added)


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
    """Tokens that may pad, best first: those named pad, unk, reserved ones, and other special ones that our texts never
    contain. (An added token would enlarge the embeddings by a row, to an odd size.)"""
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

    Long texts are split: memory grows with the longest text, and time with the square of the longest word.
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
    """The text of a response for reward functions, judges and people: without the tokens that end it (EOS, an end of
    turn, pad; the last one if `is_ended`) and those that frame it, and with every other special token, such as <think>,
    as text."""
    lead, behind = answer_frame(tokenizer)
    endings = {tokenizer.eos_token_id, tokenizer.pad_token_id, *turn_ends(tokenizer), *behind}
    last = len(ids) - is_ended
    while last and ids[last - 1] in endings:
        last -= 1
    return tokenizer.decode(list(ids[:last]), skip_special_tokens=False).removeprefix(lead) if last else ""


def answer_frame(tokenizer) -> tuple[str, frozenset[int]]:  # noqa: ANN001
    """What the chat template writes around an answer's text: the text before it, and the ids of the special tokens
    after it."""
    dialect = dialect_of(tokenizer)
    ids = special_ids(tokenizer) if dialect.behind else {}
    return dialect.lead, frozenset(ids[token] for token in dialect.behind)


def turn_ends(tokenizer) -> list[int]:  # noqa: ANN001
    """The ids of the special tokens that the chat template writes after an answer (Gemma's <end_of_turn>) and after a
    tool call; empty where it writes none.

    A response ends with exactly one of them: a second marker after it would teach the model to go on.
    """
    ends = dialect_of(tokenizer).ends
    ids = special_ids(tokenizer) if ends else {}
    return [ids[end] for end in ends]
