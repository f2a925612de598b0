"""A user's file whose tools and environments do the worst that code can do, and some of the ordinary."""

from __future__ import annotations

FILE = r'''
import asyncio, ctypes, os, re, resource, signal, subprocess, time
from enum import Enum
from pathlib import Path
import numpy as np

HERE = Path(__file__).parent

class Word(str, Enum):
    ROLE = "role"
    TOOL = "tool"

def end(how: str) -> str:
    """End or hang.

    Args:
        how: in which way
    """
    if how == "exit":
        os._exit(7)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "regex":
        re.match("(a+)+$", "a" * 60 + "b")
    if how == "memory":
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        return bytearray(8 << 30)
    if how == "leaves":
        raise SystemExit(3)
    if how == "child":
        (HERE / "child").write_text(str(subprocess.Popen(["sleep", "300"]).pid))
    return f"{how} {os.getpid()}"

class Count:
    def __init__(self, step: int = 1):
        self.by, self.resets, self.total = step, 0, -1

    def reset(self, start=0, **row):
        self.resets += 1
        self.total = start
        return f"{sorted(row)} {self.resets}"

    def add(self, times: int) -> int:
        """Add.

        Args:
            times: how often
        """
        self.total += self.by * times
        return self.total

    async def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: how long
        """
        await asyncio.sleep(seconds)
        return {"waited": seconds, "loop": not asyncio.get_running_loop().is_closed()}

    def odd(self, what: str) -> str:
        """Answer.

        Args:
            what: kind
        """
        return {"bytes": b"abc", "set": {3, 1}, "array": np.arange(3), "long": "x" * 9000,
                "none": None, "tuple": (1, 2), "control": "a\x1b[2J\r\nb", "surrogate": "\ud800",
                "class": Count, "tagged": {"__type__": 3}, "table": list(range(1_000_000)), "text": "x" * 10_000_000,
                "keys": {1: "a", None: 2.5}}[what]

    def crash(self, how: str) -> str:
        """End or hang.

        Args:
            how: in which way
        """
        return end(how)

    def fail(self, what: str) -> str:
        """Raise.

        Args:
            what: kind
        """
        raise {"type": TypeError, "value": ValueError}[what]("a\nreason")

    def where(self) -> str:
        """Tell."""
        return os.getpid()

    def get_reward(self):
        return np.float32(self.total)

class Game:
    def step(self, messages):
        said = messages[-1]["content"]
        if said == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        messages[0]["content"] = "changed"
        return {"go": ([{"role": "tool", "name": "a", "content": "é"}], np.bool_(False), np.float32(0.5)),
                "words": ([{Word.ROLE: Word.TOOL, "content": Word.TOOL}], True, np.array([0.5])),
                "tagged": ([{"role": "tool", "content": "", "__type__": 3}], True, None),
                "text": ["on", False, None], "none": None, "nan": ([], True, float("nan"))}[said]

class Raises:
    def __init__(self):
        raise KeyError("no server")
    def reset(self): ...

class Crashes:
    def __init__(self):
        os._exit(9)
    def reset(self): ...
'''
