"""Turn dropout off, in modules and configuration, so that a model computes the same in training and evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.tensors import SequenceBatch
from hybrid_rlhf.models.backbone import hidden_states
from hybrid_rlhf.models.weight_parts import computing

_BOUNDS = {torch.float32: 1e-3}  # on the relative difference of hidden states; 16-bit modes may round differently
_BOUND = 0.03
_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def disable_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout rate of `model` to zero: in dropout modules, in number attributes of any module and in the
    configurations that forwards read, whatever has "drop" in its name. In place; `dropout_in_config` has the old ones.
    """
    configs = {id(m.config): m.config for m in model.modules() if hasattr(getattr(m, "config", None), "__dict__")}
    for module in model.modules():
        if isinstance(module, _LAYERS):
            module.p = 0.0
        for name in _rates(module):
            setattr(module, name, 0.0)
    of_config = [(config, name, vars(config)[name]) for config in configs.values() for name in _rates(config)]
    for config, name, _ in of_config:
        setattr(config, name, 0.0)
    model.dropout_of_config = [*getattr(model, "dropout_of_config", ()), *of_config]
    return model


def without_dropout(model: nn.Module) -> nn.Module:
    """`disable_dropout`, and a UserError if training and evaluation still differ. In place."""
    check_trains_as_it_evaluates(disable_dropout(model))
    return model


def draws_in_training(model: nn.Module) -> bool:
    """Whether a forward in training may draw random numbers: dropout, or the noise of a router."""
    owners = [*model.modules(), *(m.config for m in model.modules() if hasattr(getattr(m, "config", None), "__dict__"))]
    return any((isinstance(owner, _LAYERS) and owner.p > 0) or _rates(owner, "drop", "jitter", "noise")
               for owner in owners)


def _rates(owner: object, *names: str) -> list[str]:
    """Names of the attributes that are rates above zero, those of dropout if no `names` are given."""
    return [name for name, value in vars(owner).items()
            if any(part in name.lower() for part in names or ("drop",))
            and type(value) in (int, float) and 0 < value <= 1]


@contextmanager
def dropout_in_config(model: nn.Module) -> Iterator[None]:
    """Within the block the configuration has the rates from before `disable_dropout`, so that the saved model keeps
    them."""
    rates = getattr(model, "dropout_of_config", [])
    for config, name, value in rates:
        setattr(config, name, value)
    try:
        yield
    finally:
        for config, name, _ in rates:
            setattr(config, name, 0.0)


@torch.no_grad()
def check_trains_as_it_evaluates(model: nn.Module) -> None:
    """Raise UserError if the hidden states of a few tokens differ between training and evaluation mode: an update would
    be of another model than the one that was sampled. Random number generators are left unchanged.
    """
    weight = next(model.parameters())
    ids = torch.arange(3, 15, device=weight.device)[None] % model.config.get_text_config().vocab_size
    mask, training, states = torch.ones_like(ids, dtype=torch.bool), model.training, []
    with torch.random.fork_rng(devices=[weight.device] if weight.device.type == "cuda" else []):
        for mode in (False, True):
            torch.manual_seed(0)
            with computing(model):
                states.append(hidden_states(model.train(mode), SequenceBatch(ids, mask, mask)).float())
    model.train(training)
    difference = (states[1] - states[0]).abs().max() / states[0].abs().max().clamp(min=1e-6)
    check(bool(difference < _BOUNDS.get(weight.dtype, _BOUND)),
          f"a model of type {model.config.model_type} computes otherwise in training than in evaluation (by "
          f"{float(difference):.2g} of its hidden states), dropout aside: an update would be of another model than the "
          "one that was sampled; set the noise in its config.json to 0, such as router_jitter_noise, or take another")
