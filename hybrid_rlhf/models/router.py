"""The load-balancing loss of a mixture of experts, as a sum over tokens.

Source: Switch Transformer, 2101.03961, equations 4-6: E sum_e f_e P_e over the tokens of all layers, f_e the share of
the top-k choices that fell on expert e (summed over k), P_e its mean probability. No gradient passes through f. So once
f is that of the whole minibatch, the loss is a sum over its tokens, for any split into micro-batches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.tensors import SequenceBatch, to_device
from hybrid_rlhf.models.backbone import own_router_loss, router_coefficient

_log = logging.getLogger(__name__)
_KNOWN: WeakKeyDictionary[nn.Module, Router | None] = WeakKeyDictionary()


@dataclass(frozen=True)
class Router:
    """How a model's routers are balanced. coefficient: the loss's weight. num_choices: experts per token (k), or None
    where the model has a different loss, which is then computed within each forward."""

    coefficient: float
    num_choices: int | None

    def choices(self, router_logits: tuple[Tensor, ...], counts: Tensor) -> Tensor:
        """(E,) fp32: how often each expert is among the top k of a real token, summed over layers.

        counts (tokens,): how many real tokens each row of the logits stands for; 0 for padding.
        """
        chosen_by = counts.float()
        choices = torch.zeros(router_logits[0].shape[-1], device=counts.device)
        for probabilities in _probabilities(router_logits):
            chosen = probabilities.topk(self.num_choices, -1).indices
            choices.scatter_add_(0, chosen.flatten(), chosen_by.repeat_interleave(self.num_choices))
        return choices

    def shares(self, choices: Tensor) -> Tensor:
        """(E,) f: choices per token, which sum to k."""
        return self.num_choices * choices / choices.sum()

    def loss(self, model: nn.Module, batch: SequenceBatch, hidden: Tensor, router_logits: tuple[Tensor, ...],
             shares: Tensor | None = None, counts: Tensor | None = None) -> Tensor:
        """The loss (a scalar, without its coefficient) of these real tokens. shares: (E,) f of the whole minibatch, or
        None where these tokens are all of it. counts: as in `choices`, where the logits are not of all the batch's
        tokens; requires num_choices."""
        if self.num_choices is None:
            return own_router_loss(model, batch, hidden, router_logits)
        counts = (batch.attention_mask.flatten() if counts is None else counts).float()
        if shares is None:
            with torch.no_grad():
                shares = self.shares(self.choices(router_logits, counts))
        total = sum(counts @ probabilities.float() for probabilities in _probabilities(router_logits))
        return len(shares) * (to_device(shares, total.device) * total).sum() / (len(router_logits) * counts.sum())


def _probabilities(router_logits: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """(B x T, E) of each layer, in the logits' dtype, as transformers takes them."""
    return (logits.flatten(0, -2).softmax(-1) for logits in router_logits)


def router_of(model: nn.Module) -> Router | None:
    """How the experts of `model` are balanced; None without experts, or without a loss for them. Cached per model;
    first called before its weights are partitioned."""
    if model not in _KNOWN:
        _KNOWN[model] = _find_router(model)
    return _KNOWN[model]


def _find_router(model: nn.Module) -> Router | None:
    coefficient = router_coefficient(model)
    if not coefficient:
        return None
    num_choices = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    is_plain = num_choices is not None and _is_plain(model, Router(coefficient, num_choices))
    if is_plain is None:
        return None
    if not is_plain:
        _log.warning("%s balances its experts by a loss of its own, taken within each micro-batch: how a minibatch is "
                     "cut moves it a little", type(model).__name__)
        num_choices = None
    return Router(coefficient, num_choices)


@torch.no_grad()
def _is_plain(model: nn.Module, router: Router) -> bool | None:
    """Whether the model's own loss equals the formula above, tried on random logits; None for a dense model."""
    config, weight = model.config.get_text_config(), model.get_output_embeddings().weight
    num_experts = next((v for n in ("num_local_experts", "num_experts", "n_routed_experts")
                        if (v := getattr(config, n, None))), None)
    if num_experts is None or num_experts < router.num_choices:
        return False
    draw = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(10, num_experts, generator=draw).to(weight.device) for _ in range(2))
    ids, mask = torch.zeros(2, 5, dtype=torch.long, device=weight.device), torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    batch = SequenceBatch(ids, mask.to(weight.device), mask.to(weight.device))
    hidden = torch.zeros(2, 5, config.hidden_size, dtype=weight.dtype, device=weight.device)
    try:
        expected = own_router_loss(model, batch, hidden, logits)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    if expected is None:
        return None
    loss = router.loss(model, batch, hidden, logits)
    return bool(torch.isclose(loss.float(), torch.as_tensor(expected).float(), rtol=1e-4))
