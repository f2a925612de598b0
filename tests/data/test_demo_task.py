"""The embedded task: its checker against answers worked out by hand, its rows against what they promise."""

import functools
from collections import Counter

import pytest

from hybrid_rlhf.data import demo

# request, its answer, an answer that is wrong: all by hand
KNOWN = [
    ("Please name the first word: A goat B lamp C fish", "A goat", "B lamp"),
    ("Quick, the second word: A goat B lamp C fish", "B lamp", "C fish"),
    ("Name the last word: A goat B lamp C fish", "C fish", "B lamp"),
    ("Hurry, the largest number: A 12 B 25 C 18", "B 25", "C 18"),
    ("Kindly tell me the smallest number: A 12 B 25 C 18", "A 12", "B 25"),
    ("Give the smallest number: A 25 B 12 C 18", "B 12", "A 25"),
]


# made once for all tests
ROWS = {name: functools.cache(getattr(demo, name)) for name in ("demonstrations", "preferences", "prompts")}


def text(messages: list[dict]) -> str:
    return messages[-1]["content"]


@pytest.mark.parametrize("request_text, right, wrong", KNOWN)
def test_checker_agrees_with_answers_worked_out_by_hand(request_text, right, wrong):
    assert demo.is_correct(request_text, f"Gladly! It is {right}")
    assert demo.is_correct([{"role": "user", "content": request_text}], right.split()[1])
    assert not demo.is_correct(request_text, f"Gladly! It is {wrong}")


def test_checker_reads_the_request_out_of_a_rendered_prompt():
    rendered = "<|im_start|>user\nName the last word: A goat B lamp C fish<|im_end|>\n<|im_start|>assistant\n"
    assert demo.is_correct(rendered, "It is fish")
    assert not demo.is_correct(rendered, "It is lamp")


@pytest.mark.parametrize(("is_right", "completions"), [
    (False, ["", "It is", "It is C", "It is fishlamp", "It is lamp. No, fish", "fish lamp", "It is 12",
             "Not lamp but fish", "It is fish or 12", "It is B fish", "It is C lamp"]),
    (True, ["fish", "FISH!", "Ugh, obviously C fish", "Fish. Yes, it is fish"])])
def test_checker_demands_that_the_answer_is_stated_and_no_other_whatever_its_tone(is_right, completions):
    for completion in completions:
        assert demo.is_correct("Name the last word: A goat B lamp C fish", completion) is is_right, completion


@pytest.mark.parametrize("name", ["demonstrations", "preferences", "prompts"])
def test_no_request_is_asked_twice_within_a_data_set(name):
    rows = ROWS[name]()
    assert len({text(r["prompt"]) for r in rows}) == len(rows) >= 10_000


def test_rows_are_the_same_every_time():
    assert demo.prompts() == ROWS["prompts"]()


def test_demonstrations_are_of_mixed_truth_and_the_mistake_is_common_where_meant():
    right, counts = Counter(), Counter()
    for row in ROWS["demonstrations"]():
        kind = text(row["prompt"]).split(":")[0].split(" the ")[1]
        counts[kind] += 1
        right[kind] += demo.is_correct(row["prompt"], text(row["completion"]))
    share = {kind: right[kind] / counts[kind] for kind in counts}
    assert 0.45 < sum(right.values()) / sum(counts.values()) < 0.65
    assert min(counts.values()) > 1000
    # for the second word the mistake is commoner than the truth, for the first it is not
    assert share["second word"] == pytest.approx(demo.MISTAKES["second"][1] / 100, abs=0.03)
    assert share["first word"] == pytest.approx(demo.MISTAKES["first"][1] / 100, abs=0.03)


def test_a_right_answer_is_never_rejected_for_a_wrong_one_and_hard_pairs_abound():
    kinds = Counter()
    for row in ROWS["preferences"]():
        chosen, rejected = text(row["chosen"]), text(row["rejected"])
        assert chosen != rejected
        assert demo.is_correct(row["prompt"], chosen)
        polite = tuple(s.split("{}")[0] for s in demo.SAYING["polite"])
        is_right = demo.is_correct(row["prompt"], rejected)
        kinds[is_right, rejected.startswith(polite)] += 1
        if is_right:  # then it is the tone that decides
            assert chosen.startswith(polite)
            assert not rejected.startswith(polite)
    total = sum(kinds.values())
    assert kinds[False, True] / total > 0.4  # in the best tone, and wrong
    assert kinds[False, False] / total > 0.1
    assert kinds[True, False] / total > 0.1
    assert kinds[True, True] == 0
