"""Our decode engine says what transformers' generate says, token for token, for every kind of decoder."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.decode.attention import SlotAttention
from hybrid_rlhf.models.load import ModelConfig, configured_positions, max_positions, positions_of
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from hybrid_rlhf.training import builders
from tests.factories.architectures import ARCHITECTURES, VOCAB, build, random_model
from tests.factories.decoding import (
    EAGER,
    GREEDY,
    PROMPTS,
    decode_engine,
    greedy_by_generate,
    greedy_tokens,
    plain_logprobs,
)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_tokens_equal_generate_over_ragged_prompts_refilled_slots_and_groups(kind):
    model = build(kind)
    engine = decode_engine(model, max_batch=3)  # five requests share three slots
    expected = greedy_by_generate(model)
    assert greedy_tokens(engine) == expected
    assert engine.describe()["path"] == ("eager" if kind in EAGER else "native"), engine.describe()
    assert len({tuple(t) for t in expected}) > 3  # the oracle tells the prompts apart
    assert greedy_tokens(engine, [p for p in PROMPTS for _ in range(4)]) == [t for t in expected for _ in range(4)]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi3", "opt", "gpt2", "mixtral", "deepseek_v3", "bloom", "mamba"])
def test_greedy_tokens_stay_equal_with_lora_after_optimizer_steps_and_ten_switches(kind):
    model = build(kind)
    layers = ["in_proj", "x_proj"] if kind == "mamba" else "all-linear"  # peft refuses a Mamba's other two
    add_lora(model, LoraConfig(r=4, target_modules=layers))
    engine = decode_engine(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    for up in [p for n, p in model.named_parameters() if "lora_B" in n]:
        torch.nn.init.normal_(up, std=0.3)
    before = greedy_by_generate(model)
    assert greedy_tokens(engine) == before
    optimizer = torch.optim.SGD(trained, lr=0.3)
    for _ in range(3):
        model.train()
        ids = torch.tensor([PROMPTS[2]])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    after = greedy_by_generate(model)
    assert after != before  # the steps moved the policy, and the engine moves with it
    for _ in range(10):
        assert greedy_tokens(engine) == after


def test_the_kernels_read_the_training_parameters_themselves():
    model = build("llama")
    engine = decode_engine(model)
    pointers = {n: p.data_ptr() for n, p in model.named_parameters()}
    read = set()

    def record(module, _inputs, _output):
        read.update(p.data_ptr() for p in module.parameters(recurse=False))

    hooks = [m.register_forward_hook(record) for m in model.modules()]
    with engine.inference():
        engine.generate(PROMPTS, GREEDY)
        assert {n: p.data_ptr() for n, p in model.named_parameters()} == pointers
    assert read == set(pointers.values())
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("with_lora", [False, True])
def test_fifty_switches_leave_every_weight_bit_identical_after_exceptions_too(with_lora):
    model = build("mistral")
    if with_lora:
        add_lora(model, LoraConfig(r=4))
    engine = decode_engine(model)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    configured = model.config._attn_implementation
    for i in range(50):
        try:
            with engine.inference():
                engine.generate(PROMPTS[:2], SamplingConfig(max_new_tokens=2), seed=i)
                if i % 10 == 9:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert model.config._attn_implementation == configured
    assert engine._cache is None  # the cache was given back


def test_the_model_attends_as_before_outside_the_mode():
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    model, ids = build("mistral"), torch.tensor([PROMPTS[2]])
    registered = set(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    before = model(input_ids=ids).logits
    engine = decode_engine(model)
    with pytest.raises(ZeroDivisionError), engine.inference():  # noqa: PT012 - the block is what is tested
        engine.generate(PROMPTS, GREEDY)
        raise ZeroDivisionError
    assert torch.equal(model(input_ids=ids).logits, before)
    assert (set(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)) == registered


@pytest.mark.parametrize("kind", ["mistral", "bloom"])
def test_a_wrong_mask_is_found_by_the_probe_and_said(kind, monkeypatch, caplog):
    """The negative control: a mask that lets tokens see one column too few."""
    true_mask = SlotAttention.bool_mask

    def narrow(self, **named):
        seen = true_mask(self, **named)
        return seen & ~(torch.arange(seen.shape[-1]) == 1)

    monkeypatch.setattr(SlotAttention, "bool_mask", narrow)
    monkeypatch.setattr(SlotAttention, "mask", lambda self, **named: narrow(self, **named))
    model = build(kind)
    engine = decode_engine(model)
    expected = greedy_by_generate(model)
    assert greedy_tokens(engine) == expected  # through transformers' generate
    said = engine.describe()
    assert said["path"] == "generate"
    assert "differ from the plain forward" in said["refused"]["eager"]
    assert "does not run on the decode engine" in caplog.text


def test_sampled_logprobs_are_those_of_the_training_forward_whatever_was_cut_or_penalised():
    model = build("llama")
    engine = decode_engine(model)
    settings = SamplingConfig(max_new_tokens=12, temperature=0.7, top_k=40, top_p=0.9, repetition_penalty=1.2)
    with engine.inference():
        drawn = engine.generate(PROMPTS * 4, settings, seed=3)
    for prompt, tokens, logprobs in zip(PROMPTS * 4, drawn.tokens, drawn.logprobs, strict=True):
        truth = plain_logprobs(model, prompt, tokens, 0.7)
        assert torch.allclose(torch.tensor(logprobs).double(), truth, atol=1e-5, rtol=0)
        assert max(tokens) < VOCAB


def test_bfloat16_logprobs_stay_near_the_training_forward():
    model = build("llama").bfloat16()
    with decode_engine(model).inference() as engine:
        drawn = engine.generate(PROMPTS * 4, SamplingConfig(max_new_tokens=12), seed=3)
    differences = []
    for prompt, tokens, logprobs in zip(PROMPTS * 4, drawn.tokens, drawn.logprobs, strict=True):
        differences += (torch.tensor(logprobs) - plain_logprobs(model, prompt, tokens)).abs().tolist()
    assert sum(differences) / len(differences) < 0.02
    assert max(differences) < 0.2


# -- decoders that need a hand to run over slots: positions, attention or a cache of their own -------------------------


KINDS = {
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], window_size=4, num_layers=2, num_heads=4,
                    num_hidden_layers=None, num_attention_heads=None),
    "openai-gpt": {}, "marian": {}, "mbart": {}, "whisper": {},
    "minimax": dict(layer_types=["linear_attention", "full_attention"], block_size=4, num_local_experts=4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_over_slots_are_those_of_the_plain_forward(kind):
    model = random_model(kind, KINDS[kind])
    engine = HybridEngine(model, model, eos_ids=[2], max_batch=3)
    hooks = {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()}
    with engine.inference():
        drawn = engine.generate([p for p in PROMPTS for _ in range(2)], GREEDY).tokens
        again = list(engine.stream(PROMPTS[0] + [8, 9], GREEDY))
        whole = engine.generate([PROMPTS[0] + [8, 9]], GREEDY).tokens[0]
    assert engine.describe()["path"] == "native"
    assert again == [t for t in whole if t != 2]
    assert {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()} == hooks
    assert not any("_attn" in vars(m) for m in model.modules())
    for prompt, tokens in zip([p for p in PROMPTS for _ in range(2)], drawn, strict=True):
        logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
    assert len({tuple(t) for t in drawn}) > 3


# -- hidden states of given sequences in inference mode are those of the model's plain forward ------------------------


def _sequences() -> list[list[int]]:
    draws = torch.Generator().manual_seed(0)
    first, second = (torch.randint(5, 97, (n,), generator=draws).tolist() for n in (20, 33))
    return [first, second, [7], second[:15] + first, second[:4]]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "bloom", "deepseek_v3", "mamba", "jamba"])
def test_states_give_the_logits_of_the_plain_forward_whatever_was_read_before(kind):
    model = build(kind)
    sequences = _sequences()
    with torch.no_grad():
        want = [model.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
                for ids in sequences]
    engine = HybridEngine(model, model, eos_ids=[2])
    with engine.inference():
        reader = engine.read(64)
        for ids, whole in zip(sequences, want, strict=True):
            first = max(0, min(reader.num_held(ids), len(ids)) - 1)
            assert torch.allclose(reader.states(ids, first), whole[first:], rtol=1e-3, atol=1e-3 * whole.abs().max())


def test_what_two_sequences_begin_with_is_read_once(monkeypatch):
    model = build("llama")
    engine = HybridEngine(model, model, eos_ids=[2])
    with engine.inference():
        reader, widths = engine.read(64), []
        model.base_model.register_forward_pre_hook(
            lambda _module, _given, named: widths.append(named["input_ids"].shape[1]), with_kwargs=True)
        reader.states([5, 6, 7, 8, 9])
        assert (reader.num_held([5, 6, 7, 1]), reader.num_held([1])) == (3, 0)
        reader.states([5, 6, 7, 1, 2], 3)
        assert widths == [5, 2] and reader.num_held([5, 6, 7, 8]) == 3
        with pytest.raises(ValueError, match="are held"):
            reader.states([5, 9, 9], 2)
        with pytest.raises(ValueError, match="slot of 64"):
            reader.states([5] * 65)
    with pytest.raises(RuntimeError, match="outside inference"):
        engine.read(4)


# -- rotary frequencies that depend on the longest row of a batch -----------------------------------------------------


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
def rope_model(request):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval()


def test_up_to_the_switch_decoding_says_what_a_plain_forward_of_each_sequence_says(rope_model):
    prompts = [[5 + i] * n for i, n in enumerate((3, 9, 16))]
    engine = HybridEngine(rope_model, rope_model, eos_ids=[2], pad_id=0)
    assert max_positions(rope_model) == LIMIT
    with engine.inference():
        drawn = engine.generate(prompts, SamplingConfig(max_new_tokens=8), limits=[8, 8, 8], seed=0)
    assert len(prompts[2]) + 8 == LIMIT
    for prompt, tokens, logprobs in zip(prompts, drawn.tokens, drawn.logprobs, strict=True):
        wanted = plain_logprobs(rope_model, prompt, tokens).float()
        torch.testing.assert_close(torch.tensor(logprobs), wanted, rtol=1e-4, atol=1e-4)


def test_lengths_beyond_the_switch_are_refused_before_they_are_computed(rope_model, tmp_path):
    rope_model.save_pretrained(tmp_path)
    why = " before the frequencies of its LongRoPE change" * (rope_model.config.model_type == "phi3")
    engine = HybridEngine(rope_model, rope_model, eos_ids=[2], pad_id=0)
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
