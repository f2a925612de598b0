"""One Python expression as a tool: a walk over its syntax tree, never eval, within bounds that no clock decides."""

from __future__ import annotations

import ast
from collections.abc import Callable

from hybrid_rlhf.environments.builtin.bounded_values import Budget, Value, written
from hybrid_rlhf.environments.builtin.expression_calls import FUNCTIONS, KEYS, call_function, call_method
from hybrid_rlhf.environments.builtin.expression_operators import binary, compare, subscript, unary
from hybrid_rlhf.environments.builtin.expressions import Refused, parsed

MAX_CHARS = 2000
Scope = dict[str, Value]


def python_expression(code: str) -> str:
    """
    Works out one Python expression and returns its value as Python writes it.

    Args:
        code: Literals, operators, comparisons, indexing, comprehensions, string methods and calls of functions such as
            len, sum, min, max, sorted, range and round. No statements, no imports, no lambda.
    """
    try:
        budget = Budget()
        return written(_Walk(budget).value_of(parsed(code, MAX_CHARS), {}))
    except Refused as error:
        return f"error: {error}"
    except (ArithmeticError, TypeError, ValueError, LookupError) as error:  # of the expression, in Python's own words
        said = str(error.args[0]) if error.args else ""
        return f"error: {type(error).__name__}: {said[:200]}"


class _Walk:
    """Evaluates nodes. Every value made is charged to the budget, so that time and memory are bounded together."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def value_of(self, node: ast.expr, scope: Scope) -> Value:
        """The value of a node. Raises Refused, or what Python would."""
        self.budget.charge(1)
        evaluate = _NODES.get(type(node))
        if evaluate is None:
            raise Refused(f"{type(node).__name__} is not available: one expression of literals, operators, "
                          "comparisons, indexing, comprehensions and known calls")
        value = evaluate(self, node, scope)
        return value if isinstance(node, ast.Name) else self.budget.made(value)

    def _constant(self, node: ast.Constant, _scope: Scope) -> Value:
        if node.value is not None and type(node.value) not in (bool, int, float, str):
            raise Refused(f"{type(node.value).__name__} literals are not available")
        return node.value

    def _name(self, node: ast.Name, scope: Scope) -> Value:
        if node.id in scope:
            return scope[node.id]
        what = "can only be called" if node.id in FUNCTIONS else "is not defined"
        raise Refused(f"name {node.id} {what}")

    def _items(self, nodes: list[ast.expr], scope: Scope) -> list[Value]:
        return [self.value_of(node, scope) for node in nodes]

    def _list(self, node: ast.List, scope: Scope) -> Value:
        return self._items(node.elts, scope)

    def _tuple(self, node: ast.Tuple, scope: Scope) -> Value:
        return tuple(self._items(node.elts, scope))

    def _set(self, node: ast.Set, scope: Scope) -> Value:
        return self.budget.set_of(self._items(node.elts, scope))

    def _dict(self, node: ast.Dict, scope: Scope) -> Value:
        if None in node.keys:
            raise Refused("** is not available in a dict")
        keys = [key for key in node.keys if key is not None]
        return self.budget.dict_of([(self.value_of(key, scope), self.value_of(value, scope))
                                    for key, value in zip(keys, node.values, strict=True)])

    def _unary(self, node: ast.UnaryOp, scope: Scope) -> Value:
        return unary(node.op, self.value_of(node.operand, scope))

    def _binary(self, node: ast.BinOp, scope: Scope) -> Value:
        return binary(self.budget, node.op, self.value_of(node.left, scope), self.value_of(node.right, scope))

    def _boolean(self, node: ast.BoolOp, scope: Scope) -> Value:
        is_and, value = isinstance(node.op, ast.And), None
        for each in node.values:
            value = self.value_of(each, scope)
            if bool(value) is not is_and:
                break
        return value

    def _compare(self, node: ast.Compare, scope: Scope) -> Value:
        left = self.value_of(node.left, scope)
        for operator, each in zip(node.ops, node.comparators, strict=True):
            right = self.value_of(each, scope)
            if not compare(self.budget, operator, left, right):
                return False
            left = right
        return True

    def _if(self, node: ast.IfExp, scope: Scope) -> Value:
        return self.value_of(node.body if self.value_of(node.test, scope) else node.orelse, scope)

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Value:
        value = self.value_of(node.value, scope)
        if not isinstance(node.slice, ast.Slice):
            return subscript(value, self.value_of(node.slice, scope))
        ends = [None if end is None else self.value_of(end, scope)
                for end in (node.slice.lower, node.slice.upper, node.slice.step)]
        return subscript(value, slice(*ends))

    def _call(self, node: ast.Call, scope: Scope) -> Value:
        if isinstance(node.func, ast.Attribute):
            owner = self.value_of(node.func.value, scope)
            if node.keywords:
                raise Refused(f"keywords of the method {node.func.attr} are not available")
            return call_method(self.budget, owner, node.func.attr, self._items(node.args, scope))
        if not isinstance(node.func, ast.Name) or node.func.id in scope or node.func.id not in FUNCTIONS:
            what = node.func.id if isinstance(node.func, ast.Name) else "what stands there"
            raise Refused(f"{what} cannot be called; there are {', '.join(FUNCTIONS)}")
        keywords = {str(each.arg): self._keyword(each, scope) for each in node.keywords}
        return call_function(self.budget, node.func.id, self._items(node.args, scope), keywords)

    def _keyword(self, node: ast.keyword, scope: Scope) -> Value | str:
        """The value of a keyword; of key= the name of a function."""
        if node.arg is None:
            raise Refused("** is not available in a call")
        if node.arg != "key" or (isinstance(node.value, ast.Constant) and node.value.value is None):
            return self.value_of(node.value, scope)
        if not isinstance(node.value, ast.Name) or node.value.id not in KEYS:
            raise Refused(f"key must be one of {', '.join(KEYS)}")
        return node.value.id

    def _list_of(self, node: ast.ListComp | ast.GeneratorExp, scope: Scope) -> Value:
        found: list[Value] = []
        self._loop(node.generators, scope, lambda inner: self._keep(found, self.value_of(node.elt, inner)))
        return found

    def _set_of(self, node: ast.SetComp, scope: Scope) -> Value:
        found: list[Value] = []
        self._loop(node.generators, scope, lambda inner: self._keep(found, self.value_of(node.elt, inner)))
        return self.budget.set_of(found)

    def _dict_of(self, node: ast.DictComp, scope: Scope) -> Value:
        found: list[tuple[Value, Value]] = []
        self._loop(node.generators, scope, lambda inner: self._keep(
            found, (self.value_of(node.key, inner), self.value_of(node.value, inner))))
        return self.budget.dict_of(found)

    def _keep(self, found: list, value: Value) -> None:
        self.budget.check_length(len(found) + 1)
        found.append(value)

    def _loop(self, generators: list[ast.comprehension], scope: Scope, emit: Callable[[Scope], None]) -> None:
        """Calls emit with the names of every pass. The loops nest as they are written."""
        first, rest = generators[0], generators[1:]
        if first.is_async:
            raise Refused("async is not available")
        for item in self.budget.items(self.value_of(first.iter, scope)):
            inner = {**scope, **self._bound(first.target, item)}
            if all(self.value_of(condition, inner) for condition in first.ifs):
                if rest:
                    self._loop(rest, inner, emit)
                else:
                    emit(inner)

    def _bound(self, target: ast.expr, value: Value) -> Scope:
        """The names that a loop's target gives to parts of `value`."""
        self.budget.charge(1)
        if isinstance(target, ast.Name):
            return {target.id: value}
        if not isinstance(target, (ast.Tuple, ast.List)):
            raise Refused("a loop's variables must be names")
        parts = self.budget.items(value)
        if len(parts) != len(target.elts):
            raise ValueError(f"{len(target.elts)} values to unpack are needed, there are {len(parts)}")
        return {name: each for inner, part in zip(target.elts, parts, strict=True)
                for name, each in self._bound(inner, part).items()}


_NODES: dict[type[ast.expr], Callable] = {
    ast.Constant: _Walk._constant, ast.Name: _Walk._name, ast.List: _Walk._list, ast.Tuple: _Walk._tuple,
    ast.Set: _Walk._set, ast.Dict: _Walk._dict, ast.UnaryOp: _Walk._unary, ast.BinOp: _Walk._binary,
    ast.BoolOp: _Walk._boolean, ast.Compare: _Walk._compare, ast.IfExp: _Walk._if, ast.Subscript: _Walk._subscript,
    ast.Call: _Walk._call, ast.ListComp: _Walk._list_of, ast.GeneratorExp: _Walk._list_of, ast.SetComp: _Walk._set_of,
    ast.DictComp: _Walk._dict_of}
