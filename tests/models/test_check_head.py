"""What a model must be to be trained here: a token's logits follow from the tokens before it, and from the last hidden
states alone."""

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
from hybrid_rlhf.models.backbone import check_head


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


def test_logits_that_are_not_of_the_states_are_refused():
    model = llama()

    def from_tokens(_model, _given, named, out) -> None:
        out["logits"] = out.logits + torch.nn.functional.one_hot(named["input_ids"], 64) if "input_ids" in named else (
            out.logits)

    model.register_forward_hook(from_tokens, with_kwargs=True)
    with pytest.raises(UserError, match=r"largest difference .*cannot be trained here"):
        check_head(model)
