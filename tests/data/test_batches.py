"""Rows to batches and batches in order: masks from lengths, packing without leaks, exact resumption."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.errors import escape_control
from hybrid_rlhf.core.tensors import predicted
from hybrid_rlhf.data.cache import Table, rows_digest, save
from hybrid_rlhf.data.collate import collate_pairs, collate_prompts, collate_sft, pack
from hybrid_rlhf.data.loader import Loader, blend
from hybrid_rlhf.data.preview import marked, pieces
from tests.factories.tiny import tiny_tokenizer

EOS = 3


def row(*ids: int, prompt: int = 0) -> dict:
    return {"input_ids": list(ids), "loss_mask": [i >= prompt for i in range(len(ids))]}


@pytest.mark.parametrize("pad", [0, EOS])
def test_the_eos_is_trained_on_also_where_pad_is_eos(pad):
    batch = collate_sft([row(5, 6, 7, EOS, prompt=2), row(8, EOS, prompt=1)], pad)
    assert batch.input_ids.tolist() == [[5, 6, 7, EOS], [8, EOS, pad, pad]]
    assert batch.attention_mask.tolist() == [[True] * 4, [True, True, False, False]]
    assert predicted(batch).tolist() == [7, EOS, EOS]
    assert batch.position_ids is None
    pairs = collate_pairs([{"chosen_ids": [5, 6, EOS], "rejected_ids": [5, EOS], "num_prompt_tokens": 1}], pad)
    assert predicted(pairs.sequences).tolist() == [6, EOS, EOS]


def test_packed_rows_hold_whole_samples_and_no_sample_predicts_into_another():
    rows = [row(10, 11, EOS), row(20, 21, 22, 23, EOS), row(30, EOS), row(40, 41, 42, EOS, prompt=3)]
    batch = collate_sft(rows, pad_id=0, packing_length=8)
    # by falling length 5 4 3 2: [20.. (5), 10.. (3)], [40.. (4), 30.. (2)]
    assert batch.input_ids.tolist() == [[20, 21, 22, 23, EOS, 10, 11, EOS], [40, 41, 42, EOS, 30, EOS, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 0, 1, 0, 0]]
    assert batch.attention_mask.tolist() == [[True] * 8, [True] * 6 + [False] * 2]
    assert predicted(batch).tolist() == [21, 22, 23, EOS, 11, EOS, EOS, EOS]


@given(st.lists(st.integers(1, 12), max_size=30), st.integers(1, 12))
def test_packing_places_every_row_once_within_the_length(lengths, capacity):
    bins = pack(lengths, capacity)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= capacity or len(b) == 1 for b in bins)
    full = [sum(lengths[i] for i in b) for b in bins]
    assert all(a + b > capacity for a, b in itertools.combinations(full, 2))  # no two bins would fit into one


def test_pairs_are_all_chosen_then_all_rejected_with_each_sides_own_prompt_length():
    batch = collate_pairs([
        {"chosen_ids": [1, 2, 3], "rejected_ids": [1, 4], "num_prompt_tokens": 1, "margin": 0.5},
        {"chosen_ids": [5, 6], "rejected_ids": [5, 7, 8, 9], "num_prompt_tokens": 1,
         "num_prompt_tokens_rejected": 2}], 0)
    assert batch.sequences.input_ids.tolist() == [[1, 2, 3, 0], [5, 6, 0, 0], [1, 4, 0, 0], [5, 7, 8, 9]]
    assert predicted(batch.sequences).tolist() == [2, 3, 6, 4, 8, 9]
    assert batch.margin.tolist() == [0.5, 0.0]
    assert len(batch) == 2


def test_prompts_keep_every_other_column_also_where_rows_differ():
    prompts = collate_prompts([{"prompt_ids": [1, 2], "text": "a", "prompt": "a", "answer": 4},
                               {"prompt_ids": [3], "text": "b", "prompt": "b"}])
    assert (prompts.ids, prompts.texts) == ([[1, 2], [3]], ["a", "b"])
    assert prompts.columns == {"prompt": ["a", "b"], "answer": [4, None]}


def numbers(count: int, batch_size: int, seed: int = 0, **more) -> Loader:
    return Loader([{"n": i} for i in range(count)], batch_size, lambda rows: [r["n"] for r in rows], seed, **more)


def test_the_order_is_a_function_of_seed_and_epoch():
    first, again, other = numbers(10, 5), numbers(10, 5), numbers(10, 5, seed=1)
    taken = [first.next() for _ in range(4)]
    assert taken == [again.next() for _ in range(4)] != [other.next() for _ in range(4)]
    assert sorted(taken[0] + taken[1]) == sorted(taken[2] + taken[3]) == list(range(10))
    assert taken[:2] != taken[2:]


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 20), batch_size=st.integers(1, 6), taken=st.integers(0, 25),
       drop=st.sampled_from([None, False]))
def test_after_any_number_of_batches_a_new_loader_goes_on_exactly_there(count, batch_size, taken, drop):
    loader, resumed = (numbers(count, batch_size, drop_last=drop) for _ in range(2))
    for _ in range(taken):
        loader.next()
    torch.manual_seed(taken)  # the global generator has no say
    resumed.load_state(loader.state())
    assert [resumed.next() for _ in range(5)] == [loader.next() for _ in range(5)]


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 30), batch_size=st.integers(1, 5), world=st.integers(1, 4), shuffle=st.booleans())
def test_an_epoch_without_dropping_has_every_row_and_ranks_share_the_global_batch(count, batch_size, world, shuffle):
    ranks = [numbers(count, batch_size, rank=r, world=world, drop_last=False, shuffle=shuffle) for r in range(world)]
    alone = numbers(count, batch_size * world, drop_last=False, shuffle=shuffle)
    assert {len(r) for r in ranks} == {len(alone)}
    seen = Counter()
    for _ in range(len(alone)):
        parts, whole = [r.next() for r in ranks], alone.next()
        assert [n for part in parts for n in part] == whole
        assert max(map(len, parts)) - min(map(len, parts)) <= 1  # a short batch is shared evenly
        seen.update(whole)
    assert seen == dict.fromkeys(range(count), 1)


def test_a_stage_that_samples_fills_up_a_batch_of_too_few_prompts_so_that_each_process_has_some():
    ranks = [numbers(3, 2, rank=r, world=2) for r in range(2)]
    taken = [n for r in ranks for n in r.next()]
    assert len(taken) == 4 and set(taken) == {0, 1, 2} and numbers(3, 4).next() == taken[:3]


def test_each_epoch_takes_the_next_part_of_a_source_that_is_weighed_down_and_resumes_in_it():
    """60 and 20 rows by 1 and 3: an epoch of 80 has 20 of the 60 and each of the 20 three times."""
    tables = [[{"n": i} for i in range(60)], [{"n": 100 + i} for i in range(20)]]

    def loader(rank: int = 0, world: int = 1) -> Loader:
        return Loader(blend(tables, [1.0, 3.0], seed=5), 10 // world, lambda rows: [r["n"] for r in rows], 0,
                      rank=rank, world=world)

    whole = loader()
    epochs = [[n for _ in range(8) for n in whole.next()] for _ in range(6)]
    down = [sorted(n for n in epoch if n < 100) for epoch in epochs]
    for epoch in epochs:
        assert Counter(n for n in epoch if n >= 100) == dict.fromkeys(range(100, 120), 3)
    assert [len(set(part)) for part in down] == [20] * 6
    assert sorted(n for part in down[:3] for n in part) == sorted(n for part in down[3:] for n in part) == [*range(60)]
    first = [r["n"] for r in blend(tables, [1.0, 3.0], seed=5)]
    assert sorted(first) == sorted(epochs[0])  # what is counted at the start, and what checkpoints know the data by
    resumed, pair = loader(), [loader(rank, 2) for rank in range(2)]
    for each in (resumed, *pair):
        each.load_state({"epoch": 2, "position": 3})
    rest = [n for _ in range(5) for n in resumed.next()]
    assert rest == epochs[2][30:] == [n for _ in range(5) for each in pair for n in each.next()]
    few = blend(tables, [1.0, 3.0], seed=5, max_samples=30)
    assert few.of_epoch(3) is few and len(few) == 30 and blend(tables, [3.0, 1.0], 5).num_distinct() == 80


def test_dropping_the_last_batch_keeps_batches_whole_and_is_off_for_tiny_data():
    assert [len(b) for b in itertools.islice(numbers(11, 4), 4)] == [4, 4, 4, 4]
    assert len(numbers(11, 4)) == 2
    assert len(numbers(3, 4)) == 1
    assert sorted(numbers(3, 4).next()) == [0, 1, 2]
    with pytest.raises(UserError, match="3 rows fill no batch of 4"):
        numbers(3, 4, drop_last=True)
    with pytest.raises(UserError, match="no rows"):
        numbers(0, 4)
    with pytest.raises(UserError, match="batch size is 0"):
        numbers(4, 0)


@given(count=st.integers(1, 30), batch_size=st.integers(1, 5), world=st.integers(1, 4))
def test_one_ordered_pass_gives_every_row_to_exactly_one_rank_and_moves_nothing(count, batch_size, world):
    ranks = [numbers(count, batch_size, rank=r, world=world) for r in range(world)]
    seen = [n for r in ranks for batch in r.once() for n in batch]
    assert sorted(seen) == list(range(count))
    assert ranks[0].state() == {"epoch": 0, "position": 0}
    assert len({len(list(r.once())) for r in ranks}) == 1  # or a rank would wait for one that has none left


def test_marked_tokens_stand_in_brackets_and_escapes_of_the_data_do_not_reach_the_terminal():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("What is red\x1b[2J")["input_ids"]
    mask = [i >= 2 for i in range(len(ids))]
    text = marked(pieces(tokenizer, ids, mask), brackets=True)
    head = tokenizer.decode(ids[:2])
    assert text.plain == head + "⟦" + "What is red"[len(head):] + "␛[2J⟧"
    assert escape_control("a\x9bb\u202ec\r\nd\te☃") == "a<U+009B>b<U+202E>c␍\nd\te☃"


def test_a_changed_row_anywhere_gives_another_fingerprint_whether_rows_are_in_memory_or_on_disk(tmp_path):
    rows = [{"input_ids": [i, i + 1]} for i in range(400)]
    save(rows, tmp_path, "rows")

    def of(table: list[dict]) -> str:
        return Loader(table, 8, list, seed=0).fingerprint()

    known = {of(rows)} | {of([*rows[:i], {"input_ids": [i, 0]}, *rows[i + 1 :]]) for i in (0, 1, 199, 201, 398, 399)}
    assert len(known) == 7 and of(rows[::-1]) not in known and of(rows[:-1]) not in known
    on_disk, other = blend([Table(tmp_path, "rows")], [None], 0), blend([rows], [None], 0, max_samples=390)
    assert of(on_disk) == of(blend([rows], [None], 0)) != of(other)
    assert len({of(blend([rows], [None], 0, max_samples=390)), of(blend([rows], [None], 1, max_samples=390))}) == 2


VALUES = st.one_of(st.integers(-2**70, 2**70), st.floats(allow_nan=False), st.booleans(), st.none(),
                   st.text(max_size=8), st.lists(st.integers(0, 300_000), max_size=6))


@given(rows=st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), min_size=1, max_size=5))
def test_rows_come_back_as_they_were(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("t")
    save(rows, folder, "train")
    found = Table(folder, "train")
    assert list(found) == rows
    assert (len(found), found[-1]) == (len(rows), rows[-1])
    with pytest.raises(IndexError):
        found[len(rows)]
    text = (folder / "train.jsonl").read_bytes()
    assert [json.loads(line) for line in text.splitlines()] == rows
    assert rows_digest(rows) == rows_digest(found) == hashlib.sha256(text).hexdigest()
