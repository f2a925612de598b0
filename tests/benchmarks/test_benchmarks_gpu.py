"""The card's benchmark where there is no card: every line of it that can run does, without the packages that its
machine lacks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LACKING = ("deepspeed", "datasets", "bitsandbytes", "jsonargparse", "triton", "matplotlib", "trl", "peft")


@pytest.mark.slow
def test_the_benchmark_runs_dry_without_what_its_machine_lacks(tmp_path):
    script = (f"import sys, runpy\nsys.path.insert(0, 'benchmarks')\nfor name in {LACKING}: sys.modules[name] = None\n"
              f"sys.argv = ['gpu.py', '--dry-run', '--repeats', '1', '--out', {str(tmp_path)!r}]\n"
              "runpy.run_path('benchmarks/gpu.py', run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    rows = json.loads((tmp_path / "gpu.json").read_text())
    assert [r["case"].split(",")[0] for r in rows] == ["OPT-1.3B shape", "OPT-1.3B shape", "Llama-1B shape",
                                                       "Llama-1B shape", "ragged"]
    assert all(r["ours"] > 0 and r["peer"] > 0 and r["machine"].startswith("no card") for r in rows)
    assert (tmp_path / "gpu.md").read_text().split("\n\n")[1].count("\n") == 2 + len(rows)
    assert "DIFFERENT" not in done.stdout and done.stdout.count(" equal ") == 4


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama-8b-qlora", pytest.param("opt-1.3b-full", marks=pytest.mark.slow)])
def test_ppo_steps_run_dry_and_tell_their_parts(case, tmp_path):
    done = subprocess.run([sys.executable, "benchmarks/gpu_ppo.py", "--dry-run", "--out", str(tmp_path), "--cases",
                           case], cwd=ROOT, capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    rows = json.loads((tmp_path / "gpu_ppo.json").read_text())
    assert {r["case"] for r in rows} == {case}
    assert rows[0]["batch"] == 2
    for row in rows:
        assert row["ours"] == row["batch"] / row["seconds"] > 0
        assert {"generate", "score", "train"} <= row["parts"].keys()
        assert row["floor_ratio"] > 1
    assert (tmp_path / "gpu_ppo.md").read_text().split("\n\n")[1].count("\n") == 2 + len(rows)


def test_a_case_whose_package_is_missing_is_left_out_with_a_line(tmp_path):
    script = ("import sys, runpy\nsys.path.insert(0, 'benchmarks')\nsys.modules['deepspeed'] = None\n"
              f"sys.argv = ['gpu_ppo.py', '--dry-run', '--cases', 'opt-13b-lora', '--out', {str(tmp_path)!r}]\n"
              "runpy.run_path('benchmarks/gpu_ppo.py', run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "opt-13b-lora was left out: deepspeed is not installed" in (tmp_path / "gpu_ppo.md").read_text()


def test_the_shell_script_is_one_that_bash_can_read_and_refuses_an_unknown_part():
    script = str(ROOT / "benchmarks/gpu.sh")
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    done = subprocess.run(["bash", script, "generate", "everything"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "unknown part everything: tests, generate, ppo\n")


def test_parameters_of_the_shapes_are_those_of_their_names():
    import gpu_ppo
    from floors import Shape

    for name, billions in (("opt1.3b", 1.3), ("opt13b", 12.8), ("llama8b", 8.0)):
        shape = Shape.of(gpu_ppo.SHAPES[name][1])
        tied = 1 if name.startswith("opt") else 2
        assert abs((shape.body + tied * shape.head) / 1e9 / billions - 1) < 0.02
