"""The card's benchmark where there is no card: every line of it that can run does, without the packages that its
machine lacks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LACKING = ("deepspeed", "datasets", "bitsandbytes", "jsonargparse", "triton", "matplotlib", "trl", "peft")


def test_the_benchmark_runs_dry_without_what_its_machine_lacks(tmp_path):
    script = (f"import sys, runpy\nfor name in {LACKING}: sys.modules[name] = None\n"
              f"sys.argv = ['gpu.py', '--dry-run', '--repeats', '1', '--out', {str(tmp_path)!r}]\n"
              "runpy.run_path('benchmarks/gpu.py', run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    rows = json.loads((tmp_path / "gpu.json").read_text())
    assert [r["case"].split(",")[0] for r in rows] == ["OPT-1.3B shape", "OPT-1.3B shape", "Llama-1B shape",
                                                       "Llama-1B shape", "ragged"]
    assert all(set(r) == {"case", "ours", "peer", "ratio", "floor_ratio", "unit", "machine"} for r in rows)
    assert (tmp_path / "gpu.md").read_text().count("\n|") == 2 + len(rows)
    assert "DIFFERENT" not in done.stdout and done.stdout.count(" equal ") == 4


def test_the_shell_script_is_one_that_bash_can_read():
    assert subprocess.run(["bash", "-n", str(ROOT / "benchmarks/gpu.sh")], check=False).returncode == 0
