"""Our losses without a critic against TRL's own `_compute_loss`, on the same log-probabilities, with its gradients."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.algorithms.advantages import ESTIMATORS
from hybrid_rlhf.core.tensors import length_mask, masked_sum
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.roles import Roles, TokenScores
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.trainers.ppo import PPOConfig, PPOTrainer

pytest.importorskip("trl")
MASK = length_mask([5, 1, 3, 7])
LENGTH = 9  # max_new_tokens


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    new = -torch.rand(MASK.shape, generator=generator) * 3
    old, ref = (new + torch.randn(MASK.shape, generator=generator) * 0.3 for _ in range(2))
    return {"new": new, "old": old, "ref": ref, "scores": torch.tensor([1.0, -0.5, 2.0, 0.25])}


def trl_loss(trainer_class: type, given: dict, advantages: torch.Tensor, **settings: object) -> tuple:
    """(loss, gradient (B, R)) of TRL's trainer for log-probabilities that are given instead of computed by a model."""
    new = given["new"].clone().requires_grad_()
    options = {"loss_type": "grpo", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "delta": None,
               "importance_sampling_level": "token"} | settings
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    trainer = SimpleNamespace(
        **options, accelerator=accelerator, _metrics=defaultdict(lambda: defaultdict(list)), top_entropy_quantile=1.0,
        aux_loss_enabled=False, off_policy_mask_threshold=None, use_vllm=False, max_completion_length=LENGTH,
        vllm_importance_sampling_correction=False, current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True), args=SimpleNamespace(delta=options["delta"], steps_per_generation=1,
                                                                   use_bias_correction_kl=False),
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None))
    ids = torch.zeros_like(MASK, dtype=torch.long)
    loss = trainer_class._compute_loss(trainer, None, {
        "prompt_ids": ids[:, :1], "prompt_mask": MASK[:, :1].long(), "completion_ids": ids,
        "completion_mask": MASK.long(), "advantages": advantages, "old_per_token_logps": given["old"],
        "ref_per_token_logps": given["ref"], "old_logps": (given["old"] * MASK).sum(1),
        "num_items_in_batch": MASK.sum()})
    loss.backward()
    return loss.detach(), new.grad


def our_loss(given: dict, **settings: object) -> tuple:
    """(loss, gradient (B, R), advantages (B,)) of the trainer's own path: estimate, then two micro-batches."""
    fixed = {"num_ppo_epochs": 1, "num_minibatches": 1, "kl_coef": 0.05, "missing_eos_penalty": 0.0}
    config = PPOConfig(sampling=SamplingConfig(max_new_tokens=LENGTH, num_samples=4), normalise_scores=False,
                       **(fixed | settings))
    trainer = PPOTrainer(Roles(actor=None, ref=object()), None, config, seed=0)
    rollout = Rollout.from_responses(Prompts([[5]] * 4, ["x"] * 4), [[6] * int(n) for n in MASK.sum(1)], [True] * 4, 0,
                                     [])
    rollout.logprobs, rollout.ref_logprobs, rollout.scores = given["old"], given["ref"], given["scores"]
    metrics = SimpleNamespace(add=lambda *_: None)
    trainer.shape(rollout)
    trainer.estimate(rollout, metrics)
    new, total = given["new"].clone().requires_grad_(), 0.0
    for index in (torch.tensor([0, 3]), torch.tensor([1, 2])):
        rows = rollout.rows(index)
        scores = TokenScores(new[index][rows.action_mask], None, None)
        loss, _ = trainer.actor_loss(scores, rows, rollout.totals())
        loss.backward()
        total += loss.detach()
    return total, new.grad, rollout.advantages[:, 0]


def agree(ours: tuple, theirs: tuple) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-6)
    assert ours[1].abs().max() > 1e-3


def group_relative(scores: torch.Tensor, is_scaled: bool) -> torch.Tensor:
    """As in TRL's _generate_and_score_completions, with its own deviation."""
    from trl.trainer.utils import nanstd

    centred = scores - scores.mean()
    return centred / (nanstd(scores) + 1e-4) if is_scaled else centred


@pytest.mark.parametrize(("ours", "theirs", "is_scaled"), [
    ({"estimator": "grpo"}, {"loss_type": "grpo"}, True),
    ({"estimator": "grpo", "kl_coef": 0.04}, {"loss_type": "grpo", "beta": 0.04}, True),
    ({"estimator": "grpo", "aggregation": "token", "cliprange_high": 0.28},
     {"loss_type": "dapo", "epsilon_high": 0.28}, True),
    ({"estimator": "dr_grpo", "kl_coef": 0.1}, {"loss_type": "dr_grpo", "beta": 0.1}, False),
    ({"estimator": "grpo", "policy_loss": "gspo", "cliprange_low": 0.03, "cliprange_high": 0.04},
     {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04}, True),
    # TRL's epsilon_high is the bound of the ratio itself, ours how far above 1 it lies
    ({"estimator": "grpo", "policy_loss": "cispo", "cliprange_high": 0.1}, {"loss_type": "cispo", "epsilon_high": 1.1},
     True),
], ids=["grpo", "grpo_kl", "dapo", "dr_grpo_kl", "gspo", "cispo"])
def test_losses_and_gradients_are_trl_s(ours, theirs, is_scaled) -> None:
    from trl import GRPOTrainer

    given = tensors()
    advantages = group_relative(given["scores"], is_scaled)
    result = our_loss(given, **({"kl_coef": 0.0} | ours))
    torch.testing.assert_close(result[2], advantages, rtol=1e-6, atol=1e-6)
    agree(result, trl_loss(GRPOTrainer, given, advantages, **theirs))


def test_rloo_is_trl_s_with_the_ratio_of_the_whole_response_and_its_kl_in_the_reward() -> None:
    from trl import RLOOTrainer

    given = tensors()
    rewards = given["scores"] - 0.05 * masked_rows(given["old"] - given["ref"])
    advantages = rewards - (rewards.sum() - rewards) / 3
    ours = our_loss(given, estimator="rloo", policy_loss="ppo_sequence", kl_coef=0.05)
    torch.testing.assert_close(ours[2], advantages, rtol=1e-6, atol=1e-6)
    agree(ours, trl_loss(RLOOTrainer, given, advantages))


def masked_rows(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([masked_sum(v, m) for v, m in zip(values, MASK, strict=True)])


def test_every_estimator_is_in_the_table_that_these_tests_know() -> None:
    assert set(ESTIMATORS) == {"gae", "reinforce_pp", "reinforce_pp_baseline", "rloo", "grpo", "dr_grpo",
                               "process_grpo"}  # TRL has no such; tests/algorithms/test_group_estimators.py
