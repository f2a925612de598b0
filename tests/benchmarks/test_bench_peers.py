"""Both sides of the offline benchmarks read the same tokens."""

import offline_step
from peers.offline import padded
from random_models import rows_of, text_of, tokenizer_of


def test_the_text_that_trl_tokenizes_is_our_tokens():
    tokenizer = tokenizer_of(50)
    prompt, answer = [7, 3, 49], [5, 12]
    assert tokenizer(text_of(prompt) + text_of(answer))["input_ids"] == prompt + answer
    assert tokenizer(text_of(prompt))["input_ids"] == prompt  # so TRL finds where the answer begins
    assert tokenizer.eos_token_id == offline_step.EOS


def test_padding_of_the_plain_trainer_is_neither_attended_nor_predicted():
    batch = padded([{"input_ids": [4, 5, 6]}, {"input_ids": [7]}])
    assert batch["input_ids"].tolist() == [[4, 5, 6], [7, 0, 0]]
    assert batch["labels"].tolist() == [[4, 5, 6], [7, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_rows_are_drawn_once_and_within_their_lengths():
    rows = rows_of(50, (2, 9), 60, 1)
    assert rows == rows_of(50, (2, 9), 60, 1)
    assert {len(r) for r in rows} == set(range(2, 10))
    assert all(3 <= i < 60 for r in rows for i in r)
