"""What a policy says of tokens, from states and a head that are written down: probabilities by hand, chunks, teachers,
routers, and which rows are computed how."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right
from hybrid_rlhf.models.shared_prefix import NotShareableError
from hybrid_rlhf.roles import PolicyModule
from hybrid_rlhf.roles import policy_module as module_under_test

T = torch.tensor
QUARTERS = T([4.0, 2.0, 1.0, 1.0])  # unnormalised: 1/2, 1/4, 1/8, 1/8


class Model(nn.Module):
    """The state of token t is t; the head gives log(QUARTERS ** state) of four words. `told`: which ways were taken."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.told = nn.Parameter(torch.ones(1)), []
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=4))

    def head(self, rows):
        self.told.append(len(rows))
        return self.weight * rows * QUARTERS.log()


class Packed:
    """The rows of a batch, flat, as one way of computing them would have them."""

    def predicting(self, batch):
        return batch.places()

    def counts(self, batch):
        return batch.attention_mask.flatten().int() * 2


@pytest.fixture
def module(monkeypatch) -> PolicyModule:
    made = Model()

    def whole(model, batch):
        assert model is made
        made.told.append("whole")
        return batch.input_ids[..., None].float()

    def distinct(model, batch, packed):
        made.told.append("distinct")
        assert model is made and isinstance(packed, Packed)
        if int(batch.input_ids.max()) == 9:
            raise NotShareableError("nine")
        return batch.input_ids.flatten()[:, None].float()

    monkeypatch.setattr(module_under_test, "hidden_states", whole)
    monkeypatch.setattr(module_under_test, "hidden_states_and_router_logits", lambda *given: (whole(*given), "logits"))
    monkeypatch.setattr(module_under_test, "distinct_states", distinct)
    monkeypatch.setattr(module_under_test, "distinct_states_and_router_logits", lambda *given: (
        distinct(*given), "distinct logits"))
    monkeypatch.setattr(module_under_test, "packing", lambda batch: Packed() if len(batch) == 2 else None)
    monkeypatch.setattr(module_under_test, "documents", lambda batch: Packed())
    monkeypatch.setattr(module_under_test, "own_head", lambda model: model.head)
    monkeypatch.setattr(module_under_test, "sharing_is_exact", lambda model: made.told.append("tried") or model is made)
    monkeypatch.setattr(module_under_test, "say_whole", lambda model, reason, *, is_packed: made.told.append(
        (reason, is_packed) if model is made else "another"))
    return PolicyModule(made)


def batch(*rows: list[int], documents: bool = False) -> SequenceBatch:
    """All tokens but the first are to be predicted."""
    real = length_mask([len(row) for row in rows])
    marks = real.clone()
    marks[:, :1] = False
    ids = pad_right(rows, 0)
    return SequenceBatch(ids, real, marks, torch.zeros_like(ids) if documents else None)


def routed(module: PolicyModule, num_choices: int | None = 2) -> list:
    """Gives the module a router, which notes what it is asked."""
    asked = []
    module.router = SimpleNamespace(num_choices=num_choices, choices=lambda *given: asked.append(given) or "choices",
                                    loss=lambda *given: asked.append(given) or "loss")
    return asked


def test_log_probabilities_entropy_and_the_likeliest_word_by_hand(module):
    """From state 1 at temperature 1: 1/2, 1/4, 1/8, 1/8. From state 2 at temperature 2: the same."""
    found = module(batch([1, 0], [1, 3]), with_entropy=True)
    assert found.logprobs.exp().tolist() == pytest.approx([1 / 2, 1 / 8])
    entropy = (1 / 2 * 1 + 1 / 4 * 2 + 2 * 1 / 8 * 3) * T(2.0).log()
    assert found.entropy.tolist() == pytest.approx([float(entropy)] * 2) and found.correct.tolist() == [True, False]
    assert found.logprobs.dtype == torch.float32
    halved = module(batch([2, 1]), temperature=2.0)
    assert halved.logprobs.exp().tolist() == pytest.approx([1 / 4]) and halved.entropy is None
    assert [halved.router_loss, halved.choices, halved.divergence, halved.top_ids, halved.top_logprobs] == [None] * 5


def test_the_head_is_taken_to_chunks_and_once_at_least(module, monkeypatch):
    monkeypatch.setattr(module_under_test, "chunk_rows", lambda size, dtype: 2 if (size, dtype) == (
        4, torch.float32) else 99)
    with torch.no_grad():
        module(batch([1, 0, 0, 0, 0, 0]))
        assert module.model.told == ["whole", 2, 2, 1]
        module.model.told.clear()
        assert module(batch([1])).logprobs.tolist() == [] and module.model.told == ["whole", 0]


def test_sharing_is_tried_once_on_the_model_and_not_beside_a_router_loss_of_the_model_s_own(module):
    assert module.can_share() and module.can_share() and module.model.told == ["tried"]
    module._can_share = None
    routed(module, num_choices=None)
    assert module.can_share() is False and module.model.told == ["tried"]
    module._can_share = None
    routed(module, num_choices=2)
    assert module.can_share() is True and module.model.told == ["tried"] * 2


def test_rows_are_computed_whole_until_sharing_was_tried_and_where_nothing_is_shared(module):
    two, one, none = batch([1, 2], [3]), batch([1, 2]), batch([1, 2]).rows(torch.arange(0))
    found = module.states(two)
    assert module.model.told == ["whole"] and found.rows.tolist() == [[1.0]] and found.router_logits is None
    assert found.hidden.shape == (2, 2, 1) and found.counts.tolist() == [True, True, True, False]
    module._can_share = True
    assert module.states(two).counts.tolist() == [2, 2, 2, 0] and module.states(two).rows.tolist() == [[1.0]]
    module.states(one)
    module.states(none)
    assert module.model.told == ["whole", "distinct", "distinct", "whole", "whole"]


def test_rows_that_cannot_be_shared_are_computed_whole_and_why_is_said(module):
    module._can_share = True
    assert module.states(batch([1, 9], [3])).rows.tolist() == [[1.0]]
    assert module.states(batch([1, 9], documents=True)).rows.tolist() == [[1.0]]
    assert module.model.told == ["distinct", ("nine", False), "whole", "distinct", ("nine", True), "whole"]
