"""What tries start from, made once: a tiny model, rows, a run that ended, one that was killed, one with rewards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

from harness import ROOT  # noqa: F401 - puts the checkout on the path

from fault_tries.attempt import expect
from fault_tries.product import command, finished, take, write_rows
from tests.crash.place import WORDS, difference
from tests.factories.tiny import chatml_tokenizer, save_tiny, tiny_scalar_model

PLAIN = ["--model.dtype", "float32", "--data.split", "null", "--data.cache_dir", "cache"]
TRAIN = ["--train.per_device_train_batch_size", "6", "--train.learning_rate", "1e-3", "--train.logging_steps", "2"]
# six steps, a checkpoint after 2, 4 and 6; paths are relative: every try stands in a folder of its own
SFT = ["--stage", "sft", *PLAIN, "--data.max_length", "48", *TRAIN, "--model.model_name_or_path", "base",
       "--data.sources", "sft.jsonl", "--data.eval_fraction", "0.2", "--train.eval_steps", "4", "--train.max_steps",
       "6", "--train.save_steps", "2", "--output_dir", "run"]
GRPO = ["--stage", "grpo", *PLAIN, "--data.max_prompt_length", "32", "--model.model_name_or_path", "base",
        "--data.sources", "paid.jsonl", "--data.eval_fraction", "0", "--train.per_device_train_batch_size", "2",
        "--ppo.sampling.max_new_tokens", "6", "--ppo.sampling.num_samples", "2", "--train.max_steps", "2",
        "--train.save_steps", "1", "--output_dir", "run"]
JUDGE = """
def judge(prompts, completions, completion_ids, answer, tags, **_):
    return [float((len(c[0]["content"]) + len(p[0]["content"]) + len(i) + len(a) + len(t)) % 7)
            for p, c, i, a, t in zip(prompts, completions, completion_ids, answer, tags, strict=True)]
"""
CALM = "def bad(completions, **_):\n    return [0.0] * len(completions)\n"
PAID = ["--reward.functions", "[pay.py:bad, pay.py:judge]"]


def before_step(act: Callable[[int], object]) -> None:
    """In a command's process: what happens before each step, by its number within the process."""
    from hybrid_rlhf.run import loop

    step, numbers = loop._step, count(1)

    def after_act(*given: object) -> object:
        act(next(numbers))
        return step(*given)

    loop._step = after_act


def dies_before_step(number: int) -> Callable[[], None]:
    """In a command's process: it ends at once, as SIGKILL would end it."""
    return lambda: before_step(lambda step: os._exit(9) if step == number else None)


def prepare(place: Path) -> None:
    """Fill the place. The first command compiles kernels where there are none."""
    os.chdir(place)
    write_rows("sft.jsonl", [{"prompt": f"say {w} {i}", "completion": w} for i in range(3) for w in WORDS])
    write_rows("paid.jsonl",
               [{"prompt": [{"role": "user", "content": f"say {w}"}], "answer": w, "tags": [w[0], "x"]} for w in WORDS])
    save_tiny("base", attention_dropout=0.1)
    judge = tiny_scalar_model()
    judge.config.pad_token_id = 0
    judge.save_pretrained("scorer")
    chatml_tokenizer().save_pretrained("scorer")
    finished(command(*SFT, seconds=200))
    shutil.move("run", "straight")
    killed = command(*SFT, prepare=dies_before_step(6))
    expect(killed.code == 9, f"exit code {killed.code} of a run that was killed")
    shutil.move("run", "broken")
    Path("pay.py").write_text(CALM + JUDGE)
    finished(command(*GRPO, *PAID))
    shutil.move("run", "paid")
    shutil.rmtree("cache")


def take_killed(place: Path) -> None:
    """The run that was killed, with all that it needs to go on."""
    take(place, "base", "sft.jsonl", "broken")
    Path("broken").rename("run")


def same_run(place: Path, straight: str = "straight", run: str = "run") -> None:
    """Broken where a finished run is not, bit for bit, the one that nothing happened to."""
    found = difference(Path(run), place / straight)
    expect(found is None, f"ended otherwise than the run that nothing happened to: {found}")
