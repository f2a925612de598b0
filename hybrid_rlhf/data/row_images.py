"""Images of rows: which stand where in messages, and files of those that are none.

In a message each image is one mark IMAGE in the content; its key IMAGES lists them, first as the row names them (None:
the next one of the row's column), and after `resolved` as ImageRef. A mark in a message without that key is text.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, unquote_to_bytes

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.image_files import ImageError, ImageRef, look_at, scaled, version
from hybrid_rlhf.core.own_files import refusal, write_file
from hybrid_rlhf.core.strict_json import loads
from hybrid_rlhf.data.turns import IMAGE, IMAGES, SkipRow

COLUMNS = ("images", "image")  # that are read; further ones with images are not
MAX_URL_BYTES, _URL_SECONDS = 20_000_000, 20
SAID = "an image in an answer"
COUNT = "another number of images than places for them"
NO_TURN = "images beside text without a user's turn"
URL = "an image behind a URL (data.allow_image_urls true fetches it)"
NOT_FETCHED = "an image whose URL gives none"
MISSING = "an image whose file is missing"
NO_IMAGE = "an image that is neither a path nor a data URL nor bytes"
SCALED = "images scaled down to data.max_pixels"
_KEYS = ("bytes", "image", "image_url", "url", "path")  # of an image in a mapping, the first that is filled
_SPELLED = "<image>"  # LLaVA's place of an image


class Files(NamedTuple):
    """Where images are. folder: paths are relative to it, else to the working folder; kept: of images that are not
    files; max_pixels: larger ones are scaled down; allow_urls: whether URLs are fetched."""

    folder: Path
    kept: Path
    max_pixels: int
    allow_urls: bool


def is_filled(value: object) -> bool:
    """Whether a value contains anything but None and empty strings."""
    if isinstance(value, dict | list):
        return any(map(is_filled, value.values() if isinstance(value, dict) else value))
    return value is not None and (not isinstance(value, str) or value.strip().lower() not in ("", "none", "null"))


def column_of(row: Mapping) -> str | None:
    """The column with a row's images."""
    names = {str(name).lower(): name for name in row if str(name).lower() in COLUMNS and is_filled(row[name])}
    return next((names[name] for name in COLUMNS if name in names), None) if names else None


def is_image(part: object) -> bool:
    """Whether a part of a message is an image."""
    if not isinstance(part, dict):
        return False
    kind = part.get("type")
    return kind in ("image", "image_url") if kind else any(is_filled(part.get(k)) for k in ("image", "image_url"))


def source_of(value: object) -> object:
    """The path, URL or bytes in a part of a message or in an item of a column; None where it names none."""
    while isinstance(value, dict):
        value = next((value[key] for key in _KEYS if is_filled(value.get(key))), None)
    return value


def listed(value: object) -> list:
    """The sources in a column: one, a list of them, or its JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = loads(value)
        except ValueError:
            return [value]
    value = source_of(value)
    return [source_of(item) for item in value if is_filled(item)] if isinstance(value, list) else [value]


def placed(messages: Sequence[dict], column: Sequence[object]) -> list[dict]:
    """Messages with a source for each image. column: the sources of the row's column, for the places without one:
    parts; without any each <image> in text; without those the beginning of the first user turn, as TRL's
    prepare_multimodal_messages."""
    if column and not any(m.get(IMAGES) for m in messages):
        messages = _with_places(messages, len(column))
    if any(m.get(IMAGES) and m["role"] == "assistant" for m in messages):
        raise SkipRow(SAID)
    if sum(source is None for m in messages for source in m.get(IMAGES, ())) != len(column):
        raise SkipRow(COUNT)
    rest = iter(column)
    return [{**m, IMAGES: [next(rest) if source is None else source for source in m[IMAGES]]} if m.get(IMAGES) else m
            for m in messages]


def _with_places(messages: Sequence[dict], count: int) -> list[dict]:
    asked = [i for i, m in enumerate(messages) if m["role"] == "user"]
    if not asked:
        raise SkipRow(NO_TURN)
    is_spelled = any(_SPELLED in messages[i]["content"] for i in asked)
    out = list(messages)
    for i in asked if is_spelled else asked[:1]:
        text = out[i]["content"].replace(IMAGE, "\ufffd")
        text = text.replace(_SPELLED, IMAGE) if is_spelled else IMAGE * count + text
        if IMAGE in text:
            out[i] = {**out[i], "content": text, IMAGES: [None] * text.count(IMAGE)}
    return out


def sources_in(messages: Sequence[Mapping]) -> list:
    return [source for m in messages for source in m.get(IMAGES, ())]


def name_of(source: object) -> str:
    """What distinguishes an image from others, on every machine alike."""
    if isinstance(source, str) and not source.startswith("data:"):
        return os.path.basename(source)
    return hashlib.sha256(source if isinstance(source, bytes) else str(source).encode()).hexdigest()


def bare(value: object) -> object:
    """A JSON value without the bytes of images."""
    if isinstance(value, bytes) or (isinstance(value, str) and value.startswith("data:image/")):
        return None
    if isinstance(value, dict):
        return {k: bare(v) for k, v in value.items()}
    return [bare(v) for v in value] if isinstance(value, list) else value


def resolved(messages: Sequence[dict], files: Files) -> tuple[list[dict], int]:
    """Messages with an ImageRef for each source, and how many of them are scaled down. Raises SkipRow for an image that
    cannot be read."""
    number = 0

    def look(source: object) -> ImageRef:
        nonlocal number
        try:
            whole = look_at(_path(source, files))
        except ImageError as error:
            raise SkipRow(f"an image that {error}") from error
        number += whole.width * whole.height > files.max_pixels
        return scaled(whole, files.max_pixels)

    out = [{**m, IMAGES: list(map(look, m[IMAGES]))} if m.get(IMAGES) else m for m in messages]
    return out, number


def _path(source: object, files: Files) -> str:
    """The absolute path of an image's file; one that is not a file is written into `files.kept`."""
    if isinstance(source, bytes):
        return _kept(source, files)
    if not isinstance(source, str):
        raise SkipRow(NO_IMAGE)
    if source.startswith("data:"):
        head, _, data = source.partition(",")
        try:
            return _kept(base64.b64decode(data) if head.endswith(";base64") else unquote_to_bytes(data), files)
        except binascii.Error:
            raise SkipRow(NO_IMAGE) from None
    if source.startswith(("http://", "https://")):
        if not files.allow_urls:
            raise SkipRow(URL)
        return _kept(_fetched(source), files)
    path = local_path(source, files.folder)
    if path is None:
        raise SkipRow(MISSING)
    return path


def local_path(source: str, folder: Path) -> str | None:
    """The absolute path of a file that a row names; None where there is none."""
    name = unquote(source.removeprefix("file://")) if source.startswith("file://") else os.path.expanduser(source)
    return next((os.path.abspath(path) for path in (folder / name, name) if os.path.isfile(path)), None)


def is_missing(source: object, folder: Path) -> bool:
    """Whether a row names an image by a path where there is no file."""
    return (isinstance(source, str) and not source.startswith(("data:", "http://", "https://"))
            and local_path(source, folder) is None)


def _fetched(url: str) -> bytes:
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "hybrid_rlhf"})
        with urllib.request.urlopen(request, timeout=_URL_SECONDS) as answer:
            data = answer.read(MAX_URL_BYTES + 1)
    except (OSError, ValueError) as error:
        raise SkipRow(NOT_FETCHED) from error
    if len(data) > MAX_URL_BYTES:
        raise SkipRow(f"an image of more than {MAX_URL_BYTES:,} bytes behind a URL")
    return data


def _kept(data: bytes, files: Files) -> str:
    path = files.kept / hashlib.sha256(data).hexdigest()
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, data)
        except OSError as error:
            raise UserError(f"images cannot be written to {path.parent}: {refusal(error) or error}; "
                            "give another data.cache_dir") from error
    return os.path.abspath(path)


def has_images(value: object) -> bool:
    """Whether a row, or a value in it, may name images."""
    if isinstance(value, dict):
        return column_of(value) is not None or is_image(value) or any(map(has_images, value.values()))
    return any(map(has_images, value)) if isinstance(value, list) else isinstance(value, str) and '"image' in value


def stamp(row: Mapping, folder: Path) -> str:
    """The version of every image file that a row may name: with another file the row is another one."""
    paths = [(text, local_path(text, folder)) for text in _named(row)]
    return "".join(f"{text} {path} {path and version(path)}" for text, path in paths)


def _parsed(value: object) -> object:
    """A JSON text of messages or images as its value, as rows are read; anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError):
            return loads(value)
    return value


def _named(value: object) -> Iterator[str]:
    """The texts in a row that may name an image's file."""
    if isinstance(value, str):
        if len(value) < 4096 and not value.startswith("data:"):
            yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            inner = _parsed(inner)
            if isinstance(inner, dict | list) or str(key).lower() in (*COLUMNS, *_KEYS):
                yield from _named(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _named(inner)
