"""Our divergences against the loss of TRL's GKDTrainer on the same two models and rows: values, and gradients of all
weights."""

from __future__ import annotations

import pytest
import torch

from hybrid_rlhf.algorithms.divergence import Divergence, TeacherTargets
from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right, predicting
from hybrid_rlhf.roles import PolicyModule
from tests.factories.trl_rows import PAD, sft_rows, tiny

pytest.importorskip("trl")


@pytest.fixture
def trl_loss(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    return pytest.importorskip("trl.experimental.gkd").GKDTrainer.generalized_jsd_loss


def batch_of(rows: list[dict]) -> SequenceBatch:
    real = length_mask([len(r["input_ids"]) for r in rows])
    return SequenceBatch(pad_right([r["input_ids"] for r in rows], PAD), real,
                         pad_right([r["completion_mask"] for r in rows], 0).bool())


@pytest.mark.parametrize(("kind", "beta"), [(Divergence("forward_kl"), 0), (Divergence("reverse_kl"), 1),
                                            (Divergence("jsd", 0.5), 0.5), (Divergence("jsd", 0.1), 0.1),
                                            (Divergence("jsd", 0.9, 0.7), 0.9)], ids=str)
@pytest.mark.parametrize("rows_of_a_chunk", [1, 1000])
def test_the_loss_and_its_gradients_are_trls(trl_loss, kind, beta, rows_of_a_chunk, monkeypatch):
    monkeypatch.setattr("hybrid_rlhf.roles.policy_module.chunk_rows", lambda *_: rows_of_a_chunk)
    student, twin, teacher = tiny("causal"), tiny("causal"), tiny("causal", seed=1)
    batch = batch_of(sft_rows())
    with torch.no_grad():
        states = predicting(teacher.model(batch.input_ids).last_hidden_state, batch)
    targets = TeacherTargets(kind, list(states.split(batch.loss_mask.sum(1).tolist())), head=teacher.lm_head)
    ours = PolicyModule(student)(batch, teacher=targets).divergence.mean()
    labels = batch.input_ids.masked_fill(~batch.loss_mask, -100)[:, 1:]
    theirs = trl_loss(twin(batch.input_ids).logits[:, :-1], teacher(batch.input_ids).logits[:, :-1].detach(), labels,
                      beta=beta, temperature=kind.temperature)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5) and ours.item() > 0.1
    ours.backward()
    theirs.backward()
    for (name, mine), other in zip(student.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)
