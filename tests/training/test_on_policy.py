from types import SimpleNamespace

import pytest

from hybrid_rlhf.training import on_policy


@pytest.mark.parametrize(("accuracy", "held_out", "is_told"), [
    (0.625, 15, True),  # 0.5 + 1 / sqrt(15) is 0.76
    (0.74, 15, True), (0.8, 15, False), (0.55, 300, True), (0.57, 300, False), (1.0, 4, False), (None, 0, False)])
def test_a_reward_model_that_may_have_guessed_is_told_of_before_anything_is_trained_on_it(
        monkeypatch, tmp_path, accuracy, held_out, is_told):
    """PPO on SmolLM2 with one of 0.63 raised the score from 0.1 to 2.3 and lost every right answer."""
    metrics = {} if accuracy is None else {"eval/accuracy": accuracy}
    record = SimpleNamespace(metrics=metrics, facts={"data": {"held_out": held_out}}, left_early="")
    (tmp_path / "run.json").touch()
    monkeypatch.setattr(on_policy.runfile, "read_run", lambda _folder: record)
    said = on_policy._reward_line(str(tmp_path), has_check=False)
    assert ("is not known: reward.own_samples of" in said) == (held_out > 0 and not is_told)
    assert ("which may be chance" in said) == is_told
    assert ("no pair was held out" in said) == (held_out == 0)


def test_a_reward_model_that_is_no_run_of_ours_is_not_judged(tmp_path):
    assert on_policy._reward_line(str(tmp_path), has_check=False) is None
    assert on_policy._reward_line(None, has_check=False) is None


def test_a_reward_run_that_did_not_finish_is_a_warning_of_the_header(monkeypatch, tmp_path):
    (tmp_path / "run.json").touch()
    monkeypatch.setattr(on_policy.runfile, "read_run", lambda _folder: SimpleNamespace(
        metrics={}, facts={}, left_early="is not finished (stopped): its model is that of step 7 of 15"))
    assert on_policy._reward_line("reward", has_check=True) is None  # there is no such folder
    assert on_policy._reward_line(str(tmp_path), has_check=True).startswith(
        f"warning: the reward run in {tmp_path} is not finished (stopped): its model is that of step 7 of 15; ")


@pytest.mark.parametrize(("agreement", "is_warned"), [(0.9, False), (0.6, True)])
def test_what_stage_2_found_about_own_answers_is_said_before_ppo(monkeypatch, tmp_path, agreement, is_warned):
    facts = {"data": {"held_out": 100}, "own_samples": {"agreement": agreement, "pairs": 25, "held_out": 0.95}}
    (tmp_path / "run.json").touch()
    monkeypatch.setattr(on_policy.runfile, "read_run", lambda _folder: SimpleNamespace(
        metrics={"eval/accuracy": 0.95}, facts=facts, left_early=""))
    said = on_policy._reward_line(str(tmp_path), has_check=True)
    assert f"agreed in {agreement:.0%} of 25 pairs of the starting model's own answers" in said
    assert said.startswith("warning: ") == is_warned  # 0.5 + 1 / sqrt(25) is 0.7
