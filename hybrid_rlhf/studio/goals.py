"""Goals of a new run, and the stages for each: the first question of the page."""

from __future__ import annotations

from typing import NamedTuple

_SAMPLING = ("grpo", "dr_grpo", "batch_grpo", "gdpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo",
             "ppo", "online_dpo", "rejection")


class StudioGoal(NamedTuple):
    """stages: for this goal, the usual one first. asks: what the page asks for. rows: what data it needs."""

    title: str
    help: str
    stages: tuple[str, ...]
    asks: tuple[str, ...]
    rows: str


STUDIO_GOALS = {
    "imitate": StudioGoal(
        "Imitate examples", "The model learns to answer as the answers in your data do (supervised fine-tuning).",
        ("sft",), ("model", "data"), "conversations (messages), or prompts with answers (prompt, completion)"),
    "prefer": StudioGoal(
        "Learn from preferences", "The model learns which of two answers is better, without a reward model.",
        ("dpo", "ipo", "hinge", "orpo", "simpo", "kto"), ("model", "data"),
        "a better and a worse answer to a prompt (prompt, chosen, rejected); for kto single answers marked good or bad "
        "too (prompt, completion, label)"),
    "function": StudioGoal(
        "Learn from a reward function", "The model answers prompts, a program scores the answers, and better ones "
        "become likelier. For what can be checked: numbers, formats, tests.",
        _SAMPLING, ("model", "data", "reward_functions", "tools"),
        "prompts, and what the function needs to check an answer (prompt, answer; question and answer do too)"),
    "reward": StudioGoal(
        "Train a reward model", "A model learns to score answers as your preferences do, for learning from it later.",
        ("reward",), ("model", "data"), "a better and a worse answer to a prompt (prompt, chosen, rejected)"),
    "model": StudioGoal(
        "Learn from a reward model", "The model answers prompts, a trained reward model scores the answers, and better "
        "ones become likelier.",
        ("ppo", *(stage for stage in _SAMPLING if stage != "ppo")), ("model", "data", "reward_model"),
        "prompts (prompt); answers beside them are not read"),
    "judge": StudioGoal(
        "Learn from a judge", "The model answers prompts, and another language model judges the answers by a rubric.",
        _SAMPLING, ("model", "data", "judge"), "prompts (prompt); answers beside them are not read"),
    "distil": StudioGoal(
        "Learn from a larger model", "A small model is moved towards a larger one on its own answers. A teacher with"
        " other tokens can teach too, by distill.divergence policy_gradient.",
        ("distill",), ("model", "data", "teacher"), "prompts (prompt); answers beside them are not read"),
    "three_stages": StudioGoal(
        "All three stages", "Imitate, learn what is preferred, then PPO against that: the whole of RLHF from one file.",
        ("all",), ("model", "data"), "a better and a worse answer to a prompt (prompt, chosen, rejected)"),
}


class RewardFunction(NamedTuple):
    """A ready-made reward function. fields: (option, label, value at first) of those that the page shows; a value that
    has no default in rewards/builtin.py is sent in any case, others where they are changed."""

    help: str
    fields: tuple[tuple[str, str, str | float | bool], ...] = ()
    needed: tuple[str, ...] = ()


_COLUMN = ("column", "Column with the right answer", "answer")
BUILTIN_REWARDS = {
    "exact_match": RewardFunction("1 where the answer is the text of a column, else 0", (
        _COLUMN, ("marker", "Only the text after (such as ####)", ""),
        ("ignore_case", "Capital and small letters are the same", False))),
    "numeric_match": RewardFunction("1 where the last number of the answer is that of a column, else 0", (
        _COLUMN, ("tolerance", "Largest relative difference", 0.0))),
    "math_match": RewardFunction("1 where the LaTeX answer equals that of a column, by math-verify, else 0", (
        _COLUMN,)),
    "format": RewardFunction("1 where the answer matches a regular expression, else 0", (
        ("pattern", "Regular expression", "####"), ("is_whole", "The whole answer must match", False)),
        ("pattern", "is_whole")),
    "length_penalty": RewardFunction("lowers the score of answers near a length", (
        ("max_tokens", "Full penalty from, tokens", 256), ("buffer", "It begins so many tokens before", 64),
        ("penalty", "Full penalty", 1.0)), ("max_tokens", "buffer")),
    "repetition_penalty": RewardFunction("lowers the score for words that repeat", (
        ("n", "Words in a row that count as repeated", 3), ("penalty", "Full penalty", 1.0))),
    "reasoning_gym": RewardFunction("scores answers to tasks of the package reasoning-gym", (
        ("task", "Task", "chain_sum"),), ("task",)),
    "demo_correct": RewardFunction("1 where the answer to a prompt of demo/prompts is right"),
}
