"""Tiny engines, roles and trainers, a reward source from a function, and prompts: what tests of trainers share."""

from __future__ import annotations

import torch

from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, SamplingConfig, ZeroConfig
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.rewards.model import ModelSource
from hybrid_rlhf.roles import Actor, Critic, PolicyModule, Reference, Reward, Roles
from hybrid_rlhf.rollout import Prompts
from hybrid_rlhf.trainers.ppo import PPOConfig, PPOTrainer
from tests.factories.tiny import tiny_causal_lm, tiny_scalar_model, tiny_tokenizer

PROMPTS = Prompts([[5, 6, 7], [8, 9], [10, 11, 12, 13], [14, 15]] * 3, ["x"] * 12, {"n": list(range(12))})


def trained(engine, rate=1e-3):
    return engine.prepare_training(OptimizerConfig(learning_rate=rate), lambda step: 1.0, ZeroConfig())


def policy(seed=0, **changes):
    model = tiny_causal_lm(seed, **changes)
    return HybridEngine(PolicyModule(model), model, eos_ids=[3], pad_id=0)


def scalar(seed=1, **changes):
    return HybridEngine(ScalarModel(tiny_scalar_model(seed, **changes)), pad_id=0)


class Source:
    """A reward source from a function of the rollout."""

    name = "test"

    def __init__(self, fn):
        self.score = fn


def count_of(token):
    return Source(lambda rollout: ((rollout.response_ids == token) & rollout.action_mask).sum(1).float())


def ppo(config, source=None, max_tokens=8192, rate=1e-3):
    roles = Roles(Actor(trained(policy(), rate), tiny_tokenizer(), max_tokens),
                  Reference(policy(), max_tokens), Critic(trained(scalar(2), rate), max_tokens))
    return PPOTrainer(roles, source or ModelSource(Reward(scalar(1), max_tokens)), config, seed=0)


def noted_losses(trainer: PPOTrainer) -> list[float]:
    """The actor's loss of each micro-batch, from now on."""
    losses, actor_loss = [], trainer.actor_loss

    def noted(*given, **options):
        loss, observed = actor_loss(*given, **options)
        losses.append(loss.item())
        return loss, observed

    trainer.actor_loss = noted
    return losses


def settings(**changes):
    defaults = dict(sampling=SamplingConfig(max_new_tokens=10), normalise_scores=False, num_ppo_epochs=1,
                    num_minibatches=1, kl_coef=0.05, missing_eos_penalty=0.0)
    return PPOConfig(**(defaults | changes))


CLOCKED = ("time/", "memory/", "engine/tokens_per_second")  # what two equal runs need not agree on


def weights(engine):
    return [p.detach().clone() for p in engine.module.parameters()]


SFT_ROWS = [{"input_ids": [5, 6, 7, 8, 3], "loss_mask": [0, 0, 1, 1, 1]},
            {"input_ids": [9, 10, 11, 12, 13, 14, 15, 3], "loss_mask": [0, 1, 1, 1, 1, 1, 1, 1]},
            {"input_ids": [16, 17, 3], "loss_mask": [0, 0, 1]}]


GROUPED = SamplingConfig(max_new_tokens=10, num_samples=4)


def online(config, source, max_tokens=8192, rate=1e-2, extra_prompts=None):
    roles = Roles(Actor(trained(policy(), rate), tiny_tokenizer(), max_tokens), Reference(policy(), max_tokens))
    return PPOTrainer(roles, source, config, seed=0, extra_prompts=extra_prompts)


def varied_if(taught) -> Source:
    """Scores that differ within a group only where taught(prompt's text)."""
    return Source(lambda r: torch.tensor([i % 4 * float(taught(text)) for i, text in enumerate(r.prompts.texts)]))


def prompts_of(*texts):
    return Prompts([[5, 6 + i] for i in range(len(texts))], list(texts), {"n": list(range(len(texts)))})
