"""Every message that is the user's to fix, read from the source, and whether it says what would fit.

A message is the text of UserError(...), check(..., text), BadAnswer, BadScore, ExportDiffers, ApiError and SkipRow, or
of a function that only wraps one of these. Fields of f-strings stand as {name}. The cure is what stands behind the
semicolon; a message without one must hold a word of CURE, which makes it say by itself what would fit.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ERRORS = {"UserError": 0, "BadAnswer": 0, "BadScore": 0, "ExportDiffers": 0, "SkipRow": 0, "ApiError": 1, "check": 1,
          "SaveError": 0, "NotFinite": 0, "DoesNotFit": 0}
CURE = re.compile(r"\b(?:must|needed|needs?|choose|give|takes?|there (?:is|are)|it has|at least|at most|known|use|only|"
                  r"pip install|reads? )\b|\{nearest\}|\{close\}|\{columns\}|\{fault\}|\{refused\}")
TRANSPARENT = {"str", "repr", "len", "said", "first_line", "_first_line", "type", "one_line", "join", "sorted", "list",
               "tuple", "float", "int", "min", "max", "set"}
UNHEARD = ("the client has left",)


class Message(NamedTuple):
    file: str
    kind: str
    text: str


def strings(node: ast.AST, function: ast.AST | None) -> Iterator[str]:
    """The texts that an expression may be, fields as {name}; of a variable, what its function assigns to it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "{" + field(part.value) + "}"
                      for part in node.values)
    elif isinstance(node, ast.IfExp):
        yield from strings(node.body, function)
        yield from strings(node.orelse, function)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for left in strings(node.left, function) or [""]:
            yield from (left + right for right in strings(node.right, function))
    elif isinstance(node, ast.Name) and function is not None:
        for found in ast.walk(function):
            if isinstance(found, ast.Assign) and node.id in {getattr(t, "id", None) for t in found.targets}:
                yield from strings(found.value, None)


def field(node: ast.AST) -> str:
    """A short name for what stands in braces."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call):
        inner = [field(a) for a in node.args]
        own = field(node.func)
        return inner[0] if own in TRANSPARENT and inner else own
    if isinstance(node, ast.Subscript):
        return field(node.value)
    if isinstance(node, ast.BinOp):
        return field(node.left)
    if isinstance(node, (ast.GeneratorExp, ast.ListComp, ast.SetComp)):
        return field(node.generators[0].iter)
    if isinstance(node, ast.IfExp):
        return field(node.body)
    return "..." if not isinstance(node, ast.Constant) else str(node.value)


def called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def wrappers(tree: ast.Module) -> dict[str, tuple[int, str, str]]:
    """Functions of a file whose message is a parameter: name -> (its place, prefix with {} for it, kind)."""
    found = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name == "check":
            continue
        names = [a.arg for a in node.args.args if a.arg != "self"]
        for call in (c for c in ast.walk(node) if isinstance(c, ast.Call) and called(c) in ERRORS):
            arguments = call.args[ERRORS[called(call)]:]
            for text in strings(arguments[0], None) if arguments else ():
                place = next((i for i, n in enumerate(names)
                              if n in ("message", "what") and "{" + n + "}" in text), None)
                if place is not None:
                    found[node.name] = (place, text.replace("{" + names[place] + "}", "\0"), called(call))
    return found


def messages_of(path: Path) -> Iterator[Message]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wrapped, name = wrappers(tree), path.relative_to(ROOT).as_posix()
    constants = {t.id: node.value.value for node in tree.body if isinstance(node, ast.Assign)
                 and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
                 for t in node.targets if isinstance(t, ast.Name)}

    def visit(node: ast.AST, function: ast.AST | None) -> Iterator[Message]:
        for child in ast.iter_child_nodes(node):
            inside = child if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
            if isinstance(child, ast.Call) and called(child) in ERRORS | dict.fromkeys(wrapped):
                own = called(child)
                place, frame, kind = wrapped.get(own, (ERRORS.get(own, 0), "\0", own))
                argument = child.args[place] if len(child.args) > place else None
                if isinstance(argument, ast.Name) and argument.id in constants:
                    argument = ast.Constant(constants[argument.id])
                for text in strings(argument, inside) if argument is not None else ():
                    whole = frame.replace("\0", text)
                    for constant, value in constants.items():
                        whole = whole.replace("{" + constant + "}", value)
                    if getattr(inside, "name", "") not in wrapped or own in wrapped:
                        yield Message(name, kind, " ".join(whole.split()))
            yield from visit(child, inside)

    yield from visit(tree, None)


def all_messages() -> list[Message]:
    files = sorted(p for folder in ("hybrid_rlhf", "training", "inference") for p in (ROOT / folder).rglob("*.py"))
    found = dict.fromkeys(m for path in files for m in messages_of(path) if re.search("[a-z]{3}", m.text))
    return [m for m in found if m.text not in UNHEARD]


def cureless() -> list[Message]:
    """Messages that say what is wrong and not what would fit. SkipRow rows are reported by their reason alone."""
    return [m for m in all_messages() if m.kind != "SkipRow" and "; " not in m.text and not CURE.search(m.text)]
