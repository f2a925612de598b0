"""Advantage estimators: one function and one row of ESTIMATORS per method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_rlhf.core.tensors import masked_sum

Reduce = Callable[[Tensor], Tensor]  # the sum of a tensor over all ranks


def identity(total: Tensor) -> Tensor:
    """The sum over ranks of a single rank."""
    return total


class Estimator(NamedTuple):
    """An advantage estimator. Its row alone determines whether a critic is built and whether groups are required.

    fn(rewards (B, R), action_mask (B, R), *, values (B, R) or None, gamma, lam, reduce, group_size, step_ends (B, R)
    bool or None) -> (advantages (B, R), returns (B, R)), both zero outside the actions. Groups are contiguous rows;
    a row without an action, such as a response without a score, does not count in its group's mean and spread.
    step_ends: the tokens with rewards of steps, such as those of a process reward model.
    kl_in, aggregation: where the method's paper puts the KL penalty (reward or loss) and how it averages the loss
    (a row of policy.AGGREGATIONS): the defaults of ppo.kl_in and ppo.aggregation. With kl_in loss the rewards are the
    scores alone, at the last action. discounts: whether it uses gamma. sums: whether the rewards of a response are
    summed first, so that all of its tokens have the same advantage. by_source: whether the scores of each reward source
    are normalised on their own, by `decoupled`, before they are summed.
    """

    fn: Callable[..., tuple[Tensor, Tensor]]
    needs_values: bool
    needs_group: bool
    kl_in: str = "reward"
    aggregation: str = "token"
    discounts: bool = False
    sums: bool = True
    by_source: bool = False


@torch.no_grad()
def gae(rewards: Tensor, action_mask: Tensor, *, values: Tensor, gamma: float = 1.0, lam: float = 0.95,
        reduce: Reduce = identity, group_size: int = 1,
        step_ends: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438): (advantages, returns), each (B, R) fp32.

    delta_t = r_t + gamma * V_{t+1} - V_t with V = 0 after the last action; A_t = delta_t + gamma * lam * A_{t+1};
    returns = A + V. rewards, values (B, R); action_mask (B, R) bool. t counts actions: other columns are
    skipped and zero in the result, and their values, even NaN, are never used. reduce, group_size and step_ends are
    ignored.
    """
    del reduce, group_size, step_ends
    rewards, values = rewards.float().masked_fill(~action_mask, 0), values.float().masked_fill(~action_mask, 0)
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        is_action = action_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(is_action, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(is_action, values[:, t], next_value)
        advantages[:, t] = torch.where(is_action, next_advantage, 0.0)
    return advantages, advantages + values


@torch.no_grad()
def reinforce_pp(rewards: Tensor, action_mask: Tensor, *, values: Tensor | None = None, gamma: float = 1.0,
                 lam: float = 0.95, reduce: Reduce = identity, group_size: int = 1,
                 step_ends: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv 2501.03262): the discounted sum of future rewards, whitened over all ranks' actions.

    (advantages, returns), each (B, R) fp32; returns_t = r_t + gamma * returns_{t+1} over actions. No values, no group.
    """
    returns = gae(rewards, action_mask, values=torch.zeros_like(rewards), gamma=gamma, lam=1.0)[1]
    return whiten(returns, action_mask, reduce), returns


@torch.no_grad()
def reinforce_pp_baseline(rewards: Tensor, action_mask: Tensor, *, values: Tensor | None = None, gamma: float = 1.0,
                          lam: float = 0.95, reduce: Reduce = identity, group_size: int = 1,
                          step_ends: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with the group's mean as baseline: R_i - mean R, whitened over the actions of all ranks."""
    totals, is_scored = _group_totals(rewards, action_mask, group_size)
    advantages, returns = _at_actions(totals - _mean(totals, is_scored), totals, action_mask)
    return whiten(advantages, action_mask, reduce), returns


@torch.no_grad()
def rloo(rewards: Tensor, action_mask: Tensor, *, values: Tensor | None = None, gamma: float = 1.0, lam: float = 0.95,
         reduce: Reduce = identity, group_size: int = 1,
         step_ends: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """REINFORCE leave-one-out (arXiv 2402.14740): R_i less the mean of the others' R, at every action of response i.

    R_i is the sum of row i's rewards, the KL penalty included if it is there; without others its advantage is 0. Raises
    ValueError for groups of one.
    """
    totals, is_scored = _group_totals(rewards, action_mask, group_size)
    num_others = is_scored.sum(1, keepdim=True) - 1
    others = torch.where(num_others > 0, (totals.sum(1, keepdim=True) - totals) / num_others.clamp(min=1), totals)
    return _at_actions(totals - others, totals, action_mask)


@torch.no_grad()
def grpo(rewards: Tensor, action_mask: Tensor, *, values: Tensor | None = None, gamma: float = 1.0, lam: float = 0.95,
         reduce: Reduce = identity, group_size: int = 1,
         step_ends: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Group-relative advantages (arXiv 2402.03300): (R_i - mean R) / (std R + 1e-4), std over n - 1 as in TRL."""
    totals, is_scored = _group_totals(rewards, action_mask, group_size)
    return _at_actions(_standardised(totals, is_scored), totals, action_mask)


@torch.no_grad()
def batch_grpo(rewards: Tensor, action_mask: Tensor, *, values: Tensor | None = None, gamma: float = 1.0,
               lam: float = 0.95, reduce: Reduce = identity, group_size: int = 1,
               step_ends: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """GRPO with the spread of the batch (arXiv 2508.08221): R_i - mean R of its group, over std R + 1e-4 of all
    responses of all ranks (n - 1). Every rank must call it."""
    totals, is_scored = _group_totals(rewards, action_mask, group_size)
    centred = (totals - _mean(totals, is_scored)).masked_fill(~is_scored, 0)
    return _at_actions(centred / (_of_batch(totals, is_scored, reduce)[1] + 1e-4), totals, action_mask)


@torch.no_grad()
def gdpo(rewards: Tensor, action_mask: Tensor, *, values: Tensor | None = None, gamma: float = 1.0, lam: float = 0.95,
         reduce: Reduce = identity, group_size: int = 1,
         step_ends: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Group reward-decoupled normalisation (arXiv 2601.05242), of scores that `decoupled` has summed: R_i - mean R,
    over std R + 1e-4, both of all responses of all ranks (n - 1). Every rank must call it."""
    totals, is_scored = _group_totals(rewards, action_mask, group_size)
    mean, spread = _of_batch(totals, is_scored, reduce)
    return _at_actions(((totals - mean) / (spread + 1e-4)).masked_fill(~is_scored, 0), totals, action_mask)


@torch.no_grad()
def decoupled(sources: Sequence[tuple[Tensor, float]], group_size: int) -> Tensor:
    """Scores (B,) of GDPO: sum_k weight_k * (s_k - mean s_k) / (std s_k + 1e-4), mean and spread (n - 1) those of the
    group and of source k. sources: (scores (B,), weight), NaN where a source skipped a response, which adds 0; a
    response that all of them skipped is NaN. Raises ValueError for rows that do not divide into groups."""
    total = torch.zeros(len(sources[0][0]), dtype=torch.double)
    is_scored = torch.zeros(len(total), dtype=torch.bool)
    for scores, weight in sources:
        _check_groups(scores, group_size)
        known = ~scores.isnan()
        grouped = scores.double().masked_fill(~known, 0).view(-1, group_size)
        total += weight * _standardised(grouped, known.view(-1, group_size)).flatten()
        is_scored |= known
    return total.masked_fill(~is_scored, torch.nan).float()


@torch.no_grad()
def dr_grpo(rewards: Tensor, action_mask: Tensor, *, values: Tensor | None = None, gamma: float = 1.0,
            lam: float = 0.95, reduce: Reduce = identity, group_size: int = 1,
            step_ends: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """GRPO done right (arXiv 2503.20783): R_i - mean R, not divided by the spread of the group."""
    totals, is_scored = _group_totals(rewards, action_mask, group_size)
    return _at_actions(totals - _mean(totals, is_scored), totals, action_mask)


@torch.no_grad()
def process_grpo(rewards: Tensor, action_mask: Tensor, *, values: Tensor | None = None, gamma: float = 1.0,
                 lam: float = 0.95, reduce: Reduce = identity, group_size: int = 1,
                 step_ends: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """GRPO by process supervision (arXiv 2402.03300, section 4.1.3): the rewards of steps less the mean of all steps of
    the group, over their spread (n - 1, + 1e-4); the advantage of a token is the sum over its own step and the later
    ones.

    A step ends at each true `step_ends` (B, R) and at the last action; its reward is the sum of its actions'. With
    step_ends None a response is one step, and this is `grpo`. Raises ValueError for groups of one.
    """
    _check_groups(rewards, group_size)
    rewards = rewards.double().masked_fill(~action_mask, 0)
    ends = action_mask & (_to_come(action_mask.long()) == 1)  # the last action
    ends = ends if step_ends is None else ends | (action_mask & step_ends)
    step = ends.cumsum(1) - ends.long()  # (B, R): the number of the step that a column is in
    of_steps = torch.zeros_like(rewards).scatter_add(1, step, rewards).gather(1, step)
    of_steps, ends = (x.view(-1, group_size * rewards.shape[1]) for x in (of_steps, ends))  # a group each
    count, total = ends.sum(1, keepdim=True), of_steps.masked_fill(~ends, 0).sum(1, keepdim=True)
    centred = (of_steps - total / count.clamp(min=1)).masked_fill(~ends, 0)
    spread = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    advantages = _to_come((centred / (spread + 1e-4)).view_as(rewards))
    return advantages.float() * action_mask, _to_come(rewards).float() * action_mask


def _to_come(values: Tensor) -> Tensor:
    """(B, R): the sum of each column and the later ones."""
    return values.flip(1).cumsum(1).flip(1)


def _check_groups(rewards: Tensor, group_size: int) -> None:
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} responses in groups of {group_size}: whole groups of two or more are needed")


def _group_totals(rewards: Tensor, action_mask: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """(groups, group_size): the total reward of each response, and bool, whether it has an action. Raises ValueError
    for rows that do not divide into groups.

    In fp64: in fp32 the mean of equal scores is not always that score. For eight times 73.3 it is 7e-6 off, and GRPO,
    which divides by a spread as small, turned that into an advantage of 0.07.
    """
    _check_groups(rewards, group_size)
    totals = rewards.double().masked_fill(~action_mask, 0).sum(1)
    return totals.view(-1, group_size), action_mask.any(1).view(-1, group_size)


def _standardised(totals: Tensor, is_scored: Tensor) -> Tensor:
    """(groups, group_size): less the mean of the group, over its spread (n - 1) + 1e-4; 0 without a score."""
    centred = (totals - _mean(totals, is_scored)).masked_fill(~is_scored, 0)
    spread = (centred.square().sum(1, keepdim=True) / (is_scored.sum(1, keepdim=True) - 1).clamp(min=1)).sqrt()
    spread = torch.where(is_scored.all(1, keepdim=True), totals.std(1, keepdim=True), spread)
    return centred / (spread + 1e-4)


def _of_batch(totals: Tensor, is_scored: Tensor, reduce: Reduce) -> tuple[Tensor, Tensor]:
    """Mean and spread (n - 1) of all scored responses of all ranks, scalars."""
    total, count = reduce(torch.stack([totals.sum(), is_scored.sum().double()])).unbind()  # the others' totals are 0
    mean = total / count.clamp(min=1)
    squares = reduce((totals - mean).masked_fill(~is_scored, 0).square().sum())
    return mean, (squares / (count - 1).clamp(min=1)).sqrt()


def _mean(totals: Tensor, is_scored: Tensor) -> Tensor:
    """(groups, 1): over those that are scored; the others' totals are 0."""
    return totals.sum(1, keepdim=True) / is_scored.sum(1, keepdim=True).clamp(min=1)


def _at_actions(advantages: Tensor, totals: Tensor, action_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Values of responses (groups, group_size) as (B, R), the same at every action."""
    return advantages.float().reshape(-1, 1) * action_mask, totals.float().reshape(-1, 1) * action_mask


ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(gae, needs_values=True, needs_group=False, discounts=True, sums=False),
    "reinforce_pp": Estimator(reinforce_pp, needs_values=False, needs_group=False, discounts=True, sums=False),
    "reinforce_pp_baseline": Estimator(reinforce_pp_baseline, needs_values=False, needs_group=True, kl_in="loss"),
    "rloo": Estimator(rloo, needs_values=False, needs_group=True),
    "grpo": Estimator(grpo, needs_values=False, needs_group=True, kl_in="loss", aggregation="sequence"),
    "batch_grpo": Estimator(batch_grpo, needs_values=False, needs_group=True, kl_in="loss", aggregation="sequence"),
    "gdpo": Estimator(gdpo, needs_values=False, needs_group=True, kl_in="loss", aggregation="sequence", by_source=True),
    "process_grpo": Estimator(process_grpo, needs_values=False, needs_group=True, kl_in="loss", aggregation="sequence",
                              sums=False),
    "dr_grpo": Estimator(dr_grpo, needs_values=False, needs_group=True, kl_in="loss", aggregation="constant"),
}


@torch.no_grad()
def whiten(values: Tensor, mask: Tensor, reduce: Reduce = identity) -> Tensor:
    """(values - mean) / sqrt(var + 1e-8) over the true positions of `mask` on all ranks; zero elsewhere, fp32.

    The mean is removed. var is the population variance (divided by n, not n - 1): the actions are the population,
    not a sample, and a single action gives 0 and not NaN. values, mask: the same shape. Every rank
    must call it, with or without actions.
    """
    total, count = reduce(torch.stack([masked_sum(values.double(), mask), mask.sum().double()])).unbind()
    count = count.clamp(min=1)
    centred = values.double() - total / count
    # Two passes: E[x^2] - E[x]^2 cancels when the mean is large.
    variance = reduce(masked_sum(centred.square(), mask)) / count
    return (centred / (variance + 1e-8).sqrt()).masked_fill(~mask, 0).float()


@torch.no_grad()
def whiten_responses(advantages: Tensor, action_mask: Tensor, reduce: Reduce = identity) -> Tensor:
    """Advantages (B, R), the same at every action of a response, less their mean over the responses of all ranks, over
    their spread (n - 1) + 1e-4, as TRL's RLOO normalises them; fp32. Responses without an action do not count."""
    totals, is_scored = advantages.double().masked_fill(~action_mask, 0).sum(1), action_mask.any(1)
    totals = totals / action_mask.sum(1).clamp(min=1)
    mean, spread = _of_batch(totals, is_scored, reduce)
    return ((totals - mean) / (spread + 1e-4)).float()[:, None] * action_mask


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, reduce: Reduce = identity) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over the true positions of `mask` on all ranks.

    A scalar: 1 is perfect, 0 no better than a constant; also 0 if the returns do not vary, as there is nothing to
    explain. Every rank must call it, with or without actions.
    """
    both = torch.stack([returns.double()[mask], (returns.double() - values.double())[mask]])  # (2, n)
    count = reduce(mask.sum().double()).clamp(min=1)
    mean = reduce(both.sum(1)) / count
    actual, error = (reduce((both - mean[:, None]).square().sum(1)) / count).unbind()
    return torch.where(actual > 0, 1 - error / actual, 0.0).float()
