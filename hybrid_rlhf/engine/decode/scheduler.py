"""Continuous batching: a fixed number of slots, finished sequences leave at once, waiting prompts enter.

What a request draws depends on its own tokens, its number and the seed, never on the rest of the batch or on its slot:
random numbers are indexed by (stream of the request, tokens drawn so far).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from hybrid_rlhf.engine.decode.cuda_graphs import STEPS_PER_LOOK, steps_of
from hybrid_rlhf.engine.decode.image_prompts import has_images, shifts_on
from hybrid_rlhf.engine.decode.kv_cache import SlotCache
from hybrid_rlhf.engine.decode.request import Request, check_finite, stream
from hybrid_rlhf.engine.decode.runner import Runner
from hybrid_rlhf.engine.decode.sampler import MixedSampler, Sampler, candidate_ids, new_candidate_mask, sampling_key
from hybrid_rlhf.engine.decode.sampling import SamplingConfig

K = TypeVar("K", bound=Hashable)

MAX_PREFILL_TOKENS = 4096  # of one forward, padding included
_MAX_SAMPLERS = 64  # settings that are remembered
_PATIENCE = 4  # calls of `step` that a following request waits for others, to share a prefill
_STEPS_PER_GROWTH = 8  # tokens for which requests get pages ahead
_STEPS_PER_SYNC = {"cuda": STEPS_PER_LOOK}  # how many steps run before the host looks at the tokens; 1 elsewhere


@dataclass
class _Batch:
    """The requests that run, one row each, and their tensors; rebuilt when a request enters or leaves."""

    live: list[tuple[int, Request]]  # row, request; the other rows are idle
    tokens: Tensor  # the tokens to be read next
    positions: Tensor  # their columns
    counts: Tensor  # tokens drawn so far
    streams: Tensor
    slot_ids: Tensor | None
    width: int  # columns that the next step looks at
    steps_left: int  # until the first of them reaches its limit
    below_min_tokens: bool  # some had not reached min_new_tokens when the batch was made
    shift: Tensor | None  # of the rows' positions (image_prompts.py); None: of none
    draw: Sampler | MixedSampler


class Scheduler:
    """Runs requests through the slots of one cache. stops: tokens that end a response (they are part of it).

    Requests enter by `submit` and leave by ending or by `drop`, at any time between two calls of `step`. is_eager: a
    waiting request enters as soon as a slot is free, for a streaming reader; else entries are gathered. The slot of a
    request that may go on is kept for the one that follows it, until `release` or until another needs it: then the
    whole sequence is read again. ended: finished requests that may go on, for the caller to collect. keep_candidates:
    whether requests record the candidate tokens of each draw, where sampling is truncated. never: tokens that are not
    drawn; by requests with images not theirs.

    Over pages a request enters when its prompt fits, and gets pages as it grows. Where none are left, prompts and
    sequences of slots that do not run are forgotten, then the youngest request is preempted: it waits, and its tokens
    so far are prefilled again.
    """

    def __init__(self, runner: Runner, cache: SlotCache, sampling: SamplingConfig,
                 stops: Sequence[int], is_eager: bool = False, keep_candidates: bool = False,
                 never: Sequence[int] = ()) -> None:
        self.runner, self.cache, self.sampling = runner, cache, sampling
        self.stops, self.device, self.is_eager = frozenset(stops), runner.device, is_eager
        self._keep_candidates = keep_candidates and sampling.is_truncated
        self.never = tuple(never)
        self._samplers: dict[tuple, Sampler] = {}
        self._static = steps_of(runner, cache)
        if self._static:
            self._static.can_shrink = not is_eager and cache.num_slots > 1
        self._loaded: _Batch | None = None
        self._waiting: deque[Request] = deque()
        self._returning: list[Request] = []  # that follow another one
        self._patience = 0
        self._running: dict[int, Request] = {}  # slot -> request
        self._kept: dict[int, Request] = {}  # slot -> the request that ended in it and may go on, oldest first
        self.ended: list[Request] = []
        self._batch: _Batch | None = None  # None: a request has entered or left
        self._free = deque(range(cache.num_slots))
        self._stored: dict[int, Sequence[int]] = {}  # slot -> the prompt whose columns it still holds
        self._pages, self._columns_left = cache.pages, 0  # tokens that all running requests have pages for
        if self._pages is not None:
            self._pages.reset()
        self.num_preempted = 0  # how often requests lost their pages
        self._seen: Tensor | None = None
        self._stream = lru_cache(4 * cache.num_slots + 64)(stream)
        self._steps = STEPS_PER_LOOK if self._static else _STEPS_PER_SYNC.get(self.device.type, 1)

    def run(self, requests: Sequence[Request]) -> Iterator[None]:
        """Run all requests to their end; yields whenever their tokens have grown, by one each or by several.

        Raises UserError when the model's logits are not finite.
        """
        self.submit(requests)
        while self.step():
            yield

    def submit(self, requests: Sequence[Request]) -> None:
        if not self._returning:
            self._patience = _PATIENCE
        for request in requests:
            (self._waiting if request.follows is None else self._returning).append(request)

    def drop(self, request: Request) -> None:
        """Remove a waiting or running request and free its slot. Does nothing where it has ended."""
        self._waiting = deque(r for r in self._waiting if r is not request)
        self._returning = [r for r in self._returning if r is not request]
        self._free_slots([slot for slot, running in self._running.items() if running is request])

    def release(self, request: Request) -> None:
        """Free the slot of a request that has ended: none will follow it."""
        for slot in [slot for slot, ended in self._kept.items() if ended is request]:
            del self._kept[slot]
            self._give_free(slot)

    def step(self) -> bool:
        """Admit waiting requests where they may enter, then draw one or several tokens for every running one; False
        when all are done. Raises UserError when the model's logits are not finite."""
        if self._returning and self._should_go_on():
            self._go_on()
        if self._should_admit() and (entering := self._admit()):
            self._running |= entering
            self._batch = None
        if not self._running:
            return False
        self._make_columns()
        if not self._running:  # all are preempted, for requests that follow others
            return True
        if self._batch is None:
            self._batch = self._rows()
        if self._advance(self._batch):
            self._leave([slot for slot, request in self._running.items() if self._has_ended(request)])
        return True

    def _leave(self, slots: list[int]) -> None:
        """Free the slots of ended requests; keep those of requests that may go on (but not states, which moved on)."""
        going_on = [slot for slot in slots if self._running[slot].may_go_on]
        self.ended += [self._running[slot] for slot in going_on]
        for slot in () if self.runner.is_stateful else going_on:
            self._kept[slot] = self._running.pop(slot)
            self._batch = None
        self._free_slots([slot for slot in slots if slot in self._running])

    def _free_slots(self, slots: list[int]) -> None:
        for slot in slots:
            del self._running[slot]
            self._give_free(slot)
        if slots:
            self._batch = None

    def _give_free(self, slot: int) -> None:
        self._free.append(slot)
        if self._pages is not None:
            self._pages.cut(slot, len(self._stored.get(slot, ())) - 1)
        if self.runner.is_stateful:  # every slot below the last one in use is a row
            self._free = deque(sorted(self._free))

    def _has_ended(self, request: Request) -> bool:
        return len(request.tokens) >= request.limit or request.tokens[-1] in self.stops

    # -- going on ----------------------------------------------------------------------------------------------------

    def _should_go_on(self) -> bool:
        """Whether following requests enter now: several share a prefill, but none waits for more than a few steps."""
        self._patience -= 1
        return (not self._running or self.is_eager or self._patience < 0
                or len(self._returning) >= max(1, self.cache.num_slots // 4))

    def _go_on(self) -> None:
        """Put requests that follow another into its slot and prefill their new tokens. Those whose slot was given away
        wait as new requests do, ahead of these."""
        slots = {id(kept): slot for slot, kept in self._kept.items()}
        entering, again = {}, []
        for request in self._returning:
            slot = slots.get(id(request.follows))
            if slot is not None and self._fits(slot, len(request.prompt)):
                entering[slot] = request
                continue
            again.append(request)
            if slot is not None:
                del self._kept[slot]
                self._give_free(slot)
        self._waiting.extendleft(reversed(again))
        self._returning = []
        if entering:
            offsets = {s: len(self._kept[s].prompt) + len(self._kept[s].tokens) - 1 for s in entering}
            chunks = {slot: list(r.prompt[offsets[slot]:-1]) for slot, r in entering.items()}
            for slots in _alike({slot: len(chunk) for slot, chunk in chunks.items()}):
                self.runner.extend(self.cache, [chunks[s] for s in slots], slots, [offsets[s] for s in slots],
                                   self.runner.shifts([entering[s].prompt for s in slots]))
            self._entered(entering)
            self._running |= entering
            self._batch = None

    # -- entering ----------------------------------------------------------------------------------------------------

    def _should_admit(self) -> bool:
        """Whether to prefill now. It reads all weights once, so it waits until a quarter of the slots is free or
        evictable."""
        num_free = len(self._free) + len(self._evictable())
        if not self._waiting or not num_free:
            return False
        enough = 1 if self.is_eager else min(len(self._waiting), max(1, self.cache.num_slots // 4))
        return not self._running or (num_free >= enough and self._has_pages())

    def _has_pages(self) -> bool:
        """Whether an eighth of the pages is free, or belongs to a free slot: one request after the other would cost a
        prefill each."""
        if self._pages is None or self.is_eager:
            return True
        idle = sum(self._pages.held(slot) for slot in self._free) // self._pages.size
        return self._pages.num_free + idle >= max(1, self._pages.num_pages // 8)

    def _evictable(self) -> list[int]:
        """Slots kept for requests that have not come yet, oldest first; these then read their whole sequence again."""
        here = {id(request.follows) for request in self._returning}
        return [slot for slot, kept in self._kept.items() if id(kept) not in here]

    def _admit(self) -> dict[int, Request]:
        """Give waiting requests the free slots, store their prompts (each distinct one once); slot -> request."""
        for slot in self._evictable()[: max(0, len(self._waiting) - len(self._free))]:
            del self._kept[slot]
            self._give_free(slot)
        holders = {tuple(prompt): slot for slot, prompt in self._stored.items()}
        if self.runner.is_stateful:  # a state has moved on with its response; columns stay
            holders = {}
        entering: dict[int, Request] = {}
        wanted: dict[tuple[int, ...], list[int]] = {}  # prompts to be read, and the slots that they go to
        copies: dict[int, list[int]] = {}  # slot that holds a prompt already -> slots that get it
        while self._waiting and self._free:
            request = self._waiting[0]
            sequence = (*request.prompt, *request.tokens)
            holder = holders.get(sequence)
            is_held = holder in self._stored  # not given to another meanwhile
            source = holder if is_held else wanted.get(sequence, [None])[0]
            slot = self._take(request, len(sequence), source, {*entering, *copies})
            if slot is None and not entering and not self._running and source in self._kept:
                del self._kept[source]  # nothing else would make room: the request takes its place
                self._give_free(source)
                continue
            if slot is None:
                break
            entering[slot] = self._waiting.popleft()
            if not request.is_stored and not is_held:
                wanted.setdefault(sequence, []).append(slot)
            elif not request.is_stored and slot != holder:
                copies.setdefault(holder, []).append(slot)
        for holder, slots in copies.items():
            if len(self._stored[holder]) > 1:
                self.cache.copy_columns(holder, slots, len(self._stored[holder]) - 1)
        self.cache.clear_states(torch.tensor([s for slots in wanted.values() for s in slots], dtype=torch.long,
                                             device=self.device))
        for prompts in self._buckets([p for p in wanted if len(p) > 1]):
            pairs = [(i, slot) for i, prompt in enumerate(prompts) for slot in wanted[prompt]]
            self.runner.prefill(self.cache, [p[:-1] for p in prompts], [i for i, _ in pairs], [s for _, s in pairs])
        self._entered(entering)
        return entering

    def _take(self, request: Request, length: int, source: int | None, keep: set[int]) -> int | None:
        """A free slot for a request of `length` tokens, over pages with room for the next ones too; None where the
        pages do not suffice. source: the slot that has, or will have, the same columns. keep: slots that keep theirs.
        """
        slot = source if source in self._free else self._free[0]
        self._free.remove(slot)
        if slot != source:
            self._stored.pop(slot, None)
        if self._pages is None:
            return slot
        if slot != source and source is not None:
            self._pages.share(source, slot, length - 1)
        elif slot != source:
            self._pages.cut(slot, 0)
        if self._fits(slot, min(length + self._pages.size, len(request.prompt) + request.limit), {*keep, source}):
            return slot
        self._pages.cut(slot, 0)
        self._stored.pop(slot, None)
        self._free.appendleft(slot)
        return None

    def _entered(self, entering: dict[int, Request]) -> None:
        for slot, request in entering.items():
            self._kept.pop(slot, None)
            self._stored[slot], request.follows = request.prompt, None
        self._mark_seen({s: r for s, r in entering.items() if self._settings(r).repetition_penalty != 1})

    def _buckets(self, prompts: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """Prompts in groups of similar length, so that little padding is computed."""
        if self.runner.is_stateful:  # padding would run through the state
            for length, group in groupby(sorted(prompts, key=len), key=len):
                alike, most = list(group), max(1, MAX_PREFILL_TOKENS // length)
                yield from (alike[i : i + most] for i in range(0, len(alike), most))
            return
        yield from _alike({prompt: len(prompt) for prompt in prompts})

    def _mark_seen(self, entering: dict[int, Request]) -> None:
        if entering and self._seen is None:
            size = self.runner.model.config.get_text_config().vocab_size
            self._seen = torch.zeros(self.cache.num_slots, size, dtype=torch.bool, device=self.device)
        for slot, request in entering.items():
            self._seen[slot] = False
            self._seen[slot, torch.tensor([i for i in (*request.prompt, *request.tokens) if i >= 0],
                                          device=self.device)] = True

    # -- pages -------------------------------------------------------------------------------------------------------

    def _fits(self, slot: int, columns: int, keep: Collection[int | None] = ()) -> bool:
        """Give a slot pages for so many columns, those of slots that do not run where no others are free."""
        while self._pages is not None and not self._pages.grow(slot, columns):
            if not self._reclaim(keep):
                return False
        return True

    def _reclaim(self, keep: Collection[int | None]) -> bool:
        """Forget the prompt of a free slot, or else a sequence that may go on, the oldest first; whether there was one.
        """
        idle = next((slot for slot in self._free if self._pages.held(slot) and slot not in keep), None)
        if idle is None:
            idle = next((slot for slot in self._evictable() if slot not in keep), None)
            if idle is None:
                return False
            del self._kept[idle]
            self._free.append(idle)
        self._pages.cut(idle, 0)
        self._stored.pop(idle, None)
        return True

    def _make_columns(self) -> None:
        """Give every running request pages for the next tokens, the oldest first; the youngest are preempted."""
        if self._pages is None or (self._batch is not None and self._columns_left >= self._steps):
            return
        self._columns_left = max(self._steps, _STEPS_PER_GROWTH)
        for slot, request in list(self._running.items()):
            used = len(request.prompt) + len(request.tokens)
            needed = min(used + self._columns_left - 1, len(request.prompt) + request.limit)
            while slot in self._running and not self._fits(slot, needed):
                self._preempt(next(reversed(self._running)))
        self._pages.sync()

    def _preempt(self, slot: int) -> None:
        """Let a running request wait; its columns are computed again when it returns."""
        self._waiting.appendleft(self._running.pop(slot))
        self._give_free(slot)
        self._batch = None
        self.num_preempted += 1

    # -- running -----------------------------------------------------------------------------------------------------

    def _rows(self) -> _Batch:
        """Rows for the running requests, in slot order; where states have no slot table, row b is slot b."""
        running = self._running
        slots = list(range(max(running) + 1)) if self.runner.is_stateful else sorted(running)
        idle = Request(0, [0], 0)
        requests = [running.get(slot, idle) for slot in slots]
        rows = [(r.tokens[-1] if r.tokens else r.prompt[-1], len(r.prompt) + len(r.tokens) - 1,
                 r.num_drawn + len(r.tokens), self._stream(r.seed, r.number)) for r in requests]
        tokens, positions, counts, streams = torch.tensor(rows, device=self.device).T.contiguous().unbind(0)
        is_plain = slots == list(range(len(slots)))
        live = [(i, r) for i, r in enumerate(requests) if r.limit]
        return _Batch(live, tokens, positions, counts, streams,
                      slot_ids=None if is_plain else torch.tensor(slots, device=self.device),
                      width=max(len(r.prompt) + len(r.tokens) for _, r in live),
                      steps_left=min(r.limit - len(r.tokens) for _, r in live),
                      below_min_tokens=any(r.num_drawn + len(r.tokens) < self._settings(r).min_new_tokens
                                           for _, r in live),
                      shift=shifts_on(self.device, self.runner.shifts([r.prompt for r in requests])),
                      draw=self._sampler(requests))

    def _settings(self, request: Request) -> SamplingConfig:
        return request.sampling or self.sampling

    def _sampler(self, requests: list[Request]) -> Sampler | MixedSampler:
        """The sampler of these rows: one for all, or one for each of their settings."""
        rows: dict[tuple, list[int]] = {}
        if len(self._samplers) > _MAX_SAMPLERS:
            self._samplers.clear()
        for i, request in enumerate(requests):
            settings = self._settings(request)
            never = self.never or (tuple(self.runner.images.never) if has_images(request.prompt) else ())
            key = (*sampling_key(settings), never)
            if key not in self._samplers:
                self._samplers[key] = Sampler(self.runner.ops, settings, self.stops, self.device, never)
            rows.setdefault(key, []).append(i)
        if len(rows) == 1:
            return self._samplers[next(iter(rows))]
        return MixedSampler([(torch.tensor(index, device=self.device), self._samplers[key])
                             for key, index in rows.items()])

    def _advance(self, batch: _Batch) -> bool:
        """Run some steps, then read their tokens on the host, without those past an end. True if some request has
        ended.

        This runs for every token, so it loops over the requests only where it must.
        """
        steps = min(self._steps, batch.steps_left)
        if self._static and isinstance(batch.draw, Sampler) and batch.shift is None:
            drawn = self._replay(batch, steps)
        else:
            queued = [self._step(batch, batch.width + i) for i in range(steps)]
            drawn = [(tokens.tolist(), logprobs.tolist(), None if kept is None else candidate_ids(kept))
                     for tokens, logprobs, kept in queued]
        batch.steps_left -= steps
        self._columns_left -= steps
        batch.width += steps
        has_ended = batch.steps_left == 0
        for tokens, logprobs, kept in drawn:
            if not math.isfinite(sum(logprobs)):
                for row, request in batch.live:
                    if not (request.tokens and self._has_ended(request)):
                        check_finite(logprobs[row], request)
            if kept is not None:
                for row, request in batch.live:
                    if not (request.tokens and self._has_ended(request)):
                        request.kept.append(kept[row])
            if has_ended or not self.stops.isdisjoint(tokens):
                has_ended = True
                for row, request in batch.live:
                    if not request.tokens or not self._has_ended(request):
                        request.tokens.append(tokens[row])
                        request.logprobs.append(logprobs[row])
                continue
            for row, request in batch.live:
                request.tokens.append(tokens[row])
                request.logprobs.append(logprobs[row])
        return has_ended

    def _step(self, batch: _Batch, width: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """One token for every row; leaves the batch ready for the next."""
        logits = self.runner.decode(self.cache, batch.tokens, batch.positions, width, batch.slot_ids,
                                    shift=batch.shift)
        seen = self._seen if self._seen is None or batch.slot_ids is None else self._seen[batch.slot_ids]
        seen = seen if seen is None else seen[: len(logits)]
        kept = new_candidate_mask(logits) if self._keep_candidates else None
        tokens, logprobs = batch.draw(logits, batch.streams, batch.counts, seen, batch.below_min_tokens, kept)
        if seen is not None and batch.slot_ids is not None:
            self._seen[batch.slot_ids] = seen
        batch.tokens, batch.positions, batch.counts = tokens, batch.positions + 1, batch.counts + 1
        return tokens, logprobs, kept

    def _replay(self, batch: _Batch, num_steps: int,
                ) -> Iterator[tuple[list[int], list[float], Sequence[Tensor] | None]]:
        """Replay steps over static buffers; the host reads only the tokens that were drawn."""
        has_seen = self._seen is not None
        rows = slice(len(batch.tokens)) if batch.slot_ids is None else batch.slot_ids
        if batch is not self._loaded:
            self._static.load(batch.tokens, batch.positions, batch.counts, batch.streams, batch.slot_ids,
                              self._seen[rows] if has_seen else None)
            self._loaded = batch
        drawn = self._static.run(num_steps, batch.draw, batch.draw.key, has_seen, batch.below_min_tokens,
                                 self._keep_candidates)
        if has_seen:
            self._seen[rows] = self._static.seen
        return drawn


def _alike(lengths: Mapping[K, int]) -> Iterator[list[K]]:
    """Groups that one forward reads, by the tokens of each entry: of similar length, and at most MAX_PREFILL_TOKENS
    with padding, or a single one."""
    group: list[K] = []
    for entry, length in sorted(lengths.items(), key=lambda item: -item[1]):
        tokens = (len(group) + 1) * lengths[group[0]] if group else 0
        if group and (tokens > MAX_PREFILL_TOKENS or (tokens > 256 and length < 0.75 * lengths[group[0]])):
            yield group
            group = []
        group.append(entry)
    if group:
        yield group
