"""SmolLM2-135M-Instruct on sums: what each method makes of a model people know, and what is lost on the way.

    python benchmarks/smollm2.py [--rows grpo,ppo] [--seeds 0,1,2] [--instructions FILE] [--work DIR] [--model DIR]

Every row is one `train.py --stage NAME` in a process of its own, with the settings in smollm2_settings.py. A row is
written as soon as its run is measured, and one that is there with the same settings is not run again, so the command
can be stopped and given again. The task: sums of terms 1 to 20; the answer's last number is to be right. Training and
test share no pair of terms in either order. --instructions names rows of ordinary instructions (any format that
training reads); the perplexity of their answers, before and after, is what was lost.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE), str(ROOT / "examples" / "first_model")]

from harness import device, machine, write_json
from smollm2_settings import EXPERIMENTS
from smollm2_tasks import NUM_TOKENS, TASKS

if TYPE_CHECKING:
    from hybrid_rlhf.roles import Actor
    from hybrid_rlhf.rollout import Rollout

NUM_TEXTS, TEXT_LENGTH = 64, 256  # of the instructions whose perplexity is measured
NUM_NATS = 100  # sampled answers that the KL is a mean of


def launch(words: list[str], folder: Path) -> dict:
    """Run train.py into `folder`: its seconds by its own record, and the most memory that it ever held."""
    command = [sys.executable, str(ROOT / "train.py"), *words, "--output_dir", str(folder)]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (told := folder.with_suffix(".log")).open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{shlex.join(command)}\nstatus {status}\n{told.read_text()[-3000:]}")
    return {"seconds": round(json.loads((folder / "run.json").read_text())["seconds"], 1),
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1), "peak_gib": round(usage.ru_maxrss / 2**20, 2)}


def history(folder: Path) -> dict:
    """What the run's own metrics say at its beginning and at its end."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "time/step" in row]
    named = {"reward": "reward", "entropy": "entropy", "kl": "kl", "length": "completions/mean_length",
             "loss": "loss", "tokens_per_second": "engine/tokens_per_second"}
    return {"steps": len(steps)} | {name: [round(steps[0][key], 4), round(steps[-1][key], 4)]
                                    for name, key in named.items() if key in steps[0] and key in steps[-1]}


def measured(model: Path, start: Path | None, task: Path, instructions: Path | None) -> dict:
    """A model on the task's test, greedy and sampled, its KL to the start, and the perplexity of ordinary answers."""
    import torch

    from hybrid_rlhf.data import collate, datasets
    from hybrid_rlhf.data.datasets import DataConfig
    from hybrid_rlhf.data.sources import Source
    from hybrid_rlhf.engine.decode.sampling import SamplingConfig
    from hybrid_rlhf.models.load import ModelConfig
    from hybrid_rlhf.rewards.builtin import NumericMatch
    from hybrid_rlhf.training import builders, scored_answers
    from hybrid_rlhf.training.registry import READS

    config = ModelConfig(str(model), dtype="float32")
    data = DataConfig([Source(str(task / "test.jsonl"))], split=None, eval_fraction=0.0, max_prompt_length=96)
    tokenizer = builders.open_tokenizer(config, data, READS["ppo"], 0)
    rows = datasets.build(data, READS["ppo"], tokenizer, 0).train
    prompts = collate.collate_prompts([rows[i] for i in range(len(rows))])
    actor = scored_answers.open_actor(config, tokenizer)
    found: dict = {"items": len(rows)}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        with torch.no_grad(), actor.inference():
            sampling = SamplingConfig(max_new_tokens=NUM_TOKENS[task.name], temperature=temperature)
            rollout = actor.generate(prompts, sampling, 0)
        right = NumericMatch()(rollout.completions, answer=prompts.columns["answer"])
        found[name] = {"right": int(sum(right)), "ended": round(float(rollout.has_eos.float().mean()), 4),
                       "empty": sum(not text.strip() for text in rollout.completions),
                       "length": round(float(rollout.action_mask.sum(1).float().mean()), 2)}
    if start is not None and model != start:
        found["kl"] = _nats(rollout.rows(torch.arange(NUM_NATS)), actor, start, tokenizer)
    found["examples"] = rollout.completions[:3]
    return found | ({"perplexity": perplexity(model, instructions)} if instructions else {})


def _nats(rollout: Rollout, actor: Actor, start: Path, tokenizer) -> float:  # noqa: ANN001
    """Mean over the sampled answers of their log-probability over the start's."""
    from hybrid_rlhf.models.load import ModelConfig
    from hybrid_rlhf.roles import Reference
    from hybrid_rlhf.training import scored_answers

    reference = Reference(scored_answers.open_actor(ModelConfig(str(start), dtype="float32"), tokenizer).engine)
    rollout.logprobs, rollout.ref_logprobs = actor.logprobs(rollout), reference.logprobs(rollout)
    return round(sum(scored_answers.nats_from(rollout)) / len(rollout), 4)


def perplexity(model: Path, instructions: Path) -> float:
    """exp of the mean negative log-likelihood of answers' tokens, by plain transformers: no code of ours is in it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device()).eval()
    total, count = 0.0, 0
    for row in random.Random(0).sample(json.loads(instructions.read_text(encoding="utf-8")), NUM_TEXTS):
        asked = [{"role": "user", "content": "\n\n".join(p for p in (row["instruction"], row["input"]) if p)}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        begin = len(tokenizer(prompt).input_ids)
        ids = torch.tensor([tokenizer(prompt + row["response"]).input_ids[:TEXT_LENGTH]])
        if ids.shape[1] <= begin:
            continue
        with torch.no_grad():
            logprobs = network(ids.to(network.device)).logits[0, begin - 1:-1].log_softmax(-1).cpu()
        total -= float(logprobs.gather(1, ids[0, begin:, None]).sum())
        count += ids.shape[1] - begin
    return round(math.exp(total / count), 4)


def run(name: str, seed: int, given: argparse.Namespace) -> dict:
    """Train one row and measure it."""
    experiment, folder = EXPERIMENTS[name], given.work / f"seed{seed}"
    TASKS[experiment.task](given.work / experiment.task)
    words = filled(experiment.words, folder, given)
    words = ["--seed", str(seed), *words]
    cost = launch(["--stage", experiment.stage, "--resume", "never", *words], folder / name)
    row = {"row": name, "seed": seed, "settings": experiment.words, **cost, "machine": machine(),
           "history": history(folder / name)}
    if experiment.task != "sums":  # whose start is one for all
        row["before"] = measured(given.model, given.model, given.work / experiment.task, None)
    if experiment.stage != "reward":
        is_chat = not any("BASE" in word for word in experiment.words)  # else its prompts are not those of the start
        origin = folder / "sft" / "model" if any("BESIDE/sft" in word for word in experiment.words) else given.model
        row["after"] = measured(folder / name / "model", origin if is_chat else None, given.work / experiment.task,
                                given.instructions if is_chat else None)
    return row


def filled(words: list[str], folder: Path, given: argparse.Namespace) -> list[str]:
    for name, path in (("BESIDE", folder), ("START", given.model), ("BASE", f"{given.model}-base"),
                       ("SUMS", given.work / "sums"), ("GYM", given.work)):
        words = [word.replace(name, str(path)) for word in words]
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(EXPERIMENTS))
    parser.add_argument("--seeds", help="comma-separated; without it, those that each row asks for")
    parser.add_argument("--instructions", type=Path, help="json list of instruction, input, response")
    parser.add_argument("--model", type=Path, help="a folder in place of the one that get_smollm2.py makes")
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "smollm2")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "results" / "smollm2.json")
    given = parser.parse_args()
    given.model, given.work = (given.model or _fetched()).resolve(), given.work.resolve()
    TASKS["sums"](given.work / "sums")
    found = json.loads(given.json.read_text()) if given.json.exists() else {"rows": []}
    found.setdefault("machine", machine())
    for name in given.rows.split(","):
        for seed in [int(s) for s in given.seeds.split(",")] if given.seeds else EXPERIMENTS[name].seeds:
            same = [r for r in found["rows"] if (r["row"], r["seed"]) == (name, seed)]
            if same and sorted(same[0]["settings"]) == sorted(EXPERIMENTS[name].words):
                continue
            row = run(name, seed, given)
            found["rows"] = sorted([r for r in found["rows"] if r not in same] + [row], key=_place)
            save(given.json, found)
            print(json.dumps({k: v for k, v in row.items() if k != "settings"}), flush=True)
    if "start" not in found:
        found["start"] = measured(given.model, given.model, given.work / "sums", given.instructions)
        save(given.json, found)


def _place(row: dict) -> tuple[int, int]:
    return [*EXPERIMENTS].index(row["row"]), row["seed"]


def _fetched() -> Path:
    from get_smollm2 import get

    return get()


def save(path: Path, found: dict) -> None:
    """Write the rows and the page that is made of them; a stop in between loses neither."""
    from smollm2_page import page

    write_json(path, found)
    path.with_suffix(".md").write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
