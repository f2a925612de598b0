"""Disks that take no more: a small file system of its own where we may mount one, else files that may not grow."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fault_tries.attempt import Group, Try, expect
from fault_tries.prepared import SFT, same_run
from fault_tries.product import Ended, Started, command, contents, done_or_refused, finished, refused, status_of, take

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS: what is mounted is seen by this process and its children, and ends with them


def mount(size: str) -> bool:
    """A file system of so many bytes at ./disk, for this process; False where that may not be."""
    Path("disk").mkdir(exist_ok=True)
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS):
        return False
    for words in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", os.path.abspath("disk")]):
        if subprocess.run(["mount", *words], capture_output=True).returncode:
            return False
    return True


def remount(option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", os.path.abspath("disk")], check=True, capture_output=True)


def kibibytes(size: int) -> Callable[[], None]:
    """In a command's process: no file may be longer (the C library's writes then fail with EFBIG)."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size << 10, resource.RLIM_INFINITY))


def has_no_half_model(run: str) -> None:
    expect(not Path(run, "model").exists() or Path(run, "model/model.safetensors").exists(), "half a model")


def _confined(size: int, words: list[str]) -> tuple[Ended, bool]:
    """A command on a disk of so many KiB, or with files of at most so many, and whether it was a disk."""
    is_disk = mount(f"{size}k")
    return command(*words, prepare=None if is_disk else kibibytes(size)), is_disk


def train_on(size: int, place: Path) -> None:
    """A run whose folder is on a small disk; with room, the same command."""
    Started.draws = True
    take(place, "base", "sft.jsonl")
    words = [*SFT, "--output_dir", "disk/run", "--train.save_total_limit", "2"]
    done, is_disk = _confined(size, words)
    if not done_or_refused(done):
        expect(any(word in done.err for word in ("No space left", "File too large", "cannot save")), "not what it was")
        if Path("disk/run/run.json").exists():
            expect(status_of("disk/run") in ("failed", "running"), f"run.json says {status_of('disk/run')}")
        has_no_half_model("disk/run")
        if is_disk:
            remount("size=64m")
        finished(command(*words))
    same_run(place, run="disk/run")


def files_up_to(size: int, place: Path) -> None:
    """A run whose files may not grow beyond so many KiB; without that, the same command."""
    Started.draws = True
    take(place, "base", "sft.jsonl")
    if not done_or_refused(command(*SFT, prepare=kibibytes(size))):
        has_no_half_model("run")
        finished(command(*SFT))
    same_run(place)


def export_to(size: int, is_disk: bool, place: Path) -> None:
    take(place, "straight")
    words = ["export", "--model", "straight", "--output_dir", "disk/mine"]
    Path("disk").mkdir()
    done = _confined(size, words)[0] if is_disk else command(*words, prepare=kibibytes(size))
    if done_or_refused(done):
        expect(Path("disk/mine/model.safetensors").exists(), "no model")
    else:
        refused(done, "export: cannot write")
        expect(not os.listdir("disk"), f"left {os.listdir('disk')}")


def cache_on(size: int, place: Path) -> None:
    """The cache of tokenized rows is on the small disk."""
    take(place, "base", "sft.jsonl")
    done, _ = _confined(size, [*SFT, "--data.cache_dir", "disk/cache"])
    if not done_or_refused(done):
        finished(command(*SFT))
    same_run(place)


def read_only(place: Path) -> None:
    take(place, "base", "sft.jsonl")
    expect(mount("64m"), "no file system can be mounted here")
    remount("ro")
    refused(command(*SFT, "--output_dir", "disk/run"), "disk")
    before = contents("base")
    refused(command("export", "--model", "base", "--output_dir", "disk/mine"), "Read-only")
    expect(contents("base") == before, "the model was changed")


DISK = Group(
    "a full disk",
    "at checkpoints and plots training goes on, or ends with 2 and one line; with room the same command ends in "
    "the same bits as without. An export is whole or not there",
    [Try(f"a run on a disk of {size} KiB", partial(train_on, size))
     for size in (4, 12, 64, 256, 400, 640, 960, 1600, 2400)]
    + [Try(f"files of at most {size} KiB", partial(files_up_to, size)) for size in (1, 8, 64, 128, 300)]
    + [Try(f"an export to a disk of {size} KiB", partial(export_to, size, True)) for size in (4, 64, 128, 180)]
    + [Try(f"an export of files of at most {size} KiB", partial(export_to, size, False)) for size in (1, 32, 100)]
    + [Try(f"a cache on a disk of {size} KiB", partial(cache_on, size)) for size in (4, 16)]
    + [Try("a disk that may only be read", read_only)])
