"""A peer in a process of its own, and if need be under a Python of its own, that does one step when it is told to.

Its libraries, allocator settings and process groups are then its own, and it waits (at no cost) while we are measured.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

# Without what names a process group, ours at ZeRO 3 or a launcher's: a child that uses accelerate would try to join it.
ENVIRONMENT = {name: value for name, value in os.environ.items()
               if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
BENCHMARKS = Path(__file__).resolve().parents[1]


def own_environment() -> Path:
    """Where `make bench-peers` installs peers: $HYBRID_RLHF_CACHE/peers, or ~/.cache/hybrid_rlhf/peers."""
    root = os.environ.get("HYBRID_RLHF_CACHE") or Path.home() / ".cache" / "hybrid_rlhf"
    return Path(root).expanduser() / "peers"


def python_for(package: str) -> str | None:
    """An interpreter that has `package`: that of the peers' own environment, or this one; None if neither has it."""
    place = own_environment()
    python = place / "bin" / "python"
    if python.exists() and any(place.glob(f"lib/python3*/site-packages/{package}/__init__.py")):
        return str(python)
    return sys.executable if importlib.util.find_spec(package) else None


class PeerProcess:
    """`kind` is MODULE:CLASS within peers/; settings are the keyword arguments of that class, as JSON can hold them.

    It is made in the child, which takes `threads` threads. step() returns after its step; .seconds is the newest one's
    own time, .peak the most bytes that the child ever held, .versions what it runs on. Raises SystemExit if it ends.
    """

    def __init__(self, python: str, kind: str, settings: dict, threads: int) -> None:
        command = [python, str(Path(__file__)), kind, json.dumps(settings), str(threads)]
        environment = ENVIRONMENT | {"PYTHONPATH": str(BENCHMARKS), "TRL_EXPERIMENTAL_SILENCE": "1"}
        self.name = kind
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                         env=environment)
        self.versions: dict[str, str] = self._answer()
        self.seconds, self.peak = 0.0, 0

    def step(self) -> None:
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        found = self._answer()
        self.seconds, self.peak = found["seconds"], found["peak"]

    def close(self) -> None:
        """End the child; nothing of it stays."""
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the peer's process ended with {self._process.wait()}; see above")
        return json.loads(line)


def serve(kind: str, settings: dict, threads: int) -> None:
    """In the child: make the peer, say so, then do a step for every line that comes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    import torch
    import transformers

    torch.set_num_threads(threads)
    module, name = kind.split(":")
    peer = getattr(importlib.import_module(f"peers.{module}"), name)(**settings)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}), file=answers)
    for _ in sys.stdin:
        began = time.perf_counter()
        peer.step()
        took = time.perf_counter() - began
        status = Path("/proc/self/status")
        lines = status.read_text(encoding="ascii").splitlines() if status.exists() else []
        peak = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
        print(json.dumps({"seconds": took, "peak": peak}), file=answers)
    os._exit(0)  # a trainer's thread may wait inside torch


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
