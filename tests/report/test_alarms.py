"""Alarms: histories that were made to go wrong, each in one way, and runs that went well and ring nothing."""

from __future__ import annotations

import json
import random

import pytest

from hybrid_rlhf.report.alarms import answered, compared, find, series
from hybrid_rlhf.report.summary import conclude, first_lines

HELD = {"reward": (0.0, 3.0), "reward_std": (1.0, 0.8), "objective/kl": (0.0, 1.5), "entropy": (0.4, 0.25),
        "completions/mean_length": (8.0, 7.0), "completions/clipped_ratio": (0.02, 0.0),
        "completions/distinct_2": (0.3, 0.25), "completions/distinct_answers": (0.6, 0.5),
        "completions/top3_share": (0.1, 0.15), "completions/empty_ratio": (0.0, 0.0),
        "score/clip_fraction": (0.0, 0.01), "rewards/model/mean": (0.0, 3.0),
        "rewards/model/std": (1.0, 0.8), "rewards/truth/mean": (0.5, 0.8), "rewards/truth/std": (0.5, 0.4)}


def history(steps: int = 40, noise: float = 0.02, seed: int = 0, **ends) -> list[dict]:
    """Each metric goes straight from its start to its end, or through the points that are given."""
    rng, rows = random.Random(seed), []
    for i in range(steps):
        row = {"step": i + 1}
        for name, points in (HELD | ends).items():
            place = i / (steps - 1) * (len(points) - 1)
            k = min(int(place), len(points) - 2)
            value = points[k] + (points[k + 1] - points[k]) * (place - k)
            row[name] = value + rng.gauss(0, noise * (max(points) - min(points) or abs(points[0])))
        rows.append(row)
    return rows


def names(rows: list[dict]) -> list[str]:
    return [alarm.name for alarm in find(rows)]


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_goes_well_rings_nothing_however_noisy(seed) -> None:
    assert names(history(seed=seed, noise=0.2, **{"completions/clipped_ratio": (0.1, 0.1)})) == []


@pytest.mark.parametrize(("change", "name", "words"), [
    ({"objective/kl": (0.0, 12.0)}, "KL", ["nats per response", "ppo.kl_coef"]),
    ({"completions/mean_length": (80.0, 20.0)}, "length collapse", ["from 7", "to 2", "tokens"]),
    ({"completions/mean_length": (80.0, 300.0)}, "length explosion", ["ppo.overlong_penalty"]),
    ({"completions/clipped_ratio": (0.05, 0.9)}, "endless responses", ["missing_eos_penalty"]),
    ({"completions/distinct_2": (0.4, 0.05)}, "diversity collapse", ["alike"]),
    ({"entropy": (0.5, 0.0)}, "entropy collapse", ["nats per token"]),
    ({"completions/clipped_ratio": (1.0, 0.95)}, "no response ends", ["95%", "data.append_eos"]),
    ({"completions/empty_ratio": (0.0, 0.6)}, "empty answers", ["58% of the responses", "--preview"]),
    ({"completions/unscored_ratio": (1.0, 1.0)}, "unscored answers", ["100% of the responses (None)"]),
    ({"completions/same_ending": (0.09, 0.48)}, "same endings",
     ["of the responses end with the same sentence (", "rejected answer has it"]),
    ({"completions/distinct_answers": (0.3, 0.08), "completions/top3_share": (0.2, 0.7)}, "same answers",
     ["68% of a step's (22% at the start)", "9% of its answers are different (29%)"]),
    ({"objective/kl": (0.0, 0.0, 9.0, 0.5, 0.5, 0.5)}, "KL spike",
     ["from 0.12 to 5.42", "within 5 steps (from step 8 on)", "ppo.update_kl do so (0.01"]),
    ({"policy/rate_factor": (0.5, 0.02)}, "rate lowered", ["to 2.0% of what is", "less than 20% in more"]),
    ({"score/clip_fraction": (0.0, 0.08)}, "bounded scores", ["bounds 8% of the scores", "ppo.score_clip"]),
    ({"score/clip_fraction": (0.3, 0.0)}, "bounded scores", ["bounds 29%"]),
    ({"policy/masked_sequences": (1.0, 1.0)}, "responses left out", ["100% of the responses", "ppo.importance_cap"]),
    ({"policy/masked_sequences": (0.1, 0.8)}, "responses left out", ["77% of", "(13% at the start)"]),
    ({"frac_reward_zero_std": (0.1, 1.0)}, "zero reward variance", ["of the groups", "no gradient"]),
    ({"reward_std": (1.0, 0.0, 0.0)}, "zero reward variance", ["no longer differ"]),
    ({"rewards/truth/mean": (0.5, 0.2)}, "reward hacking",
     ["truth fell from 0.488 at the start", "the training score rose from 0.115 to 2.88"]),
    ({"rewards/truth/mean": (0.5, 0.8, 0.4)}, "reward hacking", ["truth fell from 0.7", "around step 2"]),
])
def test_each_way_to_go_wrong_has_its_words(change, name, words) -> None:
    found = find(history(noise=0.0, **change))
    assert [alarm.name for alarm in found] == [name]
    for word in words:
        assert word in found[0].text
    assert "\n" not in found[0].text


def test_a_policy_that_stays_where_it_began_has_hardly_been_trained() -> None:
    still = {"objective/kl": (0.0, 0.004), "reward": (1.0, 1.0), "rewards/model/mean": (1.0, 1.0)}
    alarm, = find(history(**still))
    assert alarm.name == "hardly trained"
    assert "after 40 steps the policy is 0.0038 nats per response" in alarm.text
    assert "roles.actor.learning_rate" in alarm.text
    assert names(history(**still | {"reward": (1.0, 1.5)})) == []  # so little was enough
    assert names(history(steps=19, **still)) == []
    assert names(history(**still | {"objective/kl": (0.0, 0.048)})) == []  # 7 tokens: .0064 each
    assert names(history(**still | {"objective/kl": (0.0, 0.045), "completions/mean_length": (90, 90)})) == [
        "hardly trained"]
    assert names(history(**still | {"reward_std": (0.0, 0.0)})) == ["zero reward variance"]  # the reason is told alone


def test_a_long_response_may_move_far_in_all_and_a_short_one_per_token() -> None:
    assert names(history(**{"objective/kl": (0, 30), "completions/mean_length": (300, 290)})) == []
    assert names(history(**{"objective/kl": (0, 3), "completions/mean_length": (4, 4)})) == []


def test_a_task_with_few_right_answers_has_the_same_answers_from_the_start_and_that_is_no_alarm() -> None:
    yes_or_no = {"completions/distinct_answers": (0.05, 0.02), "completions/top3_share": (0.95, 1.0)}
    assert names(history(**yes_or_no)) == []
    narrower = {"completions/distinct_answers": (0.4, 0.15), "completions/top3_share": (0.2, 0.4)}  # a little each
    assert names(history(**narrower)) == []


def test_a_rate_that_is_lowered_for_a_quarter_of_the_steps_or_less_is_no_alarm() -> None:
    for low, found in ((10, []), (11, ["rate lowered"])):  # of 40
        rows = history(noise=0.0)
        for i, row in enumerate(rows):
            row["policy/rate_factor"] = 0.1 if i < low else 1.0
        assert names(rows) == found


def test_a_rise_of_the_kl_is_a_spike_by_how_fast_it_is_and_by_the_length() -> None:
    assert names(history(steps=200, **{"objective/kl": (0, 12), "completions/mean_length": (60, 60)})) == []
    fast = {"objective/kl": (0.0, 15.0, 15.0, 15.0, 15.0), "completions/mean_length": (60, 60)}
    assert names(history(steps=20, **fast)) == ["KL spike"]  # 0.25 nats a token: not yet far, but too fast
    assert names(history(steps=20, **fast | {"completions/mean_length": (300, 300)})) == []
    assert names(history(steps=5, **{"objective/kl": (0.0, 12.0), "completions/mean_length": (60, 60)})) == ["KL spike"]


@pytest.mark.parametrize("score", [0.0, -1.0, 73.3])
def test_a_reward_that_is_never_above_its_least_value_is_no_signal(score) -> None:
    flat = {"reward": (score, score), "reward_std": (0.0, 0.0), "frac_reward_zero_std": (1.0, 1.0)}
    found = find(history(noise=0.0, **flat))
    assert [alarm.name for alarm in found] == ["no signal"]
    assert f"in 0 of 40 steps did any response score above {score:.3g}" in found[0].text
    assert "--check_signal" in found[0].text
    rows = history(noise=0.0, **flat)
    rows[20] |= {"reward": score + 0.01, "reward_std": 0.1, "frac_reward_zero_std": 0.9}  # a single one that was right
    assert names(rows) == ["zero reward variance"]


def test_responses_that_are_cut_are_the_user_s_wish_where_no_reward_model_reads_them() -> None:
    cut = {"completions/clipped_ratio": (1.0, 1.0)}
    assert names(history(noise=0.0, **cut)) == ["no response ends"]
    rows = [{k.replace("model", "words"): v for k, v in row.items()} for row in history(noise=0.0, **cut)]
    assert names(rows) == []


def test_a_learned_reward_without_any_hold_is_told_and_a_function_without_one_is_not() -> None:
    rows = [{k: v for k, v in row.items() if k != "objective/kl"} | {"kl_coef": 0.0} for row in history()]
    assert names(rows) == ["no hold"]
    assert names([row | {"objective/kl": 1.0} for row in rows]) == []
    assert names([row | {"kl_coef": 0.1} for row in rows]) == []
    assert names([{k.replace("model", "exact_match"): v for k, v in row.items()} for row in rows]) == []


def test_a_judge_is_a_learned_reward_and_one_of_its_items_a_second_opinion() -> None:
    judged = [{k.replace("model", "judge"): v for k, v in row.items() if k != "objective/kl"} | {"kl_coef": 0.0}
              for row in history()]
    assert names(judged) == ["no hold"]
    falling = history(**{"rewards/truth/mean": (0.5, 0.2)})
    rows = [{k.replace("truth", "judge/correct"): v for k, v in row.items()} for row in falling]
    assert [a.name for a in find(rows)] == ["reward hacking"] and "while judge/correct fell" in find(rows)[0].text


@pytest.mark.parametrize(("figures", "name", "words"), [
    ({"judge/failed": (0.5, 0.5)}, "the judge says nothing", "50% of the responses have no verdict"),
    ({"judge/word_mass": (0.01, 0.01)}, "the judge says something else", "a probability of 0.01 together"),
    ({"judge/order_changed": (0.8, 0.8)}, "the judge goes by the place", "of 80% of the pairs"),
    ({"judge/failed": (0.1, 0.1), "judge/word_mass": (0.4, 0.4), "judge/order_changed": (0.3, 0.3)}, None, "")])
def test_a_judge_that_does_not_judge_is_an_alarm(figures, name, words) -> None:
    found = find(history(noise=0.0, **figures))
    assert [a.name for a in found] == ([name] if name else []) and all(words in a.text for a in found)


def test_a_second_opinion_that_falls_with_the_score_is_no_hacking() -> None:
    assert names(history(**{"reward": (3.0, 0.0), "rewards/truth/mean": (0.8, 0.4)})) == []


# a judge whose score rises by more than half of its spread, and a check that went with it
FOOLED = {"reward": (0.45, 0.7, 0.7), "reward_std": (0.38, 0.38), "rewards/model/mean": (0.45, 0.7),
          "rewards/truth/mean": (0.5, 0.5), "rewards/truth/std": (0.5, 0.5), "rewards/truth/max": (1.0, 1.0),
          "rewards/truth/correlation": (0.6, 0.4)}


def test_a_second_opinion_that_does_not_follow_is_an_alarm_too() -> None:
    """The start is the mean of 4 of 40 steps, which fall behind .45 by 1.5 of the 19.5 steps of the rise of .25, and
    behind a correlation of .6 by 1.5 of the 39 of its fall."""
    found = find(history(noise=0.0, **FOOLED))
    assert [alarm.name for alarm in found] == ["reward hacking"]
    assert "rose from 0.469 to 0.7 and truth, which went with it at the start (correlation 0.59)" in found[0].text
    expected = 0.5 + (0.6 - 0.2 * 1.5 / 39) * 0.25 * (18 / 19.5) / 0.38 * 0.5
    assert f"0.5 then, 0.5 now, where about {expected:.3g} was to be expected" in found[0].text


@pytest.mark.parametrize("change", [
    {"rewards/truth/mean": (0.5, 0.57)},  # by more than a third of what is expected
    {"rewards/truth/correlation": (0.15, 0.15)},  # they were never about one thing
    {"rewards/truth/mean": (0.95, 0.95), "rewards/truth/std": (0.2, 0.2)},  # nearly perfect: it cannot rise
    {"rewards/truth/mean": (-0.02, -0.02), "rewards/truth/std": (0.1, 0.1), "rewards/truth/max": (0.0, 0.0)},
    {"reward": (0.45, 0.65, 0.65)},  # the score itself rose by less than half of its spread
    {"reward": (0.65, 0.45)},
    {"rewards/truth/mean": (0.0, 0.0), "rewards/truth/std": (0.0, 0.0), "rewards/truth/max": (0.0, 0.0)}])
def test_one_that_follows_or_cannot_or_was_of_something_else_is_no_alarm(change) -> None:
    assert names(history(noise=0.0, **FOOLED | change)) == []


def test_one_that_is_paid_for_has_no_correlation_and_is_not_asked_to_follow() -> None:
    rows = history(noise=0.0, **FOOLED)
    assert names([{k: v for k, v in row.items() if k != "rewards/truth/correlation"} for row in rows]) == []


@pytest.mark.parametrize("seed", range(5))
def test_what_noise_may_hide_is_no_alarm(seed) -> None:
    """A check of 64 responses of which half are right: a step's mean is .06 from the truth. It follows by half."""
    rng, rows = random.Random(seed), history(steps=30, noise=0.0, **FOOLED | {"rewards/truth/mean": (0.5, 0.59, 0.59)})
    for row in rows:
        row["rewards/truth/mean"] += rng.gauss(0, 0.0625)
        row["reward"] += rng.gauss(0, 0.05)
    assert names(rows) == []


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_is_no_fall(seed) -> None:
    assert names(history(seed=seed, noise=0.1, **{"rewards/truth/mean": (0.5, 0.5)})) == []


def test_held_out_scores_that_fall_while_training_scores_rise_are_overfitting() -> None:
    def evaluated(*scores: float) -> list[dict]:
        return [{"step": 10 * (i + 1), "eval/reward": score, "eval/reward_std": 1.0} for i, score in enumerate(scores)]

    assert names(history() + evaluated(1.0, 1.5, 0.9)) == ["overfitting"]
    assert names(history() + evaluated(1.0, 1.5, 1.4)) == []
    assert names(history() + evaluated(1.0)) == []


def test_a_number_that_is_none_is_named_with_its_step() -> None:
    rows = history()
    rows[7]["policy/loss"] = None
    found = find(rows)
    assert found[0].name == "not a number" and "policy/loss" in found[0].text and "step 8" in found[0].text


def test_few_steps_and_other_stages_ring_nothing() -> None:
    assert find(history(3, **{"objective/kl": (0, 99)})) == []
    assert find([{"step": i, "loss": 5.0 / i, "mean_token_accuracy": 0.5} for i in range(1, 50)]) == []
    assert find([]) == []


def test_ends_are_means_over_a_tenth_and_errors_come_from_neighbours() -> None:
    found = series([{"step": i, "x": float(i)} for i in range(1, 41)], "x")
    assert (found.start, found.end) == (2.5, 38.5)  # of 4 steps each
    assert found.error() == pytest.approx(0.5)  # jumps of 1: variance 1/2, over 4 values, of two means
    flips = series([{"step": i, "x": float(i % 2)} for i in range(1, 41)], "x")
    assert flips.error() == pytest.approx(0.5)


def test_the_report_has_alarms_in_words_and_the_last_metrics(tmp_path) -> None:
    rows = [*history(**{"objective/kl": (0.0, 12.0)}), {"step": 40, "eval/reward": 2.5, "eval/reward_std": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 41, "rew')
    found = conclude(tmp_path, "ppo")
    text = (tmp_path / "report.md").read_text()
    assert [a.name for a in found] == ["not a number", "KL"]
    assert text.startswith("# Report of stage ppo\n\nBefore the first update, mean score")
    assert "\n\n## Alarms\n\n- **not a number**: eval/reward_std was not" in text
    assert "- **KL**: the policy is" in text
    assert "| held out (step 40) | |" in text and "| reward | 2.5 |" in text and "| reward_std | not a number |" in text
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in history()))
    conclude(tmp_path, "ppo")
    assert "None of the alarms went off." in (tmp_path / "report.md").read_text()


def test_the_report_begins_with_the_lines_that_the_run_began_with(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in history()))
    lines = ["data: 60 rows read, 58 to train on", "model: <b>mine</b>; trained: all 1.2M parameters"]
    (tmp_path / "run.json").write_text(json.dumps({"command": "x", "facts": {"header": lines}, "seconds": 3}))
    conclude(tmp_path, "ppo")
    text, page = ((tmp_path / name).read_text() for name in ("report.md", "report.html"))
    assert text.startswith("# Report of stage ppo\n\n- data: 60 rows read, 58 to train on\n- model: \\<b\\>mine")
    assert "data: 60 rows read, 58 to train on<br>model: &lt;b&gt;mine&lt;/b&gt;" in page
    assert "<h1>Stage ppo</h1>" in page


def test_a_trained_model_beside_its_start_is_judged_by_accuracy_and_kl() -> None:
    start = {"score": 0.0, "accuracy": 0.5, "kl": 0.0, "length": 8.0}
    good, fooled = {"score": 3.0, "accuracy": 0.8, "kl": 1.5, "length": 7.0}, {"score": 8.0, "accuracy": 0.1,
                                                                               "kl": 14.0, "length": 7.0}
    assert compared(start, good, 600) == []
    assert [alarm.name for alarm in compared(start, fooled, 600)] == ["reward hacking", "KL"]
    assert "from 0 to 8 while the accuracy fell from 0.5 to 0.1" in compared(start, fooled, 600)[0].text
    assert compared(start, good | {"accuracy": 0.45}, 100) == []  # two standard errors of 100 prompts are 0.14
    assert [a.name for a in compared(start, good | {"accuracy": 0.45}, 2000)] == ["reward hacking"]
    assert compared({k: v for k, v in start.items() if k != "accuracy"}, good, 600) == []


def test_most_answers_that_do_not_end_ring_and_those_of_long_demonstrations_do_not_count() -> None:
    def rows(*ended: bool | None) -> list[dict]:
        return [{"step": 9, "prompt": "?", "completion": "!", "ended": e} for e in ended]

    alarm, = answered(rows(False, False, True, None, None, None))
    assert alarm.name == "endless answers" and alarm.text.startswith("2 of 3 answers")
    assert not answered(rows(False, True)) and not answered(rows(None, None)) and not answered([])
    assert not answered([{"prompt": "?", "completion": "!", "score": 1.0}])


def test_what_is_wrong_with_tools_is_said_before_its_effects():
    """Of ten steps: no call at all; calls of which most fail; answers that no longer fit."""
    def names(**row: float) -> list[str]:
        base = {"reward": 0.0, "reward_std": 1.0, "completions/mean_length": 9.0, "completions/clipped_ratio": 0.9,
                "completions/empty_ratio": 0.8}
        return [alarm.name for alarm in find([{"step": i, **base, **row} for i in range(1, 11)])]

    assert names(**{"tools/call_frequency": 0.0})[0] == "no tool is called"
    failing = names(**{"tools/call_frequency": 1.0, "tools/failure_frequency": 0.8})
    assert failing.index("tools fail") < failing.index("empty answers")
    assert "no room for answers" in names(**{"tools/call_frequency": 1.0, "episodes/no_room_ratio": 0.5})
    assert not {"no tool is called", "tools fail", "no room for answers"} & set(names())


@pytest.mark.parametrize(("row", "told"), [
    ({"tools/call_frequency": 0.0}, "0% of the responses call a tool"),
    ({"tools/call_frequency": 1.0, "tools/failure_frequency": 0.75}, "75% of the calls of tools fail"),
    ({"tools/call_frequency": 1.0, "episodes/no_room_ratio": 0.25}, "in 25% of the episodes an answer no longer fits")])
def test_the_first_step_says_what_is_wrong_with_tools(row, told):
    first = {"step": 1, "reward": 0.2, "reward_std": 0.4, "completions/mean_length": 9.0,
             "completions/clipped_ratio": 0.1, "prompts/num_responses": 8, "prompts/best_score": 1.0,
             "prompts/with_spread": 0.5}
    assert any(told in line for line in first_lines([{**first, **row}])) and told not in str(first_lines([first]))


def memory(*gib: float, free: float = 8.0) -> list[dict]:
    """A step for each figure: the peaks of two phases, the second a tenth lower, and what is free on the machine."""
    return [{"step": i, "memory/actor/update": size * 2**30, "memory/actor/generate": 0.9 * size * 2**30,
             "memory/free": free * 2**30} for i, size in enumerate(gib, 1)]


def test_memory_that_goes_on_rising_is_told_with_what_is_left() -> None:
    """100 steps from 1 GiB by 10 MiB a step: 1.49 GiB at the 50th, 1.99 at the last, and 8 GiB for 100 MiB in ten."""
    alarm, = find(memory(*(1 + i / 100 for i in range(100))))
    assert alarm.name == "memory grows"
    assert "1.49 GiB at most up to step 50 and 1.99 up to step 100: 6% of what was free" in alarm.text
    assert "the other 8.0 GiB are full in about 800 steps" in alarm.text  # 8 / 0.5 * 50


@pytest.mark.parametrize("gib", [
    [1.0] * 20 + [1.6] * 80,  # it warms up
    [1.0] * 60 + [1.5] * 40,  # one long row, of which nothing stays
    [1 + i / 20 for i in range(40)],  # so few steps may not have met every length
    [1 + i / 10_000 for i in range(100)]])  # 1%
def test_memory_that_stays_or_has_just_begun_rings_nothing(gib) -> None:
    assert names(memory(*gib)) == []
