"""Images for models that read them: the processor of a checkpoint, and a forward over rows with images.

The model's own code joins features and text: positions, masks and features of several layers are the architecture's.
Ours are only the features, computed once for each image of a batch, in whatever rows it stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, cached_property
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.distributed import max_over_ranks, world_size
from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.image_files import ImageError, ImageRef, blank_image, open_image, version
from hybrid_rlhf.models.hf_attention import forward_parameters
from hybrid_rlhf.models.modes import evaluating
from hybrid_rlhf.models.processor_compat import image_ids, load_processor

_KEPT_BYTES = 2**30  # of processed images that are remembered: 40 of a million pixels, all of many small ones
KEPT_FEATURES = 2**30  # bytes of features that a step keeps: 100 images of 1300 tokens for a model of width 4096
VALUES_AT_ONCE = 2**22  # of the inputs of a pass over the towers, 1.4 megapixels: any batch takes as much memory
_of_step: dict[tuple[nn.Module, ImageRef], Any] | None = None  # features, by the module that computed them
_FEATURES = "mm_encoder_outputs"  # under which a forward takes features that are there already
_TYPES = ("mm_token_type_ids", "token_type_ids")  # which tokens are an image's


class ReadImage(NamedTuple):
    """What a processor makes of one image. text: what stands for it in a prompt, in place of the placeholder that the
    chat template writes; num_tokens: how many of the reader's `token_ids` that has; inputs: the tensors of the model's
    `get_image_features`."""

    text: str
    num_tokens: int
    inputs: dict[str, Tensor]


class ImageReader:
    """The processor of a checkpoint, for one image at a time. placeholder: the text that a chat template writes for an
    image. token_ids: those of the tokens whose embeddings are an image's features, and of those between them. never:
    what a policy does not sample: these, and the like of video and sound, whose own embeddings are not read beside
    images."""

    def __init__(self, processor: Any, token_ids: frozenset[int]) -> None:  # a processor of transformers
        self._processor = processor
        self.placeholder: str = processor.image_token
        self.token_ids = token_ids
        others = (*processor.video_token_ids, *processor.audio_token_ids)
        self.never = self.token_ids.union(i for i in others if i is not None)
        self._kept: dict[ImageRef, tuple[tuple[int, ...], ReadImage]] = {}  # with the version of its file
        self._num_bytes, self._lock = 0, Lock()

    def read(self, image: ImageRef) -> ReadImage:
        """What the processor makes of an image, remembered for the next time. Several threads may read. Raises
        ImageError where the processor refuses it."""
        with self._lock:
            now = version(image.path)
            before, known = self._kept.pop(image, (now, None))
            if known is not None and now and now != before:  # a file that is gone was there when it was read
                self._num_bytes -= _num_bytes(known)
                known = None
            if known is None:
                known, before = self._processed(open_image(image)), now
                self._num_bytes += _num_bytes(known)
                while self._kept and self._num_bytes > _KEPT_BYTES:
                    self._num_bytes -= _num_bytes(self._kept.pop(next(iter(self._kept)))[1])
            self._kept[image] = before, known
        return known

    @cached_property
    def blank(self) -> dict[str, Tensor]:
        """The inputs of an image that stands for none."""
        return self._processed(blank_image()).inputs

    def _processed(self, opened: Any) -> ReadImage:  # of Pillow
        try:
            out = self._processor(images=[opened], text=[self.placeholder], return_tensors="pt",
                                  return_text_replacement_offsets=True)
        except ValueError as error:  # such as Qwen's for an image 200 times as long as high
            raise ImageError(f"is refused by the model's processor ({' '.join(str(error).split())[:200]})") from error
        unused = {"input_ids", "attention_mask", "text_replacement_offsets", *_TYPES}
        text = out["text_replacement_offsets"][0][0]["replacement"]
        num_tokens = sum(i in self.token_ids for i in self._processor.tokenizer(text)["input_ids"])
        return ReadImage(text, num_tokens, {name: value for name, value in out.items() if name not in unused})

    @cached_property
    def settings(self) -> str:
        """All that decides which tokens an image has."""
        return repr(self._processor.image_processor)

    def types(self, ids: Tensor) -> Tensor:
        """(B, T) long: 1 for the tokens of images, 0 for text."""
        known = torch.tensor(sorted(self.token_ids), device=ids.device)
        return torch.isin(ids, known).long()


def _num_bytes(image: ReadImage) -> int:
    return sum(value.nbytes for value in image.inputs.values() if isinstance(value, Tensor))


@cache
def load_reader(path: str) -> ImageReader | None:
    """The reader of the checkpoint at a folder or hub id; None where it has no processor of images. UserError where it
    has one that cannot be loaded."""
    processor = load_processor(path)
    return None if processor is None else ImageReader(processor, image_ids(path, processor))


_models: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # tokenizer -> the model whose images it stands for


def read_as(tokenizer: Any, path: str) -> None:  # of transformers
    """Let a tokenizer from a folder of its own, if that has no processor, have that of the model at `path`."""
    _models[tokenizer] = path


def reader_of(owner: Any) -> ImageReader | None:  # of transformers
    """The reader that belongs to a tokenizer or to a model; None where that reads no images."""
    path = owner.name_or_path if hasattr(owner, "name_or_path") else owner.config.name_or_path
    places = filter(None, (path, _models.get(owner)))
    return next(filter(None, (load_reader(str(place)) for place in places)), None)


def states(composite: nn.Module, backbone: nn.Module, ids: Tensor, images: Sequence[Sequence[ImageRef]],
           zero: Tensor | None = None, **named: object) -> Any:
    """The output of `composite`, the module that joins images and text (backbone.joining) around the backbone of text,
    for rows ids (B, T) with the images of each row in their order. zero: added to the states (`blank_features`; made
    here, where there are images). named: further arguments of its forward. UserError where it reads none."""
    reader = reader_of(composite) if hasattr(composite, "get_image_features") else None
    if reader is None:
        raise UserError(f"{type(composite).__name__} reads no images, and rows have some; give an image-text model, "
                        "with its processor's files in its folder")
    inputs = {image: reader.read(image).inputs for row in images for image in row}
    if inputs:
        zero = blank_features(composite, num_blank(composite, inputs))
    out = joint_output(composite, backbone, input_ids=ids, **inputs_of(reader, composite, ids, images, inputs), **named)
    return out if zero is None else plus(out, zero)


class _Reached(Exception):  # noqa: N818 - no error
    """Ends a forward behind the backbone, with its output."""


def joint_output(composite: nn.Module, backbone: nn.Module, **named: object) -> Any:
    """The output with states of a forward of `composite`. One that is around the output head too (Llama 4) returns
    none: its forward then ends with the output of `backbone`, before the head."""
    if composite.get_output_embeddings() is None:
        return composite(**named)

    def end(_module: nn.Module, _inputs: object, out: Any) -> None:
        raise _Reached(out)

    hook = backbone.register_forward_hook(end)
    try:
        composite(**named)
    except _Reached as reached:
        return reached.args[0]
    finally:
        hook.remove()
    raise RuntimeError(f"the forward of {type(composite).__name__} does not call {type(backbone).__name__}")


# -- several processes -------------------------------------------------------------------------------------------------


def num_blank(composite: nn.Module, inputs: Mapping[ImageRef, Mapping[str, Tensor]]) -> int:
    """How many blank images this process computes beside its passes over the towers for these inputs of images,
    to stay in step with the other processes: ZeRO 3 gathers weights in each pass, so that all make as many as the
    busiest; and gradients at ZeRO 1 and 2, summed as they come, are of the same weights everywhere. Every process must
    call it."""
    if world_size() == 1 or not hasattr(composite, "get_image_features"):
        return 0
    if is_in_parts(composite):
        num_own = len(_alike(inputs))
        return max_over_ranks(num_own) - num_own
    return int(not inputs and torch.is_grad_enabled() and _is_trained(composite))


def is_in_parts(composite: nn.Module) -> bool:
    """Whether ZeRO 3 has the weights of a module that joins images and text in parts."""
    return hasattr(composite, "get_image_features") and any(hasattr(p, "ds_id") for p in composite.parameters())


def blank_features(composite: nn.Module, count: int) -> Tensor | None:
    """A zero whose gradient is zero, from so many passes over the towers; None for no pass, or no processor."""
    reader = reader_of(composite) if count else None
    if reader is None:
        return None
    with _gradients(composite):
        joint = {name: _placed(value, composite) for name, value in reader.blank.items()}
        outputs = [composite.get_image_features(**joint, return_dict=True) for _ in range(count)]
    return sum(x.float().sum() for out in outputs for x in _tensors(out)) * 0.0


def plus(out: Any, zero: Tensor) -> Any:
    """An output of a forward with `blank_features` in it."""
    out.last_hidden_state = out.last_hidden_state + zero.to(out.last_hidden_state.dtype)
    return out


def inputs_of(reader: ImageReader, composite: nn.Module, ids: Tensor, images: Sequence[Sequence[ImageRef]],
              inputs: Mapping[ImageRef, Mapping[str, Tensor]] | None = None) -> dict:
    """What the forward of `composite` takes beside ids (B, T): the images' features, the kinds of tokens, sizes.
    inputs: of each image, if they are there already."""
    takes = forward_parameters(composite)
    if _FEATURES not in takes:
        raise UserError(f"{type(composite).__name__} takes no {_FEATURES} in this release of transformers; install "
                        "5.18 or newer to read images")
    if hasattr(composite, "vqmodel"):  # Chameleon, Emu3: features are rows of the trained word embedding
        raise UserError(f"{type(composite).__name__} reads images as words of its vocabulary, which is not done here; "
                        "give a model with a vision tower, such as Qwen3-VL")
    flat = [image for row in images for image in row]
    inputs = {image: reader.read(image).inputs for image in flat} if inputs is None else inputs
    named: dict[str, Any] = {name: reader.types(ids) for name in _TYPES if name in takes}
    for name in inputs[flat[0]] if flat else ():  # such as the grid of patches, which decides positions
        if name in takes and not name.startswith("pixel_"):
            named[name] = torch.cat([inputs[image][name] for image in flat]).to(ids.device)
    if hasattr(composite, "get_rope_index"):  # positions in three axes
        named["position_ids"] = composite.get_rope_index(ids, **named)[0]
    if not flat:
        return named
    features = _features(composite, inputs)
    return named | {_FEATURES: {"image": _joined([features[image] for image in flat])}}


def position_shift(reader: ImageReader, composite: nn.Module, image: ImageRef) -> int:
    """How far the positions behind an image are from their places in the row: 0, or less than that where the model has
    positions in three axes, of which an image takes as many as its longer side has (2409.12191, section 2.1)."""
    if not hasattr(composite, "get_rope_index"):
        return 0
    ids = torch.tensor([[i] * reader.read(image).num_tokens for i in sorted(reader.token_ids)[:1]])
    grid = {name: value for name, value in reader.read(image).inputs.items() if not name.startswith("pixel_")}
    return int(composite.get_rope_index(ids, mm_token_type_ids=torch.ones_like(ids), **grid)[1])


@contextmanager
def features_kept() -> Iterator[None]:
    """Within the block, of one step, towers that stay as they are compute each image once for all forwards: prefill,
    log-probabilities, update. Up to KEPT_FEATURES bytes; further images are computed in each forward."""
    global _of_step
    _of_step = {}
    try:
        yield
    finally:
        _of_step = None


def _features(composite: nn.Module, images: Mapping[ImageRef, Mapping[str, Tensor]]) -> dict[ImageRef, Any]:
    """The output of the tower and the projection for each image, with gradients where one of their weights is trained.
    Images whose inputs have one shape are computed together."""
    kept = _of_step if _of_step is not None and _is_fixed(composite) else {}
    features = {image: kept[composite, image] for image in images if (composite, image) in kept}
    room = KEPT_FEATURES - sum(x.nbytes for output in kept.values() for x in _tensors(output))
    with _gradients(composite):
        for group in _alike({image: inputs for image, inputs in images.items() if image not in features}):
            joint = {name: _placed(torch.cat([images[image][name] for image in group]), composite)
                     for name in images[group[0]]}
            outputs = _parted(composite.get_image_features(**joint, return_dict=True), len(group))
            features |= zip(group, outputs, strict=True)
            room -= sum(x.nbytes for output in outputs for x in _tensors(output))
            if room >= 0:
                kept |= {(composite, image): features[image] for image in group}
    return features


def _alike(images: Mapping[ImageRef, Mapping[str, Tensor]]) -> list[list[ImageRef]]:
    """Images in groups whose inputs have one shape, of at most VALUES_AT_ONCE values or one image."""
    alike: dict[tuple, list[ImageRef]] = {}
    for image, inputs in images.items():
        alike.setdefault(tuple((name, value.shape) for name, value in inputs.items()), []).append(image)
    sizes = {key: max(1, VALUES_AT_ONCE // sum(shape.numel() for _, shape in key)) for key in alike}
    return [group[i : i + sizes[key]] for key, group in alike.items() for i in range(0, len(group), sizes[key])]


def towers(composite: nn.Module) -> list[nn.Module]:
    """The modules that `backbone.towers` names in the whole model: the parts without the embedding of words."""
    words = composite.get_input_embeddings()
    return [child for child in composite.children() if all(module is not words for module in child.modules())]


def _is_trained(composite: nn.Module) -> bool:
    return any(p.requires_grad for tower in towers(composite) for p in tower.parameters())


def _is_fixed(composite: nn.Module) -> bool:
    """Whether an image has the same features in all forwards of a step: no weight of the towers is trained, and none
    has an adapter, which may be off in the next one. In parts (ZeRO 3) all processes make as many passes."""
    has_adapter = any(hasattr(module, "lora_A") for tower in towers(composite) for module in tower.modules())
    return not has_adapter and not _is_trained(composite) and not is_in_parts(composite)


@contextmanager
def _gradients(composite: nn.Module) -> Iterator[None]:
    """Within the block towers of which nothing is trained make no graph, and no dropout either."""
    if _is_trained(composite):
        yield
        return
    with torch.no_grad(), ExitStack() as stack:
        for tower in towers(composite):
            stack.enter_context(evaluating(tower))
        yield


def _placed(value: Tensor, composite: nn.Module) -> Tensor:
    return value.to(composite.device, composite.dtype if value.is_floating_point() else None)


def _fields(output: Any) -> Iterator[tuple[str, Any]]:
    """What a forward reads of the features: those in the text's width, or the tower's, where the forward projects them
    (Llama 4); and those of layers."""
    name = "last_hidden_state" if getattr(output, "pooler_output", None) is None else "pooler_output"
    yield name, getattr(output, name)
    if getattr(output, "deepstack_features", None) is not None:
        yield "deepstack_features", list(output.deepstack_features)


def _tensors(output: Any) -> list[Tensor]:
    values = [x for _, value in _fields(output) for x in ((value,) if isinstance(value, Tensor) else value)]
    return [x for value in values for x in ((value,) if isinstance(value, Tensor) else value)]


def _parted(output: Any, count: int) -> list[Any]:
    """An output of `count` images of one shape as one of each."""
    def parts(values: Any) -> list[Any]:
        size = len(values) // count
        return [values[i * size : (i + 1) * size] for i in range(count)]

    split = {name: list(zip(*map(parts, value), strict=True)) if name == "deepstack_features" else parts(value)
             for name, value in _fields(output)}
    return [type(output)(**dict(zip(split, each, strict=True))) for each in zip(*split.values(), strict=True)]


def _joined(outputs: Sequence[Any]) -> Any:  # of transformers
    """One output with the features of all, in order: lists are joined, tensors along their first dimension; features of
    several layers layer by layer."""
    fields = [dict(_fields(output)) for output in outputs]
    joined = {name: [_chained(layer) for layer in zip(*(each[name] for each in fields), strict=True)]
              if name == "deepstack_features" else _chained([each[name] for each in fields]) for name in fields[0]}
    return type(outputs[0])(**joined)


def _chained(parts: Sequence[Any]) -> Any:
    return torch.cat(list(parts)) if isinstance(parts[0], Tensor) else [x for part in parts for x in part]
