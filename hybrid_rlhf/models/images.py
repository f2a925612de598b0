"""Images for models that read them: the processor of a checkpoint, and a forward over rows with images.

The model's own code joins features and text: positions, masks and features of several layers are the architecture's.
Ours are only the features, computed once for each image of a batch, in whatever rows it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, lru_cache
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.image_files import ImageError, ImageRef, open_image
from hybrid_rlhf.models.hf_attention import forward_parameters
from hybrid_rlhf.models.processor_compat import load_processor

_KEPT = 256  # processed images that are remembered
_TYPES = ("mm_token_type_ids", "token_type_ids")  # which tokens are an image's


class ReadImage(NamedTuple):
    """What a processor makes of one image. text: what stands for it in a prompt, in place of the placeholder that the
    chat template writes; num_tokens: how many of `token_ids` that has; inputs: the tensors of the model's
    `get_image_features`."""

    text: str
    num_tokens: int
    inputs: dict[str, Tensor]


class ImageReader:
    """The processor of a checkpoint, for one image at a time. placeholder: the text that a chat template writes for an
    image. token_ids: those of the tokens whose embeddings are an image's features, and of those between them: a policy
    does not sample them. Several threads may read."""

    def __init__(self, processor: Any) -> None:  # of transformers
        self._processor = processor
        self.placeholder: str = processor.image_token
        self.token_ids = frozenset(i for i in processor.image_token_ids if i is not None)
        self._lock = Lock()  # a tokenizer refuses two threads at once
        self.read = lru_cache(_KEPT)(self._read)

    def _read(self, image: ImageRef) -> ReadImage:
        opened = open_image(image)
        try:
            with self._lock:
                out = self._processor(images=[opened], text=[self.placeholder], return_tensors="pt",
                                      return_text_replacement_offsets=True)
        except ValueError as error:  # such as Qwen's for an image 200 times as long as high
            raise ImageError(f"is refused by the model's processor ({' '.join(str(error).split())[:200]})") from error
        unused = {"input_ids", "attention_mask", "text_replacement_offsets", *_TYPES}
        return ReadImage(out["text_replacement_offsets"][0][0]["replacement"], int(self.types(out["input_ids"]).sum()),
                         {name: value for name, value in out.items() if name not in unused})

    def num_tokens(self, image: ImageRef) -> int:
        """How many of `token_ids` an image has in a prompt."""
        return self.read(image).num_tokens

    def settings(self) -> str:
        """All that decides which tokens an image has."""
        return repr(self._processor.image_processor)

    def types(self, ids: Tensor) -> Tensor:
        """(B, T) long: 1 for the tokens of images, 0 for text."""
        known = torch.tensor(sorted(self.token_ids), device=ids.device)
        return torch.isin(ids, known).long()


@cache
def load_reader(path: str) -> ImageReader | None:
    """The reader of the checkpoint at a folder or hub id; None where it has no processor of images. UserError where it
    has one that cannot be loaded."""
    processor = load_processor(path)
    return None if processor is None else ImageReader(processor)


def reader_of(owner: Any) -> ImageReader | None:  # of transformers
    """The reader that belongs to a tokenizer or to a model; None where that reads no images."""
    path = owner.name_or_path if hasattr(owner, "name_or_path") else owner.config.name_or_path
    return load_reader(str(path)) if path else None


def states(composite: nn.Module, ids: Tensor, images: Sequence[Sequence[ImageRef]], **named: object) -> Any:
    """The output of `composite`, the module that joins images and text (backbone.joining), for rows ids (B, T) with the
    images of each row in their order. named: further arguments of its forward. ValueError where it reads none."""
    reader = reader_of(composite)
    if reader is None:
        raise ValueError(f"{type(composite).__name__} reads no images")
    return composite(input_ids=ids, **inputs_of(reader, composite, ids, images), **named)


def inputs_of(reader: ImageReader, composite: nn.Module, ids: Tensor, images: Sequence[Sequence[ImageRef]]) -> dict:
    """What the forward of `composite` takes beside ids (B, T): the images' features, the kinds of tokens, sizes."""
    takes = forward_parameters(composite)
    flat = [image for row in images for image in row]
    features = _features(reader, composite, list(dict.fromkeys(flat)))
    named: dict[str, Any] = {name: reader.types(ids) for name in _TYPES if name in takes}
    read = [reader.read(image).inputs for image in flat]
    for name in read[0]:  # such as the grid of patches, which decides positions
        if name in takes and not name.startswith("pixel_"):
            named[name] = torch.cat([inputs[name] for inputs in read]).to(ids.device)
    if hasattr(composite, "get_rope_index"):  # positions in three axes
        named["position_ids"] = composite.get_rope_index(ids, **named)[0]
    return named | {"mm_encoder_outputs": {"image": _joined([features[image] for image in flat])}}


def position_shift(reader: ImageReader, composite: nn.Module, image: ImageRef) -> int:
    """How far the positions behind an image are from their places in the row: 0, or less than that where the model has
    positions in three axes, of which an image takes as many as its longer side has (2409.12191, section 2.1)."""
    if not hasattr(composite, "get_rope_index"):
        return 0
    ids = torch.tensor([[i] * reader.num_tokens(image) for i in sorted(reader.token_ids)[:1]])
    grid = {name: value for name, value in reader.read(image).inputs.items() if not name.startswith("pixel_")}
    return int(composite.get_rope_index(ids, mm_token_type_ids=torch.ones_like(ids), **grid)[1])


def _features(reader: ImageReader, composite: nn.Module, images: Sequence[ImageRef]) -> dict[ImageRef, Any]:
    """The output of the tower and the projection for each image, with gradients where one of their weights is trained.
    Images whose inputs have one shape are computed together."""
    alike: dict[tuple, list[ImageRef]] = {}
    for image in images:
        shapes = tuple((name, getattr(value, "shape", None)) for name, value in reader.read(image).inputs.items())
        alike.setdefault(shapes, []).append(image)
    words = composite.get_input_embeddings()
    towers = [child for child in composite.children() if all(module is not words for module in child.modules())]
    is_frozen = not any(p.requires_grad for tower in towers for p in tower.parameters())
    features = {}
    with torch.no_grad() if is_frozen else nullcontext():
        for group in alike.values():
            read = [reader.read(image).inputs for image in group]
            inputs = {name: _placed(torch.cat([each[name] for each in read]), composite) for name in read[0]}
            features |= zip(group, _parted(composite.get_image_features(**inputs, return_dict=True), len(group)),
                            strict=True)
    return features


def _placed(value: Tensor, composite: nn.Module) -> Tensor:
    return value.to(composite.device, composite.dtype if value.is_floating_point() else None)


def _parted(output: Any, count: int) -> list[Any]:
    """An output of `count` images of one shape as one of each."""
    def parts(values: Any) -> list[Any]:
        size = len(values) // count
        return [values[i * size : (i + 1) * size] for i in range(count)]

    parted = [type(output)(pooler_output=part) for part in parts(output.pooler_output)]
    for layer in getattr(output, "deepstack_features", None) or ():
        for each, part in zip(parted, parts(layer), strict=True):
            each.deepstack_features = [*(each.deepstack_features or ()), part]
    return parted


def _joined(outputs: Sequence[Any]) -> Any:  # of transformers
    """One output with the features of all, in order: lists are joined, tensors along their first dimension; features of
    several layers layer by layer."""
    joined = type(outputs[0])(pooler_output=_chained([out.pooler_output for out in outputs]))
    if getattr(outputs[0], "deepstack_features", None) is not None:
        joined.deepstack_features = [_chained(layer) for layer in
                                     zip(*(out.deepstack_features for out in outputs), strict=True)]
    return joined


def _chained(parts: Sequence[Any]) -> Any:
    return torch.cat(list(parts)) if isinstance(parts[0], Tensor) else [x for part in parts for x in part]
