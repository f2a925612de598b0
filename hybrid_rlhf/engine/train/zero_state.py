"""The state of a ZeroTraining: in full, by parameter, to inspect or export; or this process's part, for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.distributed import rank, world_size
from hybrid_rlhf.engine.train import repartition
from hybrid_rlhf.engine.train.adamw_master import MasterAdamW, rounding_noise, scatter
from hybrid_rlhf.engine.train.deepspeed_compat import (
    flat_masters,
    groups_of,
    link_state,
    loss_scale,
    set_loss_scale,
    size_of,
    spread_masters,
)
from hybrid_rlhf.engine.train.repartition import PROCESSES, Partition, Regrouped


def full_state(training, full_weight: Callable[[nn.Parameter], Tensor],  # noqa: ANN001 - a ZeroTraining
               full_moment: Callable[[nn.Parameter, str], Tensor]) -> dict:
    """ZeroTraining.state. full_weight, full_moment: DeepSpeed's functions that gather what several processes hold."""
    optimizer, local = training.engine.optimizer, training._optimizer
    link_state(optimizer, training.stage, training.parameters.values(), is_stepped=training.num_steps > 0)
    keys = ("exp_avg", "exp_avg_sq") if isinstance(local, (torch.optim.AdamW, MasterAdamW)) else ()
    state: dict = {"num_steps": training.num_steps, "weights": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, parameter in training.parameters.items():
        if training.stage == 0:
            moments = local.state.get(parameter, {})
            values = {"weights": moments.get("master", parameter), **{k: moments.get(k) for k in keys}}
        else:
            values = {"weights": full_weight(parameter)}
            if training.num_steps:
                values |= {k: full_moment(parameter, k) for k in keys}
        for key, value in values.items():
            if value is not None:
                state[key][name] = value.detach().cpu().clone()
    if not keys:  # other optimizers, as they keep it: 8-bit moments with their scales, by tensor in order
        state["own"] = [{k: v.detach().cpu().clone() if isinstance(v, Tensor) else v for k, v in each.items()}
                        for each in local.state.values()]
    return state


def shard(training) -> dict:  # noqa: ANN001 - a ZeroTraining
    """ZeroTraining.shard: what the optimizer steps in this process, and its state, without copies."""
    state: dict = {"num_steps": training.num_steps, "weights": {}, "optimizer": {},
                   "partition": partition(training).state(),
                   "skipped": [training.num_skipped, training.num_skipped_in_a_row]}
    for name, tensor in _stepped(training).items():
        values = {k: v for k, v in training._optimizer.state.get(tensor, {}).items() if k != "sum"}
        state["optimizer"][name] = values
        if "master" not in values:  # else the weight is its master, rounded
            state["weights"][name] = tensor.detach()
    scale = training.scale.state() if training.scale else loss_scale(training.engine.optimizer)
    return state | {"loss_scale": scale}


@torch.no_grad()
def load_shard(training, state: Mapping) -> None:  # noqa: ANN001
    """ZeroTraining.load_shard. Tensors of `state` are looked up one by one."""
    stepped = _stepped(training)
    first, entries = state, _as_saved(state)
    if PROCESSES in state:
        first, entries = state[PROCESSES][0], _cut_anew(training, state[PROCESSES], stepped)
    else:
        _check_names(stepped.keys(), state["optimizer"].keys())
    for name, saved, weight in entries:
        tensor, values = stepped[name], training._optimizer.state
        if not int(first["num_steps"]):  # of before the first step: moments that were made since then go
            for key in values.get(tensor, {}).keys() - saved.keys() - {"sum"}:
                del values[tensor][key]
        for key in saved:
            values[tensor][key] = _taken(values[tensor].get(key), saved[key], key, tensor, training._optimizer)
        _copy(tensor, values[tensor]["master"] if "master" in saved else weight, name)
    training.num_steps = int(first["num_steps"])
    training.num_skipped, training.num_skipped_in_a_row = map(int, first["skipped"])
    if training.scale:
        training.scale.load_state(first["loss_scale"])
    else:
        set_loss_scale(training.engine.optimizer, first["loss_scale"])
    spread_masters(training.engine.optimizer, training.stage)


def scatter_masters(training) -> None:  # noqa: ANN001
    """Move the fp32 masters of 16-bit weights at the start, each by its parameter and place; see `scatter`."""
    sizes = {name: size_of(p) for name, p in training.parameters.items()}
    places = {name: 7919 * i for i, name in enumerate(sizes)}  # parameters of one shape begin at unlike numbers
    stepped, noise = _stepped(training), {}
    if training.stage == 0:
        parts = [(state["master"], p.dtype, places[name]) for name, p in stepped.items()
                 if "master" in (state := training._optimizer.state.get(p, {}))]
    else:
        dtype = next(iter(training.parameters.values())).dtype
        lengths = {name: part.numel() for name, part in stepped.items()}
        parts = [(stepped[s.part].data[s.offset : s.offset + s.end - s.begin], dtype, places[s.name] + s.begin)
                 for s in repartition.spans(partition(training), sizes, world_size(), lengths)
                 if s.rank == rank()] if dtype != torch.float32 else []
    for master, dtype, place in parts:
        key = dtype, master.device
        noise[key] = noise[key] if key in noise else rounding_noise(*key)
        scatter(master, noise[key], place)


def partition(training) -> Partition:  # noqa: ANN001
    """How this process and the others share the trained weights."""
    names = {id(p): name for name, p in training.parameters.items()}
    groups = groups_of(training.engine.optimizer, training.stage) if training.stage else []
    return Partition(training.stage, [[names[id(p)] for p in group] for group in groups])


def regrouped(training, saved: list[Mapping], length_of: Callable[[Mapping, str], int],  # noqa: ANN001
              stepped: Mapping[str, Tensor]) -> Regrouped:
    """The parts in `saved`, the states of all processes that wrote them, for this process's tensors. length_of: (state,
    part) -> its numbers. ValueError for other weights, and for numbers that belong to no weight by themselves."""
    before, now = Partition.read(saved[0]["partition"]), partition(training)
    sizes = {name: size_of(p) for name, p in training.parameters.items()}
    lengths = [{f"group {i}": length_of(saved[0], f"group {i}") for i in range(len(before.groups))},
               {name: part.numel() for name, part in stepped.items()}]
    here = 0 if now.stage == 0 else rank()
    return Regrouped(repartition.spans(before, sizes, len(saved), lengths[0]),
                     [s for s in repartition.spans(now, sizes, world_size(), lengths[1]) if s.rank == here])


def _as_saved(state: Mapping) -> Iterator[tuple[str, Mapping, Tensor | None]]:
    """(name, the optimizer's state, the weight where it has no master) of what this process saved itself."""
    for name in state["optimizer"]:
        saved = state["optimizer"][name]
        yield name, saved, None if "master" in saved else state["weights"][name]


def _cut_anew(training, saved: list[Mapping],  # noqa: ANN001
              stepped: dict[str, Tensor]) -> Iterator[tuple[str, Mapping, Tensor | None]]:
    """`_as_saved` for what another number of processes saved."""
    if Partition.read(saved[0]["partition"]).stage == training.stage == 0:  # each had all of it
        _check_names(stepped.keys(), saved[0]["optimizer"].keys())
        yield from _as_saved(saved[0])
        return
    if saved[0]["partition"]["stage"] == 0:
        _check_names(training.parameters.keys(), saved[0]["optimizer"].keys())
    parts = regrouped(training, saved, lambda state, part: _weight(state, part).numel(), stepped)
    for name, tensor in stepped.items():
        def joined(find: Callable[[int, str], Tensor | None], name: str = name, like: Tensor = tensor) -> Tensor:
            return parts.tensor(name, like.numel(), find).view(like.shape)

        weight = joined(lambda r, part: _weight(saved[r], part))
        states = [saved[r]["optimizer"][part] for r, part in parts.sources(name)]
        values = {key: joined(lambda r, part, key=key: _moment(saved[r], part, key))  # type: ignore[misc]
                  for key in dict.fromkeys(k for each in states for k in each if k not in ("master", "step"))}
        steps = [float(each["step"]) for each in states if "step" in each]
        is_ours = isinstance(training._optimizer, MasterAdamW)
        values |= {"step": int(max(steps)) if is_ours else torch.tensor(max(steps))} if steps else {}
        if is_ours and training._optimizer.has_master(tensor):
            values["master"] = weight
        yield name, values, weight


def _weight(saved: Mapping, part: str) -> Tensor:
    values = saved["optimizer"][part]
    return values["master"] if "master" in values else saved["weights"][part]


def _moment(saved: Mapping, part: str, key: str) -> Tensor | None:
    """The moment, or None. ValueError unless it is one number per weight: 8-bit moments have scales for blocks."""
    value = saved["optimizer"][part].get(key)
    if value is not None and not (isinstance(value, Tensor) and value.dtype == torch.float32
                                  and value.numel() == _weight(saved, part).numel()):
        raise ValueError(f"the optimizer's {key} cannot be cut for another number of processes")
    return value


def _check_names(ours: Collection[str], theirs: Collection[str]) -> None:
    strange = sorted(set(ours) ^ set(theirs))
    if strange:
        raise ValueError(f"the checkpoint is of other weights than those that are trained here: {strange[:3]}")


def _stepped(training) -> dict[str, Tensor]:  # noqa: ANN001
    """Name -> tensor that the optimizer steps: the parameters, or this process's part of each group of them, flat."""
    if training.stage == 0:
        return dict(training.parameters)
    return {f"group {i}": part for i, part in enumerate(flat_masters(training.engine.optimizer, training.stage))}


def _taken(there: object, value: object, key: str, weight: Tensor, optimizer: torch.optim.Optimizer) -> object:
    """The value for this optimizer: the tensor that it has already, filled, or the loaded one on its device."""
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
