"""Episodes of two and three turns, said by a scripted model: the tokens, masks and log-probabilities that transformers
gives for the same conversation, and what becomes of tools and environments that misbehave."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.environments.contract import Environment, Environments, plain_schemas
from hybrid_rlhf.environments.settings import EnvironmentConfig
from hybrid_rlhf.rollout import Prompts
from hybrid_rlhf.rollout.episodes import EpisodePlayer
from tests.factories.scripted import conversation, scripted_causal_lm
from tests.factories.trl_templates import tokenizer_of

CALL = '<tool_call>\n{"name": "times", "arguments": {"a": 12, "b": 3}}\n</tool_call>'
END = "<|im_end|>"


def times(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def tools(*functions) -> Environments:
    own = {f.__name__: f for f in functions}
    return Environments([Environment("tools", list(plain_schemas(own).values()), False, False, own)], False)


def answered(content: str) -> str:
    """What Qwen2.5's template writes between the end of a call and the next turn."""
    return f"\n<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("qwen2_5")


def prompt_text(tokenizer, environments: Environments, asked: str = "What is 12 * 3?") -> str:
    return tokenizer.apply_chat_template([{"role": "user", "content": asked}], tokenize=False,
                                         tools=environments.kinds[0].schemas or None, add_generation_prompt=True)


def play(tokenizer, environments, conversations, asked="What is 12 * 3?", sampling=None, columns=None, **settings):
    model = scripted_causal_lm(conversations, vocab_size=len(tokenizer))
    engine = HybridEngine(model, model, eos_ids=[tokenizer.eos_token_id], pad_id=tokenizer.pad_token_id)
    player = EpisodePlayer(environments, EnvironmentConfig(tools="f.py:f", **settings), tokenizer)
    prompts = Prompts([[1]], [asked], {"prompt": [asked], **(columns or {})})
    with engine.inference():
        return player.play(engine, prompts, sampling or SamplingConfig(max_new_tokens=200), 0, [0]), model


def script(tokenizer, environments, *parts: str):
    return conversation(tokenizer, prompt_text(tokenizer, environments), *parts)


def test_a_tool_is_called_and_its_answer_is_read(tokenizer):
    own = tools(times)
    parts = script(tokenizer, own, CALL + END, answered("36"), "It is 36." + END)
    rollout, model = play(tokenizer, own, [parts])
    prompt, *response = parts
    assert rollout.prompts.ids == [prompt]
    ids = [token for part in response for token in part]
    assert rollout.response_ids.tolist() == [ids]
    assert rollout.action_mask.tolist() == [[True] * len(response[0]) + [False] * len(response[1])
                                            + [True] * len(response[2])]
    truth = model(input_ids=torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
    truth = truth[torch.arange(len(prompt) - 1, len(prompt) + len(ids) - 1), ids].masked_fill(
        ~rollout.action_mask[0], 0.0)
    assert_close(rollout.sampled_logprobs[0], truth, atol=1e-4, rtol=1e-4)
    [episode] = rollout.episodes
    assert [m["role"] for m in episode.messages] == ["assistant", "tool", "assistant"]
    assert episode.messages[0]["tool_calls"][0]["function"] == {"name": "times", "arguments": {"a": 12, "b": 3}}
    assert episode.messages[1]["content"] == "36" and rollout.completions == ["It is 36."]
    assert rollout.has_eos.tolist() == [True] and episode.num_calls == 1 and not episode.num_failed
    whole = tokenizer.apply_chat_template(  # the same conversation, rendered and tokenised at once
        [{"role": "user", "content": "What is 12 * 3?"}, *episode.messages], tools=own.kinds[0].schemas, tokenize=False)
    assert whole == tokenizer.decode(prompt + ids) + "\n"
