"""A calculator that the model may call, and what an episode is worth."""

from __future__ import annotations

import ast
import operator

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculator(expression: str):
    """Works out a sum.

    Args:
        expression: What to work out.
    """

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("only whole numbers with +, - or * between them")

    return value(ast.parse(expression, mode="eval").body)


def is_right(completions: list, answer: list[str], **columns: list) -> list[float]:
    """1 where the last message of an episode is the assistant's and says the right number, else 0."""
    last = [{"role": "assistant", "content": c} if isinstance(c, str) else c[-1] for c in completions]
    return [float(m["role"] == "assistant" and m["content"].strip() == a) for m, a in zip(last, answer, strict=True)]
