"""A training step of the user's own runs by the same launcher, fit, checkpoint and report, and it learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.factories.tiny import own_cache, save_tiny

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "custom_flow.py"
PAYS = """
def short_words(completions, **_):
    return [sum(c.count(x) for x in "aeiou") / 8 for c in completions]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flow")
    save_tiny(folder / "base", template=False)
    (folder / "pay.py").write_text(PAYS)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"say {w}"}) + "\n"
                                               for w in ("red", "blue", "cat", "dog", "sun", "moon", "fox", "tree")))
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        yield folder


def start(place: Path, *more: str) -> subprocess.CompletedProcess:
    argv = [sys.executable, str(SCRIPT), f"--output_dir={place}/run", f"--model.model_name_or_path={place}/base",
            f"--data.sources=[{{path: {place}/rows.jsonl}}]", "--data.split=null", "--data.eval_fraction=0.2",
            "--data.max_prompt_length=32", f"--reward.functions={place}/pay.py:short_words", "--train.max_steps=40",
            "--train.per_device_train_batch_size=6", "--train.lr_scheduler_type=constant", "--train.warmup_ratio=0",
            "--train.save_steps=20", "--ppo.sampling.max_new_tokens=8", "--model.dtype=float32",
            "--roles.actor.learning_rate=3e-3", *more]
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_the_example_is_under_forty_lines():
    assert len(SCRIPT.read_text().splitlines()) < 40


@pytest.mark.slow
def test_a_step_of_one_s_own_learns_and_leaves_what_every_run_leaves(place):
    done = start(place)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    paid = [row["reward"] for row in rows if "reward" in row]
    assert len(paid) == 40
    first, last = paid[:8], paid[-8:]
    assert min(last) > max(first) and sum(last) > 1.5 * sum(first)  # no step of the end is like one of the beginning
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-3) and rows[39]["kl"] > 0.1
    assert rows[-1]["eval/reward"] > 1.5 * rows[0]["reward"]
    assert len(list((place / "run" / "checkpoints").iterdir())) == 2
    assert json.loads((place / "run" / "run.json").read_text())["status"] == "finished"
    assert (place / "run" / "model" / "model.safetensors").exists() and (place / "run" / "samples.jsonl").exists()
