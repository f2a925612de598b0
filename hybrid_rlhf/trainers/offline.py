"""Offline preference optimisation: DPO and its variants on pairs, KTO on labelled responses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.preference import LOSSES, kto_kl
from hybrid_rlhf.core.distributed import sum_over_ranks
from hybrid_rlhf.core.errors import check, present
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.options import check_values, one_of, within
from hybrid_rlhf.core.tensors import SequenceBatch, to_device
from hybrid_rlhf.data.collate import LabelledBatch, PairBatch
from hybrid_rlhf.roles import Actor, Reference
from hybrid_rlhf.roles.role_state import load_training_state, oom_limits, training_state

SMOOTHED = ("sigmoid", "simpo")


@dataclass(frozen=True)
class DPOConfig:
    """Settings of offline preference optimisation.

    Attributes:
        loss_type: sigmoid (DPO), ipo, hinge, kto, orpo or simpo.
        beta: Strength of the implicit KL penalty to the reference, or the loss's own factor (simpo's scale, orpo's
            weight of the odds ratio); null takes the usual one: 0.1, for simpo 2.0.
        label_smoothing: Assumed share of pairs with a wrong label (sigmoid and simpo).
        simpo_gamma: SimPO's target margin.
        desirable_weight: KTO's weight of desirable responses.
        undesirable_weight: KTO's weight of undesirable responses.
    """

    loss_type: str = one_of("sigmoid", LOSSES)
    beta: float | None = None
    label_smoothing: float = within(0.0, "[0, 0.5)")
    simpo_gamma: float = within(1.0, "[0,")
    desirable_weight: float = within(1.0, "[0,")
    undesirable_weight: float = within(1.0, "[0,")

    def __post_init__(self) -> None:
        check_values(self, "dpo.")
        check(self.beta is None or 0 < self.beta < float("inf"), f"dpo.beta is {self.beta}; it must be positive, such "
                                                                 f"as {LOSSES[self.loss_type].beta}")
        check(not self.label_smoothing or self.loss_type in SMOOTHED,
              f"dpo.label_smoothing: the {self.loss_type} loss has none; leave it out, or take {' or '.join(SMOOTHED)}")


class OfflineTrainer:
    """Fits a policy to preferences, against the frozen reference where the loss has one.

    Batches: PairBatch, or LabelledBatch for a loss without pairs. The reference is evaluated once per batch; the
    policy's log-probabilities are summed over the response (averaged if the loss is defined so).
    """

    progress_keys = ("loss", "rewards/accuracies", "rewards/margins", "learning_rate")
    can_rehearse = True  # a step's only effects are its optimizer's and those on this object

    def __init__(self, policy: Actor, reference: Reference | None, config: DPOConfig) -> None:
        self.row = LOSSES[config.loss_type]
        if self.row.needs_reference != (reference is not None):
            raise ValueError(f"{config.loss_type} {'needs a' if self.row.needs_reference else 'has no'} reference")
        self.policy, self.reference, self.config = policy, reference, config
        self.beta = self.row.beta if config.beta is None else config.beta
        self.fn = partial(self.row.fn, beta=self.beta, label_smoothing=config.label_smoothing,
                          simpo_gamma=config.simpo_gamma, desirable_weight=config.desirable_weight,
                          undesirable_weight=config.undesirable_weight)

    def step(self, batch: PairBatch | LabelledBatch, start: Tensor | None = None) -> Metrics:
        """One optimizer step. start: the reference's (rows,) log-probabilities of the responses, if they are known.

        An empty batch takes part in the other processes' collectives.
        """
        count = sum_over_ranks(torch.tensor(float(len(batch))))
        groups, losses, metrics = self._groups(batch), *self._losses(batch, start)

        def share(logprobs: Tensor, index: Tensor) -> tuple[Tensor, dict]:
            values, observed = losses(logprobs, index)
            return values.sum() / to_device(count, values.device), observed

        metrics += self.policy.fit_sequences(batch.sequences, groups, share)
        return self._with_margins(metrics)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[PairBatch | LabelledBatch]) -> Metrics:
        """The metrics of `step` for loss, rewards and log-probabilities, over all batches."""
        total = Metrics()
        for batch in batches:
            groups, losses, metrics = self._groups(batch), *self._losses(batch)
            logprobs = self.policy.sequence_logprobs(batch.sequences)
            for name, (mean, weight) in losses(logprobs[groups.T], torch.arange(len(batch)))[1].items():
                metrics.add(name, mean, weight)
            total += metrics
        return self._with_margins(total.over_ranks())

    def _groups(self, batch: PairBatch | LabelledBatch) -> Tensor:
        """(G, 2) rows of each pair (chosen ones come first in the batch), or (G, 1): single responses."""
        return torch.arange(len(batch.sequences)).view(2 if self.row.needs_pairs else 1, len(batch)).T

    def _losses(self, batch: PairBatch | LabelledBatch, start: Tensor | None = None) -> tuple:
        """A function (logprobs (k, g), index (g,)) -> (losses (g,), metrics), and metrics of the whole batch."""
        lengths = batch.sequences.loss_mask[:, 1:].sum(1).clamp(min=1)
        if self.reference is None:
            start = torch.zeros(len(lengths))
        elif start is None:
            start = self.reference.sequence_logprobs(batch.sequences)
        groups, metrics = self._groups(batch), Metrics()
        kl = torch.zeros(())
        if isinstance(batch, LabelledBatch):
            kl = self._kl(batch.mismatched)
            metrics.add("kl", kl)

        def losses(logprobs: Tensor, index: Tensor) -> tuple[Tensor, dict]:
            size, before = (to_device(x[groups[index].T], logprobs.device) for x in (lengths, start))
            ratios = logprobs - before
            values = ratios / size if self.row.is_mean else ratios
            shown = (logprobs.detach(), ratios.detach()) if self.row.needs_reference else (values.detach(),) * 2
            if isinstance(batch, PairBatch):
                losses_of_rows = self.fn(values[0], values[1])
                return losses_of_rows, _of_pairs(losses_of_rows.detach(), *shown, self.beta)
            labels = batch.labels[index]
            losses_of_rows = self.fn(values[0], to_device(labels, logprobs.device), to_device(kl, logprobs.device))
            return losses_of_rows, _of_labels(losses_of_rows.detach(), shown[0][0], shown[1][0], labels, self.beta)

        return losses, metrics

    def _kl(self, mismatched: SequenceBatch) -> Tensor:
        reference = present(self.reference, "the reference")
        ratios = self.policy.sequence_logprobs(mismatched) - reference.sequence_logprobs(mismatched)
        return kto_kl(ratios, sum_over_ranks)

    def _with_margins(self, metrics: Metrics) -> Metrics:
        """Add the margin of labelled responses, which have no pairs: the difference of the two means."""
        means = metrics.compute()
        if not self.row.needs_pairs and {"rewards/chosen", "rewards/rejected"} <= means.keys():
            metrics.add("rewards/margins", means["rewards/chosen"] - means["rewards/rejected"])
        return metrics

    def samples(self) -> list[dict]:
        return []

    def state(self) -> dict:
        """Everything that the next step depends on; the tensors are not copied."""
        return {"policy": training_state(self.policy),
                "oom_limits": {name: dict(role.engine.oom_limits) for name, role in self._roles().items()}}

    def load_state(self, state: Mapping) -> None:
        """Restore `state`."""
        load_training_state(self.policy, state["policy"])
        for name, role in self._roles().items():
            role.engine.oom_limits = dict(oom_limits(state)[name])

    def _roles(self) -> dict[str, Actor | Reference]:
        return {"policy": self.policy} | ({"reference": self.reference} if self.reference is not None else {})


def _of_pairs(losses: Tensor, logprobs: Tensor, ratios: Tensor, beta: float) -> dict[str, tuple[Tensor, int]]:
    """The metrics of g pairs, by TRL's names. logprobs, ratios (2, g): chosen and rejected."""
    size, (chosen, rejected) = len(losses), beta * ratios
    return {"loss": (losses.mean(), size), "rewards/chosen": (chosen.mean(), size),
            "rewards/rejected": (rejected.mean(), size),
            "rewards/accuracies": ((chosen > rejected).float().mean(), size),
            "rewards/margins": ((chosen - rejected).mean(), size), "logps/chosen": (logprobs[0].mean(), size),
            "logps/rejected": (logprobs[1].mean(), size)}


def _of_labels(losses: Tensor, logprobs: Tensor, ratios: Tensor, labels: Tensor,
               beta: float) -> dict[str, tuple[Tensor, int]]:
    """The metrics of B labelled responses, each side averaged over its own number. labels: on the CPU."""
    metrics = {"loss": (losses.mean(), len(losses))}
    for side, is_meant in (("chosen", labels), ("rejected", ~labels)):
        which = is_meant.nonzero()[:, 0]
        if size := len(which):
            which = to_device(which, losses.device)
            metrics |= {f"rewards/{side}": (beta * ratios[which].mean(), size),
                        f"logps/{side}": (logprobs[which].mean(), size)}
    return metrics
