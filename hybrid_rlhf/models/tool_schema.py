"""The JSON schema of a function that a model may call."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from hybrid_rlhf.core.errors import UserError, check

_NO_KEYWORD = {inspect.Parameter.VAR_POSITIONAL: "*{}", inspect.Parameter.VAR_KEYWORD: "**{}",
               inspect.Parameter.POSITIONAL_ONLY: "{}, /"}


def schema_of(function: Callable, where: str) -> dict:
    """The function's JSON schema, {"type": "function", "function": {"name", "description", "parameters"}}, from its
    type hints and its Google docstring, by transformers' get_json_schema as TRL has it.

    where: the name of the function in messages ("environment.tools: search of tools.py"). Raises UserError, in one
    line, for what a schema cannot describe: no function, no docstring, a parameter without type hint or description,
    *args, **kwargs, positional-only parameters, a generator.
    """
    from transformers.utils import get_json_schema

    check(inspect.isroutine(function), f"{where} is a {type(function).__name__}; a function is needed")
    try:
        _check_parameters(function, where)
        return get_json_schema(function)
    except UserError:
        raise
    except Exception as error:  # such as types that cannot be resolved, or have no schema
        raise UserError(f"{where} cannot be shown to a model: {_one_line(error)}; give it type hints of JSON's types "
                        "(str, int, float, bool, list, dict, Literal) and a Google docstring") from error


def _check_parameters(function: Callable, where: str) -> None:
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    check(not inspect.isgeneratorfunction(function) and not inspect.isasyncgenfunction(function),
          f"{where} yields its answer in parts; a tool must return it")
    text = (inspect.getdoc(function) or "").strip()
    check(text, f"{where} has no docstring, by which the model knows what it does; give it one, with a line for each "
                "parameter below Args:")
    described = parse_google_format_docstring(text)[1] or {}
    for name, parameter in inspect.signature(function).parameters.items():
        check(parameter.kind not in _NO_KEYWORD,
              f"{where} takes {_NO_KEYWORD.get(parameter.kind, '').format(name)}, and a model calls by the names of "
              "parameters; give each one its own name")
        check(parameter.annotation is not parameter.empty,
              f"{where}: its parameter {name} has no type hint; give it one, as in {name}: str")
        check(name in described, f"{where}: its docstring does not describe the parameter {name}; below a line Args: "
                                 f"it needs one such as '{name}: what it means'")


def _one_line(error: Exception) -> str:
    try:
        return " ".join(str(error).split())[:200]
    except Exception:  # a foreign type hint may fail to print
        return type(error).__name__
