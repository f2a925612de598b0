"""The embedded demo does what the README says: the reward model knows right from wrong, and PPO beats longer SFT."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_gets_measurably_better_and_leaves_a_model_to_chat_with(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    command = [sys.executable, str(ROOT / "train.py"), "--stage", "all", "--output_dir", str(tmp_path / "demo")]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["reward"]["accuracy"] >= 0.90
    assert 0.35 <= summary["sft"]["accuracy"] <= 0.70
    assert summary["ppo"]["accuracy"] >= summary["sft"]["accuracy"] + 0.10
    assert summary["ppo"]["accuracy"] > summary["sft_longer"]["accuracy"]
    assert summary["ppo"]["score"] > max(summary["sft"]["score"], summary["sft_longer"]["score"])
    assert "Held-out prompts" in run.stdout and "sft longer" in run.stdout.replace("_", " ")
    chat = subprocess.run([sys.executable, str(ROOT / "inference" / "chat"), "--model",
                           str(tmp_path / "demo" / "ppo" / "model"), "--prompt", "Hello"],
                          capture_output=True, text=True, env=environment, check=False)
    assert chat.returncode == 0 and chat.stdout.strip()
    again = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert again.returncode == 0 and again.stderr.count("nothing to do") >= 3
    assert json.loads((tmp_path / "demo" / "summary.json").read_text()) == summary
