"""How many tokens a text has at least, found without tokenizing it: what cannot fit is refused before it costs."""

from __future__ import annotations

from hybrid_rlhf.data.chat import Rendered
from hybrid_rlhf.data.literal import BREAK, whole

_PROBE = "\U0010fffd"  # a private character, which no vocabulary has: it comes back from those that lose nothing


class LeastTokens:
    """A lower bound on the tokens of a text for one tokenizer.

    No token says more than the longest one of the vocabulary, and text on the two sides of a BREAK is tokenized apart.
    White space is not counted, for tokenizers may drop any amount of it, and text is measured as the tokenizer
    normalises it. One that loses other characters (or makes one unknown token of many) has no bound: 0.
    """

    def __init__(self, tokenizer) -> None:  # noqa: ANN001 - a transformers class
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = getattr(backend, "normalizer", None)
        ids = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        self._longest = _longest_token(tokenizer) if _PROBE in tokenizer.decode(ids) else 0

    def of(self, rendered: Rendered) -> int:
        if not self._longest:
            return 0
        text = rendered.text if rendered.is_plain else whole(rendered.text)
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        parts = 1 if rendered.is_plain else sum(bool(part.strip()) for part in rendered.text.split(BREAK))
        return max(parts if text.strip() else 0, -(-_size(text) // self._longest))


def _longest_token(tokenizer) -> int:  # noqa: ANN001
    """Bytes that the longest token stands for, 1 at least. It is written with no fewer in the vocabulary, so that only
    those that are written with many are decoded."""
    longest = 1
    for size, number in sorted(((len(t.encode("utf-8", "surrogatepass")), i)
                                for t, i in tokenizer.get_vocab().items()), reverse=True):
        if size <= longest:
            break
        longest = max(longest, _size(tokenizer.decode([number], clean_up_tokenization_spaces=False)))
    return longest


def _size(text: str) -> int:
    """Bytes of UTF-8 without white space, and without the sign that some vocabularies write for it."""
    return len("".join(text.replace("\u2581", " ").split()).encode("utf-8", "surrogatepass"))
