"""make docs: the API reference comes from the docstrings, without a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_is_made_without_warnings_and_explains_the_public_names(tmp_path) -> None:
    pytest.importorskip("pdoc")
    script = [sys.executable, str(ROOT / "docs" / "write_api.py"), str(tmp_path / "api")]
    done = subprocess.run(script, capture_output=True, text=True, env=os.environ | {"PYTHONWARNINGS": "ignore"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    pages = {p.relative_to(tmp_path / "api").as_posix() for p in (tmp_path / "api").rglob("*.html")}
    assert {"hybrid_rlhf/cli.html", "hybrid_rlhf/trainers/ppo.html", "hybrid_rlhf/training/step3_ppo.html",
            "hybrid_rlhf/inference/server.html", "hybrid_rlhf/engine/hybrid.html"} <= pages
    text = (tmp_path / "api" / "hybrid_rlhf" / "rewards.html").read_text(encoding="utf-8")
    assert "BadAnswer" in text and "(B,)" in text
