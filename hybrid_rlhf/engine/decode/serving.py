"""Continuous batching for a server: requests come and go while others run, step by step, from one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.image_files import ImageRef
from hybrid_rlhf.engine.decode.admission import check_lengths, check_reads_images, fitting_cache
from hybrid_rlhf.engine.decode.hf_batches import GenerateBatches
from hybrid_rlhf.engine.decode.request import Request
from hybrid_rlhf.engine.decode.runner import Runner
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.engine.decode.scheduler import Scheduler


class Serving(Protocol):
    """num_slots: requests that run at once. stops: tokens that end a response and are its last one.

    Tokens appear in a request's `tokens`; it has ended when the last is a stop or there are `limit` of them. Requests
    need a `sampling` of their own, without num_samples and stop_token_ids. After an error all are lost.
    """

    num_slots: int
    stops: frozenset[int]

    def prompt(self, ids: Sequence[int], images: Sequence[ImageRef]) -> list[int]:
        """A prompt with images as requests have it; from one thread at a time. Raises UserError for a model that does
        not read them here."""

    def check(self, request: Request) -> None:
        """Raise UserError for a request that can never run."""

    def submit(self, request: Request) -> None: ...

    def drop(self, request: Request) -> None:
        """Remove a waiting or running request; does nothing where it has ended."""

    def step(self) -> bool:
        """Draw a token or more for some requests; False when there are none. UserError for logits that are not
        finite."""


class SlotServing:
    """Requests over the slots of one cache, all at once. num_pages: as Runner.new_cache takes it."""

    def __init__(self, runner: Runner, num_slots: int, capacity: int, stops: Sequence[int],
                 num_pages: int | None = None) -> None:
        self.num_slots, self.capacity, self.stops = num_slots, capacity, frozenset(stops)
        self._runner = runner
        self._scheduler = Scheduler(runner, runner.new_cache(num_slots, capacity, num_pages), SamplingConfig(), stops,
                                    is_eager=True)

    def prompt(self, ids: Sequence[int], images: Sequence[ImageRef]) -> list[int]:
        return self._runner.images.numbered(ids, images)

    def check(self, request: Request) -> None:
        check_lengths(self._runner, [list(request.prompt)], [request.limit])
        if len(request.prompt) + request.limit > self.capacity:
            raise UserError(f"a prompt of {len(request.prompt)} tokens and an answer of {request.limit} do not fit in "
                            f"{self.capacity}; ask for less, or start with a larger --max_context")

    def submit(self, request: Request) -> None:
        self._scheduler.submit([request])

    def drop(self, request: Request) -> None:
        self._scheduler.drop(request)

    def step(self) -> bool:
        return self._scheduler.step()


class TurnServing:
    """One request after the other, by transformers' generate, for models that do not run over slots."""

    num_slots = 1

    def __init__(self, runner: Runner, stops: Sequence[int]) -> None:
        self.stops, self._runner = frozenset(stops), runner
        self._waiting: deque[Request] = deque()
        self._running: Request | None = None
        self._drawn: Iterator[None] | None = None

    def prompt(self, ids: Sequence[int], images: Sequence[ImageRef]) -> list[int]:
        if images:
            check_reads_images(self._runner)
        return list(ids)

    def check(self, request: Request) -> None:
        check_lengths(self._runner, [list(request.prompt)], [request.limit])

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def drop(self, request: Request) -> None:
        self._waiting = deque(r for r in self._waiting if r is not request)
        if request is self._running:
            self._drawn.close()
            self._running = self._drawn = None

    def step(self) -> bool:
        if self._running is None:
            if not self._waiting:
                return False
            self._running = self._waiting.popleft()
            batches = GenerateBatches(self._runner, self._running.sampling, self.stops, 1)
            self._drawn = batches.stream(self._running)
        if next(self._drawn, self) is self:
            self._running = self._drawn = None
        return True


def open_serving(runner: Runner, num_slots: int, capacity: int, stops: Sequence[int], max_bytes: int | None) -> Serving:
    """Open `num_slots` slots of `capacity` tokens (prompt and response) over as many pages as fit in memory, or, where
    slots share no pages, as many slots as fit.

    Raises UserError where not even one does.
    """
    slots, pages = fitting_cache(runner, num_slots, capacity, num_slots, max_bytes)
    return (TurnServing(runner, stops) if runner.path == "generate"
            else SlotServing(runner, slots, capacity, stops, pages))
