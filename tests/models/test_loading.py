"""Loading, adapters and heads: what other systems got wrong."""

import json
import logging

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right
from hybrid_rlhf.models import load
from hybrid_rlhf.models import tokenizer as tokenizer_of
from hybrid_rlhf.models.backbone import check_head, hidden_states, own_head, packing_is_exact
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from hybrid_rlhf.models.saving import share_as
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


def test_a_lora_target_that_matches_nothing_is_an_error_naming_the_layers():
    with pytest.raises(UserError, match=r"query_key_value.*q_proj"):
        add_lora(tiny_causal_lm(), LoraConfig(r=4, target_modules=["query_key_value"]))


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


def test_a_model_for_a_card_is_read_onto_it_and_on_a_cpu_as_ever(tmp_path, monkeypatch):
    """Tensor by tensor: else all of it is in the computer's memory before it is moved."""
    import transformers

    given, read = [], transformers.AutoModelForCausalLM.from_pretrained

    def noted(*places, **named):
        given.append(named.pop("device_map", None))
        return read(*places, **named)

    folder = save_tiny(tmp_path / "model")
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", noted)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, _device: module)
    for device in (torch.device("cuda", 1), torch.device("cpu")):
        load.load_causal_lm(ModelConfig(folder), device)
    assert given == [{"": torch.device("cuda", 1)}, None]


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


def test_a_text_longer_than_the_tokenizers_own_limit_is_not_warned_of_twice(tmp_path, caplog):
    """transformers' line names a limit that is not the run's; what is too long a stage says itself."""
    save_tiny(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 4}))
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        assert len(tokenizer_of.load_tokenizer(str(tmp_path))("a long text, much longer than four")["input_ids"]) > 4
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert "longer than" not in caplog.text
