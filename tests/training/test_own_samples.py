"""Agreement of two reward models of half the data each."""

import json
import random
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.cli import main
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
        assert "reward.own_samples: two models of half the data each agreed in " in capfd.readouterr().err
    assert found["clear"]["held_out"] > 0.9 > 0.75 > found["noise"]["held_out"]


def test_a_run_that_was_stopped_trains_nothing_more(capsys):
    opened = SimpleNamespace(config=SimpleNamespace(reward=SimpleNamespace(own_samples=8)), steps=10)
    measured = agreement(opened, lambda _opened: pytest.fail("it trains"), 3)
    assert measured == {"own_samples": {"why": "the run ended after step 3 of 10; let it finish"}}
    assert "own start were not measured: the run ended after step 3 of 10" in capsys.readouterr().err
