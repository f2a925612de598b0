"""hybrid-rlhf init: five questions, or five flags, and a commented YAML for your own data and card."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hybrid_rlhf.core.config import UserError, check, command_flags, in_line, nearest, parse_command
from hybrid_rlhf.core.options import expanded
from hybrid_rlhf.memory_plan.presets import WHY, card, closest
from hybrid_rlhf.training.registry import STAGES, by_table


class Goal(NamedTuple):
    """help: description. stage: the stage to run. needs: the kinds of rows that the data must have (data/schema)."""

    help: str
    stage: str
    needs: tuple[str, ...]


GOALS = {
    "sft": Goal("imitate conversations or prompts with answers", "sft", ("demonstration",)),
    "ppo": Goal("all three stages from preferences: imitate, learn what is preferred, PPO", "all",
                ("demonstration", "pair", "prompt")),
    "dpo": Goal("learn from preferences directly, without a reward model", "dpo", ("pair",)),
    "grpo": Goal("learn from prompts with answers that a program can check", "grpo", ("prompt",)),
}
_EXAMPLES = {"goal": "sft", "data": "mine.jsonl", "model": "Qwen/Qwen2.5-0.5B-Instruct", "card": "cpu",
             "output_dir": "outputs/mine"}
FIELDS = tuple(_EXAMPLES)
# Comments beside options; those of a card's settings are in memory_plan/presets.
COMMENTS = {
    "data.split": "shares of the prompts: no prompt of one stage is seen in another",
    "data.max_prompt_length": "longer prompts are dropped and counted",
    "data.max_length": "tokens of prompt and answer; what is longer is counted",
    "train.num_train_epochs": "passes over the data",
    "train.max_steps": "each one samples and learns",
    "train.eval_steps": "steps between two evaluations",
    "reward.functions": "or your own, such as [pay.py:name]",
    "reward.options": "the column with the right answer",
    "ppo.kl_coef": "raise it where answers get strange: it holds the model to its start",
    "ppo.sampling.max_new_tokens": "of an answer",
    "ppo.sampling.num_samples": "answers to each prompt, compared with each other",
    "dpo.beta": "how strongly the model is held to its start",
}


def questions() -> dict[str, tuple[str, str]]:
    """field -> (question, answer for an empty line)."""
    goals = "\n".join(f"  {name:5} {goal.help}" for name, goal in GOALS.items())
    card = found_card()
    return {
        "goal": (f"What should the model learn from?\n{goals}\nGoal", "ppo"),
        "data": ("Your data: a file (jsonl, json, csv, parquet), a folder, or a hub id", ""),
        "model": ("The model to start from: a folder, a finished run or a hub id", "Qwen/Qwen2.5-0.5B-Instruct"),
        "card": (f"Memory of the card: 8gb, 12gb, 16gb, 24gb, 48gb, 80gb, or cpu (found here: {card})", card),
        "output_dir": ("Folder for the results", "outputs/mine"),
    }


def found_card() -> str:
    """The preset for this machine's first GPU, or cpu."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return closest(torch.cuda.get_device_properties(0).total_memory / 2**30)


def parse(argv: list[str] | None) -> argparse.Namespace:
    flags = command_flags("init", __doc__)
    flags.add_argument("--goal", help=", ".join(f"{name}: {goal.help}" for name, goal in GOALS.items()))
    flags.add_argument("--data", type=expanded, metavar="PATH", help="a file, a folder or a hub id")
    flags.add_argument("--model", type=expanded, metavar="DIR",
                       help="the model to start from: a folder, a finished run or a hub id")
    flags.add_argument("--card", help="8gb, 12gb, 16gb, 24gb, 48gb, 80gb or cpu")
    flags.add_argument("--output_dir", type=expanded, metavar="DIR", help="folder for the results")
    flags.add_argument("--file", type=expanded, default="mine.yaml", help="where to write the settings (%(default)s)")
    return parse_command(flags, argv)


def ask(flags: dict[str, str | None], read: Callable[[str], str] = input) -> dict[str, str]:
    """The answers: those of `flags`, and the others from the user; an invalid answer is asked for again."""
    answers: dict[str, str] = {}
    for name, (question, usual) in questions().items():
        value = flags[name]
        while value is None:
            value = expanded(read(f"{question}{f' [{usual}]' if usual else ''}: ").strip() or usual)
            try:
                examine(name, value, answers)
            except UserError as error:
                print(f"  {error}", file=sys.stderr)
                value = None
        answers[name] = value
    return answers


def examine(name: str, value: str, before: dict[str, str]) -> None:
    """UserError if `value` is not a valid answer to the question `name`; before: the answers so far."""
    from hybrid_rlhf.models.load import check_folder
    from hybrid_rlhf.training import builders

    if name == "goal":
        check(value in GOALS, f"--goal {value}: choose {', '.join(GOALS)}{nearest(value, GOALS)}")
    elif name == "data":
        _examine_data(value, GOALS[before["goal"]])
    elif name == "model":
        check(bool(value), "--model is empty; give a folder, a finished run or a hub id")
        check_folder(builders.model_folder(builders.parent_run(value, "", "sft", "--model")))
    elif name == "card":
        card(value, "--card")
    else:
        check(bool(value) and not Path(value).is_file(), f"--output_dir {value!r} is not a folder; give another")


def _examine_data(path: str, goal: Goal) -> None:
    """Check that local data has the kinds of rows that the goal needs; a hub id is checked when the run starts."""
    from hybrid_rlhf.data.schema import KINDS, detect
    from hybrid_rlhf.data.sources import Source, read

    check(bool(path), "--data is empty; give a file, a folder or a hub id")
    if not Path(path).exists() and path.count("/") == 1 and not path.startswith((".", "~", "/")):
        return
    rows = read(Source(path))
    form = detect(rows[0].keys(), path)
    lacks = [need for need in goal.needs if need not in KINDS[form.kind]]
    check(not lacks, f"{path} has {form.name} rows, which make no {' and no '.join(lacks)}; this goal needs "
                     f"{', '.join(goal.needs)} rows")


def settings_text(answers: dict[str, str]) -> str:
    """The YAML, with a comment on every line that the user may change."""
    goal, path = GOALS[answers["goal"]], answers["data"]
    lines = [f"# {goal.help}. Try it: python train.py --stage {goal.stage} --config THIS --plan",
             f"# Every other option with its default: python train.py --stage {goal.stage} --help",
             f"output_dir: {in_line(answers['output_dir'])}", "seed: 0", *_model(answers), "data:", "  sources:"]
    if goal.stage == "all":
        lines += [f"    - {in_line({'path': path, 'stages': [stage]})}" for stage in ("sft", "reward", "ppo")]
        lines += [f"  split: [2, 4, 4]  # {COMMENTS['data.split']}"]
    else:
        lines += [f"    - {in_line({'path': path})}"]
    if goal.stage in ("all", "grpo"):
        lines += [f"  max_prompt_length: 256  # {COMMENTS['data.max_prompt_length']}"]
    if goal.stage != "grpo":
        lines += [f"  max_length: 1024  # {COMMENTS['data.max_length']}"]
    return "\n".join([*lines, *_sections(goal.stage), ""])


def _model(answers: dict[str, str]) -> list[str]:
    lines = [f"model:  # {of_card(answers['card'])}",
             f"  model_name_or_path: {in_line(answers['model'])}"]
    sections = {"model": lines, "engine": ["engine:"]}
    for option, value in card(answers["card"]).settings.items():
        section, _, name = option.partition(".")
        shown = f"lora: {{r: {value}}}" if name == "lora.r" else f"{name}: {str(value).lower()}"
        sections[section].append(f"  {shown}  # {WHY[option]}")
    return [*sections["model"], *sections["engine"]]


def of_card(name: str) -> str:
    """A comment about the settings for a card: the largest model that fits."""
    row = card(name)
    return f"settings for {name}" + (f"; {row.fits} of the Qwen2.5 family is about the largest for PPO" if row.gib
                                     else "")


def comment(method: str, option: str) -> str:
    """The comment on an option of a stage, or ''."""
    if option == "train.per_device_train_batch_size":
        samples = any(name.startswith("roles.") for name in STAGES[method].defaults)
        return f"{'prompts of a step' if samples else 'rows of an optimizer step'}, on each process"
    return COMMENTS.get(option, "")


def _option(method: str, option: str, indent: str = "  ") -> str:
    """A line with a default of training/registry.py; null where it depends on the model or other settings."""
    name, value, text = option.rpartition(".")[2], STAGES[method].defaults[option], comment(method, option)
    if not isinstance(value, (int, float)):
        return f"{indent}{name}: null  # {'; '.join(filter(None, (f'by the table: {by_table(method, option)}', text)))}"
    return f"{indent}{name}: {value:g}{f'  # {text}' if text else ''}"


def _schedule(method: str, indent: str = "  ") -> list[str]:
    return [_option(method, f"train.{name}", indent) for name in (
        "learning_rate", "num_train_epochs", "per_device_train_batch_size")]


def _sampled(method: str, roles: tuple[str, ...], indent: str = "  ") -> list[str]:
    """Steps and prompts of an on-policy method, its learning rates, and the KL coefficient."""
    schedule = [_option(method, f"train.{name}", indent) for name in ("max_steps", "per_device_train_batch_size")]
    rates = [line for role in roles for line in
             (f"  {role}:", _option(method, f"roles.{role}.learning_rate", indent="    "))]
    return [*schedule, "roles:", *rates, "ppo:", _option(method, "ppo.kl_coef"), "  sampling:",
            f"    max_new_tokens: 256  # {COMMENTS['ppo.sampling.max_new_tokens']}"]


def _sections(stage: str) -> list[str]:
    if stage == "all":
        return ["stages:", "  sft:", *_schedule("sft", "    "), "  reward:", *_schedule("reward", "    "), "  ppo:",
                *_sampled("ppo", ("actor", "critic"), "    ")]
    if stage == "grpo":
        return ["reward:", f"  functions: [\"builtin:numeric_match\"]  # {COMMENTS['reward.functions']}",
                f"  options: {{numeric_match: {{column: answer}}}}  # {COMMENTS['reward.options']}", "train:",
                *_sampled("grpo", ("actor",)), f"    num_samples: 8  # {COMMENTS['ppo.sampling.num_samples']}"]
    dpo = ["dpo:", f"  beta: 0.1  # {COMMENTS['dpo.beta']}"] if stage == "dpo" else []
    return ["train:", *_schedule(stage), f"  eval_steps: 100  # {COMMENTS['train.eval_steps']}", *dpo]


def write(answers: dict[str, str], file: str) -> Path:
    """Write the settings into a new file."""
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as written:
        written.write(settings_text(answers))
    return path


def main(argv: list[str] | None = None) -> int:
    """The entry point; returns 0, or 130 where the user stopped it. Raises UserError."""
    try:
        options = vars(parse(argv))
        check(not os.path.lexists(options["file"]), f"init: {options['file']} exists; choose another --file")
        flags, known = {name: options[name] for name in FIELDS}, {}
        for name in FIELDS:
            if flags[name] is not None and (name != "data" or flags["goal"] is not None):
                examine(name, flags[name], known | {"goal": flags["goal"] or ""})
        example = " ".join(f"--{name} {flags[name] or value}" for name, value in _EXAMPLES.items())
        check(sys.stdin.isatty() or all(flags.values()),
              f"init: there is no terminal to ask at; give {', '.join('--' + n for n in FIELDS if not flags[n])}, such "
              f"as hybrid-rlhf init {example}")
        answers = ask(flags)
        path = write(answers, options["file"])
    except (KeyboardInterrupt, EOFError):
        print("\nnothing was written", file=sys.stderr)
        return 130
    stage = GOALS[answers["goal"]].stage
    print(f"{path} written. Next:\n  hybrid-rlhf --stage {stage} --config {path} --preview   what the model will see\n"
          f"  hybrid-rlhf --stage {stage} --config {path} --plan      whether it fits\n"
          f"  hybrid-rlhf --stage {stage} --config {path}             train")
    return 0
