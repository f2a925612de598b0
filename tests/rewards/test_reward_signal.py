"""What a reward says before anything is trained: the figures by hand, and the sentence that goes with each."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hybrid_rlhf.algorithms.reward_signal import RewardSignal, figures, measure, verdict

NAN = math.nan


def signal(scores: list[list[float]], **changes) -> RewardSignal:
    """Of responses of ten tokens that all ended and say something, but for `changes`."""
    table = torch.tensor(scores, dtype=torch.float32)
    given = {"lengths": torch.full_like(table, 10), "has_eos": torch.ones_like(table, dtype=torch.bool),
             "is_empty": torch.zeros_like(table, dtype=torch.bool)}
    return measure(table, **given | {name: torch.tensor(value) for name, value in changes.items()})


def test_the_figures_of_three_prompts_with_four_responses_are_those_worked_out_by_hand():
    found = signal([[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]],
                   lengths=[[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]],
                   has_eos=[[True] * 4, [True, True, False, False], [False] * 4],
                   is_empty=[[True, False, False, False], [False] * 4, [False] * 4])
    assert (found.num_prompts, found.group_size) == (3, 4)
    assert found.mean == pytest.approx(3 / 12), "pass@1"
    assert found.best == pytest.approx(2 / 3), "pass@4: the second and the third prompt"
    assert found.with_spread == pytest.approx(2 / 3)
    assert found.length == pytest.approx(78 / 12)
    assert (found.ended, found.empty) == pytest.approx((6 / 12, 1 / 12))
    assert found.is_binary and not found.is_constant


def test_a_best_score_below_zero_is_the_best_all_the_same():
    found = signal([[-4.0, -1.0], [-2.5, -3.0]])
    assert (found.mean, found.best) == pytest.approx((-2.625, -1.75))
    assert not found.is_binary and found.with_spread == 1


def test_a_skipped_response_has_no_score_and_counts_in_no_mean():
    found = signal([[NAN, 2.0], [NAN, NAN], [1.0, 3.0]])
    assert found.mean == pytest.approx(2.0), "of 2, 1 and 3"
    assert found.best == pytest.approx(2.5), "of 2 and 3"
    assert found.with_spread == pytest.approx(1 / 3), "one score is no spread, and none is none"
    assert verdict(signal([[NAN, NAN]]))[0].startswith("no response has a score")


@pytest.mark.parametrize(("scores", "sentence"), [
    ([[0, 0]] * 32, "0 of 32 prompts ever score above 0: no method can learn this"),
    ([[0.5, 0.5]] * 4, "every response scores 0.5: no method can learn from that"),
    ([[-1, -1]] * 4, "every response scores -1: no method can learn from that"),
    ([[1, 1]] * 4, "solved: every response scores 1"),
    ([[1, 1]] * 19 + [[1, 0]], "nearly solved: 98% of the responses score 1"),  # 39 of 40 are 97.5%
    ([[0, 0]] * 19 + [[1, 0]], "the responses differ in score on only 1 of 20 prompts"),
    ([[0, 0]] * 18 + [[1, 0]] * 2, "healthy: the responses differ in score on 2 of 20 prompts"),
    ([[0.2, 0.9], [0.1, 0.1]], "healthy: the responses differ in score on 1 of 2 prompts"),
    ([[0.3], [0.4]], "healthy: the scores differ"),
])
def test_each_picture_of_scores_has_its_sentence(scores, sentence):
    found = verdict(signal(scores))
    assert len(found) == 1 and found[0].startswith(sentence), found


def test_responses_that_are_empty_or_never_end_are_named_beside_the_scores():
    never = [[False, False], [False, False]]
    assert verdict(signal([[0, 0], [0, 0]], has_eos=never)) == [
        "0 of 2 prompts ever score above 0: no method can learn this; begin with SFT, or an easier task",
        "none of the responses end by themselves: raise max_new_tokens, or teach the model to end by SFT"]
    assert verdict(signal([[0, 1], [0, 1]], is_empty=[[True, False], [False, False]]))[0].startswith(
        "25% of the responses are empty")


def test_a_share_is_said_in_percent_where_nobody_counted_the_prompts():
    known = signal([[0.0, 0.0]] * 8)
    assert verdict(RewardSignal(**{**vars(known), "num_prompts": 0}))[0].startswith("0% of the prompts ever score")


def test_a_share_on_the_edge_of_a_rule():
    fine = RewardSignal(num_prompts=0, group_size=2, mean=0.5, best=1.0, with_spread=0.1, is_constant=False,
                        is_binary=True, ended=0.5, empty=0.1, length=10.0)
    assert verdict(fine) == ["healthy: the responses differ in score on 10% of the prompts, which is what the method "
                             "learns from"]
    assert verdict(replace(fine, mean=0.95)) == ["nearly solved: 95% of the responses score 1; take harder prompts"]
    assert verdict(replace(fine, with_spread=0.05)) == [
        "the responses differ in score on only 5% of the prompts: little can be learned from the others; draw more "
        "than 2 responses to each, choose prompts that succeed sometimes, or begin with SFT"]
    assert verdict(replace(fine, empty=0.2)) == [
        "20% of the responses are empty: see with --preview whether the prompts are rendered as the model knows them, "
        "or begin with SFT"]
    assert verdict(replace(fine, ended=0.25))[0].startswith("only 25% of the responses end by themselves")


def test_the_figures_for_people():
    found = signal([[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]],
                   is_empty=[[True] * 3 + [False], [False] * 4, [False] * 4])
    assert figures(found) == {
        "mean score": "0.25 (pass@1 25%)", "best of 4": "0.6667 (pass@4 67%), mean over prompts",
        "different scores": "on 2 of 3 prompts", "ended by itself": "100% of the responses",
        "empty": "25% of the responses", "mean length": "10.0 tokens"}
    assert figures(signal([[0.5, 2.0]]))["best of 2"] == "2, mean over prompts"
    assert figures(signal([[0.5], [2.0]])) == {
        "mean score": "1.25", "ended by itself": "100% of the responses", "empty": "0% of the responses",
        "mean length": "10.0 tokens"}
