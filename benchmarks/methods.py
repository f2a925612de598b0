"""Every method on the embedded task, from the same SFT and reward models: what it learns, and whether that is chance.

    python benchmarks/methods.py [--methods ppo,dpo] [--seeds 0,1,2] [--work DIR] [--json FILE] [--page FILE]

Per seed an SFT run and a reward run are made once, then each method starts from them by the launcher, in a process of
its own (`train.py --stage NAME`). A row is written as soon as its run is measured, and one that is there with the same
settings is not run again, so the command can be stopped and given again. Measured on held-out prompts that no stage has
trained on, one sampled answer each: *accuracy* is the checker's (a program that works the answer out of the request),
*score* the reward model's, KL to the SFT model.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path

from harness import ROOT, machine, table_of, write_json, write_tables
from methods_settings import FIXTURES, METHODS, PROMPT, common

NUM_PROMPTS = 575  # all that the task holds out
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # two-sided 95% quantile of Student's t by degrees of freedom


def launch(words: list[str], folder: Path) -> float:
    """Run one stage into `folder` by the launcher; returns its seconds by its own record."""
    command = [sys.executable, str(ROOT / "train.py"), *words, "--output_dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False,
                          env={**os.environ, "HYBRID_RLHF_CACHE": str(own_cache(folder.parent.parent / "cache"))})
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\nexit code {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads((folder / "run.json").read_text())["seconds"]


def own_cache(folder: Path) -> Path:
    """A data cache beside the runs, with the kernels that are compiled already."""
    from hybrid_rlhf.kernels.build import cache_folder

    if not folder.exists():
        folder.mkdir(parents=True)
        cache_folder().mkdir(parents=True, exist_ok=True)
        (folder / "kernels").symlink_to(cache_folder())
    return folder


def fixtures(work: Path, seed: int) -> Path:
    """The folder of a seed, with its SFT and reward runs (made now unless they are there)."""
    folder = work / f"seed{seed}"
    for stage, words in FIXTURES.items():
        launch(["--stage", stage, "--seed", str(seed), *common(stage), *words], folder / stage)
    return folder


def run(name: str, work: Path, seed: int) -> dict:
    """Train one method and measure it beside its start."""
    folder = fixtures(work, seed)
    words = [w.replace("BESIDE", str(folder)) for w in METHODS[name]]
    seconds = launch(["--stage", name, "--seed", str(seed), "--resume", "never", *common(name), *words], folder / name)
    before, after = start(str(folder), seed), measured(str(folder), seed, name)
    return {"method": name, "seed": seed, "seconds": round(seconds, 1), "settings": METHODS[name],
            "before": before, "after": after}


@cache
def start(folder: str, seed: int) -> dict[str, float]:
    return measured(folder, seed, "sft")


def measured(folder: str, seed: int, name: str) -> dict[str, float]:
    """accuracy, score, kl and length of a policy's answers to the held-out prompts."""
    from hybrid_rlhf.data import collate, datasets
    from hybrid_rlhf.data.datasets import DataConfig
    from hybrid_rlhf.data.sources import Source
    from hybrid_rlhf.engine.decode.sampling import SamplingConfig
    from hybrid_rlhf.models.load import ModelConfig
    from hybrid_rlhf.rewards.model import ModelSource
    from hybrid_rlhf.roles import Reference, Reward
    from hybrid_rlhf.training import builders, scored_answers
    from hybrid_rlhf.training.registry import READS

    def model(stage: str) -> ModelConfig:
        return ModelConfig(f"{folder}/{stage}/model", dtype="float32")

    data = DataConfig([Source("demo/prompts")], split=[4, 3, 3], eval_fraction=0.08, max_length=64,
                      max_prompt_length=40, cache_dir=str(Path(folder).parent / "cache"))
    tokenizer = builders.open_tokenizer(model(name), data, READS["ppo"], seed)
    rows = datasets.build(data, READS["ppo"], tokenizer, seed).held_out
    prompts = collate.collate_prompts([rows[i] for i in range(min(NUM_PROMPTS, len(rows)))])
    asked = scored_answers.in_words(prompts, PROMPT[name], tokenizer) if name in PROMPT else None
    actor = scored_answers.open_actor(model(name), tokenizer)
    rollout = scored_answers.respond(actor, prompts, SamplingConfig(max_new_tokens=16), seed, asked)
    reward = Reward(builders.scalar_engine(builders.open_scalar(model("reward"), tokenizer), tokenizer))
    start = scored_answers.open_actor(model("sft"), tokenizer)
    scored_answers.judge(rollout, ModelSource(reward), Reference(start.engine))
    return {"accuracy": round(statistics.fmean(scored_answers.is_right("demo", rollout)), 4),
            "score": round(float(rollout.scores.mean()), 4), "kl": round(rollout.mean_kl(), 4),
            "length": round(float(rollout.action_mask.sum(1).float().mean()), 2)}


def gain(rows: list[dict], what: str) -> tuple[float, float]:
    """Mean of after - before over the seeds, and half of its 95% interval by Student's t (infinite for one seed)."""
    gains = [row["after"][what] - row["before"][what] for row in rows]
    if len(gains) < 2:
        return gains[0], float("inf")
    return statistics.mean(gains), T_975[len(gains) - 1] * statistics.stdev(gains) / len(gains) ** 0.5


def summary(rows: list[dict]) -> dict:
    """A method's rows as one."""
    accuracy, score = gain(rows, "accuracy"), gain(rows, "score")
    kept = {"accuracy_gain": accuracy, "score_gain": score}
    return {"method": rows[0]["method"], "seeds": [row["seed"] for row in rows],
            "seconds": round(statistics.mean(row["seconds"] for row in rows), 1),
            **{f"{what}_{when}": round(statistics.mean(row[when][what] for row in rows), 4)
               for what in ("accuracy", "score") for when in ("before", "after")},
            **{name: [round(mean, 4), None if half == float("inf") else round(half, 4)]
               for name, (mean, half) in kept.items()},
            "kl": round(statistics.mean(row["after"]["kl"] for row in rows), 3),
            "length": round(statistics.mean(row["after"]["length"] for row in rows), 2),
            "is_significant": {name.split("_")[0]: mean > half for name, (mean, half) in kept.items()}}


def tables_of(found: dict) -> list[str]:
    """The machine, and a line for each method."""
    columns = ("method", "seeds", "seconds", "accuracy", "gain (95%)", "score", "gain (95%)", "KL", "length",
               "significant")
    return [table_of(["machine"], [[found["machine"]]]), table_of(columns, [(
        row["method"], ", ".join(map(str, row["seeds"])), f"{row['seconds']:.0f}",
        f"{row['accuracy_before']:.3f} to **{row['accuracy_after']:.3f}**", interval(row["accuracy_gain"], 3),
        f"{row['score_before']:.2f} to {row['score_after']:.2f}", interval(row["score_gain"], 2),
        f"{row['kl']:.2f}", f"{row['length']:.1f}",
        " and ".join(name for name, yes in row["is_significant"].items() if yes) or "no") for row in found["methods"]])]


def interval(given: list, decimals: int) -> str:
    mean, half = given
    return f"{mean:+.{decimals}f}" + ("" if half is None else f" ± {half:.{decimals}f}")


def save(path: Path, rows: list[dict]) -> dict:
    """Write the rows and what they come to, atomically."""
    known = [name for name in METHODS if any(row["method"] == name for row in rows)]
    found = {"machine": machine(), "num_prompts": NUM_PROMPTS,
             "methods": [summary([row for row in rows if row["method"] == name]) for name in known], "rows": rows}
    write_json(path, found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "methods")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "results" / "methods.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "methods.md",
                        help="the table goes into it")
    given = parser.parse_args()
    rows = json.loads(given.json.read_text())["rows"] if given.json.exists() else []
    wanted = [(int(seed), name) for seed in given.seeds.split(",") for name in given.methods.split(",")]
    for seed, name in wanted:
        same = [r for r in rows if (r["seed"], r["method"]) == (seed, name)]
        if same and same[0]["settings"] == METHODS[name]:
            continue
        row = run(name, given.work.resolve(), seed)
        rows = sorted([r for r in rows if r not in same] + [row], key=lambda r: (list(METHODS).index(r["method"]),
                                                                               r["seed"]))
        write_tables(given.page, *tables_of(save(given.json, rows)))
        print(f"{name:16} seed {seed}  {row['seconds']:5.0f} s  accuracy {row['before']['accuracy']:.3f} -> "
              f"{row['after']['accuracy']:.3f}  score {row['before']['score']:.2f} -> {row['after']['score']:.2f}  "
              f"kl {row['after']['kl']:.2f}  length {row['after']['length']:.1f}", flush=True)


if __name__ == "__main__":
    main()
