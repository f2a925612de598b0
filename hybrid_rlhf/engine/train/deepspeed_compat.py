"""The only use of DeepSpeed's private parts: its optimizers' state at ZeRO 1 to 3, its parameters at ZeRO 3, its
collectives, and a build at import.

DeepSpeed has no calls for most of this: to discard or repeat a pass that failed half way, to take a checkpoint that is
bit for bit its own state on any number of processes, to run a module without its hooks. Every stage of it is tested.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial, partialmethod
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.compat import Dependency
from hybrid_rlhf.core.distributed import new_group, sums_through, world_size
from hybrid_rlhf.core.torch_compat import hooks_kept
from hybrid_rlhf.models.weight_parts import is_cut, part_of, take_part

DEEPSPEED = Dependency("deepspeed")

_OF_BOTH = ("_backward_active_depth", "_remaining_grad_acc_hooks", "averaged_gradients", "clear_backward_seen_flag",
            "exit_backward", "ipg_buckets", "loss_scaler", "overflow", "override_loss_scale", "params_already_reduced")
_OF_SPLIT_STATE = (*_OF_BOTH, "_hp_optimizer_states_linked", "_lazy_init_hp_params_optimizer_state",
                   "_release_ipg_buffers", "_release_preflattened_grad_buffers", "all_grad_tensors",
                   "bit16_groups_flat", "extra_large_param_to_reduce", "micro_step_id", "round_robin_bit16_groups",
                   "single_partition_of_fp32_groups", "update_lp_params")
_OF_SPLIT_WEIGHTS = (*_OF_BOTH, "_partition_all_parameters", "_reassign_or_swap_out_partitioned_parameters",
                     "fp16_groups", "fp32_partitioned_groups_flat", "parameter_offload", "persistent_parameters")
_OF_OPTIMIZER = {1: _OF_SPLIT_STATE, 2: _OF_SPLIT_STATE, 3: _OF_SPLIT_WEIGHTS}  # by ZeRO stage
_OF_PARAMETER = ("ds_id", "ds_numel", "ds_shape", "ds_tensor")  # at ZeRO 3
# ZeRO 3's position in a pass, and its order of layers
_OF_COORDINATOR = tuple(f"_PartitionedParameterCoordinator__{name}" for name in (
    "active_backward_submodules", "most_recent_step_id_param_fetched_for", "n_available_params", "param_order",
    "param_queue", "step_id", "step_id_module_fetched_for", "submodule_order", "trace_mode"))
_COLLECTIVES = ("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_reduce", "all_reduce_coalesced",
                "all_to_all_single", "barrier", "broadcast", "reduce", "reduce_scatter", "reduce_scatter_tensor")
_IN_PLACE = ("all_reduce", "barrier", "broadcast", "reduce")  # without effect in a world of one
_GATHERED = ("output_tensor", "output_tensors", "tensor_list")  # what a gather writes to
_offloads: weakref.WeakSet = weakref.WeakSet()  # of all engines at ZeRO 3
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def check_parts(optimizer, stage: int, parameters: Iterable[nn.Parameter]) -> None:  # noqa: ANN001
    """UserError unless a new engine's optimizer, and its parameters at ZeRO 3, have the private parts used below."""
    if stage:
        DEEPSPEED.require(optimizer, *_OF_OPTIMIZER[stage])
    for parameter in parameters if stage == 3 else ():
        DEEPSPEED.require(parameter, *_OF_PARAMETER)


def skip_inference_build() -> None:
    """Skip the build of DeepSpeed's C++ for tensor-parallel inference, which is not used here, but compiled, or looked
    up by compiler, at every start."""
    module = DEEPSPEED.module("deepspeed.comm.torch")
    DEEPSPEED.require(module, "build_shm_op")
    module.build_shm_op = lambda: None


def share_timeout() -> None:
    """Give the process group of DeepSpeed's ZeRO our timeout: its own would have NCCL's ten minutes. Every process
    calls it after importing DeepSpeed and before its first engine."""
    groups = DEEPSPEED.module("deepspeed.utils.groups")
    DEEPSPEED.require(groups, "_WORLD_GROUP")
    if groups._WORLD_GROUP is None:
        groups._WORLD_GROUP = new_group(range(world_size()))


def skip_lone_collectives() -> None:
    """Skip DeepSpeed's sums and broadcasts in a world of one: for the first of them, the broadcast of the weights at
    the start, NCCL would take 0.55 GiB of the card (H100, docs/results/gpu.md)."""
    backend = DEEPSPEED.module("deepspeed.comm.torch").TorchBackend
    DEEPSPEED.require(backend, *_IN_PLACE)
    for name in _IN_PLACE:
        make = vars(backend)[name]
        if not isinstance(make, partialmethod):
            setattr(backend, name, partialmethod(_unless_alone, make))


def _unless_alone(backend: Any, make: Callable, *inputs: Any, **named: Any) -> Any:
    return _Done() if world_size() == 1 else make(backend, *inputs, **named)


@contextmanager
def taking_parts(module: nn.Module) -> Iterator[None]:
    """Within the block ZeRO 3 takes over the parts of the weights of `module` that each process has read, without
    sending the first process's full weight to all. All parts are taken."""
    if not is_cut(module):
        yield
        return
    zero = DEEPSPEED.module("deepspeed.runtime.zero.partition_parameters")
    owner, name = zero.Init, "_zero_init_param"
    before = DEEPSPEED.part(owner, name)
    DEEPSPEED.require(owner, "_convert_to_deepspeed_param")
    for parameter in module.parameters():
        if part_of(parameter) is not None:  # else rank 0's full weight, here a placeholder, is sent to all
            parameter.ds_status = zero.ZeroParamStatus.NOT_AVAILABLE

    def take(self, parameter: nn.Parameter) -> None:  # noqa: ANN001
        if part_of(parameter) is None:
            before(self, parameter)
            return
        self._convert_to_deepspeed_param(parameter)
        parameter.partition()  # of the placeholder: allocates the part, wherever that is to be
        parameter.ds_tensor.data.copy_(take_part(parameter))

    setattr(owner, name, take)
    try:
        yield
    finally:
        setattr(owner, name, before)
    if is_cut(module):
        raise RuntimeError("DeepSpeed has left weights in parts that were to be taken over: please report it")


def is_partitioned(module: nn.Module) -> bool:
    """Whether ZeRO 3 partitions the weights of `module`: all processes must then run its forwards together."""
    return any(is_part(p) for p in module.parameters())


def is_part(parameter: Tensor) -> bool:
    """Whether ZeRO 3 partitions this parameter; it may be gathered at the moment."""
    return hasattr(parameter, "ds_id")


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """Shape of the full parameter: one that ZeRO 3 has partitioned looks empty."""
    return getattr(parameter, "ds_shape", parameter.shape)


def size_of(parameter: nn.Parameter) -> int:
    """Number of elements of the full parameter."""
    return getattr(parameter, "ds_numel", parameter.numel())


def without_hooks(module: nn.Module) -> AbstractContextManager:
    """Within the block DeepSpeed's hooks are off, which would partition a layer's weights again after its forward."""
    return hooks_kept(module, lambda hook: not getattr(hook, "__module__", "").startswith("deepspeed"))


def flat_masters(optimizer, stage: int) -> list[Tensor]:  # noqa: ANN001
    """The fp32 weights that this process's optimizer steps at ZeRO 1 to 3: its flat part of each group."""
    return optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups


def groups_of(optimizer, stage: int) -> list[list[nn.Parameter]]:  # noqa: ANN001
    """At ZeRO 1 to 3: the parameters of each of `flat_masters`, in the order in which they lie there."""
    return optimizer.fp16_groups if stage == 3 else optimizer.round_robin_bit16_groups


def flat_weights(optimizer) -> list[Tensor]:  # noqa: ANN001
    """The 16-bit weights that ZeRO 1 and 2 keep flat, by group; none at the other stages."""
    return getattr(optimizer, "bit16_groups_flat", [])


def link_state(optimizer, stage: int, parameters: Iterable[nn.Parameter], *, is_stepped: bool) -> None:  # noqa: ANN001
    """Before safe_get_full_fp32_param and safe_get_full_optimizer_state: let each parameter find its part of the state.
    is_stepped: whether the optimizer has made a step, so that there are moments."""
    if stage in (1, 2) and is_stepped:  # else linked after the first group's first step, before the others'
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for parameter in parameters if stage == 3 else ():  # a later engine on the same module has linked it to itself
        parameter._z3_optimizer = optimizer


def spread_masters(optimizer, stage: int) -> None:  # noqa: ANN001
    """Set the weights from all processes' masters after these have been written, as DeepSpeed's step does."""
    if stage in (1, 2):
        optimizer.update_lp_params()
        optimizer._hp_optimizer_states_linked = False
    elif stage == 3:
        optimizer._partition_all_parameters()
        for i in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(i)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def is_overflown(optimizer, stage: int) -> bool:  # noqa: ANN001
    """Whether the last step was skipped, on all processes, because a gradient was not finite."""
    return stage > 0 and bool(optimizer.overflow)


def is_loss_scale_exhausted(error: Exception) -> bool:
    """Whether a step failed because fp16 gradients are not finite at any loss scale. DeepSpeed raises nothing more
    special than Exception."""
    return "loss scale already at minimum" in str(error)


def loss_scale(optimizer) -> dict[str, float]:  # noqa: ANN001
    """The state of fp16's loss scaler, for a checkpoint; empty where there is none."""
    scaler = getattr(optimizer, "loss_scaler", None)
    return {name: getattr(scaler, name) for name in _LOSS_SCALE if hasattr(scaler, name)}


def set_loss_scale(optimizer, values: Mapping[str, float]) -> None:  # noqa: ANN001
    """Restore what `loss_scale` gave. Bfloat16's, from ZeRO 1 on, is always 1, and there is none where our own masters
    replace DeepSpeed's."""
    scaler = getattr(optimizer, "loss_scaler", None)
    for name, value in values.items() if scaler is not None else ():
        setattr(scaler, name, value)


def set_loss_factor(optimizer, value: float) -> None:  # noqa: ANN001
    """At ZeRO 1 to 3: multiply losses by `value`, and divide gradients by it before they are clipped and stepped."""
    optimizer.override_loss_scale(value)


def discard_gradients(engine, stage: int) -> None:  # noqa: ANN001
    """Undo the passes since the last step: gradients in buckets and in sums, which only DeepSpeed's own step clears,
    and the counts of its hooks in the backward pass."""
    engine.zero_grad()
    if stage == 0:
        return
    optimizer = engine.optimizer
    optimizer.zero_grad()  # its second copy, in fp32, of bf16 gradients; at ZeRO 3 the next pass overwrites them
    (_empty_partitions if stage == 3 else _empty_buckets)(optimizer)
    while optimizer._backward_active_depth:
        optimizer.exit_backward()
    optimizer._remaining_grad_acc_hooks = 0
    optimizer.clear_backward_seen_flag()


def _empty_buckets(optimizer) -> None:  # noqa: ANN001
    """Discard gradients at ZeRO 1 and 2."""
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
    optimizer.extra_large_param_to_reduce.clear()
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
    for sums in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        sums.update(dict.fromkeys(sums))
    optimizer._release_preflattened_grad_buffers()
    optimizer._release_ipg_buffers()
    optimizer.micro_step_id = -1


def _empty_partitions(optimizer) -> None:  # noqa: ANN001
    """Discard gradients at ZeRO 3: buckets, and the layers that were gathered when the pass failed."""
    optimizer.averaged_gradients = {}
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear_params()
    optimizer.params_already_reduced = dict.fromkeys(optimizer.params_already_reduced, False)
    optimizer.parameter_offload.partition_all_parameters()


@dataclass
class Collective:
    """A collective that this process has reached. answer: its result, where later code compares or computes with it;
    is_made: whether the call returned."""

    name: str
    sizes: list[int]
    answer: Tensor | None = None
    is_made: bool = False


class OutOfStep(RuntimeError):
    """A pass did not make the same collectives as an earlier one."""


class Collectives:
    """Records the collectives of a pass, in their order (`noted`). The first len(skipped) are not made (None: none of
    them is), and what they would have gathered is zero. Raises OutOfStep where they differ from `skipped`."""

    def __init__(self, skipped: Sequence[Collective] | None = ()) -> None:
        self.noted: list[Collective] = []
        self._skipped = skipped

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block record DeepSpeed's collectives, and our own sums over processes."""
        backend = DEEPSPEED.module("deepspeed.comm.comm").cdb
        DEEPSPEED.require(backend, *_COLLECTIVES)
        for name in _COLLECTIVES:
            setattr(backend, name, partial(self._of_deepspeed, name, getattr(backend, name)))
        try:
            with sums_through(self._of_ours):
                yield
        finally:
            for name in _COLLECTIVES:
                delattr(backend, name)

    def _of_deepspeed(self, name: str, make: Callable, *inputs: Any, **named: Any) -> Any:
        is_skipped, collective = self._note(name, [*inputs, *named.values()])
        if is_skipped:
            if collective.answer is not None:
                named["tensor"].copy_(collective.answer)
            for tensor in _tensors(named[name] for name in _GATHERED if name in named):
                tensor.zero_()
            return _Done()
        handle = make(*inputs, **named)
        collective.is_made = True
        if name == "broadcast":  # of layers' numbers, which are compared with this process's own
            collective.answer = named["tensor"].clone()
        return handle

    def _of_ours(self, tensor: Tensor, make: Callable[[], object]) -> None:
        is_skipped, collective = self._note("sum", [tensor])
        if not is_skipped:
            make()
            collective.answer, collective.is_made = tensor.clone(), True
        elif collective.answer is not None:
            tensor.copy_(collective.answer)

    def _note(self, name: str, values: Sequence[Any]) -> tuple[bool, Collective]:
        """(whether to skip it, its record)."""
        collective = Collective(name, [tensor.numel() for tensor in _tensors(values)])
        self.noted.append(collective)
        if self._skipped is None or len(self.noted) > len(self._skipped):
            return self._skipped is None, collective
        before = self._skipped[len(self.noted) - 1]
        if (collective.name, collective.sizes) != (before.name, before.sizes):
            raise OutOfStep(f"{collective.name} of {collective.sizes} in place of {before.name} of {before.sizes}")
        return True, before


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class _Done:
    """The handle of a collective that was not made."""

    def wait(self, *_inputs: object, **_named: object) -> None:
        return None


def note_offload(engine) -> None:  # noqa: ANN001
    """Register what holds the weights of a new engine at ZeRO 3, for PassStart."""
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)  # a frozen module has no optimizer
    DEEPSPEED.require(offload, "get_param_coordinator", "partition_all_parameters", "release_backward_leftovers")
    DEEPSPEED.require(offload.get_param_coordinator(), *_OF_COORDINATOR)
    _offloads.add(offload)


class PassStart:
    """State of ZeRO 3 for `module` at the start of a pass: which weights are gathered, and the recorded order of
    layers. Other engines on the same weights are included, because their hooks run as well."""

    def __init__(self, module: nn.Module) -> None:
        ids = {id(p) for p in module.parameters()}
        self._offloads = [o for o in _offloads if any(id(p) in ids for p in o.module.parameters())]
        weights = (p for o in self._offloads for p in o.module.parameters() if _is_gathered(p))
        self._gathered = list({id(p): p for p in weights}.values())
        self._known = [_known(o.get_param_coordinator()) for o in self._offloads]

    def restore(self) -> None:
        """Begin the pass again without other processes: weights that were gathered have their full size, but are zero.
        Every process has to `forget` afterwards."""
        self.forget()
        for offload, known in zip(self._offloads, self._known, strict=True):
            vars(offload.get_param_coordinator()).update(known)
        with Collectives(None).watched():
            for parameter in self._gathered:
                parameter.all_gather([parameter])

    def forget(self) -> None:
        """Release all gathered weights: each is gathered again when it is needed."""
        for offload in self._offloads:
            offload.release_backward_leftovers()
            offload.partition_all_parameters()


def _is_gathered(parameter: nn.Parameter) -> bool:
    return is_part(parameter) and parameter.ds_status.name == "AVAILABLE"


def _known(coordinator) -> dict[str, Any]:  # noqa: ANN001
    known = {name: copy.copy(getattr(coordinator, name)) for name in _OF_COORDINATOR}
    steps = known["_PartitionedParameterCoordinator__step_id_module_fetched_for"]
    steps.update({module: copy.copy(queue) for module, queue in steps.items()})
    return known
