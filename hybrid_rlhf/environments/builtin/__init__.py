"""Builtin environments and tools, as builtin:NAME."""

from __future__ import annotations

from collections.abc import Callable

from hybrid_rlhf.environments.builtin.expressions import calculator, python_expression
from hybrid_rlhf.environments.builtin.games import GuessNumber, GuessNumberTool, ReasoningGym, WordGame
from hybrid_rlhf.environments.builtin.openenv import OpenEnv

BUILTINS: dict[str, Callable] = {
    "calculator": calculator, "python_expression": python_expression, "guess_number": GuessNumber,
    "guess_number_tool": GuessNumberTool, "word_game": WordGame, "reasoning_gym": ReasoningGym, "openenv": OpenEnv}
