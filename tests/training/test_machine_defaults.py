"""Defaults that go by the machine: the dtype of weights that are trained on a CPU, and whether all are trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybrid_rlhf.core import processor
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig
from hybrid_rlhf.run import runfile
from hybrid_rlhf.run.loop import TrainConfig
from hybrid_rlhf.trainers.offline import DPOConfig
from hybrid_rlhf.trainers.ppo import PPOConfig
from hybrid_rlhf.training import defaults, memory_options, preferences, step1_sft, step3_ppo
from hybrid_rlhf.training.reward_sources import RewardConfig
from tests.factories.tiny import tiny_config

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
    monkeypatch.setattr(processor, "bf16_unit", lambda: unit)


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


def test_a_run_that_goes_on_keeps_its_rank_when_memory_is_bounded(config, monkeypatch) -> None:
    """--memory leaves the choice of adapters to the user, but not of a run that has them."""
    seen = []

    def look_ahead(config, _place):
        seen.append(defaults.resolve(config).model.lora.r)
        raise UserError("enough")

    monkeypatch.setattr(memory_options, "look_ahead", look_ahead)
    chosen = replace(config, model=replace(config.model, lora=LoraConfig(r=16)))
    for resume in ("never", "auto"):
        with pytest.raises(UserError, match="enough"):
            memory_options.carry_out(replace(config, resume=resume), memory=1 << 30, only_plan=False)
        runfile.start(config.output_dir, "sft", chosen, "train.py --stage sft")
    assert seen == [0, 16]
