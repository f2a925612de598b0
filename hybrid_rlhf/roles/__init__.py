"""The roles as handles: what an algorithm may ask of a model, in the algorithm's own shapes.

A role is an engine and what it needs to turn records into the engine's input. Trainers hold roles and know neither
models nor engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybrid_rlhf.roles import role_state
from hybrid_rlhf.roles.actor import Actor, AuxiliaryLoss
from hybrid_rlhf.roles.critic import Critic
from hybrid_rlhf.roles.policy_module import PolicyModule, TokenScores
from hybrid_rlhf.roles.reference_policy import Reference
from hybrid_rlhf.roles.reward_model import Reward
from hybrid_rlhf.roles.teacher import Teacher

__all__ = ["Actor", "AuxiliaryLoss", "Critic", "PolicyModule", "Reference", "Reward", "Roles", "Teacher", "TokenScores"]


@dataclass
class Roles:
    """The models of an on-policy method; the others are None where the method has no use for them."""

    actor: Actor
    ref: Reference | None = None
    critic: Critic | None = None
    teacher: Teacher | None = None

    def oom_limits(self) -> dict[str, dict[str, int]]:
        """Each engine's limits after running out of memory: part of a checkpoint, for they move the rounding."""
        return {name: dict(role.engine.oom_limits) for name, role in vars(self).items() if role}

    def state(self) -> dict:
        """For a checkpoint: what is trained of each role, under its name, `oom_limits`, and the scale that a critic's
        values have found. Tensors are no copies."""
        critic, scale = self.critic, {}
        if critic and (critic.is_new or critic.is_rescaled):
            own = [critic.head_mean, critic.head_std] if critic.is_rescaled else []
            scale = {"value_scale": [critic.mean, critic.std, *own]}
        return role_state.states(vars(self)) | {"oom_limits": self.oom_limits()} | scale

    def load_state(self, state: Mapping) -> None:
        """Go on where `state` was taken (other keys are left alone); ValueError where it is of other weights."""
        role_state.load_states(vars(self), state)
        if self.critic and (self.critic.is_new or (self.critic.is_rescaled and "value_scale" in state)):
            self.critic.set_scale(*state["value_scale"])
