"""Write the rows of the example: conversations that teach the format, and questions to learn from.

    python examples/tools/make_data.py [--folder outputs/tools] [--seed 0]

Few of the conversations are to be imitated: MIX says how many of a hundred call the calculator as one should. The rest
guess, garble the sum, or write a call that nobody can read. So a model trained on them knows the format and rarely uses
it well, which is what GRPO is to mend.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from transformers.utils import get_json_schema

sys.path.insert(0, str(Path(__file__).parent))
from calculator import calculator

MIX = {"called": 14, "guessed": 30, "garbled": 46, "unreadable": 10}
NUM_CONVERSATIONS, NUM_QUESTIONS, NUM_HELD_OUT = 16000, 4000, 500
ASKING = ("{} = ?", "{} is ?")  # as long in tokens: a model this small finds the numbers by their distance


def questions(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Questions about `count` different sums, as (what is asked, the sum in it)."""
    tasks = [f"{a} {sign} {b}" for a in range(10, 100) for sign in "+-*" for b in range(10, 100)]
    return [(rng.choice(ASKING).format(task), task) for task in rng.sample(tasks, count)]


def guess(rng: random.Random, task: str) -> str:
    """A wrong number that is as long as the right one."""
    right = calculator(task)
    wrong = right
    while wrong == right:
        wrong = rng.choice((1, -1)) * rng.randrange(10 ** len(str(abs(right)))) if right < 0 else rng.randrange(
            10 ** len(str(right)))
    return str(wrong)


def garbled(rng: random.Random, task: str) -> str:
    """Another sum, or none."""
    left, sign, right = task.split()
    return rng.choice((f"{left} {sign}", f"{left} {right}", f"{left} {rng.choice('+-*'.replace(sign, ''))} {right}"))


def call(expression: str) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}]}


def result(expression: str) -> str:
    """What the calculator says to it."""
    try:
        return str(calculator(expression))
    except (SyntaxError, ValueError) as error:
        return f"error: {type(error).__name__}"


def answers(rng: random.Random, task: str) -> list[dict]:
    """What follows a question, of one of the kinds of MIX."""
    kind = rng.choices(tuple(MIX), tuple(MIX.values()))[0]
    if kind == "guessed":
        return [{"role": "assistant", "content": guess(rng, task)}]
    if kind == "unreadable":
        text = json.dumps(call(task)["tool_calls"][0]["function"])
        return [{"role": "assistant", "content": f"<tool_call>\n{text[:rng.randint(20, len(text) - 1)]}\n</tool_call>"}]
    expression = task if kind == "called" else garbled(rng, task)
    said = result(expression)
    last = guess(rng, task) if said.startswith("error") else said
    return [call(expression), {"role": "tool", "name": "calculator", "content": said},
            {"role": "assistant", "content": last}]


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("outputs/tools"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    given.folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(given.seed)
    asked = questions(rng, NUM_CONVERSATIONS + NUM_QUESTIONS + NUM_HELD_OUT)
    tools = [get_json_schema(calculator)]
    prompts = [{"prompt": [{"role": "user", "content": text}], "answer": str(calculator(task))} for text, task in asked]
    write(given.folder / "conversations.jsonl", [
        {"messages": [*row["prompt"], *answers(rng, task)], "tools": tools}
        for row, (_, task) in list(zip(prompts, asked, strict=True))[:NUM_CONVERSATIONS]])
    write(given.folder / "questions.jsonl", prompts[NUM_CONVERSATIONS:-NUM_HELD_OUT])
    write(given.folder / "held_out.jsonl", prompts[-NUM_HELD_OUT:])


if __name__ == "__main__":
    main()
