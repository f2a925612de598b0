"""Happier stories: a reward model from film reviews, PPO on story openings, judged by an independent lexicon.

    python examples/story_sentiment/run.py --data_dir DIR [--output_dir outputs/story_sentiment] [--seed 0]

DIR holds `stories3M-hf/` (a small Llama trained on TinyStories, in Hugging Face format) and `rt_polarity/`
(rt-polarity.pos and .neg, Pang and Lee 2005, sentence polarity v1.0). README.md says where both come from.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from judge import judge
from openings import HELD_OUT, training


def write_data(data_dir: Path, folder: Path, seed: int) -> None:
    """Pairs of one positive and one negative review sentence, and the openings, as jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    sides = {side: (data_dir / "rt_polarity" / f"rt-polarity.{side}").read_text(encoding="latin-1").splitlines()
             for side in ("pos", "neg")}
    for lines in sides.values():
        random.Random(seed).shuffle(lines)
    pairs = [{"chosen": p.strip(), "rejected": n.strip()} for p, n in zip(sides["pos"], sides["neg"], strict=True)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (folder / "openings.jsonl").write_text("".join(json.dumps({"prompt": o}) + "\n" for o in training()))


def train(start: Path, data: Path, output_dir: Path, seed: int, more: list[str]) -> None:
    """The launcher with this folder's YAML file."""
    sources = f"[{{path: {data}/pairs.jsonl, stages: [reward]}}, {{path: {data}/openings.jsonl, stages: [ppo]}}]"
    command = [sys.executable, str(HERE.parents[1] / "train.py"), "--stage", "all", "--config",
               str(HERE / "story_sentiment.yaml"), "--model.model_name_or_path", str(start), "--data.sources", sources,
               "--output_dir", str(output_dir), "--seed", str(seed), *more]
    print("+", shlex.join(command), file=sys.stderr)
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/story_sentiment"))
    parser.add_argument("--seed", type=int, default=0)
    options, more = parser.parse_known_args()
    start = options.data_dir / "stories3M-hf"
    for needed in (start / "config.json", options.data_dir / "rt_polarity" / "rt-polarity.pos"):
        if not needed.exists():
            print(f"error: {needed} does not exist; README.md says what --data_dir holds", file=sys.stderr)
            sys.exit(2)
    data = options.output_dir / "data"
    write_data(options.data_dir, data, options.seed)
    train(start, data, options.output_dir, options.seed, more)
    result = {"start": judge(str(start), HELD_OUT), "ppo": judge(str(options.output_dir / "ppo" / "model"), HELD_OUT)}
    result["reward_accuracy"] = json.loads((options.output_dir / "reward" / "run.json").read_text())["metrics"][
        "eval/accuracy"]
    (options.output_dir / "judge.json").write_text(json.dumps(result, indent=1))
    for name in ("start", "ppo"):
        print(f"{name:6} VADER compound {result[name]['compound']:+.3f} +- {result[name]['standard_error']:.3f}   "
              f"distinct-2 {result[name]['distinct_2']:.3f}")


if __name__ == "__main__":
    main()
