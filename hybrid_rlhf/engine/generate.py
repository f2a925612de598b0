"""Sampling through transformers' own generate, batch by batch, for models that the decode engine refuses. The settings
are complete: nothing is inherited from the model's generation_config, whose top_k or temperature would silently change
the policy that is sampled.
"""

from __future__ import annotations

import torch
from torch import nn

from hybrid_rlhf.engine.sampling import SamplingConfig


def generate_batch(model: nn.Module, prompts: list[list[int]], sampling: SamplingConfig, eos_ids: list[int],
                   pad_id: int) -> list[list[int]]:
    """Responses (token ids, up to and including the first stop token) to one batch of prompts."""
    device = next(model.parameters()).device
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad_id)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):  # generate continues at the right edge, so prompts are padded on the left
        ids[i, width - len(prompt):] = torch.tensor(prompt)
        mask[i, width - len(prompt):] = 1
    stops = [*eos_ids, *sampling.stop_token_ids]
    with _silent():
        out = model.generate(input_ids=ids.to(device), attention_mask=mask.to(device),
                             generation_config=_settings(model, sampling, stops, pad_id))
    return [_cut(row, set(stops)) for row in out[:, width:].tolist()]


def _cut(row: list[int], stops: set[int]) -> list[int]:
    """The row up to and including its first stop token."""
    for i, token in enumerate(row):
        if token in stops:
            return row[: i + 1]
    return row


def _settings(model: nn.Module, sampling: SamplingConfig, stops: list[int], pad_id: int):  # noqa: ANN202
    greedy = sampling.temperature == 0
    drawn = {} if greedy else dict(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
                                   min_p=sampling.min_p or None)
    return type(model.generation_config)(
        do_sample=not greedy, max_new_tokens=sampling.max_new_tokens, min_new_tokens=sampling.min_new_tokens or None,
        repetition_penalty=sampling.repetition_penalty, eos_token_id=stops, pad_token_id=pad_id, use_cache=True,
        **drawn)


class _silent:
    """generate warns when a model's own generation_config differs from the one given; that is the point here."""

    def __enter__(self) -> None:
        import logging

        self._logger = logging.getLogger("transformers.generation")
        self._level = self._logger.level
        self._logger.setLevel(logging.ERROR)

    def __exit__(self, *_exc: object) -> None:
        self._logger.setLevel(self._level)


@torch.no_grad()
def sampled_logprobs(model: nn.Module, prompts: list[list[int]], responses: list[list[int]],
                     temperature: float) -> list[list[float]]:
    """log softmax(logits / temperature) of every response token (temperature 0: of the logits), row by row."""
    out = []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.tensor([prompt + response], device=next(model.parameters()).device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / (temperature or 1.0)
        out.append(logits.log_softmax(-1).gather(1, ids[0, len(prompt):, None])[:, 0].tolist())
    return out
