"""Sampling through transformers' own generate, batch by batch. The settings are complete: nothing is inherited from
the model's generation_config, whose top_k or temperature would silently change the policy that is sampled.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hybrid_rlhf.engine.sampling import SamplingConfig


def generate_batch(model: nn.Module, prompts: list[list[int]], sampling: SamplingConfig, eos_ids: list[int],
                   pad_id: int, streamer: object | None = None) -> list[list[int]]:
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
        out = model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), streamer=streamer,
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


class _Cancelled(Exception):
    """Raised inside generate when nobody reads the stream any more."""


class _Tokens:
    """A transformers streamer that hands tokens to another thread."""

    def __init__(self) -> None:
        self.queue: queue.Queue[int | BaseException | None] = queue.Queue()
        self.cancelled = threading.Event()
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        if self.cancelled.is_set():
            raise _Cancelled
        if self._is_prompt:  # generate first puts the prompt
            self._is_prompt = False
            return
        for token in value.flatten().tolist():
            self.queue.put(token)

    def end(self) -> None:
        self.queue.put(None)


def stream(model: nn.Module, prompt: list[int], sampling: SamplingConfig, eos_ids: list[int],
           pad_id: int, seed: int) -> Iterator[int]:
    """Yield the tokens of one response as they are drawn, stop tokens excluded. Closing the iterator stops the work."""
    tokens = _Tokens()

    def work() -> None:
        try:
            with torch.no_grad(), torch.random.fork_rng():
                torch.manual_seed(seed)
                generate_batch(model, [prompt], sampling, eos_ids, pad_id, tokens)
        except _Cancelled:
            pass
        except BaseException as error:  # handed to the reader, who raises it
            tokens.queue.put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    stops = {*eos_ids, *sampling.stop_token_ids}
    try:
        while (token := tokens.queue.get()) is not None:
            if isinstance(token, BaseException):
                raise token
            if token not in stops:
                yield token
    finally:
        tokens.cancelled.set()
        thread.join()
