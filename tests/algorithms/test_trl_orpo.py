"""ORPO's whole loss against TRL's own `get_batch_loss_metrics`, on the same model and tokens, in fp32."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.core.tensors import length_mask, pad_right
from hybrid_rlhf.data.collate import collate_pairs
from hybrid_rlhf.trainers.offline import DPOConfig
from tests.factories.pairs import EOS, POLICY, model, plain, trainer

trl = pytest.importorskip("trl.experimental.orpo.orpo_trainer").ORPOTrainer
BETA = 0.3
# a prompt of one token is never predicted, and with answers of one length the mean over the batch's tokens is the mean
# of the answers' means: here TRL's supervised term is the paper's
EVEN = [([5], [7, 8, EOS], [9, 10, EOS]), ([13], [14, 15, EOS], [6, 4, EOS])]
UNEVEN = [([5, 6], [7, 8, EOS], [9, 10, 11, 12, EOS]), ([13], [14, 15, 16, EOS], [EOS]),
          ([17, 18, 19], [20, EOS], [21, EOS])]


def trl_loss(triples: list) -> float:
    def side(which: int) -> dict:
        rows = [row[0] + row[which] for row in triples]
        labels = [[-100] * len(row[0]) + row[which] for row in triples]
        return {"input_ids": pad_right(rows, 0), "attention_mask": length_mask([len(r) for r in rows]).long(),
                "labels": pad_right(labels, -100)}

    batch = {f"{name}_{key}": value for name, which in (("chosen", 1), ("rejected", 2))
             for key, value in side(which).items()}
    stand = SimpleNamespace(
        beta=BETA, is_encoder_decoder=False, padding_value=0, aux_loss_enabled=False,
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        concatenated_inputs=trl.concatenated_inputs, get_batch_logps=trl.get_batch_logps)
    stand.concatenated_forward = partial(trl.concatenated_forward, stand)
    stand.odds_ratio_loss = partial(trl.odds_ratio_loss, stand)
    return float(trl.get_batch_loss_metrics(stand, model(POLICY), batch)[0].detach())


def our_loss(triples: list) -> float:
    rows = [{"chosen_ids": p + c, "rejected_ids": p + r, "num_prompt_tokens": len(p)} for p, c, r in triples]
    return trainer(DPOConfig("orpo", beta=BETA)).step(collate_pairs(rows, 0)).compute()["loss"]


def test_the_whole_loss_is_trl_s_where_the_two_supervised_terms_are_one() -> None:
    assert our_loss(EVEN) == pytest.approx(trl_loss(EVEN), abs=1e-6)


def test_elsewhere_they_differ_by_the_supervised_terms_alone() -> None:
    causal = model(POLICY)
    with torch.no_grad():
        whole = torch.cat([plain(causal, (p + c)[:1], (p + c)[1:]) for p, c, _ in UNEVEN])  # TRL's: the prompt too
        answers = torch.stack([plain(causal, p, c).mean() for p, c, _ in UNEVEN])
    difference = float(-answers.mean() + whole.mean())
    assert abs(difference) > 0.05  # else nothing would be seen of it
    assert our_loss(UNEVEN) - difference == pytest.approx(trl_loss(UNEVEN), abs=2e-6)
