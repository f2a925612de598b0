"""Loading, adapters and heads: what other systems got wrong."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import (
    CpmAntConfig,
    CpmAntForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    ProphetNetConfig,
    ProphetNetForCausalLM,
    XLNetConfig,
    XLNetLMHeadModel,
)

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right
from hybrid_rlhf.inference.conversation import check_can_chat
from hybrid_rlhf.models import load
from hybrid_rlhf.models import tokenizer as tokenizer_of
from hybrid_rlhf.models.backbone import check_head, hidden_states, own_head, packing_is_exact
from hybrid_rlhf.models.dropout import check_trains_as_it_evaluates, disable_dropout
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.models.load import ModelConfig, check_folder, load_causal_lm
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from hybrid_rlhf.models.merging import plain_weights
from hybrid_rlhf.models.saving import save, share_as
from hybrid_rlhf.training import builders
from tests.factories.merged import merged_state_dict
from tests.factories.tiny import save_tiny, tiny_causal_lm, tiny_scalar_model, tiny_tokenizer
from tests.simulated_card import simulated_card


def _batch(rows):
    mask = length_mask([len(r) for r in rows])
    return SequenceBatch(pad_right(rows, 0), mask, mask)


def test_the_pad_token_is_never_the_eos_token():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer_of.set_pad_token(tokenizer)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id and tokenizer.pad_token == "<|pad|>"
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    assert tokenizer_of.set_pad_token(tokenizer) is False  # <|pad|> is in the vocabulary already
    assert tokenizer.pad_token == "<|pad|>"


@pytest.mark.parametrize(("special", "chosen"), [
    (["<|fim_pad|>", "<|image_pad|>"], "<|fim_pad|>"),  # Qwen's base models: eos is their pad token
    (["<repo_name>", "<empty_output>", "<|image|>"], "<empty_output>"),  # SmolLM2's base model: one name for all else
    (["<|reserved_special_token_0|>"], "<|reserved_special_token_0|>"),
    (["<|image|>", "<|turn|>"], None), ([], None)])
def test_a_special_token_that_nobody_uses_pads_before_the_vocabulary_grows(special, chosen):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", *special], special_tokens=True)
    tokenizer.chat_template = "<|turn|>{{ messages }}"
    size = len(tokenizer)
    assert tokenizer_of.set_pad_token(tokenizer) is (chosen is None)
    assert (tokenizer.pad_token, len(tokenizer)) == (chosen or "<|pad|>", size + (chosen is None))


@pytest.mark.parametrize("kind, changes", [
    ("llama", {}), ("gpt2", dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)), ("qwen2", {}), ("gpt_neox", {}),
    ("gemma2", dict(head_dim=8, final_logit_softcapping=3.0)), ("cohere", dict(logit_scale=0.25)),
    ("granite", dict(logits_scaling=3.0)), ("mamba", dict(state_size=8)), ("opt", dict(ffn_dim=64)), ("bloom", {}),
])
def test_the_head_s_logits_are_the_model_s_own_for_any_architecture(kind, changes):
    model = tiny_causal_lm(kind=kind, **changes)
    check_head(model)
    rows = [[5, 6, 7, 8], [9, 10, 11]]
    whole = model(input_ids=torch.tensor([rows[0]])).logits[0]
    pieces = own_head(model)(hidden_states(model, _batch(rows))[0])
    torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-5)


def test_packing_is_found_exact_for_llama_and_leaking_for_mamba_and_bloom():
    assert packing_is_exact(tiny_causal_lm())
    assert not packing_is_exact(tiny_causal_lm(kind="mamba", state_size=8))
    assert not packing_is_exact(tiny_causal_lm(kind="bloom"))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_merging_gives_the_adapted_model_s_logits_and_leaves_the_live_weights_bit_equal(kind):
    model = tiny_causal_lm(kind=kind)
    add_lora(model, LoraConfig(r=4))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    merged = merged_state_dict(model)
    plain = tiny_causal_lm(seed=1, kind=kind)
    plain.load_state_dict(merged)
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(plain(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert (plain(ids).logits - tiny_causal_lm(kind=kind)(ids).logits).abs().max() > 1e-3
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())


def test_the_scalar_head_reads_what_plain_transformers_reads_at_the_last_real_token():
    model = tiny_scalar_model()
    rows = [[5, 6, 7, 8, 3], [9, 10, 3]]
    ours = ScalarModel(model)(_batch(rows))
    for i, row in enumerate(rows):
        assert ours[i, len(row) - 1].item() == pytest.approx(model(torch.tensor([row])).logits.item(), abs=1e-5)


def test_freezing_by_name_and_its_errors():
    model = load.prepare(tiny_causal_lm(), ModelConfig(freeze=["layers.0.", "embed"]), 300)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen and all("layers.0." in n or "embed" in n for n in frozen)
    with pytest.raises(UserError, match="matches no parameter"):
        load.prepare(tiny_causal_lm(), ModelConfig(freeze=["layer_0"]), 300)
    with pytest.raises(UserError, match="nothing is trained"):
        load.prepare(tiny_causal_lm(), ModelConfig(freeze=["."]), 300)


def test_folders_that_are_no_models_are_refused_in_one_line(tmp_path):
    good = save_tiny(tmp_path / "good")
    assert load.load_causal_lm(ModelConfig(good)) is not None
    cases = {"missing": "does not exist", "empty": "it needs a config.json", "unweighted": "no weights",
             "pickled": "a pickle", "mute": "no tokenizer"}
    for name, message in cases.items():
        folder = tmp_path / name
        if name != "missing":
            folder.mkdir()
        if name in ("unweighted", "pickled", "mute"):
            (folder / "config.json").write_text((tmp_path / "good" / "config.json").read_text())
        if name == "pickled":
            (folder / "pytorch_model.bin").write_bytes(b"\x80")
        read = tokenizer_of.load_tokenizer if name == "mute" else lambda p: load.load_causal_lm(ModelConfig(p))
        with pytest.raises(UserError, match=message) as caught:
            read(str(folder))
        assert "\n" not in str(caught.value)


def test_saved_weights_may_be_read_by_whoever_may_read_the_settings_beside_them(tmp_path):
    (tmp_path / "config.json").touch(mode=0o644)
    (tmp_path / "model.safetensors").touch(mode=0o600)
    share_as(tmp_path / "config.json")
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode


def test_memory_that_runs_out_while_weights_are_quantised_is_told_as_that(tmp_path, monkeypatch):
    """transformers notes such errors and ends with one that tells of a file that it could not convert."""
    from transformers.integrations import bitsandbytes

    def full(*_given, **_named):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB.")

    folder = save_tiny(tmp_path / "model")
    monkeypatch.setattr(bitsandbytes.Bnb4bitQuantize, "convert", full)
    with pytest.raises(torch.OutOfMemoryError):
        load.load_causal_lm(ModelConfig(folder, load_in_4bit=True))


def test_a_model_on_a_card_has_the_weights_and_tables_of_one_on_a_cpu_and_all_of_them_there(tmp_path):
    folder = save_tiny(tmp_path / "model")
    plain = load.load_causal_lm(ModelConfig(folder))
    with simulated_card():
        model = load.load_causal_lm(ModelConfig(folder, dtype="float32"), torch.device("cuda", 0))
        found = dict([*model.named_parameters(), *model.named_buffers()])
        assert {tensor.device for tensor in found.values()} == {torch.device("cuda", 0)}
        for name, tensor in [*plain.named_parameters(), *plain.named_buffers()]:
            assert torch.equal(found[name].cpu(), tensor), name


def test_attention_scores_that_are_capped_are_capped_in_training_too(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model("gemma2", vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                    num_attention_heads=4, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=1,
                                    attn_logit_softcapping=0.01, layer_types=["full_attention"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    model.save_pretrained(tmp_path)
    loaded = load.load_causal_lm(ModelConfig(model_name_or_path=str(tmp_path)))
    weights = loaded(torch.arange(5, 13)[None], output_attentions=True).attentions
    # within 0.01 of each other all scores weigh alike: 1/8 for each of the last row
    assert weights is not None and torch.allclose(weights[0][0, :, -1], torch.full((4, 8), 1 / 8), atol=0.005)
    assert load.named_attention(ModelConfig(model_name_or_path="x"), settings) == {"attn_implementation": "eager"}
    settings.attn_logit_softcapping = None
    assert load.named_attention(ModelConfig(model_name_or_path="x"), settings) == {}


# -- What a model must be to be trained here ---------------------------------------------------------------------------


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                                        num_attention_heads=2))


MODELS = {
    "with the tokens behind it": [
        lambda: XLNetLMHeadModel(XLNetConfig(vocab_size=64, d_model=16, n_layer=2, n_head=2, d_inner=32,
                                             initializer_range=0.3)),
        lambda: CpmAntForCausalLM(CpmAntConfig(vocab_size=64, hidden_size=16, num_attention_heads=2, dim_head=8,
                                               dim_ff=32, num_hidden_layers=2, prompt_length=4, prompt_types=4,
                                               segment_types=4))],
    "not a function of its last hidden states": [
        lambda: ProphetNetForCausalLM(ProphetNetConfig(vocab_size=64, hidden_size=16, num_decoder_layers=2,
                                                       num_decoder_attention_heads=2, decoder_ffn_dim=32,
                                                       max_position_embeddings=64, ngram=2, is_decoder=True))],
}


@pytest.mark.parametrize("line, make", [(line, make) for line, makes in MODELS.items() for make in makes])
def test_a_model_that_does_not_predict_the_next_token_is_refused(line, make):
    torch.manual_seed(0)
    with pytest.raises(UserError, match=f"{line}.*cannot be trained here"):
        check_head(make())


def test_a_llama_is_taken_and_keeps_its_mode():
    model = llama().train()
    check_head(model)
    assert model.training


# -- A model that is sampled computes the same in training, whatever its authors call their dropout --------------------


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


# -- A model as llama.cpp has it is named as such, wherever a model is asked for ---------------------------------------


@pytest.mark.parametrize("check", [check_folder, check_can_chat])
def test_a_gguf_is_named_and_what_it_was_made_from_asked_for(tmp_path, check):
    (tmp_path / "m-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"\(m-q4.gguf\) is llama.cpp's GGUF, which is not read here; give the folder"):
        check(str(tmp_path))
    with pytest.raises(UserError, match=r"m-q4.gguf is llama.cpp's GGUF, which"):
        check_folder(str(tmp_path / "m-q4.gguf"))
