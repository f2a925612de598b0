"""The table of defaults, what null means by it, and options that a stage does not have."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
import yaml

from hybrid_rlhf.cli import main
from hybrid_rlhf.core import accelerator
from hybrid_rlhf.core.options import value_of
from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig
from hybrid_rlhf.run import runfile
from hybrid_rlhf.run.loop import TrainConfig
from hybrid_rlhf.trainers.offline import DPOConfig
from hybrid_rlhf.trainers.ppo import PPOConfig
from hybrid_rlhf.training import defaults, preferences, step1_sft, step2_reward, step3_ppo
from hybrid_rlhf.training.registry import STAGES
from hybrid_rlhf.training.reward_sources import RewardConfig
from tests.factories.tiny import save_tiny, tiny_config

# The shape of SmolLM2-135M, on which the small models' rates were measured: 134.5M
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
           "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True}
# 32,000 x 1024 embeddings alone are 33M parameters, and 12 layers of about 13M each make it no small model
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "vocab_size": 32_000}


@pytest.fixture
def models(tmp_path) -> dict[str, ModelConfig]:
    """Folders with a configuration and a file called weights: nothing more is read."""
    found = {}
    for name, changes in (("small", {}), ("smollm2", SMOLLM2), ("large", LARGE)):
        tiny_config(**changes).save_pretrained(tmp_path / name)
        (tmp_path / name / "model.safetensors").write_bytes(b"")
        found[name] = ModelConfig(str(tmp_path / name))
    return found


def filled(config, option: str) -> float:
    return value_of(defaults.resolve(config), option)


def with_lora(model: ModelConfig) -> ModelConfig:
    return ModelConfig(model.model_name_or_path, lora=LoraConfig(r=8))


def test_null_goes_by_the_stage_by_adapters_and_by_the_size_of_the_model(models, tmp_path) -> None:
    def sft(model: ModelConfig) -> float:
        return filled(step1_sft.Config(output_dir=str(tmp_path / "out"), model=model), "train.learning_rate")

    row = STAGES["sft"].defaults["train.learning_rate"]
    assert (sft(models["large"]), sft(with_lora(models["large"]))) == (row.full, row.lora)
    assert (sft(models["small"]), sft(with_lora(models["small"]))) == (10 * row.full, 10 * row.lora)
    assert (sft(models["smollm2"]), sft(with_lora(models["smollm2"]))) == (5e-5, 5e-4)
    scored = step2_reward.Config(output_dir=str(tmp_path / "out"), model=models["smollm2"])
    assert filled(scored, "train.learning_rate") == 1e-4


def test_the_values_that_a_run_goes_by_are_told_and_why_the_rate_of_a_small_model_is_high(models, tmp_path) -> None:
    def told(model: str, made=lambda model: model) -> str:
        config = step1_sft.Config(output_dir=str(tmp_path / "out"), model=made(models[model]))
        return defaults.settings_line(defaults.resolve(config))

    rest = "train.num_train_epochs 3, train.per_device_train_batch_size 8, data.max_length 256"
    assert told("large") == f"train.learning_rate 2e-05, {rest}"
    assert told("large", with_lora) == f"train.learning_rate 0.0002, {rest}"  # adapters' own: ten times the other
    assert told("small") == f"train.learning_rate 0.0002, {rest} (rates 10 times the usual ones, for a model so small)"
    note = "(rates 2.5 times the usual ones, for a model so small)"
    assert told("smollm2") == f"train.learning_rate 5e-05, {rest} {note}"
    given = step1_sft.Config(output_dir=str(tmp_path / "out"), model=models["large"],
                             train=TrainConfig(learning_rate=2e-4))
    assert defaults.settings_line(defaults.resolve(given)) == f"train.learning_rate 0.0002, {rest}"  # the user's own
    by_steps = replace(given, train=replace(given.train, max_steps=7))  # by which the run goes, not by epochs
    assert "num_train_epochs" not in defaults.settings_line(defaults.resolve(by_steps))


def test_what_is_given_wins_and_settings_that_are_complete_are_returned_as_they_are(models, tmp_path) -> None:
    config = step1_sft.Config(output_dir=str(tmp_path / "out"), model=models["large"],
                              train=TrainConfig(learning_rate=3e-3, num_train_epochs=2))
    found = defaults.resolve(config)
    assert (found.train.learning_rate, found.train.num_train_epochs, found.train.per_device_train_batch_size) == (
        3e-3, 2, 8)
    assert defaults.resolve(found) is found


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge", "kto", "orpo", "simpo"])
def test_every_offline_loss_has_a_row(models, tmp_path, loss) -> None:
    config = preferences.Config(output_dir=str(tmp_path / "out"), model=models["large"], dpo=DPOConfig(loss_type=loss))
    row = STAGES[{"sigmoid": "dpo"}.get(loss, loss)].defaults
    assert filled(config, "train.learning_rate") == row["train.learning_rate"].full


@pytest.mark.parametrize(("estimator", "policy_loss", "method"), [
    ("gae", "ppo", "ppo"), ("gae", "gspo", "ppo"), ("grpo", "ppo", "grpo"), ("grpo", "gspo", "gspo"),
    ("grpo", "cispo", "cispo"), ("rloo", "ppo_sequence", "rloo"), ("dr_grpo", "ppo", "dr_grpo"),
    ("process_grpo", "ppo", "process_grpo"), ("gdpo", "ppo", "gdpo"), ("batch_grpo", "sapo", "batch_grpo"),
    ("reinforce_pp", "ppo", "reinforce_pp"),
    ("reinforce_pp_baseline", "ppo", "reinforce_pp_baseline")])
def test_every_method_that_samples_has_a_row_however_it_was_chosen(models, tmp_path, estimator, policy_loss,
                                                                   method) -> None:
    ppo = PPOConfig(sampling=step3_ppo.PPOConfig().sampling.__class__(num_samples=4), estimator=estimator,
                    policy_loss=policy_loss)
    config = step3_ppo.Config(output_dir=str(tmp_path / "out"), model=models["large"], ppo=ppo)
    assert defaults.method_of(config) == method
    found = defaults.resolve(config)
    assert None not in [value_of(found, option) for option in STAGES[method].defaults]
    assert (found.roles.critic.learning_rate is None) == (estimator != "gae")


def test_an_answer_without_an_end_costs_where_a_reward_model_scores_and_where_functions_do_not(
        models, tmp_path) -> None:
    from hybrid_rlhf.training.reward_sources import RewardConfig

    def penalty(reward: RewardConfig) -> float:
        config = step3_ppo.Config(output_dir=str(tmp_path / "out"), model=models["large"], reward=reward)
        return filled(config, "ppo.missing_eos_penalty")

    assert (penalty(RewardConfig()), penalty(RewardConfig(functions="builtin:length_penalty"))) == (1.0, 0.0)


@pytest.mark.parametrize(("reward", "kl_coef"), [
    ({}, 0.1), ({"functions": "builtin:length_penalty"}, 0.04), ({"url": "http://localhost:1/score"}, 0.1),
    ({"functions": "builtin:length_penalty", "models": "org/judge"}, 0.1)])
def test_the_policy_is_held_nearer_to_the_reference_where_the_score_is_learned(models, tmp_path, reward,
                                                                               kl_coef) -> None:
    from hybrid_rlhf.training.reward_sources import RewardConfig

    config = step3_ppo.Config(output_dir=str(tmp_path / "out"), model=models["large"], reward=RewardConfig(**reward))
    assert filled(config, "ppo.kl_coef") == kl_coef


def test_a_run_keeps_the_values_that_it_was_made_with_and_never_takes_the_tables(models, tmp_path, monkeypatch) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text(json.dumps(
        {"format": 1, "stage": "sft", "status": "stopped", "config": {"train": {"learning_rate": 7e-4}}}))
    for resume, rate in (("auto", 7e-4), ("never", STAGES["sft"].defaults["train.learning_rate"].full)):
        config = step1_sft.Config(output_dir=str(tmp_path / "out"), resume=resume, model=models["large"])
        assert filled(config, "train.learning_rate") == rate


@pytest.mark.parametrize(("given", "held"), [
    ({}, (0.01, 0.02)), ({"num_ppo_epochs": 1}, (0.01, 0.02)), ({"num_ppo_epochs": 1, "num_minibatches": 1}, (0, 0)),
    ({"num_ppo_epochs": 1, "num_minibatches": 1, "minibatch_size": 8}, (0.01, 0.02)),
    ({"update_kl": 0.0}, (0, 0.02)), ({"early_stop_kl": 0.0}, (0.01, 0)), ({"update_kl": 0.05}, (0.05, 0.02))])
def test_ppo_holds_its_updates_where_there_are_several_on_a_rollout_to_see_how_far_it_moved(models, tmp_path, given,
                                                                                          held) -> None:
    config = step3_ppo.Config(output_dir=str(tmp_path / "out"), model=models["large"], ppo=PPOConfig(**given))
    assert (filled(config, "ppo.update_kl"), filled(config, "ppo.early_stop_kl")) == held


# --- options that a stage does not have -------------------------------------------------------------------------------

REFUSED = [
    ("ppo", "train.learning_rate", "1e-9", "set roles.actor.learning_rate"),
    ("grpo", "train.learning_rate", "1e-9", "set roles.actor.learning_rate"),
    ("grpo", "roles.critic.learning_rate", "1e-9", "ppo.estimator grpo has no critic"),
    ("rloo", "ppo.lam", "0.9", "ppo.estimator rloo has no critic"),
    ("grpo", "ppo.sapo_temperature_pos", "2", "it is for ppo.policy_loss sapo"),
    ("gspo", "ppo.vespo_lambda_neg", "1", "it is for ppo.policy_loss vespo"),
    ("ppo", "roles.ref.tp", "1", "only the actor generates: set roles.actor.tp"),
    ("ppo", "roles.reward.learning_rate", "1e-9", "set train.learning_rate of --stage reward"),
    ("ppo", "data.packing", "true", "it is for --stage sft"),
    ("ppo", "data.score_template", "{score} {prompt}", "it is for --stage conditional_sft"),
    ("sft", "data.score_template", "{score} {prompt}", "it is for --stage conditional_sft"),
    ("sft", "data.max_prompt_length", "9", "set data.max_length"),
    ("reward", "data.train_on", "all", "only answers count here"),
    ("dpo", "model.lora.dropout", "0.1", "dropout is off here"),
    ("kto", "dpo.simpo_gamma", "2", "it is for dpo.loss_type simpo"),
    ("rejection", "data.max_length", "9", "set data.max_prompt_length"),
    ("evaluate", "model.model_name_or_path", "x", "name the models by evaluate.models"),
    ("evaluate", "roles.actor.dtype", "float32", "of the roles only roles.reward.model_name_or_path is used"),
    ("all", "stages.ppo.learning_rate", "1e-9", "set roles.actor.learning_rate")]


@pytest.mark.parametrize(("stage", "option", "value", "meant"), REFUSED, ids=[f"{s}-{o}" for s, o, _, _ in REFUSED])
def test_an_option_of_another_stage_is_one_line_that_names_the_one_meant(stage, option, value, meant, tmp_path,
                                                                         capsys) -> None:
    nested: dict = {}
    inner = nested
    *sections, name = option.split(".")
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[name] = yaml.safe_load(value) if "{" not in value else value
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(nested))
    for words in ([f"--{option}={value}"], ["--config", str(tmp_path / "old.yaml")]):
        assert main(["--stage", stage, *words]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: {option} is not used by --stage {stage}; ") and meant in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(("words", "said"), [
    (["sft", "--model.lora.alpha=8"], "model.lora.alpha is set; model.lora.r is 0"),
    (["ppo", "--ppo.kl_horizon=8"], "ppo.kl_horizon is set; ppo.kl_coef is fixed; give ppo.kl_target"),
    (["ppo", "--data.max_length=9"], "data.max_length is set; it is for the texts of ppo.ptx_coef, which is 0"),
    (["grpo", "--reward.functions=f.py:f", "--roles.reward.dtype=float32"],
     "roles.reward.dtype is set; no reward model is among the sources"),
    (["sft", "--train.lr_scheduler_type=constant", "--train.warmup_ratio=0.2"],
     "train.warmup_ratio is set; train.lr_scheduler_type constant has no warm-up; choose constant_with_warmup"),
    (["grpo", "--ppo.policy_loss=sapo", "--ppo.vespo_k_pos=1"],
     "ppo.vespo_k_pos is not used by --stage grpo; it is for ppo.policy_loss vespo"),
    (["grpo", "--ppo.policy_loss=vespo", "--ppo.cliprange=0.1"],
     "ppo.cliprange is not used by --stage grpo; ppo.policy_loss vespo does not clip"),
    (["cispo", "--ppo.cliprange_low=0.1"],
     "cliprange_low is not used by --stage cispo; ppo.policy_loss cispo has no lower bound; set ppo.cliprange_high"),
    (["grpo", "--ppo.policy_loss=vespo", "--ppo.importance=token"], "choose ppo.old_logprobs sampler"),
    (["grpo", "--ppo.policy_loss=sapo", "--ppo.dual_clip=3"], "cispo, sapo and vespo have no clipped ratio to bound"),
    (["ppo", "--ppo.kl_bias_correction=true"], "ppo.kl_bias_correction is set; there is no KL penalty in the loss"),
    (["gdpo", "--ppo.max_score=1"], "ppo.estimator gdpo normalises each source; clip it in the source"),
    (["grpo", "--ppo.max_score=1", "--ppo.min_score=2"], "ppo.min_score is 2.0 and ppo.max_score 1.0"),
    (["ppo", "--reward.timeout=5"], "reward.timeout is set; it is for functions and services"),
    (["ppo", "--reward.isolate=true", "--reward.url=http://localhost:1"],
     "reward.isolate is set; it is for functions; give reward.functions")])
def test_an_option_whose_switch_is_off_says_what_switches_it_on(words, said, capsys) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("stage", ["sft", "kto", "ppo", "gspo", "evaluate", "all"])
def test_what_is_no_option_of_a_stage_is_neither_in_its_help_nor_in_its_settings(stage, capsys) -> None:
    from hybrid_rlhf.training.unread_options import of_stage as unused_by

    shown = []
    for word in ("--help", "--print_config"):
        with pytest.raises(SystemExit):
            main([stage, word])
        shown.append(capsys.readouterr().out)
    printed = yaml.safe_load(shown[1])
    for option in unused_by(stage):
        assert not re.search(rf"--{re.escape(option)}[. ]", shown[0]), option
        inner = printed
        for name in option.split("."):
            inner = inner.get(name) if isinstance(inner, dict) else None
        assert inner is None, option


# --- shorthands -------------------------------------------------------------------------------------------------------

def settings(capsys, *words: str) -> dict:
    with pytest.raises(SystemExit):
        main([*words, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


def test_a_stage_is_the_first_word_and_a_model_is_short(capsys) -> None:
    short = settings(capsys, "sft", "--model", "here", "--model.dtype=float32")
    assert short == settings(capsys, "--stage", "sft", "--model.model_name_or_path=here", "--model.dtype=float32")
    assert short["model"]["model_name_or_path"] == "here"
    assert settings(capsys, "dpo", "--model=here")["model"]["model_name_or_path"] == "here"


def test_none_stands_for_null_wherever_null_may_stand(tmp_path, capsys) -> None:
    (tmp_path / "mine.yaml").write_text("train: {max_seconds: none, save_best: None}\nppo: {score_clip: none}\n"
                                        "roles: {actor: {quantize: none}, share_base: none}\n")
    for words in (["--config", str(tmp_path / "mine.yaml")],
                  ["--train.max_seconds=none", "--train.save_best", "None", "--ppo.score_clip", "none",
                   "--roles.actor.quantize=none", "--roles.share_base", "none"]):
        found = settings(capsys, "ppo", *words)
        assert (found["train"].get("max_seconds"), found["train"].get("save_best")) == (None, None)
        assert found["ppo"].get("score_clip") is None
        assert (found["roles"]["actor"]["quantize"], found["roles"]["share_base"]) == ("none", "none")


def test_a_finished_run_is_a_model_for_init(tmp_path, capsys) -> None:
    save_tiny(tmp_path / "run" / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "completion": "c"}\n')
    words = ["init", "--goal", "sft", "--data", str(tmp_path / "rows.jsonl"), "--model", str(tmp_path / "run"),
             "--card", "cpu", "--output_dir", str(tmp_path / "out"), "--file", str(tmp_path / "mine.yaml")]
    for status, code in (("running", 2), ("finished", 0)):
        (tmp_path / "run" / "run.json").write_text(json.dumps({"format": 1, "stage": "sft", "status": status}))
        assert main(words) == code
    assert "is not finished (running)" in capsys.readouterr().err
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["model"]["model_name_or_path"] == str(tmp_path / "run")


def test_a_stage_that_samples_runs_a_number_of_steps_unless_epochs_are_given(models, tmp_path) -> None:
    def lengths(**given) -> tuple:
        train = defaults.resolve(step3_ppo.Config(output_dir=str(tmp_path / "out"), model=models["large"],
                                                  train=TrainConfig(**given))).train
        return train.max_steps, train.num_train_epochs

    assert (lengths(), lengths(num_train_epochs=2), lengths(max_steps=7)) == ((100, None), (-1, 2), (7, None))
    (tmp_path / "out").mkdir()  # an unfinished run that went by epochs goes on by them
    (tmp_path / "out" / "run.json").write_text(json.dumps(
        {"format": 1, "stage": "ppo", "status": "stopped", "config": {"train": {"num_train_epochs": 1.0,
                                                                                "max_steps": -1}}}))
    assert lengths() == (-1, 1.0)


def test_the_default_length_is_lowered_to_the_models_positions_and_said(tmp_path):
    tiny_config(max_position_embeddings=64).save_pretrained(tmp_path / "short")
    (tmp_path / "short" / "model.safetensors").write_bytes(b"")
    config = step1_sft.Config(model=ModelConfig(str(tmp_path / "short")), output_dir=str(tmp_path / "out"))
    found = defaults.resolve(config)
    assert found.data.max_length == 64
    assert "data.max_length 64" in defaults.settings_line(found)
    assert "data.max_length" not in defaults.settings_line(config)


@pytest.mark.parametrize("given, found", [({}, (32, 32)), ({"new": 20}, (44, 20)), ({"prompt": 50}, (50, 14)),
                                          ({"prompt": 64}, (64, 256)), ({"prompt": 60, "new": 9}, (60, 9))])
def test_default_lengths_of_stages_that_sample_fit_the_positions_together(tmp_path, given, found):
    tiny_config(max_position_embeddings=64).save_pretrained(tmp_path / "short")
    (tmp_path / "short" / "model.safetensors").write_bytes(b"")
    sampling = SamplingConfig(max_new_tokens=given.get("new", 256))
    config = step3_ppo.Config(
        data=DataConfig(max_prompt_length=given.get("prompt", 256)), ppo=PPOConfig(sampling=sampling),
        model=ModelConfig(str(tmp_path / "short")), output_dir=str(tmp_path / "out"))
    settled = defaults.resolve(config)
    assert (settled.data.max_prompt_length, settled.ppo.sampling.max_new_tokens) == found
    line = defaults.settings_line(settled)
    assert f"data.max_prompt_length {found[0]}" in line
    assert (f"ppo.sampling.max_new_tokens {found[1]}" in line) == (found[1] < 256)


def test_a_length_that_was_given_stays_for_the_check_to_refuse(tmp_path):
    tiny_config(max_position_embeddings=64).save_pretrained(tmp_path / "short")
    (tmp_path / "short" / "model.safetensors").write_bytes(b"")
    config = step1_sft.Config(model=ModelConfig(str(tmp_path / "short")), data=DataConfig(max_length=65),
                              output_dir=str(tmp_path / "out"))
    assert defaults.resolve(config).data.max_length == 65


# --- Defaults that go by the machine: the dtype of weights that are trained on a CPU, and whether all are trained

# 32,000 x 512 embeddings, tied: 16,384,000; 2 layers of 4 x 512 x 512 + 3 x 512 x 1728 + 2 x 512; a norm of 512
COUNT = 23_792_128
MIDDLE = {"hidden_size": 512, "intermediate_size": 1728, "num_hidden_layers": 2, "num_attention_heads": 8,
          "num_key_value_heads": 8, "vocab_size": 32_000, "tie_word_embeddings": True}


@pytest.fixture
def config(tmp_path) -> step1_sft.Config:
    """SFT of 24M weights, of which there is the configuration alone."""
    for name, changes in (("middle", MIDDLE), ("small", {})):
        tiny_config(**changes).save_pretrained(tmp_path / name)
        (tmp_path / name / "model.safetensors").write_bytes(b"")
    return step1_sft.Config(output_dir=str(tmp_path / "out"), model=ModelConfig(str(tmp_path / "middle")))


def on(monkeypatch, unit: str | None) -> None:
    monkeypatch.setattr(defaults, "bf16_unit", lambda: unit)
    monkeypatch.setattr(accelerator, "bf16_unit", lambda: unit)


def test_a_cpu_that_multiplies_bfloat16_trains_in_it_and_says_why(config, monkeypatch) -> None:
    on(monkeypatch, "AMX")
    found = defaults.resolve(config)
    assert found.model.dtype == "bfloat16"
    assert defaults.reason(found, torch.bfloat16, COUNT) == " (fp32 masters; AMX multiplies bfloat16)"


def test_a_cpu_that_emulates_bfloat16_trains_in_float32_and_says_why(config, monkeypatch) -> None:
    on(monkeypatch, None)
    found = defaults.resolve(config)
    assert found.model.dtype == "auto"
    reason = " (no AMX or AVX512-BF16, so bfloat16 is emulated)"
    assert defaults.reason(found, torch.float32, COUNT) == reason
    assert defaults.reason(found, torch.float32, 100_000) == ""  # of which nobody asks for bfloat16
    chosen = replace(found, model=replace(found.model, dtype="bfloat16"))
    assert defaults.reason(chosen, torch.bfloat16, COUNT) == (
        " (fp32 masters; no AMX or AVX512-BF16, so bfloat16 is emulated)")


@pytest.mark.parametrize("changes", [
    {"model": "small"},  # too small to gain by it
    {"train": TrainConfig(optim="sgd")},  # keeps no masters
    {"dtype": "float32"}])
def test_small_models_other_optimizers_and_a_chosen_dtype_stay(config, monkeypatch, tmp_path, changes) -> None:
    on(monkeypatch, "AVX512-BF16")
    path = str(tmp_path / changes.get("model", "middle"))
    given = replace(config, model=ModelConfig(path, dtype=changes.get("dtype", "auto")),
                    train=changes.get("train", config.train))
    assert defaults.resolve(given).model.dtype == given.model.dtype


def test_a_run_that_began_in_float32_goes_on_in_it(config, monkeypatch, tmp_path) -> None:
    on(monkeypatch, "AMX")
    runfile.start(config.output_dir, "sft", config, "train.py --stage sft")
    assert defaults.resolve(config).model.dtype == "auto"
    assert defaults.resolve(replace(config, resume="never")).model.dtype == "bfloat16"


def test_a_run_that_began_in_bfloat16_goes_on_by_the_same_command(config, monkeypatch) -> None:
    on(monkeypatch, "AMX")
    runfile.start(config.output_dir, "sft", defaults.resolve(config), "train.py --stage sft")
    record = runfile.read_run(config.output_dir)
    record.close("finished")
    assert runfile.finished(config.output_dir, "sft", defaults.resolve(config))
    on(monkeypatch, None)  # nor does the processor change it: the checkpoints are of that dtype
    assert defaults.resolve(config).model.dtype == "bfloat16"


@pytest.mark.parametrize(("free", "rank"), [(507_565_398, 0), (507_565_397, 16), (None, 0)])
def test_all_weights_are_trained_where_they_fit_and_adapters_where_not(config, monkeypatch, capsys, free, rank) -> None:
    """SFT of 23,792,128 weights takes 16 bytes of each, 380,674,048; three quarters of 507,565,397.3 are that."""
    monkeypatch.setattr(defaults, "free_bytes", lambda _device: free)
    found = defaults.resolve(config)
    assert found.model.lora.r == rank and found.train.learning_rate == (5e-4 if rank else 5e-5)
    line = "model.lora.r 16: training all weights would take about 0 GiB, and 0 are free; 0 trains them all the same\n"
    assert capsys.readouterr().err == (line if rank else "")


def test_a_rank_that_is_given_or_recorded_is_not_chosen_again(config, monkeypatch) -> None:
    monkeypatch.setattr(defaults, "free_bytes", lambda _device: 1)
    chosen = replace(config, model=replace(config.model, lora=LoraConfig(r=0)))
    assert defaults.resolve(chosen).model.lora.r == 0
    frozen = replace(config, model=replace(config.model, freeze=["layers"]))  # what is trained is the user's choice
    assert defaults.resolve(frozen).model.lora.r == 0
    assert defaults.resolve(replace(config, train=TrainConfig(optim="sgd"))).model.lora.r == 0  # in half the memory
    runfile.start(config.output_dir, "sft", chosen, "train.py --stage sft")
    assert defaults.resolve(config).model.lora.r == 0


def test_a_run_takes_16_bytes_of_a_trained_weight_and_4_of_another(tmp_path) -> None:
    out = str(tmp_path / "out")
    functions = RewardConfig(functions="builtin:length_penalty")
    for config, size in (
            (preferences.Config(output_dir=out), 16 + 4),  # policy, reference
            (preferences.Config(output_dir=out, dpo=DPOConfig(loss_type="simpo")), 16),
            (step3_ppo.Config(output_dir=out), 2 * 16 + 2 * 4),  # actor, critic; reference, reward model
            (step3_ppo.Config(output_dir=out, reward=functions, ppo=PPOConfig(estimator="reinforce_pp")), 16 + 4)):
        assert defaults.training_bytes(config, 1000) == 1000 * size
