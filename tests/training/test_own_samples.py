"""Agreement of two reward models of half the data each."""

import json
import random
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.cli import main
from hybrid_rlhf.training import on_policy
from hybrid_rlhf.training.step2_reward.own_samples import _agreement, agreement, line, may_be_chance
from tests.factories.tiny import own_cache, save_tiny

WORDS = ("red", "blue", "green", "sun", "moon", "cat", "dog", "fox")


def test_the_agreement_by_hand_leaves_out_equal_answers():
    first, second = torch.tensor([1.0, -1.0, 0.0, 2.0]), torch.tensor([2.0, 1.0, 1.0, 3.0])
    assert _agreement(first, second) == (pytest.approx(2 / 3), 3)
    assert _agreement(first[:0], second[:0]) == (None, 0)


def test_an_agreement_near_a_coin_s_is_called_so():
    found = {"agreement": 0.7, "pairs": 16, "held_out": 0.9375}  # 0.5 + 1 / sqrt(16) is 0.75
    assert may_be_chance(0.7, 16) and not may_be_chance(0.8, 16) and not may_be_chance(None, 0)
    assert "agreed in 70% of 16 pairs" in line(found) and "94% on held-out pairs" in line(found)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base, and pairs that say one thing ("clear") or nothing ("noise")."""
    folder, draw = tmp_path_factory.mktemp("own"), random.Random(0)
    save_tiny(folder / "base")
    for name in ("clear", "noise"):
        rows = []
        for i in range(120):
            answers = [" ".join(draw.choices(WORDS[:4], k=4)), " ".join(draw.choices(WORDS[4:], k=4))]
            if name == "noise":
                draw.shuffle(answers)
            rows.append({"prompt": f"say {draw.choice(WORDS)} {i}", "chosen": answers[0], "rejected": answers[1]})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        yield folder


def test_halves_agree_on_held_out_pairs_where_pairs_are_clear_and_not_on_noise(place, capfd):
    found = {}
    for name in ("clear", "noise"):
        assert main(["--stage", "reward", "--output_dir", str(place / "runs" / name), "--data.sources",
                     f"[{{path: {place}/{name}.jsonl}}]", "--model.model_name_or_path", str(place / "base"),
                     "--train.max_steps", "24", "--train.learning_rate", "1e-3", "--data.max_length", "64",
                     "--reward.own_samples", "16", "--data.eval_fraction", "0.3"]) == 0
        found[name] = json.loads((place / "runs" / name / "run.json").read_text())["facts"]["own_samples"]
        err = capfd.readouterr().err
        before, _, after = err.partition("reward.own_samples: two models of half the data each agreed in ")
        assert "after step 24 two models are trained on half of the pairs each, about 24 steps together" in before
        assert ("this may be chance" in after) == may_be_chance(found[name]["agreement"], found[name]["pairs"])
    assert found["clear"]["held_out"] > 0.9 > 0.75 > found["noise"]["held_out"]


def test_a_run_that_was_stopped_trains_nothing_more(capsys):
    opened = SimpleNamespace(config=SimpleNamespace(reward=SimpleNamespace(own_samples=8)), steps=10)
    measured = agreement(opened, lambda _opened: pytest.fail("it trains"), 3)
    assert measured == {"own_samples": {"why": "the run ended after step 3 of 10; let it finish"}}
    assert "own answers was not measured: the run ended after step 3 of 10" in capsys.readouterr().err


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
