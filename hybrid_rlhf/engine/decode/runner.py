"""A model's own Hugging Face forward over slots: prefill, decode, and the parity check of both.

Every token goes through the model's own code exactly once; only attention, masks and cache are ours. The last token of
a prompt is left to the first decode step, so that prefills need no head and no ragged gather, and the samples of one
prompt do not differ before their first draw.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.distributed import RankGroup
from hybrid_rlhf.core.memory import is_out_of_memory
from hybrid_rlhf.core.tensors import pad_right
from hybrid_rlhf.engine.decode.attention import SlotAttention
from hybrid_rlhf.engine.decode.fused_layers import Form, decode_layers, find_decode_layers
from hybrid_rlhf.engine.decode.hf_generate import cache_growth, forced_logits
from hybrid_rlhf.engine.decode.image_prompts import ImagePrompts, has_images, shifts_on
from hybrid_rlhf.engine.decode.kv_cache import SlotCache, Step, make_cache
from hybrid_rlhf.engine.decode.model_overrides import adapted, counters, has_own_attention_adapted
from hybrid_rlhf.engine.decode.parity import (
    PROBE_LENGTHS,
    logits_over_slots,
    plain_logits,
    probe_bound,
    probe_sequences,
    relative_difference,
)
from hybrid_rlhf.engine.decode.tensor_parallel import all_agree, gathers_logits, propagate_errors, sharded
from hybrid_rlhf.engine.train.deepspeed_compat import is_partitioned
from hybrid_rlhf.kernels import Ops, ops_for
from hybrid_rlhf.kernels.fusions import Fusions, find_fusions, own_products
from hybrid_rlhf.models.backbone import joining, text_backbone, text_forward, text_logits, towers
from hybrid_rlhf.models.hf_attention import (
    cache_name,
    causal_mask_function,
    forward_parameters,
    layer_kinds,
    without_padding_check,
)
from hybrid_rlhf.models.images import joint_output
from hybrid_rlhf.models.lora_products import fused_adapters
from hybrid_rlhf.models.quantize import sampling_products
from hybrid_rlhf.models.transformers_compat import custom_attention, own_attention, takes_custom_attention

_log = logging.getLogger(__name__)


class Runner:
    """One model over slots. path: how its attention runs, found by `probe`.

    "native": our attention function. "eager": the model's own attention, with our cache and masks. "generate": neither
    gives the model's own logits, and transformers' generate must make its sequences; `reasons` says why, and
    `keeps_cache` whether generate gives these logits with the model's own cache or only without one.
    ranks: the tensor-parallel group over which the model is sharded within the mode (None: this process alone).
    """

    def __init__(self, model: nn.Module, ranks: RankGroup | None = None) -> None:
        self.model, self._ranks = model, ranks
        self._group: RankGroup | None = None  # `ranks` once the probe of the whole model is done
        self.device = next(model.parameters()).device
        self.ops: Ops = ops_for(self.device.type)
        self.path = "unknown"
        self.reasons: dict[str, str] = {}  # path -> why it was not taken
        self.is_stateful = False
        self.keeps_cache = True
        self.first_position = 0  # position id of a sequence's first token
        self.ending_ids: list[int] = []  # tokens after which the model's own positions differ from ours
        self.bytes_per_column = self.bytes_per_slot = 0.0  # of a slot: what grows with its length, and what does not
        self.capture = None  # records decode steps over static buffers (cuda_graphs.py), once tried
        self._direct: set[int] = set()
        self._attention = SlotAttention(self.ops, causal_mask_function())
        self.images, self._towers = ImagePrompts(model), towers(model)
        self.fusions = Fusions()
        self.layers: list[Form] = []  # decoder layers that one kernel call computes in decode steps
        self._inside = False

    # -- the mode ----------------------------------------------------------------------------------------------------

    @contextmanager
    def plugged_in(self, *, is_probe: bool = False) -> Iterator[Runner]:
        """Within the block the model runs over slots; its configuration is restored afterwards, also after an error.

        is_probe: 4-bit weights are multiplied as in training. The fused products equal these up to rounding in each
        layer, which adds up to more than a probe's bound over 36 layers; engine/logprob_drift measures it.
        """
        with ExitStack() as stack:
            if self._group:
                stack.enter_context(sharded(self.model, self._group))
            else:
                stack.enter_context(decode_layers(self.layers, self.ops.decode_layer))
            # towers apart: a step keeps the features that training forwards compute too (models/images.py)
            stack.enter_context(own_products(self.model, self.ops.linear, self.ops.linear_dtypes, self._towers))
            stack.enter_context(self.fusions.swapped())
            if not self._group:  # shards of adapters are not the layers' own parameters
                stack.enter_context(fused_adapters(self.model, self.ops.adapted_linear, self.ops.linear_dtypes))
            if not is_probe:
                stack.enter_context(sampling_products(self.model))
            stack.enter_context(without_padding_check(self.model))
            if self.path == "native":
                name = f"hybrid_rlhf_{id(self)}"
                stack.enter_context(custom_attention(self.model, name, self._attention.attend, self._attention.mask,
                                                     apart=self._towers))
            if self.path in ("native", "eager"):
                stack.enter_context(adapted(self.model, self._attention, with_attention=self.path == "native"))
            self._inside = True
            try:
                yield self
            finally:
                self._inside, self._attention.cache = False, None  # frees the cache's memory

    def new_cache(self, num_slots: int, capacity: int, num_pages: int | None = None) -> SlotCache:
        """An empty cache; its layers allocate themselves from the first keys they store. num_pages: for slots that
        share so many pages, where `takes_pages`."""
        cache = make_cache(self.model, num_slots, capacity, self.device, self._direct, num_pages)
        if self.is_stateful:  # a decode step reads its states before it writes any, so they must be there
            self.prefill(cache, [[0]], [0], [0])
            cache.clear_states(cache.all_slots)
        return cache

    @property
    def takes_pages(self) -> bool:
        """Whether slots may share pages: not where a row's states move on in place, and the model's own attention
        reads columns fastest where they lie side by side."""
        return self.path == "native" and not self.is_stateful

    def shifts(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """How far positions behind each of these prompts are from their columns (image_prompts.py)."""
        return [self.images.shift_of(prompt) if has_images(prompt) else 0 for prompt in prompts]

    def measure(self, cache: SlotCache) -> None:
        """Record the bytes of a slot, from a cache whose layers have all been allocated."""
        self.bytes_per_column = cache.num_bytes(is_growing=True) / (cache.num_slots * cache.capacity)
        self.bytes_per_slot = cache.num_bytes(is_growing=False) / cache.num_slots

    def prefill(self, cache: SlotCache, prompts: Sequence[Sequence[int]], source: Sequence[int],
                targets: Sequence[int], offset: int = 0, shifts: Sequence[int] = ()) -> Any:
        """Store the columns of N prompts: prompt source[i] in slot targets[i]. Prompts are padded on the right.

        offset: columns that the slots hold already (the same for all); shifts: of positions there (image_prompts.py).
        Returns the backbone's output.
        """
        with_images = any(map(has_images, prompts))
        ids = pad_right([self.images.ids_of(p) for p in prompts] if with_images else prompts, 0).to(self.device)
        positions = torch.arange(offset, offset + ids.shape[1], device=self.device).expand(len(prompts), -1)
        is_plain = list(source) == list(range(len(prompts)))
        step = Step(positions, offset + ids.shape[1], is_prefill=True, offset=offset,
                    source=None if is_plain else torch.tensor(source, device=self.device),
                    targets=torch.tensor(targets, device=self.device), shift=shifts_on(self.device, shifts),
                    sees_ahead=with_images)
        if with_images:
            return self._forward(joining(self.model), cache, step, ids, self.images.inputs(prompts, ids))
        return self._forward(self._body, cache, step, ids)

    def extend(self, cache: SlotCache, chunks: Sequence[Sequence[int]], slots: Sequence[int], offsets: Sequence[int],
               shifts: Sequence[int] = ()) -> None:
        """Store further columns of N sequences in one forward: chunk i in slots[i], behind offsets[i] columns.

        Padding has the position of its row's last token, as later positions may exceed the model's. A model that counts
        positions itself takes one sequence at a time.
        """
        if len(set(offsets)) == 1 or not self._takes_positions(self._body):
            groups = [range(len(chunks))] if len(set(offsets)) == 1 else [[i] for i in range(len(chunks))]
            for group in groups:
                self.prefill(cache, [chunks[i] for i in group], range(len(group)), [slots[i] for i in group],
                             offset=offsets[group[0]], shifts=[shifts[i] for i in group] if shifts else ())
            return
        real = [(i, j, slots[i], offsets[i] + j) for i, chunk in enumerate(chunks) for j in range(len(chunk))]
        longest = max(map(len, chunks))
        places = [[at + min(j, len(chunk) - 1) for j in range(longest)]
                  for at, chunk in zip(offsets, chunks, strict=True)]
        step = Step(torch.tensor(places, device=self.device), max(row[-1] for row in places) + 1, is_prefill=True,
                    ragged=torch.tensor(real, device=self.device).unbind(1),
                    targets=torch.tensor(slots, device=self.device), shift=shifts_on(self.device, shifts))
        self._forward(self._body, cache, step, pad_right(chunks, 0).to(self.device))

    @property
    def _body(self) -> nn.Module:
        """The model without its head, for forwards whose logits are not used."""
        base = text_backbone(self.model)
        return base if cache_name(base) else text_forward(self.model)

    def decode(self, cache: SlotCache, tokens: Tensor, positions: Tensor, width: int, slots: Tensor | None,
               has_idle: bool = False, shift: Tensor | None = None) -> Tensor:
        """One token per row: tokens (B,), positions (B,) int64, columns of the cache -> logits (B, V). slots None: row
        b is slot b. has_idle: rows at position -1 do not count. shift (B, 1): as in Step."""
        step = Step(positions[:, None], width, slots, has_idle=has_idle, shift=shift)
        out = self._forward(text_forward(self.model), cache, step, tokens[:, None])
        logits = text_logits(self.model, out)[:, -1]
        return self._group.firsts(logits) if self._group and not self._gathers else logits

    @torch.no_grad()
    def _forward(self, module: nn.Module, cache: SlotCache, step: Step, ids: Tensor,  # noqa: ANN202
                 more: Mapping[str, object] = MappingProxyType({})):
        self.check_inside()
        cache.begin(step)
        self._attention.cache = cache
        named = {"use_cache": True} | {name: cache for name in (cache_name(module),) if name} | dict(more)
        if self._takes_positions(module) and "position_ids" not in named:
            places = step.places if step.shift is None else step.places + step.shift
            named["position_ids"] = places + self.first_position if self.first_position else places
        run = partial(joint_output, module, text_backbone(self.model)) if more else module
        if self.path == "eager":
            with own_attention(self._attention.float_mask, self._attention.bool_mask):
                return run(input_ids=ids, **named)
        return run(input_ids=ids, **named)

    def through_layer(self, layer: nn.Module, cache: SlotCache, step: Step, hidden: Tensor,
                      angles: tuple[Tensor, Tensor] | None) -> Tensor:
        """Hidden states (B, 1, H) after one decoder layer, by its own code, in a step over `cache`."""
        cache.begin(step)
        self._attention.cache = cache
        named = {"position_embeddings": angles} if angles else {}
        return layer(hidden, attention_mask=None, position_ids=step.places, use_cache=True,
                     **{cache_name(layer): cache}, **named)

    def check_inside(self) -> None:
        """Raise RuntimeError outside of `plugged_in`."""
        if not self._inside:
            raise RuntimeError("a step of inference outside inference(): the mode has ended")

    def _takes_positions(self, module: nn.Module) -> bool:
        return "position_ids" in forward_parameters(module)

    # -- the probe ---------------------------------------------------------------------------------------------------

    def probe(self) -> None:
        """Find the fastest path whose logits over ragged slots match the model's plain forward. With tensor parallelism
        it is tried on each rank alone, then on all together: UserError on all ranks where it does not match.
        """
        if not self._ranks:
            self._find_path()
            return
        with propagate_errors(self._ranks):
            truth = self._probe_alone()
            self._group, self._gathers = self._ranks, gathers_logits(self.model)
            ours = self._logits_together()
            difference = max(all_agree(self._ranks, lambda: relative_difference(ours, truth)))
            check(difference < probe_bound(self.model), f"{self._described()} differs from the plain forward by "
                                                        f"{difference:.2g}; use tp 1")

    def _described(self) -> str:
        return f"{type(self.model).__name__} over {self._ranks.degree} ranks"

    def _probe_alone(self) -> Tensor:
        """The plain forward's logits. Each rank finds the path for itself where it has the whole model."""
        if is_partitioned(self.model):
            self.path, self.is_stateful = "native", any(kind.num_states for kind in layer_kinds(self.model))
            return plain_logits(self.model, self.device)
        paths = all_agree(self._ranks, lambda: self._find_path() or self.path)
        check("generate" not in paths and len(set(paths)) == 1,
              f"{type(self.model).__name__} does not run on the decode engine ({self.reasons}); use tp 1")
        return plain_logits(self.model, self.device)

    def _logits_together(self) -> Tensor:
        try:
            with self.plugged_in(is_probe=True):
                return logits_over_slots(self)
        except Exception as error:
            self._ranks.abandon()  # the others may be waiting
            if is_out_of_memory(error):
                raise
            raise UserError(f"{self._described()} does not run ({error_summary(error)}); use tp 1") from error

    def _find_path(self) -> None:
        self.fusions = find_fusions(self.model, self.ops.fused)
        pad_id = getattr(self.model.config.get_text_config(), "pad_token_id", None)
        for path in ("native", "eager"):
            for self.first_position in (0, *((pad_id + 1,) if pad_id is not None else ())):  # RoBERTa's start there
                reason = self._try(path)
                if reason is None:
                    self.path = path
                    self.reasons.pop(path, None)
                    self._find_layers()
                    self.ending_ids = [pad_id] if self.first_position else []  # there a pad token has no position
                    for what, why in self.reasons.items():
                        _log.warning("%s keeps its own %s in inference mode: %s", type(self.model).__name__,
                                     "attention" if what == "native" else what, why)
                    return
                self.reasons.setdefault(path, reason)
                if "differ" not in reason:
                    break
        self._probe_generate()
        _log.warning("%s does not run on the decode engine (%s); it is sampled by transformers' generate%s",
                     type(self.model).__name__, "; ".join(f"{p}: {r}" for p, r in self.reasons.items()),
                     "" if self.keeps_cache else " without a cache")

    def _find_layers(self) -> None:
        """Compute whole decoder layers by the kernels where each passes its trial and all together pass the probe."""
        if self.path != "native":
            return
        with self.plugged_in(is_probe=True), torch.no_grad():
            self.layers = find_decode_layers(self)
        if self.layers and (reason := self._try("native")):
            self.layers, self.reasons["decode layers"] = [], reason
        if self.layers:
            self.fusions.counts["decode_layer"] = len(self.layers)

    def _probe_generate(self) -> None:
        """Take the path of generate, without a cache where only that gives the plain forward's logits.

        Raises UserError where neither does: the sampled policy would not be the one that is trained.
        """
        self.path, sequences = "generate", probe_sequences(self.model)
        for self.keeps_cache in (True, False):
            try:
                with self.plugged_in(is_probe=True):
                    ours = forced_logits(self.model, sequences, PROBE_LENGTHS, self.keeps_cache)
                reason = self.disagreement(ours, "in generate")
            except Exception as error:  # third-party code may raise anything; the path is not for it
                if is_out_of_memory(error):  # which does not depend on the path
                    raise
                reason = error_summary(error)
            if reason is None:
                if self.keeps_cache:
                    self.bytes_per_column, self.bytes_per_slot = cache_growth(self.model)
                return
            self.reasons["generate" if self.keeps_cache else "generate without a cache"] = reason
        raise UserError(f"{type(self.model).__name__} cannot generate here: "
                        + "; ".join(f"{p}: {r}" for p, r in self.reasons.items()))

    def _try(self, path: str) -> str | None:
        """None if `path` gives the model's own logits, or why not."""
        self._direct.clear()
        self.path = path
        if path == "native" and not (takes_custom_attention(self.model) or has_own_attention_adapted(self.model)):
            return "its attention cannot be replaced"
        if hasattr(self.model.config, "decoder_layers") and not (
                self._takes_positions(self.model) or counters(self.model)):
            # not left to the probe, which in 16 bits is too coarse to see small position embeddings
            return "a decoder cut from an encoder-decoder counts one position for the whole batch"
        try:
            self.is_stateful = any(kind.num_states for kind in layer_kinds(self.model))
            with self.plugged_in(is_probe=True):
                ours = logits_over_slots(self)
        except Exception as error:  # third-party code may raise anything; the path is not for it
            if is_out_of_memory(error):
                raise
            return error_summary(error)
        return self.disagreement(ours, "over slots")

    def disagreement(self, ours: Tensor, where: str) -> str | None:
        """None if the probe's logits are those of the model's plain forward, or how far they are off."""
        difference = relative_difference(ours, plain_logits(self.model, self.device))
        return None if difference < probe_bound(self.model) else (
            f"its logits {where} differ from the plain forward by {difference:.2g}")


def error_summary(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
