"""Checkpoint state and learning-rate schedule of a trained role."""

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
    """The optimizer and schedule of a trained role."""
    return present(role.engine.training, f"the optimizer of the {role.engine.name}")


def training_state(role: Trained) -> dict:
    """This process's optimizer state of a trained role, for a checkpoint. Not copied: the next step changes it."""
    return role.engine.readable(training_of(role).shard())


def load_training_state(role: Trained, state: Mapping) -> None:
    """Restore a `training_state`; ValueError if `state` is of other weights."""
    with role.engine.active():
        training_of(role).load_shard(state)


def schedule_at(role: Trained, num_updates: int) -> None:
    """Set the learning-rate schedule as after `num_updates` updates, those planned so far, however many were made: a
    step that stopped early, or had too few responses, does not move the end of the decay."""
    training = training_of(role)
    training.num_omitted = num_updates - training.num_steps


def scale_schedule(role: Trained, factor: Callable[[], float]) -> None:
    """Multiply the role's learning rate by factor() from now on."""
    training = training_of(role)
    schedule = training.schedule
    training.schedule = lambda step: factor() * schedule(step)


def states(roles: Mapping[str, Trained | None]) -> dict:
    """`training_state` of the roles that have an optimizer, by name."""
    return {name: training_state(role) for name, role in roles.items() if role and role.engine.training}


def load_states(roles: Mapping[str, Trained | None], state: Mapping) -> None:
    """Restore `states`, with the limits set by running out of memory."""
    for name, role in roles.items():
        if role and role.engine.training:
            load_training_state(role, state[name])
    for name, limits in oom_limits(state).items():
        present(roles[name], f"the {name}").engine.oom_limits = dict(limits)


def oom_limits(state: Mapping) -> dict:
    """The limits in a checkpoint, which earlier releases called "learnt"."""
    return state["oom_limits"] if "oom_limits" in state else state["learnt"]
