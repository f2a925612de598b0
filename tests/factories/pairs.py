"""Preference trainers on tiny models, and log-probabilities and losses of pairs in plain torch."""

from __future__ import annotations

import torch

from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.roles import Actor, PolicyModule, Reference
from hybrid_rlhf.trainers.offline import DPOConfig, OfflineTrainer
from tests.factories.tiny import tiny_causal_lm

EOS = 1
POLICY, REFERENCE = 1, 0  # seeds; this way round KTO's estimate of the KL is positive


def model(seed: int):
    return tiny_causal_lm(seed, initializer_range=0.3)


def engine(seed: int):
    causal = model(seed)
    return HybridEngine(PolicyModule(causal), causal, eos_ids=[EOS], pad_id=0)


def trainer(config: DPOConfig, max_tokens: int = 8192, rate: float = 1e-3) -> OfflineTrainer:
    policy = engine(POLICY).prepare_training(OptimizerConfig(learning_rate=rate), lambda step: 1.0, ZeroConfig())
    reference = None if config.loss_type in ("orpo", "simpo") else Reference(engine(REFERENCE), max_tokens)
    return OfflineTrainer(Actor(policy, None, max_tokens), reference, config)


def plain(causal, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """log p of every token of the answer, from the model's own forward on this row alone."""
    logprobs = causal(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    return torch.stack([logprobs[len(prompt) + t - 1, token] for t, token in enumerate(answer)])


def plain_pair_loss(a, b, ref_a, ref_b, loss_type: str) -> torch.Tensor:
    """From the tokens' log-probabilities of a chosen (a) and a rejected (b) answer."""
    difference, mean_difference = (a - ref_a).sum() - (b - ref_b).sum(), (a - ref_a).mean() - (b - ref_b).mean()
    p, q = a.mean().exp(), b.mean().exp()
    return {"sigmoid": -torch.log(torch.sigmoid(0.1 * difference)), "hinge": (1 - 0.1 * difference).clamp(min=0),
            "ipo": (mean_difference - 5) ** 2, "simpo": -torch.log(torch.sigmoid(2 * (a.mean() - b.mean()) - 1)),
            "orpo": -a.mean() - 0.1 * torch.log(torch.sigmoid(torch.log(p / (1 - p)) - torch.log(q / (1 - q))))
            }[loss_type]
