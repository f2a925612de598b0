"""A folder with data and command lines for tiny runs, processes that run them, and what such a run leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from hybrid_rlhf.run import checkpoint
from tests.factories.stage_options import used
from tests.factories.tiny import save_tiny

ROOT = Path(__file__).parents[2]
WORDS = ["red", "blue", "green sea", "cat", "a small dog", "fox", "sun", "the moon", "tree", "old book"]
# what the clock says, and what depends on the memory that is free
CLOCKED = ("time/", "memory/", "engine/tokens_per_second", "engine/kv_bytes")
CHILD = "import sys; from hybrid_rlhf.cli import main; sys.exit(main())"

COMMON = ["--data.split", "null", "--data.eval_fraction", "0.2", "--data.max_length", "48",
          "--data.max_prompt_length", "32", "--train.per_device_train_batch_size", "6", "--train.learning_rate", "1e-3",
          "--train.logging_steps", "2", "--train.eval_steps", "4"]
PPO = ["--ppo.sampling.max_new_tokens", "6", "--ppo.sampling.num_samples", "2", "--ppo.num_ppo_epochs", "2",
       "--ppo.num_minibatches", "2", "--ppo.kl_target", "0.1", "--ppo.kl_horizon", "100",
       "--roles.actor.learning_rate", "1e-3"]
CRITIC = ["--roles.critic.learning_rate", "1e-3", "--ppo.critic_warmup_steps", "2"]


def prepare(folder: Path) -> Path:
    """Rows for every stage and a tiny model with dropout, so that training draws from the global generator."""
    rows = {"sft": [{"prompt": f"say {w} {i}", "completion": w} for i in range(3) for w in WORDS],
            "reward": [{"prompt": f"say {w} {i}", "chosen": w, "rejected": "no no"} for i in range(3) for w in WORDS],
            "ppo": [{"prompt": f"say {w} {i}"} for i in range(3) for w in WORDS]}
    for name, table in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in table))
    save_tiny(folder / "base", attention_dropout=0.1)
    return folder


def argv_of(folder: Path, stage: str, out: str, steps: int, *more: str) -> list[str]:
    """The command line of a stage; `out` is its folder, whose neighbours sft and reward are its parent runs."""
    data = {"dpo": "reward", "kto": "reward", "grpo": "ppo", "conditional_sft": "reward"}.get(stage, stage)
    start = ["--model.model_name_or_path", f"{folder}/base"] if stage in ("sft", "conditional_sft") else []
    return ["--stage", stage, "--output_dir", f"{folder}/{out}", "--data.cache_dir", f"{folder}/cache",
            f"--data.sources=[{{path: '{folder}/{data}.jsonl'}}]", "--train.max_steps", str(steps),
            *used(stage, COMMON), *start, *(PPO if data == "ppo" else []), *(CRITIC if stage == "ppo" else []), *more]


def launch(argv: list[str], code: str = CHILD, **env: str) -> subprocess.Popen:
    """A process of its own that runs the command line, with one thread: more would outnumber the cores."""
    return subprocess.Popen([sys.executable, "-c", code, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
                                                      "TOKENIZERS_PARALLELISM": "false", **env})


def run(argv: list[str], code: str = CHILD, **env: str) -> subprocess.CompletedProcess:
    """The same, to its end."""
    started = launch(argv, code, **env)
    out, err = started.communicate(timeout=300)
    return subprocess.CompletedProcess(argv, started.returncode, out, err)


class Nursery:
    """A process of tests/crash/nursery.py: each command line in a process of its own, without its imports' seconds."""

    def __init__(self, logs: Path) -> None:
        self._logs, self._number = logs, 0
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false",
               "PYTHONHASHSEED": "random"}
        self._process = subprocess.Popen([sys.executable, "-m", "tests.crash.nursery"], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
                                         env=env)

    def run(self, argv: list[str], *, after: float | None = None, at: int | None = None) -> dict:
        """{"code", "seconds", "operations", "log"}; killed `after` so many seconds, or before file operation `at`."""
        if not self._number:
            assert json.loads(self._process.stdout.readline()) == "ready"
        self._number += 1
        log = self._logs / f"{id(self)}-{self._number}.log"
        self._process.stdin.write(json.dumps({"argv": argv, "log": str(log), "after": after, "at": at}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline()) | {"log": log.read_text(encoding="utf-8")}

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)


def three_stages(folder: Path, out: str, steps: int, save_steps: int) -> list[str]:
    """--stage all on the same rows, saved often, with dropout in stage 1 and adapters on one bf16 base after it."""
    settings = {
        "model": {"model_name_or_path": f"{folder}/base", "dtype": "float32"},
        "data": {"sources": [{"path": f"{folder}/{n}.jsonl", "stages": [n]} for n in ("sft", "reward", "ppo")],
                 "eval_fraction": 0.2, "max_length": 48, "max_prompt_length": 32, "cache_dir": f"{folder}/cache"},
        "stages": {n: {"max_steps": steps, "per_device_train_batch_size": 6, "logging_steps": 2, "eval_steps": 4,
                       "save_steps": save_steps} | ({"learning_rate": 1e-3} if n != "ppo" else {})
                   for n in ("sft", "reward", "ppo")},
        "roles": {"actor": {"learning_rate": 1e-3}, "critic": {"learning_rate": 1e-3}},
        "ppo": {"sampling": {"max_new_tokens": 6, "num_samples": 2}, "num_ppo_epochs": 2, "num_minibatches": 2,
                "kl_target": 0.1, "kl_horizon": 100, "critic_warmup_steps": 2},
        "compare": {"num_prompts": 4}}
    path = folder / "all.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML
    return ["--stage", "all", "--config", str(path), "--output_dir", f"{folder}/{out}"]


def rows_of(out: Path, name: str) -> list[dict]:
    """The lines of a jsonl file without what the clock says."""
    lines = (out / name).read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(CLOCKED)} for line in lines]


def difference(out: Path, other: Path) -> str | None:
    """What two runs have not in common, bit for bit: exported weights, the last checkpoint's tensors and numbers,
    metrics.jsonl but the clock's figures, samples.jsonl, answers.jsonl. None where they are the same."""
    for name in ("metrics.jsonl", "samples.jsonl", "answers.jsonl"):
        ours, theirs = rows_of(out, name), rows_of(other, name)
        for a, b in zip(ours, theirs, strict=False):
            if a != b:
                keys = [k for k in a.keys() | b.keys() if a.get(k) != b.get(k)]
                return f"{name} at step {a.get('step')}: {keys[:4]}"
        if len(ours) != len(theirs):
            return f"{name} has {len(ours)} and {len(theirs)} lines"
    for path in sorted((out / "model").glob("*.safetensors")):
        if path.read_bytes() != (other / "model" / path.name).read_bytes():
            return f"model/{path.name}"
    states = [checkpoint.load(checkpoint.latest(each / "checkpoints")) for each in (out, other)]
    return unlike(*({k: s[k] for k in ("step", "trainer", "loader", "random", "best")} for s in states))


def unlike(a: object, b: object, path: str = "checkpoint") -> str | None:
    """The first place where two states differ in a bit, or None."""
    if isinstance(a, torch.Tensor):
        is_same = isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a.view(-1).view(torch.uint8),
                                                                                    b.view(-1).view(torch.uint8))
        return None if is_same else path
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{path}: {sorted(a.keys() ^ b.keys())[:3]}"
        return next((found for k in a if (found := unlike(a[k], b[k], f"{path}/{k}"))), None)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return next((found for i, (x, y) in pairs if (found := unlike(x, y, f"{path}/{i}"))), None)
    return None if a == b or a != a else f"{path}: {a!r} and {b!r}"
