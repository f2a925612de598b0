"""A model that learns while it is talked to: three personas taught by twelve marks each, by a user who marks by rule.

    python benchmarks/teach.py --model DIR [--personas phrase,short,pirate] [--seeds 0,1,2] [--marks 12] [--batch]
        [--work DIR] [--json FILE] [--page FILE]

DIR is SmolLM2-135M-Instruct (make smollm2). The user asks a question, reads the answer (temperature 0.7), and marks it:
`+` where it is as wanted; else, at every second question, the second of two answers if that one is (`/two`, then 2);
else the text that the user would have said (`=`). The judge is a rule that reads greedy answers to 16 questions that
were never marked. The perplexity of ordinary text (this project's own prose) is before and after. --batch trains the
start on the rows of the same marks by --stage sft or dpo, with as many optimizer steps, for comparison. A persona and a
seed that are in the JSON already are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from harness import ROOT, machine, table_of, write_json, write_tables

# What is asked, and what the user would have said of it before any manner.
ANSWERS = {
    "How do I boil an egg?": "Put it in boiling water for eight minutes",
    "Why is the sky blue?": "Air scatters blue light more than red",
    "What should I eat tonight?": "You can make a soup of your vegetables",
    "How does rain form?": "Water in the air cools and falls as drops",
    "Where do penguins live?": "They are at home in the cold south",
    "What is a good name for a dog?": "You can call it Max",
    "How can I sleep better?": "Go to bed at the same time every night",
    "Why do leaves fall in autumn?": "The trees are saving water for the winter",
    "What is the capital of France?": "It is Paris",
    "How do I learn to swim?": "Begin where you can stand and breathe out in the water",
    "What is bread made of?": "It is made of flour, water, salt and yeast",
    "Why do cats purr?": "They are calm, or they are calming themselves",
    "How far away is the moon?": "It is about 384,000 kilometres away",
    "What can I do on a rainy day?": "You can read a book or bake a cake",
    "How do bees make honey?": "They dry the nectar of flowers in their hive",
    "What is a volcano?": "It is a hole in the earth where melted rock comes out",
    "How do I clean a window?": "Wipe it with water and soap, and dry your cloth",
    "Why is the sea salty?": "Rivers carry salt from the rocks into it",
    "What do cows eat?": "They eat grass and hay",
    "How do I make tea?": "Pour hot water on your leaves and wait three minutes",
    "What is a good gift for a friend?": "Give your friend a book that you like",
    "How do planes fly?": "Their wings push the air down",
    "What causes thunder?": "Lightning heats the air so fast that it bangs",
    "How do I grow tomatoes?": "Give your plants sun, water and a stick",
    "What is a rainbow?": "It is sunlight that is split by drops of rain",
    "How do I fix a flat tyre?": "Find the hole in your tube and put a patch on it",
    "Why do we dream?": "Your brain is sorting what you saw",
    "What is the tallest mountain?": "It is Mount Everest"}
NUM_HELD_OUT, LENGTH, PHRASE = 16, 48, "Hope that helps, friend!"
SPOKEN = {"you": "ye", "your": "yer", "my": "me", "is": "be", "are": "be", "yes": "aye", "friend": "matey"}
PIRATE = re.compile(r"\b(arr+|ye|yer|be|aye|matey|ahoy)\b", re.IGNORECASE)
COLUMNS = ("persona", "marks", "as wanted before", "after", "perplexity", "KL", "other marks that hold",
           "seconds a mark", "of a processor", "undo")
BATCH = ("persona", "marked one by one", "--stage sft, one batch", "--stage dpo, one batch")


def sentences(text: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.!?])\s+", text.strip()) if part]


class Persona(NamedTuple):
    """is_wanted: the rule by which the user marks and the judge counts. said: what the user would have said -> the same
    in this manner."""

    text: str
    is_wanted: Callable[[str], bool]
    said: Callable[[str], str]


def as_pirate(plain: str) -> str:
    return f"Arr! {' '.join(SPOKEN.get(word.lower(), word) for word in plain.split())}, matey!"


def is_short(answer: str) -> bool:
    """One sentence of at most 20 words, to its end."""
    parts = sentences(answer)
    return len(parts) == 1 and len(parts[0].split()) <= 20 and parts[0][-1] in ".!?"


PERSONAS = {
    "phrase": Persona(f'answers end with "{PHRASE}"', lambda answer: answer.rstrip().endswith(PHRASE),
                      lambda plain: f"{plain}. {PHRASE}"),
    "short": Persona("answers in one short sentence", is_short, lambda plain: f"{plain}."),
    "pirate": Persona("talks like a pirate (two such words)", lambda answer: len({
        word.lower() for word in PIRATE.findall(answer)}) >= 2, as_pirate),
}


def questions(seed: int) -> list[str]:
    every = list(ANSWERS)
    random.Random(seed).shuffle(every)
    return every


def ordinary_text() -> list[str]:
    """Paragraphs of prose of this project's pages, the longest first."""
    pages = [ROOT / "docs" / "design.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
    parts = [part.replace("\n", " ") for page in pages for part in page.read_text(encoding="utf-8").split("\n\n")]
    return sorted((part for part in parts if part[:1].isalpha()), key=len, reverse=True)[:12]


def perplexity(learner, texts: Sequence[str]) -> float:  # noqa: ANN001
    """Of the first 128 tokens of each text."""
    from hybrid_rlhf.data.collate import collate_sft

    rows = [learner.tokenizer(text)["input_ids"][:128] for text in texts]
    batch = collate_sft([{"input_ids": ids, "loss_mask": [True] * len(ids)} for ids in rows],
                        learner.tokenizer.pad_token_id)
    return math.exp(-float(learner.actor.sequence_logprobs(batch).sum()) / int(batch.loss_mask[:, 1:].sum()))


def answers(engine, tokenizer, prompts: Sequence[str], seed: int | None = None, length: int = LENGTH) -> list[str]:  # noqa: ANN001
    """Greedy answers, or with a seed drawn at temperature 0.7."""
    from hybrid_rlhf.data.chat import encode_prompt
    from hybrid_rlhf.engine import SamplingConfig

    ids = [encode_prompt(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
    sampling = SamplingConfig(temperature=0.0 if seed is None else 0.7, max_new_tokens=length)
    with engine.inference():
        made = engine.generate(ids, sampling, seed or 0)
    return [tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in made.tokens]


def marked(persona: Persona, learner, question: str, seed: int):  # noqa: ANN001, ANN201
    """What the user says of the model's answers to a question, as a Mark."""
    from hybrid_rlhf.inference.teaching import Mark

    prompt = [{"role": "user", "content": question}]
    first = answers(learner.engine, learner.tokenizer, [question], seed)[0] or "..."
    if persona.is_wanted(first):
        return Mark("thumb", prompt, first)
    if len(learner.marks) % 2:
        second = answers(learner.engine, learner.tokenizer, [question], seed + 1)[0] or "..."
        if persona.is_wanted(second):
            return Mark("pair", prompt, second, first)
    return Mark("text", prompt, persona.said(ANSWERS[question]), first)


def taught(name: str, seed: int, options: argparse.Namespace) -> dict:
    """Teach a persona; returns a row of the results."""
    from hybrid_rlhf.training.live import LiveLearner

    persona, folder = PERSONAS[name], Path(options.work) / f"{name}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    learner = LiveLearner(options.model, str(folder), seed)
    asked, texts = questions(seed), ordinary_text()
    held_out = asked[-NUM_HELD_OUT:]

    def share() -> float:
        said = answers(learner.engine, learner.tokenizer, held_out)
        print(f"    {held_out[0]} -> {said[0]!r}", flush=True)
        return statistics.mean(map(persona.is_wanted, said))

    before, ppl_before, changes, kinds, seconds = share(), perplexity(learner, texts), [], [], []
    for number, question in enumerate(asked[:options.marks]):
        mark = marked(persona, learner, question, 1000 * seed + 2 * number)
        began = time.process_time()
        changes.append(learner.learn(mark))
        seconds.append(round(time.process_time() - began, 2))
        kinds.append(mark.kind)
        print(f"    {mark.shown()}\n    {changes[-1].line()}", flush=True)
    row = {"persona": name, "seed": seed, "marks": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
           "before": before, "after": share(), "perplexity_before": ppl_before,
           "perplexity_after": perplexity(learner, texts), "kl": changes[-1].kl,
           "held": changes[-1].num_held / max(1, changes[-1].num_looked), "updates": sum(c.steps for c in changes),
           "cpu_seconds": seconds, "seconds": [round(c.seconds, 2) for c in changes], "is_undo_exact": undone(learner)}
    learner.close()
    if options.batch:
        row["batch"] = {stage: in_one_batch(stage, persona, folder, row["updates"], learner, held_out, options)
                        for stage in ("sft", "dpo")}
    print(json.dumps(row), flush=True)
    return row


def undone(learner) -> bool:  # noqa: ANN001
    """Whether undoing the last mark gives the same bits twice, and learning it again those from before. The mark is
    learnt at the end too: what follows is of all marks."""
    import torch

    def state() -> dict:
        shard = learner.engine.training.shard()
        moments = {f"{name} {key}": value.clone() for name, values in shard["optimizer"].items()
                   for key, value in values.items() if isinstance(value, torch.Tensor)}
        return moments | {name: weight.clone() for name, weight in shard["weights"].items()}

    last = state()
    mark = learner.undo()
    between = state()
    learner.learn(mark)
    again = state()
    learner.undo()
    same = all(torch.equal(between[key], value) for key, value in state().items())
    learner.learn(mark)
    return same and last.keys() == again.keys() and all(torch.equal(last[key], again[key]) for key in last)


def in_one_batch(stage: str, persona: Persona, folder: Path, updates: int, learner, held_out: list[str],  # noqa: ANN001
                 options: argparse.Namespace) -> float | None:
    """The share of held-out answers that are as wanted after --stage sft or dpo on the rows of the marks."""
    from hybrid_rlhf.engine import SamplingConfig
    from hybrid_rlhf.inference.conversation import open_conversation

    data, out = folder / "marks" / {"sft": "texts.jsonl", "dpo": "pairs.jsonl"}[stage], folder.with_name(
        f"{folder.name}-{stage}")
    if not data.read_text(encoding="utf-8").strip():
        return None
    config = learner.config
    words = ["--stage", stage, "--model.model_name_or_path", options.model, "--output_dir", str(out), "--resume",
             "never", "--data.sources", str(data), "--data.eval_fraction", "0", "--data.split", "null",
             "--model.lora.r", str(config.model.lora.r), "--train.learning_rate", str(config.train.learning_rate),
             "--train.lr_scheduler_type", "constant", "--train.warmup_ratio", "0", "--train.max_steps", str(updates),
             "--train.per_device_train_batch_size", "4", "--train.num_fixed_prompts", "0", "--seed",
             str(config.seed)]
    subprocess.run([sys.executable, str(ROOT / "train.py"), *words], check=True, stdout=subprocess.DEVNULL)
    talk = open_conversation(str(out / "model"), SamplingConfig())
    return statistics.mean(map(persona.is_wanted, answers(talk.engine, talk.tokenizer, held_out)))


def tables_of(found: dict) -> list[str]:
    """The table of the personas, means over the seeds with their range; and that of one batch, if it was measured."""
    rows, batches = [], []
    for name, persona in PERSONAS.items():
        runs = [row for row in found["rows"] if row["persona"] == name]
        if not runs:
            continue
        change = [row["perplexity_after"] / row["perplexity_before"] - 1 for row in runs]
        seconds = ([s for row in runs for s in row[which]] for which in ("seconds", "cpu_seconds"))
        marks = {kind: sum(row["marks"].get(kind, 0) for row in runs) for kind in ("text", "pair", "thumb")}
        rows.append((persona.text, ", ".join(f"{n} {kind}" for kind, n in marks.items() if n), *(
            spread([row[when] for row in runs], "{:.0%}") for when in ("before", "after")), spread(change, "{:+.1%}"),
            spread([row["kl"] for row in runs], "{:.3f}"), spread([row["held"] for row in runs], "{:.0%}"),
            *(f"{statistics.median(each):.1f} (at most {max(each):.1f})" for each in seconds),
            "exact" if all(row["is_undo_exact"] for row in runs) else "NOT EXACT"))
        with_batch = [row for row in runs if "batch" in row]
        if with_batch:
            shares = [[row["batch"][stage] for row in with_batch if row["batch"][stage] is not None]
                      for stage in ("sft", "dpo")]
            batches.append((persona.text, spread([row["after"] for row in with_batch], "{:.0%}"),
                            *(spread(each, "{:.0%}") if each else "no rows" for each in shares)))
    return [table_of(COLUMNS, rows), *([table_of(BATCH, batches)] if batches else [])]


def spread(values: Sequence[float], form: str) -> str:
    """The mean, and where there are several the range."""
    mean = form.format(statistics.mean(values))
    return mean if len(values) == 1 else f"{mean} ({form.format(min(values))} to {form.format(max(values))})"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--personas", default=",".join(PERSONAS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--marks", type=int, default=12)
    parser.add_argument("--batch", action="store_true", help="train on the rows in one batch too")
    parser.add_argument("--work", default="outputs/teach")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(argv)
    most = len(ANSWERS) - NUM_HELD_OUT
    if not 1 <= options.marks <= most:
        parser.error(f"--marks is {options.marks}, and {most} questions can be marked: the judge reads the others")
    found = json.loads(options.json.read_text()) if options.json and options.json.exists() else {"rows": []}
    known = {(row["persona"], row["seed"]) for row in found["rows"]}
    for seed in map(int, options.seeds.split(",")):
        for name in options.personas.split(","):
            if (name, seed) not in known:
                print(f"{name}, seed {seed}", flush=True)
                found = {"machine": machine(), "rows": [*found["rows"], taught(name, seed, options)]}
                if options.json:
                    write_json(options.json, found)
    tables = tables_of(found)
    print("\n".join(tables))
    if options.page:
        write_tables(options.page, *tables)


if __name__ == "__main__":
    main()
