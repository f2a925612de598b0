"""The settings of environments and tools, how these are opened, and the reward source of environments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

from hybrid_rlhf.core.errors import check, nearest
from hybrid_rlhf.core.options import check_values, within
from hybrid_rlhf.environments.builtin import BUILTINS
from hybrid_rlhf.environments.contract import Environment, Environments, environment_of, plain_schemas
from hybrid_rlhf.rewards.functions import check_options, named, split
from hybrid_rlhf.rollout import Rollout


@dataclass(frozen=True)
class EnvironmentConfig:
    """Environments and tools of the model. Without a factory or tools a response is one turn.

    Attributes:
        factory: The environment's class, path.py:name or builtin:name; or a mapping of names to classes, of which each
            row names one in its column `environment`. Its reset(**row) begins an episode; its public methods, with type
            hints and docstrings, are tools; get_reward() is a reward beside reward.functions. Or step(messages) ->
            (messages, done, reward), for games without tools. A class for TRL's environment_factory works as it is.
        tools: Functions that the model may call, path.py:name or builtin:name (calculator, python_expression), one or
            a list; their type hints and docstrings are shown to the model.
        options: Keywords of the factory; for several environments, by name.
        max_turns: Most turns of the model in one episode.
        max_new_tokens_per_turn: Most tokens of one turn; null: the rest of max_new_tokens, which counts all turns and
            the messages between them.
        timeout: Seconds that one call of a tool or of the environment may take; then the model is shown an error.
        num_workers: Calls that run at once, while others generate; 0 makes them one by one in the order of the
            episodes, which is reproducible.
        isolate: Whether code of files and modules runs in worker processes, num_workers of them (at least one), and as
            many for tools: for code that may crash, hang in compiled code, or take all memory. Builtin ones stay in
            this process.
        max_answer_chars: Most characters of one answer of a tool; the rest is cut, with a note.
        malformed_penalty: Subtracted at a turn whose tool calls cannot be parsed.
    """

    factory: str | dict[str, str] | None = None
    tools: list[str] | str = field(default_factory=list)
    options: dict[str, object] = field(default_factory=dict)
    max_turns: int = within(10, "[1,")
    max_new_tokens_per_turn: int | None = within(None, "[1,")
    timeout: float = within(30.0, "(0, inf)")
    num_workers: int = within(16, "[0,")
    isolate: bool = False
    max_answer_chars: int = within(4000, "[1,")
    malformed_penalty: float = within(0.0, "[0, inf)")

    def __post_init__(self) -> None:
        check_values(self, "environment.")
        check(bool(self.factory) or not self.options, "environment.options are those of environment.factory; there is "
                                                      "none")

    @property
    def tool_list(self) -> list[str]:
        return [self.tools] if isinstance(self.tools, str) else list(self.tools)

    @property
    def is_given(self) -> bool:
        """Whether responses are episodes."""
        return bool(self.factory or self.tool_list)


def open_environments(factory: str | Mapping[str, str] | None, tools: Sequence[str],
                      options: Mapping[str, Any]) -> Environments:
    """The environments and tools that environment.{factory, tools, options} name; makes an instance of each.

    factory, tools: `path.py:name`, `builtin:name`, or `python:name` of a function or class that a Python program has
    handed over (rewards.functions.handed_over); factory may be a mapping of environments by name, among which a row's
    column `environment` chooses. options: keywords of the factory, or of each by name. A file is run once. Raises
    UserError for what cannot be loaded, or is not an environment.
    """
    files: dict[str, ModuleType] = {}
    check(factory or tools, "there is neither environment.factory nor environment.tools; give one, as path.py:name")
    plain = _tools(tools, files)
    if not factory:
        return Environments([Environment("tools", list(plain_schemas(plain).values()), False, False, plain)], False)
    if isinstance(factory, str):
        name = split(factory, "environment.factory", BUILTINS)[1]
        return Environments([_environment(name, factory, plain, options_of(factory, options, name), files)], False)
    for key in options:
        check(key in factory, f"environment.options: {key} is none of environment.factory ({', '.join(factory)})"
                              f"{nearest(key, factory)}")
        check(isinstance(options[key], Mapping), f"environment.options.{key} must be a mapping of keywords")
    return Environments([_environment(name, text, plain, options_of(factory, options, name), files)
                         for name, text in factory.items()], True)


def options_of(factory: str | Mapping[str, str], options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The keywords of one environment; those of an only environment may stand below its name."""
    if not isinstance(factory, str):
        return options.get(name, {})
    return options[name] if list(options) == [name] and isinstance(options[name], Mapping) else options


def _environment(name: str, text: str, tools: Mapping[str, Callable], options: Mapping[str, Any],
                 files: dict[str, ModuleType]) -> Environment:
    factory = named(text, "environment.factory", BUILTINS, files)
    check_options(factory, options, text, "environment.options", is_complete=True)
    return environment_of(name, partial(factory, **options), tools, f"environment.factory: {text}")


def _tools(texts: Sequence[str], files: dict[str, ModuleType]) -> dict[str, Callable]:
    by_name: dict[str, Callable] = {}
    for text in texts:
        name = split(text, "environment.tools", BUILTINS)[1]
        tool = named(text, "environment.tools", BUILTINS, files)
        check(not inspect.isclass(tool), f"environment.tools: {text} is a class; give it as environment.factory")
        check(name not in by_name, f"environment.tools: there are two tools called {name}; rename one")
        by_name[name] = tool
    return by_name


@dataclass
class EnvironmentSource:
    """The rewards of each episode's environment (get_reward, and those of its steps)."""

    name: str

    def score(self, rollout: Rollout) -> list[float | None]:
        """`rollout.episode_rewards`: B numbers, None for an episode whose environment has no reward. A turn's reward
        stands at its last token (rollout.token_scores)."""
        rollout.token_scores = rollout.turn_rewards()
        rollout.step_ends = rollout.rewarded_turn_ends()
        return rollout.episode_rewards


def source_of(environments: Environments, malformed_penalty: float = 0.0) -> EnvironmentSource | None:
    """The reward source of the environments, named as the only one with a reward; None if none has one."""
    names = {kind.name for kind in environments.kinds if kind.has_reward or kind.has_step or malformed_penalty}
    if not names:
        return None
    return EnvironmentSource(names.pop() if len(names) == 1 else "environment")
