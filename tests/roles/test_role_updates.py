"""What a role hands to its optimizer step: the rows of each micro-batch, what their loss is given, and its weight. By a
module whose log-probability of a token is its weight times the id; the step itself is written down, and not made."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybrid_rlhf.algorithms.divergence import Divergence, TeacherTargets
from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right, predicted
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.models.router import Router
from hybrid_rlhf.roles import Actor, AuxiliaryLoss, Critic, Reward, TokenScores
from hybrid_rlhf.roles import actor as actor_module
from hybrid_rlhf.roles import critic as critic_module
from hybrid_rlhf.roles import reward_model as reward_module
from hybrid_rlhf.rollout import Prompts, Rollout
from tests.factories.trainers import policy, trained

T = torch.tensor
PROMPTS, RESPONSES = [[5, 6], [7], [5, 6]], [[10, 11], [12, 13, 14], [15]]


class Slope(nn.Module):
    """`asked` has what a forward was given beside the rows."""

    def __init__(self, router: Router | None = None, can_share: bool = False) -> None:
        super().__init__()
        self.weight, self.router, self.asked = nn.Parameter(torch.ones(1)), router, []
        self.can_share = lambda: can_share

    def forward(self, batch: SequenceBatch, **options) -> TokenScores:
        taught = options.pop("teacher", None)
        self.asked.append((batch.input_ids.tolist(), options))
        found = self.weight * predicted(batch)
        experts = torch.bincount(batch.input_ids[batch.attention_mask] % 2, minlength=2).float()
        is_counted = options.get("with_choices", False)
        return TokenScores(found, None, None, 5.0 * self.weight if self.router and not is_counted else None,
                           experts if is_counted else None, None if taught is None else taught.flat()[0][:, 0])


class Numbers(nn.Module):
    """Of every token: its weight times the id."""

    def __init__(self, can_share: bool = False) -> None:
        super().__init__()
        self.weight, self.can_share = nn.Parameter(torch.ones(1)), lambda: can_share

    def forward(self, batch: SequenceBatch) -> torch.Tensor:
        return self.weight * batch.input_ids


class Taken(HybridEngine):
    """Notes what happened within its blocks: `told`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.told = []

    @contextmanager
    def resident(self):
        self.told.append("stays")
        yield
        self.told.append("goes")


@pytest.fixture(autouse=True)
def steps(monkeypatch) -> list[tuple]:
    """What `accumulate` was given: (budget, Rows ..)."""
    seen = []

    def accumulate(engine, max_tokens, *rows):
        engine.told.append("step")
        seen.append((max_tokens, *rows))
        return "metrics"

    for module in (actor_module, critic_module, reward_module):
        monkeypatch.setattr(module, "accumulate", accumulate)
    return seen


def rollout() -> Rollout:
    return Rollout.from_responses(Prompts(PROMPTS, [""] * 3), RESPONSES, [True] * 3, 0, [""] * 3, temperature=0.5)


def batch() -> SequenceBatch:
    """Rows of four, three and two tokens; the first token of the second row is marked, and nobody predicts it."""
    rows = [[5, 6, 10, 11], [7, 12, 13], [5, 15]]
    marks = [[False, False, True, True], [True, True, True], [False, True]]
    return SequenceBatch(pad_right(rows, 0), length_mask([4, 3, 2]), pad_right(marks, False, torch.bool))


def targets() -> TeacherTargets:
    """100 + a token's id, of each row's loss tokens."""
    return TeacherTargets(Divergence(), [T([[110.0], [111.0]]), T([[112.0], [113.0]]), T([[115.0]])])


def test_an_update_gives_the_loss_its_rows_at_the_rollout_s_temperature_and_the_whole_minibatch_s_counts(steps):
    engine, made, seen = Taken(Slope()), rollout(), []
    made.advantages = torch.arange(9.0).view(3, 3)

    def loss(scores, rows, totals):
        seen.append((scores.logprobs.tolist(), rows.advantages.tolist(), [int(n) for n in totals]))
        return scores.logprobs.sum(), {"loss": (1.0, 2)}

    assert Actor(engine, None, 33).update(made, loss) == "metrics" and engine.told == ["stays", "step", "goes"]
    [(budget, rows)] = steps
    assert budget == 33 and rows.lengths.tolist() == [4, 4, 3] and rows.prefix_groups is None
    value, observed = rows.micro_batch_loss(T([2, 0]))
    assert seen == [([15, 10, 11], [[6, 7, 8], [0, 1, 2]], [6, 3])] and value.item() == 36.0
    assert observed == {"loss": (1.0, 2)}
    [(ids, options)] = engine.module.asked
    assert ids == [[5, 6, 15, 0], [5, 6, 10, 11]]
    assert options == {"with_entropy": True, "temperature": 0.5, "expert_shares": None}


def test_rows_of_another_stream_have_their_weight_and_the_temperature_one(steps):
    engine = Taken(Slope())
    auxiliary = AuxiliaryLoss(batch(), lambda scores, count: (scores.logprobs.sum() / count, {"ptx": (1.0, 1)}), 0.5)
    Actor(engine, None).update(rollout(), lambda *_: None, auxiliary)
    [(_, _, rows)] = steps
    value, observed = rows.micro_batch_loss(T([1]))
    assert value.item() == 0.5 * (12 + 13) / 5 and observed == {"ptx": (1.0, 1)}  # of five tokens that are predicted
    assert engine.module.asked[-1][1] == {"expert_shares": None} and rows.lengths.tolist() == [4, 3, 2]


def test_a_step_on_tokens_counts_those_of_the_minibatch_and_knows_its_teacher_s_rows(steps):
    engine = Taken(Slope())
    actor = Actor(engine, None, 9)
    found = actor.fit_tokens(batch(), lambda scores, count: (scores.divergence.sum() / count, {}), targets())
    assert found == "metrics"
    [(budget, rows)] = steps
    assert budget == 9 and engine.told == ["stays", "step", "goes"]
    assert rows.micro_batch_loss(T([2, 1]))[0].item() == pytest.approx((115 + 112 + 113) / 5)
    actor.update(rollout(), lambda scores, rows, totals: (scores.divergence.sum(), {}), teacher=targets())
    assert steps[1][1].micro_batch_loss(T([0]))[0].item() == 110 + 111
    actor.fit_tokens(batch(), lambda scores, count: (scores.logprobs.sum(), {"none": scores.divergence}))
    assert steps[2][1].micro_batch_loss(T([0]))[1] == {"none": None}


def test_rows_with_one_beginning_are_named_to_the_step(steps):
    Actor(Taken(Slope(can_share=True)), None).update(rollout(), lambda *_: None)
    Critic(Taken(Numbers(can_share=True))).update(rollout(), lambda *_: None)
    assert [step[1].prefix_groups.tolist() for step in steps] == [[0, 1, 0]] * 2


def test_a_step_on_responses_keeps_groups_together_and_adds_up_each_one_s_tokens(steps):
    engine, seen = Taken(Slope()), []

    def loss(logprobs, index):
        seen.append((logprobs.tolist(), index.tolist()))
        return logprobs.sum(), {"a": (1.0, 1)}

    groups = T([[2, 1], [0, 2]])
    assert Actor(engine, None, 7).fit_sequences(batch(), groups, loss) == "metrics"
    assert engine.told == ["stays", "step", "goes"]
    [(budget, rows)] = steps
    assert budget == 7 and rows.lengths.tolist() == [2 * 3, 2 * 4] and rows.prefix_groups is None
    value, observed = rows.micro_batch_loss(T([1, 0]))
    assert seen == [([[21, 15], [15, 25]], [1, 0])] and value.item() == 76 and observed == {"a": (1.0, 1)}
    assert engine.module.asked == [([[5, 6, 10, 11], [5, 15, 0, 0], [5, 15, 0, 0], [7, 12, 13, 0]],
                                    {"expert_shares": None})]


@pytest.mark.parametrize("method", ["tokens", "sequences", "auxiliary"])
def test_a_router_s_loss_is_added_as_the_rows_share_of_all_real_tokens(steps, method):
    """The loss of a router is 5 here, its weight 0.1; of nine real tokens seven are in the micro-batch. Experts 0 and 1
    are chosen by the even and the odd ids: 3 of 9 and 6 of 9."""
    engine = Taken(Slope(router=Router(0.1, num_choices=1)))
    actor = Actor(engine, None)
    if method == "tokens":
        actor.fit_tokens(batch(), lambda scores, count: (scores.logprobs.sum(), {"a": (1.0, 1)}))
    elif method == "auxiliary":
        actor.update(rollout(), lambda *_: None, AuxiliaryLoss(batch(), lambda scores, count: (
            scores.logprobs.sum(), {"a": (1.0, 1)}), 0.5))
    else:
        actor.fit_sequences(batch(), T([[0], [1], [2]]), lambda logprobs, index: (logprobs.sum(), {"a": (1.0, 1)}))
    value, observed = steps[0][-1].micro_batch_loss(T([0, 1]))
    weight = 0.5 if method == "auxiliary" else 1.0
    assert value.item() == pytest.approx(weight * (10 + 11 + 12 + 13 + 0.1 * 5 * 7 / 9))
    assert set(observed) == {"a", "aux_loss"} and [float(x) for x in observed["aux_loss"]] == [5.0, 7.0]
    assert not observed["aux_loss"][0].requires_grad
    assert engine.module.asked[-1][1]["expert_shares"].tolist() == pytest.approx([3 / 9, 6 / 9])
    steps[0][-1].micro_batch_loss(T([0, 1, 2]))
    assert engine.module.asked[-1][1]["expert_shares"] is None  # all of the minibatch counts itself


def test_a_critic_s_loss_is_given_the_values_before_the_actions(steps):
    engine, made, seen = Taken(Numbers()), rollout(), []
    made.returns = torch.arange(9.0).view(3, 3)

    def loss(values, rows, totals):
        seen.append((values.tolist(), rows.returns.tolist(), [int(n) for n in totals]))
        return values.sum(), {}

    assert Critic(engine, 21).update(made, loss) == "metrics" and engine.told == ["stays", "step", "goes"]
    [(budget, rows)] = steps
    assert budget == 21 and rows.lengths.tolist() == [4, 4, 3] and rows.prefix_groups is None
    assert rows.micro_batch_loss(T([1, 2]))[0].item() == 7 + 12 + 13 + 6
    assert seen == [([7, 12, 13, 6], [[3, 4, 5], [6, 7, 8]], [6, 3])]


def test_a_reward_model_s_pairs_cost_two_rows_of_the_longer_one_and_are_read_at_their_ends(steps):
    engine, seen = Taken(Numbers()), []

    def loss(chosen, rejected, index):
        seen.append((chosen.tolist(), rejected.tolist(), index.tolist()))
        return chosen.sum(), {}

    assert Reward(engine, 21).update(batch(), T([[0, 1], [2, 0]]), loss) == "metrics"
    assert engine.told == ["stays", "step", "goes"]
    [(budget, rows)] = steps
    assert budget == 21 and rows.lengths.tolist() == [2 * 4, 2 * 4] and rows.prefix_groups is None
    assert rows.micro_batch_loss(T([1, 0]))[0].item() == 15 + 11
    assert seen == [([15, 11], [11, 13], [1, 0])]
    Reward(Taken(Numbers(can_share=True))).update(rollout().sequences(0), T([[2, 1], [1, 0]]), loss)
    assert steps[1][1].prefix_groups.tolist() == [0, 1]  # a pair's is that of its chosen row
    Reward(Taken(Numbers())).update(batch(), T([[1, 2]]), loss)
    assert steps[2][1].lengths.tolist() == [2 * 3]
    Reward(Taken(Numbers())).update(batch(), T([[0, 1], [2, 0], [1, 2]]), loss)
    steps[3][1].micro_batch_loss(T([0, 1, 2]))
    assert seen[1] == ([11, 15, 13], [13, 11, 15], [0, 1, 2])


@pytest.mark.parametrize("max_tokens", [1, 8192])
def test_scores_of_tokens_come_micro_batch_by_micro_batch_with_the_teacher_s_rows_and_no_gradient(max_tokens):
    engine = Taken(Slope())
    found = Actor(engine, None, max_tokens).score_tokens(batch(), targets(), temperature=0.5)
    assert sorted(torch.cat([scores.divergence for scores in found]).tolist()) == [110, 111, 112, 113, 115]
    for scores in found:
        assert scores.divergence.tolist() == (scores.logprobs + 100).tolist() and not scores.logprobs.requires_grad
    assert [options for _, options in engine.module.asked] == [{"temperature": 0.5}] * len(found)
    assert len(found) == (3 if max_tokens == 1 else 1)


def test_an_average_of_the_weights_has_the_decay_that_was_asked_for():
    engine = trained(policy())
    made = Actor(engine, SimpleNamespace()).average(0.75)
    assert made.decay == 0.75 and made.engine is engine
