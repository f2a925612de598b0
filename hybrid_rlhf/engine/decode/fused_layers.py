"""Decoder layers computed by one kernel call each, in decode steps of models whose layers the kernel covers.

The kernel covers Llama's layer (norm, attention by four matrices over rotary positions, norm, gated MLP, both added to
their input) and OPT's (LayerNorm, no rotation, no gate). A layer is not recognised by the model's name: one with
exactly these parts is run over random slots beside the kernel, and replaced only where outputs and cache agree to
rounding. A matrix may have a LoRA adapter in bf16, and on a card be in 4 or 8 bits. Prompts, masked steps, layers with
hooks and other adapters run by the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.errors import present
from hybrid_rlhf.core.memory import is_out_of_memory
from hybrid_rlhf.core.tensors import PackedMatrix
from hybrid_rlhf.core.torch_compat import is_hooked
from hybrid_rlhf.engine.decode.attention import IGNORED_ARGUMENTS
from hybrid_rlhf.engine.decode.kv_cache import KeyValueRows, StateRows, Step
from hybrid_rlhf.kernels.fusions import activation_of, are_close
from hybrid_rlhf.models.hf_attention import cache_name
from hybrid_rlhf.models.lora_products import is_only_adapter, plain_adapter
from hybrid_rlhf.models.quantize import has_own_product

_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_ROWS = 3  # of the trial


class Names(NamedTuple):
    """Names of a layer's parts. matrices: attention's query, key, value and output, the MLP's gate (None: it has none),
    up and down. has_angles: whether positions rotate the heads (and the norms are RMSNorm)."""

    matrices: tuple[str | None, ...]
    norms: tuple[str, str]
    activation: str
    has_angles: bool


_NAMES = (
    Names((*(f"self_attn.{n}_proj" for n in "qkvo"), *(f"mlp.{n}_proj" for n in ("gate", "up", "down"))),
          ("input_layernorm", "post_attention_layernorm"), "mlp.act_fn", has_angles=True),
    Names((*(f"self_attn.{n}_proj" for n in ("q", "k", "v", "out")), None, "fc1", "fc2"),
          ("self_attn_layer_norm", "final_layer_norm"), "activation_fn", has_angles=False),
)


class Form(NamedTuple):
    """A layer that the kernel may compute: its parts, and what the trial found out about it."""

    layer: nn.Module
    index: int
    names: Names
    adds_one: bool
    activation: str

    def matrices(self) -> list[nn.Module | None]:
        """Each an nn.Linear, a LoRA layer around one, or None for a missing gate."""
        return [_part(self.layer, n) for n in self.names.matrices]

    def norms(self) -> list[nn.Module | None]:
        return [_part(self.layer, n) for n in (*self.names.norms, *_HEAD_NORMS)]

    def linears(self) -> list[nn.Linear | None]:
        """The matrices without their adapters."""
        return [m and getattr(m, "base_layer", m) for m in self.matrices()]

    def like(self) -> Tensor:
        """The first norm's weight, (E): the dtype and device of all that is not packed."""
        return self.norms()[0].weight

    def kernel(self, make: Callable) -> Callable:
        """The kernel over the layer's weights and adapters as they are now. Raises ValueError if it reads none such."""
        linears, norms = self.linears(), self.norms()
        return make([m and _weight(m) for m in linears], [m and m.bias for m in linears],
                    [n and n.weight for n in norms], [getattr(n, "bias", None) for n in norms],
                    [a and a[1] for a in self.adapters()], eps=_eps(norms[0]), adds_one=self.adds_one,
                    scaling=self.layer.self_attn.scaling, activation=self.activation)

    def adapters(self) -> list[tuple[str, tuple[Tensor, Tensor, float]] | None]:
        """Per matrix: the active adapter's name and parts, as `plain_adapter` returns them, or None."""
        dtype = self.like().dtype
        return [present(plain_adapter(m, dtype), "the adapter") if _is_adapted(m) else None for m in self.matrices()]

    def is_free(self) -> bool:
        """Whether no part has been replaced or hooked since, and its adapters are plain ones now."""
        return (all(("forward" not in vars(m) or has_own_product(m)) and (m is self.layer or not is_hooked(m))
                    for m in self.layer.modules())
                and all(plain_adapter(m, self.like().dtype) for m in self.matrices() if _is_adapted(m))
                and all(m.packed_weight.packed for m in self.linears() if _is_packed(m)))


def find_decode_layers(runner) -> list[Form]:  # noqa: ANN001 - a Runner
    """The layers of the runner's model that its kernels compute as the model does. Inside `runner.plugged_in`."""
    if runner.ops.decode_layer is None or runner.is_stateful:
        return []
    matching: list[Form] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        forms = [form for layer in runner.model.modules() if (form := _form(layer, runner))]
        widths = _angle_widths(runner, forms) if forms else {}
        for form in forms:
            if widths.get(form.layer) == (_head_dim(form) if form.names.has_angles else None):
                tries = (form._replace(adds_one=adds_one) for adds_one in (False, True))
                matching += [right for right in tries if _is_right(runner, right)][:1]
    return matching


@contextmanager
def decode_layers(forms: list[Form], make: Callable | None) -> Iterator[int]:
    """Within the block decode steps compute these layers by the kernel; yields how many do."""
    free = [form for form in forms if form.is_free()]
    for form in free:
        form.layer.forward = _forward(form, form.kernel(make))
    try:
        yield len(free)
    finally:
        for form in free:
            del form.layer.forward


def _forward(form: Form, kernel: Callable) -> Callable:
    original, index, most, dtype = form.layer.forward, form.index, kernel.max_rows, form.like().dtype
    has_angles = form.names.has_angles
    cache_argument = cache_name(form.layer)
    adapters = [(m, adapter[0]) for m, adapter in zip(form.matrices(), form.adapters(), strict=True) if adapter]

    def forward(hidden_states: Tensor, attention_mask: Tensor | None = None,
                position_embeddings: tuple[Tensor, Tensor] | None = None, **others: object):  # noqa: ANN202
        cache: Any = others.get(cache_argument)
        step = getattr(cache, "step", None)
        if (step is None or step.is_prefill or attention_mask is not None
                or (position_embeddings is None) == has_angles
                or hidden_states.dtype != dtype or len(hidden_states) > most
                or index not in cache.fused_cache_write or cache.layers[index].keys is None
                or any(v is not None and n not in IGNORED_ARGUMENTS for n, v in others.items())
                or not all(is_only_adapter(m, name) for m, name in adapters)):
            angles = {"position_embeddings": position_embeddings} if has_angles else {}
            return original(hidden_states, attention_mask=attention_mask, **angles, **others)
        rows = cache.layers[index]
        return kernel(hidden_states, *(position_embeddings or (None, None)), rows.keys, rows.values,
                      cache.row_pages(), step.positions[:, 0], step.width)

    return forward


def _eps(norm: nn.Module) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _form(layer: nn.Module, runner) -> Form | None:  # noqa: ANN001 - a Runner
    """The layer as the kernel's form, if it has the parts of one."""
    names = next((n for n in _NAMES if _has_parts(layer, n)), None)
    if names is None or not isinstance(getattr(layer.self_attn, "layer_idx", None), int):
        return None
    act = _part(layer, names.activation)
    activation = act and activation_of(act)
    if (activation is None or (activation == "relu" and names.has_angles)
            or not isinstance(getattr(layer.self_attn, "scaling", None), float)):
        return None
    form = Form(layer, layer.self_attn.layer_idx, names, False, activation)
    norms = [n for n in form.norms() if n is not None]
    if not all(_is_norm(n, names) and _eps(n) == _eps(norms[0]) for n in norms):
        return None
    like, packed = form.like(), [m for m in form.linears() if _is_packed(m)]
    weights = {id(m.weight) for m in packed}
    is_plain = (all(m is None or type(m) is nn.Linear or _is_packed(m) or plain_adapter(m, like.dtype)
                    for m in form.matrices())
                and (not packed or getattr(runner.ops.decode_layer, "takes_packed", _takes_none)(runner.device))
                and {p.dtype for p in layer.parameters() if id(p) not in weights} == {like.dtype}
                and like.dtype in runner.ops.linear_dtypes and like.device == runner.device)
    return form if is_plain and form.linears()[1].weight.numel() else None


def _has_parts(layer: nn.Module, names: Names) -> bool:
    """Whether the layer has these parts, and no others but what an adapter has inside a matrix."""
    matrices = {n for n in names.matrices if n}
    parts = {n for n, _ in layer.named_modules() if n and not any(n.startswith(f"{m}.") for m in matrices)}
    needed = {*matrices, *names.norms}
    return needed <= parts <= needed | {"self_attn", "mlp", names.activation, *_HEAD_NORMS}


def _part(layer: nn.Module, name: str | None) -> nn.Module | None:
    """The part of this name (a module or a function); None if there is none."""
    for part in name.split(".") if name else ():
        layer = getattr(layer, part, None)
    return layer if name else None


def _is_adapted(module: nn.Module | None) -> bool:
    return hasattr(module, "base_layer")


def _takes_none(_device: torch.device) -> bool:
    return False


def _is_packed(module: nn.Module | None) -> bool:
    return hasattr(module, "packed_weight")


def _weight(linear: nn.Module) -> Tensor | PackedMatrix:
    if not _is_packed(linear):
        return linear.weight
    packed = linear.packed_weight.packed() if linear.packed_weight.packed else None
    if packed is None:
        raise ValueError("packed in another way")
    return packed


def _is_norm(module: nn.Module, names: Names) -> bool:
    kind = type(module) is nn.LayerNorm and module.bias is not None
    if names.has_angles:
        kind = type(module).__name__.endswith("RMSNorm") and getattr(module, "bias", None) is None
    return (kind and isinstance(getattr(module, "weight", None), nn.Parameter)
            and module.weight.dim() == 1 and isinstance(_eps(module), float))


def _head_dim(form: Form) -> int:
    return getattr(form.layer.self_attn, "head_dim", 0)


def _angle_widths(runner, forms: list[Form]) -> dict[nn.Module, int]:  # noqa: ANN001 - a Runner
    """How many dimensions of a head the model's rotary angles cover, by layer. GLM-4's cover half of them; its code
    rotates as many as it is given angles for, so that the trial of a layer alone cannot tell."""
    widths: dict[nn.Module, int] = {}

    def note(layer: nn.Module, _inputs: tuple, named: dict) -> None:
        angles = named.get("position_embeddings")
        if isinstance(angles, tuple):
            widths[layer] = angles[0].shape[-1]

    with ExitStack() as stack:
        for form in forms:
            stack.callback(form.layer.register_forward_pre_hook(note, with_kwargs=True).remove)
        runner.prefill(runner.new_cache(1, 2), [[0]], [0], [0])
    return widths


def _is_right(runner, form: Form) -> bool:  # noqa: ANN001 - a Runner
    """Whether the layer and the kernel return and store the same values over slots with random columns."""
    like, keys = form.like(), form.linears()[1]
    cache = runner.new_cache(_ROWS, 8)
    try:
        rows = cache.layers[form.index]
        if not isinstance(rows, KeyValueRows) or isinstance(rows, StateRows):
            return False
        dim = _head_dim(form)
        rows.keys, rows.values = (torch.randn(_ROWS, keys.out_features // dim, 8, dim).to(like) for _ in range(2))
        ours = rows.keys.clone(), rows.values.clone()
        angles = tuple(torch.randn(_ROWS, 1, dim).to(like) for _ in range(2)) if form.names.has_angles else None
        x = 0.05 * torch.randn(_ROWS, 1, len(like))  # small, so that what the layer adds is not rounded away
        columns, slots = (torch.tensor(numbers, device=like.device) for numbers in ([[2], [6], [0]], [2, 0, 1]))
        step = Step(columns, 7, slots=slots)
        cache.fused_cache_write.add(form.index)
        want = runner.through_layer(form.layer, cache, step, x.to(like), angles)
        if not isinstance(want, Tensor):
            return False
        got = _by_kernel(runner, form, x.to(like), *(angles or (None, None)), *ours, cache.row_pages(),
                         step.positions[:, 0], step.width)
        if got is None:
            return False
        bound = 1e-5 if like.dtype == torch.float32 else 2.0**-6
        return are_close((want - x.to(like), rows.keys, rows.values), (got - x.to(like), *ours), bound)
    except Exception as error:  # third-party code may raise anything; it does not have this form
        if is_out_of_memory(error):
            raise
        return False


def _by_kernel(runner, form: Form, *inputs: object) -> Tensor | None:  # noqa: ANN001 - a Runner
    """The kernel's output, or None. An error is among the runner's reasons, which are shown, but for those by which the
    kernel refuses a form of layer."""
    try:
        return form.kernel(runner.ops.decode_layer)(*inputs)
    except (TypeError, ValueError):
        return None
    except Exception as error:  # compilers and drivers raise errors without a common class
        if is_out_of_memory(error):
            raise
        runner.reasons["decode layers"] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
        return None
