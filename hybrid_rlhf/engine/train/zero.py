"""Training through DeepSpeed: one engine for one set of parameters. The only module that imports deepspeed.

What was tried and holds (DeepSpeed 0.19, against plain torch): ZeRO 0 to 3 in fp32 give torch's weights to rounding
when micro-batches announce the accumulation boundary, with one process and with two. At ZeRO 0 in bf16 DeepSpeed takes
a zero-gradient optimizer step at start, so there bf16 is not configured, and adamw_master.py keeps the masters.
fp16 begins at ZeRO 1, and so does bf16 on several processes but for a small part of the weights (adapters).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
from pathlib import Path

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.distributed import gather_over_ranks, init_process_group, is_main, world_size
from hybrid_rlhf.engine.train import zero_state
from hybrid_rlhf.engine.train.adamw_master import MasterAdamW
from hybrid_rlhf.engine.train.deepspeed_compat import (
    check_parts,
    discard_gradients,
    flat_weights,
    is_loss_scale_exhausted,
    is_overflown,
    is_part,
    is_partitioned,
    loss_scale,
    note_offload,
    set_loss_factor,
    shape_of,
    share_timeout,
    size_of,
    skip_inference_build,
    skip_lone_collectives,
    taking_parts,
    without_hooks,
)
from hybrid_rlhf.engine.train.embedding_rows import embeddings_by_rows
from hybrid_rlhf.engine.train.offload import saved_on_cpu
from hybrid_rlhf.engine.train.optimizers import MASTERED, OPTIMIZERS, OptimizerConfig, exhausted, scale_for
from hybrid_rlhf.engine.train.zero_config import ZeroConfig
from hybrid_rlhf.models.weight_parts import Gather


def _import_deepspeed():  # noqa: ANN202 - a module
    """Import deepspeed quietly, with this environment's bin on PATH (it calls `ninja`, and raises without)."""
    scripts = str(Path(sys.executable).parent)
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = scripts + os.pathsep + os.environ.get("PATH", "")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    skip_inference_build()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def _deepspeed_engine(settings: dict, **arguments: object):  # noqa: ANN202 - a DeepSpeed class
    """An engine by `deepspeed.initialize`, which needs LOCAL_RANK even without a launcher. The variable is removed
    where no forward needs it again: with it, programs started from here, one that uses accelerate among them, would
    look for a launcher."""
    is_added = "LOCAL_RANK" not in os.environ
    os.environ.setdefault("LOCAL_RANK", "0")
    with redirect_stdout(sys.stderr):  # DeepSpeed prints its builds to standard output, which a caller may pipe
        deepspeed = _import_deepspeed()
        share_timeout()
        skip_lone_collectives()
        with taking_parts(arguments["model"]):
            engine, *_ = deepspeed.initialize(config=settings, dist_init_required=False, **arguments)
    if settings["zero_optimization"]["stage"] == 3:
        note_offload(engine)
    elif is_added:
        del os.environ["LOCAL_RANK"]
    return engine


class ZeroTraining:
    """The trainable parameters of `module` under DeepSpeed ZeRO, with an optimizer and a learning-rate schedule.

    schedule: optimizer step -> factor of the learning rate. Gradients are clipped to max_grad_norm over all
    parameters and processes; the norm before clipping is what `step` returns.
    """

    def __init__(self, module: nn.Module, optimizer: OptimizerConfig, schedule: Callable[[int], float],
                 zero: ZeroConfig, parameters: dict[str, nn.Parameter] | None = None) -> None:
        init_process_group()
        self.parameters = parameters or {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.max_grad_norm, self.max_skipped_in_a_row = optimizer.max_grad_norm, optimizer.max_skipped_updates
        self.schedule, self.num_steps, self.num_omitted = schedule, 0, 0  # updates: made, and planned but never made
        self.num_skipped = self.num_skipped_in_a_row = 0  # updates not made: gradients that are not finite
        self._dtype = next(iter(self.parameters.values())).dtype
        is_small = 10 * sum(map(size_of, self.parameters.values())) < sum(map(size_of, module.parameters()))
        self.stage = zero.stage(self._dtype, optimizer.optim, is_small=is_small)
        self.offload = frozenset(zero.offload)
        kinds = MASTERED if self.stage == 0 and self._dtype != torch.float32 else OPTIMIZERS
        self._optimizer = kinds[optimizer.optim](self._groups(optimizer.weight_decay), optimizer)
        self._masters = self._optimizer if isinstance(self._optimizer, MasterAdamW) else None
        self.scale = scale_for(module, self._dtype)
        self.engine = self._initialize(module, is_shared=parameters is not None)
        zero_state.scatter_masters(self)
        self.set_learning_rate(optimizer.learning_rate)

    def _groups(self, weight_decay: float) -> list[dict]:
        decayed = [p for p in self.parameters.values() if len(shape_of(p)) > 1]
        plain = [p for p in self.parameters.values() if len(shape_of(p)) <= 1]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
        return [g for g in groups if g["params"]]

    def _initialize(self, module: nn.Module, is_shared: bool):  # noqa: ANN202 - a DeepSpeed class
        # buckets no larger than what there is to put into them: DeepSpeed allocates them whole
        bucket = max(1, min(50_000_000, sum(size_of(p) for p in self.parameters.values())))
        settings = _common_settings(module, self.stage, self._dtype, self.offload) | {
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # torch's own steps on a CPU as well, and needs no compiler
            "gradient_clipping": self.max_grad_norm if self.stage else 0.0,  # at ZeRO 0 `step` clips and knows the norm
        }
        settings["zero_optimization"]["reduce_bucket_size"] = bucket
        if is_shared:  # weights prefetched by one engine are neither gathered nor partitioned for another on it
            settings["zero_optimization"] |= {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
        if self.stage == 3:
            _gather_experts_at_once(module)
        engine = _deepspeed_engine(settings, model=module, optimizer=self._optimizer,
                                   model_parameters=list(self.parameters.values()))
        check_parts(engine.optimizer, self.stage, self.parameters.values())
        return engine

    def set_learning_rate(self, learning_rate: float) -> None:
        self._base_learning_rate = learning_rate

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step. The schedule counts omitted updates too, else it would never end."""
        return self._base_learning_rate * self.schedule(self.num_steps + self.num_omitted)

    @property
    def loss_scale(self) -> float | None:
        """What the next loss is multiplied by, in float16; None elsewhere."""
        if self.scale:
            return self.scale.value
        return loss_scale(self.engine.optimizer)["cur_scale"] if self._dtype == torch.float16 else None

    def __call__(self, *inputs: object, **named: object):  # noqa: ANN204 - the module's own
        """The module's forward."""
        with ExitStack() as stack:
            if torch.is_grad_enabled() and "activations" in self.offload:
                stack.enter_context(saved_on_cpu(self.engine.module))
            if torch.is_grad_enabled() and self._masters:
                stack.enter_context(embeddings_by_rows(self.engine.module, self._masters.has_master,
                                                       self._masters.add_rows))
            return self.engine(*inputs, **named)

    def takes_rows(self, weight: nn.Parameter) -> bool:
        """Whether the gradient of `weight`, an input embedding's, may come by rows, past the weight's own hooks."""
        modules = self.engine.module.modules() if self._masters else ()
        return any(type(m) is nn.Embedding and m.weight is weight for m in modules)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Add the gradient of `loss` (this process's share of the minibatch's loss); reduce over processes at the last.

        DeepSpeed averages over processes; losses here are shares of one sum, hence the factor. Masters add up by
        themselves, before the step.
        """
        if self._masters:
            self._masters.expect(is_last)
            self.engine.set_gradient_accumulation_boundary(False)
            self.engine.backward(loss)
            return
        # alone at ZeRO 0 there is nothing to reduce, but DeepSpeed would flatten all gradients for it
        self.engine.set_gradient_accumulation_boundary(is_last and (self.stage > 0 or world_size() > 1))
        if self.scale and self.stage > 0:
            set_loss_factor(self.engine.optimizer, self.scale.value)
        factor = self.scale.value if self.scale and self.stage == 0 else 1.0
        self.engine.backward(loss * (world_size() * factor))

    def discard_gradients(self) -> None:
        """Discard all that was accumulated since the last step, after a pass that failed half way."""
        discard_gradients(self.engine, self.stage)
        if self._masters:
            self._masters.discard()

    def step(self) -> float:
        """Clip, step and clear the gradients; returns the gradient norm before clipping.

        A norm that is not finite changes no weight and no moment, on any process; num_skipped counts those updates.
        """
        for group in self.engine.optimizer.param_groups:
            group["lr"] = self.learning_rate
        norm: Tensor | None = None
        if self._masters:
            self._masters.reduce()
            norm = self._masters.clip(self.max_grad_norm)
        elif self.stage == 0:
            self._unscale()
            norm = nn.utils.clip_grad_norm_(list(self.parameters.values()), self.max_grad_norm)
            norm = norm.cpu()  # the only wait for the device
        if norm is not None and not norm.isfinite():
            self.discard_gradients()
            is_skipped = True
        else:
            self.engine.set_gradient_accumulation_boundary(True)
            try:
                self.engine.step()
            except Exception as error:
                if is_loss_scale_exhausted(error):
                    raise exhausted() from error
                raise
            is_skipped = is_overflown(self.engine.optimizer, self.stage)
        if self.scale:
            self.scale.update(is_finite=not is_skipped)
        self.num_steps += 1
        self.num_skipped += is_skipped
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if is_skipped else 0
        return float(self.engine.get_global_grad_norm() if norm is None else norm)

    def _unscale(self) -> None:
        for parameter in self.parameters.values() if self.scale else ():
            if parameter.grad is not None:
                parameter.grad.mul_(1 / self.scale.value)

    def tensors(self) -> Iterator[Tensor]:
        """What training holds on the device beside the module's own tensors: optimizer state, fp32 masters, buffers."""
        for group in self._optimizer.param_groups:
            yield from (p.data for p in group["params"])
            yield from (p.grad for p in group["params"] if p.grad is not None)
        for state in self._optimizer.state.values():
            yield from (v for v in state.values() if isinstance(v, Tensor))
        yield from flat_weights(self.engine.optimizer)

    def state(self) -> dict:
        """Trained weights (the fp32 masters where there are any), Adam's moments and the step count, by parameter.

        Every process must call it, for each may hold a part.
        """
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        return zero_state.full_state(self, safe_get_full_fp32_param, safe_get_full_optimizer_state)

    def shard(self) -> dict:
        """What this process's optimizer holds, bit for bit, for a checkpoint: the trained weights (or their masters, or
        under ZeRO 1 to 3 its part of them), the optimizer's state, the step count. No copies: the next step changes
        them."""
        return zero_state.shard(self)

    def load_shard(self, state: Mapping) -> None:
        """Restore what `shard` returned; each process calls it. Tensors are looked up one by one.

        state: this process's, of as many processes; or those of any number, as {"processes": [of each]}. Raises
        ValueError where other weights are trained than in `state`.
        """
        zero_state.load_shard(self, state)


def _gather_experts_at_once(module: nn.Module) -> None:
    """Make blocks of experts ZeRO 3's leaf modules: all processes gather a whole block when they reach it.

    Else only processes whose tokens chose an expert gather it, and the others answer with parts of another layer: they
    wait for each other, or the gradient is silently wrong (by 54% with one expert each on two processes).
    """
    blocks = {type(m) for m in module.modules() if isinstance(getattr(m, "experts", None), nn.Module)}
    if blocks:
        _import_deepspeed().utils.set_z3_leaf_modules(module, sorted(blocks, key=lambda block: block.__name__))


class ZeroFrozen:
    """A module that is never trained, its weights in parts over the processes (ZeRO 3): a forward gathers layer by
    layer, and every process must run as many of them."""

    def __init__(self, module: nn.Module, zero: ZeroConfig) -> None:
        init_process_group()
        module.requires_grad_(False)
        dtype = next(module.parameters()).dtype
        settings = _common_settings(module, 3, dtype, frozenset(zero.offload) & {"parameters"})
        self.engine = _deepspeed_engine(settings, model=module)

    def __call__(self, *inputs: object, **named: object):  # noqa: ANN204 - the module's own
        """The module's forward."""
        return self.engine(*inputs, **named)


def _common_settings(module: nn.Module, stage: int, dtype: torch.dtype, offload: frozenset[str]) -> dict:
    """DeepSpeed's configuration, as far as trained and frozen modules have it in common."""
    memory, layout = {"device": "cpu", "pin_memory": torch.cuda.is_available()}, {"stage": stage}
    if "optimizer" in offload:
        layout["offload_optimizer"] = memory
    if "parameters" in offload:
        layout["offload_param"] = memory
    if stage == 3:  # norms and biases stay whole everywhere, as a message each would cost more than they do
        layout["stage3_param_persistence_threshold"] = max(
            (size_of(p) for p in module.parameters() if len(shape_of(p)) <= 1), default=0)
    return {"train_micro_batch_size_per_gpu": 1,  # of no effect: micro-batches are ours, by tokens
            "gradient_accumulation_steps": 1, "zero_optimization": layout, "steps_per_print": sys.maxsize,
            "timers": {"throughput": {"enabled": False}},  # which waits for the device at every forward
            "bf16": {"enabled": dtype == torch.bfloat16 and stage > 0}, "fp16": {"enabled": dtype == torch.float16}}


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Within the block every weight of `module` is whole on every process, and its forward needs no other process.

    Every process must enter. Weights are read only: what is written to them is lost, and references to their storage
    are stale afterwards. A module that ZeRO 3 does not partition is whole as it is; DeepSpeed's hooks are off for it
    too, for their timer would wait for the card at every step of decoding.
    """
    with gathered_weights(module.parameters()) if is_partitioned(module) else nullcontext(), without_hooks(module):
        yield


def gathered_weights(weights: Iterable[nn.Parameter]) -> AbstractContextManager:
    """Within the block these weights, which ZeRO 3 holds in parts, are whole on every process. Every process enters."""
    return _import_deepspeed().zero.GatheredParameters(list(weights))


def for_main(module: nn.Module, work: Callable[[Gather], None]) -> None:
    """work(gather) in the main process, where within gather(weights) these weights of `module` are whole, to be read.

    Every process calls it: those that ZeRO 3 holds in parts are sent by all, until the work is done or has failed. The
    others keep nothing of what passes through them.
    """
    if not is_partitioned(module):
        if is_main():
            work(lambda _weights: nullcontext())
        return
    parameters = list(module.parameters())
    numbers = {id(parameter): i for i, parameter in enumerate(parameters)}

    @contextmanager
    def gather(weights: Iterable[nn.Parameter]) -> Iterator[None]:
        wanted = sorted({numbers[id(w)] for w in weights if is_part(w)})
        if wanted:
            gather_over_ranks(wanted)
        with gathered_weights(parameters[i] for i in wanted) if wanted else nullcontext():
            yield

    if is_main():
        try:
            work(gather)
        finally:
            gather_over_ranks([])
        return
    while wanted := next(filter(None, gather_over_ranks([])), None):
        with gathered_weights(parameters[i] for i in wanted):
            pass
