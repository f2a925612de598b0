"""The stages without a critic through the launcher: what they build, what they leave, and that the numbers move."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from hybrid_rlhf.cli import main
from tests.factories.stage_options import COMMON, WORDS, used
from tests.factories.tiny import own_cache, save_tiny

GROUPS = ["--ppo.sampling.max_new_tokens", "6", "--roles.actor.learning_rate", "1e-2", "--train.max_steps", "2",
          "--train.per_device_train_batch_size", "3", "--ppo.num_ppo_epochs", "2", "--ppo.num_minibatches", "2",
          "--data.eval_fraction", "0.1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("online")
    rows = {"reward": [{"prompt": f"say {w}", "chosen": w, "rejected": "no no"} for w in WORDS],
            "ppo": [{"prompt": f"say {w} {i}"} for i in range(2) for w in WORDS]}
    for name, table in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in table))
    save_tiny(folder / "base")
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        launch(folder, "reward", "--train.max_steps", "1", data="reward")
        yield folder


def launch(folder: Path, stage: str, *more: str, data: str = "ppo") -> Path:
    out = folder / "runs" / stage
    assert main(["--stage", stage, "--output_dir", str(out), *used(stage, COMMON),
                 "--model.model_name_or_path", f"{folder}/base",
                 f"--data.sources=[{{path: {folder}/{data}.jsonl}}]", *more]) == 0
    return out


ESTIMATOR_OF = {"grpo": "grpo", "reinforce_pp": "reinforce_pp", "gspo": "grpo"}  # groups, tokens, another loss


@pytest.mark.slow
@pytest.mark.parametrize("stage", ESTIMATOR_OF)
def test_a_stage_without_a_critic_trains_and_leaves_a_model_that_loads(place, built, stage) -> None:
    from transformers import AutoModelForCausalLM

    out = launch(place, stage, *GROUPS)
    assert built[0].critic is None
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert not any(name.startswith("value/") for row in rows for name in row)
    assert all(isinstance(v, (int, float)) for row in rows for v in row.values())
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert (config["stage"], config["ppo"]["estimator"]) == (stage, ESTIMATOR_OF[stage])
    record = json.loads((out / "run.json").read_text())
    assert record["stage"] == stage and f"# Report of stage {stage}" in (out / "report.md").read_text()
    model, base = (AutoModelForCausalLM.from_pretrained(f) for f in (out / "model", place / "base"))
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), base.parameters(), strict=True))
    samples = (out / "samples.jsonl").read_text().splitlines()
    assert samples and all("completion" in json.loads(line) for line in samples)


@pytest.mark.slow
def test_a_name_of_a_variant_is_ppo_with_its_settings(place) -> None:
    named = launch(place, "grpo", *GROUPS)  # finished above, or run here
    given = place / "runs" / "given"
    assert main(["--stage", "ppo", "--config", f"{named}/config.yaml", "--output_dir", str(given)]) == 0
    numbers = [[json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
               for out in (named, given)]
    assert json.loads((given / "run.json").read_text())["stage"] == "ppo"
    for name in ("reward", "policy/loss", "kl", "grad_norm"):
        assert [r.get(name) for r in numbers[0]] == [r.get(name) for r in numbers[1]]


def test_yaml_may_name_the_variant_and_change_what_it_presets(place, tmp_path, capsys) -> None:
    (tmp_path / "mine.yaml").write_text("stage: grpo\nppo: {sampling: {num_samples: 4}}\n")
    with pytest.raises(SystemExit):
        main(["--stage", "grpo", "--config", f"{tmp_path}/mine.yaml", "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["ppo"]["estimator"], printed["ppo"]["sampling"]["num_samples"]) == ("grpo", 4)


def test_the_plan_of_a_stage_without_a_critic_has_none(place, capsys) -> None:
    more = ["--stage", "grpo", "--output_dir", f"{place}/runs/planned", *used("grpo", COMMON),
            "--model.model_name_or_path", f"{place}/base", "--roles.reward.model_name_or_path", f"{place}/runs/reward",
            f"--data.sources=[{{path: {place}/ppo.jsonl}}]", "--ppo.sampling.max_new_tokens", "6", "--plan"]
    assert main(more) == 0
    out = capsys.readouterr().out
    assert "train actor" in out and "critic" not in out


def test_adapters_on_one_base_have_no_adapter_of_a_critic(place, built) -> None:
    out = launch(place, "rloo", *GROUPS, "--model.lora.r", "4", "--output_dir", f"{place}/runs/lora",
                 "--roles.share_base", "actor-ref", "--roles.reward.model_name_or_path", f"{place}/runs/reward")
    assert out and built[0].critic is None
    names = [n for n, _ in built[0].actor.engine.model.named_parameters() if "lora" in n]
    assert names and all("actor" in n for n in names)


def test_grpo_with_a_function_needs_neither_a_reward_model_nor_a_critic(place, built, tmp_path) -> None:
    code = "def short(completions, **_):\n    return [-float(len(c)) for c in completions]\n"
    (tmp_path / "rewards.py").write_text(code)
    out = tmp_path / "grpo"
    assert main(["--stage", "grpo", "--output_dir", str(out), *used("grpo", COMMON),
                 "--model.model_name_or_path", f"{place}/base",
                 f"--data.sources=[{{path: {place}/ppo.jsonl}}]", *GROUPS, f"--data.cache_dir={tmp_path}/cache",
                 f"--reward.functions=['{tmp_path}/rewards.py:short']", "--ppo.max_refills", "1"]) == 0
    assert built[0].critic is None and (out / "model" / "model.safetensors").exists()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert "rewards/short/mean" in rows[0] and "refill/rounds" in rows[0]


# --- --stage online_dpo and --stage rejection through the launcher: what they build, what they leave, what they refuse

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
def best_of_n(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("best_of_n")
    rows = [{"prompt": f"say {w} {i}"} for i in range(2) for w in WORDS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "pay.py").write_text(CODE)
    save_tiny(folder / "base")
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        yield folder


def words(best_of_n: Path, stage: str, out: str, *more: str) -> list[str]:
    return ["--stage", stage, "--output_dir", f"{best_of_n}/{out}", *used(stage, COMMON),
            "--model.model_name_or_path", f"{best_of_n}/base",
            f"--data.sources=[{{path: {best_of_n}/rows.jsonl}}]", "--roles.actor.learning_rate", "1e-2",
            "--train.max_steps", "2", "--train.per_device_train_batch_size", "5",
            f"--reward.functions=['{best_of_n}/pay.py:vowels']", *MORE[stage], *more]


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("stage", MORE)
def test_a_stage_of_fresh_samples_trains_and_leaves_a_model_that_loads(best_of_n, built, stage, capfd) -> None:
    from transformers import AutoModelForCausalLM

    assert main(words(best_of_n, stage, stage)) == 0
    out, rows = best_of_n / stage, lines(best_of_n / stage)
    assert built[0].critic is None and built[0].ref is not None
    steps = [row for row in rows if "time/step" in row]
    assert len(steps) == 2 and all(row.keys() >= SHARED | REPORTED[stage] for row in steps), steps[0].keys()
    assert {"eval/reward", "eval/kl"} <= rows[-1].keys()
    record = json.loads((out / "run.json").read_text())
    assert (record["stage"], record["status"]) == (stage, "finished")
    trained, base = (AutoModelForCausalLM.from_pretrained(f) for f in (out / "model", best_of_n / "base"))
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), base.parameters(), strict=True))
    assert (out / "samples.jsonl").exists() and yaml.safe_load((out / "config.yaml").read_text())["stage"] == stage
    assert main(words(best_of_n, stage, stage)) == 0
    assert f"this {stage} run is finished; nothing to do" in capfd.readouterr().err


@pytest.mark.parametrize(("stage", "more"), [("online_dpo", ["--dpo.loss_type", "orpo"]),
                                             ("rejection", ["--rejection.measure_kl", "false"])])
def test_a_method_without_a_reference_builds_none(best_of_n, built, stage, more) -> None:
    assert main(words(best_of_n, stage, f"{stage}-alone", *more)) == 0
    assert built[0].ref is None
    assert not any("kl" in row for row in lines(best_of_n / f"{stage}-alone"))


@pytest.mark.parametrize("stage", MORE)
def test_with_adapters_the_reference_is_the_base_itself(best_of_n, built, stage) -> None:
    assert main(words(best_of_n, stage, f"{stage}-lora", "--model.lora.r", "4")) == 0
    assert built[0].ref.engine.model is built[0].actor.engine.model
    assert (best_of_n / f"{stage}-lora" / "adapter" / "adapter_config.json").exists()


@pytest.mark.parametrize(("stage", "more", "has_reference"), [
    ("online_dpo", [], True), ("online_dpo", ["--dpo.loss_type", "simpo"], False), ("rejection", [], True)])
def test_the_plan_knows_the_roles(best_of_n, capfd, stage, more, has_reference) -> None:
    assert main([*words(best_of_n, stage, "planned", *more), "--plan"]) == 0
    out = capfd.readouterr().out
    assert "train actor" in out and "critic" not in out and ("\nref " in out) == has_reference, out


def test_the_preview_shows_prompts_and_one_response_makes_no_pair(best_of_n, capfd) -> None:
    assert main([*words(best_of_n, "online_dpo", "shown"), "--preview"]) == 0
    assert "say " in capfd.readouterr().out
    assert main(words(best_of_n, "online_dpo", "shown", "--online.sampling.num_samples", "1")) == 2
    assert "num_samples is 1; a pair is made of two" in capfd.readouterr().err
    assert main(words(best_of_n, "rejection", "shown", "--roles.critic.learning_rate", "1")) == 2
    said = capfd.readouterr().err
    assert "roles.critic.learning_rate is not used by --stage rejection; this method has no critic" in said


def test_what_either_stage_leaves_may_be_trained_on(best_of_n) -> None:
    main(words(best_of_n, "rejection", "rejection"))
    assert main(words(best_of_n, "online_dpo", "after", "--model.model_name_or_path", f"{best_of_n}/rejection")) == 0
    assert json.loads((best_of_n / "after" / "run.json").read_text())["facts"]["base_model"] == f"{best_of_n}/rejection"
