"""AdamW for 16-bit weights at ZeRO 0: fp32 masters and moments, updated in place.

DeepSpeed's 16-bit optimizers flatten masters, gradients and weights anew in every step; here nothing is copied: a
device's own kernel does the step in one pass, and without one the gradient goes through a buffer piece by piece, which
stays in the CPU's cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from hybrid_rlhf.core.distributed import sum_over_ranks, world_size
from hybrid_rlhf.kernels import ops_for
from hybrid_rlhf.kernels.ops import Updates

_PIECE = {"cpu": 1 << 19}  # elements: 2 MiB of each fp32 tensor
_PIECE_ELSEWHERE = 1 << 25
_KEEPS_SUMS = ("cpu",)  # devices where new memory is slow
MOMENTS = ("exp_avg", "exp_avg_sq")
_BUCKET = 1 << 24  # elements of one all-reduce


class MasterAdamW(torch.optim.Optimizer):
    """Decoupled AdamW (1711.05101) by torch's own kernels on an fp32 `master` of each 16-bit parameter.

    state[parameter]: master (16-bit parameters only; fp32 ones are their own), exp_avg and exp_avg_sq in fp32, step.
    The parameter is its master, rounded. Call `expect` before each backward pass: where a minibatch has several, the
    gradients are summed in fp32, in state[parameter]['sum'], so that the split changes nothing but rounding. On a CPU
    the sums stay allocated, for clearing new memory for them takes longer than the step itself; on a card they are
    freed after the step, to make room for the next rollout. Each of several processes has the full state, and `reduce`
    sums their gradients.
    """

    def __init__(self, groups: list[dict], learning_rate: float, betas: tuple[float, float], epsilon: float, *,
                 fused: bool) -> None:
        super().__init__(groups, {"lr": learning_rate, "betas": betas, "eps": epsilon, "weight_decay": 0.0})
        self._fused, self._factor, self._is_summing = fused, 1.0, False
        self._summed: set[nn.Parameter] = set()  # those whose sum is in use
        self._spare: dict[torch.device, Tensor] = {}
        for parameter in self._parameters():
            if parameter.dtype != torch.float32:
                # moments too, before the first activations: lasting memory between those would fragment the heap
                self.state[parameter] |= {"master": parameter.detach().float(), **_fresh(parameter)}
                parameter.register_post_accumulate_grad_hook(self._collect)

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    def has_master(self, parameter: nn.Parameter) -> bool:
        """Whether this optimizer steps `parameter` by a master in fp32."""
        return "master" in self.state.get(parameter, {})

    def expect(self, is_last: bool) -> None:
        """Call before a backward pass; is_last: whether it is the minibatch's last."""
        self._is_summing = not is_last or bool(self._summed) or world_size() > 1
        for parameter in self._parameters() if self._is_summing else ():
            if self.has_master(parameter) and "sum" not in self.state[parameter]:  # all at once, for the heap
                self.state[parameter]["sum"] = torch.empty_like(parameter, dtype=torch.float32)

    def _collect(self, parameter: nn.Parameter) -> None:
        if not self._is_summing:  # the only pass: its gradient need not be kept twice
            return
        state = self.state[parameter]
        if parameter in self._summed:  # in pieces: torch would make an fp32 copy of the whole gradient
            for total, gradient in _pieces(state["sum"], parameter.grad):
                total.add_(_fp32(gradient, self._spare))
        else:
            state["sum"].copy_(parameter.grad)
        self._summed.add(parameter)
        parameter.grad = None

    @torch.no_grad()
    def add_rows(self, parameter: nn.Parameter, ids: Tensor, rows: Tensor) -> None:
        """Add fp32 rows (M, H) to rows `ids` (M,) of the gradient that is being gathered. A repeated id has the same
        row each time, which is added once."""
        state = self.state[parameter]
        if parameter in self._summed:
            state["sum"][ids] = state["sum"][ids] + rows
        elif parameter.grad is not None:  # the tied head's, which comes first
            parameter.grad[ids] = (parameter.grad[ids].float() + rows).to(parameter.dtype)
        elif self._is_summing:
            state["sum"].zero_().index_copy_(0, ids, rows)
            self._summed.add(parameter)
        else:
            parameter.grad = torch.zeros_like(parameter).index_copy_(0, ids, rows.to(parameter.dtype))

    def discard(self) -> None:
        """Forget the sums of a failed pass."""
        self._summed.clear()
        self._give_back_sums()

    def _give_back_sums(self) -> None:
        """Free the sums and the conversion buffers, except on devices in _KEEPS_SUMS."""
        self._spare = {place: spare for place, spare in self._spare.items() if place.type in _KEEPS_SUMS}
        for parameter in self._parameters():
            if parameter.device.type not in _KEEPS_SUMS:
                self.state[parameter].pop("sum", None)

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        return self.state[parameter]["sum"] if parameter in self._summed else parameter.grad

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients of all processes, in fp32. Every process calls it, before `clip`."""
        if world_size() == 1:
            return
        self.expect(is_last=True)  # the sums are there, whether or not this process had a pass
        gradients: list[Tensor] = []
        for parameter in self._parameters():
            if parameter.dtype != torch.float32 and parameter not in self._summed:  # this process has nothing to add
                self.state[parameter]["sum"].zero_()
                self._summed.add(parameter)
            elif parameter.dtype == torch.float32 and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(self._gradient(parameter))
            if sum(g.numel() for g in gradients) >= _BUCKET:
                _add_up(gradients)
                gradients = []
        if gradients:
            _add_up(gradients)

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """The norm of all gradients, in fp32; the next step scales them down to max_norm."""
        norms, spare = [], {}
        for gradient in filter(lambda g: g is not None, map(self._gradient, self._parameters())):
            updates = self._updates(gradient)
            if updates:
                norms.append(torch.tensor(updates.sum_of_squares(gradient) ** 0.5))
            else:
                norms += [torch.linalg.vector_norm(_fp32(piece, spare)) for (piece,) in _pieces(gradient)]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
        both = torch.stack([norm, factor]).cpu()  # the only wait for the device
        self._factor = float(both[1])
        return both[0]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step every parameter that has a gradient, and use up the sums."""
        spare: dict[torch.device, Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = self._gradient(parameter)
                if gradient is not None:
                    self._step(parameter, gradient, group, spare)
        self._summed.clear()
        self._give_back_sums()
        self._factor = 1.0

    def _updates(self, *tensors: Tensor) -> Updates | None:
        """The kernels that update these tensors, all of one device; None where torch's own do."""
        updates = ops_for(tensors[0].device.type).updates if self._fused and tensors[0].device.type == "cpu" else None
        return updates if updates and all(t.is_contiguous() for t in tensors) else None

    def _step(self, parameter: nn.Parameter, gradient: Tensor, group: dict, spare: dict) -> None:
        state = self.state[parameter]
        if "step" not in state:
            state |= _fresh(parameter)
        master = state.get("master", parameter)
        (beta1, beta2), count = group["betas"], float(state["step"])
        updates = self._updates(parameter, gradient, master)
        if updates:
            updates.adamw(None if master is parameter else parameter.detach(), master.detach(), gradient,
                          *(state[k] for k in MOMENTS), step=state["step"] + 1, lr=group["lr"], beta1=beta1,
                          beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"], factor=self._factor)
            state["step"] += 1
            return
        for weight, fp32, grad, avg, square in _pieces(parameter, master, gradient, *(state[k] for k in MOMENTS)):
            grad = _fp32(grad, spare)
            if self._factor != 1.0:
                grad.mul_(self._factor)
            adamw([fp32], [grad], [avg], [square], [], [torch.full((), count, device=fp32.device)], fused=self._fused,
                  foreach=False, amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], eps=group["eps"],
                  weight_decay=group["weight_decay"], maximize=False)
            if master is not parameter:
                weight.copy_(fp32)
        state["step"] += 1


def _fresh(parameter: nn.Parameter) -> dict:
    """Adam's state before the first step."""
    return {"step": 0, **{k: torch.zeros_like(parameter, dtype=torch.float32) for k in MOMENTS}}


def _add_up(gradients: list[Tensor]) -> None:
    """Replace each by its sum over all processes, in one all-reduce."""
    total = sum_over_ranks(torch.cat([g.flatten() for g in gradients]))
    for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view(gradient.shape))


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors, of one shape, in pieces of the same elements; whole where one is not contiguous."""
    tensors = tuple(t.detach() for t in tensors)
    if not all(t.is_contiguous() for t in tensors):
        yield tensors
        return
    size = _PIECE.get(tensors[0].device.type, _PIECE_ELSEWHERE)
    yield from zip(*(t.view(-1).split(size) for t in tensors), strict=True)


def _fp32(piece: Tensor, spare: dict[torch.device, Tensor]) -> Tensor:
    """`piece` in fp32: itself, or a copy in the buffer of its device, which the next call overwrites."""
    if piece.dtype == torch.float32:
        return piece
    buffer = spare.get(piece.device)
    if buffer is None or buffer.numel() < piece.numel():
        spare[piece.device] = buffer = torch.empty(piece.numel(), device=piece.device)
    return buffer[:piece.numel()].view(piece.shape).copy_(piece)
