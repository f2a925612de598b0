"""A real model on real data becomes happier, by a judge that was never its reward. Skips where the data is absent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("HYBRID_RLHF_SHARED") or ROOT.parent / "shared" / "data")
EXAMPLE = ROOT / "examples" / "story_sentiment"
sys.path.insert(0, str(EXAMPLE))

needs_data = pytest.mark.skipif(not (DATA / "stories3M-hf").exists(), reason="the stories model is not here")


def test_the_openings_of_the_judge_are_not_trained_on():
    from openings import HELD_OUT, training

    assert len(HELD_OUT) == 8 and len(set(training())) == 1728
    assert not set(HELD_OUT) & set(training())


def test_distinct_2_by_hand():
    from judge import distinct

    assert distinct(["a b a b", "a b"]) == pytest.approx(2 / 4)  # ab ba ab | ab: two of four


@pytest.mark.slow
def test_a_missing_data_dir_is_one_line(tmp_path):
    run = subprocess.run([sys.executable, str(EXAMPLE / "run.py"), "--data_dir", str(tmp_path)], capture_output=True,
                         text=True, check=False)
    assert run.returncode == 2 and run.stderr.startswith("error: ") and run.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(1500)
@needs_data
def test_stories_become_happier_and_stay_varied(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    run = subprocess.run([sys.executable, str(EXAMPLE / "run.py"), "--data_dir", str(DATA), "--output_dir",
                          str(tmp_path / "story")], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads((tmp_path / "story" / "judge.json").read_text())
    assert result["ppo"]["compound"] > result["start"]["compound"] + 0.10
    assert result["ppo"]["distinct_2"] > 0.7 * result["start"]["distinct_2"]
