"""PPO over more than a decade of actor rates, with each remedy for a rate that is too high, and RLOO beside it.

    python benchmarks/ppo_rates.py --data DIR [--tasks demo,stories,smollm2] [--settings before,rloo] [--rates X,Y]
        [--seeds 0,1,2] [--work DIR] [--json FILE] [--page FILE]

Every row is one `train.py --stage ppo` (or rloo) in a process of its own, from the models of its task: the demo's SFT
and reward runs (methods.py), the stories model and a reward model from film reviews (examples/story_sentiment, whose
--data_dir is --data; needs vaderSentiment), SmolLM2-135M-Instruct on sums (smollm2.py). A row is written as soon as its
run is measured, and one that is there with the same words is not run again, so the command can be stopped and given
again. *score* is measured on held-out prompts by what no run is rewarded by: the demo's checker, VADER, or whether the
sum is right (sampled answers). A run that ends with an error is a row with what it said.
"""

from __future__ import annotations

import argparse
import json
import resource
import runpy
import statistics
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE), *(str(ROOT / "examples" / name) for name in ("story_sentiment", "first_model"))]

import methods
import smollm2
import smollm2_tasks
from harness import machine, table_of, write_json, write_tables
from methods_settings import METHODS, OF_PROMPTS
from smollm2_settings import EXPERIMENTS

RATE = "--roles.actor.learning_rate"
DEFAULT = "update_kl .01 + early_stop_kl .02"
NONE = ["--ppo.update_kl=0", "--ppo.early_stop_kl=0"]
SETTINGS: dict[str, list[str]] = {  # each as the only thing that differs from what the default was before
    "before": NONE,
    DEFAULT: ["--ppo.update_kl=0.01", "--ppo.early_stop_kl=0.02"],
    "update_kl .01": ["--ppo.update_kl=0.01", "--ppo.early_stop_kl=0"],
    "early_stop_kl .02": ["--ppo.update_kl=0", "--ppo.early_stop_kl=0.02"],
    "kl_target 1.5": [*NONE, "--ppo.kl_target=1.5", "--ppo.kl_horizon=500"],
    "1 epoch": [*NONE, "--ppo.num_ppo_epochs=1"],
    "critic warm-up 5": [*NONE, "--ppo.critic_warmup_steps=5"],
    "value clip off": [*NONE, "--ppo.cliprange_value=1e9"],
    "dual clip 3": [*NONE, "--ppo.dual_clip=3"],
    "clip .1": [*NONE, "--ppo.cliprange=0.1"],
    "KL in the loss": [*NONE, "--ppo.kl_in=loss"],
    "no whitening": [*NONE, "--ppo.whiten_advantages=false"],
    "gradient norm .3": [*NONE, "--train.max_grad_norm=0.3"],
    "rloo": [],
    "rloo 45 steps": ["--train.max_steps=45"],  # on the demo PPO's seconds
}


class Task(NamedTuple):
    """What the runs of a task share. words: of PPO and of RLOO. rates: of the actor, the second its good one.

    prepare(work, data, seed): its models, made now unless they are there; gives the folder of the seed's runs and what
    names stand for in `words`. measure(folder, name, seed): a run's score and what else is known, `name` None for the
    start.
    """

    words: dict[str, list[str]]
    rates: tuple[float, ...]
    score: str
    prepare: Callable[[Path, Path, int], tuple[Path, dict[str, str]]]
    measure: Callable[[Path, str | None, int], dict]


# -- the tasks ---------------------------------------------------------------------------------------------------------


@cache
def _demo(work: Path, data: Path, seed: int) -> tuple[Path, dict[str, str]]:
    return methods.fixtures(work / "demo", seed), {}


def _demo_measure(folder: Path, name: str | None, seed: int) -> dict:
    found = methods.measured(str(folder), seed, name or "sft")
    return {"score": found["accuracy"], "reward": found["score"], "kl": found["kl"]}


@cache
def _stories(work: Path, data: Path, seed: int) -> tuple[Path, dict[str, str]]:
    write_data = runpy.run_path(str(ROOT / "examples" / "story_sentiment" / "run.py"))["write_data"]
    folder, names = work / "stories", {"START": str(data / "stories3M-hf")}
    write_data(data, folder / "data", 0)
    pairs = f"--data.sources=[{{path: {folder}/data/pairs.jsonl}}]"
    methods.launch(["--stage", "reward", *_filled(_REVIEWS, names), pairs], folder / "reward")  # one for all seeds
    return folder / f"seed{seed}", names | {"OPENINGS": f"{folder}/data/openings.jsonl", "BESIDE": str(folder)}


def _stories_measure(folder: Path, name: str | None, seed: int) -> dict:
    if name:
        return _judged(str(folder / name / "model"))
    record = json.loads((folder.parent / "reward" / "run.json").read_text())
    return _judged(record["config"]["model"]["model_name_or_path"])


@cache
def _judged(model: str) -> dict:
    from judge import judge
    from openings import HELD_OUT

    found = judge(model, HELD_OUT)
    return {"score": round(found["compound"], 4), "distinct_2": round(found["distinct_2"], 4)}


@cache
def _smollm2(work: Path, data: Path, seed: int) -> tuple[Path, dict[str, str]]:
    from get_smollm2 import get

    smollm2_tasks.sums(work / "smollm2" / "sums")
    return work / "smollm2" / f"seed{seed}", {"START": str(get()), "SUMS": str(work / "smollm2" / "sums")}


def _smollm2_measure(folder: Path, name: str | None, seed: int) -> dict:
    from get_smollm2 import get

    start = get()
    found = smollm2.measured(folder / name / "model" if name else start, start, folder.parent / "sums", None)
    return {"score": round(found["sampled"]["right"] / found["items"], 4),
            "greedy": round(found["greedy"]["right"] / found["items"], 4), "kl": found.get("kl", 0.0)}


_PLAIN = ["--model.model_name_or_path=START", "--model.dtype=float32", "--data.raw=true", "--data.split=null",
          "--data.eval_fraction=0.05"]
_REVIEWS = [*_PLAIN, "--data.append_eos=false", "--data.max_length=128", "--train.learning_rate=3e-4",
            "--train.warmup_ratio=0.1", "--train.num_train_epochs=1.5", "--train.per_device_train_batch_size=32",
            "--reward.center_coef=0"]
_OPENINGS = [*_PLAIN, "--data.sources=[{path: OPENINGS}]", "--data.max_prompt_length=24", "--train.max_steps=20",
             "--train.warmup_ratio=0.05", "--train.max_eval_batches=1",
             "--roles.reward.model_name_or_path=BESIDE/reward", "--ppo.kl_coef=0.1", "--ppo.missing_eos_penalty=0",
             "--ppo.sampling.min_new_tokens=48", "--ppo.sampling.max_new_tokens=48"]
_SUMS = [*EXPERIMENTS["ppo"].words, "--model.dtype=bfloat16", "--train.max_steps=8"]
TASKS = {
    "demo": Task({name: [*OF_PROMPTS, *METHODS[name]] for name in ("ppo", "rloo")}, (3e-4, 1e-3, 3e-3, 1e-2),
                 "accuracy", _demo, _demo_measure),
    "stories": Task({"ppo": [*_OPENINGS, "--train.per_device_train_batch_size=64",
                             "--roles.critic.learning_rate=3e-4"],
                     "rloo": [*_OPENINGS, "--train.per_device_train_batch_size=8"]}, (1.2e-5, 4e-5, 1.2e-4, 4e-4),
                    "VADER", _stories, _stories_measure),
    "smollm2": Task({"ppo": _SUMS, "rloo": [w for w in _SUMS if w != "--ppo.kl_coef=0.04"]}, (3e-6, 1e-5, 3e-5, 1e-4),
                    "right", _smollm2, _smollm2_measure),
}


def _filled(words: list[str], names: dict[str, str]) -> list[str]:
    for name, stands_for in names.items():
        words = [word.replace(name, stands_for) for word in words]
    return words


# -- a row -------------------------------------------------------------------------------------------------------------


def words_of(task: str, setting: str, rate: float) -> list[str]:
    """The words of a row, but for the seed and the folder."""
    stage = "rloo" if setting.startswith("rloo") else "ppo"
    return ["--stage", stage, *TASKS[task].words[stage], *SETTINGS[setting], f"{RATE}={rate:g}"]


def run(task: str, setting: str, rate: float, seed: int, given: argparse.Namespace) -> dict:
    """Train once and measure; an error of the run is what the row says."""
    folder, names = TASKS[task].prepare(given.work, given.data, seed)
    name, words = f"{setting} {rate:g}".replace(" ", "_"), words_of(task, setting, rate)
    row = {"task": task, "setting": setting, "rate": rate, "seed": seed, "words": words,
           "start": start(task, folder, seed)}
    before = _processor_seconds()
    try:
        seconds = methods.launch([*_filled(words, names), "--seed", str(seed), "--resume", "never",
                                  "--train.logging_steps=1"], folder / name)
    except SystemExit as error:
        return row | {"failed": str(error).strip().splitlines()[-1][-300:]}
    row |= {"seconds": round(seconds, 1), "cpu_seconds": round(_processor_seconds() - before, 1)}
    return row | {"after": TASKS[task].measure(folder, name, seed), "history": history(folder / name)}


def _processor_seconds() -> float:
    """Of the processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@cache
def start(task: str, folder: Path, seed: int) -> float:
    return TASKS[task].measure(folder, None, seed)["score"]


def history(folder: Path) -> dict:
    """Of the run's own steps: the KL at the end (a mean of three) and at its highest, how many were stopped early, the
    factor on the rate at its lowest and the farthest that the updates on a rollout went, in nats per token."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "time/step" in step]
    nats = [step["kl"] for step in steps]
    return {"steps": len(steps), "kl": round(statistics.mean(nats[-3:]), 3), "kl_max": round(max(nats), 3),
            "stopped": sum(step.get("policy/early_stop", 0) for step in steps),
            "rate_factor": round(min(step.get("policy/rate_factor", 1) for step in steps), 4),
            "approx_kl": round(max(step.get("policy/approx_kl", 0) for step in steps), 4),
            "step_seconds": round(statistics.median(step["time/step"] for step in steps), 3)}


# -- the page ----------------------------------------------------------------------------------------------------------


def tables_of(found: dict) -> list[str]:
    """The machine, and for each task a line per setting, a column per rate."""
    tables = [table_of(["machine"], [[found["machine"]]])]
    for name, task in TASKS.items():
        rows = [row for row in found["rows"] if row["task"] == name]
        known = [s for s in SETTINGS if any(row["setting"] == s for row in rows)]
        tables.append(table_of((f"{name}: {task.score}, KL", *(f"{rate:g}" for rate in task.rates), "CPU s"),
                               [_line(setting, task, [r for r in rows if r["setting"] == setting])
                                for setting in known]))
    return tables


def _line(setting: str, task: Task, rows: list[dict]) -> list[str]:
    seconds = [row["cpu_seconds"] for row in rows if "cpu_seconds" in row]
    return [setting, *(cell([row for row in rows if row["rate"] == rate]) for rate in task.rates),
            f"{statistics.median(seconds):.0f}" if seconds else ""]


def cell(rows: list[dict]) -> str:
    """The mean score of the seeds and each one's, the mean KL at the end, and how many runs ended with an error."""
    done = [row for row in rows if "after" in row]
    failed = f"{len(rows) - len(done)} failed" if len(done) < len(rows) else ""
    if not done:
        return failed
    scores = [row["after"]["score"] for row in done]
    each = f" ({' '.join(f'{s:.2f}' for s in scores)})" if len(scores) > 1 else ""
    nats = statistics.mean(row["after"].get("kl", row["history"]["kl"]) for row in done)
    variety = [row["after"]["distinct_2"] for row in done if "distinct_2" in row["after"]]
    more = [f"{nats:.1f}", *([f"distinct-2 {statistics.mean(variety):.2f}"] if variety else [])]
    return f"**{statistics.mean(scores):.2f}**{each}, {', '.join(more)}" + (f"; {failed}" if failed else "")


def save(path: Path, rows: list[dict]) -> dict:
    """Write the rows, atomically."""
    found = {"machine": machine(), "rows": rows}
    write_json(path, found)
    return found


def _place(row: dict) -> tuple:
    return [*TASKS].index(row["task"]), [*SETTINGS].index(row["setting"]), row["rate"], row["seed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with stories3M-hf and rt_polarity, for stories")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--settings", default=f"before,{DEFAULT},rloo")
    parser.add_argument("--rates", help="comma-separated; without it, those of the task")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "ppo_rates")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "results" / "ppo_rates.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "ppo_rates.md",
                        help="the tables go into it")
    given = parser.parse_args()
    given.work = given.work.resolve()
    for task, setting, rate, seed in asked(given):
        rows = json.loads(given.json.read_text())["rows"] if given.json.exists() else []
        same = [r for r in rows if (r["task"], r["setting"], r["rate"], r["seed"]) == (task, setting, rate, seed)]
        if same and same[0]["words"] == words_of(task, setting, rate):
            continue
        row = run(task, setting, rate, seed, given)
        found = save(given.json, sorted([r for r in rows if r not in same] + [row], key=_place))
        write_tables(given.page, *tables_of(found))
        print(json.dumps({k: v for k, v in row.items() if k != "words"}), flush=True)


def asked(given: argparse.Namespace) -> list[tuple[str, str, float, int]]:
    """The rows, those of a seed together, the highest rates first."""
    return [(task, setting, rate, int(seed)) for task in given.tasks.split(",") for seed in given.seeds.split(",")
            for rate in sorted(map(float, given.rates.split(",")) if given.rates else TASKS[task].rates, reverse=True)
            for setting in given.settings.split(",")]


if __name__ == "__main__":
    main()
