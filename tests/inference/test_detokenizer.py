"""Text from tokens as they come: the text of the whole, at a cost that grows with their number alone."""

from __future__ import annotations

import pytest

from hybrid_rlhf.models.detokenizer import IncrementalDetokenizer
from tests.factories.tiny import tiny_tokenizer


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self) -> None:
        self.own, self.num_decoded = tiny_tokenizer(), 0

    def decode(self, ids, **named) -> str:
        self.num_decoded += len(ids)
        return self.own.decode(ids, **named)


@pytest.mark.parametrize("kind", ["half a character", "no token"])
def test_a_long_run_without_text_is_not_decoded_again_with_every_token(kind):
    tokenizer = Counting()
    token = {"half a character": tokenizer.own("\u4e16")["input_ids"][1], "no token": 10_000}[kind]
    text = IncrementalDetokenizer(tokenizer)
    ids = [token] * 2000 + tokenizer.own(" fox \u4e16!")["input_ids"]
    said = "".join(map(text.push, ids)) + text.flush()
    assert said == ("\ufffd" * 2000 if kind == "half a character" else "") + " fox \u4e16!"
    assert tokenizer.num_decoded < 300 * len(ids)  # of half its square it would be 2000 for each


def test_tokens_before_are_no_part_of_the_text_even_where_they_end_in_mid_character():
    tokenizer = tiny_tokenizer()
    fox, world = tokenizer(" fox \u4e16")["input_ids"], tokenizer("\u4e16")["input_ids"]
    for before in (fox, world[:2], [*fox, world[0]], []):
        text = IncrementalDetokenizer(tokenizer, before=before)
        assert "".join(map(text.push, [*fox, *world])) + text.flush() == " fox \u4e16\u4e16"
