"""Prompts with images, as the decode engine holds them: the token ids of an image name it.

Two prompts with the same tokens and other images are other prompts: slots, pages and shared beginnings are found by the
ids. So an image's tokens are negative numbers here, one for each image and token, which a prefill turns back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.image_files import ImageRef, version
from hybrid_rlhf.models.backbone import joining
from hybrid_rlhf.models.images import ImageReader, inputs_of, position_shift, reader_of


class _Place(NamedTuple):
    """An image in a prompt. number: which of the prompt's images it is, so that neighbours differ; version: of its
    file."""

    image: ImageRef
    number: int
    version: tuple[int, ...]


class ImagePrompts:
    """The images that prompts of one model have had."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._places: dict[_Place, int] = {}
        self._listed: list[_Place] = []
        self._shifts: dict[ImageRef, int] = {}

    @cached_property
    def _reader(self) -> ImageReader:
        reader = reader_of(self.model)  # not before a prompt has an image: a processor may need further packages
        if reader is None:
            raise UserError(f"{type(self.model).__name__} reads no images, and a prompt has some")
        return reader

    @cached_property
    def token_ids(self) -> list[int]:
        """The ids of images' tokens, in order."""
        return sorted(self._reader.token_ids)

    @property
    def never(self) -> list[int]:
        """Tokens that no answer to a prompt with images has."""
        return sorted(self._reader.never)

    def numbered(self, ids: Sequence[int], images: Sequence[ImageRef]) -> list[int]:
        """The prompt with its images' tokens numbered. Raises UserError where their numbers do not agree."""
        if not images:
            return list(ids)
        owners = [_Place(image, n, version(image.path)) for n, image in enumerate(images)
                  for _ in range(self._reader.read(image).num_tokens)]
        if len(owners) != sum(i in self._reader.token_ids for i in ids):
            raise UserError(f"a prompt has {sum(i in self._reader.token_ids for i in ids)} tokens of images, and its "
                            f"{len(images)} images have {len(owners)}; render it by the model's own processor")
        following = iter(owners)
        return [self._number(next(following), i) if i in self._reader.token_ids else i for i in ids]

    def _number(self, place: _Place, token: int) -> int:
        if place not in self._places:
            self._places[place] = len(self._listed)
            self._listed.append(place)
        return -1 - (self._places[place] * len(self.token_ids) + self.token_ids.index(token))

    def images_of(self, prompt: Sequence[int]) -> tuple[ImageRef, ...]:
        places = dict.fromkeys((-1 - i) // len(self.token_ids) for i in prompt if i < 0)
        return tuple(self._listed[place].image for place in places)

    def ids_of(self, prompt: Sequence[int]) -> list[int]:
        """The prompt with the model's own ids."""
        return [i if i >= 0 else self.token_ids[(-1 - i) % len(self.token_ids)] for i in prompt]

    def shift_of(self, prompt: Sequence[int]) -> int:
        """How far the positions of the tokens behind a prompt are from their columns: an image may have fewer positions
        than tokens."""
        total = 0
        for image in self.images_of(prompt):
            if image not in self._shifts:
                self._shifts[image] = position_shift(self._reader, joining(self.model), image)
            total += self._shifts[image]
        return total

    def inputs(self, prompts: Sequence[Sequence[int]], ids: Tensor) -> dict:
        """What the forward of `joining(model)` takes beside ids (N, T), the prompts' own."""
        return inputs_of(self._reader, joining(self.model), ids, [self.images_of(prompt) for prompt in prompts])


def has_images(prompt: Sequence[int]) -> bool:
    return min(prompt, default=0) < 0


def shifts_on(device: torch.device, shifts: Sequence[int]) -> Tensor | None:
    """(B, 1) long on a device; None where all are 0."""
    return torch.tensor(shifts, device=device)[:, None] if any(shifts) else None
