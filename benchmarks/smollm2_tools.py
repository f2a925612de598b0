"""SmolLM2-135M-Instruct and a calculator: SFT on the format of calls, what --check_signal says, then GRPO.

    python benchmarks/smollm2_tools.py [--seeds 0,1] [--sft_steps 10] [--steps 16] [--dtype bfloat16] [--work DIR]

The task: arithmetic with numbers of two and three digits, in direct words or as a story; right if the last number of
the last message is. SmolLM2's own template shows no tools: smollm2_tools.jinja does, and is its own without them.
SFT sees few conversations: it calls the calculator for large numbers, and answers sums of digits itself. Half of the
questions of GRPO and of the test are in words that SFT never saw; test questions have numbers that nothing was trained
on. Each model is asked the same test greedily, with the tool and without, and sampled with it. What is done is not done
again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

from harness import machine
from smollm2 import _fetched, history, launch
from smollm2_settings import COMMON

NUM_TALKS, NUM_TRAIN, NUM_TEST = 320, 800, 200
DIRECT = ("What is {}?", "Calculate {}.", "How much is {}?", "Work out {}.", "Please tell me {}.", "{} = ?")
WORDS = {"*": ("{a} * {b}", "{a} x {b}", "{a} times {b}"), "+": ("{a} + {b}", "{a} plus {b}"),
         "-": ("{a} - {b}", "{a} minus {b}")}
TAUGHT = {"*": ("A box holds {a} pens. How many pens are in {b} boxes?",
                "{b} children have {a} marbles each. How many?"),
          "+": ("Tom has {a} stamps and gets {b} more. How many has he now?", "What is the sum of {a} and {b}?"),
          "-": ("There were {a} birds and {b} flew away. How many are left?", "Take {b} away from {a}.")}
NEW = {"*": ("One ticket costs {a} dollars. What do {b} tickets cost?",
             "A train goes {a} km each hour. How far does it go in {b} hours?",
             "A hall has {b} rows of {a} seats. How many seats are there?"),
       "+": ("A farm has {a} cows and {b} sheep. How many animals are there?",
             "Mia read {a} pages in May and {b} in June. How many pages in all?"),
       "-": ("A book has {a} pages. Ann has read {b} of them. How many pages are left?",
             "Ben has {a} euros and spends {b}. What does he have left?", "How much more is {a} than {b}?")}
ASKED_OF = ["--environment.tools=[builtin:calculator]", "--environment.max_turns=3",
            "--environment.max_new_tokens_per_turn=48", "--ppo.sampling.max_new_tokens=160",
            "--reward.functions=builtin:numeric_match"]


# -- the task ----------------------------------------------------------------------------------------------------------


def drawn(rng: random.Random, sign: str) -> tuple[int, int]:
    """Two numbers; of a difference the larger one first."""
    if sign == "*":
        return rng.randint(12, 999), rng.randint(12, 99)
    low, high = sorted((rng.randint(100, 999), rng.randint(100, 999)))
    return high, low


def question(rng: random.Random, stories: tuple[dict, ...]) -> tuple[str, str]:
    """A question in direct words or, as often for each, one of `stories`; and the expression that it asks for."""
    sign, made = rng.choice("**+-"), rng.choice((None, *stories))  # products twice as often
    a, b = drawn(rng, sign)
    words = (rng.choice(DIRECT).format(rng.choice(WORDS[sign])) if made is None else rng.choice(made[sign]))
    return words.format(a=a, b=b), f"{a} {sign} {b}"


def value(expression: str) -> int:
    a, sign, b = expression.split()
    return {"*": int(a) * int(b), "+": int(a) + int(b), "-": int(a) - int(b)}[sign]


def talk(rng: random.Random) -> list[dict]:
    """A conversation: three of four have large numbers and call the calculator."""
    if rng.random() < 0.25:
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        asked = rng.choice(DIRECT).format(rng.choice(WORDS["+"])).format(a=a, b=b)
        return [{"role": "user", "content": asked}, _answer(a + b)]
    asked, expression = question(rng, (TAUGHT,))
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "calculator", "content": str(value(expression))}, _answer(value(expression))]


def _answer(number: int) -> dict:
    return {"role": "assistant", "content": f"The answer is {number}."}


def write_task(folder: Path, schemas: list[dict]) -> None:
    """talks.jsonl for SFT; train.jsonl and test.jsonl, which share no expression."""
    rng = random.Random(7)
    talks = [{"messages": talk(rng), "tools": schemas} for _ in range(NUM_TALKS)]
    asked: dict[str, str] = {}
    while len(asked) < NUM_TRAIN + NUM_TEST:
        words, expression = question(rng, (TAUGHT, NEW, NEW))
        if not any(expression in json.dumps(each) for each in talks):
            asked.setdefault(expression, words)
    rows = [{"prompt": [{"role": "user", "content": words}], "answer": str(value(expression))}
            for expression, words in asked.items()]
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in (("talks", talks), ("train", rows[:NUM_TRAIN]), ("test", rows[NUM_TRAIN:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")


# -- training ----------------------------------------------------------------------------------------------------------


def sft_words(given: argparse.Namespace) -> list[str]:
    return ["--stage=sft", f"--model.model_name_or_path={given.model}", *COMMON, f"--model.dtype={given.dtype}",
            f"--data.chat_template={HERE / 'smollm2_tools.jinja'}", "--data.max_length=320",
            f"--data.sources=[{{path: {given.work / 'task' / 'talks.jsonl'}}}]",
            "--train.per_device_train_batch_size=8", f"--train.max_steps={given.sft_steps}"]


def grpo_words(start: Path, given: argparse.Namespace) -> list[str]:
    return ["--stage=grpo", f"--model.model_name_or_path={start}", *COMMON, f"--model.dtype={given.dtype}",
            f"--data.sources=[{{path: {given.work / 'task' / 'train.jsonl'}}}]", *ASKED_OF,
            "--ppo.sampling.num_samples=8", "--train.per_device_train_batch_size=4",
            "--train.lr_scheduler_type=constant", f"--train.max_steps={given.steps}"]


def signal(words: list[str]) -> str:
    """What --check_signal prints."""
    command = [sys.executable, str(ROOT / "train.py"), "--resume=never", *words, "--check_signal"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    if done.returncode:
        raise SystemExit(f"--check_signal: status {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


# -- measuring ---------------------------------------------------------------------------------------------------------


def measured(model: Path, with_tool: bool, given: argparse.Namespace, temperature: float = 0.0) -> dict:
    """The model's answers to the test, greedy or sampled."""
    import torch

    from hybrid_rlhf.data import collate, datasets
    from hybrid_rlhf.data.datasets import DataConfig
    from hybrid_rlhf.data.sources import Source
    from hybrid_rlhf.engine.decode.sampling import SamplingConfig
    from hybrid_rlhf.environments.open import open_environments
    from hybrid_rlhf.environments.settings import EnvironmentConfig
    from hybrid_rlhf.models.load import ModelConfig
    from hybrid_rlhf.rollout.episodes import EpisodePlayer
    from hybrid_rlhf.training import builders, scored_answers
    from hybrid_rlhf.training.registry import READS

    config = ModelConfig(str(model), dtype=given.dtype)
    data = DataConfig([Source(str(given.work / "task" / "test.jsonl"))], split=None, eval_fraction=0.0,
                      chat_template=str(HERE / "smollm2_tools.jinja"))
    tokenizer = builders.open_tokenizer(config, data, READS["ppo"], 0)
    rows = datasets.build(data, READS["ppo"], tokenizer, 0).train
    actor = scored_answers.open_actor(config, tokenizer)
    if with_tool:
        own = EnvironmentConfig(tools="builtin:calculator", max_turns=3, max_new_tokens_per_turn=48)
        actor.episodes = EpisodePlayer(open_environments(None, own.tool_list, {}), own, tokenizer)
    sampling = SamplingConfig(max_new_tokens=160 if with_tool else 64, temperature=temperature)
    with torch.no_grad(), actor.inference():
        rollout = actor.generate(collate.collate_prompts([rows[i] for i in range(len(rows))]), sampling, 0)
    return _counted(rollout)


def _counted(rollout) -> dict:  # noqa: ANN001
    """How many are right, of all and in words that SFT never saw; how many ended, called, and called what was asked."""
    from hybrid_rlhf.rewards.builtin import NumericMatch

    prompts, answers = rollout.prompts.columns["prompt"], rollout.prompts.columns["answer"]
    right = NumericMatch()(rollout.completions, answer=answers)
    is_new = [_is_new(prompt[-1]["content"]) for prompt in prompts]
    found = {"items": len(right), "right": int(sum(right)), "new_items": sum(is_new),
             "new_right": int(sum(r for r, new in zip(right, is_new, strict=True) if new)),
             "ended": round(float(rollout.has_eos.float().mean()), 3)}
    if rollout.episodes:
        found["called"] = sum(bool(e.num_calls) for e in rollout.episodes)
        found["malformed"] = sum(e.num_malformed for e in rollout.episodes)
        found["told_right"] = sum(any(m["role"] == "tool" and m["content"] == answer for m in e.messages)
                                  for e, answer in zip(rollout.episodes, answers, strict=True))
    wrong = [rollout.prompts.texts[i][-80:] + rollout.shown(i) for i, r in enumerate(right) if not r]
    return found | {"examples": [rollout.shown(0), *wrong[:4]]}


def _is_new(words: str) -> bool:
    return any(words.startswith(story.split("{")[0]) for stories in NEW.values() for story in stories)


# -- the run -----------------------------------------------------------------------------------------------------------


def once(found: dict, name: str, make: Callable[[], object], path: Path) -> None:
    """Put what `make` gives under `name`, and write all; nothing where it is there."""
    if name in found:
        return
    found[name] = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(name, found[name] if isinstance(found[name], str) else json.dumps(found[name]), flush=True)


def trained(words: list[str], folder: Path) -> dict:
    cost = launch(ROOT / "train.py", ["--resume=never", *words], folder)
    return {"settings": words, **cost, "history": history(folder), "machine": machine()}


def run(seed: int, given: argparse.Namespace, found: dict) -> None:
    folder = given.work / f"seed{seed}"
    sft, seeded = folder / "sft", f"--seed={seed}"

    def keep(name: str, make: Callable[[], object]) -> None:
        once(found, f"{name} (seed {seed})", make, given.json)

    keep("sft", lambda: trained([seeded, *sft_words(given)], sft))
    keep("signal", lambda: signal([seeded, *grpo_words(sft, given), f"--output_dir={folder / 'signal'}"]))
    keep("grpo", lambda: trained([seeded, *grpo_words(sft, given)], folder / "grpo"))
    for name in ("grpo", "sft"):
        keep(f"after {name}, tool True, sampled", lambda name=name: measured(folder / name / "model", True, given, 1.0))
    for with_tool, name in product((True, False), ("grpo", "sft")):
        keep(f"after {name}, tool {with_tool}",
             lambda name=name, tool=with_tool: measured(folder / name / "model", tool, given))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--steps", type=int, default=16, help="of GRPO, 4 prompts with 8 responses each")
    parser.add_argument("--sft_steps", type=int, default=10, help="of 8 conversations")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", type=Path, help="a folder in place of the one that get_smollm2.py makes")
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "smollm2_tools")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "results" / "smollm2_tools.json")
    given = parser.parse_args()
    given.model, given.work = (given.model or _fetched()).resolve(), given.work.resolve()
    from hybrid_rlhf.environments.open import open_environments

    write_task(given.work / "task", open_environments(None, ["builtin:calculator"], {}).kinds[0].schemas)
    found = json.loads(given.json.read_text()) if given.json.exists() else {}
    for with_tool in (True, False):
        once(found, f"start, tool {with_tool}", lambda tool=with_tool: measured(given.model, tool, given), given.json)
    for seed in map(int, given.seeds.split(",")):
        run(seed, given, found)


if __name__ == "__main__":
    main()
