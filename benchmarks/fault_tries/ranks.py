"""Two processes under torchrun, of which one, or the launcher, is killed or stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

from harness import ROOT

from fault_tries.attempt import Group, Try, expect, until
from fault_tries.prepared import SFT
from fault_tries.product import status_of, take
from tests.factories.processes import free_port, launch, start

STEP_SECONDS = 0.2


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def begun(*more: str) -> tuple[subprocess.Popen, list[int]]:
    """The launcher and its two processes, in their third step or so: the loop on a trainer that counts and waits."""
    launcher = launch(str(ROOT / "tests/crash/rank_loop.py"), os.getcwd(), str(STEP_SECONDS), *more)
    files = [Path(f"rank{i}") for i in (0, 1)]
    found: list[str] = []

    def have_begun() -> bool:
        found[:] = [f.read_text() for f in files if f.exists()]  # emptied and written in every step
        return len(found) == 2 and all(found)

    until(have_begun, 60, "the first step of two processes")
    time.sleep(2 * STEP_SECONDS)
    return launcher, [int(text) for text in found]


def gone(pids: list[int], seconds: float) -> None:
    until(lambda: not any(map(is_there, pids)), seconds, "the end of all processes")


def fails(launcher: subprocess.Popen, words: str) -> None:
    """It ends with one line of error, which holds the words; run.json says that it has failed."""
    said = launcher.communicate(timeout=60)[1]
    print(said)
    ours = said.replace('Traceback (most recent call last):\n  File "<frozen runpy>"', "")  # torchrun ends with one
    expect("Traceback (most recent call last):\n" not in ours, "a traceback")
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    expect(len(lines) == 1 and words in lines[0], f"said: {lines}")
    expect(status_of("run") == "failed", f"run.json says {status_of('run')}")


def launcher_ends(number: int, _place: Path) -> None:
    launcher, pids = begun()
    launcher.send_signal(number)
    gone(pids, 40)
    launcher.communicate(timeout=40)
    expect(status_of("run") == "stopped", f"run.json says {status_of('run')}")
    expect(len(list(Path("run/checkpoints").iterdir())) == 1, "no checkpoint, or more than one")


def one_is_killed(which: int, _place: Path) -> None:
    launcher, pids = begun()
    os.kill(pids[which], signal.SIGKILL)
    gone(pids, 15)
    fails(launcher, f"process {which} has died")


def one_is_stopped(which: int, _place: Path) -> None:
    """It is told by the other's collective, whose timeout is 3 s here."""
    launcher, pids = begun("3")
    os.kill(pids[which], signal.SIGSTOP)
    until(lambda: not is_there(pids[1 - which]), 40, "the end of the other")
    os.kill(pids[which], signal.SIGCONT)
    fails(launcher, f"process {which} is stopped")
    gone(pids, 10)


def killed_while_it_trains(which: int, place: Path) -> None:
    """The real thing: an SFT run by train.py in two processes."""
    take(place, "base", "sft.jsonl")
    words = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port(),
             str(ROOT / "train.py"), *SFT, "--train.max_steps", "100000", "--train.per_device_train_batch_size", "3",
             "--train.num_train_epochs", "100000"]
    launcher = start([os.sys.executable, *words], Path.cwd())
    found: list[int] = []

    def ranks() -> list[int]:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        found[:] = [pid for pid in map(int, children) if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return found

    until(lambda: Path("run/checkpoints/step-00000002").exists() and len(ranks()) == 2, 100, "a checkpoint")
    os.kill(sorted(found)[which], signal.SIGKILL)
    gone(found, 20)
    fails(launcher, f"process {which} has died")


RANKS = Group(
    "two processes under torchrun",
    "a launcher that is killed: both save and end. A killed or stopped process: the other ends, "
    "one line names it, run.json says failed",
    [Try(f"{signal.Signals(n).name} of the launcher", partial(launcher_ends, n), 120.0, is_alone=True) for n in (9, 15)]
    + [Try(f"SIGKILL of process {i}", partial(one_is_killed, i), 120.0, is_alone=True) for i in (0, 1)]
    + [Try("SIGSTOP of process 1", partial(one_is_stopped, 1), 120.0, is_alone=True)]
    + [Try("SIGKILL of process 1 of train.py", partial(killed_while_it_trains, 1), 150.0, is_alone=True)])
