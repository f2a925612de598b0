"""What a checkpoint keeps of a role that is trained, and where its learning-rate schedule stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from hybrid_rlhf.core.errors import present
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.engine.train.zero import ZeroTraining


class Trained(Protocol):
    """An actor, a critic or a reward model whose engine has an optimizer."""

    engine: HybridEngine


def training_of(role: Trained) -> ZeroTraining:
    """The optimizer's side of a trained role."""
    return present(role.engine.training, f"the optimizer of the {role.engine.name}")


def training_state(role: Trained) -> dict:
    """What this process's optimizer holds of a trained role, for a checkpoint. No copies: the next step changes it."""
    return role.engine.readable(training_of(role).shard())


def load_training_state(role: Trained, state: Mapping) -> None:
    """Go on where `training_state` was taken; ValueError where `state` is of other weights."""
    with role.engine.active():
        training_of(role).load_shard(state)


def schedule_at(role: Trained, num_updates: int) -> None:
    """The learning-rate schedule goes on as after `num_updates` updates, those planned so far, however many were made:
    a step that stopped early, or had too few responses, leaves the end of the decay where it was."""
    training = training_of(role)
    training.num_omitted = num_updates - training.num_steps


def scale_schedule(role: Trained, factor: Callable[[], float]) -> None:
    """From now on the role's learning rate is factor() times what its schedule says."""
    training = training_of(role)
    schedule = training.schedule
    training.schedule = lambda step: factor() * schedule(step)


def states(roles: Mapping[str, Trained | None]) -> dict:
    """`training_state` of those of the roles that are there and have an optimizer, by their names."""
    return {name: training_state(role) for name, role in roles.items() if role and role.engine.training}


def load_states(roles: Mapping[str, Trained | None], state: Mapping) -> None:
    """Go on where `states` was taken, with the limits that running out of memory set."""
    for name, role in roles.items():
        if role and role.engine.training:
            load_training_state(role, state[name])
    for name, limits in oom_limits(state).items():
        present(roles[name], f"the {name}").engine.oom_limits = dict(limits)


def oom_limits(state: Mapping) -> dict:
    """The limits in a checkpoint, which earlier releases called "learnt"."""
    return state["oom_limits"] if "oom_limits" in state else state["learnt"]
