"""Made-up run folders, as real ones are: run.json, config.yaml, metrics, samples, answers, checkpoints, model."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import yaml

ONLINE = ("ppo", "grpo", "rloo", "distill", "online_dpo")  # of those that there are: stages whose model answers
START = datetime(2026, 11, 23, 14, 0, tzinfo=UTC)
PROMPTS = ("Name the first word: A rose B fish C horn", "Name the largest number: A 15 B 20 C 22",
           "Quick, the second word: A drum B pear C king", "Give the last word: A boat B rock C horn")
VERSIONS = {"hybrid_rlhf": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "5.23.0",
            "deepspeed": "0.19.8", "peft": "0.21.2", "datasets": "5.2.0"}
Values = Callable[[int], dict]


@dataclass
class MadeRun:
    """A run's folder. A running one holds its lock until `finish` or `die`, as its process would."""

    folder: Path
    id: str
    stage: str
    record: dict
    values: Values
    has_tools: bool = False
    done: int = 0
    _lock: list[int] = field(default_factory=list)

    def grow(self, steps: int) -> None:
        """So many steps more, with a sample of every fifth."""
        for step in range(self.done + 1, self.done + steps + 1):
            append(self.folder / "metrics.jsonl", [{"step": step, **self.values(step)}])
            if self.stage in ONLINE and (step == 1 or step % 5 == 0):
                append(self.folder / "samples.jsonl", samples(step, self.has_tools))
        self.done += steps

    def evaluate(self) -> None:
        """The held-out row after the last step."""
        kept = ("loss", "accuracy", "mean_token_accuracy", "reward", "reward_std", "kl", "rewards/accuracies")
        found = {f"eval/{name}": value for name, value in self.values(self.done).items() if name in kept}
        append(self.folder / "metrics.jsonl", [{"step": self.done, **found}])

    def answer(self) -> None:
        """What it says to the fixed prompts after the last step."""
        append(self.folder / "answers.jsonl", answers(self.stage, self.done))

    def checkpoint(self, size: int = 2000, is_best: bool = False) -> Path:
        """A complete checkpoint after the last step, of about `size` bytes."""
        return checkpoint(self.folder / "checkpoints" / ("best" if is_best else ""), self.done, size)

    def lock(self) -> None:
        handle = os.open(self.folder / "config.yaml", os.O_RDWR)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._lock.append(handle)

    def die(self) -> None:
        """Its process ends without a word: run.json says running, and nobody holds the lock."""
        while self._lock:
            os.close(self._lock.pop())

    def finish(self, status: str = "finished", error: str | None = None) -> None:
        """It ends: with model, report and the last answers where it ends well."""
        self.record |= {"status": status, "error": error, "seconds": 0.5 * self.done + 3.25,
                        "finished": _time(START + timedelta(seconds=0.5 * self.done + 3.25))}
        if status == "finished":
            self.record["metrics"] = {**(self.values(self.done) if self.done else {}), "time/per_step": 0.5}
            self.record["facts"] |= {"tokenizer": "0" * 64, "chat_template": "1" * 64,
                                     "data": {"read": 100, "usable": 90, "train": 80, "held_out": 10}}
            _model(self.folder / "model", self.id)
            (self.folder / "report.md").write_text(f"# {self.id}\n")
            (self.folder / "report.html").write_text(
                '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>report</title></head>'
                f"<body><main><h1>Stage {self.stage}</h1></main></body></html>\n")
        self.write()
        self.die()

    def write(self) -> None:
        """run.json, whole."""
        beside = self.folder / ".hybrid_rlhf-0123456789abcdef"
        beside.write_text(json.dumps(self.record, indent=1) + "\n")
        os.replace(beside, self.folder / "run.json")


def make_run(outputs: Path, id: str, stage: str = "sft", steps: int = 20, status: str = "finished",  # noqa: A002
             parents: Sequence[str] = (), *, max_steps: int | None = None, values: Values | None = None,
             settings: Mapping[str, object] | None = None, has_tools: bool = False, error: str | None = None,
             started: datetime = START) -> MadeRun:
    """A run folder outputs/id.

    status: finished, stopped, failed, running (its lock is held by this process until it is told to end), or lost.
    parents: the model it starts from, and for online stages a reward model (the teacher, for distill): ids of runs
    below outputs, or names of models elsewhere. settings: dotted option -> value. values: the metrics of a step.
    """
    folder = outputs / id
    folder.mkdir(parents=True)
    total = max_steps or max(steps, 1)
    config = _settings(outputs, folder, stage, total, parents, has_tools)
    for name, value in (settings or {}).items():
        _set(config, name, value)
    start = _named(outputs, parents[0]) if parents else None
    record = _record(folder, stage, total, config, start or "demo", started)
    if start and status == "finished":
        record["facts"]["base_model"] = start
    run = MadeRun(folder, id, stage, record, values or (lambda step: metrics(stage, step, total, has_tools)), has_tools)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    for name in ("metrics.jsonl", "samples.jsonl", "answers.jsonl"):
        (folder / name).write_text("")
    run.write()
    if status == "running":
        run.lock()
    run.answer()
    run.grow(steps)
    if status in ("finished", "stopped"):
        run.checkpoint()
    if status == "finished":
        run.evaluate()
        run.answer()
    if status in ("finished", "stopped", "failed"):
        run.finish(status, error or ("the GPU's memory is used up" if status == "failed" else None))
    return run


def metrics(stage: str, step: int, total: int, has_tools: bool = False) -> dict:
    """One step's: a course that gets better, with waves."""
    share, wave = step / max(total, 1), 0.03 * math.sin(step)
    common = {"grad_norm": 1.5 - share + wave, "train/skipped_updates": 0.0, "learning_rate": 1e-3 * (1 - share),
              "micro_batch_tokens": 8192.0, "time/step": 0.5 + wave, "epoch": step / 50}
    if stage == "reward":
        return {"memory/reward/update": 600e6 + step, "loss": 0.7 - 0.5 * share + wave, "accuracy": 0.5 + 0.4 * share,
                "margin": 3 * share, "mean_reward": 0.1, **common}
    if stage not in ONLINE:
        return {"memory/actor/update": 500e6 + step, "loss": 3 - 2 * share + wave,
                "mean_token_accuracy": 0.4 + 0.5 * share, "num_tokens": 1800.0 * step, **common}
    tools = {"tools/call_frequency": 0.9, "tools/failure_frequency": 0.1, "tools/malformed_frequency": 0.0,
             "episodes/turns": 2.1} if has_tools else {}
    if stage == "distill":
        tools["distill/divergence"] = 1 - 0.8 * share + wave
    reward = 0.3 + 0.5 * share + wave
    return {"time/generate": 0.25, "memory/actor/generate": 450e6, "engine/tokens_per_second": 24000.0,
            "time/score": 0.05, "memory/reward/score": 480e6, "time/train": 0.15, "memory/actor/update": 550e6 + step,
            "kl_coef": 0.1, "policy/loss": 0.01 + wave / 10, "policy/clip_fraction": 0.01, "entropy": 1.2 - 0.4 * share,
            "reward": reward, "reward_std": 0.35, "rewards/correct/mean": reward, "rewards/correct/std": 0.35,
            "completions/mean_length": 7 + wave, "completions/clipped_ratio": 0.0, "kl": 2 * share,
            "objective/kl": 2 * share, **tools, **common}


def samples(step: int, has_tools: bool = False) -> list[dict]:
    """Four, as samples.jsonl has them; of episodes with tools the turns are in the completion's text."""
    rows = []
    for place, prompt in enumerate(PROMPTS):
        row = {"step": step, "prompt": f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n",
               "completion": f"It is answer {step + place}", "score": 0.25 * place, "ended": place != 3,
               "scores": {"correct": float(place % 2), "judge": 0.5}, "judge": "the answer is short and clear"}
        if has_tools:
            row |= {"completion": f"[assistant] Let me look. add(a={step}, b=2)\n[add] {step + 2}\n"
                                  f"[assistant] It is {step + 2}.", "ended_by": "done",
                    "replay": {"seed": 1, "number": place, "prompt_ids": [1, 2, 3], "turns": [
                        {"added": [], "limit": 16, "said": [4, 5]}, {"added": [6], "limit": 13, "said": [7, 2]}]}}
        rows.append(row)
    return rows


def answers(stage: str, step: int) -> list[dict]:
    """Those to the fixed prompts; a reward model scores both responses of a pair."""
    rows = []
    for place, prompt in enumerate(PROMPTS):
        text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        if stage == "reward":
            rows += [{"step": step, "prompt": text, "completion": f"{side} {place}", "score": score * step / 10,
                      "side": side} for side, score in (("chosen", 1.0), ("rejected", -1.0))]
        else:
            rows.append({"step": step, "prompt": text, "completion": f"After {step} steps: B", "ended": True})
    return rows


def checkpoint(folder: Path, step: int, size: int = 2000) -> Path:
    """folder/step-00000020 with a manifest that fits."""
    place = folder / f"step-{step:08d}"
    place.mkdir(parents=True)
    contents = {"state.safetensors": b"\0" * size, "state.json": b'{"dict": {"step": {"value": %d}}}' % step}
    files = {}
    for name, content in contents.items():
        (place / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (place / "manifest.json").write_text(json.dumps({"format": 2, "world_size": 1, "files": files, "sha256": "0" * 64},
                                                    indent=1))
    return place


def append(path: Path, rows: Sequence[dict]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _record(folder: Path, stage: str, total: int, config: dict, start: str, started: datetime) -> dict:
    """run.json of a run that has begun."""
    return {"stage": stage, "status": "running", "command": f"train.py --stage {stage} --output_dir {folder}",
            "config": config, "metrics": {}, "facts": {"header": [
                "data: 100 rows read, 80 to train on, 10 held out",
                f"model: {start}; trained: all 136,320 parameters; float32 on cpu",
                f"settings: train.max_steps {total}", f"run: {total} steps of 8 rows each, to {folder}"]},
            "versions": VERSIONS, "started": _time(started), "finished": None, "seconds": 0.0, "error": None,
            "code": {}, "format": 1}


def _settings(outputs: Path, folder: Path, stage: str, total: int, parents: Sequence[str], has_tools: bool) -> dict:
    first, second = [_named(outputs, each) for each in (*parents, "", "")[:2]]
    train = {"learning_rate": 1e-3, "optim": "adamw", "lr_scheduler_type": "cosine", "warmup_ratio": 0.1,
             "num_train_epochs": None, "max_steps": total, "per_device_train_batch_size": 8, "logging_steps": 5,
             "num_fixed_prompts": 4, "save_steps": 0}
    config = {"stage": stage, "output_dir": str(folder), "seed": 0, "resume": "auto", "report_to": [],
              "model": {"model_name_or_path": first or None, "preset": None, "dtype": "float32", "lora": {"r": 0}},
              "data": {"sources": [{"path": "demo/prompts", "split": "train", "weight": None}], "split": None,
                       "eval_fraction": 0.08, "max_length": 1024},
              "train": train, "engine": {"zero_stage": None, "offload": [], "micro_batch_tokens": 8192}}
    if stage not in ONLINE:
        return config
    roles = {role: {"model_name_or_path": None} for role in ("actor", "ref", "reward", "teacher")}
    roles["actor"]["learning_rate"] = train.pop("learning_rate")
    roles["teacher" if stage == "distill" else "reward"]["model_name_or_path"] = second or None
    tools = ["calculator.py:add"] if has_tools else []
    reward = {"functions": "builtin:demo_correct", "models": [], "judge": {"model": None}}
    return config | {
        "roles": {"share_base": "auto", **roles}, "reward": reward,
        "environment": {"factory": None, "tools": tools, "max_turns": 10},
        "ppo": {"sampling": {"max_new_tokens": 16, "num_samples": 8}, "kl_coef": 0.1}}


def _named(outputs: Path, name: str) -> str:
    """A run below outputs by its path, as settings name it; anything else as it is."""
    return str(outputs / name) if name and (outputs / name / "run.json").exists() else name


def _set(config: dict, option: str, value: object) -> None:
    *sections, name = option.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[name] = value


def _model(folder: Path, name: str) -> None:
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}')
    (folder / "model.safetensors").write_bytes(b"\0" * 1000)
    (folder / "README.md").write_text(f"---\nlibrary_name: transformers\n---\n\n# {name}\n\nA made-up model.\n")


def _time(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds")
