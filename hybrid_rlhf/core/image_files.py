"""Images of rows, by reference: a batch carries names of files, and the model's processor reads each when it is needed.

The size is decided once, when a row is tokenized, since it decides how many tokens an image has.
"""

from __future__ import annotations

import base64
import hashlib
import os
import warnings
from collections.abc import Sequence
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hybrid_rlhf.core.errors import UserError, escape_control

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 2**20  # of an image as models read it, unless options say otherwise
THUMBNAIL, MAX_SHOWN = 128, 8  # for people: pixels of the longer side; images of one prompt
MAX_FILE_PIXELS = 100_000_000  # of a file; a larger one could fill the memory (Pillow warns at 89 million)
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM")  # none that starts a program (EPS)


class ImageRef(NamedTuple):
    """An image in the file `path`, read as RGB of width x height pixels."""

    path: str
    width: int
    height: int


class ImageError(Exception):
    """An image that cannot be read; the message says why, without its name."""


def look_at(path: str) -> ImageRef:
    """The image in a file, in its own size. Decodes it whole. Raises ImageError where it cannot be read."""
    return ImageRef(path, *_decoded(path).size)


def version(path: str) -> tuple[int, ...]:
    """Size and time of a file, by which another one in its place is noticed; () where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_size, status.st_mtime_ns


def scaled(image: ImageRef, max_pixels: int) -> ImageRef:
    """The image scaled down to at most max_pixels, in its proportions."""
    scale = min(1.0, (max_pixels / (image.width * image.height)) ** 0.5)
    return image._replace(width=max(1, int(image.width * scale)), height=max(1, int(image.height * scale)))


def open_image(image: ImageRef) -> Image:
    """The image as RGB in its size. Raises UserError where the file is gone or is another one since `look_at`."""
    from PIL.Image import Resampling

    try:
        opened = _decoded(image.path)
    except ImageError as error:
        raise UserError(f"image {image.path} {error}, and it was read when its row was tokenized; put it back"
                        ) from error
    size = (image.width, image.height)
    return opened if opened.size == size else opened.resize(size, Resampling.BICUBIC)


def blank_image() -> Image:
    """A small black one, for a pass whose result does not count."""
    from PIL import Image

    return Image.new("RGB", (64, 64))


def file_digest(image: ImageRef) -> str:
    """A hash of the image's file and its size. Raises UserError where the file is gone."""
    try:
        return f"{_digest(image.path, version(image.path))} {image.width}x{image.height}"
    except OSError as error:
        raise UserError(f"image {image.path} cannot be read ({error.strerror}), and it was read when its row was "
                        "tokenized; put it back") from error


@lru_cache(4096)
def _digest(path: str, _version: tuple[int, ...]) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def data_url(image: ImageRef) -> str:
    """The image as RGB in its size, as the data URL of a PNG. Raises UserError as open_image."""
    return _data_url(image, version(image.path))


@lru_cache(8)  # those of a group's responses follow each other
def _data_url(image: ImageRef, _version: tuple[int, ...]) -> str:
    return f"data:image/png;base64,{base64.b64encode(png_of(open_image(image)) or b'').decode()}"


def png_of(value: Any) -> bytes | None:
    """An image in memory (PIL.Image) as the bytes of a file; None for anything else."""
    if not (hasattr(value, "getbands") and hasattr(value, "save")):
        return None
    file = BytesIO()
    value.convert("RGB").save(file, "PNG")
    return file.getvalue()


def thumbnails(paths: Sequence[object]) -> list[tuple[str, str | None]]:
    """Name and `thumbnail` of each of the first MAX_SHOWN images; None beside the name of one that cannot be read, and
    beside how many more there are."""
    shown = []
    for path in map(str, paths[:MAX_SHOWN]):
        name, url = escape_control(os.path.basename(path)), thumbnail(path)
        shown.append((name if url else f"{name} (cannot be read)", url))
    more = len(paths) - MAX_SHOWN
    return shown + [(f"and {more} more", None)] * (more > 0)


def thumbnail(path: str) -> str | None:
    """The image in a file as the data URL of a small JPEG, for pages; None where it cannot be read (any more)."""
    try:
        return _thumbnail(path, version(path)) if os.path.isfile(path) else None  # no pipe
    except (OSError, ImageError, UserError):  # UserError: Pillow is not installed
        return None


@lru_cache(512)
def _thumbnail(path: str, _version: tuple[int, ...]) -> str:
    file, image = BytesIO(), _decoded(path, 2 * THUMBNAIL)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    image.save(file, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _decoded(path: str, side: int = 0) -> Image:
    """The first frame, upright, as RGB. side: pixels that are enough, where the format can decode fewer (JPEG)."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise UserError("rows with images need the package pillow; install hybrid-rlhf[vision]") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd files; the bound of pixels below is ours
            with Image.open(path, formats=_FORMATS) as image:
                if image.width * image.height > MAX_FILE_PIXELS:
                    raise Image.DecompressionBombError
                if side:
                    image.draft("RGB", (side, side))
                return ImageOps.exif_transpose(image).convert("RGB")
    except Image.DecompressionBombError as error:  # Pillow's own for yet larger ones
        raise ImageError(f"has more than {MAX_FILE_PIXELS:,} pixels") from error
    except (OSError, SyntaxError, ValueError, EOFError, RuntimeError) as error:  # Pillow's for files
        reason = "Pillow knows no such image" if isinstance(error, Image.UnidentifiedImageError) else str(error)
        reason = getattr(error, "strerror", None) or reason.partition(" (")[0]  # without names and numbers of bytes
        raise ImageError(f"cannot be read ({reason})") from error
