"""Reward hacking on the embedded task: PPO for longer than the demo, at several prices of KL, watched by the checker.

    python benchmarks/hacking.py [--prices 0,0.02,0.05,0.1,0.2] [--seeds 0] [--work DIR]

Each run is `train.py --stage ppo` from the SFT and reward runs of benchmarks/methods.py, paid by the reward model
alone; the checker is listed as a second source of weight 0, so that it is reported and not paid. Prints, of each run,
its row, its course and its report's alarms.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import methods
from harness import ROOT, table_of
from methods_settings import OF_PROMPTS

from hybrid_rlhf.report import summary


def words(folder: str, seed: int, kl_coef: float) -> list[str]:
    """The command line of one run: the demo's own settings of stage 3, but for the price and 150 steps, not 60."""
    return ["--stage", "ppo", "--seed", str(seed), *OF_PROMPTS, "--data.sources=[{path: demo/prompts}]",
            "--train.max_steps=150", "--train.per_device_train_batch_size=128", "--train.warmup_ratio=0.05",
            "--train.max_eval_batches=1", "--roles.actor.learning_rate=1e-3", "--roles.critic.learning_rate=2e-3",
            "--ppo.num_ppo_epochs=2", "--ppo.num_minibatches=2", "--ppo.missing_eos_penalty=1.0",
            "--ppo.sampling.max_new_tokens=16", f"--ppo.kl_coef={kl_coef}",
            f"--roles.ref.model_name_or_path={folder}/sft", f"--roles.reward.model_name_or_path={folder}/reward",
            "--reward.functions=builtin:demo_correct", "--reward.weights=[1.0, 0.0]"]


def run(work: Path, seed: int, kl_coef: float) -> dict:
    """One run's course: score and accuracy of a few rollouts, the held-out start and end, and the report's alarms."""
    start = methods.fixtures(work, seed)
    folder = start / f"hacking_{kl_coef:g}"
    methods.launch(words(str(start), seed, kl_coef), folder)  # one that is there is left as it is
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward" in row]
    return {"kl_coef": kl_coef, "seed": seed, "alarms": summary.conclude(folder, "ppo"),
            "course": [shown(steps[i]) for i in (0, 9, 19, 39, 69, 109, 149)],
            "end": methods.measured(str(start), seed, folder.name),
            "start": methods.start(str(start), seed)}


def shown(row: dict) -> dict:
    return {"step": row["step"], "score": row["rewards/model/mean"], "accuracy": row["rewards/demo_correct/mean"],
            "kl": row["objective/kl"], "entropy": row["entropy"], "distinct_2": row["completions/distinct_2"]}


def cells_of(run: dict) -> list[str]:
    start, end = run["start"], run["end"]
    return [f"{run['kl_coef']:g}", run["seed"], f"{start['score']:.2f} to {end['score']:.2f}",
            f"{start['accuracy']:.3f} to **{end['accuracy']:.3f}**", f"{end['kl']:.1f}",
            ", ".join(alarm.name for alarm in run["alarms"]) or "none"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prices", default="0,0.02,0.05,0.1,0.2")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "methods")
    options = parser.parse_args()
    for seed in map(int, options.seeds.split(",")):
        for price in map(float, options.prices.split(",")):
            found = run(options.work.resolve(), seed, price)
            print(table_of(("kl_coef", "seed", "score", "accuracy", "KL (nats)", "alarms"), [cells_of(found)]))
            print(table_of(list(found["course"][0]), [[f"{value:.4g}" for value in row.values()]
                                                      for row in found["course"]]))
            print("\n".join(f"> {line}" for line in summary.alarm_lines(found["alarms"])) + "\n", flush=True)


if __name__ == "__main__":
    main()
