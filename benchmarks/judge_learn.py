"""A judge against a reward model of the same pairs, and against the exact check, on the embedded task.

    python benchmarks/judge_learn.py [--seeds 0,1,2] [--steps 60] [--work DIR] [--json FILE]

Per seed: the demo's SFT and reward runs (benchmarks/methods.py); a judge, the SFT model after SFT on the same pairs as
questions with the answers Yes (of a chosen response) and No, so that it is as small as the reward model and knows no
more; their agreement with pairs that neither has seen (`--stage evaluate --evaluate.labels`); and GRPO by each of them
and by the exact check, which is reported in all three and paid for in the last alone. Measured on held-out prompts, one
sampled answer each: *right* by the checker. A run that is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import methods
from harness import ROOT, machine, table_of
from methods_settings import METHODS, OF_PROMPTS

from hybrid_rlhf.report import summary

TEMPLATE = "[user]\n{{ prompt }}\n{{ responses[0].text }}\n{{ items[0].question }}\n"
RUBRIC = {"items": [{"name": "good", "question": "Good?"}]}
CHECK = "--reward.functions=builtin:demo_correct"


def write_judge_data(folder: Path) -> None:
    """The template, stage 2's pairs as questions for the judge, and those that it holds out as labels."""
    if (folder / "labels.jsonl").exists():
        return
    from hybrid_rlhf.data import datasets, demo
    from hybrid_rlhf.data.datasets import DataConfig
    from hybrid_rlhf.data.sources import Source
    from hybrid_rlhf.models.load import ModelConfig
    from hybrid_rlhf.rewards.judge.judge_prompts import open_prompter
    from hybrid_rlhf.rewards.judge.rubric import read_rubric
    from hybrid_rlhf.training import builders
    from hybrid_rlhf.training.registry import READS

    (folder / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    ask = open_prompter("probability", read_rubric(RUBRIC), str(folder / "template.jinja"), True).chat
    data = DataConfig([Source("demo/preferences")], split=[4, 3, 3], eval_fraction=0.08, max_length=64)
    model = ModelConfig(builders.model_folder(str(folder / "sft")))
    tokenizer = builders.open_tokenizer(model, data, READS["reward"], 0)
    found = datasets.build(data, READS["reward"], tokenizer, int(folder.name.removeprefix("seed")))
    trained, held_out = ({(tokenizer.decode(row["chosen_ids"]), tokenizer.decode(row["rejected_ids"])) for row in rows}
                         for rows in (found.train, found.held_out))
    questions, labels = [], []
    for row in demo.preferences():
        key = tuple(tokenizer.apply_chat_template([*row["prompt"], *row[name]], tokenize=False).rstrip("\n")
                    for name in ("chosen", "rejected"))
        labels += [row] if key in held_out else []
        for name, word in (("chosen", "Yes"), ("rejected", "No")) if key in trained else ():
            asked = ask(row["prompt"], [row[name]])
            questions.append({"messages": [*asked, {"role": "assistant", "content": word}]})
    assert 2 * len(found.train) >= len(questions) > 0 < len(labels) <= len(found.held_out)
    for name, rows in (("questions", questions), ("labels", labels)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def judge_words(folder: Path) -> list[str]:
    return [f"--reward.judge.model={folder}/judge", "--reward.judge.score=probability",
            f"--reward.judge.template={folder}/template.jinja",
            f"--reward.judge.rubric={json.dumps(RUBRIC)}"]


def runs_of(folder: Path, steps: int) -> dict[str, list[str]]:
    """The words of each GRPO run, by its name."""
    common = [word.replace("BESIDE", str(folder)) for word in METHODS["grpo"] if not word.startswith("--ppo.kl_coef")]
    common = [*OF_PROMPTS, *common, f"--train.max_steps={steps}"]  # the last one of an option counts
    unpaid = [CHECK, "--reward.weights=[1.0, 0.0]"]
    by_judge = [CHECK, "--reward.weights=[0.0, 1.0]", *judge_words(folder)]
    return {"reward_model": [*common, *unpaid, "--ppo.kl_coef=0.3",
                             f"--roles.reward.model_name_or_path={folder}/reward"],
            "judge": [*common, *by_judge, "--ppo.kl_coef=0.1"],  # its scores spread over about a third as much
            "check": [*common, CHECK, "--ppo.kl_coef=0.1"]}


def agreement(folder: Path) -> dict:
    """Accuracy and kappa of both on the held-out pairs."""
    words = ["--stage", "evaluate", f"--evaluate.labels={folder}/labels.jsonl", "--model.dtype=float32",
             f"--roles.reward.model_name_or_path={folder}/reward", *judge_words(folder)]
    methods.launch(words, folder / "agreement")
    return json.loads((folder / "agreement" / "evaluate.json").read_text())["agreement"]


def run(work: Path, seed: int, steps: int) -> dict:
    folder = methods.fixtures(work, seed)
    write_judge_data(folder)
    methods.launch(["--stage", "sft", "--seed", str(seed), f"--data.sources=[{folder}/questions.jsonl]",
                    f"--model.model_name_or_path={folder}/sft", "--model.dtype=float32", "--data.max_length=96",
                    "--data.eval_fraction=0.02", "--train.max_steps=2000", "--train.per_device_train_batch_size=64",
                    "--train.learning_rate=2e-3", "--train.logging_steps=100"], folder / "judge")
    found = {"seed": seed, "agreement": agreement(folder), "start": methods.start(str(folder), seed), "runs": {}}
    for name, words in runs_of(folder, steps).items():
        target = folder / f"grpo_{name}_{steps}"
        seconds = methods.launch(["--stage", "grpo", "--seed", str(seed), *words], target)
        found["runs"][name] = {"seconds": seconds, **methods.measured(str(folder), seed, target.name),
                               "alarms": [alarm.name for alarm in summary.conclude(target, "grpo")]}
    return found


def tables_of(rows: list[dict]) -> list[str]:
    def cells(name: str) -> list[str]:
        own = [row["runs"][name] for row in rows]
        return [name, *(f"{statistics.mean(o[what] for o in own):.3f} ({', '.join(f'{o[what]:.3f}' for o in own)})"
                        for what in ("accuracy", "kl", "seconds")),
                "; ".join(", ".join(o["alarms"]) or "none" for o in own)]

    return [json.dumps([row["agreement"] for row in rows]),
            "start: " + ", ".join(f"{row['start']['accuracy']:.3f}" for row in rows),
            table_of(("GRPO by", "right", "KL (nats)", "seconds", "alarms"), [cells(name) for name in rows[0]["runs"]])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "judge_learn")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[dict] = []
    for seed in map(int, given.seeds.split(",")):
        rows.append(run(given.work.resolve(), seed, given.steps))
        if given.json:
            given.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
        print("\n".join(tables_of(rows)), flush=True)


if __name__ == "__main__":
    main()
