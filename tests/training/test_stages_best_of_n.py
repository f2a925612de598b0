"""--stage online_dpo and --stage rejection through the launcher: what they build, what they leave, what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from hybrid_rlhf.cli import main
from tests.factories.stage_options import COMMON, WORDS, used
from tests.factories.tiny import own_cache, save_tiny

CODE = """def vowels(completions, prompts, **columns):
    return [None if "cat" in p else float(sum(c.count(v) for v in "aeiou")) for c, p in zip(completions, prompts)]
"""
MORE = {"online_dpo": ["--online.sampling.max_new_tokens", "6", "--online.sampling.num_samples", "3"],
        "rejection": ["--rejection.sampling.max_new_tokens", "6", "--rejection.sampling.num_samples", "3",
                      "--rejection.num_epochs", "2", "--rejection.num_minibatches", "2"]}
REPORTED = {"online_dpo": {"pairs/kept", "rewards/margins", "loss", "logps/chosen"},
            "rejection": {"rejection/kept", "rejection/chosen_score", "loss", "mean_token_accuracy"}}
SHARED = {"reward", "reward_std", "rewards/vowels/mean", "kl", "completions/mean_length", "grad_norm", "learning_rate",
          "time/generate", "time/score", "time/train", "time/step"}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("best_of_n")
    rows = [{"prompt": f"say {w} {i}"} for i in range(2) for w in WORDS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "pay.py").write_text(CODE)
    save_tiny(folder / "base")
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        yield folder


def words(place: Path, stage: str, out: str, *more: str) -> list[str]:
    return ["--stage", stage, "--output_dir", f"{place}/{out}", *used(stage, COMMON),
            "--model.model_name_or_path", f"{place}/base",
            f"--data.sources=[{{path: {place}/rows.jsonl}}]", "--roles.actor.learning_rate", "1e-2",
            "--train.max_steps", "2", "--train.per_device_train_batch_size", "5",
            f"--reward.functions=['{place}/pay.py:vowels']", *MORE[stage], *more]


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("stage", MORE)
def test_a_stage_of_fresh_samples_trains_and_leaves_a_model_that_loads(place, built, stage, capfd) -> None:
    from transformers import AutoModelForCausalLM

    assert main(words(place, stage, stage)) == 0
    out, rows = place / stage, lines(place / stage)
    assert built[0].critic is None and built[0].ref is not None
    steps = [row for row in rows if "time/step" in row]
    assert len(steps) == 2 and all(row.keys() >= SHARED | REPORTED[stage] for row in steps), steps[0].keys()
    assert {"eval/reward", "eval/kl"} <= rows[-1].keys()
    record = json.loads((out / "run.json").read_text())
    assert (record["stage"], record["status"]) == (stage, "finished")
    trained, base = (AutoModelForCausalLM.from_pretrained(f) for f in (out / "model", place / "base"))
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), base.parameters(), strict=True))
    assert (out / "samples.jsonl").exists() and yaml.safe_load((out / "config.yaml").read_text())["stage"] == stage
    assert main(words(place, stage, stage)) == 0
    assert f"this {stage} run is finished; nothing to do" in capfd.readouterr().err


@pytest.mark.parametrize(("stage", "more"), [("online_dpo", ["--dpo.loss_type", "orpo"]),
                                             ("rejection", ["--rejection.measure_kl", "false"])])
def test_a_method_without_a_reference_builds_none(place, built, stage, more) -> None:
    assert main(words(place, stage, f"{stage}-alone", *more)) == 0
    assert built[0].ref is None
    assert not any("kl" in row for row in lines(place / f"{stage}-alone"))


@pytest.mark.parametrize("stage", MORE)
def test_with_adapters_the_reference_is_the_base_itself(place, built, stage) -> None:
    assert main(words(place, stage, f"{stage}-lora", "--model.lora.r", "4")) == 0
    assert built[0].ref.engine.model is built[0].actor.engine.model
    assert (place / f"{stage}-lora" / "adapter" / "adapter_config.json").exists()


@pytest.mark.parametrize(("stage", "more", "has_reference"), [
    ("online_dpo", [], True), ("online_dpo", ["--dpo.loss_type", "simpo"], False), ("rejection", [], True)])
def test_the_plan_knows_the_roles(place, capfd, stage, more, has_reference) -> None:
    assert main([*words(place, stage, "planned", *more), "--plan"]) == 0
    out = capfd.readouterr().out
    assert "train actor" in out and "critic" not in out and ("\nref " in out) == has_reference, out


def test_the_preview_shows_prompts_and_one_response_makes_no_pair(place, capfd) -> None:
    assert main([*words(place, "online_dpo", "shown"), "--preview"]) == 0
    assert "say " in capfd.readouterr().out
    assert main(words(place, "online_dpo", "shown", "--online.sampling.num_samples", "1")) == 2
    assert "num_samples is 1; a pair is made of two" in capfd.readouterr().err
    assert main(words(place, "rejection", "shown", "--roles.critic.learning_rate", "1")) == 2
    said = capfd.readouterr().err
    assert "roles.critic.learning_rate is not used by --stage rejection; this method has no critic" in said


def test_what_either_stage_leaves_may_be_trained_on(place) -> None:
    main(words(place, "rejection", "rejection"))
    assert main(words(place, "online_dpo", "after", "--model.model_name_or_path", f"{place}/rejection")) == 0
    assert json.loads((place / "after" / "run.json").read_text())["facts"]["base_model"] == f"{place}/rejection"
