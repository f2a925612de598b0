"""Rotary frequencies that depend on the longest row of a batch: equal forwards up to the switch, a line beyond it."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.models.load import ModelConfig, configured_positions, max_positions, positions_of
from hybrid_rlhf.training import builders

LIMIT = 24
SMALL = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.3)
CONFIGS = {
    "longrope": Phi3Config(**SMALL, max_position_embeddings=4 * LIMIT, original_max_position_embeddings=LIMIT,
                           rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
                                            "long_factor": [1.5, 4.0, 9.0, 20.0],
                                            "original_max_position_embeddings": LIMIT}),
    "dynamic": LlamaConfig(**SMALL, max_position_embeddings=LIMIT,
                           rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0})}


@pytest.fixture(params=CONFIGS)
def model(request):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval()


def test_up_to_the_switch_decoding_says_what_a_plain_forward_of_each_sequence_says(model):
    prompts = [[5 + i] * n for i, n in enumerate((3, 9, 16))]
    engine = HybridEngine(model, model, eos_ids=[2], pad_id=0)
    assert max_positions(model) == LIMIT
    with engine.inference():
        drawn = engine.generate(prompts, SamplingConfig(max_new_tokens=8), limits=[8, 8, 8], seed=0)
    assert len(prompts[2]) + 8 == LIMIT
    for prompt, tokens, logprobs in zip(prompts, drawn.tokens, drawn.logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), wanted, rtol=1e-4, atol=1e-4)


def test_lengths_beyond_the_switch_are_refused_before_they_are_computed(model, tmp_path):
    model.save_pretrained(tmp_path)
    why = " before the frequencies of its LongRoPE change" * (model.config.model_type == "phi3")
    engine = HybridEngine(model, model, eos_ids=[2], pad_id=0)
    with engine.inference(), pytest.raises(UserError, match=f"exceed the model's {LIMIT} positions{why}; shorten"):
        engine.generate([[5] * 17], SamplingConfig(max_new_tokens=8))
    config = ModelConfig(model_name_or_path=str(tmp_path))
    assert configured_positions(config) == LIMIT
    with pytest.raises(UserError, match=f"data.max_length is 25, but .* has {LIMIT} positions{why}; lower"):
        builders.check_lengths(config, data__max_length=LIMIT + 1)
    builders.check_lengths(config, data__max_length=LIMIT)


def test_the_switch_is_read_in_the_form_in_which_phi_3_and_phi_4_mini_are_published():
    published = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.5, 4.0, 9.0, 20.0]}
    config = Phi3Config(**SMALL, max_position_embeddings=131072, original_max_position_embeddings=4096,
                        rope_scaling=published)
    assert positions_of(config) == 4096
