"""Text of a model as the syntax tree of one Python expression, within bounds. Nothing here runs it."""

from __future__ import annotations

import ast

MAX_DEPTH = 100  # levels of the tree; an evaluator's own calls are a few for each


class Refused(ValueError):
    """An expression that is not evaluated. The message says why, in words for the model."""


def parsed(text: object, max_chars: int) -> ast.expr:
    """The tree of `text`. Raises Refused for what is no text, too long, nested too deeply or no expression."""
    if not isinstance(text, str):
        raise Refused(f"text is needed, not {type(text).__name__}")
    if len(text) > max_chars:
        raise Refused(f"too long: {len(text)} characters, at most {max_chars}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (RecursionError, MemoryError):  # the parser's own bounds
        raise Refused("nested too deeply") from None
    except SyntaxError as error:
        raise Refused(f"no expression: {error.msg}") from None
    except ValueError:  # a null character, a lone surrogate
        raise Refused("no expression: a character that does not belong there") from None
    _check_depth(tree)
    return tree


def _check_depth(tree: ast.expr) -> None:
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)
                 if not isinstance(child, (ast.expr_context, ast.operator, ast.cmpop, ast.unaryop, ast.boolop))]
        if not level:
            return
    raise Refused(f"nested too deeply: at most {MAX_DEPTH} levels")
