"""Prompts, settings, engines and transformers' own greedy tokens: what tests of decoding share."""

from __future__ import annotations

import torch

from hybrid_rlhf.engine import HybridEngine, SamplingConfig

PROMPTS = [[(3 + 7 * i + 5 * j * j) % 90 + 5 for j in range(n)] for i, n in enumerate((7, 1, 9, 2, 5))]
GREEDY = SamplingConfig(max_new_tokens=8, temperature=0)
EAGER = {"falcon", "bloom"}  # their attention is not to be replaced


def decode_engine(model, **settings):
    return HybridEngine(model, model, eos_ids=[2], **settings)


def greedy_by_generate(model, prompts=PROMPTS, settings=GREEDY):
    """transformers' greedy tokens, one prompt at a time, so that nothing is padded."""
    tokens = []
    for prompt in prompts:
        out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                             do_sample=False, max_new_tokens=settings.max_new_tokens, eos_token_id=2, pad_token_id=0)
        tokens.append(out[0, len(prompt):].tolist())
    return tokens


def greedy_tokens(engine, prompts=PROMPTS):
    with engine.inference():
        return engine.generate(prompts, GREEDY).tokens


@torch.no_grad()
def plain_logprobs(model, prompt, tokens, temperature=1.0):
    """Log-probabilities of the tokens after a prompt, by transformers' own forward of the whole sequence, in fp64."""
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


MANY_PROMPTS = [[(3 + 7 * i + 5 * j * j) % 90 + 5 for j in range(1 + (5 * i) % 11)] for i in range(64)]
SETTINGS = SamplingConfig(max_new_tokens=12)
