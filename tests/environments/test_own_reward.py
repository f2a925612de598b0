"""What environments themselves reward is a source beside others, under the name of the class."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from hybrid_rlhf.environments.contract import Environment, Environments
from hybrid_rlhf.environments.own_reward import EnvironmentSource, source_of
from hybrid_rlhf.rewards import BadAnswer, part_scores


class Episodes(SimpleNamespace):
    completions = ("a", "b", "c")

    def __len__(self) -> int:
        return 3


def test_an_episode_without_a_reward_of_its_own_is_skipped():
    source, rewards = EnvironmentSource("Shop"), [1.0, None, -0.5]
    rollout = Episodes(episode_rewards=rewards)
    assert source.score(rollout) == rewards and source.score(rollout) is not rewards
    first, second, third = part_scores(source, rollout).tolist()
    assert (first, third) == (1.0, -0.5) and math.isnan(second)


def test_a_reward_that_is_no_number_names_environment_and_episode():
    with pytest.raises(BadAnswer, match="reward source Shop: score 'high' for response 1, where a finite number"):
        part_scores(EnvironmentSource("Shop"), Episodes(episode_rewards=[1.0, "high", 0.0]))


def kind(name: str, has_step: bool = False, has_reward: bool = False) -> Environment:
    return Environment(name, [], has_step, has_reward)


def test_the_source_has_the_name_of_the_only_environment_that_rewards():
    assert source_of(Environments([kind("Shop")], False)) is None
    assert source_of(Environments([kind("Shop", has_reward=True)], False)) == EnvironmentSource("Shop")
    assert source_of(Environments([kind("Shop"), kind("Game", has_step=True)], True)) == EnvironmentSource("Game")
    two = Environments([kind("Shop", has_reward=True), kind("Game", has_step=True)], True)
    assert source_of(two) == EnvironmentSource("environment")
