"""torch.cuda of a simulated card, and what else of torch asks whether there is one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from tests.simulated_card import workspaces
from tests.simulated_card.card import DEVICE, Card
from tests.simulated_card.graphs import Recording

_SHARED = {(7, 5): 64 << 10, (8, 6): 99 << 10, (9, 0): 227 << 10}  # bytes that a block may have


class Stream:
    """Work on a simulated card is done at once, so streams have nothing to order; a wait for one is counted."""

    card: Card

    def __init__(self, *_given: object, **_named: object) -> None:
        self.device, self.cuda_stream, self.stream_id = DEVICE, id(self), id(self)

    def synchronize(self) -> None:
        self.card.waits_for("stream")

    def wait_stream(self, _stream: Stream) -> None: ...

    def wait_event(self, _event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return self.card.recording is not None


class Event:
    def __init__(self, *_given: object, **_named: object) -> None: ...

    def record(self, _stream: Stream | None = None) -> None: ...

    def wait(self, _stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        Stream.card.waits_for("event")

    def elapsed_time(self, _other: Event) -> float:
        return 1.0


class Pool:
    """Memory of graphs. It goes when the last one goes, and then must not be used again."""

    def __init__(self) -> None:
        self.graphs = weakref.WeakSet()
        self.was_used = False
        self.capture: ExitStack | None = None  # that is underway


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, *_given: object, **_named: object) -> None:
        self.recording = Recording(Stream.card.holds)

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        card, pool = Stream.card, pool or Pool()
        if card.recording is not None:
            raise RuntimeError("capture_begin: a capture is underway already")
        if pool.was_used and not len(pool.graphs):
            raise RuntimeError("graph pool: its last graph is gone; torch's allocator refuses it")
        pool.was_used = True
        pool.graphs.add(self)
        self._pool = pool
        memory = card.memory
        weakref.finalize(self, lambda: len(pool.graphs) or memory.end_pool(pool))
        pool.capture = ExitStack()
        pool.capture.enter_context(card.memory.capturing(pool))
        card.recording = self.recording

    def capture_end(self) -> None:
        """Where the capture is broken, torch's allocator goes on with it, as before pull request 180395."""
        card, card.recording = Stream.card, None
        with card.quiet():
            self.recording.end()
        if card.breaks_captures:
            raise RuntimeError("operation failed due to a previous error during capture")
        _end_pool(0, self._pool)

    def replay(self) -> None:
        Stream.card.launched("graph")
        with Stream.card.quiet():
            self.recording.replay()

    def pool(self) -> Pool:
        return self._pool

    def reset(self) -> None: ...


def _end_pool(_device: int, pool: Pool) -> None:
    """torch._C._cuda_endAllocateToPool."""
    if pool.capture is None:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
    pool.capture.close()
    pool.capture = None


def _always(value: object) -> Callable:
    return lambda *_given, **_named: value


def _nothing() -> Callable:
    """A function of its own for each name: torch's compiler refuses one with two."""
    return _always(None)


def functions(card: Card) -> dict[str, object]:
    """Attributes of torch.cuda."""
    return _device(card) | _memory(card) | _work(card) | _random(card)


def _device(card: Card) -> dict[str, object]:
    properties = SimpleNamespace(name="simulated card", major=card.capability[0], minor=card.capability[1],
                                 total_memory=card.memory.total, multi_processor_count=card.processors, warp_size=32,
                                 shared_memory_per_block=48 << 10,
                                 shared_memory_per_block_optin=_SHARED[card.capability],
                                 max_threads_per_multi_processor=1536, regs_per_multiprocessor=65536,
                                 L2_cache_size=4 << 20, gcnArchName="")
    return {"is_available": _always(True), "is_initialized": _always(True), "_is_compiled": _always(True),
            "init": _nothing(), "_lazy_init": _nothing(), "device_count": _always(1), "current_device": _always(0),
            "set_device": _nothing(), "device": lambda _device: nullcontext(), "get_device_properties":
            _always(properties), "get_device_name": _always(properties.name), "get_device_capability":
            _always(card.capability), "can_device_access_peer": _always(False), "utilization": _always(0),
            "is_bf16_supported": _always(card.capability >= (8, 0)),
            "get_arch_list": _always(["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"])}


def _memory(card: Card) -> dict[str, object]:
    memory = card.memory

    def empty_cache() -> None:
        if card.recording is None:
            assert memory.pool is None, "captures_underway.empty() INTERNAL ASSERT FAILED"
            memory.release()

    def reset_peak(_device: object = None) -> None:
        memory.peak = memory.allocated

    def stats(_device: object = None) -> dict[str, int]:
        return {"allocated_bytes.all.current": memory.allocated, "reserved_bytes.all.current": memory.reserved,
                "allocated_bytes.all.peak": memory.peak}

    return {"mem_get_info": lambda _device=None: (memory.free, memory.total), "empty_cache": empty_cache,
            "memory_allocated": lambda _device=None: memory.allocated, "max_memory_allocated":
            lambda _device=None: memory.peak, "memory_reserved": lambda _device=None: memory.reserved,
            "max_memory_reserved": lambda _device=None: memory.reserved, "reset_peak_memory_stats": reset_peak,
            "memory_stats": stats, "ipc_collect": _nothing(), "set_per_process_memory_fraction": _nothing(),
            "get_allocator_backend": _always("native"), "cudart": lambda: SimpleNamespace(
                cudaHostRegister=card.lock, cudaHostUnregister=card.unlock, cudaGetLastError=_always(0))}


def _work(card: Card) -> dict[str, object]:
    stream = Stream()

    def set_sync(mode: str | int) -> None:
        card.sync = {0: "default", 1: "warn", 2: "error"}.get(mode, mode)

    return {"synchronize": lambda _device=None: card.waits_for("synchronize"), "Stream": Stream, "Event": Event,
            "current_stream": _always(stream), "default_stream": _always(stream), "set_stream": _nothing(),
            "stream": lambda _stream: nullcontext(), "CUDAGraph": Graph, "graph_pool_handle": Pool,
            "is_current_stream_capturing": lambda: card.recording is not None, "set_sync_debug_mode": set_sync,
            "get_sync_debug_mode": lambda: {"default": 0, "warn": 1, "error": 2}[card.sync]}


def _random(card: Card) -> dict[str, object]:
    drawn = card.generator
    return {"get_rng_state": lambda _device=None: drawn.get_state(), "set_rng_state":
            lambda state, _device=None: drawn.set_state(state), "get_rng_state_all": lambda: [drawn.get_state()],
            "set_rng_state_all": lambda states: drawn.set_state(states[0]), "manual_seed": drawn.manual_seed,
            "manual_seed_all": drawn.manual_seed, "seed_all": _nothing(), "default_generators": (drawn,)}


def _groups() -> dict[str, object]:
    """Attributes of torch.distributed: NCCL's groups are gloo's."""
    init, backend = dist.init_process_group, dist.get_backend
    state = {"is_nccl": False}

    def init_process_group(name: str | None = None, **named: object) -> None:
        name = named.pop("backend", name)
        state["is_nccl"] = name == "nccl"
        init("gloo" if name == "nccl" else name, **named)

    def get_backend(group: object = None) -> str:
        return "nccl" if state["is_nccl"] else backend(group)

    return {"init_process_group": init_process_group, "get_backend": get_backend, "is_nccl_available": lambda: True}


def _in_threads(card: Card) -> object:
    plain = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with card:
            plain(thread)

    return run


def _launching(card: Card) -> dict:
    """Triton's interpreter reads the processor's memory; a launch is one kernel, which a graph records. Without it a
    kernel is counted and does nothing."""
    try:
        from triton.runtime.interpreter import GridExecutor
        from triton.runtime.jit import JITFunction
    except ImportError:
        return {}
    plain = GridExecutor.__call__

    def launch(executor: object, *given: object, **named: object) -> None:
        def run(*given: object, **named: object) -> None:
            with card.quiet():
                plain(executor, *given, **named)

        card.launched(executor.fn.__name__)
        if card.recording is None:
            run(*given, **named)
        else:
            card.recording.run(run, given, named)

    def count(kernel: object, *_given: object, **_named: object) -> None:
        card.launched(kernel.fn.__name__)

    return {GridExecutor: {"__call__": launch}, JITFunction: {"run": count}}


@contextmanager
def answered(card: Card) -> Iterator[None]:
    """Within the block torch.cuda is the card's."""
    Stream.card = card
    attend = workspaces.attention(card, torch.nn.functional.scaled_dot_product_attention)
    tables = {torch.cuda: functions(card), dist: _groups(), threading.Thread: {"run": _in_threads(card)},
              torch.nn.functional: {"scaled_dot_product_attention": attend},
              torch._C: {"_cuda_endAllocateToPool": _end_pool,
                         "_cuda_releasePool": lambda _device, pool: card.memory.end_pool(pool)},
              torch.backends.cuda: {"is_built": _always(False)},  # fake tensors of torch's own CUDA know no such card
              torch.cuda.nvtx: {name: _nothing() for name in ("range_push", "range_pop", "mark")},
              torch.accelerator: {"is_available": _always(True), "device_count": _always(1), "current_accelerator":
                                  _always(torch.device("cuda")), "current_device_index": _always(0), "current_stream":
                                  _always(Stream()), "synchronize": lambda *_given: card.waits_for("synchronize")},
              } | _launching(card)
    with ExitStack() as stack:
        for owner, names in tables.items():
            for name, value in names.items():
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "12.8"))
        yield
