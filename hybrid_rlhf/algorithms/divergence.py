"""How far a student's distribution over the next word is from a teacher's, and what a teacher says of a batch's tokens.

The whole vocabulary counts, or the teacher's k likeliest words and all others as one. Logits come and go in chunks of
tokens (algorithms/likelihood.py); their fp32 copies exist for a block of rows only, and gradients are written by hand.
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
_LEAST_REST = 2.0**-20  # of a probability that is 1 minus others: what is less may be fp32's rounding of these
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
    """What a teacher says of the loss tokens of a batch, row by row, each row's in order.

    rows: of each row the hidden states (n, H) that predict its loss tokens, and head: such states -> logits (n, V). Or,
    with ids: of each row the teacher's k likeliest words (n, k) long, and rows are their log-probabilities (n, k) fp32
    at kind.temperature; head is None.
    """

    kind: Divergence
    rows: list[Tensor]
    ids: list[Tensor] | None = None
    head: Callable[[Tensor], Tensor] | None = None

    def select(self, index: Tensor) -> TeacherTargets:
        """Those of the rows `index` of the batch, in that order."""
        chosen = index.tolist()
        ids = None if self.ids is None else [self.ids[i] for i in chosen]
        return self._replace(rows=[self.rows[i] for i in chosen], ids=ids)

    def to(self, device: torch.device | str) -> TeacherTargets:
        return self._replace(rows=_moved(self.rows, device), ids=None if self.ids is None else _moved(self.ids, device))

    def flat(self) -> tuple[Tensor, ...]:
        """All tokens' in one: what `divergence` takes beside the student's logits, rows (N, ..) and ids (N, k)."""
        return (torch.cat(self.rows),) if self.ids is None else (torch.cat(self.rows), torch.cat(self.ids))

    def divergence(self, student: Tensor, rows: Tensor, ids: Tensor | None = None) -> Tensor:
        """(n,) fp32 nats of the student's logits (n, V) of some tokens and what `flat` has of the same; the teacher's
        logits exist for these tokens only, and without gradients."""
        if ids is not None:
            return top_k_divergence(student, ids, rows, self.kind)
        if self.head is None:
            raise ValueError("a teacher's hidden states without its head")
        with torch.no_grad():
            logits = self.head(rows)
        return token_divergence(student, logits, self.kind)


def _moved(rows: list[Tensor], device: torch.device | str) -> list[Tensor]:
    """In one copy: an accelerator would start one for each row."""
    return list(to_device(torch.cat(rows), device).split([len(row) for row in rows])) if rows else []


def token_divergence(student: Tensor, teacher: Tensor, kind: Divergence) -> Tensor:
    """(n,) fp32 nats of logits student (n, V) and teacher (n, V') of any dtype; differentiable in the student's.

    Where V and V' differ (padded vocabularies of one tokenizer) both are cut to the first min(V, V') words. A word that
    both rule out by -inf adds nothing. Where one gives a probability to a word that the other rules out, a KL in that
    direction is infinite, as its definition says; jsd never is.
    Raises ValueError for unlike numbers of tokens.
    """
    if len(student) != len(teacher):
        raise ValueError(f"{len(student)} rows of the student's logits for {len(teacher)} of the teacher's")
    return _Compared.apply(student, teacher.detach(), kind)


def top_k_divergence(student: Tensor, ids: Tensor, logprobs: Tensor, kind: Divergence) -> Tensor:
    """(n,) fp32 nats over k + 1 categories: the teacher's likeliest words ids (n, k), of log-probabilities (n, k) at
    kind.temperature, and all other words as one. Differentiable in the student's logits (n, V).

    A lower bound of the whole divergence (merging words never makes two distributions easier to tell apart). Words that
    the student does not have (ids of V or more) are left out. What the teacher gives its other words is 1 minus what it
    gives these, in fp32: from one in 10,000 on known to 0.1%, of one in a million to 10%, and less counts as that much.
    Raises ValueError for unlike shapes.
    """
    if ids.shape != logprobs.shape or len(ids) != len(student):
        raise ValueError(f"{tuple(ids.shape)} words and {tuple(logprobs.shape)} log-probabilities for "
                         f"{len(student)} rows of logits")
    size = student.shape[1]
    rest = 1 - logprobs.double().exp().sum(-1, keepdim=True)
    teacher = torch.cat([logprobs.float(), rest.clamp(min=_LEAST_REST).log().float()], -1)
    words = torch.where(ids < size, ids, ids[:, :1]).clamp(max=size - 1)  # no word is named that was not meant
    found = _Grouped.apply(student, words, kind.temperature)
    has_others = (ids < size).sum(-1, keepdim=True) < size
    has_others &= ~found[:, -1:].isneginf() | (rest > _LEAST_REST)  # or neither gives them anything
    is_left_out = torch.cat([ids >= size, ~has_others], -1)
    return _Compared.apply(found.masked_fill(is_left_out, -torch.inf), teacher.masked_fill(is_left_out, -torch.inf),
                           Divergence(kind.kind, kind.beta))


def top_k_logprobs(logits: Tensor, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The k likeliest words of logits (n, V), likeliest first: ids (n, k) long and their log-probabilities (n, k) fp32
    under softmax(logits / temperature). All V of them where k is more. Not differentiable."""
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
    Kept for the backward pass: both logits in their own dtype. Log-probabilities are computed again from them: with a
    log-normaliser that was rounded to fp32, those of a sure model would not sum to 1 as well as its gradient needs.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, kind: Divergence) -> Tensor:
        width = min(student.shape[1], teacher.shape[1])
        found = student.new_empty(len(student), dtype=torch.float32)
        for rows in _blocks(student):
            s, t = (_scaled(logits[rows, :width], kind.temperature).log_softmax(-1) for logits in (student, teacher))
            found[rows] = _divergence(s, t, kind)
        ctx.save_for_backward(student, teacher)
        ctx.kind, ctx.width = kind, width
        return found

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
    """logits (n, V), ids (n, k) -> (n, k + 1) fp32: the named words' logits / T, and log sum exp of all others'."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        found = logits.new_empty(len(ids), ids.shape[1] + 1, dtype=torch.float32)
        for rows in _blocks(logits):
            x = _scaled(logits[rows], temperature)
            found[rows, :-1] = x.gather(-1, ids[rows])
            found[rows, -1] = x.scatter_(-1, ids[rows], -torch.inf).logsumexp(-1)
        ctx.save_for_backward(logits, ids, found[:, -1:].clamp(min=-1e30))  # -inf where no others are
        ctx.temperature = temperature
        return found

    @staticmethod
    def backward(ctx: Any, by_found: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, others = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in _blocks(logits):
            x = _scaled(logits[rows], ctx.temperature).scatter_(-1, ids[rows], -torch.inf)
            x.sub_(others[rows]).exp_().mul_(by_found[rows, -1:])
            gradient[rows] = x.scatter_add_(-1, ids[rows], by_found[rows, :-1]).div_(ctx.temperature)
        return gradient, None, None


def _divergence(student: Tensor, teacher: Tensor, kind: Divergence) -> Tensor:
    """(n,) of log-probabilities (n, V) each, which are written over."""
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
    (n, V) each are written over."""
    s, t = student.exp(), teacher.exp()
    if kind.kind == "forward_kl":
        return s.sub_(t)
    weight, other = (1 - kind.beta, _log_mixture(s, t, kind.beta)) if kind.kind == "jsd" else (1.0, teacher)
    terms = _expected(student.sub_(other), s)
    return terms.addcmul_(s, terms.sum(-1, keepdim=True), value=-1).mul_(weight)


def _expected(values: Tensor, probabilities: Tensor) -> Tensor:
    """values times probabilities, in place; 0 for what is never seen, whatever its value."""
    return values.mul_(probabilities).masked_fill_(probabilities == 0, 0)


def _log_mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    return (student * (1 - beta)).add_(teacher, alpha=beta).clamp_(min=_TINY).log_()


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Blocks of rows of a quarter of the size: several fp32 copies of each are there at once."""
    for rows in likelihood._blocks(logits):
        size = max(1, (rows.stop - rows.start) // 4)
        yield from (slice(start, min(start + size, rows.stop)) for start in range(rows.start, rows.stop, size))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """A fresh logits / temperature in fp32."""
    x = logits.to(torch.float32, copy=True)
    return x if temperature == 1.0 else x.div_(temperature)
