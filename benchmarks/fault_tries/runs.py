"""Runs that are killed, stopped, damaged or out of disk, and the user's own files beside them."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from fault_tries.attempt import Group, Try, expect, until
from fault_tries.product import (
    SFT,
    Ended,
    Started,
    before_step,
    check_code,
    command,
    contents,
    dies_before_step,
    done_or_refused,
    finished,
    read_rows,
    refused,
    same_run,
    status_of,
    take,
    take_killed,
    write_rows,
)

# --- resumed on other rows, and on damaged checkpoints ---------------------------------------------------------------

OTHER_ROWS: dict[str, Callable[[list[dict]], list[dict]]] = {
    "a letter of an answer": lambda rows: [rows[0] | {"completion": "rad"}, *rows[1:]],
    "a row less": lambda rows: rows[:-1], "a row more": lambda rows: [*rows, {"prompt": "say x", "completion": "x"}],
    "two rows exchanged": lambda rows: [rows[1], rows[0], *rows[2:]]}


def other_rows(change: Callable[[list[dict]], list[dict]], place: Path) -> None:
    take_killed(place)
    before, rows = contents("run/checkpoints"), read_rows("sft.jsonl")
    write_rows("sft.jsonl", change(rows))
    refused(command(*SFT), "rows")
    expect(contents("run/checkpoints") == before, "checkpoints were changed")
    write_rows("sft.jsonl", rows)
    finished(command(*SFT))
    same_run(place)


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit": flip, "half of it": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]), "gone": Path.unlink,
    "of the checkpoint before": lambda p: shutil.copy(p.parents[1] / "step-00000002" / p.name, p)}


def damaged(name: str, damage: Callable[[Path], object], place: Path, of: tuple[str, ...] = ("step-00000004",)) -> None:
    """The newest checkpoint is damaged: named, and the run goes on from the one before, or from the beginning."""
    take_killed(place)
    for checkpoint in of:
        damage(Path("run/checkpoints", checkpoint, name))
    log = finished(command(*SFT)).err
    expect(all(checkpoint in log for checkpoint in of), f"the damage is not reported: {log[:300]}")
    if len(of) == 1:
        expect("goes on after step 2" in log, "did not go on after step 2")
    same_run(place)


RESUMED = Group(
    "a killed run is started again: on other rows, on damaged checkpoints",
    "other rows: refused in one line with the checkpoints untouched. Damage: named, the run goes on from the "
    "checkpoint before. In the end the same bits as without interruption",
    [Try(f"rows: {name}", partial(other_rows, change)) for name, change in OTHER_ROWS.items()]
    + [Try(f"{file}: {name}", partial(damaged, file, damage))
       for file in ("state.safetensors", "state.json", "manifest.json") for name, damage in DAMAGE.items()]
    + [Try("both checkpoints", partial(damaged, "state.json", Path.unlink, of=("step-00000004", "step-00000002")))])


# --- signals ---------------------------------------------------------------------------------------------------------


def slowed() -> None:
    """In a command's process: steps that take their time, so that a signal comes in the middle of one."""
    before_step(lambda _number: time.sleep(0.15))


def begun() -> Started:
    started, metrics = Started(SFT, slowed), Path("run/metrics.jsonl")
    until(lambda: (metrics.exists() and metrics.stat().st_size) or started.has_ended(), 30, "the first step")
    return started


def signalled(numbers: list[int], pause: float, place: Path) -> None:
    """It saves (a second signal stops it at once) and stops with 130, and the same command ends as if nothing had
    been."""
    take(place, "base", "sft.jsonl")
    started = begun()
    for number in numbers:
        os.kill(started.pid, number)
        time.sleep(pause)
    check_code(started.wait(), 130)
    if not pause:
        expect(status_of("run") == "stopped", f"run.json says {status_of('run')}")
    finished(command(*SFT))
    same_run(place)


def unread(place: Path) -> None:
    """stdout and stderr are a pipe whose reader leaves, as | head -1 does."""
    take(place, "base", "sft.jsonl")
    reader, writer = os.pipe()

    def onto_pipe() -> None:
        os.close(reader)
        os.dup2(writer, 1), os.dup2(writer, 2)

    started = Started(SFT, onto_pipe)
    os.close(writer), os.close(reader)
    expect((code := started.wait().code) == 0, f"exit code {code}, not 0")
    same_run(place)


SIGNALS = Group(
    "signals, and output that nobody reads",
    "130, and the same command ends in the same bits as without; with output that nobody reads the run ends with 0",
    [Try(signal.Signals(number).name, partial(signalled, [number], 0.0)) for number in (1, 2, 15)]
    + [Try("SIGINT twice", partial(signalled, [2, 2], 0.03)), Try("a reader that leaves", unread)])


# --- a full disk -----------------------------------------------------------------------------------------------------


def mount(size: str) -> bool:
    """A file system of so many bytes at ./disk, for this process; False where that may not be."""
    Path("disk").mkdir(exist_ok=True)
    if ctypes.CDLL(None, use_errno=True).unshare(0x00020000):  # CLONE_NEWNS: it ends with this process
        return False
    for words in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", os.path.abspath("disk")]):
        if subprocess.run(["mount", *words], capture_output=True).returncode:
            return False
    return True


def confined(size: int, words: list[str]) -> tuple[Ended, bool]:
    """A command on a disk of so many KiB, or where none can be mounted with files of at most so many; and whether it
    was a disk."""
    is_disk = mount(f"{size}k")
    bound = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size << 10, resource.RLIM_INFINITY))
    return command(*words, prepare=None if is_disk else bound), is_disk


def train_on(size: int, place: Path) -> None:
    """A run whose folder is on a small disk; with room, the same command."""
    take(place, "base", "sft.jsonl")
    words = [*SFT, "--output_dir", "disk/run", "--train.save_total_limit", "2"]
    ended, is_disk = confined(size, words)
    if not done_or_refused(ended):
        expect(any(word in ended.err for word in ("No space left", "File too large", "cannot save")), "not the cause")
        expect(not Path("disk/run/model").exists() or Path("disk/run/model/model.safetensors").exists(), "half a model")
        if is_disk:
            subprocess.run(["mount", "-o", "remount,size=64m", os.path.abspath("disk")], check=True)
        finished(command(*words))
    elif "cannot save a checkpoint" in ended.err:  # an older one stays, and the model is the same
        weights = "model/model.safetensors"
        expect(Path("disk/run", weights).read_bytes() == (place / "straight" / weights).read_bytes(), "another model")
        return
    same_run(place, run="disk/run")


def export_to(size: int, place: Path) -> None:
    take(place, "straight")
    ended, _ = confined(size, ["export", "--model", "straight", "--output_dir", "disk/mine"])
    if done_or_refused(ended):
        expect(Path("disk/mine/model.safetensors").exists(), "no model")
    else:
        refused(ended, "export: cannot write")
        expect(not os.listdir("disk"), f"left {os.listdir('disk')}")


DISK = Group(
    "a full disk",
    "training goes on, or ends with 2 and one line; with room the same command ends in the same bits as without. An "
    "export is whole or not there",
    [Try(f"a run on a disk of {size} KiB", partial(train_on, size)) for size in (12, 256, 640, 960, 2400)]
    + [Try(f"an export to a disk of {size} KiB", partial(export_to, size)) for size in (4, 128, 180)])


# --- what is the user's own ------------------------------------------------------------------------------------------

MINE = "years of work"
EXPORT = ["export", "--model", "straight"]
NEAR = ["exp/mine.tmp/thesis", "exp/mine.old/thesis", "exp/.mine.tmp/thesis", "exp/mine~/thesis", "exp/mine.bak",
        "exp/.hybrid_rlhf-mine/thesis", "exp/model/thesis"]
ONTO = {"a folder with a file": "full", "a file": "file", "a model": "base", "the run itself": "straight"}


def write_mine(path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(MINE)


def export_beside(place: Path) -> None:
    """Folders whose names are almost those of the export stay as they are."""
    take(place, "straight")
    for name in NEAR:
        write_mine(name)
    before = contents("exp")
    finished(command(*EXPORT, "--output_dir", "exp/mine"))
    expect(contents("exp", besides=["mine"]) == before, "what lay beside the export was changed")


def onto(words: list[str], target: str, place: Path) -> None:
    """What is there is never replaced."""
    take(place, "base", "sft.jsonl", "straight")
    write_mine("full/thesis"), write_mine("file")
    before = contents(".", besides=["cache"])
    refused(command(*words, "--output_dir", target))
    expect(contents(".", besides=["cache"]) == before, "something was changed")


def export_killed(number: int, place: Path) -> None:
    """Killed before its so-manieth rename: what was there stays, and the same command does it."""
    take(place, "straight")
    write_mine("exp/mine.tmp/thesis")
    words = [*EXPORT, "--output_dir", "exp/mine"]

    def dies_at_rename() -> None:
        numbers, replace = count(1), os.replace
        os.replace = os.rename = lambda *paths, **named: (
            os._exit(9) if next(numbers) == number else replace(*paths, **named))

    killed = command(*words, prepare=dies_at_rename)
    expect(Path("exp/mine.tmp/thesis").read_text() == MINE, "what lay beside it was changed")
    check_code(killed, 9)
    if Path("exp/mine/model.safetensors").exists():
        shutil.rmtree("exp/mine")
    finished(command(*words))
    expect(Path("exp/mine/model.safetensors").exists(), "no model")


def run_beside(place: Path) -> None:
    """A run leaves what it did not make in its folder, through a kill, resuming and a start anew."""
    take(place, "base", "sft.jsonl")
    check_code(command(*SFT, prepare=dies_before_step(4)), 9)
    names = ["run/model.tmp/thesis", "run/notes.txt", "run/plots/mine.png", "run/checkpoints/mine/thesis"]
    for name in names:
        write_mine(name)
    finished(command(*SFT))
    finished(command(*SFT, "--resume", "never"))
    gone = [name for name in names if not Path(name).exists() or Path(name).read_text() != MINE]
    expect(not gone, f"changed or removed: {gone}")


BESIDE = Group(
    "exports and runs beside a user's folders",
    "what the command did not make is there, byte for byte; where it cannot be left, one line and nothing written",
    [Try("an export beside others", export_beside), Try("a run, killed, resumed and started anew", run_beside)]
    + [Try(f"export to {kind}", partial(onto, EXPORT, path)) for kind, path in ONTO.items()]
    + [Try(f"a run in {kind}", partial(onto, SFT, ONTO[kind])) for kind in list(ONTO)[:3]]
    + [Try(f"an export killed at rename {number}", partial(export_killed, number)) for number in (1, 2)])
