"""Runs of one process and of two on the same data, made once: what the tests in this folder compare."""

from __future__ import annotations

import json
from pathlib import Path

from hybrid_rlhf.cli import main
from tests.factories.processes import ended, launch
from tests.factories.stage_options import used
from tests.factories.tiny import save_tiny

WORDS = ["red", "blue", "green sea", "cat", "a small dog", "fox", "sun", "the moon", "tree", "old book", "wind"]
RUNS = {"sft": "sft", "reward": "reward", "ppo": "ppo", "lora_reward": "reward", "lora_ppo": "ppo", "grpo": "grpo",
        "gdpo": "gdpo",
        "dpo": "dpo", "rejection": "rejection", "distill": "distill"}  # run -> stage
# what cannot be the same: the clock's figures, a process's own cache, and the budget that is given
CLOCKED = ("time/", "memory/", "engine/tokens_per_second", "engine/kv_bytes", "engine/kept_bytes", "micro_batch_tokens",
           "value/micro_batch_tokens")


def argv_of(folder: Path, runs: dict[str, str], where: str, batch: int, *more: str) -> dict[str, list[str]]:
    """The command lines of `runs`; those named lora_ have adapters on one base that all roles share."""
    shared = ["--model.dtype", "float32", "--data.split", "null", "--data.eval_fraction", "0.3",
              "--data.max_length", "48", "--data.max_prompt_length", "32", "--data.cache_dir", f"{folder}/cache",
              "--train.max_steps", "3", "--train.learning_rate", "0.05", "--train.optim", "sgd",
              "--train.per_device_train_batch_size", str(batch), "--train.per_device_eval_batch_size", str(batch),
              "--train.logging_steps", "1", *more]
    ppo = ["--ppo.sampling.max_new_tokens", "6", "--ppo.sampling.num_samples", "2", "--ppo.num_ppo_epochs", "2",
           "--ppo.num_minibatches", "2", "--ppo.kl_target", "0.1", "--ppo.kl_horizon", "100",
           "--roles.actor.learning_rate", "0.05"]
    grpo = [*ppo, "--ppo.max_refills", "2", "--ppo.sampling.top_p", "0.9",
            f"--reward.functions=['{folder}/pay.py:odd']"]
    gdpo = [*ppo, "--ppo.policy_loss", "vespo", "--ppo.top_entropy_quantile", "0.4", "--ppo.max_off_policy_kl", "1e-3",
            "--ppo.kl_bias_correction", "true",
            f"--reward.functions=['{folder}/pay.py:odd', '{folder}/pay.py:length']"]
    ppo = [*ppo, "--roles.critic.learning_rate", "0.05", "--ppo.ema", "true", "--ppo.ptx_coef", "0.5",
           "--ppo.ptx_scale", "relative"]
    lora = ["--model.model_name_or_path", f"{folder}/{where}/sft", "--model.lora.r", "4"]
    extra = {"sft": ["--model.model_name_or_path", f"{folder}/base"], "reward": [], "ppo": ppo,
             "lora_reward": [*lora, "--train.learning_rate", "0.5"],
             # one update of one micro-batch: ZeRO 3 gathers each of the adapters' modules by itself, 5 s a pass by gloo
             "lora_ppo": [*lora, *ppo, "--ppo.num_ppo_epochs", "1", "--ppo.num_minibatches", "1",
                          "--engine.micro_batch_tokens", "1000",
                          "--roles.reward.model_name_or_path", f"{folder}/{where}/lora_reward",
                          "--roles.share_base", "true"], "grpo": grpo, "gdpo": gdpo, "dpo": [],
             "rejection": ["--rejection.sampling.max_new_tokens", "6", "--rejection.sampling.num_samples", "3",
                           "--rejection.num_minibatches", "2", "--roles.actor.learning_rate", "0.05"],
             # the teacher's weights are cut as engine.zero_stage says
             "distill": ["--distill.sampling.max_new_tokens", "6", "--distill.lmbda", "0.5", "--distill.top_k", "20",
                         "--distill.num_minibatches", "2", "--roles.actor.learning_rate", "0.05",
                         "--roles.teacher.model_name_or_path", f"{folder}/teacher"]}
    texts = {"ppo": f", {{path: '{folder}/sft.jsonl', stages: [ptx]}}",
             "distill": f", {{path: '{folder}/sft.jsonl', stages: [distill_data]}}"}
    return {name: ["--stage", stage, "--output_dir", f"{folder}/{where}/{name}",
                   f"--data.sources=[{{path: '{folder}/{stage}.jsonl'}}{texts.get(stage, '')}]",
                   *used(stage, [*shared, *extra[name]])]
            for name, stage in runs.items()}


def write_data(folder: Path) -> None:
    """The rows of every stage, a reward function, and models to begin with."""
    rows = {"sft": [{"prompt": f"say {w} {i}", "completion": w} for i in range(3) for w in WORDS],
            "reward": [{"prompt": f"say {w} {i}", "chosen": w, "rejected": "no no"} for i in range(3) for w in WORDS],
            "ppo": [{"prompt": f"say {w} {i}"} for i in range(3) for w in WORDS]}
    rows |= {"dpo": rows["reward"]} | dict.fromkeys(("grpo", "gdpo", "rejection", "distill"), rows["ppo"])
    (folder / "pay.py").write_text("def odd(completions, **_):\n    return [float(len(c) % 2) for c in completions]\n"
                                   "def length(completions, **_):\n    return [float(len(c)) for c in completions]\n")
    for name, table in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in table))
    save_tiny(folder / "base")
    save_tiny(folder / "teacher", seed=5, hidden_size=48, initializer_range=0.2)


def prepare(folder: Path) -> None:
    """What one process and two leave of RUNS in `folder`; the two make all checks of rank_checks.py."""
    write_data(folder)
    argv = argv_of(folder, RUNS, "two", 4, "--engine.zero_stage", "3", "--engine.micro_batch_tokens", "60")
    argv["ppo"] += ["--roles.actor.tp", "2"]
    (folder / "argv.json").write_text(json.dumps(argv))
    running = launch("tests/distributed/rank_checks.py", f"{folder}/out.json", f"{folder}/argv.json")
    for argv in argv_of(folder, RUNS, "one", 8).values():
        assert main(argv) == 0
    done = ended(running)
    (folder / "log.txt").write_text(f"{done.returncode}\n{done.stdout}\n{done.stderr}")


def metrics(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(CLOCKED)}
            for line in (folder / name).read_text().splitlines()]
