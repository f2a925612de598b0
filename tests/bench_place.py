"""bench.py with another folder to read and write in, and with words of a command line."""

from __future__ import annotations

from pathlib import Path

import bench
import pytest


def move_bench(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its scripts, record and page are in `folder` from now on."""
    monkeypatch.setattr(bench, "ROOT", folder)
    monkeypatch.setattr(bench, "RECORD", folder / "benchmarks.json")
    monkeypatch.setattr(bench, "PAGE", folder / "benchmarks.md")
    (folder / "benchmarks").mkdir()
    return folder


def bench_with(monkeypatch: pytest.MonkeyPatch, *words: str) -> int | None:
    monkeypatch.setattr("sys.argv", ["bench.py", *words])
    return bench.main()
