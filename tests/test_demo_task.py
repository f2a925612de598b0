"""The embedded task: its checker against answers worked out by hand, its rows against what they promise."""

import time
from collections import Counter

import pytest

from hybrid_rlhf.data import demo

# request, its answer, an answer that is wrong: all by hand
KNOWN = [
    ("Please name the first word: goat lamp fish", "goat", "lamp"),
    ("Quick, the second word: goat lamp fish", "lamp", "fish"),
    ("Name the last word: goat lamp fish", "fish", "lamp"),
    ("Kindly tell me the word after lamp: goat lamp fish", "fish", "goat"),
    ("Give the word before lamp: goat lamp fish", "goat", "fish"),
    ("Hurry, the largest number: 12 25 18", "25", "18"),
    ("Name the smallest number: 12 25 18", "12", "25"),
]


def text(messages: list[dict]) -> str:
    return messages[-1]["content"]


@pytest.mark.parametrize("request_text, right, wrong", KNOWN)
def test_checker_agrees_with_answers_worked_out_by_hand(request_text, right, wrong):
    assert demo.is_correct(request_text, f"Gladly! It is {right}")
    assert demo.is_correct([{"role": "user", "content": request_text}], right)
    assert not demo.is_correct(request_text, f"Gladly! It is {wrong}")


def test_checker_reads_the_request_out_of_a_rendered_prompt():
    rendered = "<|im_start|>user\nName the last word: goat lamp fish<|im_end|>\n<|im_start|>assistant\n"
    assert demo.is_correct(rendered, "It is fish")
    assert not demo.is_correct(rendered, "It is lamp")


@pytest.mark.parametrize("completion", ["", "Sure!", "It is", "It is fishlamp", "It is lamp. No, fish", "fish lamp",
                                        "It is 12", "Not lamp but fish", "It is fish or 12"])
def test_checker_demands_that_the_answer_is_stated_and_no_other(completion):
    assert not demo.is_correct("Name the last word: goat lamp fish", completion)


@pytest.mark.parametrize("completion", ["fish", "FISH!", "Ugh, obviously fish", "Fish. Yes, it is fish"])
def test_checker_does_not_judge_the_tone(completion):
    assert demo.is_correct("Name the last word: goat lamp fish", completion)


def test_checker_refuses_a_request_of_another_task():
    with pytest.raises(ValueError, match="no request"):
        demo.is_correct("How are you?", "Fine")


def test_no_request_is_asked_twice_within_a_data_set_and_rows_are_the_same_every_time():
    for make in (demo.demonstrations, demo.preferences, demo.prompts):
        rows = make()
        assert len({text(r["prompt"]) for r in rows}) == len(rows) >= 10_000
        assert rows == make()


def test_generation_is_quick():
    start = time.process_time()
    demo.demonstrations(), demo.preferences(), demo.prompts()
    assert time.process_time() - start < 5  # about one second; a slow machine may take more


def test_demonstrations_are_of_mixed_truth_and_the_mistake_is_common_where_meant():
    right, counts = Counter(), Counter()
    for row in demo.demonstrations():
        kind = text(row["prompt"]).split(":")[0].split(" the ", 1)[1]
        kind = " ".join(kind.split()[:2]) if kind.startswith("word ") else kind
        counts[kind] += 1
        right[kind] += demo.is_correct(row["prompt"], text(row["completion"]))
    share = {kind: right[kind] / counts[kind] for kind in counts}
    assert 0.5 < sum(right.values()) / sum(counts.values()) < 0.65
    assert min(counts.values()) > 1000
    # no sampled or greedy imitation of the second word gets beyond this
    assert share["second word"] == pytest.approx(demo.MISTAKES["second"][1] / 100, abs=0.03)
    assert share["first word"] == pytest.approx(demo.MISTAKES["first"][1] / 100, abs=0.03)


def test_a_right_answer_is_never_rejected_for_a_wrong_one_and_hard_pairs_abound():
    kinds = Counter()
    for row in demo.preferences():
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


def test_prompts_span_all_kinds_and_tones():
    asked = [text(r["prompt"]) for r in demo.prompts()]
    for words in ("first word:", "second word:", "last word:", "word after", "word before", "largest", "smallest"):
        assert sum(words in a for a in asked) > 500
    for tone in ("Please", "Kindly", "Quick", "Hurry", "Name", "Give"):
        assert sum(a.startswith(tone) for a in asked) > 1000
