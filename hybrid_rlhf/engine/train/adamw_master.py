"""AdamW for 16-bit weights at ZeRO 0: fp32 masters and moments, updated in place.

DeepSpeed's 16-bit optimizers flatten masters, gradients and weights anew in every step; here nothing is copied whole.
On a CPU a kernel of ours does a parameter's step in one pass, and without it the gradient goes through a buffer piece
by piece, which stays in the cache. On a card torch's kernels for many tensors step a batch of parameters at once.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from hybrid_rlhf.core.distributed import sum_over_ranks, world_size
from hybrid_rlhf.core.torch_compat import fused_adamw, of_many, parts_of
from hybrid_rlhf.kernels import ops_for
from hybrid_rlhf.kernels.ops import Updates

_PIECE = 1 << 19  # elements: 2 MiB of each fp32 tensor
_BATCH = 1 << 25  # elements that a card steps at once: 128 MiB of fp32 gradients
MOMENTS = ("exp_avg", "exp_avg_sq")
_BUCKET = 1 << 24  # elements of one all-reduce
_LOWER_BITS = {torch.bfloat16: 16, torch.float16: 13}  # those of an fp32 number that its rounding drops


class MasterAdamW(torch.optim.Optimizer):
    """Decoupled AdamW (1711.05101) by torch's own kernels on an fp32 `master` of each 16-bit parameter.

    state[parameter]: master (16-bit parameters only; fp32 ones are their own), exp_avg and exp_avg_sq in fp32, step.
    The parameter is its master, rounded; `scatter` moves that at the start. Call `expect` before each backward pass:
    where a minibatch has several, the gradients are summed in fp32, in `sum` of state[parameter], so that the split
    changes nothing but rounding. On a CPU the sums stay allocated, for clearing new memory for them takes longer than
    the step itself; on a card they are freed after the step, to make room for the next rollout. Each of several
    processes has the full state, and `reduce` sums their gradients.
    """

    def __init__(self, groups: list[dict], learning_rate: float, betas: tuple[float, float], epsilon: float, *,
                 fused: bool) -> None:
        super().__init__(groups, {"lr": learning_rate, "betas": betas, "eps": epsilon, "weight_decay": 0.0})
        self._fused, self._factor, self._is_summing = fused, 1.0, False
        self._summed: set[nn.Parameter] = set()  # those whose sum is in use
        self._spare: dict[torch.device, Tensor] = {}  # on CPUs alone
        for parameter in self._parameters():
            if parameter.dtype != torch.float32:
                # moments too, before the first activations: lasting memory between those would fragment the heap
                self.state[parameter] |= {"master": parameter.detach().float(), **_fresh(parameter)}
                parameter.register_post_accumulate_grad_hook(partial(_hand_on, weakref.ref(self)))

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
        if parameter in self._summed and _is_on_cpu(parameter):  # in pieces: torch would copy the whole to fp32 there
            for total, gradient in _pieces(_PIECE, state["sum"], parameter.grad):
                total.add_(_fp32(gradient, self._spare))
        elif parameter in self._summed:
            state["sum"].add_(parameter.grad)
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
        for parameter in self._parameters():
            if not _is_on_cpu(parameter):
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
        norms, on_card, spare = [], [], {}
        for gradient in filter(lambda g: g is not None, map(self._gradient, self._parameters())):
            if not _is_on_cpu(gradient):
                on_card.append(gradient)
            elif updates := self._updates(gradient):
                norms.append(torch.tensor(updates.sum_of_squares(gradient) ** 0.5))
            else:
                norms += [torch.linalg.vector_norm(_fp32(piece, spare)) for (piece,) in _pieces(_PIECE, gradient)]
        if on_card:
            for dtype in {g.dtype: None for g in on_card}:  # unlike types go one by one
                norms += of_many("norm")([g for g in on_card if g.dtype == dtype], 2, dtype=torch.float32)
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
            on_cards = defaultdict(list)  # by the number of their steps, which a card counts for all of a batch
            for parameter in group["params"]:
                gradient = self._gradient(parameter)
                if gradient is None:
                    continue
                if "step" not in (state := self.state[parameter]):
                    state |= _fresh(parameter)
                master, count = state.get("master", parameter), state["step"]
                if _is_on_cpu(parameter):
                    self._step(parameter, master, gradient, group, spare)
                else:
                    tensors = parameter, master, gradient, state["exp_avg"], state["exp_avg_sq"]
                    on_cards[parameter.device, count].append(tensors)
                state["step"] = count + 1
            for (_, count), parameters in on_cards.items():
                for batch in _batches(parameters):
                    self._step_batch(batch, count, group)
        self._summed.clear()
        self._give_back_sums()
        self._factor = 1.0

    def _updates(self, *tensors: Tensor) -> Updates | None:
        """The kernels that update these tensors, all of one device; None where torch's own do."""
        updates = ops_for("cpu").updates if self._fused and _is_on_cpu(tensors[0]) else None
        return updates if updates and all(t.is_contiguous() for t in tensors) else None

    def _step(self, parameter: nn.Parameter, master: Tensor, gradient: Tensor, group: dict, spare: dict) -> None:
        """A step of a parameter on a CPU."""
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        updates = self._updates(parameter, gradient, master)
        if updates:
            updates.adamw(None if master is parameter else parameter.detach(), master.detach(), gradient,
                          *(state[k] for k in MOMENTS), step=state["step"] + 1, lr=group["lr"], beta1=beta1,
                          beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"], factor=self._factor)
            return
        for weight, *tensors in _pieces(_PIECE, parameter, master, gradient, *(state[k] for k in MOMENTS)):
            tensors[1] = _fp32(tensors[1], spare)
            self._adamw(*([t] for t in tensors), state["step"], group, has_many=False)
            if master is not parameter:
                weight.copy_(tensors[0])

    def _step_batch(self, batch: list[tuple[Tensor, ...]], count: int, group: dict) -> None:
        """A step of many on a card: (weight, master, gradient, moments) of each. Few launches: each takes the host
        up to 20 us."""
        weights, masters, gradients, averages, squares = map(list, zip(*batch, strict=True))
        narrow = [i for i, gradient in enumerate(gradients) if gradient.dtype != torch.float32]
        if narrow:
            wide = torch.empty(sum(gradients[i].numel() for i in narrow), device=gradients[0].device)
            parts = parts_of(wide, [gradients[i] for i in narrow])
            of_many("copy_")(parts, [gradients[i] for i in narrow])
            for i, part in zip(narrow, parts, strict=True):
                gradients[i] = part
        self._adamw(masters, gradients, averages, squares, count, group, has_many=True)
        rounded = [i for i, weight in enumerate(weights) if weight.dtype != torch.float32]
        if rounded:
            of_many("copy_")([weights[i] for i in rounded], [masters[i] for i in rounded])

    def _adamw(self, masters: list[Tensor], gradients: list[Tensor], averages: list[Tensor], squares: list[Tensor],
               count: int, group: dict, *, has_many: bool) -> None:
        """torch's own step, on gradients times the factor of `clip`, which they keep."""
        if self._factor != 1.0:
            of_many("mul_")(gradients, self._factor)
        beta1, beta2 = group["betas"]
        rules = dict(amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], eps=group["eps"],
                     weight_decay=group["weight_decay"], maximize=False)
        if self._fused:
            counts = [torch.full((), count + 1.0, device=masters[0].device)] * len(masters)
            fused_adamw()(masters, gradients, averages, squares, [], counts, **rules)
        else:
            counts = [torch.full((), float(count)) for _ in masters]  # of the host, from which the others read them
            adamw(masters, gradients, averages, squares, [], counts, foreach=has_many, **rules)


def rounding_noise(dtype: torch.dtype, device: torch.device) -> Tensor:
    """For `scatter`: numbers (2^20,) int32, always the same, that may be added to the bits of an fp32 number so that it
    rounds to the same number in `dtype`, of 16 bits."""
    most = (1 << _LOWER_BITS[dtype] - 1) - 1
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-most, most + 1, (1 << 20,), dtype=torch.int32, generator=generator).to(device)


@torch.no_grad()
def scatter(master: Tensor, noise: Tensor, place: int) -> None:
    """Move each fp32 weight, in place, to anywhere among the numbers that round to it in 16 bits.

    From the middle a weight would show no update before the sum of all is half the distance to its neighbour: for one
    of .1 in bfloat16 that takes 25 updates of 1e-5, and a short run would train nothing. Scattered, as many weights
    show an update as are due, and their mean is the masters': stochastic rounding (1502.02551, section 3), drawn once.
    Zeros stay, near which numbers are as fine as any update.

    noise: of `rounding_noise`; number i of master is moved by noise[(place + i) % 2^20], whichever process holds it.
    """
    if not master.is_contiguous():
        whole = master.contiguous()
        scatter(whole, noise, place)
        master.copy_(whole)
        return
    numbers, at = master.view(-1), 0
    while at < numbers.numel():
        part = noise[(place + at) % len(noise) :][: numbers.numel() - at]
        piece = numbers[at : at + len(part)]
        piece.view(torch.int32).add_(part * ((piece != 0) & piece.isfinite()))
        at += len(part)


def _hand_on(optimizer: weakref.ref, parameter: nn.Parameter) -> None:
    """A parameter's hook, which must not hold the optimizer: the parameter is held by that, and gc frees no hooks."""
    if (one := optimizer()) is not None:
        one._collect(parameter)


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _fresh(parameter: nn.Parameter) -> dict:
    """Adam's state before the first step."""
    return {"step": 0, **{k: torch.zeros_like(parameter, dtype=torch.float32) for k in MOMENTS}}


def _add_up(gradients: list[Tensor]) -> None:
    """Replace each by its sum over all processes, in one all-reduce."""
    total = sum_over_ranks(torch.cat([g.flatten() for g in gradients]))
    for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view(gradient.shape))


def _pieces(most: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors, of one shape, in pieces of the same elements, `most` at most; whole where one is not contiguous."""
    if tensors[0].numel() <= most or not all(t.is_contiguous() for t in tensors):
        yield tensors
    else:
        yield from zip(*(t.detach().view(-1).split(most) for t in tensors), strict=True)


def _batches(parameters: Iterable[tuple[Tensor, ...]]) -> Iterator[list[tuple[Tensor, ...]]]:
    """The pieces of all parameters, together about _BATCH elements at a time."""
    batch, size = [], 0
    for piece in (piece for tensors in parameters for piece in _pieces(_BATCH, *tensors)):
        if batch and size + piece[0].numel() > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece[0].numel()
    if batch:
        yield batch


def _fp32(piece: Tensor, spare: dict[torch.device, Tensor]) -> Tensor:
    """`piece` in fp32: itself, or a copy in the buffer of its device, which the next call overwrites."""
    if piece.dtype == torch.float32:
        return piece
    buffer = spare.get(piece.device)
    if buffer is None or buffer.numel() < piece.numel():
        spare[piece.device] = buffer = torch.empty(piece.numel(), device=piece.device)
    return buffer[:piece.numel()].view(piece.shape).copy_(piece)
