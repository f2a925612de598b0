"""The built-in reward functions on numbers worked out by hand."""

from __future__ import annotations

import sys
import time
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.rewards.builtin import (
    BUILTINS,
    ExactMatch,
    Format,
    LengthPenalty,
    MathMatch,
    NumericMatch,
    RepetitionPenalty,
    accuracy_reward,
    last_number,
)
from hybrid_rlhf.training.reward_sources import RewardConfig


@pytest.mark.parametrize("text, number", [
    ("He has 3 + 4 = 7 apples.", "7"), ("so it costs $1,234.50.", "1234.50"), ("#### 72", "72"),
    ("#### -1,000", "-1000"),
    ("-$5", "-5"), ("$-5", "-5"), ("\u20ac 12", "12"), ("10-5", "5"), ("10 - 5", "5"), ("(3)-2", "2"), ("x = -2", "-2"),
    ("\u22122.5", "-2.5"), (".5 cups", ".5"), ("1,2,3", "3"), ("2024,100", "100"), ("12,345", "12345"),
    ("1,234,56", "56"),
    ("5km", "5"), ("50%", "50"), ("1e3", "1000"), ("\\boxed{42}", "42"), ("**18**.", "18"), ("+7", "7"), ("a-7", "7"),
    ("007", "7"), ("1,234,567.89", "1234567.89"), ("3.", "3"), ("answer:9\n\n", "9"), ("1e9999", "9999"),
])
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none at all", "$", "-", "1\u0663"[1:]])
def test_a_text_without_a_number_has_none(text):
    assert last_number(text) is None


@given(st.decimals(min_value=-10**12, max_value=10**12, places=2), st.sampled_from(["", "$", "\u20ac", "\u00a3"]),
       st.booleans(), st.text(alphabet="abc .\n", max_size=8), st.sampled_from(["", ".", " apples.", "%", "!\n", "\n"]))
def test_whatever_way_a_number_is_written_it_is_read_back(value, currency, has_commas, before, after):
    digits = f"{abs(value):,}" if has_commas else f"{abs(value)}"
    text = f"3 and 4: {before} {'-' if value < 0 else ''}{currency}{digits}{after}"
    assert last_number(text) == value


def test_numeric_match_by_hand():
    said = ["so 1,200 it is", "1200.0", "the answer is 12", "no idea", [{"role": "assistant", "content": "$1200"}], "1"]
    wanted = ["5 * 240 = 1200\n#### 1,200", 1200, 1200.0, "1200", "1200", None]
    assert NumericMatch()(completions=said, answer=wanted) == [1, 1, 0, 0, 1, None]
    assert NumericMatch(column="gold", correct=2, wrong=-1)(completions=["1"], gold=["1.5"]) == [-1]
    assert NumericMatch(tolerance=0.01)(completions=["99", "98.9"], answer=[100, 100]) == [1, 0]
    assert NumericMatch(marker="####")(completions=["7", "7 #### 8", "#### 7 really"], answer=[7, 7, 7]) == [0, 0, 1]


MATHS = [  # completion, reference, whether it is right
    (r"My answer is \boxed{\frac{1}{3}}", r"\frac{1}{3}", 1), (r"\boxed{0.5}", "$\\frac{1}{2}$", 1),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{3}", 0), (r"so $x = 3$, \boxed{4}", "4", 1), ("72", "#### 72", 0),
    (r"the final answer is $72$.", "#### 72", 1), (r"\boxed{(1,2)}", "$(1, 2)$", 1), ("no idea", "7", 0),
    (r"\boxed{\{3, 1\}}", r"$\{1, 3\}$", 1), (r"\boxed{x^2+2x+1}", "$(x+1)^2$", 1), (r"\boxed{5}", "nothing", None),
    (r"<think>\boxed{1}</think> \boxed{2}", "2", 0), (r"\boxed{10\text{ cm}}", "10", 1),
    (r"\boxed{__import__('os').system('false')}", "2", 0)]


def test_math_match_is_trl_s_accuracy_reward(caplog):
    pytest.importorskip("math_verify")
    texts, references, expected = zip(*MATHS, strict=True)
    assert MathMatch(column="solution")(list(texts), solution=list(references)) == list(expected)
    trl = pytest.importorskip("trl.rewards")
    said = [[{"role": "assistant", "content": text}] for text in texts]
    assert trl.accuracy_reward(said, list(references)) == list(expected)
    assert accuracy_reward(said, solution=list(references)) == list(expected)
    after = MathMatch(marker="</think>")([said[11], said[0]], answer=["2", "2"])
    assert after == trl.reasoning_accuracy_reward([said[11], said[0]], ["2", "2"]) == [1.0, 0.0]
    assert MathMatch(wrong=-1)([r"\boxed{1}", "?"], answer=[None, "1"]) == [None, -1]
    assert not caplog.messages


def test_a_comparison_that_takes_too_long_is_wrong_and_said_once(caplog, monkeypatch):
    grader = pytest.importorskip("math_verify")
    monkeypatch.setattr(grader, "verify", lambda *_, **__: [time.sleep(0.01) for _ in range(500)] and True)
    slow = MathMatch(seconds=0.1)
    assert slow([r"\boxed{1}"] * 2, answer=["1", "1"]) == [0, 0]
    assert caplog.messages == ["warning: math_match takes more than 0.1 s for an answer; such answers count as wrong"]


def test_math_match_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "math_verify.parser", raising=False)
    with pytest.raises(UserError, match=r"math_match: .*pip install 'hybrid-rlhf\[math\]'"):
        MathMatch()


@pytest.mark.parametrize(("text", "score"), [
    ("<think>\nso\n</think>\n4", 1), ("<think></think>", 1), ("<think>so 4", 0), ("so</think> 4", 0),
    (" <think>a</think>", 0), ("<think>a<think>b</think> c", 0), ("<think>a</think> <think>b</think>", 0),
    ("<think>a</think>b</think>", 1)])
def test_format_without_options_is_trl_s_think_format(text, score):
    assert Format()([text]) == [score]
    trl = pytest.importorskip("trl.rewards")
    assert trl.think_format_reward([[{"role": "assistant", "content": text}]]) == [score]


def test_a_reference_without_a_number_and_a_column_that_is_not_there_are_errors():
    with pytest.raises(ValueError, match="no number in column answer: 'many'"):
        NumericMatch()(completions=["1"], answer=["many"])
    with pytest.raises(ValueError, match="no column answer; there are prompts"):
        ExactMatch()(completions=["1"], prompts=["x"])


def test_exact_match_by_hand():
    assert ExactMatch()(completions=[" red\n", "Red", "red."], answer=["red"] * 3) == [1, 0, 0]
    assert ExactMatch(ignore_case=True)(completions=["RED"], answer=["red"]) == [1]
    marked = ExactMatch(marker="Answer:")
    assert marked(completions=["I think. Answer: B", "B"], answer=["why? Answer: B", "B"]) == [1, 0]


def test_the_length_penalty_falls_linearly_over_its_buffer():
    penalty = LengthPenalty(max_tokens=10, buffer=4, penalty=2.0)
    assert penalty(completion_ids=[[1] * n for n in (1, 6, 7, 8, 10, 15)]) == [0, 0, -0.5, -1.0, -2.0, -2.0]


def test_the_repetition_penalty_counts_n_grams():
    # a b a b a: (ab)(ba)(ab)(ba): 2 of 4 distinct; "the the the": 1 of 2
    penalty = RepetitionPenalty(n=2, penalty=3.0)
    assert penalty(completions=["a b a b a", "The the THE", "a b c", "one", ""]) == [-1.5, -1.5, 0, 0, 0]


def test_the_format_is_of_the_whole_completion_or_anywhere():
    pattern = "<think>.*</think>\\s*\\d+"
    said = ["<think>a\nb</think> 12", "<think></think> 12 or so", "12"]
    assert Format(pattern)(completions=said) == [1, 0, 0]
    assert Format(pattern, is_whole=False, correct=0.5, wrong=-1)(completions=said) == [0.5, 0.5, -1]


def test_every_builtin_is_in_the_guide_and_in_the_help():
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "rewards.md").read_text(encoding="utf-8")
    for name in BUILTINS:
        assert f"`builtin:{name}" in guide or f"`{name}" in guide, name
        assert name in RewardConfig.__doc__, name
