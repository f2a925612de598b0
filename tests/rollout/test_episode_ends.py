"""Turns that end by tokens which are no end of turn for the chat template."""

from __future__ import annotations

from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.environments.contract import Environment, Environments, plain_schemas
from hybrid_rlhf.environments.open import EnvironmentConfig
from hybrid_rlhf.rollout import Prompts
from hybrid_rlhf.rollout.episodes import EpisodePlayer
from tests.factories.episodes import times
from tests.factories.scripted import conversation, scripted_causal_lm
from tests.factories.trl_templates import tokenizer_of


def test_a_turn_that_ends_with_the_next_messages_header_reads_it_once():
    """GLM 4.5 has no end of turn: by its generation_config <|observation|> and <|user|> end one."""
    tokenizer, schemas = tokenizer_of("glm4moe"), list(plain_schemas({"times": times}).values())
    own = Environments([Environment("tools", schemas, False, False, {"times": times})], False)
    call = "<tool_call>times\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n<arg_key>b</arg_key>\n" \
           "<arg_value>3</arg_value>\n</tool_call>"
    messages = [{"role": "user", "content": "What is 12 * 3?"},
                {"role": "assistant", "content": "", "tool_calls": [
                    {"type": "function", "function": {"name": "times", "arguments": {"a": 12, "b": 3}}}]},
                {"role": "tool", "content": "36"}]
    prompt = tokenizer.apply_chat_template(messages[:1], tools=schemas, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False, add_generation_prompt=True)
    told = whole[whole.index("<|observation|>") + len("<|observation|>"):]
    parts = conversation(tokenizer, prompt, call + "<|observation|>", told, "It is 36.<|user|>")
    model = scripted_causal_lm([parts], vocab_size=len(tokenizer))
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>", "<|observation|>"])
    engine = HybridEngine(model, model, eos_ids=ends, pad_id=tokenizer.pad_token_id)
    player = EpisodePlayer(own, EnvironmentConfig(tools="f.py:f"), tokenizer)
    asked = ["What is 12 * 3?"]
    with engine.inference():
        rollout = player.play(engine, Prompts([[1]], asked, {"prompt": asked}), SamplingConfig(max_new_tokens=200), 0,
                              [0])
    assert rollout.response_ids.tolist() == [[token for part in parts[1:] for token in part]]
    assert [m["content"] for m in rollout.episodes[0].messages] == ["", "36", "It is 36."]
    assert rollout.has_eos.item()
