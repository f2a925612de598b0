"""What a student learns from a teacher in so many seconds: on-policy distillation, SFT on its answers, GRPO without it.

    python benchmarks/distill_learn.py [--task demo|smollm2] [--rows reverse_kl,sft,grpo] [--seeds 0,1,2]
        [--seconds 20] [--work DIR] [--json FILE]

demo: the student is the demo's SFT model, the teacher its PPO model. smollm2: the student is SmolLM2-135M-Instruct, the
teacher the same after GRPO on sums (`benchmarks/smollm2.py`). Every row starts from the same student and trains for
`--seconds` by its own clock (the SFT row first samples the teacher's answers, in seconds of its own). Measured on
held-out prompts, one sampled answer each: the share of right answers, and KL(student || teacher) in nats per answer. A
run that is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import methods
from harness import ROOT, machine, table_of
from methods_settings import METHODS, OF_PROMPTS, OF_TEXTS

KINDS = ("reverse_kl", "forward_kl", "jsd", "policy_gradient")
ROWS = (*KINDS, "sft", "grpo")
_LOOP = ["--train.max_steps=100000", "--train.lr_scheduler_type=constant", "--train.warmup_ratio=0",
         "--train.max_eval_batches=1", "--train.num_fixed_prompts=0", "--train.save_minutes=0",
         "--train.logging_steps=1"]


class Task(NamedTuple):
    """start(work, seed), teacher(work, seed): folders of models. words: of each stage. max_new_tokens: of an answer.
    data(work), held_out(work): path, split, eval_fraction and max_prompt_length of the prompts that are trained on, and
    of those to be measured by. is_right: of a rollout's answers."""

    start: Callable[[Path, int], Path]
    teacher: Callable[[Path, int], Path]
    words: dict[str, list[str]]
    max_new_tokens: int
    data: Callable[[Path], dict]
    held_out: Callable[[Path], dict]
    is_right: Callable


# -- the demo ----------------------------------------------------------------------------------------------------------


def _demo_teacher(work: Path, seed: int) -> Path:
    folder = methods.fixtures(work, seed)
    words = [word.replace("BESIDE", str(folder)) for word in METHODS["ppo"]]
    methods.launch(["--stage", "ppo", "--seed", str(seed), *OF_PROMPTS, *words], folder / "ppo")
    return folder / "ppo"


def _demo_data(_work: Path) -> dict:
    return {"path": "demo/prompts", "split": [4, 3, 3], "eval_fraction": 0.08, "max_prompt_length": 40}


def _demo_right(rollout) -> list[bool]:  # noqa: ANN001
    from hybrid_rlhf.training import scored_answers

    return scored_answers.is_right("demo", rollout)


_DEMO_PROMPTS = [*OF_PROMPTS[:3], "--data.max_prompt_length=40", "--data.sources=[{path: demo/prompts}]"]
DEMO = Task(
    lambda work, seed: methods.fixtures(work, seed) / "sft", _demo_teacher,
    {"distill": [*_DEMO_PROMPTS, "--distill.sampling.max_new_tokens=16", "--roles.actor.learning_rate=1e-3",
                 "--train.per_device_train_batch_size=128"],
     "sft": [*OF_TEXTS[:1], "--data.eval_fraction=0.02", "--data.max_length=64", "--train.learning_rate=1e-3",
             "--train.per_device_train_batch_size=128"],
     "grpo": [*_DEMO_PROMPTS, "--ppo.sampling.max_new_tokens=16", "--ppo.missing_eos_penalty=1.0",
              "--ppo.num_ppo_epochs=2", "--ppo.num_minibatches=2", "--ppo.kl_coef=0.3",
              "--roles.actor.learning_rate=1e-3", "--train.per_device_train_batch_size=24",
              "--roles.reward.model_name_or_path=BESIDE/reward"]},
    16, _demo_data, _demo_data, _demo_right)


# -- SmolLM2 -----------------------------------------------------------------------------------------------------------


def _smollm2_start(_work: Path, _seed: int) -> Path:
    sys.path.append(str(ROOT / "examples" / "first_model"))
    from get_smollm2 import get

    return Path(get()).resolve()


def _smollm2_teacher(work: Path, _seed: int) -> Path:
    from smollm2_settings import EXPERIMENTS

    folder = work / "teacher"
    given = [w.replace("START", str(_smollm2_start(work, 0))).replace("SUMS", str(_sums(work)))
             for w in EXPERIMENTS["grpo_bf16"].words]
    methods.launch(["--stage", "grpo", "--seed", "0", *given, "--train.max_steps=40"], folder)
    return folder


def _sums(work: Path) -> Path:
    from smollm2_tasks import TASKS

    return TASKS["sums"](work / "sums")


def _sums_right(rollout) -> list[bool]:  # noqa: ANN001
    from hybrid_rlhf.rewards.builtin import NumericMatch

    return [score == 1 for score in NumericMatch()(rollout.completions, answer=rollout.prompts.columns["answer"])]


_OF_SUMS = ["--model.dtype=bfloat16", "--data.split=null", "--data.eval_fraction=0.02",
            "--data.sources=[{path: SUMS/train.jsonl}]"]
SMOLLM2 = Task(
    _smollm2_start, _smollm2_teacher,
    {"distill": [*_OF_SUMS, "--distill.sampling.max_new_tokens=12", "--train.per_device_train_batch_size=64"],
     "sft": ["--model.dtype=bfloat16", "--data.split=null", "--data.eval_fraction=0.02",
             "--train.per_device_train_batch_size=8"],
     "grpo": [*_OF_SUMS, "--ppo.sampling.num_samples=8", "--train.per_device_train_batch_size=8",
              "--ppo.sampling.max_new_tokens=12", "--reward.functions=builtin:numeric_match"]},
    12, lambda work: {"path": str(_sums(work) / "train.jsonl"), "eval_fraction": 0.0, "max_prompt_length": 96},
    lambda work: {"path": str(_sums(work) / "test.jsonl"), "eval_fraction": 0.0, "max_prompt_length": 96}, _sums_right)
TASKS = {"demo": DEMO, "smollm2": SMOLLM2}


# -- one row -----------------------------------------------------------------------------------------------------------


def prompts_of(model: Path, data: dict, seed: int, is_held_out: bool):  # noqa: ANN201
    """The tokenizer of a model, and the prompts of `data` that training holds out, or those that it trains on."""
    from hybrid_rlhf.data import collate, datasets
    from hybrid_rlhf.data.datasets import DataConfig
    from hybrid_rlhf.data.sources import Source
    from hybrid_rlhf.models.load import ModelConfig
    from hybrid_rlhf.training import builders
    from hybrid_rlhf.training.registry import READS

    path, own = data["path"], {k: v for k, v in data.items() if k != "path"}
    config = DataConfig([Source(path)], **{"split": None} | own)
    tokenizer = builders.open_tokenizer(ModelConfig(builders.model_folder(str(model))), config, READS["ppo"], seed)
    found = datasets.build(config, READS["ppo"], tokenizer, seed)
    rows = found.held_out if is_held_out and own["eval_fraction"] else found.train
    return tokenizer, collate.collate_prompts([rows[i] for i in range(len(rows))])


def opened(model: Path, tokenizer):  # noqa: ANN001, ANN201
    from hybrid_rlhf.models.load import ModelConfig
    from hybrid_rlhf.training import builders, scored_answers

    return scored_answers.open_actor(ModelConfig(builders.model_folder(str(model)), dtype="float32"), tokenizer)


def answers_of(teacher: Path, task: Task, work: Path, seed: int, folder: Path) -> float:
    """One answer of the teacher's to every prompt that is trained on, as demonstrations; the seconds it took."""
    from hybrid_rlhf.engine.decode.sampling import SamplingConfig

    target, told = folder / "teacher_answers.jsonl", folder / "teacher_answers.seconds"
    if told.exists():
        return float(told.read_text())
    tokenizer, prompts = prompts_of(teacher, task.data(work), seed, is_held_out=False)
    actor, start = opened(teacher, tokenizer), time.perf_counter()
    with actor.inference():
        rollout = actor.generate(prompts, SamplingConfig(max_new_tokens=task.max_new_tokens), seed)
    asked = ([{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts.columns["prompt"])
    target.write_text("".join(json.dumps({"messages": [*p, {"role": "assistant", "content": text}]}) + "\n" for
                              p, text in zip(asked, rollout.completions, strict=True)), encoding="utf-8")
    told.write_text(f"{time.perf_counter() - start:.2f}")
    return float(told.read_text())


def measured(model: Path, teacher: Path, task: Task, work: Path, seed: int) -> dict[str, float]:
    """right: share of sampled answers; nats: KL(model || teacher) per answer, from the same answers."""
    from hybrid_rlhf.engine.decode.sampling import SamplingConfig
    from hybrid_rlhf.roles import Reference
    from hybrid_rlhf.training import scored_answers

    tokenizer, prompts = prompts_of(model, task.held_out(work), seed, is_held_out=True)
    rollout = scored_answers.respond(opened(model, tokenizer), prompts,
                                     SamplingConfig(max_new_tokens=task.max_new_tokens), seed)
    rollout.ref_logprobs = Reference(opened(teacher, tokenizer).engine).logprobs(rollout)
    return {"right": scored_answers.share(task.is_right(rollout)), "nats": rollout.mean_kl(), "items": len(rollout)}


def run(row: str, name: str, work: Path, seed: int, seconds: float) -> dict:
    """Train one row and measure it."""
    task = TASKS[name]
    start, teacher = task.start(work, seed), task.teacher(work, seed)
    beside = work / f"seed{seed}"
    beside.mkdir(parents=True, exist_ok=True)
    stage = "distill" if row in KINDS else row
    words = [w.replace("BESIDE", str(beside)).replace("SUMS", str(work / "sums")) for w in task.words[stage]]
    left = seconds
    if stage == "distill":
        words += [f"--roles.teacher.model_name_or_path={teacher}", f"--distill.divergence={row}"]
    if stage == "sft":
        left -= answers_of(teacher, task, work, seed, beside)
        words.append(f"--data.sources=[{beside}/teacher_answers.jsonl]")
    folder = beside / f"{row}_{seconds:g}s"
    methods.launch(["--stage", stage, "--seed", str(seed), f"--model.model_name_or_path={start}", *_LOOP, *words,
                    f"--train.max_seconds={max(left, 1):.1f}"], folder)
    steps = sum("time/step" in json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return {"row": row, "seed": seed, "seconds": seconds, "steps": steps, "machine": machine(),
            **measured(folder, teacher, task, work, seed)}


def lines_of(rows: list[dict]) -> list[list[str]]:
    found = []
    for name in dict.fromkeys(row["row"] for row in rows):
        own = [row for row in rows if row["row"] == name]
        found.append([name, ", ".join(str(row["seed"]) for row in own), *(
            f"{statistics.mean(row[what] for row in own):.3f} ({', '.join(f'{row[what]:.3f}' for row in own)})"
            for what in ("right", "nats")), ", ".join(str(row["steps"]) for row in own)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="demo")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    work, task = (given.work or ROOT / "outputs" / f"distill_{given.task}").resolve(), TASKS[given.task]
    rows = []
    for seed in map(int, given.seeds.split(",")):
        teacher = task.teacher(work, seed)
        for name, model in (("start", task.start(work, seed)), ("teacher", teacher)):
            rows.append({"row": name, "seed": seed, "steps": "", **measured(model, teacher, task, work, seed)})
        rows += [run(row, given.task, work, seed, given.seconds) for row in given.rows.split(",")]
        if given.json:
            given.json.write_text(json.dumps({"machine": machine(), "task": given.task, "rows": rows}, indent=1) + "\n")
        print(table_of(("row", "seeds", "right", "KL to the teacher", "steps"), lines_of(rows)), flush=True)


if __name__ == "__main__":
    main()
