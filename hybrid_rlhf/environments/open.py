"""Opens the environments and tools of the settings, and the reward source of environments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from hybrid_rlhf.core.errors import UserError, check, nearest
from hybrid_rlhf.environments.builtin import BUILTINS
from hybrid_rlhf.environments.contract import Environment, Environments, environment_of, plain_schemas
from hybrid_rlhf.rewards.functions import from_python, parameters, run_named
from hybrid_rlhf.rollout import Rollout


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
        check(not options, "environment.options are for an environment.factory, and there is none; give one")
        return Environments([Environment("tools", list(plain_schemas(plain).values()), False, False, plain)], False)
    if isinstance(factory, str):
        name = split(factory, "environment.factory")[1]
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
    where = f"environment.factory: {text}"
    factory = _named(text, "environment.factory", files)
    try:
        named, takes_all = parameters(factory)
        needed = [n for n, p in inspect.signature(factory).parameters.items() if p.default is p.empty
                  and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and n not in options]
    except (ValueError, TypeError):  # no signature
        named, takes_all, needed = [], True, []
    for key in options:
        check(takes_all or key in named, f"environment.options: {text} takes no {key}{nearest(str(key), named)}; it "
                                         f"takes {', '.join(named) or 'none'}")
    check(not needed, f"{where} needs {' and '.join(needed)}; give environment.options "
                      f"'{{{', '.join(f'{n}: ...' for n in needed)}}}'")
    return environment_of(name, partial(factory, **options), tools, where)


def _tools(texts: Sequence[str], files: dict[str, ModuleType]) -> dict[str, Callable]:
    by_name: dict[str, Callable] = {}
    for text in texts:
        name = split(text, "environment.tools")[1]
        tool = _named(text, "environment.tools", files)
        check(not inspect.isclass(tool), f"environment.tools: {text} is a class; give it as environment.factory")
        check(name not in by_name, f"environment.tools: there are two tools called {name}; rename one")
        by_name[name] = tool
    return by_name


def split(text: str, option: str) -> tuple[str, str]:
    """(file, "builtin" or "python"; name)."""
    path, _, name = text.partition("@")[0].rpartition(":") if text.startswith("python:") else text.rpartition(":")
    check(path and name, f"{option}: {text!r} names nothing; give path.py:name, or builtin:name with one of "
                         f"{', '.join(BUILTINS)}")
    return path, name


def _named(text: str, option: str, files: dict[str, ModuleType]) -> Callable:
    path, name = split(text, option)
    if path == "builtin":
        check(name in BUILTINS, f"{option}: there is no builtin:{name}{nearest(name, BUILTINS)}; there are "
                                f"{', '.join(BUILTINS)}")
        return BUILTINS[name]
    if path == "python":
        function = from_python(name)
        if function is None:
            raise UserError(f"{option}: {name} was given from Python, and nothing gives it here; run it from there, or "
                            "put it into a file as path.py:name")
        return function
    if path not in files:
        files[path] = run_named(path, option)
    value, defined = getattr(files[path], name, None), _defined_in(files[path])
    check(callable(value), f"{option}: {path} has no {name} that can be called; there is "
                           f"{', '.join(defined) or 'none'}{nearest(name, defined)}")
    return value  # type: ignore[return-value]  # checked above


def _defined_in(module: ModuleType) -> list[str]:
    """The names of functions and classes that the file itself defines."""
    return [k for k, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]


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
