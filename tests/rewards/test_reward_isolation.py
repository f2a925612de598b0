"""reward.isolate: the same scores from a process of its own, and one line for whatever becomes of that process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.rewards import BadAnswer, part_scores
from hybrid_rlhf.rewards.functions import handed_over, open_functions
from hybrid_rlhf.rewards.user_code import IsolatedFunction
from tests.factories.rollouts import rollout

FILE = """
import asyncio, fractions, os, re, signal, time
from pathlib import Path

print("noise on standard output")

def lengths(completions, answer, factor=1.0):
    return [None if a is None else len(c) * factor for c, a in zip(completions, answer)]

async def awaits(completions, **_):
    await asyncio.sleep(0)
    return tuple(fractions.Fraction(len(c), 8) for c in completions)

class Counter:
    calls = 0

    def __call__(self, completions, **_):
        self.calls += 1
        return [self.calls] * len(completions)

counts = Counter()

def hangs_at_blue(completions, **_):
    Path(__file__).with_suffix(".pids").open("a").write(f"{os.getpid()} ")
    while "blue cat" in completions:
        try:
            time.sleep(60)
        except BaseException:
            pass
    return [0.0] * len(completions)

def dies_at_sun(completions, how="SIGSEGV", **_):
    if "sun" in completions:
        os._exit(7) if how == "exit" else os.kill(os.getpid(), getattr(signal, how))
    return [0.0] * len(completions)

def raises_at_blue(completions, **_):
    return [1 / (c != "blue cat") for c in completions]

def leaves(completions, **_):
    raise SystemExit(0)

def forks(completions, **_):
    if os.fork():
        os.wait()
    return [1.0] * len(completions)

def answers(completions, what, **_):
    return [eval(what), *([0.0] * (len(completions) - 1))]
"""


@pytest.fixture
def pay(tmp_path) -> Path:
    path = tmp_path / "pay.py"
    path.write_text(FILE)
    return path


def source(path: Path, name: str, timeout: float = 20.0, **options):
    return open_functions([f"{path}:{name}"], {name: options} if options else {}, timeout, isolate=True)[0]


def test_scores_are_those_of_the_same_functions_in_this_process(pay):
    names = ["lengths", "awaits", "counts"]
    given, made = [f"{pay}:{name}" for name in names], rollout(prompt=["a"] * 3, answer=["x", None, "z"])
    apart = open_functions(given, {"lengths": {"factor": 0.5}}, 20.0, isolate=True)
    here = open_functions(given, {"lengths": {"factor": 0.5}}, 20.0)
    assert all(isinstance(s.function, IsolatedFunction) for s in apart)
    for first, second in zip(apart, here, strict=True):
        assert part_scores(first, made).tolist() == pytest.approx(part_scores(second, made).tolist(), nan_ok=True)
    assert part_scores(apart[0], made)[[0, 2]].tolist() == [1.5, 1.5]  # "red" and "sun", halved
    assert part_scores(apart[2], made).tolist() == [2.0] * 3  # the process keeps what the file keeps


def test_a_call_that_nothing_interrupts_is_killed_and_the_culprit_named(pay):
    began = time.monotonic()
    with pytest.raises(BadAnswer, match=r"no answer within 0.5 s .* for response 1 of 3: 'blue cat'"):
        part_scores(source(pay, "hangs_at_blue", 0.5), rollout())
    assert time.monotonic() - began < 30
    pids = set(map(int, pay.with_suffix(".pids").read_text().split()))
    assert len(pids) == 2 and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize("how, said", [("SIGSEGV", "SIGSEGV"), ("exit", "exit code 7")])
def test_a_function_that_ends_its_process_is_one_line(pay, how, said):
    paying = source(pay, "dies_at_sun", how=how)
    with pytest.raises(BadAnswer, match=rf"dies_at_sun: ended its process \({said}\) for response 2 of 3: 'sun'"):
        part_scores(paying, rollout())
    assert part_scores(paying, rollout(("red", "cat"))).tolist() == [0.0, 0.0]  # in a new process


@pytest.mark.parametrize("name, said", [
    ("raises_at_blue", r"raised ZeroDivisionError: .* \(pay.py line 38\) for response 1 of 3: 'blue cat'"),
    ("leaves", "raised SystemExit: 0 .* for response 0 of 3"),
])
def test_what_is_raised_is_said_as_it_is_in_this_process(pay, name, said):
    for isolate in (True, False):
        with pytest.raises(BadAnswer, match=said):
            part_scores(open_functions([f"{pay}:{name}"], {}, 20.0, isolate)[0], rollout())


@pytest.mark.parametrize("what, said", [("10**400", "score 1000"), ("'1.0'", "score '1.0'"),
                                        ("float('nan')", "score nan"), ("object()", ".*<object object at")])
def test_an_answer_that_is_no_score_is_said_as_it_is_in_this_process(pay, what, said):
    for isolate in (True, False):
        paying = open_functions([f"{pay}:answers"], {"answers": {"what": what}}, 20.0, isolate)[0]
        with pytest.raises(BadAnswer, match=rf"{said}.* for response 0, where a finite number or None is needed"):
            part_scores(paying, rollout())


def test_a_child_that_comes_back_from_the_function_is_ended(pay, capfd):
    assert part_scores(source(pay, "forks"), rollout()).tolist() == [1.0] * 3
    assert capfd.readouterr().err.count("reward source forks forks, and the child has come back") == 1


def test_a_file_that_cannot_be_run_or_ends_its_process_is_one_line_at_the_start(tmp_path):
    for text, said in (("\nimport no_such_thing", "bad.py line 2 cannot be run: ModuleNotFoundError"),
                       ("import os\nos.kill(os.getpid(), 11)", r"bad.py ended its process \(SIGSEGV\)"),
                       ("x = (", "bad.py line 1 cannot be run: SyntaxError")):
        (tmp_path / "bad.py").write_text(text)
        with pytest.raises(UserError, match=said) as caught:
            source(tmp_path / "bad.py", "f")
        assert "\n" not in str(caught.value)


def test_a_function_of_a_module_is_imported_there_and_one_that_is_nowhere_is_refused(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text("class Of:\n    @staticmethod\n    def pay(completions, **_):\n"
                                             "        return [float(len(c)) for c in completions]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from own_rewards import Of

    with handed_over({"pay": Of.pay, "here": lambda completions: [0.0] * len(completions)}):
        assert part_scores(open_functions(["python:pay@1"], {}, 20.0, True)[0], rollout()).tolist() == [3, 8, 3]
        with pytest.raises(UserError, match=r"reward\.isolate: here is not a function that another process can import"):
            open_functions(["python:here@1"], {}, 20.0, True)
