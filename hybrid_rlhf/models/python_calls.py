"""Parse tool calls written as Python (LFM2: `[f(a='x', b=[1, None])]`) as data, without running them."""

from __future__ import annotations

import ast
import warnings
from typing import Any

_WORDS = {"true": True, "false": False, "null": None}  # JSON's, inside of nested values


def read_python(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls in a list of calls (or of a single one): names and arguments, which are literals.

    Raises SyntaxError, whose `msg` is one line, for anything else.
    """
    try:
        with warnings.catch_warnings():  # of escapes such as \d
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval").body
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError("it is not a list of calls that could be read") from error
    return [_call(node) for node in (tree.elts if isinstance(tree, ast.List) else [tree])]


def _call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call):
        raise SyntaxError("it is not a call of a function")
    names = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
    if node.args or len(names) < len(node.keywords):
        raise SyntaxError("each argument needs its name (key=value)")
    return ast.unparse(node.func), {name: _value(k.value) for name, k in zip(names, node.keywords, strict=True)}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return {str(key.value): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    is_negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    inner = node.operand if isinstance(node, ast.UnaryOp) else node
    if isinstance(inner, ast.Constant) and is_negative and type(inner.value) in (int, float):
        return -inner.value
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    raise SyntaxError(f"{ast.unparse(node)[:100]} is not a plain value")
