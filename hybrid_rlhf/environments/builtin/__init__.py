"""Builtin environments and tools, as builtin:NAME."""

from __future__ import annotations

from collections.abc import Callable

from hybrid_rlhf.environments.builtin.expressions import calculator, python_expression
from hybrid_rlhf.environments.builtin.guess_number import GuessNumber, GuessNumberTool
from hybrid_rlhf.environments.builtin.openenv import OpenEnv
from hybrid_rlhf.environments.builtin.reasoning_gym import ReasoningGym
from hybrid_rlhf.environments.builtin.word_game import WordGame

BUILTINS: dict[str, Callable] = {
    "calculator": calculator, "python_expression": python_expression, "guess_number": GuessNumber,
    "guess_number_tool": GuessNumberTool, "word_game": WordGame, "reasoning_gym": ReasoningGym, "openenv": OpenEnv}
