"""Episodes whose tools and environments live in other processes: what they count, and what ends the run."""

from __future__ import annotations

import os

import pytest

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.environments.isolated import open_isolated
from hybrid_rlhf.environments.open import EnvironmentConfig
from hybrid_rlhf.rollout import Prompts
from hybrid_rlhf.rollout.episodes import EpisodePlayer
from tests.factories.crashing_environment import FILE
from tests.factories.scripted import conversation, scripted_causal_lm
from tests.factories.trl_templates import tokenizer_of

END, ASKED = "<|im_end|>", "Do it."


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(FILE)
    return str(file)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("qwen2_5")


def say(name: str, how: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"how": "{how}"}}}}\n</tool_call>{END}'


def player_of(tokenizer, **given) -> EpisodePlayer:
    config = EnvironmentConfig(isolate=True, timeout=1.0, max_turns=2, num_workers=2, **given)
    return EpisodePlayer(open_isolated(config), config, tokenizer)


def play(player: EpisodePlayer, text: str, added: str = ""):
    """One episode of a model that says `text` first. added: what reset answers, at the end of the prompt."""
    tokenizer = player.tokenizer
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": ASKED + added}], tokenize=False,
                                           tools=player.environments.kinds[0].schemas, add_generation_prompt=True)
    model = scripted_causal_lm([conversation(tokenizer, prompt, text)], vocab_size=len(tokenizer))
    engine = HybridEngine(model, model, eos_ids=[tokenizer.eos_token_id], pad_id=tokenizer.pad_token_id)
    with engine.inference():
        rollout = player.play(engine, Prompts([[1]], [ASKED], {"prompt": [ASKED]}), SamplingConfig(max_new_tokens=300),
                              0, [0])
    return rollout.episodes[0]


@pytest.mark.slow
def test_a_tool_that_crashes_or_hangs_is_counted_as_one_that_fails_or_is_late(tokenizer, path):
    player = player_of(tokenizer, tools=[f"{path}:end"])
    for how, said, counts in (
            ("segfault", "error: end ended its process (SIGSEGV)", (1, 0)),
            ("regex", "error: no answer within 1 s (environment.timeout); its process was ended", (0, 1))):
        episode = play(player, say("end", how))
        assert episode.messages[1]["content"] == said and (episode.num_failed, episode.num_late) == counts
    said, pid = play(player, say("end", "well")).messages[1]["content"].split()
    assert said == "well" and int(pid) != os.getpid()


@pytest.mark.slow
def test_an_environment_that_is_gone_cannot_be_asked_for_its_reward_and_the_next_episode_has_a_new_one(tokenizer, path):
    player = player_of(tokenizer, factory=f"{path}:Count")
    with pytest.raises(UserError, match=r"environment Count: get_reward was not called: the environment is gone: an "
                                        r"earlier call ended its process \(exit code 7\); fix the environment"):
        play(player, say("crash", "exit"), "['prompt'] 1")
    episode = play(player, say("crash", "well"), "['prompt'] 1")  # constructed again: the first reset of another one
    assert episode.reward == 0.0 and episode.num_calls == 1 and not episode.num_failed
    assert episode.environment is None  # a reward function must not take what stands for it for the user's object
