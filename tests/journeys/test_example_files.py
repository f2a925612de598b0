"""Every example file runs through the launcher on the data beside it, cut to a few steps of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_rlhf.cli import main
from tests.factories.tiny import own_cache, save_tiny

ROOT = Path(__file__).parents[2]
SHORT = ["--train.max_steps", "2", "--train.per_device_train_batch_size", "4", "--model.dtype", "float32"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny model; the working directory is the checkout's, as the paths in the files want it."""
    folder = tmp_path_factory.mktemp("examples")
    save_tiny(folder / "base", max_position_embeddings=1024)
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        patch.chdir(ROOT)
        yield folder


def launch(place: Path, stage: str, file: str, *more: str, out: str) -> list[dict]:
    """The rows of metrics.jsonl of a run of examples/`file`."""
    argv = ["--stage", stage, "--config", f"examples/{file}", "--model.model_name_or_path", f"{place}/base",
            "--output_dir", f"{place}/{out}", *SHORT, *more]
    assert main(argv) == 0
    assert (place / out / "model" / "model.safetensors").exists()
    return [json.loads(line) for line in (place / out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_preferences_are_learned_from_the_file_beside_the_example(place, stage):
    rows = launch(place, stage, f"{stage}/{stage}.yaml", out=stage)
    assert rows[0]["loss"] == pytest.approx({"dpo": 0.6931, "kto": 0.5}[stage], abs=1e-3)  # the policy is the reference
    assert rows[1]["loss"] != rows[0]["loss"] and any(k.startswith("eval/") for k in rows[-1])


def test_grpo_is_paid_by_the_functions_of_the_verifiable_example(place):
    rows = launch(place, "grpo", "verifiable_reward/verifiable_reward.yaml", "--ppo.sampling.max_new_tokens", "8",
                  "--ppo.num_ppo_epochs", "1", out="grpo")
    assert "value/loss" not in rows[0] and 0 <= rows[0]["rewards/numeric_match/mean"] <= 1
    assert rows[0]["rewards/is_short/mean"] == 1.0 and "eval/rewards/numeric_match/mean" in rows[-1]
    assert 0 <= rows[0]["frac_reward_zero_std"] <= 1


@pytest.mark.slow
def test_explanations_are_judged_by_the_rubric_of_the_example(place):
    """A random model writes no verdicts, so that its probabilities judge."""
    save_tiny(place / "larger", seed=3, initializer_range=0.3, max_position_embeddings=2048)
    rows = launch(place, "grpo", "judge/judge.yaml", "--reward.judge.model", f"{place}/larger",
                  "--reward.judge.score=probability", "--reward.judge.max_new_tokens=512",
                  "--ppo.sampling.max_new_tokens", "8", "--reward.judge.cache", f"{place}/judged", out="judge")
    names = ("correct", "fits_reader", "two_or_three_sentences")
    items = {name: rows[0][f"rewards/judge/{name}/mean"] for name in names}
    assert rows[0]["rewards/judge/mean"] == pytest.approx(
        (3 * items["correct"] + 2 * items["fits_reader"] + items["two_or_three_sentences"]) / 6)
    assert rows[0]["reward"] == pytest.approx(
        rows[0]["rewards/judge/mean"] + 0.2 * rows[0]["rewards/repetition_penalty/mean"], abs=1e-5)


def test_a_student_is_taught_by_the_teacher_of_the_command_line(place):
    rows = launch(place, "distill", "distill/distill.yaml", "--distill.sampling.max_new_tokens", "8",
                  f"--roles.teacher.model_name_or_path={place}/base", out="distill")
    assert rows[0]["distill/divergence"] == pytest.approx(0, abs=1e-6)  # the student is its teacher
    assert "rewards/numeric_match/mean" in rows[0] and "eval/distill/divergence" in rows[-1]


@pytest.mark.slow
def test_rejection_imitates_no_answer_that_is_wrong(place):
    rows = launch(place, "rejection", "rejection/rejection.yaml", "--rejection.sampling.max_new_tokens", "8",
                  out="rejection")
    assert rows[0]["rewards/numeric_match/mean"] == 0 == rows[0]["rejection/kept"]  # this model knows no arithmetic
    assert rows[0]["reward"] == pytest.approx(0.5 * rows[0]["rewards/says_why/mean"])
    some = launch(place, "rejection", "rejection/rejection.yaml", "--rejection.sampling.max_new_tokens", "8",
                  "--rejection.min_score=0.5", out="some")
    assert (some[0]["rejection/kept"] > 0) == (some[0]["rewards/says_why/mean"] > 0)


@pytest.mark.slow
def test_ppo_is_paid_by_a_helpful_and_a_harmless_reward_model_of_our_own_stage_2(place):
    names = ("helpful", "harmless")
    for name in names:
        rows = launch(place, "reward", "hh_reward/hh_reward.yaml", "--data.sources",
                      f"[{{path: examples/hh_ppo/{name}.jsonl}}]", out=name)
        assert 0 <= rows[-1]["eval/accuracy"] <= 1
    judges = f"--reward.models=[{', '.join(f'{place}/{name}' for name in names)}]"
    rows = launch(place, "ppo", "hh_ppo/hh_ppo.yaml", judges, "--ppo.sampling.max_new_tokens", "8",
                  "--ppo.num_ppo_epochs", "1", "--reward.weights=[2.0, -1.0]", out="ppo")
    for row in rows[:2]:
        helpful, harmless = (row[f"rewards/{name}/mean"] for name in names)
        assert row["reward"] == pytest.approx(2 * helpful - harmless, abs=1e-4) and helpful != harmless
    samples = [json.loads(line) for line in (place / "ppo" / "samples.jsonl").read_text().splitlines()]
    assert samples and all("Human:" not in s["prompt"] for s in samples)  # the template's turns, not the transcript's
