"""Three stages on a real model in one evening: whether PPO makes it better by a measure that no stage has seen.

    python benchmarks/evening.py --data DIR [--seeds 0,1,2] [--stages ppo,rloo,dpo] [--work DIR] [--json FILE]
        [--page FILE]

SmolLM2-135M-Instruct writes film reviews. DIR holds rt_polarity (Pang and Lee 2005): SFT imitates its sentences, good
and bad; the reward model learns from pairs of a good and a bad sentence that begin alike; PPO (and RLOO) ask for a
sentence with such a beginning, DPO learns from the pairs. The judge is VADER (Hutto and Gilbert 2014, `pip install
vaderSentiment`), which reads answers to beginnings that no stage had. The commands are README's, with lengths and
numbers of steps. Beside the score: how many answers differ, the KL to the SFT model, and, with gpteacher in DIR, the
perplexity of ordinary answers. A stage that is there with the same words is not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE), str(ROOT / "examples" / "first_model")]

import smollm2
from harness import machine, table_of, write_json, write_tables

ASKED = 'Write one sentence of a film review. It begins with "{begin}".'
WORDS = range(6, 31)  # of a sentence
NUM_SFT, NUM_PAIRS, NUM_SAMPLES = 480, 560, 3
LENGTHS = ["--data.max_length", "96"]
SAMPLED = ["--ppo.sampling.max_new_tokens", "40"]
ONCE = ["--train.num_train_epochs", "1"]
STAGES = {  # README's commands, FOLDER for outputs
    "sft": ["--stage", "sft", "--model.model_name_or_path", "MODEL", "--data.sources", "DATA/reviews.jsonl",
            *LENGTHS, *ONCE],
    "reward": ["--stage", "reward", "--model.model_name_or_path", "FOLDER/sft", "--data.sources", "DATA/pairs.jsonl",
               *LENGTHS],
    "ppo": ["--stage", "ppo", "--data.sources", "DATA/beginnings.jsonl", "--roles.actor.model_name_or_path",
            "FOLDER/sft", "--roles.reward.model_name_or_path", "FOLDER/reward", *SAMPLED, "--train.max_steps", "20",
            "--train.per_device_train_batch_size", "32"],
    "rloo": ["--stage", "rloo", "--data.sources", "DATA/beginnings.jsonl", "--roles.actor.model_name_or_path",
             "FOLDER/sft", "--roles.reward.model_name_or_path", "FOLDER/reward", *SAMPLED, "--train.max_steps", "30"],
    "dpo": ["--stage", "dpo", "--model.model_name_or_path", "FOLDER/sft", "--data.sources", "DATA/pairs.jsonl",
            *LENGTHS],
}


def write_data(reviews: Path, folder: Path) -> None:
    """reviews.jsonl, pairs.jsonl, beginnings.jsonl, and held_out.jsonl of a fifth of the beginnings, in `folder`."""
    draw = random.Random(7)
    by_beginning: dict[str, dict[str, list[str]]] = defaultdict(lambda: {"pos": [], "neg": []})
    for kind in ("pos", "neg"):
        for line in (reviews / f"rt-polarity.{kind}").read_text(encoding="latin-1").splitlines():
            words = line.strip().rstrip(" .").split()
            if len(words) in WORDS and all(word[0].isalpha() for word in words[:2]):
                by_beginning[" ".join(words[:2])][kind].append(" ".join(words) + ".")
    shared = sorted(begin for begin, kinds in by_beginning.items() if kinds["pos"] and kinds["neg"])
    draw.shuffle(shared)
    held_out, begins = shared[: len(shared) // 5], shared[len(shared) // 5 :]
    texts, pairs = [], []
    for begin in begins:
        kinds = by_beginning[begin]
        pairs += [(begin, good, bad) for good, bad in zip(kinds["pos"], kinds["neg"], strict=False)]  # each text once
        texts += [(begin, text) for kind in kinds.values() for text in kind]
    draw.shuffle(texts)
    draw.shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in {
        "reviews": [{"prompt": _asked(b), "completion": text} for b, text in texts[:NUM_SFT]],
        "pairs": [{"prompt": _asked(b), "chosen": good, "rejected": bad} for b, good, bad in pairs[:NUM_PAIRS]],
        "beginnings": [{"prompt": _asked(b)} for b in begins], "held_out": [{"prompt": _asked(b)} for b in held_out],
    }.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _asked(begin: str) -> str:
    return ASKED.format(begin=begin)


def run_stage(name: str, seed: int, folder: Path, names: dict[str, str]) -> dict:
    """Run one stage into folder/name, unless it is there with these words; its processor minutes and wall minutes."""
    words = [*STAGES[name], "--seed", str(seed)]
    for key, value in names.items():
        words = [word.replace(key, value) for word in words]
    record = folder / name / "evening.json"
    if record.exists() and (found := json.loads(record.read_text()))["words"] == words:
        return found
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, str(ROOT / "train.py"), *words, "--output_dir", str(folder / name), "--resume",
                    "never"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = json.loads((folder / name / "run.json").read_text())
    found = {"words": words, "cpu_minutes": round((after.ru_utime - before.ru_utime + after.ru_stime
                                                   - before.ru_stime) / 60, 2),
             "minutes": round(run["seconds"] / 60, 2),
             "peak_gib": round(after.ru_maxrss / 2**20, 2)}  # of the largest child so far
    write_json(record, found)
    return found


def measured(model: Path, start: Path | None, data: Path, instructions: Path | None) -> dict:
    """VADER, distinct answers, lengths and the KL to `start` of answers to the held-out beginnings at temperature 1."""
    import torch
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    from hybrid_rlhf.data import collate, datasets
    from hybrid_rlhf.data.datasets import DataConfig
    from hybrid_rlhf.data.sources import Source
    from hybrid_rlhf.engine.decode.sampling import SamplingConfig
    from hybrid_rlhf.models.load import ModelConfig
    from hybrid_rlhf.training import builders, scored_answers
    from hybrid_rlhf.training.registry import READS

    config = ModelConfig(str(model), dtype="float32")
    source = DataConfig([Source(str(data / "held_out.jsonl"))], split=None, eval_fraction=0.0, max_prompt_length=96)
    tokenizer = builders.open_tokenizer(config, source, READS["ppo"], 0)
    rows = datasets.build(source, READS["ppo"], tokenizer, 0).train
    prompts = collate.collate_prompts([rows[i] for i in range(len(rows))]).repeat(NUM_SAMPLES)
    actor = scored_answers.open_actor(config, tokenizer)
    with torch.no_grad(), actor.inference():
        rollout = actor.generate(prompts, SamplingConfig(max_new_tokens=40, temperature=1.0), 0)
    judge = SentimentIntensityAnalyzer()
    scores = [judge.polarity_scores(text)["compound"] for text in rollout.completions]
    by_prompt = [statistics.mean(scores[i : i + NUM_SAMPLES]) for i in range(0, len(scores), NUM_SAMPLES)]
    half = 1.96 * statistics.stdev(by_prompt) / len(by_prompt) ** 0.5
    found = {"vader": round(statistics.mean(scores), 4), "half_interval": round(half, 4), "answers": len(scores),
             "distinct": len(set(rollout.completions)), "ended": round(float(rollout.has_eos.float().mean()), 4),
             "length": round(float(rollout.action_mask.sum(1).float().mean()), 2),
             "samples": rollout.completions[:: len(scores) // 6][:6]}
    if start is not None:
        found["kl"] = smollm2._nats(rollout, actor, start, tokenizer)
    if instructions is not None:
        found["perplexity"] = smollm2.perplexity(model, instructions)
    return found


def evening(seed: int, stages: list[str], options: argparse.Namespace) -> dict:
    """All stages of a seed, each measured."""
    folder, data = options.work / f"seed{seed}", options.work / "data"
    names = {"MODEL": str(options.model), "FOLDER": str(folder), "DATA": str(data)}
    lists = sorted((options.data / "gpteacher").glob("*.json"))
    row: dict = {"seed": seed, "machine": machine()}
    for name in ["sft", "reward", *stages]:
        row[name] = {k: v for k, v in run_stage(name, seed, folder, names).items() if k != "words"}
        if name == "reward":
            metrics = json.loads((folder / name / "run.json").read_text())["metrics"]
            row[name] |= {"accuracy": metrics.get("eval/accuracy")}
        else:
            row[name] |= measured(folder / name / "model", None if name == "sft" else folder / "sft" / "model", data,
                                  lists[0] if lists else None)
        print(json.dumps({name: row[name]}), flush=True)
    return row


def tables_of(found: dict) -> list[str]:
    """The machine, and a line for each model of each seed."""
    columns = ("seed", "model", "VADER (95%)", "distinct", "ended", "length", "KL", "perplexity", "CPU min", "min")
    lines = []
    for row in found["rows"]:
        lines.append([row["seed"], "reward model", f"accuracy {row['reward']['accuracy']}", *[""] * 5,
                      row["reward"]["cpu_minutes"], row["reward"]["minutes"]])
        lines += [[row["seed"], name, f"**{of['vader']:.3f}** ± {of['half_interval']:.3f}",
                   f"{of['distinct']} of {of['answers']}", of["ended"], of["length"], of.get("kl", ""),
                   of.get("perplexity", ""), of["cpu_minutes"], of["minutes"]]
                  for name, of in row.items() if isinstance(of, dict) and name != "reward"]
    return [table_of(["machine"], [[found["rows"][0]["machine"]]]), table_of(columns, lines)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--stages", default="ppo,rloo,dpo")
    parser.add_argument("--model", type=Path, help="a folder in place of the one that get_smollm2.py makes")
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "evening")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.model is None:
        from get_smollm2 import get

        options.model = get()
    options.work, options.model = options.work.resolve(), options.model.resolve()
    write_data(options.data / "rt_polarity", options.work / "data")
    found: dict = {"rows": []}
    for seed in options.seeds.split(","):
        found["rows"].append(evening(int(seed), options.stages.split(","), options))
        if options.json:
            write_json(options.json, found)
        if options.page:
            write_tables(options.page, *tables_of(found))


if __name__ == "__main__":
    main()
