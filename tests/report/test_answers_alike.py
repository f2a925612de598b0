"""How alike the answers to unlike prompts are, by hand: across prompts, and not within one prompt's own samples."""

import pytest
import torch

from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.roles import Actor
from hybrid_rlhf.roles.policy_module import PolicyModule
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.rollout.collect import signal_of
from tests.factories.tiny import tiny_causal_lm, tiny_tokenizer


def rollout(prompts: list[list[int]], completions: list[str]) -> Rollout:
    size = len(prompts)
    made = Rollout.from_responses(Prompts(prompts, ["x"] * size), [[5, 3]] * size, [True] * size, 0, completions)
    made.scores = torch.zeros(size)
    return made


def measured(prompts: list[list[int]], completions: list[str]) -> tuple[float, float]:
    found = rollout(prompts, completions).metrics().compute()
    return found["completions/distinct_answers"], found["completions/top3_share"]


def test_of_eight_prompts_the_distinct_answers_and_the_share_of_the_three_commonest():
    answers = ["a", "a", "a", "b", "b ", "c", "d", "e"]  # a blank at the end is no other answer
    assert measured([[i] for i in range(8)], answers) == (5 / 8, 6 / 8)


def test_samples_of_one_prompt_may_be_alike_and_are_compared_with_other_prompts_only():
    four = [[i] for i in range(4) for _ in range(3)]
    sure = [answer for answer in "abcd" for _ in range(3)]  # each prompt has an answer of its own, thrice
    assert measured(four, sure) == (1.0, 3 / 4)
    assert measured(four, ["yes", "no", "perhaps"] * 4) == (1 / 4, 1.0)  # all prompts alike, each sample different
    mixed = ["a", "a", "x", "b", "a", "y", "a", "c", "z", "d", "d", "z"]  # first samples a b a d, second a a c d
    assert measured(four, mixed) == (pytest.approx((3 + 3 + 3) / 12), pytest.approx((4 + 2 + 2) / 12))  # a, d and z


def test_a_prompt_that_comes_twice_is_one_prompt_and_one_alone_is_like_no_other():
    assert measured([[1], [2], [1], [2]], ["a", "a", "b", "b"]) == (1 / 2, 1.0)
    found = rollout([[1], [1]], ["a", "b"]).metrics().compute()
    assert found["completions/distinct_answers"] == 1 and found["completions/empty_ratio"] == 0


def test_answers_that_differ_in_a_word_and_end_alike_are_counted_by_their_last_sentence():
    """Of five that say something, three end alike; a last line counts as a sentence, and a whole short answer."""
    said = ["A cat. How does it feel?", "A dog! How does it feel?", "I see.\nHow does it feel?", "Fine.", "", "A b"]
    found = rollout([[i] for i in range(6)], said).metrics().compute()
    assert found["completions/same_ending"] == 3 / 5 and found["completions/distinct_answers"] == 1


def test_two_processes_count_together():
    one, two = (rollout([[i]] * 2, ["a", text]).metrics() for i, text in enumerate("bc"))
    found = (one + two).compute()
    assert found["completions/distinct_answers"] == 3 / 4  # a a, and b c
    assert found["completions/distinct_2"] == 1 / 4  # 5 3 four times


@pytest.mark.parametrize("first", [2, 3, 4])
def test_a_prompt_that_two_processes_have_is_one_prompt(first):
    """By hand: [1] has a, a, c and [2] has a, b, b: first ones a a, second ones a b, third ones c b."""
    prompts, answers = [[1], [2], [1], [2], [1], [2]], ["a", "a", "a", "b", "c", "b"]
    halves = [rollout(prompts[rows], answers[rows]).metrics() for rows in (slice(first), slice(first, None))]
    found = (halves[0] + halves[1]).compute()
    assert found["completions/distinct_answers"] == 5 / 6 == measured(prompts, answers)[0]
    assert (found["completions/top3_share"], found["completions/distinct_2"]) == (1.0, 1 / 6)


def test_a_process_without_prompts_has_a_rollout_of_none_and_says_nothing():
    model = tiny_causal_lm()
    actor = Actor(HybridEngine(PolicyModule(model), model, eos_ids=[3], pad_id=0), tiny_tokenizer())
    with actor.inference():
        made = actor.generate(Prompts([], []), SamplingConfig(max_new_tokens=2), 0)
    made.scores = torch.zeros(0)
    assert len(made) == 0 and made.completions == []
    assert signal_of(made, 2).num_prompts == 0
    assert "completions/mean_length" not in made.metrics().compute()


def test_without_answers_nothing_is_said_of_them():
    found = rollout([[1], [1]], []).metrics().compute()
    assert "completions/top3_share" not in found
