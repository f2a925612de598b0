"""The state of a ZeroTraining: whole, by parameter, for those who look at it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hybrid_rlhf.engine.masters import MasterAdamW


def whole(training, full_weight: Callable[[nn.Parameter], Tensor],  # noqa: ANN001 - a ZeroTraining
          full_moment: Callable[[nn.Parameter, str], Tensor]) -> dict:
    """ZeroTraining.state. full_weight, full_moment: DeepSpeed's ways to gather what several processes hold."""
    optimizer, own = training.engine.optimizer, training._optimizer
    if training.stage in (1, 2) and training.num_steps:
        # DeepSpeed links moments to parameters after the first group's first step, when the other groups have none
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    keys = ("exp_avg", "exp_avg_sq") if isinstance(own, (torch.optim.AdamW, MasterAdamW)) else ()
    if training.stage == 3:
        for parameter in training.parameters.values():  # a later engine on the same module has linked it to itself
            parameter._z3_optimizer = optimizer
    state: dict = {"num_steps": training.num_steps, "weights": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, parameter in training.parameters.items():
        if training.stage == 0:
            held = own.state.get(parameter, {})
            found = {"weights": held.get("master", parameter), **{k: held.get(k) for k in keys}}
        else:
            found = {"weights": full_weight(parameter)}
            if training.num_steps:
                found |= {k: full_moment(parameter, k) for k in keys}
        for key, value in found.items():
            if value is not None:
                state[key][name] = value.detach().cpu().clone()
    if not keys:  # other optimizers, as they keep it: 8-bit moments with their scales, by tensor in order
        state["own"] = [{k: v.detach().cpu().clone() if isinstance(v, Tensor) else v for k, v in each.items()}
                        for each in own.state.values()]
    return state
