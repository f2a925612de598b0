"""bench.py with another folder to read and write in."""

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


def row(case: str, **values: object) -> dict:
    """A row as harness.py makes it."""
    return {"case": case, "work": f"work of {case}", "beside": "a peer", "ours": 400.0, "peer": 250.0, "ratio": 1.6,
            "asked": "", "floor_ratio": 1.2, "floor_asked": "", "missed": [], "unit": "s", "machine": "m"} | values


def entry(*rows: dict, command: str = "python benchmarks/NAME.py --old") -> dict:
    """An entry of the record."""
    return {"command": command, "date": "2026-01-01", "seconds": 10.0, "rows": list(rows)}
