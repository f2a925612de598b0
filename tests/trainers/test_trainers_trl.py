"""The first step of our trainers reports the loss that TRL's trainers report, on the same model and batch, in fp32."""

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

from hybrid_rlhf.data.collate import collate_pairs, collate_sft
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.roles import Actor, PolicyModule, Reward
from hybrid_rlhf.trainers.reward import RewardTrainer
from hybrid_rlhf.trainers.sft import SFTTrainer
from tests.factories.trl_oracle import trl_reward_loss, trl_sft_loss
from tests.factories.trl_rows import PAD, TOLERANCE, pair_rows, sft_rows, tiny


def _engine(module: torch.nn.Module, model: torch.nn.Module | None = None) -> HybridEngine:
    return HybridEngine(module, model, pad_id=PAD).prepare_training(OptimizerConfig(), lambda step: 1.0, ZeroConfig())


@pytest.mark.parametrize("max_tokens", [12, 8192])
def test_the_first_sft_step_reports_trl_s_loss(max_tokens):
    expected = trl_sft_loss(tiny("causal"), sft_rows(), PAD)
    model = tiny("causal")
    rows = [{"input_ids": r["input_ids"], "loss_mask": r["completion_mask"]} for r in sft_rows()]
    metrics = SFTTrainer(Actor(_engine(PolicyModule(model), model), None, max_tokens)).step(collate_sft(rows, PAD))
    assert metrics.compute()["loss"] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("with_margin", [False, True])
@pytest.mark.parametrize("max_tokens", [24, 8192])
def test_the_first_reward_step_reports_trl_s_loss(with_margin, max_tokens):
    rows = pair_rows(with_margin)
    expected = trl_reward_loss(tiny("scalar"), rows, PAD)
    trainer = RewardTrainer(Reward(_engine(ScalarModel(tiny("scalar"))), max_tokens))
    batch = collate_pairs([r | {"num_prompt_tokens": 0} for r in rows], PAD)
    assert trainer.step(batch).compute()["loss"] == pytest.approx(expected, abs=TOLERANCE)
