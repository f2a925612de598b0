"""The calculator and the Python expression tool: by hand, against Python's own eval, and on hostile input."""

from __future__ import annotations

import builtins
import inspect
import itertools
import json
import re
import subprocess
import sys
import time
import warnings
from fractions import Fraction
from typing import get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.environments.builtin import BUILTINS
from hybrid_rlhf.environments.builtin.expressions import FUNCTIONS, calculator, python_expression


@pytest.mark.parametrize("expression, answer", [
    ("1+2", "3"), (" (3 + 4) * 2.5\n", "17.5"), ("0.1 + 0.2", "0.3"), ("10/4", "2.5"), ("1/3*3", "1"), ("-7 // 2",
    "-4"),
    ("-7 % 3", "2"), ("7.5 % 2", "1.5"), ("2**10", "1024"), ("2**-2", "0.25"), ("-0.05", "-0.05"), ("1e3", "1000"),
    ("1_000", "1000"), ("5.", "5"), ("3\u00d74\u00f72\u22121", "5"), ("12345678901234567890.1+0.1",
    "12345678901234567890.2"),
    ("2/3", "2/3 (about 0.6666666667)"), ("2**0.5", "about 1.41421356237"), ("1**(10**300)", "1"),
    ("+".join(["1"] * 90), "90"), ("2**3000 % 7", "1"),
])
def test_the_calculator_by_hand(expression, answer):
    assert calculator(expression) == answer


@pytest.mark.parametrize("expression, reason", [
    ("1/0", "division by zero"), ("0**-1", "division by zero"), ("9**9**9", "at most 1000 digits"),
    ("2**4000", "at most 1000 digits"), ("10.0**0.5 * 1e308 * 1e308", "at most 1000 digits"),
    ("1e99999", "only numbers"), ("9" * 501, "too long"), ("(-8)**(1/3)", "no real number"),
    ("1,000+2", "thousands separators"), ("2^3", r"a power is \*\*"), ("x", "only numbers"), ("a.b", "only numbers"),
    ("'a'*3", "only numbers"), ("True", "only numbers"), ("0x10", "only numbers"), ("1j", "only numbers"),
    ("", "no expression"), ("2+", "no expression"), ("1;2", "no expression"), ("\0", "no expression"),
    ("\ud800", "no expression"), ("\u0663+1", "no expression|only numbers"),
    ("(" * 10000 + "1" + ")" * 10000, "too long"), ("__import__('os')", "only numbers"), (5, "text is needed"),
])
def test_what_the_calculator_refuses_is_one_line_soon(expression, reason):
    began = time.process_time()
    said = calculator(expression)
    assert said.startswith("error: ") and "\n" not in said
    assert re.search(reason, said), said
    assert time.process_time() - began < 1


_digits = st.one_of(st.integers(0, 10**6).map(str), st.decimals(0, 1000, places=2).map(str))
# Pairs: what the calculator is asked, and the same with every literal as a Fraction, for Python's own eval.
_arithmetic = st.recursive(
    _digits.map(lambda d: (d, f"F('{d}')")),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(
            lambda t: (f"({t[0][0]} {t[1]} {t[2][0]})", f"F({t[0][1]} {t[1]} {t[2][1]})")),
        st.tuples(inner, st.integers(-3, 3)).map(lambda t: (f"({t[0][0]})**{t[1]}", f"F({t[0][1]})**{t[1]}")),
        inner.map(lambda t: (f"(-{t[0]})", f"(-{t[1]})"))),
    max_leaves=8)


@settings(max_examples=300, deadline=None)
@given(_arithmetic)
def test_the_calculator_equals_exact_fractions(pair):
    asked, exact = pair
    said = calculator(asked)
    if len(asked) > 500 or "at most" in said:
        assert said.startswith("error: too l")
        return
    try:
        value = Fraction(eval(exact, {"F": Fraction}))
    except ZeroDivisionError:
        assert said == "error: division by zero"
        return
    assert Fraction(said.split(" (")[0]) == value


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | st.text("0123456789+-*/%() .eE_", max_size=40))
def test_any_text_gets_one_line(text):
    for tool in (calculator, python_expression):
        said = tool(text)
        assert isinstance(said, str) and said and "\n" not in said


@pytest.mark.parametrize("code, answer", [
    ("sum(x for x in range(1000) if x % 3 == 0 or x % 5 == 0)", "233168"), ("'abc'.upper()[::-1]", "'CBA'"),
    ("{a: b for a, b in zip('ab', range(2))}", "{'a': 0, 'b': 1}"), ("[y for x in [[1, 2], [3]] for y in x]",
    "[1, 2, 3]"),
    ("[(x, y) for x, (y, _) in [(1, (2, 3))]]", "[(1, 2)]"), ("{'b', 'a', 'c'}", "{'a', 'b', 'c'}"),
    ("list({'b', 'a', 'c'})", "['a', 'b', 'c']"), ("str({'b', 'a'})", "\"{'a', 'b'}\""), ("set()", "set()"),
    ("(1,)", "(1,)"),
    ("max(['a', 'bbb'], key=len)", "'bbb'"), ("min([], default=0)", "0"), ("1 < 2 < 3", "True"),
    ("sorted({'b': 1, 'a': 2}.items(), reverse=True)", "[('b', 1), ('a', 2)]"), ("0 and 1 / 0", "0"),
    ("1 if [] else 'no'", "'no'"), ("divmod(-7, 2)", "(-4, 1)"), ("', '.join(['a', 'b'])", "'a, b'"),
    ("None is None", "True"),
    ("{1, 2} & {2, 3}", "{2}"), ("range(10)[2:4]", "range(2, 4)"), ("5 in range(10)", "True"),
    ("[x for x in [1] for x in [x + 1]]", "[2]"),
    ("sum([1, 2], start=3)", "6"), ("list(enumerate('ab', start=1))", "[(1, 'a'), (2, 'b')]"),
    ("'a b'.split(sep=' ')", "['a', 'b']"), ("max({1}, {1, 2})", "{1, 2}"), ("[{1}].index({1})", "0"),
    ("''.join({'b', 'a'})", "'ab'"), ("sorted([2, 1], key=None)", "[1, 2]"), ("5 is not None", "True"),
    ("dict(key=1)", "{'key': 1}"),
])
def test_python_expressions_by_hand(code, answer):
    assert python_expression(code) == answer


@pytest.mark.parametrize("code, answer", [
    ("len('a' * 6000)", "6000"), ("sum([1] * 6000)", "6000"), ("len(4000 * 'ab')", "8000"), ("[] * 20000", "[]"),
    ("len([0] * 4999)", "4999"), ("sum(range(100000))", "4999950000"), ("max(range(9000), key=str)", "999"),
    ("len(sorted(range(4000)))", "4000"), ("len(enumerate('ab' * 1000))", "2000"),
    ("list(zip(range(100000), 'ab'))", "[(0, 'a'), (1, 'b')]"),
    ("len([a[i] for a in [list(range(4000))] for i in range(150)])", "150"),
])
def test_values_of_an_ordinary_size(code, answer):
    assert python_expression(code) == answer


HOSTILE = [
    ("9**9**9", "too large"), ("'a'*10**9", "too large"), ("10**9*'a'", "too large"), ("[0]*10**9", "too large"),
    ("[[[0]*1000]*1000]*1000", "too large"), ("1<<10**9", "too large"), ("[x for x in range(10**9)]", "too large"),
    ("range(10**400)", "too large|OverflowError"), ("round(5, -10**9)", "at most"), ("'a'.center(10**9)", "too large"),
    ("('x'*9999).join(['a']*9999)", "too large"), ("('a'*9999).replace('', 'b'*9999)", "too large"),
    ("'%1000000000d' % 1", "not available"), ("f'{1:1000000000}'", "not available"), ("'{:1000000000}'.format(1)",
    "no method"),
    ("[1 for a in range(100000) for b in range(100000)]", "too much work"),
    ("[a for a in range(100000) for b in range(100000) if 0]", "too much work"),
    ("[a == b for a in [[[0]*90]*90] for b in [[[0]*90]*90] for i in range(100000)]", "too much work"),
    ("zip(*[range(9)]*9)", "not available"),
    ("[0.5 in range(100000) for i in range(1000)]", "too much work"),
    ("[2**9999 // (2**4000+1) for i in range(99999)]", "too large|too much"), ("int('9'*9000)", "ValueError|too large"),
    ("[sorted(list(range(9000))) for j in range(500)]", "too much work"), ("2**9999 * 1.0", "OverflowError"),
    ("(" * 900 + "1" + ")" * 900, "no expression|nested"), ("-" * 1990 + "1", "nested too deeply"),
    ("[" * 10000, "too long"), ("1" + "+1" * 900, "nested too deeply"),
    ("().__class__.__bases__[0].__subclasses__()", "not available"), ("''.__class__()", "no method"),
    ("'{0.__class__}'.format(1)", "no method"), ("__import__('os').system('true')", "cannot be called"),
    ("(lambda: 1)()", "cannot be called"), ("[f() for f in [1]]", "cannot be called"), ("len", "can only be called"),
    ("__builtins__", "not defined"), ("open('/etc/passwd')", "cannot be called"), ("[*range(9)]", "not available"),
    ("(x := 1)", "not available"), ("import os", "no expression"), ("x = 1", "no expression"),
    ("1j", "complex values are not"), ("b'a'", "bytes values are not"),
    ("(-8)**(1/3)", "complex"), ("1/0", "ZeroDivisionError"), ("[][1]", "IndexError"), ("{}['a']", "KeyError"),
    ("{[]}", "TypeError"),
    ("[x for x in 5]", "TypeError"), ("[a for a, b in [(1, 2, 3)]]", "ValueError"), ("max(1, key=eval)",
    "key must be one of"), ("sorted([range(159000)], key=list)", "key must be one of"),
    ("[(await x) for x in [1]]", "no expression|not available"), ("[x async for x in [1]]", "async|no expression"),
    ("1000 is 1000", "use =="), ("[zip(r, r, r, r) for r in [range(2**9998, 2**9998 + 40000)]]", "too large"),
    ("max(range(2**9998, 2**9998 + 10000), key=str)", "too large"), ("range(9)[::2**9000]", "too large"),
    ("enumerate(range(9000), 2**9999)", "too large"), ("enumerate(range(9000), start=2**9999)", "too large"),
    (f"zip({', '.join(['range(9000)'] * 40)})", "too large"), ("sorted(range(159000), key=str)", "too large"),
    ("[max(range(159000), key=str) for i in range(99)]", "too much work"),
    (f"{{1}}.union({', '.join(f'range({i * 10**6}, {i * 10**6 + 159000})' for i in range(30))})", "too large"),
    ("sum([[]] * 9000, [0] * 9000)", "only numbers"),
    ("[{k * (2**61 - 1) for k in range(4900)} for i in range(99)]", "too much work"),
]


@pytest.mark.parametrize("code, reason", HOSTILE)
def test_a_hostile_expression_is_one_line_in_little_time(code, reason):
    began = time.process_time()
    said = python_expression(code)
    assert said.startswith("error: ") and "\n" not in said and re.search(reason, said), said
    assert time.process_time() - began < 5  # at most half a second on an idle machine


def test_hostile_expressions_take_little_memory():
    program = ("import json, resource, sys; from hybrid_rlhf.environments.builtin.expressions import *\n"
               "size = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
               "given, before = json.load(sys.stdin), size()\n"
               "[python_expression(code) for code in given]; print(size() - before)")
    done = subprocess.run([sys.executable, "-c", program], input=json.dumps([code for code, _ in HOSTILE]),
                          capture_output=True, text=True, check=True)
    assert int(done.stdout) * (1 if sys.platform == "linux" else 1 / 1024) < 30_000  # KiB


_numbers = st.one_of(st.integers(-50, 50), st.floats(-9, 9).map(lambda x: round(x, 2)), st.booleans()).map(
    lambda value: f"({value!r})")
_texts = st.text("ab c,1", max_size=5).map(repr)
_lists = st.lists(_numbers, max_size=4).map(lambda v: f"[{', '.join(v)}]")


def _filled(*templates: str):
    """Texts made of a template with fields a and b."""
    return lambda inner: st.tuples(st.sampled_from(templates), inner, inner, st.sampled_from(
        ["+", "-", "*", "/", "//", "%", "<", "<=", "==", "!=", "in", "and", "or"])).map(
        lambda t: t[0].format(a=t[1], b=t[2], op=t[3]))


_expressions = st.recursive(_numbers | _texts | _lists, _filled(
    "({a} {op} {b})", "(not {a})", "-{a}", "({a} if {b} else {a})", "[{a}, {b}]", "({a}, {b})", "{{{a}: {b}}}",
    "{{{a}, {b}}}", "{a}[{b}]",
    "{a}[:{b}]", "{a}[::-1]", "len({a})", "sum({a})", "min({a}, {b})", "max({a})", "sorted({a})", "abs({a})",
    "round({a})", "round({a}, 1)",
    "int({a})", "float({a})", "str({a})", "bool({a})", "list({a})", "tuple({a})", "divmod({a}, {b})", "any({a})",
    "all({a})", "ord({a})",
    "[x for x in {a} if x {op} {b}]", "{{x for x in {a}}}", "{{x: {b} for x in {a}}}", "sum(x for x in {a})",
    "[x {op} y for x in {a} for y in {b}]",
    "[x + y for x, y in zip({a}, {b})]", "{a}.upper()", "{a}.split({b})", "{a}.replace({b}, {a})", "{a}.join({b})",
    "{a}.count({b})",
    "{a}.startswith({b})", "{a}.find({b})", "{a}.index({b})", "{a}.get({b}, {a})", "list({a}.items())",
    "list(range(len({a})))",
    "list(enumerate({a}))", "list(reversed({a}))", "set({a})", "dict({a})", "({a} < {b} < {a})",
    "{a}.strip().title()"), max_leaves=6)
# The same with each part of the kind that belongs there, so that nearly all of them have a value.
_OPERATORS = ["+", "-", "*", "/", "//", "%", "<", "<=", ">", ">=", "==", "!=", "and", "or"]


def _of(*templates: str):
    """Texts made of a template with a number n, m, a text s, t and a list of numbers v, w."""
    return st.sampled_from(templates).flatmap(lambda template: st.fixed_dictionaries(
        {name: kind for name, kind in _KINDS.items() if f"{{{name}}}" in template}).map(
        lambda parts: template.format(**parts)))


_number = st.deferred(lambda: _numbers | _numbers | st.sampled_from(_OPERATORS).flatmap(
    lambda op: _of(f"({{n}} {op} {{m}})")) | _of(
    "len({s})", "len({v})", "sum({v})", "abs({n})", "round({n}, 1)", "int({n})", "float({n})", "min({n}, {m})",
    "max({n}, {m})",
    "-{n}", "(not {n})", "({n} if {m} else {n})", "divmod({n}, {m})[0]", "{v}[0]", "{v}[-1]", "({n} in {v})",
    "({n} not in {v})", "{s}.count({t})",
    "{s}.find({t})", "({s} < {t})", "({s} in {t})", "({v} == {w})", "sum(x for x in {v} if x > {n})",
    "({n} < {m} <= {n})", "any({v})", "all({v})",
    "bool({s})", "min({v}, default={n})", "{{1: {n}}}.get({m}, {n})", "({n})**2", "(int({n}) & 6 | 9 ^ 3)",
    "(int({n}) << 2 >> 1)"))
_text = st.deferred(lambda: _texts | _texts | _of(
    "({s} + {t})", "({s} * 3)", "{s}[1:]", "{s}[::-1]", "{s}.upper()", "{s}.title()", "{s}.strip()",
    "{s}.replace({t}, 'z')", "{s}.join({t})",
    "{s}.center(9, '.')", "{s}.zfill(4)", "str({n})", "str({v})", "({s} or {t})", "max({s}, {t})",
    "', '.join(str(x) for x in {v})"))
_list = st.deferred(lambda: _lists | _lists | _of(
    "({v} + {w})", "({v} * 2)", "{v}[1:]", "{v}[::2]", "sorted({v})", "sorted({v}, key=abs, reverse=True)",
    "list(range(len({s})))",
    "[x * {n} for x in {v}]", "[x + y for x in {v} for y in {w} if x != y]", "[x - y for x, y in zip({v}, {w})]",
    "[i * x for i, x in enumerate({v})]",
    "[{n}, {m}]", "list(reversed({v}))", "[len(x) for x in {s}.split({t} or ' ')]",
    "[v for k, v in {{1: {n}, 2: {m}}}.items()]",
    "list({{x: x + 1 for x in {v}}})", "[x for x in {v} if {n}]"))
_KINDS = {"n": _number, "m": _number, "s": _text, "t": _text, "v": _list, "w": _list}
_BY_PYTHON = {name: getattr(builtins, name) for name in FUNCTIONS}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # what Python's compiler says of (1)[2]
@settings(max_examples=1000, deadline=None)
@given(_number | _text | _list | _expressions)
def test_python_expressions_equal_pythons_own_eval(code):
    said = python_expression(code)
    if said.startswith("error: ") and not said.split(" ")[1].endswith("Error:"):
        return  # refused: the tool has bounds and less than all of Python
    try:
        value = eval(code, {"__builtins__": _BY_PYTHON})
    except Exception:
        value = None
    if value is None:  # of two mistakes another one may be met first
        assert said.startswith("error: "), (code, said)
        return
    if "nan" in said:
        assert said == repr(value)
        return
    found = eval(said, {"__builtins__": {"set": set}, "inf": float("inf")}) if not said.startswith("error") else said
    if isinstance(value, str) and "{" in value:  # the tool writes a set in order, Python as it comes
        found, value = sorted(found), sorted(value)
    assert found == value and type(found) is type(value), (code, said, value)


@pytest.mark.parametrize("name", ["calculator", "python_expression"])
def test_a_tool_has_what_its_schema_is_made_of(name):
    tool = BUILTINS[name]
    (parameter,) = get_type_hints(tool).keys() - {"return"}
    assert tool.__name__ == name and get_type_hints(tool) == {parameter: str, "return": str}
    assert re.search(rf"\n\nArgs:\n    {parameter}: \w", inspect.getdoc(tool))  # from Python 3.13 on none is indented


@pytest.mark.parametrize("operator", [*_OPERATORS, "**", "&", "|", "^", "<<", ">>", "is", "is not", "in", "not in"])
def test_every_operator_equals_pythons_on_all_pairs_of_a_few_values(operator):
    values = ["-7", "0", "2", "2.5", "True", "'a'", "'ab'", "[2]", "[2, 0]", "(1,)", "{2}", "{2, 3}", "{0: 1}", "None"]
    num_values = 0
    for left, right in itertools.product(values, values):
        said = python_expression(f"{left} {operator} {right}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what Python's compiler says of 2 is 0
                value = eval(f"{left} {operator} {right}")
        except Exception as error:
            said_class = type(error).__name__
        else:
            said_class, num_values = repr(value), num_values + ("error" not in said)
        assert said == said_class or said.startswith(f"error: {said_class}") or re.search(
            "not available|only for None|complex|%", said), (left, right, said, said_class)
    assert num_values >= 5
