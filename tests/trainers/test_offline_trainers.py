"""Offline preference trainers: against plain torch and TRL's trainers on the same tokens, whole pairs, and learning."""

from __future__ import annotations

import copy

import pytest
import torch

from hybrid_rlhf.data.collate import collate_labelled, collate_pairs
from hybrid_rlhf.roles import Actor, Reference
from hybrid_rlhf.trainers.offline import DPOConfig, OfflineTrainer
from tests.factories.pairs import EOS, POLICY, REFERENCE, engine, model, plain, plain_pair_loss, trainer

TRIPLES = [([5, 6], [7, 8, EOS], [9, 10, 11, 12, EOS]), ([13], [14, 15, 16, EOS], [EOS]),
           ([17, 18, 19], [20, EOS], [21, 22, EOS])]
PAIR_ROWS = [{"chosen_ids": p + c, "rejected_ids": p + r, "num_prompt_tokens": len(p)} for p, c, r in TRIPLES]
LABELLED = [(p, c if i % 2 else r, bool(i % 2)) for i, (p, c, r) in enumerate(TRIPLES)]
LABELLED_ROWS = [{"input_ids": p + c, "num_prompt_tokens": len(p), "label": y} for p, c, y in LABELLED]
PAIRS = collate_pairs(PAIR_ROWS, 0)
KTO = collate_labelled(LABELLED_ROWS, 0, 64)


def plain_loss(causal, reference, loss_type: str) -> torch.Tensor:
    """The papers' formulas in plain torch, row by row."""
    if loss_type == "kto":
        answers = [answer for _, answer, _ in LABELLED]
        gaps = [(plain(causal, p, o) - plain(reference, p, o)).sum()
                for (p, _, _), o in zip(LABELLED, [answers[-1], *answers[:-1]], strict=True)]
        kl = torch.stack(gaps).mean().detach()
        assert kl > 0.1  # else nothing would be seen of it
        ratios = [(plain(causal, p, c) - plain(reference, p, c)).sum() for p, c, _ in LABELLED]
        return torch.stack([1 - torch.sigmoid(0.1 * (ratio - kl) * (1 if y else -1))
                            for ratio, (_, _, y) in zip(ratios, LABELLED, strict=True)]).mean()
    return torch.stack([plain_pair_loss(*(plain(causal, p, o) for o in (c, r)), *(plain(reference, p, o).detach()
                        for o in (c, r)), loss_type) for p, c, r in TRIPLES]).mean()


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "hinge", "kto", "orpo", "simpo"])
def test_the_step_is_the_papers_formula_and_gradient_whatever_the_token_budget(loss_type) -> None:
    twin, reference = model(POLICY), model(REFERENCE)
    loss = plain_loss(twin, reference, loss_type)
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None]).norm().item()
    batch = KTO if loss_type == "kto" else PAIRS
    for max_tokens in (1, 16, 8192):
        made = trainer(DPOConfig(loss_type), max_tokens)
        evaluated = made.evaluate([batch]).compute()
        metrics = made.step(batch).compute()
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert evaluated == pytest.approx({k: metrics[k] for k in evaluated}, rel=1e-4, abs=1e-5)


def test_what_is_reported_of_pairs_are_the_plain_numbers_by_trl_s_names() -> None:
    twin, reference = model(POLICY), model(REFERENCE)
    found = trainer(DPOConfig("ipo", beta=0.5)).evaluate([PAIRS]).compute()
    with torch.no_grad():
        logps = [[plain(twin, p, a).sum().item() for a in answers] for p, *answers in TRIPLES]
        start = [[plain(reference, p, a).sum().item() for a in answers] for p, *answers in TRIPLES]
    rewards = 0.5 * (torch.tensor(logps) - torch.tensor(start))
    wanted = {"logps/chosen": sum(r[0] for r in logps) / 3, "logps/rejected": sum(r[1] for r in logps) / 3,
              "rewards/chosen": rewards[:, 0].mean().item(), "rewards/rejected": rewards[:, 1].mean().item(),
              "rewards/margins": (rewards[:, 0] - rewards[:, 1]).mean().item(),
              "rewards/accuracies": (rewards[:, 0] > rewards[:, 1]).float().mean().item()}
    assert {k: found[k] for k in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("loss_type", "options"), [
    ("sigmoid", {}), ("ipo", {}), ("hinge", {"beta": 0.3}),
    ("kto", {"beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.5})])
def test_the_first_loss_is_that_of_trl_s_own_trainer(loss_type, options) -> None:
    pytest.importorskip("trl")
    from tests.factories.trl_oracle import trl_preference_loss

    if loss_type == "kto":
        rows = [{"prompt": p, "completion": c, "label": y} for p, c, y in LABELLED]
    else:
        rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in TRIPLES]
    kind = "KTO" if loss_type == "kto" else "DPO"
    theirs = trl_preference_loss(kind, model(POLICY), model(REFERENCE), rows, 0, loss_type=loss_type, **options)
    ours = trainer(DPOConfig(loss_type, **options)).step(KTO if loss_type == "kto" else PAIRS).compute()["loss"]
    assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)


def test_a_mismatched_row_is_the_prompt_with_the_answer_of_the_row_before() -> None:
    batch = collate_labelled(LABELLED_ROWS, 0, 4)
    assert batch.mismatched.input_ids.tolist() == [[5, 6, 21, 22], [13, 9, 10, 11], [17, 18, 19, 14]]
    assert batch.mismatched.loss_mask.tolist() == [[False, False, True, True], [False, True, True, True],
                                                   [False, False, False, True]]
    assert batch.labels.tolist() == [False, True, False]


def test_a_mismatched_answer_is_never_one_to_the_same_prompt_and_a_lone_prompt_has_none() -> None:
    def rows(*prompts: list[int]) -> list[dict]:
        return [{"input_ids": [*p, 40 + i, 3], "num_prompt_tokens": len(p), "label": i % 2} for i, p in
                enumerate(prompts)]

    batch = collate_labelled(rows([5, 6], [5, 6], [7], [5, 6]), 0, 9)  # two answers each of a question are common
    assert batch.mismatched.input_ids.tolist() == [[5, 6, 42, 3], [5, 6, 42, 3], [7, 41, 3, 0], [5, 6, 42, 3]]
    lone = collate_labelled(rows([5, 6], [5, 6]), 0, 9)
    assert len(lone.mismatched) == 0 and len(lone) == 2
    metrics = trainer(DPOConfig("kto")).step(lone).compute()
    assert metrics["kl"] == 0 and metrics["loss"] > 0


def test_the_reference_is_asked_once_per_batch_and_stays_as_it_was(monkeypatch) -> None:
    made, calls = trainer(DPOConfig(), rate=1e-2), []
    before = copy.deepcopy(made.reference.engine.model.state_dict())
    ask = made.reference.sequence_logprobs
    monkeypatch.setattr(made.reference, "sequence_logprobs", lambda batch: calls.append(1) or ask(batch))
    first = made.step(PAIRS).compute()["loss"]
    second = made.step(PAIRS).compute()["loss"]
    assert len(calls) == 2 and second < first
    assert all(torch.equal(v, before[k]) for k, v in made.reference.engine.model.state_dict().items())


def test_a_loss_and_its_reference_belong_together() -> None:
    with pytest.raises(ValueError, match="needs a reference"):
        OfflineTrainer(Actor(engine(POLICY), None), None, DPOConfig())
    with pytest.raises(ValueError, match="has no reference"):
        OfflineTrainer(Actor(engine(POLICY), None), Reference(engine(REFERENCE)), DPOConfig("orpo"))
