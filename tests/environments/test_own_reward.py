"""What environments themselves reward is a source beside others, under the name of the class."""

from __future__ import annotations

import math

import torch

from hybrid_rlhf.algorithms.shaping import shape_rewards
from hybrid_rlhf.environments.contract import Environment, Environments
from hybrid_rlhf.environments.open import EnvironmentSource, source_of
from hybrid_rlhf.rewards import part_scores
from hybrid_rlhf.rewards.mixture import Mixture, Part
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.rollout.episode_record import Episode


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
