"""Files of data that the page sends: written as they come, and there under their name only when they are whole."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import stat
import unicodedata
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hybrid_rlhf.core.own_files import fresh_path, is_unfinished
from hybrid_rlhf.studio import file_lock
from hybrid_rlhf.studio.studio import Refused, Route, Studio
from hybrid_rlhf.studio.studio_files import own_folder, refused

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
MAX_BYTES, MIN_FREE = 4 * 2**30, 2**30  # of a file; of the disk when it is there
MAX_NAME = 200  # bytes: file systems have 255, and a number may be added
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)  # no files, on a disk that Windows reads
_AT_ONCE = 2**20  # bytes that are written in one go


def routes(studio: Studio) -> list[Route]:
    clear(studio)

    async def post(request: Request) -> Response:
        return JSONResponse(await upload(studio, request), headers={"cache-control": "no-store"})

    return [Route("POST", "/api/upload", post, is_raw=True),
            Route("GET", "/api/uploads", lambda _query, _body: {"files": uploads(studio)})]


def clear(studio: Studio) -> None:
    """Remove what uploads left that were under way when a studio was killed; those of another one's stay."""
    folder = own_folder(studio, "data")
    for path in folder.iterdir():
        if is_unfinished(path.name) and path.is_file() and not path.is_symlink():
            with suppress(OSError):
                lock = file_lock.take(path)
                if lock is not None:
                    path.unlink()
                    os.close(lock)


def uploads(studio: Studio) -> list[dict]:
    """The newest first. Files that someone else put there are listed too; links are not."""
    found = []
    for entry in os.scandir(own_folder(studio, "data")):
        with suppress(FileNotFoundError):
            about = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(about.st_mode) and not entry.name.startswith(".") and _suffix(entry.name) in SUFFIXES:
                found.append((about.st_mtime, {"name": entry.name, "path": entry.path, "bytes": about.st_size,
                                               "rows": None}))
    return [each for _, each in sorted(found, key=lambda pair: (-pair[0], pair[1]["name"]))]


def checked_name(given: str) -> str:
    """The name that a file gets. Refused where it may lead elsewhere, hide, or be taken for an option."""
    name = unicodedata.normalize("NFC", given)
    if _suffix(name) not in SUFFIXES:
        raise Refused(415, f"the file's name must end with one of {', '.join(SUFFIXES)}")
    is_plain = all(char.isalnum() or char in "._- " for char in name) and name[0].isalnum()
    if not is_plain or len(name.encode("utf-8", "replace")) > MAX_NAME or _DEVICES.fullmatch(name):
        raise Refused(400, "the file's name may have letters, digits, dots, _, - and spaces, must begin with a letter "
                           f"or a digit, and have at most {MAX_NAME} bytes; give it another name")
    return name[:-len(_suffix(name))] + _suffix(name)  # in lower case, as readers know it


async def upload(studio: Studio, request: Request) -> dict:
    """The request's body as a file of .studio/data; a name that is taken gets -2. Nothing is left of one that is not
    whole: too large, no room on the disk, a client that has left."""
    name = checked_name(request.query_params.get("name", ""))
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/octet-stream":
        raise Refused(415, "the body must be application/octet-stream")
    folder = await asyncio.to_thread(own_folder, studio, "data")
    length = request.headers.get("content-length", "")
    _check_room(folder, int(length) if length.isascii() and length.isdigit() else 0)
    part, lock = fresh_path(folder), None
    try:
        lock = await asyncio.to_thread(file_lock.take, part)
        assert lock is not None  # nobody else has the name
        size = await _write(folder, lock, request.stream())
        target = await asyncio.to_thread(_settle, part, folder, name)
    except OSError as error:
        raise refused(error, name) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if lock is not None:
            os.close(lock)
    return {"path": str(target), "name": target.name, "bytes": size}


async def _write(folder: Path, handle: int, body: AsyncIterator[bytes]) -> int:
    """All of the body; its size. Counted as it comes: what a client says of its length is no promise."""
    size, waiting = 0, bytearray()

    def write() -> None:
        _check_room(folder, len(waiting))
        view = memoryview(bytes(waiting))
        while view:
            view = view[os.write(handle, view):]

    async for piece in body:
        size += len(piece)
        waiting += piece
        if size > MAX_BYTES:
            raise _too_large()
        if len(waiting) >= _AT_ONCE:
            await asyncio.to_thread(write)
            waiting.clear()
    await asyncio.to_thread(write)
    await asyncio.to_thread(os.fsync, handle)
    if not size:
        raise Refused(400, "the file is empty")
    return size


def _check_room(folder: Path, more: int) -> None:
    if more > MAX_BYTES:
        raise _too_large()
    free = shutil.disk_usage(folder).free
    if free - more < MIN_FREE:
        raise Refused(507, f"no room: {free / 2**30:.1f} GiB are free on the disk, of which 1 GiB is kept; make room")


def _too_large() -> Refused:
    return Refused(413, f"the file is larger than {MAX_BYTES / 2**30:.0f} GiB; give its path in place of it")


def _settle(part: Path, folder: Path, name: str) -> Path:
    """The whole file under the first of NAME, NAME-2, NAME-3 that nothing has."""
    stem, suffix = name[:-len(_suffix(name))], _suffix(name)
    with file_lock.alone(folder / ".names.lock"):
        number = 1
        while os.path.lexists(target := folder / (f"{stem}-{number}{suffix}" if number > 1 else name)):
            number += 1
        part.rename(target)
    return target


def _suffix(name: str) -> str:
    """The last suffix, in lower case; "" for a name that is nothing else."""
    return Path(name).suffix.lower() if "/" not in name and "\0" not in name else ""
