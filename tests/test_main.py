"""python -m hybrid_rlhf is the launcher, from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hybrid_rlhf

ROOT = Path(__file__).resolve().parents[1]


def launched(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "hybrid_rlhf", *words], cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT), **env}, check=False)


def test_a_module_of_the_users_folder_is_not_taken_for_the_librarys(tmp_path):
    for name in ("yaml.py", "torch.py", "dataclasses.py", "shlex.py"):
        (tmp_path / name).write_text("raise SystemExit('a stranger')")
    for env in ({}, {"PYTHONSAFEPATH": "1"}):
        done = launched(tmp_path, "--version", **env)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"hybrid-rlhf {hybrid_rlhf.__version__}\n", "")


def test_it_calls_itself_by_the_installed_command_and_refuses_in_one_line(tmp_path):
    assert launched(ROOT, "--help").stdout.startswith("usage: hybrid-rlhf demo\n       hybrid-rlhf --stage STAGE")
    done = launched(tmp_path, "no_stage")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: no_stage: there is no such command or stage; choose demo, chat, ")
