"""Tokenizers: loading them, training one, and the pad token that must not be the end of sequence."""

from __future__ import annotations

import re
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from hybrid_rlhf.config import UserError
from hybrid_rlhf.models.load import check_folder, first_line

_turn_ends: WeakKeyDictionary = WeakKeyDictionary()  # tokenizer -> (its template, the token)
_known: WeakKeyDictionary = WeakKeyDictionary()  # tokenizer -> the ids that it had when it was loaded


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
    _known[tokenizer] = frozenset(tokenizer.get_vocab().values())
    return tokenizer


def added_ids(tokenizer) -> list[int]:  # noqa: ANN001
    """Ids of the tokens that `tokenizer` has been given since `load_tokenizer`, such as a chat template's markers."""
    return sorted(set(tokenizer.get_vocab().values()) - _known[tokenizer]) if tokenizer in _known else []


def set_pad_token(tokenizer) -> bool:  # noqa: ANN001
    """Give `tokenizer` a pad token other than eos; True if a token had to be added to the vocabulary."""
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        return False
    vocab = tokenizer.get_vocab()
    reserved = [t for t in vocab if re.search(r"(?i)^<[|\[]?.*pad.*[|\]]?>$|^\[PAD\]$", t)]
    candidates = [tokenizer.unk_token, *sorted(reserved)]
    for token in candidates:
        if token is not None and token != tokenizer.eos_token:
            tokenizer.pad_token = token
            return False
    return tokenizer.add_special_tokens({"pad_token": "<|pad|>"}) > 0


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


def turn_end(tokenizer) -> int | None:  # noqa: ANN001
    """The special token that the chat template writes behind an answer (Gemma's <end_of_turn>), or None.

    A response ends with it, and with nothing else: a second marker behind it would teach the model to go on.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str) or not template:
        return None
    if tokenizer not in _turn_ends or _turn_ends[tokenizer][0] != template:
        _turn_ends[tokenizer] = (template, _find_turn_end(tokenizer))
    return _turn_ends[tokenizer][1]


def _find_turn_end(tokenizer) -> int | None:  # noqa: ANN001
    from jinja2 import TemplateError

    said = "turn" * 5
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return None
    rest = text.rpartition(said)[2].lstrip()
    special = {i: str(t) for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    found = [i for i, t in special.items() if rest.startswith(t)]
    return max(found, key=lambda i: len(special[i]), default=None)
