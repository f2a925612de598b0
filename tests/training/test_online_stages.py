"""The stages without a critic through the launcher: what they build, what they leave, and that the numbers move."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from hybrid_rlhf.cli import main
from hybrid_rlhf.training.registry import STAGES
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


ESTIMATOR_OF = {"grpo": "grpo", "dr_grpo": "dr_grpo", "process_grpo": "process_grpo", "rloo": "rloo",
                "reinforce_pp": "reinforce_pp", "reinforce_pp_baseline": "reinforce_pp_baseline", "gspo": "grpo",
                "cispo": "grpo"}


def test_every_variant_of_ppo_is_tried_here():
    assert {name for name, row in STAGES.items() if row.base == "ppo"} == ESTIMATOR_OF.keys()


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


@pytest.mark.slow
def test_a_run_of_a_variant_is_found_finished_and_a_later_stage_starts_from_it(place, capsys) -> None:
    named = launch(place, "grpo", *GROUPS)
    capsys.readouterr()
    assert launch(place, "grpo", *GROUPS) == named
    assert "this grpo run is finished; nothing to do" in capsys.readouterr().err
    assert main(["--stage", "rloo", "--config", f"{named}/config.yaml", "--output_dir", f"{place}/runs/other"]) == 2
    assert "give --stage grpo" in capsys.readouterr().err
    after = place / "runs" / "after"
    assert main(["--stage", "rejection", "--output_dir", str(after), *used("rejection", COMMON),
                 "--model.model_name_or_path", str(named),
                 f"--data.sources=[{{path: {place}/ppo.jsonl}}]", "--train.max_steps", "1",
                 "--rejection.sampling.max_new_tokens", "4",
                 "--roles.reward.model_name_or_path", f"{place}/runs/reward"]) == 0


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
