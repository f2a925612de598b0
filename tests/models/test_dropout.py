"""A model that is sampled computes the same in training, whatever its authors call their dropout."""

from __future__ import annotations

import json

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.models.dropout import check_trains_as_it_evaluates, disable_dropout
from hybrid_rlhf.models.load import ModelConfig, load_causal_lm
from hybrid_rlhf.models.merging import plain_weights
from hybrid_rlhf.models.saving import save
from hybrid_rlhf.training import builders
from tests.factories.tiny import save_tiny, tiny_causal_lm, tiny_tokenizer

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
# where each keeps rates: modules, float attributes of modules, the configuration that its forward reads
KINDS = {"opt": dict(ffn_dim=64, dropout=0.5, attention_dropout=0.5),
         "gpt_bigcode": dict(n_inner=64, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5),
         "starcoder2": dict(residual_dropout=0.5, embedding_dropout=0.5, attention_dropout=0.5),
         "bloom": dict(hidden_dropout=0.5, attention_dropout=0.5),
         "falcon": dict(hidden_dropout=0.5, attention_dropout=0.5, alibi=False),
         "persimmon": dict(hidden_dropout=0.5, attention_dropout=0.5),
         "gptj": dict(rotary_dim=4, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5),
         "gpt_neo": dict(attention_types=[[["global", "local"], 1]], window_size=4, num_layers=2, num_heads=4,
                         attention_dropout=0.5, resid_dropout=0.5, embed_dropout=0.5)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_trains_as_it_evaluates_once_its_dropout_is_off(kind):
    model = tiny_causal_lm(kind=kind, **KINDS[kind])
    evaluated = model(IDS).logits
    assert not torch.allclose(model.train()(IDS).logits, evaluated, atol=1e-3)
    disable_dropout(model)
    assert torch.allclose(model(IDS).logits, evaluated, atol=1e-6)
    assert torch.equal(model(IDS).logits, model(IDS).logits)


def test_what_trains_otherwise_than_it_evaluates_is_refused_in_one_line_that_names_its_type():
    noisy = dict(kind="mixtral", num_local_experts=2, num_experts_per_tok=1, router_jitter_noise=0.5)
    with pytest.raises(UserError, match="a model of type mixtral computes otherwise in training") as caught:
        check_trains_as_it_evaluates(disable_dropout(tiny_causal_lm(**noisy)))
    assert "\n" not in str(caught.value)
    check_trains_as_it_evaluates(disable_dropout(tiny_causal_lm(**noisy | {"router_jitter_noise": 0.0})))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_comparison_moves_no_generator_and_leaves_the_mode(dtype):
    model = disable_dropout(tiny_causal_lm(kind="gpt_bigcode", **KINDS["gpt_bigcode"])).to(dtype)
    before = torch.get_rng_state()
    for training in (True, False):
        check_trains_as_it_evaluates(model.train(training))
        assert model.training is training
    assert torch.equal(torch.get_rng_state(), before)


def test_a_policy_is_opened_without_dropout_or_with_it_as_the_stage_wants(tmp_path):
    folder, tokenizer = save_tiny(tmp_path, kind="gpt_bigcode", **KINDS["gpt_bigcode"]), tiny_tokenizer()
    quiet, noisy = (builders.open_policy(ModelConfig(folder), tokenizer, 0, dropout=dropout).train()
                    for dropout in (False, True))
    assert torch.equal(quiet(IDS).logits, quiet(IDS).logits)
    assert not torch.equal(noisy(IDS).logits, noisy(IDS).logits)


def test_a_saved_model_keeps_the_rates_that_its_authors_gave_it(tmp_path):
    model = disable_dropout(load_causal_lm(ModelConfig(save_tiny(tmp_path / "a", kind="falcon", **KINDS["falcon"]))))
    save(model, plain_weights(model), tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["hidden_dropout"] == 0.5
    assert model.config.hidden_dropout == 0.0
