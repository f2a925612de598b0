"""Hidden states and output head of a causal model as two separate functions, for any architecture.

The head is the model's own forward with the backbone replaced by given hidden states, so that scaling, soft-capping and
bias of the logits are the architecture's own code and not a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.tensors import SequenceBatch
from hybrid_rlhf.models import images
from hybrid_rlhf.models.hf_attention import forward_parameters
from hybrid_rlhf.models.modes import evaluating
from hybrid_rlhf.models.transformers_compat import never_packed
from hybrid_rlhf.models.weight_parts import computing

MAX_LOOK_AHEAD = 0.05  # of the logits' spread: CpmAnt's change by 0.17, XLNet's by 0.68 (tiny, random)


def hidden_states(model: nn.Module, batch: SequenceBatch) -> Tensor:
    """Last hidden states (B, T, H) of the backbone of `model` (causal or sequence classification).

    Right padding needs no mask (causal models never look right); packed rows are told apart by position_ids alone,
    which transformers' mask functions understand when no attention_mask is given. Rows with images go through the
    module that joins both, and others beside them do not: in text the id of an image's token is an ordinary one. At
    ZeRO 3 all do, in one order of modules. UserError for a model that reads no images.
    """
    shown = list(map(bool, batch.images or ()))
    if all(shown) or not any(shown) or images.is_in_parts(joining(model)):
        return _states(model, batch).last_hidden_state
    parts = [torch.tensor([i for i, has in enumerate(shown) if has == which]) for which in (True, False)]
    states = [_states(model, batch.rows(index)).last_hidden_state for index in parts]
    width = batch.input_ids.shape[1]
    joined = torch.cat([nn.functional.pad(part, (0, 0, 0, width - part.shape[1])) for part in states])
    return joined.index_select(0, torch.cat(parts).argsort().to(joined.device))


def _states(model: nn.Module, batch: SequenceBatch, **options: bool) -> Any:  # of transformers
    backbone, joint = text_backbone(model), joining(model)
    if batch.images is not None and any(batch.images):
        with never_packed():
            return images.states(joint, backbone, batch.input_ids, batch.images, use_cache=False, **options)
    zero = images.blank_features(joint, images.num_blank(joint, {}))
    if zero is not None and images.is_in_parts(joint):  # one order of modules on all processes
        with never_packed():
            return images.states(joint, backbone, batch.input_ids, (), zero, use_cache=False, **options)
    if batch.position_ids is not None:
        out = backbone(input_ids=batch.input_ids, use_cache=False, position_ids=batch.position_ids, **options)
    else:
        with never_packed():  # the check would synchronise host and device
            out = backbone(input_ids=batch.input_ids, use_cache=False, **options)
    return out if zero is None else images.plus(out, zero)


def router_coefficient(model: nn.Module) -> float:
    """Weight of the router's load-balancing loss in training, from the model's own configuration; 0 without experts."""
    if "output_router_logits" not in forward_parameters(model):
        return 0.0
    return float(getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0) or 0.0)


def hidden_states_and_router_logits(model: nn.Module, batch: SequenceBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`hidden_states`, and the router logits of each layer with experts, (B x T, experts) each."""
    out = _states(model, batch, output_router_logits=True)
    return out.last_hidden_state, out.router_logits


def own_router_loss(model: nn.Module, batch: SequenceBatch, hidden: Tensor,
                    router_logits: tuple[Tensor, ...]) -> Tensor:
    """The load-balancing loss (a scalar, without its coefficient) as the model's own forward computes it from these
    states (B, T, H) and logits, over real tokens. For causal models whose router_coefficient is not 0."""
    with _backbone_replaced(model, _FixedStates(hidden[:1, :1], router_logits)):
        return causal_part(model)(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False,
                                  output_router_logits=True).aux_loss


class _Output:
    """A backbone's output: the given tensors, and None for any other attribute that a head reads."""

    def __init__(self, hidden: Tensor, router_logits: tuple[Tensor, ...] | None) -> None:
        self.last_hidden_state, self.router_logits = hidden, router_logits

    def __getattr__(self, _name: str) -> None:
        return None

    def __getitem__(self, key: int | slice) -> object:
        return (self.last_hidden_state,)[key]


class _FixedStates(nn.Module):
    """Replaces the backbone and returns the given hidden states (and router logits). Its attributes are the backbone's,
    since a head may read some (Falcon-H1's multiplier)."""

    def __init__(self, hidden: Tensor, router_logits: tuple[Tensor, ...] | None = None) -> None:
        super().__init__()
        self.hidden, self.router_logits = hidden, router_logits
        self.replaced: tuple[nn.Module, ...] = ()  # in a tuple, so that it is not registered as a submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["replaced"][0], name)

    @property
    def decoder(self) -> nn.Module:  # OPT and its variants call backbone.decoder
        return self

    def forward(self, *_args: object, **_kwargs: object) -> _Output:
        return _Output(self.hidden, self.router_logits)


@contextmanager
def _backbone_replaced(model: nn.Module, stand_in: _FixedStates) -> Iterator[None]:
    holder, name = causal_part(model), places(model).backbone
    original = getattr(holder, name)
    stand_in.replaced = (original,)
    setattr(holder, name, stand_in)
    try:
        yield
    finally:
        setattr(holder, name, original)


def own_head(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Hidden rows (N, H) -> logits (N, V), by the model's own forward."""

    def head(hidden: Tensor) -> Tensor:
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
        with _backbone_replaced(model, _FixedStates(hidden[None])):
            return causal_part(model)(input_ids=ids, use_cache=False).logits[0]

    return head


def text_logits(model: nn.Module, out: Any) -> Tensor:
    """Logits (B, T, V) from what the forward of `text_forward(model)` returned."""
    if getattr(out, "logits", None) is not None:
        return out.logits
    hidden = out.last_hidden_state
    return own_head(model)(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Raise UserError for a model that cannot be trained here: its logits change with later tokens (XLNet), or differ
    from those that `own_head` computes from the backbone's states."""
    size, name = model.config.get_text_config().vocab_size, type(model).__name__
    ids = torch.arange(8, device=next(model.parameters()).device)[None] % size
    others, mask = ids.clone(), torch.ones_like(ids, dtype=torch.bool)
    others[0, -1] = (ids[0, -1] + 1) % size
    with evaluating(model), computing(model):
        full, changed = (causal_part(model)(input_ids=tokens, use_cache=False).logits[0] for tokens in (ids, others))
        try:
            pieces = own_head(model)(hidden_states(model, SequenceBatch(ids, mask, mask))[0])
        except IndexError as error:  # ProphetNet's head reads a second output of its backbone
            raise UserError(f"{name}: its logits are not a function of its last hidden states; it cannot be trained "
                            "here") from error
    typical = (full - changed)[:-1].abs().amax(-1).median()  # rounding may send one token to another expert
    if typical > MAX_LOOK_AHEAD * (full - full.mean(-1, keepdim=True)).abs().max():
        raise UserError(f"{name}: its logits of a token change with the tokens behind it, so it does not predict them; "
                        "it cannot be trained here")
    if not torch.allclose(full, pieces, rtol=1e-4, atol=1e-4):
        raise UserError(f"{name}: its logits are not a function of its last hidden states (largest difference "
                        f"{(full - pieces).abs().max():.3g}); it cannot be trained here")


@torch.no_grad()
def packing_is_exact(model: nn.Module, tolerance: float = 1e-3) -> bool:
    """Whether two samples packed into one row give the hidden states that they have alone, tried on this model.

    False for models that carry a state along the row (Mamba, Jamba) or place tokens by an absolute mask (ALiBi):
    packing those would leak one sample into the next.
    """
    ids = torch.arange(3, 15, device=next(model.parameters()).device) % model.config.get_text_config().vocab_size
    first, second = ids[:5][None], ids[5:][None]
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None].to(ids.device)

    def states(tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(tokens, dtype=torch.bool)
        return hidden_states(model, SequenceBatch(tokens, mask, mask, position_ids)).float()

    with evaluating(model), computing(model):
        try:
            packed = states(ids[None], positions)
        except TypeError:  # the model takes no position_ids at all
            return False
        alone = torch.cat([states(first), states(second)], 1)
    scale = alone.abs().max().clamp(min=1e-6)
    bound = tolerance if alone.dtype == torch.float32 and next(model.parameters()).dtype == torch.float32 else 0.05
    return bool((packed - alone).abs().max() / scale < bound)


# -- Find the text part of a model: causal language model, backbone, text backbone -------------------------------------
#
# A composite class (ForConditionalGeneration) holds a causal language model and towers for images or sound, which text
# alone never uses. The parts are found from its embeddings, its head and its configuration's text part, and not from
# names: below the smallest module that holds both embeddings and head is the backbone, whose output the head reads, and
# inside it, or equal to it, the text backbone. `backbone.check_head` verifies it on the model.


class Places(NamedTuple):
    """Names of modules. causal: the one with embeddings and head ("": the model itself); backbone: its attribute whose
    output the head reads; text: the text model in the backbone."""

    causal: str
    backbone: str
    text: str


_places: WeakKeyDictionary[nn.Module, Places] = WeakKeyDictionary()


def places(model: nn.Module) -> Places:
    """The names of the parts of a causal or sequence classification model of transformers."""
    if model not in _places:
        _places[model] = _find(model)
    return _places[model]


def _find(model: nn.Module) -> Places:
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    head = getattr(model, "score", None) if head is None else head
    holder, name = model, ""
    while True:
        child, part = next((n, m) for n, m in holder.named_children() if any(e is embeddings for e in m.modules()))
        path = f"{name}.{child}" if name else child
        if not any(m is head for m in part.modules()):
            break
        holder, name = part, path
    kind = model.config.get_text_config().model_type
    text = next((n for n, m in part.named_modules() if getattr(getattr(m, "config", None), "model_type", None) == kind),
                "")
    return Places(name, child, f"{path}.{text}" if text else path)


def causal_part(model: nn.Module) -> nn.Module:
    """The causal model: `model`, or the module inside it with its embeddings and its head (Llama 4)."""
    return model.get_submodule(places(model).causal)


def text_forward(model: nn.Module) -> nn.Module:
    """The module whose forward is run for text alone: the causal part, or, where that would use towers, the text
    backbone, to whose states `backbone.text_logits` applies the head. There the ids of images and sound, which a policy
    may sample, are ordinary tokens, in decoding as in training."""
    causal, backbone, text = places(model)
    is_plain = text == (f"{causal}.{backbone}" if causal else backbone)
    return model.get_submodule(causal if is_plain else text)


def text_backbone(model: nn.Module) -> nn.Module:
    """The module that computes the hidden states of tokens; for a BackboneWithHead its backbone."""
    return model.get_submodule(places(model).text) if hasattr(model, "config") else model.base_model


def joining(model: nn.Module) -> nn.Module:
    """The module of an image-text model that joins images and text, and computes the hidden states of both; the model
    itself, if its causal part is inside and of text (Llama 4); for a BackboneWithHead that of its backbone's model."""
    if not hasattr(model, "config"):
        return model.joint[0]
    causal, backbone, _ = places(model)
    if causal and hasattr(model, "get_image_features"):
        return model
    return model.get_submodule(f"{causal}.{backbone}" if causal else backbone)


def reads_text(model: nn.Module) -> Callable[[str], bool]:
    """A function that tells whether text uses the module or parameter of a name: each one of a plain model, and not the
    towers of a composite one."""
    causal, backbone, text = places(model)
    prefix = f"{causal}." if causal else ""

    def is_of_text(name: str) -> bool:  # also modules that contain the text part
        return f"{name}.".startswith(f"{text}.") or (
            f"{name}.".startswith(prefix) and not name.startswith(f"{prefix}{backbone}."))

    return is_of_text


def towers(model: nn.Module) -> list[str]:
    """Names of the outermost modules that text does not use; empty for a plain model."""
    is_of_text = reads_text(model)
    names = [n for n, _ in model.named_modules() if n and not is_of_text(n)]
    return [n for n in names if n.rpartition(".")[0] not in names]
