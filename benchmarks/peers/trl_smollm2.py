"""GRPO on the sums of smollm2.py by TRL's own trainer, with the settings of our row: the row `grpo_trl`.

    python benchmarks/peers/trl_smollm2.py --model DIR --train FILE --output_dir DIR [--seed 0] [--steps 24]

Leaves what smollm2.py reads of a run: model/, metrics.jsonl in our names, run.json with the seconds of training.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

NAMES = {"reward": "reward", "kl": "kl", "entropy": "entropy", "loss": "loss", "step_time": "time/step",
         "completions/mean_length": "completions/mean_length"}


def is_right(completions: list, answer: list[str], **_columns: list) -> list[float]:
    """1 where the last number of the answer is the sum, as builtin:numeric_match."""
    found = [re.findall(r"-?\d+", c[0]["content"]) for c in completions]
    return [float(bool(f) and f[-1] == a) for f, a in zip(found, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--model", "--train", "--output_dir"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24)
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.train.read_text().splitlines()]
    config = GRPOConfig(
        output_dir=str(given.output_dir), seed=given.seed, max_steps=given.steps, learning_rate=1e-5,
        lr_scheduler_type="constant", warmup_steps=0, per_device_train_batch_size=64, num_generations=8,
        max_completion_length=12, temperature=1.0, beta=0.04, loss_type="grpo", num_iterations=1, use_cpu=True,
        bf16=False, gradient_checkpointing=False, save_strategy="no", report_to="none", logging_steps=1,
        disable_tqdm=True, dataloader_pin_memory=False)
    trainer = GRPOTrainer(model=AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32),
                          reward_funcs=is_right, args=config, train_dataset=Dataset.from_list(rows),
                          processing_class=AutoTokenizer.from_pretrained(given.model, padding_side="left"))
    start = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - start
    trainer.save_model(str(given.output_dir / "model"))
    logged = [{ours: row[theirs] for theirs, ours in NAMES.items() if theirs in row}
              for row in trainer.state.log_history if "reward" in row]
    (given.output_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    (given.output_dir / "seconds.json").write_text(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
