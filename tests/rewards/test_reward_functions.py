"""Python functions as reward sources: what they are called with, how they are mixed, and every way to fail."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import re
import signal
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.image_files import ImageRef
from hybrid_rlhf.data.turns import IMAGE
from hybrid_rlhf.rewards import BadAnswer, BadScore, part_scores
from hybrid_rlhf.rewards.functions import FunctionSource, open_functions
from hybrid_rlhf.rewards.mixture import Mixture, Part, Scale
from tests.factories.rollouts import rollout


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
    assert part_scores(source, made).tolist() == [2.0, 1.0, 2.0]
    source.check_columns(["answer", "other"])
    with pytest.raises(UserError, match=r"named needs a column answer, and the data has answers \(did you mean ans"):
        source.check_columns(["answers"])


def test_a_function_gets_pictures_as_pillow_s_by_either_name_each_opened_once(tmp_path):
    seen = {}
    for name in ("red", "blue"):
        Image.new("RGB", (4, 3), name).save(tmp_path / f"{name}.png")
    red, blue = (ImageRef(str(tmp_path / f"{name}.png"), 4, 3) for name in ("red", "blue"))
    made = rollout(images=[[red], [red, blue], []])
    made.prompts.images = [(red,), (red, blue), ()]

    def keep(completions, images, image):
        seen.update(images=images, image=image)
        return [0.0] * 3

    source = FunctionSource("keep", keep)
    source.check_columns(["images"])
    source.score(made)
    assert [[each.getpixel((0, 0)) for each in row] for row in seen["images"]] == [
        [(255, 0, 0)], [(255, 0, 0), (0, 0, 255)], []]
    assert seen["image"][2] is None and seen["image"][:2] == [seen["images"][0][0]] * 2
    assert seen["image"][0] is seen["images"][1][0]


def test_prompts_with_pictures_are_those_of_trl(tmp_path):
    """As its GRPO gives them to a reward function: made of the row's messages by prepare_multimodal_messages."""
    prepare_multimodal_messages = pytest.importorskip("trl.data_utils").prepare_multimodal_messages

    seen, colours = [], ("red", "blue")
    for name in colours:
        Image.new("RGB", (4, 3), name).save(tmp_path / f"{name}.png")
    refs = [ImageRef(str(tmp_path / f"{name}.png"), 4, 3) for name in colours]
    asked = [{"role": "user", "content": f"{IMAGE}{IMAGE}Which?", "images": refs}]
    made = rollout(prompt=[asked, asked, "text"], images=[refs, refs, []])
    made.prompts.images = [tuple(refs), tuple(refs), ()]
    FunctionSource("keep", lambda prompts, **_: seen.append(prompts) or [0.0] * 3).score(made)

    def plain(messages):
        return [[part | ({"image": part["image"].getpixel((0, 0))} if "image" in part else {})
                 for part in message["content"]] for message in messages]

    theirs = prepare_multimodal_messages([{"role": "user", "content": "Which?"}],
                                         [Image.new("RGB", (4, 3), name) for name in colours])
    assert plain(seen[0][0]) == plain(seen[0][1]) == plain(theirs) and seen[0][2] == "text"
    assert asked[0]["content"] == f"{IMAGE}{IMAGE}Which?"  # the rollout's own stays as it was


def test_async_functions_are_awaited_together_in_a_running_loop_and_out_of_one():
    async def slow(completions, **_):
        async def one(text):
            await asyncio.sleep(0.05)
            return len(text)

        return await asyncio.gather(*(one(c) for c in completions))

    source = FunctionSource("slow", slow)
    assert part_scores(source, rollout()).tolist() == [3.0, 8.0, 3.0]

    async def notebook():
        return part_scores(source, rollout()).tolist()

    assert asyncio.run(notebook()) == [3.0, 8.0, 3.0]


def test_scores_may_be_an_array_or_a_tensor():
    for answer in (np.array([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0]), (1, 2, 3)):
        source = FunctionSource("f", lambda answer=answer, **_: answer)
        assert part_scores(source, rollout()).tolist() == [1.0, 2.0, 3.0]


def test_the_weighted_sum_by_hand_with_a_skip_and_a_scale():
    def some(completions, **_):
        return [1.0, None, 3.0]

    mixture = Mixture([Part(FunctionSource("lengths", lengths), 0.5, Scale(1.0, 2.0)),
                       Part(FunctionSource("some", some), -2.0)])
    made = rollout()
    made.scores = part_scores(mixture, made)
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
    made.scores = part_scores(mixture, made)
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
    made.scores = part_scores(Mixture([Part(FunctionSource("lengths", lengths), 0.5), *told]), made)
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
        part_scores(mixture, rollout())


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


def switches_it_off(completions, **_):
    signal.setitimer(signal.ITIMER_REAL, 0)
    time.sleep(0.3)
    return [0.0] * len(completions)


async def awaits_for_ever(completions, **_):
    await asyncio.sleep(0 if "blue cat" not in completions else 99)
    return [0.0] * len(completions)


def backtracks(completions, **_):
    return [float(bool(re.match(r"(a+)+$", "a" * 40 + "b" if c == "sun" else c))) for c in completions]


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
    (lambda **_: [0.0, 1.0], r"2 scores for 3 responses \(response 2 is the first without"),
    (lambda **_: ["0.5", 1.0, 1.0], f"score '0.5' for response 0, {NUMBER}: 'red'"),
    (lambda **_: None, r"answered None \(NoneType\)"),
    (lambda **_: {"red": 1.0, "blue": 2.0, "sun": 3.0}, r"answered {'red': 1.0.* \(dict\) for responses 0 to 2"),
    (lambda **_: [[0.0], [1.0], [2.0]], r"score \[0.0\] for response 0"),
])
def test_every_way_to_fail_names_the_source_and_the_response(function, message):
    before = time.monotonic()
    with pytest.raises(BadAnswer, match="reward source bad: .*" + message) as caught:
        part_scores(FunctionSource("bad", function, timeout=0.2 if "0.2 s" in message else 30.0), rollout())
    assert isinstance(caught.value, UserError) and isinstance(caught.value, BadScore)
    assert "\n" not in str(caught.value) and time.monotonic() - before < 20


def test_a_hanging_function_is_left_behind_in_a_thread_too():
    caught = []

    def work():
        try:
            part_scores(FunctionSource("bad", lambda completions, **_: time.sleep(1), timeout=0.1), rollout())
        except BadAnswer as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "bad: no answer within 0.1 s" in caught[0]


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
    assert part_scores(mixture, made).tolist() == [2.0, 2.0]
    assert made.prompts.columns == {"prompt": [[{"role": "user", "content": "q"}]] * 2, "answer": ["red", "sun"],
                                    "tags": [["a"], ["b"]]} and options == {"known": [1, 2]}


def test_a_child_that_comes_back_from_the_function_is_ended_and_trains_nothing(capfd):
    own = os.getpid()

    def forks(completions, **_):
        number = os.fork()
        if number:
            os.waitpid(number, 0)
        return [1.0] * len(completions)

    scores = part_scores(FunctionSource("forks", forks), rollout())
    if os.getpid() != own:  # or it would go on with these tests
        os._exit(0)
    assert scores.tolist() == [1.0] * 3
    assert capfd.readouterr().err == ("warning: reward source forks forks, and the child has come back from its code; "
                                      "the child is ended\n")


def test_what_a_function_changes_for_the_whole_process_is_restored_and_said_once(caplog, tmp_path):
    def settings():
        return (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), os.getcwd(),
                torch.are_deterministic_algorithms_enabled(), torch.get_num_threads())

    def careless(completions, raises, **_):
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(torch.get_num_threads() + 1)
        os.chdir(tmp_path)
        return [1 / (not raises)] * len(completions)

    before = settings()
    for raises in (False, True, False):
        with contextlib.nullcontext() if not raises else pytest.raises(BadAnswer, match="ZeroDivisionError"):
            part_scores(FunctionSource("careless", careless, {"raises": raises}), rollout())
        assert settings() == before and torch.zeros(1).dtype == torch.float32 and torch.zeros(1).device.type == "cpu"
    assert [r.getMessage() for r in caplog.records] == [
        "warning: reward source careless changes torch's default dtype and torch's default device and torch's grad "
        "mode and torch's deterministic algorithms and torch's number of threads and the working directory for the "
        "whole process; what it was is restored after each call"]


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
            part_scores(FunctionSource("f", function), rollout())
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


# -- Reward functions by name: opened from a file or of the built-in ones, and what cannot be opened -------------------


FILE = """
from dataclasses import dataclass

@dataclass
class Kept:
    size: int

def lengths(completions, factor: float = 1.0, **columns):
    return [Kept(len(c)).size * factor for c in completions]

def strict(completions):
    return [0.0] * len(completions)
"""


def test_functions_are_opened_from_a_file_and_named_apart(tmp_path):
    path = tmp_path / "pay.py"
    path.write_text(FILE)
    found = open_functions([f"{path}:lengths", f"{path}:lengths", "builtin:repetition_penalty"],
                           {"lengths_2": {"factor": -1.0}}, 5.0)
    assert [f.name for f in found] == ["lengths", "lengths_2", "repetition_penalty"]
    assert part_scores(found[0], rollout()).tolist() == [3, 8, 3]
    assert part_scores(found[1], rollout()).tolist() == [-3, -8, -3]
    path.write_text(FILE.replace("factor for", "factor + 1 for"))  # as long a file, in the same second
    again = open_functions([f"{path}:lengths"], {}, 5.0)
    assert part_scores(again[0], rollout()).tolist() == [4, 9, 4]
    assert not list(tmp_path.glob("__pycache__"))


@pytest.mark.parametrize("given, options, message", [
    ("lengths", {}, "'lengths' names no function or class; give path.py:name"),
    ("PLACE/none.py:lengths", {}, "none.py does not exist; give path.py:name"),
    ("PLACE/pays.py:lengths", {}, r"pays.py does not exist \(did you mean pay.py\?\); give path.py:name"),
    ("PLACE:lengths", {}, "is not a Python file; give path.py:name"),
    ("PLACE/pay.py:length", {}, r"has no length that can be called; there is Kept, lengths, strict \(did you mean len"),
    ("PLACE/pay.py:strict", {"strict": {"x": 1}}, "takes no x"),
    ("PLACE/pay.py:strict", {"strickt": {}}, r"strickt is none of reward.functions \(strict\) \(did you mean strict"),
    ("PLACE/torn.py:f", {}, r"torn.py line 2 cannot be run: SyntaxError"),
    ("PLACE/raises.py:f", {}, r"raises.py line 3 cannot be run: ModuleNotFoundError: No module named 'no_such_thing'"),
    ("builtin:numeric_mach", {}, r"no builtin:numeric_mach \(did you mean numeric_match"),
    ("builtin:format", {"format": {"patern": "x"}}, r"takes no patern \(did you mean pattern\?\); it takes pattern, "),
    ("builtin:format", {"format": {"pattern": "("}}, r"pattern '\(' is not a regular expression"),
    ("builtin:length_penalty", {"length_penalty": {"max_tokens": 5, "buffer": 9}}, "buffer is 9"),
])
def test_what_cannot_be_opened_is_one_line_of_the_user_s(tmp_path, given, options, message):
    (tmp_path / "pay.py").write_text(FILE)
    (tmp_path / "torn.py").write_text("\ndef f(:\n")
    (tmp_path / "raises.py").write_text("\n\nimport no_such_thing\n")
    with pytest.raises(UserError, match=message) as caught:
        open_functions([given.replace("PLACE", str(tmp_path))], options, 5.0)
    assert "\n" not in str(caught.value)
