"""Our decode engine says what transformers' generate says, token for token, for every kind of decoder."""

import pytest
import torch

from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.engine.decode.attention import SlotAttention
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from tests.factories.architectures import ARCHITECTURES, VOCAB, build
from tests.factories.decoding import EAGER, GREEDY, PROMPTS, decode_engine, greedy_by_generate, greedy_tokens


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_tokens_equal_generate_over_ragged_prompts_refilled_slots_and_groups(kind):
    model = build(kind)
    engine = decode_engine(model, max_batch=3)  # five requests share three slots
    expected = greedy_by_generate(model)
    assert greedy_tokens(engine) == expected
    assert engine.describe()["path"] == ("eager" if kind in EAGER else "native"), engine.describe()
    assert len({tuple(t) for t in expected}) > 3  # the oracle tells the prompts apart
    assert greedy_tokens(engine, [p for p in PROMPTS for _ in range(4)]) == [t for t in expected for _ in range(4)]


@pytest.mark.parametrize("kind", ARCHITECTURES)
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


@pytest.mark.parametrize("kind", ["llama", "mistral", "bloom"])
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
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double() / 0.7
        truth = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(logprobs).double(), truth, atol=1e-5, rtol=0)
        assert max(tokens) < VOCAB


def test_bfloat16_logprobs_stay_near_the_training_forward():
    model = build("llama").bfloat16()
    with decode_engine(model).inference() as engine:
        drawn = engine.generate(PROMPTS * 4, SamplingConfig(max_new_tokens=12), seed=3)
    differences = []
    for prompt, tokens, logprobs in zip(PROMPTS * 4, drawn.tokens, drawn.logprobs, strict=True):
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        truth = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        differences += (torch.tensor(logprobs) - truth).abs().tolist()
    assert sum(differences) / len(differences) < 0.02
    assert max(differences) < 0.2
