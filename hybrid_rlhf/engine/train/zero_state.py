"""The state of a ZeroTraining: whole, by parameter, for who looks at it; or this process's part, for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from hybrid_rlhf.engine.train.adamw_master import MasterAdamW
from hybrid_rlhf.engine.train.deepspeed_compat import (
    flat_masters,
    link_state,
    loss_scale,
    set_loss_scale,
    spread_masters,
)


def whole(training, full_weight: Callable[[nn.Parameter], Tensor],  # noqa: ANN001 - a ZeroTraining
          full_moment: Callable[[nn.Parameter, str], Tensor]) -> dict:
    """ZeroTraining.state. full_weight, full_moment: DeepSpeed's ways to gather what several processes hold."""
    optimizer, own = training.engine.optimizer, training._optimizer
    link_state(optimizer, training.stage, training.parameters.values(), is_stepped=training.num_steps > 0)
    keys = ("exp_avg", "exp_avg_sq") if isinstance(own, (torch.optim.AdamW, MasterAdamW)) else ()
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


def shard(training) -> dict:  # noqa: ANN001 - a ZeroTraining
    """ZeroTraining.shard: what the optimizer steps in this process, and its state, as they are."""
    state: dict = {"num_steps": training.num_steps, "weights": {}, "optimizer": {},
                   "skipped": [training.num_skipped, training.num_skipped_in_a_row]}
    for name, tensor in _stepped(training).items():
        own = {k: v for k, v in training._optimizer.state.get(tensor, {}).items() if k != "sum"}
        state["optimizer"][name] = own
        if "master" not in own:  # else the weight is its master, rounded
            state["weights"][name] = tensor.detach()
    own = training.scale.state() if training.scale else loss_scale(training.engine.optimizer)
    return state | {"loss_scale": own}


@torch.no_grad()
def load_shard(training, state: Mapping) -> None:  # noqa: ANN001
    """ZeroTraining.load_shard. Tensors of `state` are looked up one by one."""
    stepped = _stepped(training)
    if stepped.keys() != set(state["optimizer"]):
        strange = sorted(stepped.keys() ^ set(state["optimizer"]))
        raise ValueError(f"the checkpoint is of other weights than those that are trained here: {strange[:3]}")
    for name, tensor in stepped.items():
        own, saved = training._optimizer.state, state["optimizer"][name]
        for key in saved:
            own[tensor][key] = _taken(own[tensor].get(key), saved[key], key, tensor, training._optimizer)
        _copy(tensor, own[tensor]["master"] if "master" in saved else state["weights"][name], name)
    training.num_steps = int(state["num_steps"])
    training.num_skipped, training.num_skipped_in_a_row = map(int, state["skipped"])
    if training.scale:
        training.scale.load_state(state["loss_scale"])
    else:
        set_loss_scale(training.engine.optimizer, state["loss_scale"])
    spread_masters(training.engine.optimizer, training.stage)


def _stepped(training) -> dict[str, Tensor]:  # noqa: ANN001
    """Name -> tensor that the optimizer steps: the parameters, or this process's part of each group of them, flat."""
    if training.stage == 0:
        return dict(training.parameters)
    return {f"group {i}": part for i, part in enumerate(flat_masters(training.engine.optimizer, training.stage))}


def _taken(there: object, value: object, key: str, weight: Tensor, optimizer: torch.optim.Optimizer) -> object:
    """The value that goes on in the optimizer: the tensor that is there, filled, or the loaded one on its device."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(there, Tensor) and there.shape == value.shape and there.dtype == value.dtype:
        return there.copy_(value)
    on_host = key == "step" and not (optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"))
    return value if on_host else value.to(weight.device)


def _copy(tensor: Tensor, saved: Tensor, name: str) -> None:
    if tensor.shape != saved.shape:  # copy_ would broadcast
        raise ValueError(f"the checkpoint's {name} has the shape {tuple(saved.shape)}, not {tuple(tensor.shape)}")
    tensor.copy_(saved)
