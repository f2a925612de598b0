"""Environments and tools by their names in the settings, for processes of their own (environment.isolate)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.function_worker import parameters_of
from hybrid_rlhf.environments.builtin import BUILTINS
from hybrid_rlhf.environments.contract import Environment, Environments
from hybrid_rlhf.environments.isolated import START_SECONDS, Class, Homes, IsolatedObject, IsolatedTool
from hybrid_rlhf.environments.isolated_worker import Source
from hybrid_rlhf.environments.open import open_environments, options_of, split
from hybrid_rlhf.environments.settings import EnvironmentConfig
from hybrid_rlhf.rewards.deadline import Overdue
from hybrid_rlhf.rewards.functions import from_python, handed_over
from hybrid_rlhf.rewards.isolation import CallFailed, FunctionProcess, importable, signature_of


def open_isolated(settings: EnvironmentConfig) -> Environments:
    """As open_environments(settings.factory, .tool_list, .options), but nothing of a file or a module is run in this
    process. What is built in stays here. Raises UserError in one line, for what another process cannot import too."""
    factory, tools = settings.factory, settings.tool_list
    texts = [*tools, *(factory.values() if isinstance(factory, Mapping) else [factory] if factory else [])]
    sources = {text: _source(text) for text in texts}
    apart = [source for source in sources.values() if source]
    if not apart:
        return open_environments(factory, tools, settings.options)
    python = {split(text, "environment")[1]: source[1:] for text, source in sources.items()
              if source and source[0] == "module"}
    found = _asked_apart(settings, python)
    homes = Homes(max(settings.num_workers, 1), apart, settings.timeout)
    plain = {split(text, "environment.tools")[1]: text for text in tools}
    return Environments([_kind(kind, settings, sources, plain, homes) for kind in found], isinstance(factory, Mapping))


def _source(text: str) -> Source | None:
    """None of what is built in."""
    path, name = split(text, "environment")
    if path == "builtin":
        return None
    given = from_python(name) if path == "python" else None
    if given is None:
        return "file", str(Path(path).resolve()), name
    return "module", *importable(given, name, "environment.isolate", "function or class")


def _asked_apart(settings: EnvironmentConfig, python: Mapping[str, tuple[str, str]]) -> list[dict]:
    """What `kinds_as_json` says in a process that is there for this alone: to tell what a class is takes torch."""
    process = FunctionProcess("module", __name__, "environment.isolate")
    request = {"factory": settings.factory, "tools": settings.tool_list, "options": settings.options, "python": python}
    try:
        process.start(START_SECONDS)
        found = json.loads(process.call(("environment", "kinds_as_json", request, {}), START_SECONDS))
    except (CallFailed, Overdue) as error:
        raise UserError(f"environment.isolate: what environment.factory and environment.tools name cannot be opened: "
                        f"it {error}; fix the file") from None
    finally:
        process.end()
    if "refused" in found:
        raise UserError(found["refused"])
    return found["kinds"]


def kinds_as_json(factory: str | Mapping[str, str] | None, tools: list[str], options: Mapping[str, Any],
                  python: Mapping[str, tuple[str, str]]) -> str:
    """What open_environments finds, as JSON: {"kinds": ...} or {"refused": why}. python: module and dotted name of what
    a Python program has handed over."""
    try:
        with ExitStack() as stack:
            stack.enter_context(handed_over({name: _imported(*where) for name, where in python.items()}))
            found = open_environments(factory, tools, options)
            return json.dumps({"kinds": [_said(kind) for kind in found.kinds]})
    except UserError as error:
        return json.dumps({"refused": str(error)})


def _imported(module: str, path: str) -> Any:
    found: Any = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _said(kind: Environment) -> dict:
    own = kind.new().object
    protocol = [name for name, is_there in (("reset", hasattr(own, "reset")), ("step", kind.has_step),
                                            ("get_reward", kind.has_reward)) if is_there]
    methods = [name for name in kind.tool_names if name not in kind.tools]
    return {"name": kind.name, "schemas": kind.schemas, "has_step": kind.has_step, "has_reward": kind.has_reward,
            "needed": kind.needed, "tools": {name: parameters_of(tool) for name, tool in kind.tools.items()},
            "is_shown": methods,
            "methods": {name: parameters_of(getattr(own, name)) for name in [*protocol, *methods]}}


def _kind(said: dict, settings: EnvironmentConfig, sources: Mapping[str, Source | None], plain: Mapping[str, str],
          homes: Homes) -> Environment:
    """plain: the tools' texts in the settings by the names that they are called by."""
    tools: dict[str, Any] = {}
    for name, parameters in said["tools"].items():
        source = sources[plain[name]]
        tools[name] = IsolatedTool(homes, source, settings.max_answer_chars, signature_of(parameters)) if source else (
            BUILTINS[name])
    make = None
    if settings.factory:
        text = settings.factory if isinstance(settings.factory, str) else settings.factory[said["name"]]
        source, options = sources[text], options_of(settings.factory, settings.options, said["name"])
        methods = {name: signature_of(parameters) for name, parameters in said["methods"].items()}
        make = partial(IsolatedObject, Class(source, options, methods, frozenset(said["is_shown"]),
                                             settings.max_answer_chars), homes) if source else (
            partial(BUILTINS[split(text, "environment.factory")[1]], **options))
    return Environment(said["name"], said["schemas"], said["has_step"], said["has_reward"], tools, make,
                       tuple(said["needed"]))
