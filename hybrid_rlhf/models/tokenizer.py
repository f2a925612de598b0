"""Tokenizers: loading them, training one, and the pad token that must not be the end of sequence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.models.load import check_folder, first_line
from hybrid_rlhf.models.template import dialect_of, special_ids

CHATML_MARKERS = ("<|im_start|>", "<|im_end|>")
_known: WeakKeyDictionary = WeakKeyDictionary()  # tokenizer -> the ids and the chat template that it was loaded with


def load_tokenizer(path: str, trust_remote_code: bool = False):  # noqa: ANN201 - a transformers class
    """The tokenizer at a hub id or folder, with a pad token that is not an end-of-sequence token.

    pad == eos hides the end of every response from whoever masks by id, plain transformers included, so another
    token is chosen: unk, a token the vocabulary reserves for padding, or a new one.
    """
    from transformers import AutoTokenizer

    check_folder(path, needs=("tokenizer",))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot load a tokenizer from {path}: {first_line(error)}; "
                        "give model.tokenizer_name_or_path") from error
    set_pad_token(tokenizer)
    _known[tokenizer] = frozenset(tokenizer.get_vocab().values()), tokenizer.chat_template
    return tokenizer


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
    """A byte-level BPE tokenizer trained on `texts`, with pad, eos and bos tokens of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|im_end|>",
                                   clean_up_tokenization_spaces=False)


def turn_ends(tokenizer) -> list[int]:  # noqa: ANN001
    """The special tokens that the chat template writes behind an answer (Gemma's <end_of_turn>) and behind a tool call,
    as ids; none where it writes none.

    A response ends with one of them, and with nothing else: a second marker behind it would teach the model to go on.
    """
    ends = dialect_of(tokenizer).ends
    ids = special_ids(tokenizer) if ends else {}
    return [ids[end] for end in ends]
