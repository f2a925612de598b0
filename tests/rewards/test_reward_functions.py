"""Python functions as reward sources: what they are called with, how they are mixed, and every way to fail."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.rewards import BadAnswer, BadScore, checked_scores
from hybrid_rlhf.rewards.functions import FunctionSource
from hybrid_rlhf.rewards.mixture import Mixture, Part, Scale
from tests.factories.rollouts import rollout

ROOT = Path(__file__).resolve().parents[2]


def lengths(completions, **_):
    return [len(c) for c in completions]


def test_a_function_gets_lists_of_prompts_completions_token_ids_and_every_column():
    seen = {}

    def keep(**given):
        seen.update(given)
        return [0.0] * 3

    asked = [{"role": "user", "content": "q"}]
    FunctionSource("keep", keep, {"bonus": 2}).score(rollout(prompt=["a", "b", asked], answer=["1", "2", None]))
    assert seen == {"prompts": ["a", "b", asked], "answer": ["1", "2", None], "bonus": 2,
                    "completions": ["red", "blue cat", [{"role": "assistant", "content": "sun"}]],
                    "completion_ids": [[7], [7, 7], [7, 7, 7]]}


def test_a_function_without_keywords_gets_those_it_names_and_a_missing_column_is_told_at_the_start():
    def named(completions, answer, bonus=1.0):
        return [float(c == a) + bonus for c, a in zip(completions, answer, strict=True)]

    source = FunctionSource("named", named)
    made = rollout(prompt=["a"] * 3, answer=["red", "red", "sun"], other=[1, 2, 3])
    assert checked_scores(source, made).tolist() == [2.0, 1.0, 2.0]
    source.check_columns(["answer", "other"])
    with pytest.raises(UserError, match=r"named needs a column answer, and the data has answers \(did you mean ans"):
        source.check_columns(["answers"])


def test_async_functions_are_awaited_together_in_a_running_loop_and_out_of_one():
    async def slow(completions, **_):
        async def one(text):
            await asyncio.sleep(0.05)
            return len(text)

        return await asyncio.gather(*(one(c) for c in completions))

    source = FunctionSource("slow", slow)
    assert checked_scores(source, rollout()).tolist() == [3.0, 8.0, 3.0]

    async def notebook():
        return checked_scores(source, rollout()).tolist()

    assert asyncio.run(notebook()) == [3.0, 8.0, 3.0]


def test_the_weighted_sum_by_hand_with_a_skip_and_a_scale():
    def some(completions, **_):
        return [1.0, None, 3.0]

    mixture = Mixture([Part(FunctionSource("lengths", lengths), 0.5, Scale(1.0, 2.0)),
                       Part(FunctionSource("some", some), -2.0)])
    made = rollout()
    made.scores = checked_scores(mixture, made)
    # (3-1)/2*.5 - 2*1, (8-1)/2*.5, (3-1)/2*.5 - 2*3
    assert made.scores.tolist() == [-1.5, 1.75, -5.5]
    found = made.metrics().compute()
    assert found["rewards/some/mean"] == 2.0 and found["rewards/some/std"] == 1.0  # of the two that it scored
    assert found["rewards/lengths/mean"] == pytest.approx(14 / 3)
    assert found["rewards/lengths/std"] == pytest.approx(math.sqrt(50 / 9), rel=1e-6)


def test_in_a_sum_the_bound_is_that_of_the_model_s_part_and_what_it_moves_is_counted():
    mixture = Mixture([Part(FunctionSource("lengths", lengths), 2.0, Scale(1.0, 2.0, 3.0)),
                       Part(FunctionSource("marks", lambda completions, **_: [70.0, 0.0, 100.0]))])
    made = rollout()
    made.scores = checked_scores(mixture, made)
    # lengths 3, 8, 3 on the scale: 1, 3.5 (paid 3), 1; the marks are nobody's deviations and stay whole
    assert made.scores.tolist() == [72.0, 6.0, 102.0]
    assert made.metrics().compute()["score/clip_fraction"] == pytest.approx(1 / 3)


def test_a_source_that_is_not_paid_for_says_how_far_it_goes_with_what_is():
    """lengths 3, 8, 3 are paid for; of the marks the first and the last go with them (deviations -5/3, 10/3, -5/3 and
    -1, 2, -1: a correlation of 1), others (1, None, 3) are of equal lengths, and none says anything."""
    told = [Part(FunctionSource("marks", lambda **_: [1.0, 4.0, 1.0]), 0.0),
            Part(FunctionSource("against", lambda **_: [0.0, -1.0, 5.0]), 0.0),
            Part(FunctionSource("some", lambda **_: [1.0, None, 3.0]), 0.0),
            Part(FunctionSource("flat", lambda **_: [7.0, 7.0, 7.0]), 0.0)]
    made = rollout()
    made.scores = checked_scores(Mixture([Part(FunctionSource("lengths", lengths), 0.5), *told]), made)
    found = made.metrics().compute()
    assert found["rewards/marks/correlation"] == pytest.approx(1.0)
    # deviations of against from 4/3: -4/3, -7/3, 11/3; products with -5/3, 10/3, -5/3 sum to -35/3
    expected = (-35 / 3) / math.sqrt((50 / 3) * (186 / 9))
    assert found["rewards/against/correlation"] == pytest.approx(expected)
    assert found["rewards/some/max"] == 3.0 and "rewards/lengths/max" not in found  # of what is not paid for alone
    assert not {f"rewards/{name}/correlation" for name in ("some", "flat", "lengths")} & found.keys()
    assert (made + made).metrics().compute()["rewards/against/correlation"] == pytest.approx(expected)


def test_a_sum_that_leaves_the_numbers_is_an_error_and_not_the_largest_number():
    mixture = Mixture([Part(FunctionSource("huge", lambda **_: [1.0, 1e38, 2.0]), 1e30)])
    with pytest.raises(BadAnswer, match="score inf for response 1"):
        checked_scores(mixture, rollout())


def test_a_response_that_every_source_skips_is_an_error():
    mixture = Mixture([Part(FunctionSource("some", lambda **_: [1.0, None, 3.0]))])
    with pytest.raises(BadAnswer, match="response 1 was skipped by every source and has no score: 'blue cat'"):
        checked_scores(mixture, rollout())


def fails_at_blue(completions, **_):
    return [{"red": 1}.get(c) or 1 / (not c.startswith("blue")) for c in completions]


def hangs_at_blue(completions, **_):
    while any("blue" in c for c in completions):
        try:
            time.sleep(0.01)
        except Exception:  # as people write it
            continue
    return [0.0] * len(completions)


def waits_on(completions, **_):
    for _ in range(3):
        with contextlib.suppress(BaseException):  # it swallows what ends other functions
            time.sleep(0.25)
    return [0.0] * len(completions)


def never_gives_up(completions, **_):
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            continue


def switches_it_off(completions, **_):
    signal.setitimer(signal.ITIMER_REAL, 0)
    time.sleep(0.3)
    return [0.0] * len(completions)


async def awaits_for_ever(completions, **_):
    await asyncio.sleep(0 if "blue cat" not in completions else 99)
    return [0.0] * len(completions)


def backtracks(completions, **_):
    return [float(bool(re.match(r"(a+)+$", "a" * 40 + "b" if c == "sun" else c))) for c in completions]


class Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __str__


def raises_unsayable(**_):
    raise Unsayable


def raises_generator_exit(**_):
    raise GeneratorExit


NUMBER = "where a finite number or None is needed"


@pytest.mark.parametrize("function, message", [
    (fails_at_blue, r"raised ZeroDivisionError: .* \(test_reward_functions.py line \d+\) for response 1 of 3: 'blue c"),
    (hangs_at_blue, "no answer within 0.2 s .* for response 1 of 3: 'blue cat'"),
    (awaits_for_ever, "no answer within 0.2 s .* for response 1 of 3: 'blue cat'"),
    (backtracks, "no answer within 0.2 s .* for response 2 of 3: 'sun'"),
    (waits_on, "no answer within 0.2 s .* for response 0 of 3: 'red'"),
    (switches_it_off, "no answer within 0.2 s .* for response 0 of 3: 'red'"),
    (lambda **_: [0.0, float("nan"), 1.0], f"score nan for response 1, {NUMBER}: 'blue cat'"),
    (lambda **_: [0.0, 1.0, float("-inf")], f"score -inf for response 2, {NUMBER}: 'sun'"),
    (lambda **_: torch.tensor([0.0, 1.0, float("inf")]), "score inf for response 2"),
    (lambda **_: [0.0, 10**400, 1.0], f"score 1000+ for response 1, {NUMBER}: 'blue cat'"),  # no float is as large
    (lambda **_: [0.0, 1.0], r"2 scores for 3 responses \(response 2 is the first without"),
    (lambda **_: [0.0] * 4, r"4 scores for 3 responses \(response 3 is"),
    (lambda **_: ["0.5", 1.0, 1.0], f"score '0.5' for response 0, {NUMBER}: 'red'"),
    (lambda **_: "abc", r"answered 'abc' \(str\) for responses 0 to 2; a list of numbers"),
    (lambda **_: None, r"answered None \(NoneType\)"),
    (lambda **_: [10**400, 1.0, 1.0], f"score 1000.* for response 0, {NUMBER}: 'red'"),
    (lambda **_: [0.0, 10**5000, 1.0], f"score of more digits than can be shown for response 1, {NUMBER}: 'blue cat'"),
    (lambda **_: 10**5000, r"answered of more digits than can be shown \(int\)"),
    (lambda **_: {"red": 1.0, "blue": 2.0, "sun": 3.0}, r"answered {'red': 1.0.* \(dict\) for responses 0 to 2"),
    (raises_unsayable, r"raised Unsayable: its message cannot be shown \(.*\) for response 0 of 3: 'red'"),
    (raises_generator_exit, r"raised GeneratorExit: .* for response 0 of 3: 'red'"),
    (lambda **_: 1.0, r"answered 1.0 \(float\)"),
    (lambda **_: [[0.0], [1.0], [2.0]], r"score \[0.0\] for response 0"),
])
def test_every_way_to_fail_names_the_source_and_the_response(function, message):
    before = time.monotonic()
    with pytest.raises(BadAnswer, match="reward source bad: .*" + message) as caught:
        checked_scores(FunctionSource("bad", function, timeout=0.2), rollout())
    assert isinstance(caught.value, UserError) and isinstance(caught.value, BadScore)
    assert "\n" not in str(caught.value) and time.monotonic() - before < 3


def test_a_function_that_catches_everything_is_ended():
    """In a process of its own: the signals that end it also reach pytest's hooks."""
    code = ("from tests.rewards.test_reward_functions import *\n"
            "try:\n    checked_scores(FunctionSource('bad', never_gives_up, timeout=0.2), rollout())\n"
            "except BadAnswer as error:\n    print(error)")
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    assert re.search("reward source bad: no answer within 0.2 s .* for response 0 of 3: 'red'", out)


def test_a_hanging_function_is_left_behind_in_a_thread_too():
    caught = []

    def work():
        try:
            checked_scores(FunctionSource("bad", lambda completions, **_: time.sleep(1), timeout=0.1), rollout())
        except BadAnswer as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "bad: no answer within 0.1 s" in caught[0]


def test_a_process_without_responses_calls_nothing():
    source = FunctionSource("bad", fails_at_blue)
    empty = rollout().rows(torch.tensor([], dtype=torch.long))
    empty.scores = checked_scores(Mixture([Part(source)]), empty)
    assert empty.scores.shape == (0,) and "rewards/bad/mean" not in empty.metrics().compute()


def test_what_a_function_does_to_its_inputs_is_seen_by_nobody_else():
    asked, said = [{"role": "user", "content": "q"}], [{"role": "assistant", "content": "red"}]
    data = {"prompt": [asked] * 2, "answer": ["red", "sun"], "tags": [["a"], ["b"]]}

    def spoils(prompts, completions, completion_ids, answer, tags, known):
        assert [p is prompts[0] for p in prompts] == [True, False]  # a group's samples share no list
        prompts[0][0]["content"] = completions[0][0]["content"] = "x"
        for values in (answer, tags, tags[0], prompts, completions, completion_ids[1], known):
            values.reverse(), values.append("more")
        return [1.0, 1.0]

    def judges(prompts, completions, completion_ids, answer, tags, known):
        assert prompts == [asked, asked] and completions[0] == said and completion_ids == [[7], [7, 7]]
        assert (answer, tags, known) == (["red", "sun"], [["a"], ["b"]], [1, 2])
        return [float(c[0]["content"] == a) for c, a in zip(completions, answer, strict=True)]

    made, options = rollout(("red", "sun"), **data), {"known": [1, 2]}
    mixture = Mixture([Part(FunctionSource(f.__name__, f, options)) for f in (spoils, judges)])
    assert checked_scores(mixture, made).tolist() == [2.0, 2.0]
    assert made.prompts.columns == {"prompt": [[{"role": "user", "content": "q"}]] * 2, "answer": ["red", "sun"],
                                    "tags": [["a"], ["b"]]} and options == {"known": [1, 2]}


def test_the_culprit_is_looked_for_with_the_inputs_as_they_were():
    def reverses(completions, **_):
        completions.reverse()
        return [1 / (c != "red") for c in completions]

    with pytest.raises(BadAnswer, match=r"raised ZeroDivisionError.* for response 0 of 3: 'red'"):
        checked_scores(FunctionSource("reverses", reverses), rollout())


def test_a_child_that_comes_back_from_the_function_is_ended_and_trains_nothing(capfd):
    own = os.getpid()

    def forks(completions, **_):
        number = os.fork()
        if number:
            os.waitpid(number, 0)
        return [1.0] * len(completions)

    scores = checked_scores(FunctionSource("forks", forks), rollout())
    if os.getpid() != own:  # or it would go on with these tests
        os._exit(0)
    assert scores.tolist() == [1.0] * 3
    assert capfd.readouterr().err == ("warning: reward source forks forks, and the child has come back from its code; "
                                      "the child is ended\n")


def test_what_a_function_changes_for_the_whole_process_is_restored_and_said_once(caplog, tmp_path):
    def settings():
        return (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), os.getcwd(),
                torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.backends.cudnn.benchmark,
                torch.get_float32_matmul_precision())

    def careless(completions, raises, **_):
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("medium")
        os.chdir(tmp_path)
        return [1 / (not raises)] * len(completions)

    before = settings()
    for raises in (False, True, False):
        with contextlib.nullcontext() if not raises else pytest.raises(BadAnswer, match="ZeroDivisionError"):
            checked_scores(FunctionSource("careless", careless, {"raises": raises}), rollout())
        assert settings() == before and torch.zeros(1).dtype == torch.float32 and torch.zeros(1).device.type == "cpu"
    assert [r.getMessage() for r in caplog.records] == [
        "warning: reward source careless changes torch's default dtype and torch's default device and torch's grad "
        "mode and torch's deterministic algorithms and torch's float32 matmul precision and cuDNN's flags and torch's "
        "number of threads and the working directory for the whole process; what it was is restored after each call"]


def test_a_function_that_seeds_or_draws_repeats_nothing_of_training_s_and_one_that_does_not_moves_nothing():
    drawn = []

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(1))]

    def seeds(completions, **_):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        return [0.0] * len(completions)

    def draws(completions, **_):
        drawn.append(draw())
        return [0.0] * len(completions)

    def steps(function) -> list[list[float]]:
        random.seed(3), np.random.seed(3), torch.manual_seed(3)
        found = [draw()]
        for _ in range(2):
            checked_scores(FunctionSource("f", function), rollout())
            found.append(draw())
        return found

    quiet, seeded, beside = steps(lengths), steps(seeds), steps(draws)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    assert quiet == [draw(), draw(), draw()]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    of_zero = draw()
    for kind in range(3):
        for found in (seeded, beside, drawn):
            column = [row[kind] for row in found]
            assert len(set(column)) == len(column) and of_zero[kind] not in column
    assert steps(seeds) == seeded  # as ever, all of it follows from the seed
