"""Scalar models: a backbone with a scalar head, for critics and reward models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.tensors import SequenceBatch
from hybrid_rlhf.models.backbone import hidden_states
from hybrid_rlhf.models.shared_prefix import NotShareableError, distinct_states, packing, say_whole, sharing_is_exact


class ScalarModel(nn.Module):
    """A backbone with a scalar head (num_labels 1): one fp32 number per position, (B, T).

    The number at t is a function of the tokens up to t: a critic reads it where a token is predicted, a reward model
    at the last real token; at padding stands anything. mean and std put the number on another scale,
    (number - mean) / std: a critic that starts as a copy of the reward model predicts the actor's reward, which is
    the normalised score.
    """

    def __init__(self, model: nn.Module, mean: float = 0.0, std: float = 1.0) -> None:
        super().__init__()
        self.model, self.mean, self.std = model, mean, std
        self._can_share: bool | None = None

    def can_share(self) -> bool:
        """Whether the common beginning of rows, such as chosen and rejected, is computed once; the first call tries it
        on the model. Before that call, and where it is False, `forward` computes every row in full."""
        if self._can_share is None:
            self._can_share = sharing_is_exact(self.model)
        return bool(self._can_share)

    def forward(self, batch: SequenceBatch) -> Tensor:
        packed = packing(batch) if self._can_share and batch.position_ids is None else None
        if packed is not None:
            try:
                return self._numbers(distinct_states(self.model, batch, packed))[packed.index]
            except NotShareableError as error:  # for these rows alone: they are longer than the trial's
                say_whole(self.model, str(error), is_packed=False)
        return self._numbers(hidden_states(self.model, batch))

    def _numbers(self, hidden: Tensor) -> Tensor:
        """(.., H) -> (..)."""
        score = self.model.score
        numbers = nn.functional.linear(hidden.float(), score.weight.float()).squeeze(-1)
        return (numbers - self.mean) / self.std


class BackboneWithHead(nn.Module):
    """The model of a ScalarModel made of a backbone of text that roles may share and a separate head. joint: the module
    around the backbone that joins images and text (the backbone itself, where there are no images)."""

    def __init__(self, backbone: nn.Module, score: nn.Module, joint: nn.Module | None = None) -> None:
        super().__init__()
        self.base_model, self.score = backbone, score
        self.joint = (backbone if joint is None else joint,)  # in a tuple, so that it is not a second submodule


def head_of(weight: Tensor, *, is_trained: bool) -> nn.Linear:
    """A scalar head in fp32 from `weight` (1, H)."""
    head = nn.Linear(weight.shape[1], 1, bias=False, dtype=torch.float32)
    with torch.no_grad():
        head.weight.copy_(weight)
    return head.requires_grad_(is_trained)


def zero_head(hidden_size: int, *, is_trained: bool) -> nn.Linear:
    """A new scalar head that predicts 0. Hidden states of a pretrained model have a large scale: the predictions of a
    random head would start far from their targets."""
    return head_of(torch.zeros(1, hidden_size), is_trained=is_trained)
