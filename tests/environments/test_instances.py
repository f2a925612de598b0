"""One environment in one episode: what it is given, what it answers, and its faults in words for a model."""

from __future__ import annotations

import asyncio
import math
import threading

import numpy as np
import pytest
import torch

from hybrid_rlhf.algorithms.shaping import shape_rewards
from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.environments.calls import CallError
from hybrid_rlhf.environments.contract import Environment, Environments, Instance, environment_of
from hybrid_rlhf.environments.open import EnvironmentSource, source_of
from hybrid_rlhf.rewards import part_scores
from hybrid_rlhf.rewards.mixture import Mixture, Part
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.rollout.episode_record import Episode


def answer_of(value):
    return asyncio.run(value) if asyncio.iscoroutine(value) else value


class Counter:
    def reset(self, start: int = 0) -> str:
        self.total = start
        return f"begin at {start}"

    def add(self, a: float, b: float = 1.0) -> float:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    def keep(self, words: list) -> list:
        """Keep words.

        Args:
            words: them
        """
        words.append("kept")
        return words

    async def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: how long
        """
        await asyncio.sleep(seconds)
        if seconds > 1e-3:
            raise ValueError("too\nlong")
        return "waited"

    def get_reward(self) -> float:
        return 0.5


class AsyncCounter:
    async def reset(self, **row):
        self.row = row
        return f"{sorted(row)}"

    async def step(self, messages):
        messages[0]["content"] = "changed"
        return "go on", False, 0.25

    async def get_reward(self):
        return 2.0


def instance(factory=Counter) -> Instance:
    return environment_of("it", factory, {}, "environment.factory: it").new()


def test_reset_gets_the_columns_that_it_names_and_one_with_keywords_gets_all():
    row = {"start": 3, "prompt": "p", "answer": "a"}
    assert instance().reset(row) == "begin at 3"
    assert answer_of(instance(AsyncCounter).reset(row)) == "['answer', 'prompt', 'start']"


def test_an_environment_gets_copies_of_the_data_and_of_the_conversation():
    own, row, given = instance(AsyncCounter), {"words": ["a"]}, {"words": ["b"]}
    answer_of(own.reset(row))
    own.object.row["words"].append("x")
    assert instance().call("keep", given) == ["b", "kept"] and row == {"words": ["a"]} and given == {"words": ["b"]}
    messages = [{"role": "user", "content": "say"}]
    answer_of(own.step(messages))
    assert messages == [{"role": "user", "content": "say"}]


def test_what_is_answered_now_or_later_is_the_same_contract():
    assert instance().reward() == 0.5 and answer_of(instance(AsyncCounter).reward()) == 2.0
    assert answer_of(instance(AsyncCounter).step([{"role": "assistant", "content": "a"}])) == (
        [{"role": "user", "content": "go on"}], False, 0.25)
    assert answer_of(instance().call("wait", {"seconds": 0})) == "waited"


@pytest.mark.parametrize(("name", "arguments", "says"), [
    ("ad", {}, r"there is no tool ad \(did you mean add\?\); there are add, keep, wait"),
    ("reset", {}, "there is no tool reset"), ("__init__", {}, "there is no tool __init__"),
    ("get_reward", {}, "there is no tool get_reward"),
    ("add", {}, r"add: missing a required argument: 'a'; its parameters are a \(number\), b \(number, optional\)"),
    ("add", {"a": 1, "c": 2}, "add: got an unexpected keyword argument 'c'; its parameters are a"),
    ("add", [1], r"the arguments of add must be a JSON object; its parameters are a \(number\)"),
    ("add", {"a": "x"}, r"add raised TypeError: can only concatenate str .*\(test_instances.py line \d+\); its param"),
    ("wait", {"seconds": 0.01}, r"wait raised ValueError: too long \(test_instances.py line \d+\)$"),
    ("wait", {}, "wait: missing a required argument: 'seconds'")])
def test_a_wrong_call_is_one_line_that_says_what_would_fit(name, arguments, says):
    with pytest.raises(CallError, match=says) as wrong:
        answer_of(instance().call(name, arguments))
    assert "\n" not in str(wrong.value)


@pytest.mark.parametrize(("answer", "says"), [
    (None, "a NoneType, where"), (([], True), r"a tuple, where \(messages, done, reward\)"),
    (([{"role": "assistant", "content": "a"}], True, 1.0), "not a list of"), (([], "no", 1.0), "done as a str"),
    (([], False, 1.0), "no message"), (([], True, math.nan), "reward nan"), (([], True, "1"), "reward '1'")])
def test_a_step_that_answers_something_else_is_told_what_is_needed(answer, says):
    class Game:
        def step(self, messages):
            return answer

    with pytest.raises(CallError, match=f"step answered .*{says}"):
        instance(Game).step([])


@pytest.mark.parametrize(("answer", "made"), [
    (("go", False, None), ([{"role": "user", "content": "go"}], False, None)),
    (([{"role": "tool", "name": "a", "content": "b"}], np.bool_(True), np.float32(0.5)),
     ([{"role": "tool", "name": "a", "content": "b"}], True, 0.5)), (([], True, 1), ([], True, 1.0))])
def test_steps_may_answer_text_and_numbers_of_numpy(answer, made):
    class Game:
        def step(self, messages):
            return answer

    assert instance(Game).step([]) == made and type(instance(Game).step([])[1]) is bool


def test_a_reset_that_answers_no_text_is_told_so():
    class Bad:
        def reset(self):
            return {"prompt": "x"}

    with pytest.raises(CallError, match="reset answered a dict, where text or None is needed"):
        instance(Bad).reset({})


def test_an_instance_makes_one_call_at_a_time_and_plain_tools_are_free():
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        def reset(self): ...

        def hold(self):
            """Hold."""
            begun.set()
            go_on.wait(10)

    def free() -> int:
        """Free."""
        return 1

    own = environment_of("slow", Slow, {"free": free}, "x").new()
    thread = threading.Thread(target=own.call, args=("hold", {}))
    thread.start()
    begun.wait(10)
    assert own.is_busy and own.call("free", {}) == 1
    for call in (lambda: own.call("hold", {}), lambda: own.reset({})):
        with pytest.raises(CallError, match="was not called: hold still runs from an earlier call"):
            call()
    go_on.set()
    thread.join()
    assert not own.is_busy and own.reset({}) is None


def test_a_constructor_that_raises_later_is_the_users_to_fix():
    made = []

    class Few:
        def __init__(self):
            made.append(1)
            if len(made) > 1:
                raise ConnectionError("no more of them")

        def reset(self): ...

    kind = environment_of("few", Few, {}, "x")
    kind.new()
    with pytest.raises(UserError, match="environment few: its constructor raised ConnectionError: no more of them"):
        kind.new()


# -- What environments themselves reward is a source beside others, under the name of the class ------------------------


def rollout_of(*episodes: Episode) -> Rollout:
    """Responses of five tokens, of which the third was not sampled."""
    size = len(episodes)
    rollout = Rollout.from_responses(Prompts([[1]] * size, ["a"] * size), [[5, 6, 7, 8, 9]] * size, [True] * size, 0,
                                     ["b"] * size, [[True, True, False, True, True]] * size)
    rollout.episodes = list(episodes)
    return rollout


def test_an_episode_without_a_reward_of_its_own_is_skipped():
    rollout = rollout_of(Episode(reward=1.0), Episode(), Episode(reward=-0.5))
    first, second, third = part_scores(EnvironmentSource("Shop"), rollout).tolist()
    assert (first, third) == (1.0, -0.5) and math.isnan(second)


def test_what_a_turn_earned_stands_at_its_last_token_weighted_with_the_rest():
    """Turns that end behind 2 and 5 tokens and earned .5 and 1, beside .25 for the whole; of weight 2, and a constant
    beside it: 2 * 1.75 + 3 in all, of which 1 and 2 stand at columns 1 and 4."""
    class Constant:
        name = "constant"

        def score(self, rollout: Rollout) -> list[float]:
            return [3.0] * len(rollout)

    rollout = rollout_of(Episode(turn_ends=[2, 5], turn_rewards=[0.5, 1.0], reward=0.25))
    source = Mixture([Part(EnvironmentSource("Game"), 2.0), Part(Constant())])
    assert source.score(rollout) == [6.5]
    assert rollout.token_scores.tolist() == [[0, 1, 0, 0, 2]]
    rewards = shape_rewards(torch.tensor([6.5]), torch.zeros(1, 5), 0.0, rollout.action_mask, rollout.token_scores)
    assert rewards.tolist() == [[0, 1, 0, 0, 5.5]]


def test_a_turn_that_earned_nothing_is_marked_as_one_that_earned_and_so_are_the_steps_of_another_source():
    class Middle:
        name = "middle"

        def score(self, rollout: Rollout) -> list[float]:
            rollout.token_scores = torch.tensor([[0, 0, 0, 0.5, 0]])
            rollout.step_ends = rollout.token_scores > 0
            return [0.5]

    rollout = rollout_of(Episode(turn_ends=[2, 5], turn_rewards=[0.0, 1.0]))
    assert Mixture([Part(EnvironmentSource("Game")), Part(Middle(), 4.0)]).score(rollout) == [3.0]
    assert rollout.token_scores.tolist() == [[0, 0, 0, 2, 1]]
    assert rollout.step_ends.tolist() == [[False, True, False, True, True]]
    plain = rollout_of(Episode(turn_ends=[2, 5], reward=1.0))  # no turn has a reward of its own
    assert EnvironmentSource("Game").score(plain) == [1.0] and not plain.step_ends.any()


def kind(name: str, has_step: bool = False, has_reward: bool = False) -> Environment:
    return Environment(name, [], has_step, has_reward)


def test_the_source_has_the_name_of_the_only_environment_that_rewards():
    assert source_of(Environments([kind("Shop")], False)) is None
    assert source_of(Environments([kind("Shop", has_reward=True)], False)) == EnvironmentSource("Shop")
    assert source_of(Environments([kind("Shop"), kind("Game", has_step=True)], True)) == EnvironmentSource("Game")
    two = Environments([kind("Shop", has_reward=True), kind("Game", has_step=True)], True)
    assert source_of(two) == EnvironmentSource("environment")
