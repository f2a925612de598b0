"""A causal language model that says what a test wrote down: a real Llama whose head is solved for, not trained.

The layers are random, so that the last hidden state tells any text from any other; the head is the matrix that gives
the written token the largest logit after each of the written texts. An ordinary transformers model in every other way:
it decodes by any path of the engine, trains, takes adapters and can be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

LOGIT = 30.0  # of a written token; of all others 0: at temperature 1 one of 300 others comes once in 10^10 tokens


def conversation(tokenizer, *parts: str) -> list[list[int]]:  # noqa: ANN001
    """The tokens of text that is given and text that the model says, in turns: given, said, given, said, ...

    Special tokens are written as they are ("<|im_end|>"); each part is tokenised by itself, as a loop of turns does.
    """
    return [tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts]


def scripted_causal_lm(conversations: Sequence[Sequence[Sequence[int]]], vocab_size: int = 300, seed: int = 0,
                       **changes):  # noqa: ANN003, ANN201
    """A LlamaForCausalLM (fp32, eval) that continues each of `conversations` as it is written.

    conversations: token ids, [given, said, given, said, ...] each; said ends with the stop token where the turn does.
    Where two conversations part, both ways are as likely at temperature 1 (and either may be greedy's). After a text
    that no conversation has, the model says anything. changes: of the configuration. The model is half as wide again
    as there are texts to tell apart: 0.2 s for 300 said tokens.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    table = _table(conversations)
    width = 64 * -(-len(table) * 3 // 128)  # half as many again as there are texts to tell apart
    settings = dict(vocab_size=vocab_size, hidden_size=width, intermediate_size=width, num_hidden_layers=2,
                    head_dim=32, num_attention_heads=width // 32, num_key_value_heads=width // 64,
                    max_position_embeddings=4096, pad_token_id=0, eos_token_id=3, bos_token_id=1,
                    tie_word_embeddings=False, initializer_range=1.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()
    _spread(model)
    hidden = _hidden_states(model, conversations, table)
    targets = torch.zeros(len(table), vocab_size)
    for row, tokens in enumerate(table.values()):
        targets[row, sorted(tokens)] = LOGIT
    with torch.no_grad():
        rows = hidden.double()
        model.lm_head.weight.copy_((rows.T @ torch.linalg.solve(rows @ rows.T, targets.double())).T)  # the least norm
        wrong = ((hidden @ model.lm_head.weight.T - targets).abs() > 0.1).sum()
    if wrong:
        raise ValueError(f"{wrong} logits of {len(table)} texts are not as written: try another seed")
    return model


def _table(conversations: Sequence[Sequence[Sequence[int]]]) -> dict[tuple[int, ...], set[int]]:
    """Each text after which the model says something, and the tokens that it may say."""
    table: dict[tuple[int, ...], set[int]] = {}
    for parts in conversations:
        text: list[int] = []
        for number, part in enumerate(parts):
            for token in part:
                if number % 2:
                    table.setdefault(tuple(text), set()).add(token)
                text.append(token)
    return table


@torch.no_grad()
def _spread(model) -> None:  # noqa: ANN001
    """Scale each product to outputs of size 1 for inputs of size 1, queries to 3: every token leaves its trace, as flat
    attention would wash out one among hundreds."""
    for name, module in model.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.mul_((3.0 if name.endswith("q_proj") else 1.0) / module.in_features ** 0.5)


@torch.no_grad()
def _hidden_states(model, conversations: Sequence, table: dict) -> Tensor:  # noqa: ANN001
    """(len(table), width): the last hidden state after each text of `table`, in its order."""
    found: dict[tuple[int, ...], Tensor] = {}
    for parts in conversations:
        ids = list(chain.from_iterable(parts))
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
        found |= {tuple(ids[:n]): hidden[n - 1] for n in range(1, len(ids)) if tuple(ids[:n]) in table}
    return torch.stack([found[text] for text in table])
