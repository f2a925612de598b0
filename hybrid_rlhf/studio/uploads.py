"""Uploads of data files: streamed to a temporary file, and renamed when complete."""

from __future__ import annotations

import asyncio
import os
import unicodedata
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hybrid_rlhf.core.own_files import clear_unfinished, fresh_path
from hybrid_rlhf.studio.studio import Refused, Route, Studio, own_folder

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
MAX_BYTES = 4 * 2**30
MAX_NAME = 200  # bytes: file systems allow 255, and a number may be added


def routes(studio: Studio) -> list[Route]:
    clear_unfinished(own_folder(studio, "data"))

    async def post(request: Request) -> Response:
        return JSONResponse(await upload(studio, request), headers={"cache-control": "no-store"})

    return [Route("POST", "/api/upload", post, is_raw=True),
            Route("GET", "/api/uploads", lambda _query, _body: {"files": uploads(studio)})]


def uploads(studio: Studio) -> list[dict]:
    """All uploads, newest first, with files that were copied there by hand, but not links."""
    rows = []
    for entry in os.scandir(own_folder(studio, "data")):
        if entry.is_file(follow_symlinks=False) and not entry.name.startswith(".") and _suffix(entry.name) in SUFFIXES:
            info = entry.stat()
            rows.append((info.st_mtime, {"name": entry.name, "path": entry.path, "bytes": info.st_size}))
    return [row for _, row in sorted(rows, key=lambda pair: (-pair[0], pair[1]["name"]))]


def checked_name(text: str) -> str:
    """The validated name of a file. Raises Refused for paths, hidden files and names like options."""
    name = unicodedata.normalize("NFC", text)
    if _suffix(name) not in SUFFIXES:
        raise Refused(415, f"the file's name must end with one of {', '.join(SUFFIXES)}")
    is_plain = all(char.isalnum() or char in "._- " for char in name) and name[0].isalnum()
    if not is_plain or len(name.encode("utf-8", "replace")) > MAX_NAME:
        raise Refused(400, "the file's name may have letters, digits, dots, _, - and spaces, must begin with a letter "
                           f"or a digit, and have at most {MAX_NAME} bytes; give it another name")
    return name[:-len(_suffix(name))] + _suffix(name)  # with a lower-case suffix, as readers expect


async def upload(studio: Studio, request: Request) -> dict:
    """Save the request's body in .studio/data; an existing name gets -2. An incomplete file is removed."""
    name = checked_name(request.query_params.get("name", ""))
    _check_size(int(request.headers.get("content-length", 0)))
    part = fresh_path(own_folder(studio, "data"))
    try:
        with part.open("xb") as file:
            size = await _write(file, request.stream())
        target = _free_path(part.parent, name)
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)
    return {"path": str(target), "name": target.name, "bytes": size}


async def _write(file: BinaryIO, body: AsyncIterator[bytes]) -> int:
    """Write the body; returns its size, counted here, since a client may give no Content-Length."""
    size = 0
    async for piece in body:
        size += len(piece)
        _check_size(size)
        await asyncio.to_thread(file.write, piece)
    file.flush()
    await asyncio.to_thread(os.fsync, file.fileno())
    if not size:
        raise Refused(400, "the file is empty")
    return size


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise Refused(413, f"the file is larger than {MAX_BYTES / 2**30:.0f} GiB; give its path in place of it")


def _free_path(folder: Path, name: str) -> Path:
    """The first of NAME, NAME-2, NAME-3 that is free."""
    stem, suffix, number = name[:-len(_suffix(name))], _suffix(name), 1
    while os.path.lexists(target := folder / (f"{stem}-{number}{suffix}" if number > 1 else name)):
        number += 1
    return target


def _suffix(name: str) -> str:
    """The last suffix, in lower case; "" without one."""
    return Path(name).suffix.lower() if "/" not in name and "\0" not in name else ""
