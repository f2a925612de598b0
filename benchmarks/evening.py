"""Three stages on a real model in one evening: whether PPO makes it better by a measure that no stage has seen.

    python benchmarks/evening.py --data DIR [--task reviews|manner] [--seeds 0,1,2] [--stages ppo,rloo,dpo] [--work DIR]
        [--json FILE] [--page FILE]

SmolLM2-135M-Instruct, README's commands with lengths and numbers of steps. DIR holds the task's data.

reviews: it writes film reviews. SFT imitates sentences of rt_polarity (Pang and Lee 2005), good and bad; the reward
model learns from pairs of a good and a bad sentence that begin alike; PPO (and RLOO) ask for a sentence with such a
beginning, DPO learns from the pairs. The judge is VADER (Hutto and Gilbert 2014, `pip install vaderSentiment`).

manner: it chats as people do in simple_dialogs. SFT imitates replies; the reward model learns from pairs of a reply and
the start's own answer; PPO (and RLOO) answer other lines, DPO learns from the pairs. The judge is a third model, the
start trained by plain torch on dialogues that no stage has seen: how much likelier it finds an answer than the start
does, in nats a token.

Both judges read answers to prompts that no stage had. Beside the score: how many answers differ, the KL to the SFT
model, and, with gpteacher in DIR, the perplexity of ordinary answers. A stage that is there with the same words is not
run again.
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
from harness import device, machine, table_of, write_json, write_tables

# film reviews
ASKED = 'Write one sentence of a film review. It begins with "{begin}".'
WORDS = range(6, 31)  # of a sentence
# an assistant's manner
NUM_HELD_OUT, NUM_THIRD, THIRD_RATE, THIRD_BATCH = 252, 1200, 1e-4, 8

NUM_SFT, NUM_PAIRS, NUM_SAMPLES = 480, 560, 3
LENGTHS = ["--data.max_length", "96"]
SAMPLED = ["--ppo.sampling.max_new_tokens", "40"]
ONCE = ["--train.num_train_epochs", "1"]
STAGES = {  # README's commands, FOLDER for outputs
    "sft": ["--stage", "sft", "--model.model_name_or_path", "MODEL", "--data.sources", "DATA/texts.jsonl",
            *LENGTHS, *ONCE],
    "reward": ["--stage", "reward", "--model.model_name_or_path", "FOLDER/sft", "--data.sources", "DATA/pairs.jsonl",
               *LENGTHS],
    "ppo": ["--stage", "ppo", "--data.sources", "DATA/prompts.jsonl", "--roles.actor.model_name_or_path",
            "FOLDER/sft", "--roles.reward.model_name_or_path", "FOLDER/reward", *SAMPLED, "--train.max_steps", "20",
            "--train.per_device_train_batch_size", "32"],
    "rloo": ["--stage", "rloo", "--data.sources", "DATA/prompts.jsonl", "--roles.actor.model_name_or_path",
             "FOLDER/sft", "--roles.reward.model_name_or_path", "FOLDER/reward", *SAMPLED, "--train.max_steps", "30"],
    "dpo": ["--stage", "dpo", "--model.model_name_or_path", "FOLDER/sft", "--data.sources", "DATA/pairs.jsonl",
            *LENGTHS],
}


def write_reviews(data: Path, folder: Path, start: Path) -> None:
    """texts, pairs, prompts, and held_out of a fifth of the beginnings, as JSON lines in `folder`."""
    reviews = data / "rt_polarity"
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
    _write(folder, texts=[{"prompt": _asked(b), "completion": text} for b, text in texts[:NUM_SFT]],
           pairs=[{"prompt": _asked(b), "chosen": good, "rejected": bad} for b, good, bad in pairs[:NUM_PAIRS]],
           prompts=[{"prompt": _asked(b)} for b in begins], held_out=[{"prompt": _asked(b)} for b in held_out])


def _asked(begin: str) -> str:
    return ASKED.format(begin=begin)


def _write(folder: Path, **files: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_dialogues(data: Path, folder: Path, start: Path) -> None:
    """texts, pairs, prompts, held_out, and third for the judge, as JSON lines in `folder`.

    A dialogue (each reply is the next line) is in one of them alone, cut at its end where that is full; a line that is
    asked twice is in the first. Pairs' rejected answers are those that `start` sampled.
    """
    if (folder / "third.jsonl").exists():
        return
    dialogues: list[list[tuple[str, str]]] = []
    for line in (data / "simple_dialogs" / "dialogs.txt").read_text(encoding="utf-8").splitlines():
        asked, _, reply = line.partition("\t")
        if not asked or not reply:  # one line of 3,725
            continue
        if not dialogues or dialogues[-1][-1][1] != asked:
            dialogues.append([])
        dialogues[-1].append((asked, reply))
    random.Random(7).shuffle(dialogues)
    seen: set[str] = set()
    unseen = [[row for row in dialogue if row[0] not in seen and not seen.add(row[0])] for dialogue in dialogues]
    sizes = {"held_out": NUM_HELD_OUT, "third": NUM_THIRD, "sft": NUM_SFT, "pairs": NUM_PAIRS}
    parts: dict[str, list[tuple[str, str]]] = {}
    for name, size in sizes.items():
        rows: list[tuple[str, str]] = []
        while len(rows) < size:
            rows += unseen.pop(0)
        parts[name] = rows[:size]
    rest = [row for dialogue in unseen for row in dialogue]
    answers = sampled([asked for asked, _ in parts["pairs"]], start, folder, num_samples=1)[0].completions
    _write(folder, texts=[{"prompt": a, "completion": r} for a, r in parts["sft"]],
           pairs=[{"prompt": a, "chosen": r, "rejected": answer}
                  for (a, r), answer in zip(parts["pairs"], answers, strict=True)],
           prompts=[{"prompt": a} for a, _ in parts["sft"] + parts["pairs"] + rest],
           held_out=[{"prompt": a, "reply": r} for a, r in parts["held_out"]],
           third=[{"prompt": a, "completion": r} for a, r in parts["third"]])


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


def sampled(asked: list[str], model: Path, folder: Path, num_samples: int) -> tuple:
    """Rollout of `num_samples` answers at temperature 1 to each prompt, the actor, its tokenizer."""
    import torch

    from hybrid_rlhf.data import collate, datasets
    from hybrid_rlhf.data.datasets import DataConfig
    from hybrid_rlhf.data.sources import Source
    from hybrid_rlhf.engine.decode.sampling import SamplingConfig
    from hybrid_rlhf.models.load import ModelConfig
    from hybrid_rlhf.training import builders, scored_answers
    from hybrid_rlhf.training.registry import READS

    _write(folder, asked=[{"prompt": text} for text in asked])
    config = ModelConfig(str(model), dtype="float32")
    source = DataConfig([Source(str(folder / "asked.jsonl"))], split=None, eval_fraction=0.0, max_prompt_length=96)
    tokenizer = builders.open_tokenizer(config, source, READS["ppo"], 0)
    rows = datasets.build(source, READS["ppo"], tokenizer, 0).train
    assert len(rows) == len(asked)
    prompts = collate.collate_prompts([rows[i] for i in range(len(rows))]).repeat(num_samples)
    actor = scored_answers.open_actor(config, tokenizer)
    with torch.no_grad(), actor.inference():
        return actor.generate(prompts, SamplingConfig(max_new_tokens=40, temperature=1.0), 0), actor, tokenizer


def vader(asked: list[str], answers: list[str], ended: list[bool], options: argparse.Namespace) -> list[float]:
    """VADER's compound score of each answer, -1 to 1."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    judge = SentimentIntensityAnalyzer()
    return [judge.polarity_scores(text)["compound"] for text in answers]


def manner(asked: list[str], answers: list[str], ended: list[bool], options: argparse.Namespace) -> list[float]:
    """Nats a token that the third model finds each answer likelier than the start does, by plain transformers."""
    third = options.work / "third"
    if not (third / "config.json").exists():
        _train_third(options.model, _read(options.work / "data" / "third.jsonl"), third)
    by_third, by_start = (_log_likelihoods(model, asked, answers, ended) for model in (third, options.model))
    return [(a - b) / count for (a, count), (b, _) in zip(by_third, by_start, strict=True)]


def _ids(tokenizer, asked: str, answer: str, is_ended: bool) -> tuple[list[int], int]:  # noqa: ANN001
    """Ids of the prompt and the answer in the model's template, and where the answer begins."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": asked}], add_generation_prompt=True,
                                           tokenize=False)
    begin = tokenizer(prompt).input_ids
    return begin + tokenizer(answer).input_ids + [tokenizer.eos_token_id] * is_ended, len(begin)


def _train_third(start: Path, rows: list[dict], folder: Path) -> None:
    """One epoch of plain torch over `rows`, the loss on replies alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(start)
    network = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).to(device())
    optimizer = torch.optim.AdamW(network.parameters(), THIRD_RATE, weight_decay=0.0)
    for i in range(0, len(rows), THIRD_BATCH):
        pairs = [_ids(tokenizer, row["prompt"], row["completion"], True) for row in rows[i : i + THIRD_BATCH]]
        width = max(len(ids) for ids, _ in pairs)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in pairs])
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in pairs])
        labels = torch.tensor([[-100] * begin + ids[begin:] + [-100] * (width - len(ids)) for ids, begin in pairs])
        ids, mask, labels = (t.to(network.device) for t in (ids, mask, labels))
        network(ids, attention_mask=mask, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _log_likelihoods(model: Path, asked: list[str], answers: list[str], ended: list[bool]) -> list[tuple[float, int]]:
    """Log-likelihood of each answer, its end included, and its number of tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device()).eval()
    results = []
    for row in zip(asked, answers, ended, strict=True):
        ids, begin = _ids(tokenizer, *row)
        with torch.no_grad():
            logits = network(torch.tensor([ids], device=network.device)).logits
            logprobs = logits[0, begin - 1 : -1].log_softmax(-1).cpu()
        results.append((float(logprobs.gather(1, torch.tensor(ids[begin:])[:, None]).sum()), max(1, len(ids) - begin)))
    return results


NAMES = {"vader": "VADER", "manner": "nats a token"}
TASKS = {"reviews": (write_reviews, vader), "manner": (write_dialogues, manner)}


def measured(model: Path, start: Path | None, options: argparse.Namespace, instructions: Path | None) -> dict:
    """The judge's score, distinct answers, lengths and the KL to `start` of answers to the held-out prompts."""
    judge = TASKS[options.task][1]
    asked = [row["prompt"] for row in _read(options.work / "data" / "held_out.jsonl")]
    rollout, actor, tokenizer = sampled(asked, model, options.work / "data", NUM_SAMPLES)
    asked = [text for text in asked for _ in range(NUM_SAMPLES)]
    scores = judge(asked, rollout.completions, rollout.has_eos.tolist(), options)
    found = _interval(judge.__name__, scores) | {
        "answers": len(scores), "distinct": len(set(rollout.completions)),
        "ended": round(float(rollout.has_eos.float().mean()), 4),
        "length": round(float(rollout.action_mask.sum(1).float().mean()), 2),
        "samples": rollout.completions[:: len(scores) // 6][:6]}
    if start is not None:
        found["kl"] = smollm2._nats(rollout, actor, start, tokenizer)
    if instructions is not None:
        found["perplexity"] = smollm2.perplexity(model, instructions)
    return found


def _interval(name: str, scores: list[float]) -> dict:
    """Mean, and half of the 95% interval over the prompts."""
    by_prompt = [statistics.mean(scores[i : i + NUM_SAMPLES]) for i in range(0, len(scores), NUM_SAMPLES)]
    half = 1.96 * statistics.stdev(by_prompt) / len(by_prompt) ** 0.5
    return {name: round(statistics.mean(scores), 4), "half_interval": round(half, 4)}


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
            row[name] |= measured(folder / name / "model", None if name == "sft" else folder / "sft" / "model", options,
                                  lists[0] if lists else None)
        print(json.dumps({name: row[name]}), flush=True)
    return row


def bounds_of_manner(options: argparse.Namespace) -> dict:
    """The judge's score of the held-out replies themselves, and of the start's answers."""
    rows = _read(options.work / "data" / "held_out.jsonl")
    asked, replies = ([row[key] for row in rows] for key in ("prompt", "reply"))
    start, _, _ = sampled(asked, options.model, options.work / "data", NUM_SAMPLES)
    thrice = [text for text in asked for _ in range(NUM_SAMPLES)]
    return {"references": round(statistics.mean(manner(asked, replies, [True] * len(rows), options)), 4),
            "start": round(statistics.mean(manner(thrice, start.completions, start.has_eos.tolist(), options)), 4)}


def tables_of(found: dict) -> list[str]:
    """The machine, and a line for each model of each seed."""
    judge = found.get("judge", "vader")
    columns = ("seed", "model", f"{NAMES[judge]} (95%)", "distinct", "ended", "length", "KL", "perplexity",
               "CPU min", "min")
    lines = []
    for row in found["rows"]:
        lines.append([row["seed"], "reward model", f"accuracy {row['reward']['accuracy']}", *[""] * 5,
                      row["reward"]["cpu_minutes"], row["reward"]["minutes"]])
        lines += [[row["seed"], name, f"**{of[judge]:.3f}** ± {of['half_interval']:.3f}",
                   f"{of['distinct']} of {of['answers']}", of["ended"], of["length"], of.get("kl", ""),
                   of.get("perplexity", ""), of["cpu_minutes"], of["minutes"]]
                  for name, of in row.items() if isinstance(of, dict) and name != "reward"]
    return [table_of(["machine"], [[found["rows"][0]["machine"]]]), table_of(columns, lines)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--task", choices=TASKS, default="reviews")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--stages", default="ppo,rloo,dpo")
    parser.add_argument("--model", type=Path, help="a folder in place of the one that get_smollm2.py makes")
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "evening",
                        help="a folder of its own in it for each task")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.model is None:
        from get_smollm2 import get

        options.model = get()
    options.work, options.model = options.work.resolve() / options.task, options.model.resolve()
    write, judge = TASKS[options.task]
    write(options.data, options.work / "data", options.model)
    found: dict = {"judge": judge.__name__, "rows": []}
    if options.task == "manner":
        found |= bounds_of_manner(options)
    for seed in options.seeds.split(","):
        found["rows"].append(evening(int(seed), options.stages.split(","), options))
        if options.json:
            write_json(options.json, found)
        if options.page:
            write_tables(options.page, *tables_of(found))


if __name__ == "__main__":
    main()
