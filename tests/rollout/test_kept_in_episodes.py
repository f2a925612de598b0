"""Episodes drawn by truncated sampling: the words kept belong to what the model said, whatever others wrote between."""

from __future__ import annotations

import pytest
import torch

from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.environments.contract import Environments, environment_of
from hybrid_rlhf.environments.open import EnvironmentConfig
from hybrid_rlhf.roles import Actor, PolicyModule
from hybrid_rlhf.rollout import Prompts
from hybrid_rlhf.rollout.episodes import EpisodePlayer
from tests.factories.architectures import roformer
from tests.factories.tiny import tiny_causal_lm
from tests.factories.warpers import warped_by_model


class Echo:
    """Answers what was said with its length, and never ends."""

    def reset(self, **row) -> None:
        pass

    def step(self, messages):
        return f"{len(messages[-1]['content'])} letters", False, None


@pytest.mark.parametrize("path", ["slots", "generate"])
def test_each_sampled_token_of_an_episode_has_the_words_that_it_was_drawn_from(tokenizer, path):
    size = len(tokenizer)
    model = (tiny_causal_lm(3, vocab_size=size, initializer_range=0.2) if path == "slots"
             else roformer(vocab_size=size, max_position_embeddings=512))
    engine = HybridEngine(PolicyModule(model), model, eos_ids=[tokenizer.eos_token_id], pad_id=tokenizer.pad_token_id,
                          max_batch=2)
    own = Environments([environment_of("Echo", Echo, {}, "here")], False)
    player = EpisodePlayer(own, EnvironmentConfig(factory="a.py:a", max_turns=3), tokenizer)
    actor = Actor(engine, tokenizer, episodes=player)
    sampling = SamplingConfig(max_new_tokens=120, top_p=0.8, temperature=0.9,
                              stop_token_ids=list(range(0, size, 5)))
    asked = ["Say it!", "Now.", "Go on."]
    with engine.inference():
        rollout = actor.generate(Prompts([[1]] * 3, asked, {"prompt": asked}), sampling, 2, True)
    if path == "slots":
        assert torch.allclose(actor.logprobs(rollout)[rollout.action_mask],
                              rollout.sampled_logprobs[rollout.action_mask], atol=1e-5)
    assert sum(len(episode.turn_ends) for episode in rollout.episodes) > 4
    assert (rollout.response_mask & ~rollout.action_mask).any()
    for i, prompt in enumerate(rollout.prompts.ids):
        ids, sampled = (x[i][rollout.response_mask[i]] for x in (rollout.response_ids, rollout.action_mask))
        left = warped_by_model(model, prompt, ids.tolist(), top_p=0.8, temperature=0.9)[sampled]
        assert rollout.kept.sizes[i].tolist() == left.isfinite().sum(1).tolist()
        assert rollout.kept.ids[i].tolist() == left.isfinite().nonzero()[:, 1].tolist()
