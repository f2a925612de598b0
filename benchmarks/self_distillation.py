"""What a model learns from itself once it has read the answer: self-distillation beside SFT on the answers and GRPO.

    python benchmarks/self_distillation.py [--task demo|sums] [--rows self,ema,live,sft,grpo] [--seeds 0,1,2]
        [--seconds 20] [--model DIR] [--work DIR] [--json FILE]

demo: the start is SFT on the embedded task's demonstrations, each second one with the right answer in its question and
in its completion: it can read a hint, and is often wrong without one. sums: the start is the chat model in --model,
the task that of `benchmarks/smollm2.py`. Every row is LoRA on one start and trains for `--seconds` by its own clock.
Measured: the share of right answers to held-out prompts without a hint, one sampled answer each; `told` is the start
with the hint, that is the teacher. A run that is there is not run again.

self: the teacher is the start. forward: the same by forward_kl. ema: the average of the student by .95 a step. live:
the student itself (decay 0). best: the teacher reads the best of eight answers in place of the hint, by GRPO's reward.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path

import methods
from harness import ROOT, machine, table_of, write_json

HINT = "{{ prompt }} (It is {{ answer }})"
BEST = "{% if best_score == 1 %}{{ prompt }} (It is {{ best }}){% else %}{{ prompt }}{% endif %}"
_SELF = ["--roles.teacher.model_name_or_path=self"]
_TOLD = [*_SELF, f"--distill.teacher_prompt={HINT}"]
DISTILL = {"self": _TOLD, "forward": [*_TOLD, "--distill.divergence=forward_kl"],
           "ema": [*_TOLD, "--distill.teacher_ema=0.95"], "live": [*_TOLD, "--distill.teacher_ema=0"]}
ROWS = (*DISTILL, "sft", "grpo")
_LOOP = ["--train.max_steps=100000", "--train.lr_scheduler_type=constant", "--train.warmup_ratio=0",
         "--train.max_eval_batches=1", "--train.num_fixed_prompts=0", "--train.save_minutes=0",
         "--train.logging_steps=1", "--data.eval_fraction=0", "--data.split=null", "--model.lora.r=16"]
REWARD = {"demo": "builtin:demo_correct", "sums": "builtin:numeric_match"}
LENGTH = {"demo": 16, "sums": 12}
BATCH = {"demo": 128, "sums": 32}
RATE = {"demo": "4e-3", "sums": "5e-4"}


def _write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def right_answer(prompt: list[dict]) -> str:
    """Letter and item of the right answer to a request of the embedded task, by its checker."""
    from hybrid_rlhf.data.demo import is_correct

    listed = re.findall(r"\b([ABC] \w+)", prompt[-1]["content"].split(": ", 1)[1])
    return next(each for each in listed if is_correct(prompt, f"It is {each}"))


def write_demo(folder: Path) -> None:
    """base.jsonl: what the start is trained on. train.jsonl, test.jsonl: prompts with their answers."""
    from hybrid_rlhf.data import demo

    base, asked = [], [{"prompt": row["prompt"], "answer": right_answer(row["prompt"])} for row in demo.prompts()]
    for i, row in enumerate(demo.demonstrations()):
        question, said = row["prompt"][0]["content"], row["completion"][0]["content"]
        if i % 2:
            right = right_answer(row["prompt"])
            question, said = f"{question} (It is {right})", re.sub(r"[ABC] \w+$", right, said)
        base.append({"prompt": [{"role": "user", "content": question}],
                     "completion": [{"role": "assistant", "content": said}]})
    _write(folder / "base.jsonl", base)
    _write(folder / "test.jsonl", asked[:600])
    _write(folder / "train.jsonl", asked[600:])


def data_of(task: str, work: Path) -> Path:
    """The folder of a task's data, with answers.jsonl: what the row sft is trained on."""
    folder = work / "data"
    if not (folder / "answers.jsonl").exists():
        if task == "demo":
            write_demo(folder)
        else:
            from smollm2_tasks import TASKS

            folder = TASKS["sums"](folder)
        rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
        said = "Sure! It is {}" if task == "demo" else "{}"
        _write(folder / "answers.jsonl", [{"prompt": row["prompt"], "completion": said.format(row["answer"])} if
               isinstance(row["prompt"], str) else {"messages": [*row["prompt"], {
                   "role": "assistant", "content": said.format(row["answer"])}]} for row in rows])
    return folder


def start_of(task: str, work: Path, seed: int, model: Path | None) -> str:
    if task == "sums":
        return str(model)
    folder, words = work / f"seed{seed}" / "start", methods.FIXTURES["sft"]
    words = [w for w in words if not w.startswith("--data.sources")]
    methods.launch(["--stage", "sft", "--seed", str(seed), "--model.dtype=float32", "--data.max_length=64", *words,
                    f"--data.sources=[{data_of(task, work)}/base.jsonl]", "--train.num_fixed_prompts=0",
                    "--data.eval_fraction=0.02"], folder)
    return str(folder / "model")


def measured(model: str, task: str, data: Path, seed: int, template: str | None = None) -> dict:
    """right: the share of right sampled answers to the held-out prompts; template: a hint that it reads."""
    from hybrid_rlhf.data import collate, datasets
    from hybrid_rlhf.data.datasets import DataConfig
    from hybrid_rlhf.data.sources import Source
    from hybrid_rlhf.engine.decode.sampling import SamplingConfig
    from hybrid_rlhf.models.load import ModelConfig
    from hybrid_rlhf.rewards.builtin import BUILTINS
    from hybrid_rlhf.roles.teacher import TeacherPrompt
    from hybrid_rlhf.rollout import Rollout
    from hybrid_rlhf.training import builders, scored_answers
    from hybrid_rlhf.training.registry import READS

    config = DataConfig([Source(str(data / "test.jsonl"))], split=None, eval_fraction=0.0, max_prompt_length=96)
    settings = ModelConfig(model, dtype="float32")
    tokenizer = builders.open_tokenizer(settings, config, READS["ppo"], seed)
    rows = datasets.build(config, READS["ppo"], tokenizer, seed).train
    prompts = collate.collate_prompts([rows[i] for i in range(len(rows))])
    told = None
    if template:
        blank = Rollout.from_responses(prompts, [[0]] * len(prompts), [True] * len(prompts), 0, [""] * len(prompts))
        told = TeacherPrompt(template, tokenizer).of(blank).prompts
    actor = scored_answers.open_actor(settings, tokenizer)
    answers = scored_answers.respond(actor, prompts, SamplingConfig(max_new_tokens=LENGTH[task]), seed, told)
    check = BUILTINS[REWARD[task].removeprefix("builtin:")]()
    scores = check(completions=answers.completions, prompts=prompts.columns["prompt"], **prompts.columns)
    return {"right": statistics.fmean(score == 1 for score in scores), "items": len(scores),
            "length": float(answers.action_mask.sum(1).float().mean()), "examples": answers.completions[:3]}


def words_of(row: str, task: str, data: Path) -> tuple[str, list[str]]:
    """The stage of a row, and the words of its command line."""
    rate = f"--roles.actor.learning_rate={RATE[task]}"
    if row == "sft":
        return "sft", [f"--data.sources=[{data}/answers.jsonl]", f"--train.per_device_train_batch_size={BATCH[task]}",
                       f"--train.learning_rate={RATE[task]}", "--data.max_length=96"]
    online = [f"--data.sources=[{data}/train.jsonl]", "--data.max_prompt_length=96", rate]
    paid = [f"--reward.functions={REWARD[task]}"]
    if row in ("grpo", "best"):
        groups = ["--{}.sampling.num_samples=8", "--{}.sampling.max_new_tokens=" + str(LENGTH[task])]
        stage, more = ("grpo", []) if row == "grpo" else ("distill", [*_SELF, f"--distill.teacher_prompt={BEST}"])
        section = "ppo" if row == "grpo" else "distill"
        return stage, [*online, *paid, *(word.format(section) for word in groups), *more,
                       f"--train.per_device_train_batch_size={BATCH[task] // 8}"]
    return "distill", [*online, *DISTILL[row], f"--distill.sampling.max_new_tokens={LENGTH[task]}",
                       f"--train.per_device_train_batch_size={BATCH[task]}"]


def run(row: str, task: str, work: Path, seed: int, seconds: float, start: str) -> dict:
    data = data_of(task, work)
    stage, words = words_of(row, task, data)
    folder = work / f"seed{seed}" / f"{row}_{seconds:g}s"
    dtype = "float32" if task == "demo" else "bfloat16"
    methods.launch(["--stage", stage, "--seed", str(seed), f"--model.model_name_or_path={start}", *_LOOP,
                    f"--model.dtype={dtype}", *words, f"--train.max_seconds={seconds:.1f}"], folder)
    steps = sum("time/step" in json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return {"row": row, "seed": seed, "steps": steps, **measured(f"{folder}/model", task, data, seed)}


def lines_of(rows: list[dict]) -> list[list[str]]:
    """A line for each row: mean and single values over the seeds."""
    lines = []
    for name in dict.fromkeys(row["row"] for row in rows):
        same = [row for row in rows if row["row"] == name]
        lines.append([name, ", ".join(str(row["seed"]) for row in same), *(
            f"{statistics.mean(row[what] for row in same):.{n}f} ({', '.join(f'{row[what]:.{n}f}' for row in same)})"
            for what, n in (("right", 3), ("length", 1))), ", ".join(str(row["steps"]) for row in same)])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=REWARD, default="demo")
    parser.add_argument("--rows", default=",".join(ROWS), help="of these, and best")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--model", type=Path, help="the chat model of --task sums")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.task == "sums" and given.model is None:
        parser.error("--task sums needs --model, the folder of a chat model")
    work, rows = (given.work or ROOT / "outputs" / f"self_{given.task}").resolve(), []
    for seed in map(int, given.seeds.split(",")):
        start, data = start_of(given.task, work, seed, given.model), data_of(given.task, work)
        for name, template in (("start", None), ("told", HINT)):
            rows.append({"row": name, "seed": seed, "steps": "", **measured(start, given.task, data, seed, template)})
        for row in given.rows.split(","):
            rows.append(run(row, given.task, work, seed, given.seconds, start))
            print(json.dumps(rows[-1]), flush=True)
        if given.json:
            write_json(given.json, {"machine": machine(), "task": given.task, "seconds": given.seconds, "rows": rows})
        print(table_of(("row", "seeds", "right", "tokens", "steps"), lines_of(rows)), flush=True)


if __name__ == "__main__":
    main()
