"""The demo's third stage with our decode engine and with transformers' generate in its place, in turns.

    python benchmarks/demo_rollouts.py --demo outputs/demo [--steps 30] [--repeats 3] [--json FILE]

DIR holds a finished demo (`make demo`). Each turn runs `--stage ppo` from its sft and reward runs in a process of its
own, `steps` steps long; what is compared is the stage's wall time and, of that, the time spent generating. The peer is
the engine's own path for models that do not run over slots, forced by refusing the others.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from harness import ROOT, Case, Times, parse, parser_of, seconds, timed_row, write_rows

BY_GENERATE = """
from hybrid_rlhf.engine.decode.runner import Runner
assert callable(Runner._try)
Runner._try = lambda self, path: "refused, to be measured without it"
"""
RUN = """
import sys
sys.path.insert(0, {root!r})
{patch}
from hybrid_rlhf.cli import main
sys.exit(main({command!r}))
"""
CASES = {"demo_stage3": Case("the demo's stage 3", "the same by generate"),
         "demo_generation": Case("its generating", "the same by generate")}


def run(demo: Path, steps: int, patch: str) -> tuple[float, float]:
    """Seconds of the stage and of its generation."""
    with tempfile.TemporaryDirectory() as folder:
        for stage in ("sft", "reward"):  # stages find each other beside their output
            (Path(folder) / stage).symlink_to((demo / stage).resolve())
        config = Path(folder) / "ppo.yaml"
        config.write_text(json.dumps(settings_of(demo, steps)), encoding="utf-8")
        command = ["--stage", "ppo", "--config", str(config), "--output_dir", f"{folder}/ppo"]
        code = RUN.format(root=str(ROOT), patch=patch, command=command)
        whole = seconds(partial(subprocess.run, [sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL))
        rows = [json.loads(line) for line in (Path(folder) / "ppo" / "metrics.jsonl").read_text().splitlines()]
    return whole, statistics.mean(row["time/generate"] for row in rows if "time/generate" in row) * steps


def settings_of(demo: Path, steps: int) -> dict:
    """The demo's own settings of stage 3."""
    import yaml

    settings = yaml.safe_load((demo / "ppo" / "config.yaml").read_text(encoding="utf-8"))
    for key in ("stage", "output_dir"):
        settings.pop(key, None)
    settings["train"]["max_steps"] = steps
    return settings


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, repeats=3)
    parser.add_argument("--demo", type=Path, default=Path("outputs/demo"))
    parser.add_argument("--steps", type=int, default=30)
    options = parse(parser, argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    turns = [[run(options.demo, options.steps, patch) for patch in ("", BY_GENERATE)] for _ in range(options.repeats)]
    write_rows((timed_row(name, case, [Times.of([turn[side][i] for turn in turns]) for side in (0, 1)], unit="s")
                for i, (name, case) in enumerate(CASES.items())), options.json)


if __name__ == "__main__":
    main()
