"""Rollouts that no model made."""

from __future__ import annotations

import torch

from hybrid_rlhf.rollout import Prompts, Rollout


def rollout(answers=("red", "blue cat", "sun"), **columns):
    prompts = Prompts([[5]] * len(answers), ["p "] * len(answers), columns or {"prompt": ["p "] * len(answers)})
    ids = [[7] * (i + 1) for i in range(len(answers))]
    made = Rollout.from_responses(prompts, ids, [True] * len(answers), 0, list(answers))
    made.logprobs = made.ref_logprobs = torch.zeros(made.action_mask.shape)
    return made
