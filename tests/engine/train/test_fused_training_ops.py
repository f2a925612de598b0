"""What training computes in a faster form, against the same in plain torch, transformers and peft."""

import shutil

import pytest
import torch
from torch.nn import functional as F

from hybrid_rlhf.core.tensors import SequenceBatch
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.engine.train.patches import training_forms
from hybrid_rlhf.kernels import cpu
from hybrid_rlhf.kernels.gradients import causal_attention_by
from hybrid_rlhf.models.dropout import disable_dropout
from hybrid_rlhf.models.lora import Adapters, LoraConfig, add_lora
from hybrid_rlhf.models.lora_products import fused_adapters
from hybrid_rlhf.roles import PolicyModule
from tests.factories.adapters import base_with
from tests.factories.tiny import tiny_causal_lm

# Largest relative difference of a gradient (by norm) from fp64's; torch's own kernel is at 1e-6, 4e-3 and 6e-4.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
SHAPES = [(2, 4, 4, 64, 64), (3, 6, 2, 32, 32), (1, 3, 1, 20, 24), (2, 4, 2, 80, 128), (1, 5, 5, 5, 3)]


@pytest.fixture(autouse=True, scope="module")
def _compiler():
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")


def by_hand(query, key, value, scaling):
    """Causal attention in as many words, (B, H, T, D) -> (B, T, H, Dv)."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    hidden = torch.ones(query.shape[2], query.shape[2]).triu(1).bool()
    return ((query @ key.mT * scaling).masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(1, 2)


def with_gradients(function, tensors, gradient):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    out.backward(gradient)
    return [out.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("length", [2, 31, 70])
def test_attention_and_its_gradients_are_those_of_the_formula(dtype, shape, length):
    batch, heads, kv_heads, dim, value_dim = shape
    g = torch.Generator().manual_seed(length)
    query, key, value, gradient = (torch.randn(batch, length, h, d, generator=g).to(dtype).transpose(1, 2)
                                   for h, d in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim),
                                                (heads, value_dim)))
    gradient = gradient.transpose(1, 2)
    attention = causal_attention_by(cpu.module())
    got = with_gradients(lambda *x: attention(*x, scaling=0.3), (query, key, value), gradient)
    want = with_gradients(lambda *x: by_hand(*x, 0.3), [t.double() for t in (query, key, value)], gradient.double())
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        assert (ours.double() - theirs).norm() <= BOUNDS[dtype] * theirs.norm()


def gradients_of(model, ids, block=None):
    """Loss and gradients of a model's own forward, inside `block` if there is one."""
    def run():
        model.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    if block is None:
        return run()
    with block:
        return run()


def assert_same(found, wanted, bound):
    assert abs(found[0] - wanted[0]) <= bound * abs(wanted[0])
    assert found[1].keys() == wanted[1].keys() != set()
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).norm() <= bound * gradient.norm() + 1e-8, name


@pytest.mark.parametrize("kind, settings", [
    ("llama", {}), ("opt", dict(word_embed_proj_dim=32, ffn_dim=64)), ("gpt2", {}), ("qwen3", {}), ("gemma2", {}),
    ("mistral", {"sliding_window": 4}), ("phi", {})])
def test_a_model_trains_to_the_same_gradients_as_by_its_own_attention(kind, settings):
    model = disable_dropout(tiny_causal_lm(kind=kind, **settings)).train()
    ids = torch.randint(3, 60, (3, 12), generator=torch.Generator().manual_seed(0))
    assert_same(gradients_of(model, ids, training_forms(model)), gradients_of(model, ids), 2e-5)


def test_an_engine_takes_our_attention_in_training_and_leaves_sdpa_as_it_was(monkeypatch):
    from transformers.modeling_utils import AttentionInterface

    import hybrid_rlhf.engine.train.patches as forms

    before, calls, ops = AttentionInterface._global_mapping["sdpa"], [], forms.ops_for("cpu")

    def counted(*given, **named):
        calls.append(1)
        return causal_attention_by(cpu.module())(*given, **named)

    monkeypatch.setattr(forms, "ops_for", lambda _device: ops._replace(causal_attention=counted))
    model = tiny_causal_lm()
    engine = HybridEngine(PolicyModule(model), model)
    mask = torch.ones(2, 9, dtype=torch.bool)
    engine(SequenceBatch(torch.randint(3, 60, (2, 9)), mask, mask))
    assert len(calls) == model.config.num_hidden_layers
    assert AttentionInterface._global_mapping["sdpa"] is before


def test_calls_that_are_not_plainly_causal_keep_their_own_attention():
    from hybrid_rlhf.engine.train.patches import attend

    def original(*_given, **_named):
        return "original", None

    module, x = torch.nn.Module(), torch.randn(1, 2, 5, 4)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)

    def which(query=x, key=x, value=x, given=None, **named):
        return attend(lambda *_x, **_n: "ours", original, module, query, key, value, given, **named)[0]

    assert which() == "ours"
    for case in (dict(given=mask), dict(dropout=0.1), dict(is_causal=False), dict(query=x[:, :, :1]),
                 dict(query=x[:, :, :3]), dict(softcap=30.0), dict(position_bias=x), dict(cache=object())):
        assert which(**case) == "original", case
    assert which(x.double(), x.double(), x.double()) == "original"
    module.is_causal = False
    assert which() == "original"


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_with_its_adapter_is_pefts_in_value_and_gradient(bias):
    model = tiny_causal_lm(kind="gpt_neox" if bias else "llama")
    add_lora(model, LoraConfig(r=4, alpha=6.0))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    ids = torch.randint(3, 60, (3, 12), generator=torch.Generator().manual_seed(0))
    wanted = gradients_of(model, ids)
    with fused_adapters(model) as count:
        assert count > 0
        assert_same(gradients_of(model, ids), wanted, 2e-5)
    assert_same(gradients_of(model, ids), wanted, 0.0)  # nothing of it stays


def test_adapters_with_dropout_or_switched_off_run_as_peft_wrote_them():
    model = tiny_causal_lm()
    add_lora(model, LoraConfig(r=4, dropout=0.5))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    ids = torch.randint(3, 60, (3, 12), generator=torch.Generator().manual_seed(0))

    def drawn(block=None):
        torch.manual_seed(5)
        return gradients_of(model.train(), ids, block)

    assert_same(drawn(fused_adapters(model)), drawn(), 0.0)
    model.eval()
    with torch.no_grad(), fused_adapters(model):
        adapted = model(ids).logits
    with torch.no_grad():
        torch.testing.assert_close(adapted, model(ids).logits)
        with model._peft_wrapper.disable_adapter():
            plain = model(ids).logits
            with fused_adapters(model):
                assert torch.equal(model(ids).logits, plain)
    assert not torch.allclose(adapted, plain)


def test_the_adapter_of_the_role_whose_turn_it_is_takes_part():
    model = base_with("actor", "critic")
    adapters = Adapters(model)
    ids = torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    for name in ("actor", "critic", None):
        with adapters.use(name), torch.no_grad():
            want = model(ids).logits
            with fused_adapters(model):
                torch.testing.assert_close(model(ids).logits, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 60])
def test_few_rows_of_an_adapted_layer_are_the_formula_s(dtype, rows):
    g = torch.Generator().manual_seed(rows)
    x, weight, bias, down, up = (torch.randn(*shape, generator=g).to(dtype)
                                 for shape in ((rows, 96), (130, 96), (130,), (5, 96), (130, 5)))
    found = cpu.module().adapted_linear(x, weight, bias, down, up, 0.75)
    wide = [t.double() for t in (x, weight, bias, down, up)]
    want = wide[0] @ wide[1].T + wide[2] + 0.75 * (wide[0] @ wide[3].T) @ wide[4].T
    assert found.dtype == dtype
    assert (found.double() - want).norm() <= (1e-6 if dtype == torch.float32 else 6e-3) * want.norm()
    assert (cpu.module().adapted_linear(x, weight, None, down, up, 0.0).double() - wide[0] @ wide[1].T).norm() <= (
        6e-3 * want.norm())
