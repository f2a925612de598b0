"""Requests through transformers' generate, for models that do not run over slots: the same draws, limits and random
streams as the scheduler's, in batches of prompts of one length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, repeat
from queue import SimpleQueue
from threading import Thread

import torch
from torch import Tensor

from hybrid_rlhf.engine.decode.hf_generate import generate_by
from hybrid_rlhf.engine.decode.request import Request, check_finite, stream
from hybrid_rlhf.engine.decode.runner import Runner
from hybrid_rlhf.engine.decode.sampler import candidate_ids, new_candidate_mask
from hybrid_rlhf.engine.decode.sampling import SamplingConfig


class GenerateBatches:
    """Runs requests on a runner whose path is "generate". stops: tokens that end a response (they are part of it).
    keep_candidates: whether requests record the candidate tokens of each draw, where sampling is truncated."""

    def __init__(self, runner: Runner, sampling: SamplingConfig, stops: Sequence[int], max_batch: int,
                 keep_candidates: bool = False) -> None:
        self.runner, self.sampling, self.max_batch = runner, sampling, max_batch
        self._keep_candidates = keep_candidates and sampling.is_truncated
        self.stops = frozenset(stops)

    def run(self, requests: Sequence[Request], on_token: Callable[[], None] = lambda: None) -> int:
        """Run all requests to their end; on_token is called after every step. Returns the largest cache's bytes.

        Raises UserError when the model's logits are not finite.
        """
        most = 0
        by_length = sorted(requests, key=lambda r: len(r.prompt))
        for _, group in groupby(by_length, key=lambda r: len(r.prompt)):
            alike = list(group)
            for start in range(0, len(alike), self.max_batch):
                batch = alike[start : start + self.max_batch]
                most = max(most, generate_by(
                    self.runner.model, [r.prompt for r in batch], self._chooser(batch, on_token),
                    lambda batch=batch: [self._has_ended(r) for r in batch], max(r.limit for r in batch),
                    self.runner.keeps_cache))
        return most

    def stream(self, request: Request) -> Iterator[None]:
        """`run` for one request, as an iterator that yields after every token and computes only on demand.

        generate cannot be suspended, so it runs in a thread that alternates with the reader.
        """
        turns: SimpleQueue[bool] = SimpleQueue()
        news: SimpleQueue[BaseException | bool] = SimpleQueue()  # True: a token; False: the end

        def pause() -> None:
            news.put(True)
            if not turns.get():
                raise _DroppedError

        def work() -> None:
            try:
                if self.runner.device.type == "cuda":
                    torch.cuda.set_device(self.runner.device)  # a new thread uses device 0
                self.run([request], pause)
                news.put(False)
            except BaseException as error:
                news.put(error)

        thread = Thread(target=work, daemon=True)
        thread.start()
        try:
            while (new := news.get()) is not False:
                if isinstance(new, BaseException):
                    raise new
                yield
                self.runner.check_inside()
                turns.put(True)
        finally:
            turns.put(False)
            thread.join()

    def _has_ended(self, request: Request) -> bool:
        return bool(request.tokens) and (len(request.tokens) >= request.limit or request.tokens[-1] in self.stops)

    def _chooser(self, batch: list[Request], on_token: Callable[[], None]) -> Callable[[Tensor, Tensor], Tensor]:
        """The function that draws the next token of each row and appends it to its request until that has ended."""
        sampling, device = self.sampling, self.runner.device
        streams = torch.tensor([stream(r.seed, r.number) for r in batch], device=device)
        before = torch.tensor([r.num_drawn for r in batch], device=device)
        start = len(batch[0].prompt)
        stops = torch.tensor(sorted(self.stops), dtype=torch.long, device=device)

        def choose(ids: Tensor, logits: Tensor) -> Tensor:
            count, seen, forbidden = ids.shape[1] - start, None, None
            if sampling.repetition_penalty != 1:
                seen = torch.zeros(logits.shape, dtype=torch.bool, device=device).scatter_(1, ids, True)
            if count < sampling.min_new_tokens and self.stops:
                forbidden = torch.zeros(logits.shape, dtype=torch.bool, device=device)
                forbidden[:, stops] = (before + count < sampling.min_new_tokens)[:, None]
            kept = new_candidate_mask(logits) if self._keep_candidates else None
            tokens, logprobs = self.runner.ops.sample(
                logits, streams, before + count, temperature=sampling.temperature,
                top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty, seen=seen, forbidden=forbidden, kept=kept)
            sets = repeat(None) if kept is None else candidate_ids(kept)
            rows = zip(batch, tokens.tolist(), logprobs.tolist(), sets, strict=False)
            for request, token, logprob, candidates in rows:
                if not self._has_ended(request):
                    check_finite(logprob, request)
                    request.kept += [] if candidates is None else [candidates]
                    request.tokens.append(token)
                    request.logprobs.append(logprob)
            on_token()
            return tokens

        return choose


class _DroppedError(Exception):
    """The reader of a stream has closed it."""
