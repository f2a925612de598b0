"""The record of a rollout by hand: what it is made of, parts of it, two in one, and what is reported."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.algorithms.advantages import ESTIMATORS, whiten
from hybrid_rlhf.algorithms.shaping import shape_rewards
from hybrid_rlhf.core.image_files import ImageRef
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.tensors import KeptSets
from hybrid_rlhf.rewards.functions import inputs
from hybrid_rlhf.rollout import Prompts, Rollout, dynamic_sampling
from hybrid_rlhf.rollout import record as record_module
from hybrid_rlhf.rollout.dynamic_sampling import resample_groups
from hybrid_rlhf.rollout.episode_record import DONE, MAX_TURNS, NO_ROOM, Episode, measure, readable
from hybrid_rlhf.rollout.record import _correlation

NAN = math.nan
T = torch.tensor


def record(*responses: list[int], scores: list[float] | None = None, **more) -> Rollout:
    """Responses to prompts 1, 2, ...; every one but the first has ended."""
    prompts = Prompts([[i] for i in range(1, len(responses) + 1)], [f"p{i}" for i in range(1, len(responses) + 1)],
                      {"answer": [10 * i for i in range(1, len(responses) + 1)]})
    made = Rollout.from_responses(prompts, responses, [i > 0 for i in range(len(responses))], 0,
                                  [f"{sum(r)} " for r in responses], **more)
    made.scores = T(scores or [0.0] * len(responses))
    made.shaped_scores = made.scores
    return made


def test_a_prompt_s_samples_lie_together():
    prompts = Prompts([[1], [2, 3]], ["a", "b"], {"n": [7, 8]})
    twice = prompts.repeat(2)
    assert (twice.ids, twice.texts, twice.columns) == (
        [[1], [1], [2, 3], [2, 3]], ["a", "a", "b", "b"], {"n": [7, 7, 8, 8]})
    assert len(twice) == 4 and twice.rows([3, 0]) == Prompts([[2, 3], [1]], ["b", "a"], {"n": [8, 7]})


def test_masks_are_made_of_lengths_and_of_what_the_policy_sampled():
    made = record([5, 0], [6], is_sampled=[[False, True], [True]], temperature=0.5)
    assert made.response_ids.tolist() == [[5, 0], [6, 0]]
    assert made.response_mask.tolist() == [[True, True], [True, False]]
    assert made.action_mask.tolist() == [[False, True], [True, False]]
    assert made.has_eos.tolist() == [False, True] and made.temperature == 0.5 and len(made) == 2
    assert record([5]).temperature == 1.0 and record([5]).action_mask.tolist() == [[True]]
    assert made.owners().tolist() == [0, 1]
    assert made.of_actions(T([[1.0, 2.0], [3.0, 4.0]])).tolist() == [2.0, 3.0]


def test_sequences_are_prompt_and_response_and_mark_the_actions():
    made = record([5, 7], [6], is_sampled=[[False, True], [True]])
    made.prompts.ids[1] = [2, 3, 4]
    made.kept = KeptSets.of_rows([[T([7], dtype=torch.int32)], [T([6, 9], dtype=torch.int32)]])
    batch = made.sequences(pad_id=99)
    assert batch.input_ids.tolist() == [[1, 5, 7, 99], [2, 3, 4, 6]]
    assert batch.attention_mask.tolist() == [[True, True, True, False], [True] * 4]
    assert batch.loss_mask.tolist() == [[False, False, True, False], [False, False, False, True]]
    assert batch.kept is made.kept


def test_rows_take_what_belongs_to_them_along():
    made = record([5, 7], [6], [8], scores=[1.0, 2.0, 3.0])
    made.source_scores, made.remarks, made.numbers = {"a": T([4.0, 5.0, 6.0])}, ["x", "y", "z"], T([9, 8, 7])
    made.kept = KeptSets.of_rows([[T([i], dtype=torch.int32)] for i in (1, 2, 3)])
    part = made.rows(T([2, 0]))
    assert part.prompts == Prompts([[3], [1]], ["p3", "p1"], {"answer": [30, 10]})
    assert part.response_ids.tolist() == [[8, 0], [5, 7]] and part.completions == ["8 ", "12 "]
    assert part.scores.tolist() == [3.0, 1.0] and part.source_scores["a"].tolist() == [6.0, 4.0]
    assert part.remarks == ["z", "x"] and part.numbers.tolist() == [7, 9] and part.episodes == []
    assert [ids.tolist() for ids in part.kept.ids] == [[3], [1]] and part.teacher is None
    assert record([5]).rows(T([0])).kept is None
    made.teacher = SimpleNamespace(select=lambda index: index.tolist())
    assert made.rows(T([2, 0])).teacher == [2, 0]


def test_two_rollouts_in_one_are_as_wide_as_the_wider():
    one, two = record([5, 7], scores=[1.0]), record([6], scores=[2.0])
    one.source_scores, two.source_scores = {"a": T([3.0])}, {"a": T([4.0])}
    both = one + two
    assert both.response_ids.tolist() == [[5, 7], [6, 0]]
    assert both.response_mask.tolist() == [[True, True], [True, False]]
    assert both.scores.tolist() == [1.0, 2.0] and both.source_scores["a"].tolist() == [3.0, 4.0]
    assert both.completions == ["12 ", "6 "] and both.prompts.columns == {"answer": [10, 10]} and both.values is None
    assert (two + one).response_ids.tolist() == [[6, 0], [5, 7]]
    with pytest.raises(ValueError, match=r"temperatures 1\.0 and 0\.5"):
        one + record([6], temperature=0.5)


def test_pieces_of_a_shuffled_rollout_hold_every_sequence_once_and_only_its_own():
    made = record(*([i] for i in range(5)))
    pieces = [[row[0] for row in piece.prompts.ids] for piece in made.shuffled(2, torch.Generator().manual_seed(0))]
    assert [len(piece) for piece in pieces] == [2, 2, 1]
    assert sorted(i for piece in pieces for i in piece) == [1, 2, 3, 4, 5]
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0)).tolist()
    mine = [[row[0] for row in piece.prompts.ids]
            for piece in made.shuffled(4, torch.Generator().manual_seed(0), first=3, total=9)]
    assert mine == [[n - 2 for n in order[at:at + 4] if 3 <= n < 8] for at in (0, 4, 8)]
    made.numbers = T([8, 0, 2, 4, 6])
    named = [[row[0] for row in piece.prompts.ids]
             for piece in made.shuffled(4, torch.Generator().manual_seed(0), first=3, total=9)]
    assert named == [[[8, 0, 2, 4, 6].index(n) + 1 for n in order[at:at + 4] if n % 2 == 0] for at in (0, 4, 8)]


def test_rewards_of_turns_stand_at_their_last_tokens():
    made = record([5, 6, 7, 8], [9])
    made.episodes = [Episode(turn_ends=[1, 4], turn_rewards=[0.0, 2.5], reward=1.0), Episode(turn_ends=[1])]
    assert made.turn_rewards().tolist() == [[0.0, 0.0, 0.0, 2.5], [0.0] * 4]
    assert made.rewarded_turn_ends().tolist() == [[True, False, False, True], [False] * 4]
    assert made.episode_rewards == [3.5, None] and Episode(turn_rewards=[2.0]).total_reward == 2.0
    assert Episode(reward=0.0).total_reward == 0.0


def test_what_every_method_reports_of_its_samples():
    made = record([5, 6, 5, 6], [7], [7], [8, 9], scores=[1.0, NAN, 3.0, 5.0])
    made.source_scores = {"a": T([1.0, NAN, 3.0, 5.0]), "b": T([2.0, 9.0, NAN, 10.0])}
    made.source_weights = {"a": 1.0, "b": 0.0}
    made.is_clipped = T([True, False, False, False])
    made.completions = ["one ", " ", "two", "two"]
    made.logprobs, made.ref_logprobs = torch.full((4, 4), -1.0), torch.full((4, 4), -1.5)
    found = made.metrics().compute()
    assert found == pytest.approx({
        "reward": 3.0, "reward_std": (8 / 3) ** 0.5, "objective/score": 3.0,
        "rewards/a/mean": 3.0, "rewards/a/std": (8 / 3) ** 0.5,
        "rewards/b/mean": 7.0, "rewards/b/std": (38 / 3) ** 0.5, "rewards/b/max": 10.0,
        "rewards/b/correlation": 1.0,  # of 1, 2 and 5, 10
        "score/clip_fraction": 0.25, "completions/mean_length": 2.0, "completions/min_length": 1.0,
        "completions/max_length": 4.0, "completions/clipped_ratio": 0.25, "completions/empty_ratio": 0.25,
        "completions/mean_terminated_length": 4 / 3, "completions/min_terminated_length": 1.0,
        "completions/max_terminated_length": 2.0,
        "completions/unscored_ratio": 0.25,
        "completions/distinct_2": 3 / 4,  # 5 6, 6 5, 5 6 and 8 9
        "completions/distinct_answers": 3 / 4,  # of four prompts
        "completions/same_ending": 2 / 3,  # of three that say something
        "completions/top3_share": 1.0, "kl": 1.0, "objective/kl": 1.0})  # half a nat at 4 + 1 + 1 + 2 actions of 4


@pytest.mark.parametrize("is_first", [True, False])
def test_joined_prompts_keep_columns_that_only_one_part_has(is_first):
    seen, plain = [(ImageRef("a", 1, 1),)], [()]
    parts = [Prompts([[1]], ["a"], {"images": seen, "answer": [3]}, seen), Prompts([[2]], ["b"], {"n": [4]})]
    joint = parts[0] + parts[1] if is_first else parts[1] + parts[0]
    images = seen + plain if is_first else plain + seen
    assert joint.images == joint.columns["images"] == images
    assert (joint.columns["answer"], joint.columns["n"]) == (([3, None], [None, 4]) if is_first else
                                                             ([None, 3], [4, None]))


def test_answers_to_one_question_about_other_images_are_answers_to_other_prompts():
    made = record([5], [5], [5])
    made.prompts.ids = [[1]] * 3
    assert made.metrics().compute()["completions/distinct_answers"] == 1.0  # of one prompt
    made.completions, made.prompts.images = ["5"] * 3, [(ImageRef(name, 1, 1),) for name in "aab"]
    assert made.metrics().compute()["completions/distinct_answers"] == 2 / 3  # one of two, one of one


def test_what_two_rollouts_report_is_weighed_by_their_sizes_and_texts_and_turns_may_be_absent_or_there():
    one, three = record([5, 6], scores=[1.0]), record([7], [7], [7], scores=[3.0, 3.0, 3.0])
    for made, kl in ((one, 2.0), (three, 1.0)):
        made.logprobs, made.ref_logprobs = torch.full(made.action_mask.shape, kl), torch.zeros(made.action_mask.shape)
    three.completions = []
    three.episodes = [Episode(turn_ends=[1]) for _ in range(3)]
    found = (one.metrics() + three.metrics()).compute()
    assert found["kl"] == found["objective/kl"] == pytest.approx((4.0 + 3 * 1.0) / 4)
    assert found["objective/score"] == found["reward"] == 2.5 and found["completions/mean_length"] == 5 / 4
    assert found["episodes/turns"] == 1.0 and found["completions/empty_ratio"] == 0.0


def test_correlation_is_pearson_s_of_those_that_have_both_numbers():
    # deviations -1, 0, 1 and -2, 1, 1: 3 / sqrt(2 * 6)
    found, count = _correlation(T([1.0, 2.0, 3.0, NAN]), T([0.0, 3.0, 3.0, 9.0]))
    assert found == pytest.approx(3 / 12**0.5) and count == 3
    assert _correlation(T([1.0, 1.0]), T([0.0, 3.0])) == (0.0, 0)
    assert _correlation(T([1.0, NAN]), T([0.0, 3.0])) == (0.0, 0)
    assert _correlation(T([0.0, 0.0]), T([0.0, 3.0])) == (0.0, 0)
    assert _correlation(T([1e9, 1e9 + 0.5], dtype=torch.float64), T([0.0, 3.0])) == (0.0, 0)  # rounding is no spread
    assert _correlation(T([1.0, 2.0]), T([3.0, 1.0])) == (pytest.approx(-1.0), 2)


def test_groups_of_equal_scores_make_room_for_those_of_new_prompts():
    first = record([1], [2], [3], [4], scores=[1.0, 1.0, 0.0, 2.0])
    assert first.has_reward_variance(2).tolist() == [False, True]
    asked, metrics = [], Metrics()

    def sample(number: int) -> Rollout:
        asked.append(number)
        return record([5], [6], [7], [8], scores=[3.0, 3.0, 3.0, 3.0] if number == 1 else [0.0, 4.0, 5.0, 6.0])

    found = resample_groups(first, 2, 3, sample, metrics)
    assert asked == [1, 2] and found.response_ids.tolist() == [[3], [4], [5], [6]]
    assert found.numbers.tolist() == [0, 1, 2, 3]
    assert metrics.compute() == {"refill/rounds": 2.0, "refill/filled": 1.0}
    short = resample_groups(first, 2, 1, lambda _: record([5], [6], scores=[1.0, 1.0]), metrics := Metrics())
    assert short.response_ids.tolist() == [[3], [4]]
    assert metrics.compute() == {"refill/rounds": 1.0, "refill/filled": 0.5}
    flat = record([1], [2], scores=[1.0, 1.0])
    assert resample_groups(flat, 2, 0, sample, Metrics()) is flat


def test_a_process_accepts_what_is_left_behind_the_groups_of_those_before_it(monkeypatch):
    def place(count: int) -> tuple[int, int]:
        assert isinstance(count, int)
        return 2, count + 1  # two groups are before ours, and there is one more than we have

    monkeypatch.setattr(dynamic_sampling, "place_over_ranks", place)
    first = record([1], [2], [3], [4], scores=[1.0, 2.0, 0.0, 2.0])
    found = resample_groups(first, 2, 0, lambda _: first, metrics := Metrics())
    assert found.response_ids.tolist() == [[1], [2]] and found.numbers.tolist() == [4, 5]
    assert (metrics.add("refill/filled", 0.0, 4.0)).compute()["refill/filled"] == 0.25  # half of four, none of four


def test_episodes_in_figures():
    acted = Episode(turn_ends=[2, 5], has_tools=True, num_calls=3, num_failed=1, num_late=1, num_malformed=1, num_cut=2,
                    ended=MAX_TURNS)
    found = measure([acted, Episode(turn_ends=[3], has_tools=True, ended=DONE), Episode(turn_ends=[1], ended=NO_ROOM)])
    assert found.compute() == pytest.approx({
        "tools/call_frequency": 2.0, "tools/failure_frequency": 3 / 4, "tools/malformed_frequency": 1 / 4,
        "tools/late_frequency": 1 / 4, "tools/cut_frequency": 2 / 4, "episodes/turns": 4 / 3,
        "episodes/max_turns_ratio": 1 / 3, "episodes/no_room_ratio": 1 / 3})
    one = measure([Episode(turn_ends=[1], has_tools=True, num_calls=1, num_late=1)])
    assert one.compute()["tools/failure_frequency"] == one.compute()["tools/late_frequency"] == 1.0
    both = (found + one).compute()  # five calls in three episodes; three of four went wrong, and one of one
    assert both["tools/call_frequency"] == pytest.approx(5 / 3) and both["tools/failure_frequency"] == 4 / 5
    assert measure([Episode(turn_ends=[1])]).compute() == {
        "episodes/turns": 1.0, "episodes/max_turns_ratio": 0.0, "episodes/no_room_ratio": 0.0}


def test_an_episode_for_people_and_its_last_word():
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": "x"}}}
    messages = [{"role": "assistant", "content": " Well ", "tool_calls": [call, call]},
                {"role": "tool", "name": "add", "content": "2"}, {"role": "user", "content": ""}]
    assert readable(messages) == "[assistant] Well add(a=1, b='x') add(a=1, b='x')\n[add] 2\n[user] "
    made = record([5])
    assert (made.shown(0), made.responses()) == ("5 ", ["5 "])
    made.episodes = [Episode(messages=messages)]
    assert made.shown(0) == readable(messages) and made.responses() == [messages]
    assert made.episodes[0].last_text == " Well " and Episode().last_text == ""


def test_what_draws_an_episode_again():
    episode = Episode(turn_starts=[0, 3], turn_ends=[2, 5], limits=[4, 6], seed=7, number=2)
    assert episode.replay_record([1, 2], [10, 11, 12, 13, 14]) == {
        "seed": 7, "number": 2, "prompt_ids": [1, 2], "turns": [
            {"added": [], "limit": 4, "said": [10, 11]}, {"added": [12], "limit": 6, "said": [13, 14]}]}


def test_responses_without_a_score_leave_and_the_others_are_numbered_anew_over_all_processes(monkeypatch):
    made = record([5], [6], [7], [8], scores=[1.0, NAN, 3.0, NAN])
    assert made.scored().scores.tolist() == [1.0, 3.0] and made.scored().numbers is None
    whole = record([5], [6], scores=[1.0, 2.0])
    assert whole.scored() is whole
    monkeypatch.setattr(record_module, "max_over_ranks", lambda is_any: 1)  # another process has some without
    monkeypatch.setattr(record_module, "gather_over_ranks", lambda own: [[0, 5, 6], own])
    made.numbers = T([1, 2, 3, 4])
    assert made.scored().numbers.tolist() == [1, 2]  # of 0 1 3 5 6: 1 and 3
    assert whole.scored().scores.tolist() == [1.0, 2.0]


# --- A response with tool tokens between two sampled stretches: what the policy did not sample is context and no action

# two turns with a tool's three tokens between them; one turn; a tool's answer last, and nothing sampled after it
PROMPTS = [[5, 6], [5, 6], [7, 8, 9]]
RESPONSES = [[10, 11, 40, 41, 42, 12, 3], [13, 3], [14, 3, 43]]
SAMPLED = [[True, True, False, False, False, True, True], [True, True], [True, True, False]]
def rollout() -> Rollout:
    prompts = Prompts([list(p) for p in PROMPTS], ["a", "a", "b"])
    made = Rollout.from_responses(prompts, RESPONSES, [True, True, False], 0, ["x", "y", "z"], SAMPLED)
    made.scores = torch.tensor([1.0, 2.0, 3.0])
    return made


def test_the_score_is_paid_at_the_last_sampled_token_and_gae_steps_over_the_tool():
    """By hand: gamma 1, lambda 0.5, scores at the last action, no KL; values 1 at every action, 99 in the holes."""
    made = rollout()
    rewards = shape_rewards(made.scores, torch.full(made.action_mask.shape, 7.0), 0.0, made.action_mask)
    assert rewards[0].tolist() == [0, 0, 0, 0, 0, 0, 1] and rewards[2].tolist() == [0, 3, 0, 0, 0, 0, 0]
    values = torch.full(made.action_mask.shape, 99.0).masked_fill(made.action_mask, 1.0)
    advantages, returns = ESTIMATORS["gae"].fn(rewards, made.action_mask, values=values, gamma=1.0, lam=0.5)
    assert advantages[0].tolist() == [0, 0, 0, 0, 0, 0, 0]  # 1 + 0 - 1 at the end, then 0 + 1 - 1
    assert advantages[2].tolist() == [1.0, 2.0, 0, 0, 0, 0, 0]  # 3 - 1 = 2, then 0 + 1 - 1 + 0.5 * 2
    assert returns[2].tolist() == [2.0, 3.0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_says_of_the_actions_what_it_says_without_the_holes(name):
    made, draw = rollout().rows(torch.tensor([0, 1])), torch.Generator().manual_seed(0)
    mask = made.action_mask
    rewards, values = (torch.randn(mask.shape, generator=draw) for _ in range(2))
    short = torch.tensor([[True] * 4, [True, True, False, False]])
    dense = [torch.zeros(short.shape).masked_scatter(short, x[mask]) for x in (rewards, values)]
    given = {"gamma": 0.9, "lam": 0.8, "group_size": 2}
    with_holes = ESTIMATORS[name].fn(rewards, mask, values=values, **given)
    without = ESTIMATORS[name].fn(dense[0], short, values=dense[1], **given)
    for mine, plain in zip(with_holes, without, strict=True):
        torch.testing.assert_close(mine[mask], plain[short])
        assert (mine[~mask] == 0).all()
    torch.testing.assert_close(whiten(with_holes[0], mask)[mask], whiten(without[0], short)[short])


def test_lengths_and_pairs_are_those_of_sampled_tokens_and_functions_are_given_every_token():
    made = rollout()
    found = made.metrics().compute()
    assert found["completions/mean_length"] == pytest.approx((4 + 2 + 2) / 3)
    assert found["completions/distinct_2"] == 1.0  # 10 11, 12 3, 13 3, 14 3: no pair across the tool's tokens
    assert inputs(made)["completion_ids"] == RESPONSES
    made.logprobs = torch.where(made.action_mask, 1.0, 50.0)
    made.ref_logprobs = torch.zeros(made.action_mask.shape)
    assert made.mean_kl() == pytest.approx(8 / 3)
