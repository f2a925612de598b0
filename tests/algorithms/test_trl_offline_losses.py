"""Our formulas against the loss that TRL reports for its first step on the same tiny model and tokens, in fp32."""

from __future__ import annotations

import math
import os

import pytest
import torch

from tests.factories.trl_rows import PAD, TOLERANCE, VOCABULARY, pair_rows, sft_rows, tiny

pytest.importorskip("trl")
pytest.importorskip("datasets")

from hybrid_rlhf.algorithms.likelihood import token_logprobs
from hybrid_rlhf.algorithms.preference import bradley_terry
from hybrid_rlhf.core.tensors import SequenceBatch, last_true, length_mask, pad_right, predicted, predicting
from tests.factories.trl_oracle import trl_reward_loss, trl_sft_loss


@torch.no_grad()
def our_sft_loss(model, rows: list[dict]) -> float:
    real = length_mask([len(r["input_ids"]) for r in rows])
    batch = SequenceBatch(pad_right([r["input_ids"] for r in rows], PAD), real,
                          pad_right([r["completion_mask"] for r in rows], 0).bool())
    hidden = predicting(model.model(batch.input_ids).last_hidden_state, batch)
    logprobs, _, _ = token_logprobs(hidden, predicted(batch), model.lm_head, chunk_size=5)
    return float(-logprobs.mean())


@torch.no_grad()
def our_reward_loss(model, rows: list[dict], center_coef: float = 0.0) -> float:
    sequences = [r["chosen_ids"] for r in rows] + [r["rejected_ids"] for r in rows]
    real = length_mask([len(s) for s in sequences])
    every = model.score(model.model(pad_right(sequences, PAD)).last_hidden_state).squeeze(-1)
    chosen, rejected = every.gather(1, last_true(real)[:, None])[:, 0].chunk(2)
    margin = torch.tensor([r["margin"] for r in rows]) if "margin" in rows[0] else None
    return float(bradley_terry(chosen, rejected, margin, center_coef).mean())


def test_the_sft_loss_on_response_tokens_is_trls():
    model, rows = tiny("causal"), sft_rows()
    ours = our_sft_loss(model, rows)
    assert ours == pytest.approx(trl_sft_loss(model, rows, PAD), abs=TOLERANCE)
    assert abs(ours - math.log(VOCABULARY)) > 0.1  # not the loss of any model at all


def test_the_comparison_notices_one_token_more():
    model, rows = tiny("causal"), sft_rows()
    more = [rows[0] | {"completion_mask": [0] * 3 + [1] * 4}, *rows[1:]]
    assert abs(our_sft_loss(model, more) - trl_sft_loss(model, rows, PAD)) > 100 * TOLERANCE


@pytest.mark.parametrize("with_margin", [False, True], ids=["plain", "margin"])
@pytest.mark.parametrize("center_coef", [0.0, 0.1], ids=["free", "centred"])
def test_the_reward_loss_at_the_last_real_token_is_trls(with_margin, center_coef):
    model, rows = tiny("scalar"), pair_rows(with_margin)
    ours = our_reward_loss(model, rows, center_coef)
    assert ours == pytest.approx(trl_reward_loss(model, rows, PAD, center_coef or None), abs=TOLERANCE)
    assert abs(ours - math.log(2)) > 0.01


def test_the_oracle_leaves_model_environment_and_random_numbers_as_they_were(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")  # as joining a process group does, and what makes accelerate write the rest
    model, rows = tiny("causal"), sft_rows()
    weights, environment = {name: p.clone() for name, p in model.state_dict().items()}, dict(os.environ)
    numbers = torch.random.get_rng_state()
    trl_sft_loss(model, rows, PAD)
    assert all(torch.equal(weights[name], p) for name, p in model.state_dict().items())
    assert not model.training and model.config.pad_token_id == PAD and model.config.eos_token_id == 2
    assert dict(os.environ) == environment
    assert torch.equal(torch.random.get_rng_state(), numbers)


def test_the_oracle_refuses_pads_among_the_tokens():
    with pytest.raises(ValueError, match="pad id 0"):
        trl_reward_loss(tiny("scalar"), [{"chosen_ids": [3, PAD], "rejected_ids": [4]}], PAD)
