"""Tasks of reasoning-gym as environment and as reward function."""

from __future__ import annotations

import inspect
import random
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.environments.builtin import BUILTINS
from hybrid_rlhf.rewards.functions import open_functions
from hybrid_rlhf.rewards.reasoning_task import EVALUATES, INSTRUCTION, ReasoningTask, final_answer, task_rows


def gym(*given, **options):
    return BUILTINS["reasoning_gym"](*given, **options)


@pytest.mark.parametrize("text, tag, answer", [
    ("<answer> 5 </answer>", "answer", "5"), ("so <answer>1</answer> no, <answer>2\n3</answer>.", "answer", "2\n3"),
    ("<answer>1 <answer>2</answer>", "answer", "2"), ("<answer>1</answer> and </answer>", "answer", "1"),
    ("5", "answer", None), ("<answer>5", "answer", None), ("<answer></answer>", "answer", ""), (" 5\n", None, "5"),
    ("<a.b>5</a.b>", "a.b", "5"), ("<axb>5</axb>", "a.b", None),
])
def test_the_answer_is_what_stands_in_the_last_pair_of_tags(text, tag, answer):
    assert final_answer(text, tag) == answer


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.delitem(sys.modules, "reasoning_gym.factory", raising=False)
    with pytest.raises(UserError, match=r"pip install reasoning-gym, or hybrid-rlhf\[gym\]"):
        gym("chain_sum")
    with pytest.raises(UserError, match=r"pip install reasoning-gym"):
        open_functions(["builtin:reasoning_gym"], {"reasoning_gym": {"task": "chain_sum"}}, 60)


@pytest.mark.parametrize("task", sorted(EVALUATES))
def test_a_task_that_would_run_the_answer_is_refused_whether_the_package_is_there_or_not(task):
    with pytest.raises(UserError, match=r"running it as Python code.*allow_eval"):
        gym(task)


def test_an_episode_is_one_answer_scored_by_the_task():
    pytest.importorskip("reasoning_gym")
    environment = gym("chain_sum", {"seed": 3, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    asked = environment.reset(index=4, prompt=[{"role": "user", "content": "Hello."}])
    left, sign, right = re.search(r"(\d) ([+-]) (\d) =", asked).groups()
    total = int(left) + int(right) if sign == "+" else int(left) - int(right)
    assert asked.startswith("\n") and asked.endswith(INSTRUCTION)
    for text, reward in ((f"so <answer>{total}</answer>", 1.0), (f"{total}", 0.0), ("", 0.0)):
        added, is_over, score = environment.step([{"role": "assistant", "content": text}])
        assert (added, is_over) == ([], True) and score == pytest.approx(reward, abs=0.02)
    assert environment.reset(index=4, prompt=f"Please: {asked}") is None


def test_rows_the_environment_and_the_reward_function_agree():
    pytest.importorskip("reasoning_gym")
    settings = {"seed": 7, "min_digits": 2}
    random.seed(1)
    rows = task_rows("chain_sum", 4, settings, first=2)
    random.seed(2)
    assert rows == task_rows("chain_sum", 4, settings, first=2) and [row["index"] for row in rows] == [2, 3, 4, 5]
    environment = gym("chain_sum", settings)
    said = [f"<answer>{row['answer']}</answer>" for row in rows]
    for row, text in zip(rows, said, strict=True):
        assert environment.reset(**row) is None  # its prompt holds the question
        assert environment.step([{"role": "assistant", "content": text}])[2] == 1
    [source] = open_functions(["builtin:reasoning_gym"], {"reasoning_gym": {"task": "chain_sum",
    "settings": settings}}, 60)
    columns = {name: [row[name] for row in rows] for name in ("index", "answer")}
    assert source.function(completions=said, **columns) == [1, 1, 1, 1]
    assert source.function(completions=["no"] * 2, index=[None, 3]) == [None, pytest.approx(0, abs=0.02)]


@pytest.mark.parametrize("use, message", [
    (lambda: gym("chain_sums"), r"no task 'chain_sums' \(did you mean chain_sum\?\)"),
    (lambda: gym("chain_sum", {"colour": 1}), r"cannot be made .*colour"),
    (lambda: gym("chain_sum", {"min_terms": 9, "max_terms": 2}), "cannot be made"),
    (lambda: gym("composite"), "cannot be made"), (lambda: gym("chain_sum").reset(), "index is None"),
    (lambda: gym("chain_sum").reset(index="3"), "index is '3'"),
    (lambda: gym("chain_sum").reset(index=-1), "index is -1"),
    (lambda: gym("chain_sum").reset(index=0, answer="no"), "the data has 'no'; give the settings"),
])
def test_what_cannot_be_used_is_one_line(use, message):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(UserError, match=message) as caught:
        use()
    assert "\n" not in str(caught.value)


def test_the_first_failure_of_a_tasks_own_scoring_is_said(monkeypatch, caplog):
    class Failing:
        def score_answer(self, answer, entry):
            return 1.0 if answer == "4" else 1 / int(answer)

    factory = SimpleNamespace(DATASETS={"sums": None}, create_dataset=lambda name, **settings: Failing())
    monkeypatch.setitem(sys.modules, "reasoning_gym", ModuleType("reasoning_gym"))
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    task = ReasoningTask("sums")
    assert [task.score(f"<answer>{text}</answer>", {}) for text in ("4", "0", "x")] == [1, 0, 0]
    assert [record.getMessage() for record in caplog.records] == [
        "warning: the scoring of reasoning_gym's sums fails on an answer (division by zero); such answers are worth 0"]


def test_the_tasks_that_run_an_answer_are_those_that_the_packages_source_shows():
    pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    runs = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(\w*answer\b")
    texts = {name: inspect.getsource(sys.modules[kind.__module__]) for name, (kind, _) in DATASETS.items()}
    assert {name for name, text in texts.items() if runs.search(text)} == EVALUATES
