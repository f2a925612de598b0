"""The decode engine on a card: captured steps, our kernels, and the tokens of transformers' generate."""

from __future__ import annotations

import pytest
import torch

from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from tests.factories.architectures import ARCHITECTURES, build
from tests.factories.decoding import GREEDY, MANY_PROMPTS, PROMPTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no card")]


def _engine(model, **settings):
    return HybridEngine(model, model, eos_ids=[2], **settings)


def _oracle(model):
    tokens = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8,
                             eos_token_id=2, pad_token_id=0)
        tokens.append(out[0, len(prompt):].tolist())
    return tokens


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_tokens_equal_generate_captured_and_uncaptured(kind):
    model = build(kind).cuda()
    expected = _oracle(model)
    for capture in ("auto", None):
        engine = _engine(model, max_batch=3, capture=capture)
        with engine.inference():
            drawn = engine.generate(PROMPTS, GREEDY).tokens
        said = engine.describe()
        assert drawn == expected, said
        assert said["path"] != "generate", said
        assert said["kernels"] == "cuda (Triton)"
        if kind in ("llama", "opt", "gpt2", "mistral", "qwen3"):
            assert (said["path"], said["captured"]) == ("native", capture == "auto"), said


@pytest.mark.parametrize("kind", ["llama", "qwen3", "opt", "deepseek_v3"])
def test_pages_of_long_sequences_give_the_tokens_of_generate_where_some_give_theirs_up(kind):
    """Prompts of up to 300 tokens in pages of 128, groups that share them, and pages for a third of what they need."""
    model = build(kind, max_position_embeddings=512).cuda()
    prompts = [[5 + (7 * i + 3 * j * j) % 90 for j in range(n)] for i, n in enumerate((300, 40, 129, 128, 255))]
    settings = SamplingConfig(max_new_tokens=40, temperature=0)
    expected = [model.generate(torch.tensor([p], device="cuda"), do_sample=False, max_new_tokens=40, eos_token_id=2,
                               pad_token_id=0)[0, len(p):].tolist() for p in prompts]
    for max_columns in (None, 128 * 8):
        engine = _engine(model)
        with engine.inference():
            engine.max_kv_bytes = max_columns and int(engine._runner.bytes_per_column * max_columns)
            drawn = engine.generate([p for p in prompts for _ in range(4)], settings).tokens
        assert drawn == [tokens for tokens in expected for _ in range(4)], engine.describe()
        assert engine.describe()["slots"] == 20


SETTINGS = [dict(), dict(top_p=0.9, top_k=40), dict(repetition_penalty=1.4, min_new_tokens=5)]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_captured_draws_are_the_uncaptured_ones_as_rows_come_and_go(settings):
    model, settings = build("llama").cuda(), SamplingConfig(max_new_tokens=12, **settings)
    found = []
    for capture in ("auto", None):
        engine = _engine(model, max_batch=9, capture=capture)
        with engine.inference():
            found.append([engine.generate(MANY_PROMPTS, settings, seed=5).tokens for _ in range(2)])
    assert found[0][0] == found[0][1] == found[1][0]


def test_weights_changed_in_place_reach_the_next_steps_and_memory_goes_back():
    model = build("llama").cuda()
    add_lora(model, LoraConfig(r=4))
    for up in [p for n, p in model.named_parameters() if "lora_B" in n]:
        torch.nn.init.normal_(up, std=0.3)
    engine, before = _engine(model), _oracle(model)
    for _ in range(3):
        with engine.inference():
            assert engine.generate(PROMPTS, GREEDY).tokens == before
    allocated = torch.cuda.memory_allocated()
    with engine.inference():
        assert engine.generate(PROMPTS, GREEDY).tokens == before
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.mul_(-1.5)
        changed = engine.generate(PROMPTS, GREEDY).tokens
    assert changed == _oracle(model) != before
    assert torch.cuda.memory_allocated() <= allocated + 2**16


def test_sampled_logprobs_are_those_of_the_training_forward_in_bf16():
    model = build("llama").cuda().bfloat16()
    with _engine(model).inference() as engine:
        drawn = engine.generate(PROMPTS * 4, SamplingConfig(max_new_tokens=12), seed=3)
    differences = []
    for prompt, tokens, logprobs in zip(PROMPTS * 4, drawn.tokens, drawn.logprobs, strict=True):
        logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
        truth = logits.log_softmax(-1).gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
        differences += (torch.tensor(logprobs) - truth.cpu()).abs().tolist()
    assert sum(differences) / len(differences) < 0.02 and max(differences) < 0.3


@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("kind", ["llama", "opt", "qwen3", "mistral"])
def test_layers_in_few_launches_sample_what_the_training_forward_says(kind, has_adapters):
    model = build(kind).cuda().half()
    if has_adapters:
        add_lora(model, LoraConfig(r=4))
        for up in [p for n, p in model.named_parameters() if "lora_B" in n]:
            torch.nn.init.normal_(up, std=0.3)
        model.half()
    for count in (1, 12, 24):
        with _engine(model.eval(), max_batch=64).inference() as engine:
            drawn = engine.generate(PROMPTS * count, SamplingConfig(max_new_tokens=12), seed=3)
            said = engine.describe()
        assert said["fused"]["decode_layer"] == model.config.num_hidden_layers and said["captured"], said
        for prompt, tokens, logprobs in list(zip(PROMPTS * count, drawn.tokens, drawn.logprobs, strict=True))[-8:]:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
            truth = logits.log_softmax(-1).gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
            assert (torch.tensor(logprobs) - truth.cpu()).abs().max() < 0.05


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_states_that_are_read_give_the_logits_of_the_plain_forward(kind):
    model = build(kind).cuda()
    sequences = [*PROMPTS, [*PROMPTS[-1], 7, 8], PROMPTS[0]]
    with torch.no_grad():
        want = [model.base_model(input_ids=torch.tensor([ids], device="cuda"), use_cache=False).last_hidden_state[0]
                for ids in sequences]
    engine = _engine(model, max_batch=2)
    with engine.inference():
        reader = engine.read(64)
        for ids, whole in zip(sequences, want, strict=True):
            first = max(0, min(reader.num_held(ids), len(ids)) - 1)
            found = reader.states(ids, first)
            assert torch.allclose(found, whole[first:], rtol=1e-2, atol=1e-2 * float(whole.abs().max()))
