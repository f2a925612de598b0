"""The demo's third stage with our decode engine and with transformers' generate in its place, in turns.

    python benchmarks/demo_rollouts.py --demo outputs/demo [--steps 30] [--repeats 3] [--json FILE]

DIR holds a finished demo (`make demo`). Each turn runs `--stage ppo` from its sft and reward runs in a process of its
own, `steps` steps long; what is compared is the stage's wall time and, of that, the time spent generating. The peer is
the engine's own path for models that do not run over slots, forced by refusing the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from harness import machine, write_rows

_BY_GENERATE = """
from hybrid_rlhf.engine.decode.runner import Runner
Runner._try = lambda self, path: "refused, to be measured without it"
"""
_RUN = """
import sys
sys.path.insert(0, {root!r})
{patch}
from hybrid_rlhf.cli import main
sys.exit(main({command!r}))
"""


def run(demo: Path, steps: int, patch: str) -> tuple[float, float]:
    """Seconds of the stage and of its generation."""
    with tempfile.TemporaryDirectory() as folder:
        for stage in ("sft", "reward"):  # stages find each other beside their output
            (Path(folder) / stage).symlink_to((demo / stage).resolve())
        config = Path(folder) / "ppo.yaml"
        config.write_text(json.dumps(settings_of(demo, steps)), encoding="utf-8")
        command = ["--stage", "ppo", "--config", str(config), "--output_dir", f"{folder}/ppo"]
        code = _RUN.format(root=str(HERE.parent), patch=patch, command=command)
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        whole = time.perf_counter() - start
        if done.returncode:
            raise SystemExit(f"the stage failed:\n{done.stderr[-2000:]}")
        rows = [json.loads(line) for line in (Path(folder) / "ppo" / "metrics.jsonl").read_text().splitlines()]
    spent = [row["time/generate"] for row in rows if "time/generate" in row]
    return whole, statistics.mean(spent) * steps


def settings_of(demo: Path, steps: int) -> dict:
    """The demo's own settings of stage 3."""
    import yaml

    settings = yaml.safe_load((demo / "ppo" / "config.yaml").read_text(encoding="utf-8"))
    for key in ("stage", "output_dir"):
        settings.pop(key, None)
    settings["train"]["max_steps"] = steps
    return settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=Path("outputs/demo"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    turns = [[run(options.demo, options.steps, patch) for patch in ("", _BY_GENERATE)] for _ in range(options.repeats)]
    rows = []
    for i, name in enumerate(("demo_stage3", "demo_generation")):
        ours, peer = ([turn[side][i] for turn in turns] for side in (0, 1))
        middle = [statistics.median(s) for s in (ours, peer)]
        print(f"{name}: ours {middle[0]:.1f} s ({min(ours):.1f}-{max(ours):.1f}), by generate {middle[1]:.1f} s "
              f"({min(peer):.1f}-{max(peer):.1f}), ratio {middle[1] / middle[0]:.2f}")
        rows.append({"case": name, "ours": middle[0], "peer": middle[1], "ratio": middle[1] / middle[0],
                     "floor_ratio": None, "unit": "s", "machine": machine()})
    write_rows(rows, options.json)


if __name__ == "__main__":
    main()
