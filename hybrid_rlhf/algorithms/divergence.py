"""Divergences of a student's next-token distribution from a teacher's, and the teacher's targets for a batch.

Over the whole vocabulary, or over the teacher's k likeliest tokens and all others as one. Logits exist in chunks of
tokens (algorithms/likelihood.py), their fp32 copies for a block of rows only, and gradients are written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid_rlhf.algorithms import likelihood
from hybrid_rlhf.core.tensors import to_device

KINDS = ("reverse_kl", "forward_kl", "jsd")
_LEAST_REST = 2.0**-20  # a probability that is 1 minus others: less may be rounding in fp32
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Divergence:
    """Which divergence of a student's distribution s from a teacher's t, both softmax(logits / temperature).

    reverse_kl: KL(s || t). forward_kl: KL(t || s). jsd: beta KL(t || m) + (1 - beta) KL(s || m) of the mixture
    m = beta t + (1 - beta) s (generalised Jensen-Shannon, 2306.13649), which alone reads beta.
    Raises ValueError for another kind, a temperature that is not positive, and a beta of jsd outside (0, 1).
    """

    kind: str = "reverse_kl"
    beta: float = 0.5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"divergence {self.kind!r}; there are {', '.join(KINDS)}")
        if not self.temperature > 0:
            raise ValueError(f"temperature {self.temperature} of a divergence must be positive")
        if self.kind == "jsd" and not 0 < self.beta < 1:
            raise ValueError(f"beta {self.beta} of jsd must be between 0 (forward_kl) and 1 (reverse_kl)")


class TeacherTargets(NamedTuple):
    """A teacher's targets for the loss tokens of a batch, row by row, in order.

    rows: of each row the hidden states (n, H) that predict its loss tokens, and head: such states -> logits (n, V). Or,
    with ids: of each row the teacher's k likeliest tokens (n, k) long, and rows are their log-probabilities (n, k) fp32
    at kind.temperature; head is None.
    """

    kind: Divergence
    rows: list[Tensor]
    ids: list[Tensor] | None = None
    head: Callable[[Tensor], Tensor] | None = None

    def select(self, index: Tensor) -> TeacherTargets:
        """The targets of the rows `index` of the batch, in that order."""
        chosen = index.tolist()
        ids = None if self.ids is None else [self.ids[i] for i in chosen]
        return self._replace(rows=[self.rows[i] for i in chosen], ids=ids)

    def to(self, device: torch.device | str) -> TeacherTargets:
        return self._replace(rows=_moved(self.rows, device), ids=None if self.ids is None else _moved(self.ids, device))

    def flat(self) -> tuple[Tensor, ...]:
        """The targets of all rows concatenated, as `divergence` takes them: rows (N, ..) and ids (N, k)."""
        return (torch.cat(self.rows),) if self.ids is None else (torch.cat(self.rows), torch.cat(self.ids))

    def divergence(self, student: Tensor, rows: Tensor, ids: Tensor | None = None) -> Tensor:
        """(n,) fp32 nats of the student's logits (n, V) of some tokens from their targets, as in `flat`; the teacher's
        logits exist for these tokens only, and without gradients."""
        if ids is not None:
            return top_k_divergence(student, ids, rows, self.kind)
        if self.head is None:
            raise ValueError("a teacher's hidden states without its head")
        with torch.no_grad():
            logits = self.head(rows)
        return token_divergence(student, logits, self.kind)


def _moved(rows: list[Tensor], device: torch.device | str) -> list[Tensor]:
    """Move all rows in one copy instead of one for each row."""
    return list(to_device(torch.cat(rows), device).split([len(row) for row in rows])) if rows else []


def token_divergence(student: Tensor, teacher: Tensor, kind: Divergence) -> Tensor:
    """(n,) fp32 nats of logits student (n, V) and teacher (n, V') of any dtype; differentiable in the student's.

    Where V and V' differ (padded vocabularies of one tokenizer) both are cut to the first min(V, V') tokens. A token
    that both rule out by -inf adds nothing. If one gives a probability to a token that the other rules out, a KL in
    that direction is infinite, by its definition; jsd never is.
    Raises ValueError for different numbers of rows.
    """
    if len(student) != len(teacher):
        raise ValueError(f"{len(student)} rows of the student's logits for {len(teacher)} of the teacher's")
    return _Compared.apply(student, teacher.detach(), kind)


def top_k_divergence(student: Tensor, ids: Tensor, logprobs: Tensor, kind: Divergence) -> Tensor:
    """(n,) fp32 nats over k + 1 categories: the teacher's likeliest tokens ids (n, k), of log-probabilities (n, k) at
    kind.temperature, and all other tokens as one. Differentiable in the student's logits (n, V).

    A lower bound of the whole divergence (merging tokens never increases it). Tokens that the student does not have
    (ids of V or more) are left out. The teacher's probability of the other tokens is 1 minus the sum of these, in fp32:
    accurate to 0.1% from 1e-4 on, to 10% at 1e-6; less counts as that much.
    Raises ValueError for different shapes.
    """
    if ids.shape != logprobs.shape or len(ids) != len(student):
        raise ValueError(f"{tuple(ids.shape)} token ids and {tuple(logprobs.shape)} log-probabilities for "
                         f"{len(student)} rows of logits")
    size = student.shape[1]
    rest = 1 - logprobs.double().exp().sum(-1, keepdim=True)
    teacher = torch.cat([logprobs.float(), rest.clamp(min=_LEAST_REST).log().float()], -1)
    words = torch.where(ids < size, ids, ids[:, :1]).clamp(max=size - 1)  # a missing token is replaced by the likeliest
    grouped = _Grouped.apply(student, words, kind.temperature)
    has_others = (ids < size).sum(-1, keepdim=True) < size
    has_others &= ~grouped[:, -1:].isneginf() | (rest > _LEAST_REST)  # or both give them probability 0
    is_left_out = torch.cat([ids >= size, ~has_others], -1)
    return _Compared.apply(grouped.masked_fill(is_left_out, -torch.inf), teacher.masked_fill(is_left_out, -torch.inf),
                           Divergence(kind.kind, kind.beta))


def top_k_logprobs(logits: Tensor, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of logits (n, V), likeliest first: ids (n, k) long and their log-probabilities (n, k) fp32
    under softmax(logits / temperature). All V of them if k is larger. Not differentiable."""
    logits = logits.detach()
    ids = logits.topk(min(k, logits.shape[1]), -1).indices
    logprobs = torch.empty_like(ids, dtype=torch.float32)
    for rows in _blocks(logits):
        logprobs[rows] = _scaled(logits[rows], temperature).log_softmax(-1).gather(-1, ids[rows])
    return ids, logprobs


class _Compared(torch.autograd.Function):
    """logits student (n, V), teacher (n, V') -> divergence (n,), and its gradient by the student's.

    With s = softmax(student / T): d KL(t || s) / d student_j = (s_j - t_j) / T, d KL(s || t) / d student_j =
    s_j (log(s_j / t_j) - KL(s || t)) / T, and d jsd / d student_j the same with m in place of t, times 1 - beta.
    Saved for the backward pass: both logits in their own dtype. Log-probabilities are recomputed from them: with a
    log-normaliser rounded to fp32, those of a confident model would not sum to 1 as closely as the gradient needs.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, kind: Divergence) -> Tensor:
        width = min(student.shape[1], teacher.shape[1])
        divergence = student.new_empty(len(student), dtype=torch.float32)
        for rows in _blocks(student):
            s, t = (_scaled(logits[rows, :width], kind.temperature).log_softmax(-1) for logits in (student, teacher))
            divergence[rows] = _divergence(s, t, kind)
        ctx.save_for_backward(student, teacher)
        ctx.kind, ctx.width = kind, width
        return divergence

    @staticmethod
    def backward(ctx: Any, by_divergence: Tensor) -> tuple[Tensor, None, None]:
        student, teacher = ctx.saved_tensors
        temperature, width = ctx.kind.temperature, ctx.width
        gradient = torch.empty_like(student)
        gradient[:, width:] = 0
        for rows in _blocks(student):
            s, t = (_scaled(logits[rows, :width], temperature).log_softmax(-1) for logits in (student, teacher))
            gradient[rows, :width] = _gradient(s, t, ctx.kind).mul_(by_divergence[rows, None] / temperature)
        return gradient, None, None


class _Grouped(torch.autograd.Function):
    """logits (n, V), ids (n, k) -> (n, k + 1) fp32: the named tokens' logits / T, and log sum exp of all others'."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        grouped = logits.new_empty(len(ids), ids.shape[1] + 1, dtype=torch.float32)
        for rows in _blocks(logits):
            x = _scaled(logits[rows], temperature)
            grouped[rows, :-1] = x.gather(-1, ids[rows])
            grouped[rows, -1] = x.scatter_(-1, ids[rows], -torch.inf).logsumexp(-1)
        ctx.save_for_backward(logits, ids, grouped[:, -1:].clamp(min=-1e30))  # -inf without others
        ctx.temperature = temperature
        return grouped

    @staticmethod
    def backward(ctx: Any, by_grouped: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, others = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in _blocks(logits):
            x = _scaled(logits[rows], ctx.temperature).scatter_(-1, ids[rows], -torch.inf)
            x.sub_(others[rows]).exp_().mul_(by_grouped[rows, -1:])
            gradient[rows] = x.scatter_add_(-1, ids[rows], by_grouped[rows, :-1]).div_(ctx.temperature)
        return gradient, None, None


def _divergence(student: Tensor, teacher: Tensor, kind: Divergence) -> Tensor:
    """(n,) from log-probabilities (n, V) each, which are overwritten."""
    s, t = student.exp(), teacher.exp()
    if kind.kind == "forward_kl":
        return _expected(teacher.sub_(student), t).sum(-1)
    if kind.kind == "reverse_kl":
        return _expected(student.sub_(teacher), s).sum(-1)
    mixture = _log_mixture(s, t, kind.beta)
    return (_expected(teacher.sub_(mixture), t).sum(-1) * kind.beta
            + _expected(student.sub_(mixture), s).sum(-1) * (1 - kind.beta))


def _gradient(student: Tensor, teacher: Tensor, kind: Divergence) -> Tensor:
    """(n, V): the gradient of `_divergence` by the student's logits (over the temperature); its log-probabilities
    (n, V) each are overwritten."""
    s, t = student.exp(), teacher.exp()
    if kind.kind == "forward_kl":
        return s.sub_(t)
    weight, other = (1 - kind.beta, _log_mixture(s, t, kind.beta)) if kind.kind == "jsd" else (1.0, teacher)
    terms = _expected(student.sub_(other), s)
    return terms.addcmul_(s, terms.sum(-1, keepdim=True), value=-1).mul_(weight)


def _expected(values: Tensor, probabilities: Tensor) -> Tensor:
    """values times probabilities, in place; 0 where the probability is 0, even for an infinite value."""
    return values.mul_(probabilities).masked_fill_(probabilities == 0, 0)


def _log_mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    return (student * (1 - beta)).add_(teacher, alpha=beta).clamp_(min=_TINY).log_()


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Blocks of rows of a quarter of the size: several fp32 copies of each exist at once."""
    for rows in likelihood._blocks(logits):
        size = max(1, (rows.stop - rows.start) // 4)
        yield from (slice(start, min(start + size, rows.stop)) for start in range(rows.start, rows.stop, size))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """A fresh logits / temperature in fp32."""
    x = logits.to(torch.float32, copy=True)
    return x if temperature == 1.0 else x.div_(temperature)
