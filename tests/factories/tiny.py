"""Tiny seeded models and tokenizers, made locally: 2 layers, hidden 32, byte-level BPE with pad != eos."""

from __future__ import annotations

from functools import cache

import torch

TEXTS = ["Once upon a time there was a little red fox who lived in a wood.", "What is the last word of: red sun cat?",
         "The answer is cat. You are welcome!", "user system assistant 0 1 2 3 4 5 6 7 8 9"] * 4


@cache
def _backend(vocab_size: int) -> str:
    from hybrid_rlhf.models.tokenizer import train_tokenizer

    return train_tokenizer(TEXTS, vocab_size).backend_tokenizer.to_str()


def tiny_tokenizer(vocab_size: int = 300):
    """A fresh byte-level BPE tokenizer: <|pad|> 0, <|endoftext|> 1, <|im_start|> 2, <|im_end|> 3 (eos); no template."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_backend(vocab_size)), pad_token="<|pad|>",
                                   eos_token="<|im_end|>", clean_up_tokenization_spaces=False)


def other_tokenizer():
    """A fresh tokenizer of other texts than tiny_tokenizer's: other merges, other numbers; pad != eos, no template."""
    from hybrid_rlhf.models.tokenizer import train_tokenizer

    return train_tokenizer(["the fox is red. is it? answer answer answer: wood", "12 34 46 + =", "cats and dogs é"] * 4,
                           320)


def tiny_config(vocab_size: int = 300, kind: str = "llama", **changes):
    from transformers import AutoConfig

    settings = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=256, vocab_size=vocab_size, pad_token_id=0,
                    eos_token_id=3, bos_token_id=1)
    return AutoConfig.for_model(kind, **(settings | changes))


def tiny_causal_lm(seed: int = 0, **changes):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(**changes)).eval()


def tiny_scalar_model(seed: int = 0, **changes):
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1, **changes)).eval()
    torch.nn.init.normal_(model.score.weight, std=0.2)
    return model


def chatml_tokenizer():
    """tiny_tokenizer with the chat template that a model without one is given."""
    from hybrid_rlhf.data.chat import CHATML

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHATML
    return tokenizer


def optimizer_step(engine, pieces, loss) -> float:
    """One optimizer step, a micro-batch for each piece with loss(piece) as its share; returns the gradient's norm."""
    from hybrid_rlhf.engine.train.accumulate import Rows, accumulate

    rows = Rows(torch.ones(len(pieces), dtype=torch.long), lambda index: (loss(pieces[int(index)]), {}))
    return accumulate(engine, 1, rows).compute().get("grad_norm", float("nan"))


def own_cache(patch, folder) -> None:
    """An empty data cache in `folder`, by a MonkeyPatch; compiled kernels stay where they are (40 s on a busy core)."""
    from hybrid_rlhf.kernels.build import cache_folder

    kernels = cache_folder()
    kernels.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True)
    (folder / "kernels").symlink_to(kernels)
    patch.setenv("HYBRID_RLHF_CACHE", str(folder))


def save_tiny(path, seed: int = 0, template: bool = True, **changes) -> str:
    """A complete model folder (config, safetensors, tokenizer) at `path`; returns it as a string."""
    tokenizer = chatml_tokenizer() if template else tiny_tokenizer()
    tiny_causal_lm(seed, **changes).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)
