"""Defaults that go by the machine: the dtype of weights that are trained on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybrid_rlhf.core import processor
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.run import runfile
from hybrid_rlhf.run.loop import TrainConfig
from hybrid_rlhf.training import defaults, machine_defaults, step1_sft
from tests.factories.tiny import tiny_config

# 32,000 x 512 embeddings, tied: 16.4M; 2 layers of 3.7M. 23.7M in all
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
    monkeypatch.setattr(machine_defaults, "bf16_unit", lambda: unit)
    monkeypatch.setattr(processor, "bf16_unit", lambda: unit)


def test_a_cpu_that_multiplies_bfloat16_trains_in_it_and_says_why(config, monkeypatch) -> None:
    on(monkeypatch, "AMX")
    found = defaults.resolve(config)
    assert found.model.dtype == "bfloat16"
    assert machine_defaults.reason(found, torch.bfloat16, 23_700_000) == " (fp32 masters; AMX multiplies bfloat16)"


def test_a_cpu_that_emulates_bfloat16_trains_in_float32_and_says_why(config, monkeypatch) -> None:
    on(monkeypatch, None)
    found = defaults.resolve(config)
    assert found.model.dtype == "auto"
    reason = " (no AMX or AVX512-BF16, so bfloat16 is emulated)"
    assert machine_defaults.reason(found, torch.float32, 23_700_000) == reason
    assert machine_defaults.reason(found, torch.float32, 100_000) == ""  # of which nobody asks for bfloat16
    chosen = replace(found, model=replace(found.model, dtype="bfloat16"))
    assert machine_defaults.reason(chosen, torch.bfloat16, 23_700_000) == (
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
