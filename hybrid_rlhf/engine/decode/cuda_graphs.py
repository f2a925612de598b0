"""Decode steps over static buffers: recorded as a graph once per number of rows, then replayed without the host.

A whole step (the model's forward, sampling, the next step's inputs) reads and writes tensors at fixed addresses, so a
device can record it into a graph. One recording serves all positions: they are data, and attention runs over all
columns of the cache, masked by each row's position. Rows are padded to a few sizes with idle rows at position -1, for
which attention writes nothing; a model's own attention writes them to the last column of slot 0, that of a token
which no step reads. Recordings are held by the cache whose addresses they use, and are freed with it.
"""

from __future__ import annotations

import gc
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial

import torch
from torch import Tensor

from hybrid_rlhf.core.memory import is_out_of_memory
from hybrid_rlhf.core.torch_compat import end_graph_pool
from hybrid_rlhf.engine.decode.kv_cache import SlotCache
from hybrid_rlhf.engine.decode.parity import PROBE_LENGTHS, PROBE_STEPS, probe_sequences
from hybrid_rlhf.engine.decode.runner import Runner, error_summary
from hybrid_rlhf.engine.decode.sampler import candidate_ids, new_candidate_mask

_log = logging.getLogger(__name__)

# Records a step without running it; returns its replay. The step has run once before.
Capture = Callable[[Callable[[], None]], Callable[[], None]]
STEPS_PER_LOOK = 8  # replays before the host looks at the tokens
MAX_RECORDINGS = 64  # kept over one cache; a server meets more settings than that


def called(step: Callable[[], None]) -> Callable[[], None]:
    """The capture of devices without graphs: the step itself."""
    return step


class CudaCapture:
    """Records CUDA graphs; those alive share one memory pool, for they run one after another and keep nothing in it. A
    pool whose last graph is freed must not be used again: torch's allocator refuses it.
    """

    def __init__(self) -> None:
        self._alive: weakref.WeakSet = weakref.WeakSet()
        self._pool, self._stream = None, torch.cuda.Stream()

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        if not len(self._alive):
            self._pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()  # torch frees no cached memory during a capture to make room for a pool
        torch.cuda.synchronize()
        gc.disable()  # freeing device objects during a capture would break it
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step()
                except BaseException:
                    with suppress(Exception):  # of the broken capture: the step's error is the reason
                        self._end(graph)
                    raise
                self._end(graph)
        finally:
            if collects:
                gc.enable()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._alive.add(graph)
        return graph.replay

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except Exception:
            end_graph_pool(self._pool)
            raise


def capture_for(device: torch.device) -> Capture | None:
    """How steps are recorded on a device; None where they are not."""
    return CudaCapture() if device.type == "cuda" else None


@contextmanager
def _refusing_to_wait(device: torch.device) -> Iterator[None]:
    """Within the block, an operation for which the host waits raises, before it could spoil a recording."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def num_rows(wanted: int, most: int) -> int:
    """Rows of the recording for `wanted` requests: one of a few sizes, at most the slots. Below 8 rows a step takes as
    long as with 8, as its time is reading the weights. Kernels differ by the number of rows, so torch's deterministic
    mode has one."""
    if torch.are_deterministic_algorithms_enabled():
        return most
    size = max(8, 1 << (wanted - 1).bit_length()) if wanted <= 64 else -(-wanted // 64) * 64
    return min(size, most)


class StaticSteps:
    """Recorded steps over one cache, by number of rows and sampling settings. The cache holds them; they hold it
    weakly.

    guard: entered around every step that is not a replay. can_shrink: whether running out of memory is raised, because
    the caller then retries with fewer slots.
    """

    can_shrink = False

    def __init__(self, runner: Runner, cache: SlotCache,
                 guard: Callable[[], AbstractContextManager] = nullcontext) -> None:
        self.runner, self._cache, self._guard = runner, weakref.ref(cache), guard
        self._most, self._width, device = cache.num_slots, cache.capacity, runner.device
        size = -(-self._most // 16) * 16  # one alignment for any number of slots, so that kernels compile once
        self._inputs = torch.zeros(5, size, dtype=torch.long, device=device)
        self._tokens = torch.zeros(STEPS_PER_LOOK, size, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(STEPS_PER_LOOK, size, device=device)
        self._done = torch.zeros(1, dtype=torch.long, device=device)  # steps since the host looked
        self._seen: Tensor | None = None
        self._kept: Tensor | None = None  # (STEPS_PER_LOOK, rows, V) bool, with keep_candidates
        # a step's replay, and its sampler, held because the recording reads its tensors
        self._replays: dict[tuple, tuple[Callable[[], None], Callable]] = {}
        self._live = self._rows = 0
        self._is_plain = False

    def load(self, tokens: Tensor, positions: Tensor, counts: Tensor, streams: Tensor, slots: Tensor | None,
             seen: Tensor | None = None) -> None:
        """Set the rows (B,) to continue: next input token, its column, tokens drawn so far, random stream, slot (None:
        row b is slot b). seen (B, V): tokens under the repetition penalty.
        """
        self._live, self._rows = len(tokens), num_rows(len(tokens), self._most)
        # a view of the cache saves the model's own attention a copy; ours reads by slot anyway
        self._is_plain = slots is None and (self.runner.is_stateful or self.runner.path == "eager")
        slots = torch.arange(self._live, device=tokens.device) if slots is None else slots
        self._inputs[:, : self._live] = torch.stack([tokens, positions, counts, streams, slots])
        self._inputs[:, self._live : self._rows] = 0
        self._inputs[1, self._live : self._rows] = -1
        if seen is not None:
            if self._seen is None:
                self._seen = torch.zeros(self._most, seen.shape[1], dtype=torch.bool, device=seen.device)
            self._seen[: self._live] = seen

    @property
    def seen(self) -> Tensor:
        """(B, V): the seen tokens of the loaded rows, with those drawn since."""
        return self._seen[: self._live]

    def run(self, num_steps: int, draw: Callable, key: tuple, has_seen: bool = False, below_min_tokens: bool = False,
            keep_candidates: bool = False) -> Iterator[tuple[list[int], list[float], Sequence[Tensor] | None]]:
        """Up to STEPS_PER_LOOK steps, then the tokens and logprobs of each and, with keep_candidates, the candidate ids
        of each token. Steps with the same `key` are the same."""
        key = (self._rows, self._is_plain, has_seen, below_min_tokens, keep_candidates, *key)
        self._done.zero_()
        for _ in range(num_steps):
            if key in self._replays:
                self._replays[key][0]()
                continue
            step = partial(self._step, self._rows, self._is_plain, draw, has_seen, below_min_tokens, keep_candidates)
            if len(self._replays) >= MAX_RECORDINGS:
                self._replays.clear()
            with self._guard():
                step()  # the first step runs uncaptured: kernels compile, libraries initialise, and it counts
            self._replays[key] = self._recorded(step), draw
        tokens, logprobs = (t[:num_steps, : self._live].tolist() for t in (self._tokens, self._logprobs))
        kept = (candidate_ids(self._kept[i, : self._live]) if keep_candidates else None for i in range(num_steps))
        return zip(tokens, logprobs, kept, strict=True)

    def _recorded(self, step: Callable[[], None]) -> Callable[[], None]:
        """`step` captured; or `step` itself, with a warning, where that fails. Raises where memory ran out and the
        caller can take fewer slots."""
        if self.runner.capture is None:  # another step's capture has failed
            return step
        try:
            return self.runner.capture(step)
        except Exception as error:  # third-party code may raise anything
            is_short = is_out_of_memory(error)  # the next cache may fit
            if self._guard is not nullcontext or (is_short and self.can_shrink):
                raise
            if not is_short:
                self.runner.capture, self.runner.reasons["graphs"] = None, error_summary(error)
            _log.warning("a decode step could not be captured; it runs uncaptured (%s)", error_summary(error))
            return step

    def _step(self, rows: int, is_plain: bool, draw: Callable, has_seen: bool, below_min_tokens: bool,
              keep_candidates: bool) -> None:
        tokens, positions, counts, streams, slots = self._inputs[:, :rows].unbind(0)
        logits = self.runner.decode(self._cache(), tokens, positions, self._width, None if is_plain else slots,
                                    has_idle=True)
        kept = new_candidate_mask(logits) if keep_candidates else None
        drawn, logprobs = draw(logits, streams, counts, self._seen[:rows] if has_seen else None, below_min_tokens, kept)
        if kept is not None:
            if self._kept is None:  # in a step that runs uncaptured
                self._kept = kept.new_zeros(STEPS_PER_LOOK, self._tokens.shape[1], kept.shape[1])
            self._kept[:, :rows].index_copy_(0, self._done, kept[None])
        self._tokens[:, :rows].index_copy_(0, self._done, drawn[None])
        self._logprobs[:, :rows].index_copy_(0, self._done, logprobs[None])
        tokens.copy_(drawn)
        positions.add_(positions >= 0)
        counts.add_(1)
        self._done.add_(1)


def steps_of(runner: Runner, cache: SlotCache) -> StaticSteps | None:
    """The static steps of a cache, created at the first call; None without capture."""
    if runner.capture is not None and cache.steps is None:
        cache.steps = StaticSteps(runner, cache)
    return cache.steps if runner.capture is not None else None


def probe_capture(runner: Runner, capture: Capture | None) -> None:
    """Use `capture` for the decode steps of `runner` if they then reproduce the logits of the model's plain forward."""
    if capture is None or runner.path == "generate":
        return
    runner.capture = capture
    try:
        with torch.no_grad(), runner.plugged_in(is_probe=True):
            ours = _probe_logits(runner)
        reason = runner.disagreement(ours, "in captured steps")
    except Exception as error:  # third-party code may raise anything; it runs uncaptured
        if is_out_of_memory(error):
            raise
        reason = error_summary(error)
    if reason is not None:
        runner.capture, runner.reasons["graphs"] = None, reason
        _log.warning("%s: decode steps are not captured (%s)", type(runner.model).__name__, reason)


def _probe_logits(runner: Runner) -> Tensor:
    """Logits (3, 4, V) of the probe's sequences over static buffers: ragged rows, slots in no order, one row idle."""
    sequences, is_stateful = probe_sequences(runner.model), runner.is_stateful
    cache = runner.new_cache(4, max(map(len, sequences)) + 3)
    slots = [0, 1, 2, 3] if is_stateful else [2, 0, 3]
    for sequence, length, slot in zip(sequences, PROBE_LENGTHS, slots, strict=False):
        if length > 1:
            runner.prefill(cache, [sequence[: length - 1]], [0], [slot])
    steps = StaticSteps(runner, cache, partial(_refusing_to_wait, runner.device))
    first = [length - 1 for length in PROBE_LENGTHS] + [0] * is_stateful  # one more where every slot is a row
    table = torch.tensor([[*s, 0][c : c + PROBE_STEPS + 1] for s, c in zip([*sequences, [0] * 9], first, strict=False)],
                         device=runner.device)
    forced = _Forced(table, num_rows(len(first), 4))
    columns = torch.tensor(first, device=runner.device)
    steps.load(table[:, 0], columns, torch.zeros_like(columns), columns,
               None if is_stateful else torch.tensor(slots, device=runner.device))
    list(steps.run(PROBE_STEPS, forced, ("probe",)))
    return forced.logits[:, :3].transpose(0, 1)


class _Forced:
    """Draws the tokens of a table (B, T), step by step, and stores the logits (T - 1, rows, V) of each step."""

    def __init__(self, table: Tensor, rows: int) -> None:
        self._table = torch.cat([table, table[:1].expand(rows - len(table), -1)])
        self.logits: Tensor | None = None

    def __call__(self, logits: Tensor, streams: Tensor, counts: Tensor, _seen: Sequence | None,
                 _below_min_tokens: bool, _kept: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.logits is None:  # in the step that runs uncaptured
            self.logits = logits.new_zeros(self._table.shape[1] - 1, *logits.shape, dtype=torch.float32)
        self.logits.index_copy_(0, counts[:1], logits.float()[None])
        return self._table.gather(1, counts[:, None] + 1)[:, 0], torch.zeros_like(streams, dtype=torch.float32)
