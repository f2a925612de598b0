"""Micro-batches without gradients, by modules whose numbers are the tokens themselves: what comes back, and where."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right, predicted
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.models.router import Router
from hybrid_rlhf.roles import Actor, Reference, TokenScores
from hybrid_rlhf.roles.router_balance import expert_shares
from hybrid_rlhf.roles.scoring import prefix_groups, score
from hybrid_rlhf.rollout import Prompts, Rollout

PROMPTS, RESPONSES = [[5, 6], [7], [5, 6]], [[10, 11], [12, 13, 14], [15]]


class Tokens(nn.Module):
    """Of every token to be predicted: its id over the temperature is the log-probability. Expert e is chosen by the
    tokens with rest e over 3. It notes how it was called."""

    def __init__(self, can_share: bool | None = None, router: Router | None = None) -> None:
        super().__init__()
        self.weight, self.router, self.calls = nn.Parameter(torch.zeros(1)), router, []
        if can_share is not None:
            self.can_share = lambda: self.calls.append("tried") or can_share

    def forward(self, batch: SequenceBatch, temperature: float = 1.0, with_choices: bool = False) -> TokenScores:
        self.calls.append((self.training, torch.is_grad_enabled(), int(batch.loss_mask.sum()), len(batch)))
        experts = batch.input_ids[batch.attention_mask] % 3
        return TokenScores(predicted(batch) / temperature, None, None,
                           choices=torch.bincount(experts, minlength=3).float() if with_choices else None)


class Everywhere(nn.Module):
    """Of every token: twice its id."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, batch: SequenceBatch) -> torch.Tensor:
        return 2.0 * batch.input_ids


def rollout(**given) -> Rollout:
    return Rollout.from_responses(Prompts(PROMPTS, [""] * 3), RESPONSES, [True] * 3, 0, [""] * 3, **given)


def batch() -> SequenceBatch:
    return rollout().sequences(0)


@pytest.mark.parametrize("max_tokens", [1, 8192])
@pytest.mark.parametrize("kind", [Actor, Reference])
def test_the_numbers_of_a_row_are_added_up_whatever_the_budget(kind, max_tokens):
    engine = HybridEngine(Tokens())
    role = Actor(engine, None, max_tokens) if kind is Actor else Reference(engine, max_tokens)
    found = role.sequence_logprobs(batch())
    assert len(engine.module.calls) == (3 if max_tokens == 1 else 1)
    assert found.tolist() == [10 + 11, 12 + 13 + 14, 15] and found.dtype == torch.float32


def test_rows_of_one_prefix_stay_together_where_the_module_computes_it_once():
    """Rows 0 and 2 begin with 5 6: 2 of 11 tokens are saved. Two rows of four tokens fit into eight."""
    module = Tokens(can_share=True)
    assert prefix_groups(HybridEngine(module), batch()).tolist() == [0, 1, 0] and module.calls == ["tried"]
    found = [index.tolist() for index, _ in score(HybridEngine(Tokens(True)), batch(), 8, len)]
    assert found == [[0, 2], [1]]


def test_no_prefix_is_looked_for_where_none_is_computed_once():
    module = Tokens(can_share=False)
    assert prefix_groups(HybridEngine(module), batch()) is None and module.calls == ["tried"]
    assert prefix_groups(HybridEngine(Tokens()), batch()) is None
    empty, packed, parts = Tokens(can_share=True), Tokens(can_share=True), Tokens(can_share=True)
    assert prefix_groups(HybridEngine(empty), batch().rows(torch.arange(0))) is None and empty.calls == []
    rows = batch()
    rows.position_ids = torch.arange(5).expand(3, 5)
    assert prefix_groups(HybridEngine(packed), rows) is None and packed.calls == ["tried"]  # keeps documents apart
    parts.weight.ds_id = 0  # as ZeRO 3 marks weights that are in parts
    assert prefix_groups(HybridEngine(parts), batch()) is None and parts.calls == []


def experts_batch() -> SequenceBatch:
    """Experts 0 0 1, 2 and 2 0: three, one and two tokens choose 0, 1 and 2."""
    rows = [[3, 6, 1], [2], [5, 9]]
    real = length_mask([3, 1, 2])
    return SequenceBatch(pad_right(rows, 0), real, real)


@pytest.mark.parametrize("is_training", [True, False])
def test_experts_are_counted_over_the_minibatch_once_where_a_micro_batch_is_less(is_training):
    module = Tokens(router=Router(0.1, num_choices=1))
    module.train(is_training)
    shares = expert_shares(HybridEngine(module), experts_batch(), 3)
    assert shares(3) is None and module.calls == []  # all of it counts itself
    assert shares(2).tolist() == pytest.approx([3 / 6, 1 / 6, 2 / 6]) and shares(2).dtype == torch.float32
    assert module.calls == [(False, False, 0, 1), (False, False, 0, 1), (False, False, 0, 1)]  # no token is scored
    shares(1)
    assert len(module.calls) == 3 and module.training is is_training


def test_with_two_choices_a_token_the_shares_add_up_to_two():
    module = Tokens(router=Router(0.1, num_choices=2))
    assert expert_shares(HybridEngine(module), experts_batch(), 8192)(1).tolist() == pytest.approx([1, 1 / 3, 2 / 3])


@pytest.mark.parametrize("router", [None, Router(0.1, num_choices=None)])
def test_without_experts_or_by_a_loss_of_the_model_s_own_nothing_is_counted(router):
    module = Tokens(router=router)
    shares = expert_shares(HybridEngine(module), experts_batch(), 1)
    assert shares(1) is None and shares(3) is None and module.calls == []
    scalar = SimpleNamespace(module=Everywhere())
    assert expert_shares(scalar, experts_batch(), 1)(1) is None
