"""Roles: the interface of an algorithm to its models, in the algorithm's shapes.

A role is an engine and what it needs to turn rollouts into the engine's input. Trainers use roles, and see neither
models nor engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybrid_rlhf.roles import role_state
from hybrid_rlhf.roles.actor import Actor, AuxiliaryLoss
from hybrid_rlhf.roles.critic import Critic
from hybrid_rlhf.roles.policy_module import PolicyModule, TokenScores
from hybrid_rlhf.roles.reward_model import Reward
from hybrid_rlhf.roles.scoring import Reference
from hybrid_rlhf.roles.teacher import Teacher

__all__ = ["Actor", "AuxiliaryLoss", "Critic", "PolicyModule", "Reference", "Reward", "Roles", "Teacher", "TokenScores"]


@dataclass
class Roles:
    """The models of an on-policy method; None for those that it does not use."""

    actor: Actor
    ref: Reference | None = None
    critic: Critic | None = None
    teacher: Teacher | None = None

    def oom_limits(self) -> dict[str, dict[str, int]]:
        """Each engine's limits after running out of memory: part of a checkpoint, as they affect rounding."""
        return {name: dict(role.engine.oom_limits) for name, role in vars(self).items() if role}

    def state(self) -> dict:
        """The state for a checkpoint: the training state of each role, under its name, `oom_limits`, and the scale of a
        critic's values. Tensors are not copied."""
        critic, scale = self.critic, {}
        if critic and (critic.is_new or critic.is_rescaled):
            head_scale = [critic.head_mean, critic.head_std] if critic.is_rescaled else []
            scale = {"value_scale": [critic.mean, critic.std, *head_scale]}
        return role_state.states(vars(self)) | {"oom_limits": self.oom_limits()} | scale

    def load_state(self, state: Mapping) -> None:
        """Restore `state` (other keys are ignored); ValueError if it is of other weights."""
        role_state.load_states(vars(self), state)
        if self.critic and (self.critic.is_new or (self.critic.is_rescaled and "value_scale" in state)):
            self.critic.set_scale(*state["value_scale"])
