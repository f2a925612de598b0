"""A user's first model: the commands of docs/guide/first-steps.md on 60 rows, then a judge on questions of no row.

    python examples/first_model/run.py --model MODEL [--output_dir outputs/first_model] [--STAGE.OPTION VALUE ...]

MODEL is a folder or hub id; the default is SmolLM2-135M-Instruct, fetched by get_smollm2.py. The rows beside this file
teach a travel desk to answer in one sentence with a wish; README.md here says more. `--sft.train.max_steps 20` and its
like add an option to one stage's command; all other options are the defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ROWS = ("conversations.jsonl", "preferences.jsonl", "questions.jsonl", "held_out.jsonl", "judge.py")
STAGES = {  # as docs/guide/first-steps.md has them; my-model stands for MODEL
    "sft": "--stage sft --model.model_name_or_path my-model --data.sources conversations.jsonl "
           "--output_dir outputs/sft",
    "reward": "--stage reward --data.sources preferences.jsonl --output_dir outputs/reward",
    "ppo": "--stage ppo --data.sources questions.jsonl --output_dir outputs/ppo",
    "evaluate": '--stage evaluate --evaluate.models "[start=my-model, sft=outputs/sft, ppo=outputs/ppo]" '
                '--data.sources held_out.jsonl --evaluate.rows all --evaluate.sampling.temperature 0 '
                '--evaluate.sampling.max_new_tokens 64 '
                '--reward.functions "[judge.py:good]" --output_dir outputs/evaluate',
}


def commands(model: str, more: dict[str, list[str]]) -> list[list[str]]:
    """The arguments of `hybrid-rlhf` for every stage."""
    return [[word.replace("my-model", model) for word in shlex.split(words)] + more.get(stage, [])
            for stage, words in STAGES.items()]


def journey(model: str, folder: Path, more: dict[str, list[str]]) -> dict[str, dict]:
    """Run the commands in `folder`; each model's row of the evaluation, by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ROWS:
        shutil.copy(HERE / name, folder / name)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for words in commands(model, more):
        print("\n+ hybrid-rlhf", shlex.join(words), flush=True)
        code = subprocess.run([sys.executable, str(ROOT / "train.py"), *words], cwd=folder, env=environment,
                              check=False).returncode
        if code:
            sys.exit(code)
    found = json.loads((folder / "outputs" / "evaluate" / "evaluate.json").read_text())
    return {row["model"]: row for row in found["models"]}


def extras(words: list[str]) -> dict[str, list[str]]:
    """--sft.train.max_steps 20 -> {"sft": ["--train.max_steps", "20"]}."""
    more: dict[str, list[str]] = {}
    for name, value in zip(words[::2], words[1::2], strict=True):
        stage, _, option = name.removeprefix("--").partition(".")
        if stage not in STAGES or not option:
            sys.exit(f"{name} names no stage's option; write --sft.train.max_steps 20 ({', '.join(STAGES)})")
        more.setdefault(stage, []).extend([f"--{option}", value])
    return more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a hub id; without one, SmolLM2-135M-Instruct")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/first_model"))
    options, words = parser.parse_known_args()
    if options.model is None:
        sys.path.insert(0, str(HERE))
        from get_smollm2 import get

        options.model = str(get())
    is_folder = Path(options.model).is_dir()
    found = journey(str(Path(options.model).resolve()) if is_folder else options.model, options.output_dir.resolve(),
                    extras(words))
    print("\nquestions that no stage has seen, by judge.py (1 is: right, with the wish, in one short sentence)")
    for name, row in found.items():
        low, high = row["score_interval"]
        print(f"{name:6} score {row['score']:.2f} ({low:.2f} to {high:.2f})   ended {row['ended']:.2f}   "
              f"tokens {row['length']:.1f}")


if __name__ == "__main__":
    main()
