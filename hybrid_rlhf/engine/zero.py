"""Training through DeepSpeed: one engine for one set of parameters. The only door to deepspeed.

What was tried and holds (DeepSpeed 0.19, against plain torch): ZeRO 0, 1 and 2 in fp32 give torch's weights to
rounding when micro-batches announce the accumulation boundary. At ZeRO 0 in bf16 DeepSpeed takes a zero-gradient
optimizer step at start, so bf16 and fp16 begin at ZeRO 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid_rlhf.config import check
from hybrid_rlhf.distributed import is_initialized, world_size


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its bounds. Norms and biases are never decayed."""

    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class ZeroConfig:
    """How training is laid out.

    Attributes:
        zero_stage: 0, 1 or 2. None chooses 0 for float32 and 1 for 16-bit weights.
        micro_batch_tokens: Most tokens (padding included) that one forward and backward may hold. Smaller needs less
            memory and gives the same gradient.
    """

    zero_stage: int | None = None
    micro_batch_tokens: int = 8192

    def __post_init__(self) -> None:
        check(self.zero_stage in (None, 0, 1, 2), f"engine.zero_stage is {self.zero_stage}; it must be 0, 1 or 2")
        check(self.micro_batch_tokens >= 1,
              f"engine.micro_batch_tokens is {self.micro_batch_tokens}; it must be positive")


def init_process_group() -> None:
    """Join the processes that a launcher started, or be a group of one. Does nothing the second time."""
    if is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    os.environ.setdefault("LOCAL_RANK", "0")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def _import_deepspeed():  # noqa: ANN202 - a module
    """Import deepspeed quietly, with this environment's bin on PATH (it calls `ninja`, and raises without)."""
    scripts = str(Path(sys.executable).parent)
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = scripts + os.pathsep + os.environ.get("PATH", "")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import logging

    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


class ZeroTraining:
    """The trainable parameters of `module` under DeepSpeed ZeRO with AdamW and a learning-rate schedule.

    schedule: optimizer step -> factor of the learning rate. Gradients are clipped to max_grad_norm over all
    parameters and processes; the norm before clipping is what `step` returns.
    """

    def __init__(self, module: nn.Module, optimizer: OptimizerConfig, schedule: Callable[[int], float],
                 zero: ZeroConfig) -> None:
        init_process_group()
        self.parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.max_grad_norm, self.schedule, self.num_steps = optimizer.max_grad_norm, schedule, 0
        self._dtype = next(iter(self.parameters.values())).dtype
        self.stage = zero.zero_stage if zero.zero_stage is not None else int(self._dtype != torch.float32)
        check(self.stage > 0 or self._dtype == torch.float32,
              f"engine.zero_stage 0 with {self._dtype} weights: DeepSpeed would take a step without gradients at "
              "start; use engine.zero_stage 1 or model.dtype float32")
        self._optimizer = self._adamw(optimizer)
        self.engine = self._initialize(module)
        self.set_learning_rate(optimizer.learning_rate)

    def _adamw(self, config: OptimizerConfig) -> torch.optim.Optimizer:
        decayed = [p for p in self.parameters.values() if p.ndim > 1]
        plain = [p for p in self.parameters.values() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.learning_rate, fused=True,
                                 betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_epsilon)

    def _initialize(self, module: nn.Module):  # noqa: ANN202 - a DeepSpeed class
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # of no effect: micro-batches are ours, by tokens
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": self.max_grad_norm if self.stage else 0.0,  # at ZeRO 0 `step` clips and knows the norm
            "bf16": {"enabled": self._dtype == torch.bfloat16},
            "fp16": {"enabled": self._dtype == torch.float16},
            "steps_per_print": sys.maxsize,
        }
        with _stdout_to_stderr():
            engine, *_ = _import_deepspeed().initialize(
                model=module, optimizer=self._optimizer, model_parameters=list(self.parameters.values()),
                config=settings, dist_init_required=False)
        return engine

    def set_learning_rate(self, learning_rate: float) -> None:
        self._base_learning_rate = learning_rate

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self._base_learning_rate * self.schedule(self.num_steps)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Add the gradient of `loss` (this process's share of the minibatch's loss); reduce over processes at the last.

        DeepSpeed averages over processes; losses here are shares of one sum, hence the factor.
        """
        self.engine.set_gradient_accumulation_boundary(is_last)
        self.engine.backward(loss * world_size())

    def discard_gradients(self) -> None:
        """Forget all that was accumulated since the last step, after a pass that failed half way.

        DeepSpeed has no call for it: at ZeRO 1 and 2 gradients wait in buckets and sums that only its own step clears.
        """
        self.engine.zero_grad()
        if self.stage == 0:
            return
        optimizer = self.engine.optimizer
        optimizer.zero_grad()  # its second copy, in fp32, of bf16 gradients
        for bucket in optimizer.ipg_buckets.values():
            bucket.clear()
        optimizer.extra_large_param_to_reduce.clear()
        optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
        for sums in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            sums.update(dict.fromkeys(sums))
        optimizer._release_preflattened_grad_buffers()
        optimizer._release_ipg_buffers()
        optimizer.micro_step_id = -1
        while optimizer._backward_active_depth:
            optimizer.exit_backward()
        optimizer._remaining_grad_acc_hooks = 0
        optimizer.clear_backward_seen_flag()

    def step(self) -> float:
        """Clip, step and clear the gradients; returns the gradient norm before clipping."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = self.learning_rate
        norm = None
        if self.stage == 0:
            norm = nn.utils.clip_grad_norm_(list(self.parameters.values()), self.max_grad_norm)
        self.engine.step()
        self.num_steps += 1
        return float(self.engine.get_global_grad_norm() if norm is None else norm)

    def state(self) -> dict:
        """Trained weights (the fp32 masters where there are any), Adam's moments and the step count, by parameter."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self.stage and self.num_steps:
            # DeepSpeed links moments to parameters after the first group's first step, when the other groups have none
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()
        state: dict = {"num_steps": self.num_steps, "weights": {}, "exp_avg": {}, "exp_avg_sq": {}}
        for name, parameter in self.parameters.items():
            if self.stage == 0:
                moments = self._optimizer.state.get(parameter, {})
                found = {"weights": parameter.detach(), **{k: moments.get(k) for k in ("exp_avg", "exp_avg_sq")}}
            else:
                found = {"weights": safe_get_full_fp32_param(parameter)}
                if self.num_steps:
                    found |= {k: safe_get_full_optimizer_state(parameter, k) for k in ("exp_avg", "exp_avg_sq")}
            for key, value in found.items():
                if value is not None:
                    state[key][name] = value.detach().cpu().clone()
        return state


class _stdout_to_stderr:
    """DeepSpeed reports builds by bare print; standard output belongs to whoever pipes it."""

    def __enter__(self) -> None:
        self._stdout, sys.stdout = sys.stdout, sys.stderr

    def __exit__(self, *_exc: object) -> None:
        sys.stdout = self._stdout
