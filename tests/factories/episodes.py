"""Episodes that a scripted model plays over Qwen2.5's template, and a tool to call in them."""

from __future__ import annotations

from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.environments.contract import Environment, Environments, plain_schemas
from hybrid_rlhf.environments.open import EnvironmentConfig
from hybrid_rlhf.rollout import Prompts
from hybrid_rlhf.rollout.episodes import EpisodePlayer
from tests.factories.scripted import conversation, scripted_causal_lm

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
