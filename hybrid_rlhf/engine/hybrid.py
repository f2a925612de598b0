"""The hybrid engine: one module, one set of weights, two modes, and `inference()` as the only switch between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hybrid_rlhf.core.distributed import RankGroup, max_over_ranks
from hybrid_rlhf.core.image_files import ImageRef
from hybrid_rlhf.engine.decode.admission import (
    check_generates,
    check_lengths,
    check_reads_images,
    check_turns,
    fitting_cache,
    fitting_slots,
    stop_ids,
)
from hybrid_rlhf.engine.decode.cuda_graphs import Capture, capture_for, probe_capture
from hybrid_rlhf.engine.decode.hf_batches import GenerateBatches
from hybrid_rlhf.engine.decode.kv_cache import SlotCache
from hybrid_rlhf.engine.decode.multi_turn import BatchTurns, SlotTurns, Turns
from hybrid_rlhf.engine.decode.native_types import why_not_native
from hybrid_rlhf.engine.decode.pages import NUM_PAGED, NUM_WHOLE
from hybrid_rlhf.engine.decode.reading import Reader
from hybrid_rlhf.engine.decode.request import Request
from hybrid_rlhf.engine.decode.runner import Runner
from hybrid_rlhf.engine.decode.sampling import Generation, SamplingConfig
from hybrid_rlhf.engine.decode.scheduler import Scheduler
from hybrid_rlhf.engine.decode.serving import Serving, open_serving
from hybrid_rlhf.engine.decode.streaming import Conversation
from hybrid_rlhf.engine.decode.tensor_parallel import all_agree, as_group, check_shardable, draw_together
from hybrid_rlhf.engine.device_memory import fewer_slots, release
from hybrid_rlhf.engine.idle_cache import IdleCache
from hybrid_rlhf.engine.train.deepspeed_compat import is_partitioned
from hybrid_rlhf.engine.train.offload import Activation, IdleOffload, module_tensors
from hybrid_rlhf.engine.train.optimizers import OptimizerConfig
from hybrid_rlhf.engine.train.passes import dummy_batch, zero_of
from hybrid_rlhf.engine.train.patches import training_forms
from hybrid_rlhf.engine.train.zero import ZeroConfig, ZeroFrozen, ZeroTraining, gathered
from hybrid_rlhf.models.dropout import draws_in_training
from hybrid_rlhf.models.modes import evaluating
from hybrid_rlhf.models.transformers_compat import checkpoint_without_draws

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_log = logging.getLogger(__name__)
_COLUMNS = 128  # of a cache over which steps are recorded, a multiple of this


class HybridEngine(Generic[ModuleT]):
    """One module in training or inference mode, over the same tensors.

    module: what training calls; its forward returns the numbers of a role. model: the Hugging Face causal model
    inside it that generates (None for a module that only scores). A fresh engine is in training mode; without an
    optimizer it can be called but not updated. max_batch: sequences decoded at once (None: NUM_WHOLE, or NUM_PAGED
    on a card); max_kv_bytes: the most that their cache may take (None: what is free). name: of its role, for
    messages. oom_limits: set when memory ran out: phase -> most tokens of a micro-batch, "slots" -> sequences
    decoded at once. tp: ranks (or a torch process group) that generate together, each with its shard of the
    weights; all call `inference` and `generate`. adapter: a context that makes the engine's own low-rank adapter
    the active one, where its module shares a base with others. capture: how decode steps are recorded
    (decode/cuda_graphs.py); "auto": as CUDA graphs on a card, None: not at all.
    """

    def __init__(self, module: ModuleT, model: nn.Module | None = None, *, eos_ids: Sequence[int] = (),
                 pad_id: int = 0, max_batch: int | None = None, max_kv_bytes: int | None = None, name: str = "model",
                 tp: RankGroup | ProcessGroup | None = None, capture: Capture | str | None = "auto",
                 adapter: Callable[[], AbstractContextManager] = nullcontext) -> None:
        self.module, self.model, self.name = module, model, name
        self.oom_limits: dict[str, int] = {}
        self.ranks, self._capture = as_group(tp), capture
        if self.ranks and model is not None:
            check_generates(model)
            check_shardable(model, self.ranks.degree)
        self.eos_ids, self.pad_id, self.max_batch, self.max_kv_bytes = list(eos_ids), pad_id, max_batch, max_kv_bytes
        if self.device.type == "cuda":
            # torch prefers cuDNN's attention on Hopper, which plans for each new shape, tens of milliseconds each
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.training: ZeroTraining | None = None
        self._activation = Activation(adapter, lambda: nullcontext() if self.is_inference else training_forms(module))
        self._frozen: ZeroFrozen | None = None
        self.is_inference = False
        self.kv_bytes = self.num_preempted = 0  # bytes of the newest generation, and its preemptions
        self._num_slots = 0
        self._runner: Runner | None = None
        self._cache: SlotCache | None = None
        self._idle_cache = IdleCache()
        self._conversation: Conversation | None = None

    @classmethod
    def for_inference(cls, model: nn.Module, tokenizer) -> HybridEngine:  # noqa: ANN001
        """An engine that only generates: no optimizer, no DeepSpeed."""
        return cls(model, model, eos_ids=stop_ids(model, tokenizer), pad_id=tokenizer.pad_token_id)

    def prepare_training(self, optimizer: OptimizerConfig, schedule: Callable[[int], float], zero: ZeroConfig,
                         parameters: dict[str, nn.Parameter] | None = None) -> HybridEngine:
        """Put the trainable parameters under ZeRO; after this accumulate() works.

        parameters: those that this engine trains, where others train some of the same module (None: all trainable).
        """
        if not draws_in_training(self.module):
            checkpoint_without_draws(self.module)
        self.training = ZeroTraining(self.module, optimizer, schedule, zero, parameters)
        return self

    def prepare_frozen(self, zero: ZeroConfig) -> HybridEngine:
        """Put the weights, never to be trained, under ZeRO 3: each process holds a part of them."""
        self._frozen = ZeroFrozen(self.module, zero)
        return self

    def offload_when_idle(self, *, keeps: Sequence[Tensor] = (), is_forced: bool = False) -> HybridEngine:
        """From now on keep weights, gradients and optimizer state on the device inside `active()` only, except `keeps`,
        which stay."""
        resident_ids = {id(tensor) for tensor in keeps}
        self._activation.offload = IdleOffload(lambda: [t for t in self._tensors() if id(t) not in resident_ids],
                                               self.device, is_forced=is_forced)
        self._activation.offload.leave()
        return self

    def readable(self, state: Any) -> Any:
        """`state` of this engine's tensors, with views of the host's copy for offloaded ones; nothing is copied."""
        return self._activation.offload.readable(state) if self._activation.offload else state

    def _tensors(self) -> list[Tensor]:
        return [*module_tensors(self.module), *(self.training.tensors() if self.training else ())]

    def active(self) -> AbstractContextManager:
        """The block in which this engine computes: its adapter is the active one, its tensors are on the device.

        Every forward, update and `inference()` enters it; a caller with several of them enters it once around all.
        """
        return self._activation.activated()

    def resident(self) -> AbstractContextManager:
        """A block with several activations of this engine: its tensors stay on the device between them."""
        return self._activation.resident()

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @contextmanager
    def inference(self) -> Iterator[HybridEngine]:
        """Inference mode for the block; the mode before is restored whatever happens inside. Does not nest.

        Under ZeRO 3 the weights are gathered once, for the whole block, and released at its end: every process must
        enter, and inside no process waits for another. With tp each rank gathers layer by layer and keeps its shard.
        """
        if self.is_inference:
            raise RuntimeError("inference() inside inference(): the engine is in inference mode already")
        self.is_inference = True
        try:
            weights = nullcontext() if self.ranks else gathered(self.module)
            with evaluating(self.module), self.active(), torch.no_grad(), weights, self._plugged_in():
                self._cache = self._idle_cache.take(self.module)
                yield self
                if self._is_lasting():
                    self._idle_cache.keep(self._cache, self.module)
        finally:
            self.is_inference = False
            self._cache = self._conversation = None  # frees the memory for training

    def _is_lasting(self) -> bool:
        """Whether the weights stay in place until the next mode, and training has allocated all its lasting memory."""
        moves = self._activation.offload is not None or is_partitioned(self.module) or self.ranks is not None
        return not moves and (self.training is None or self.training.num_steps > 0)

    def _plugged_in(self) -> AbstractContextManager:
        """The model over slots; the first call probes it."""
        if self.model is None:
            return nullcontext()
        if self._runner is None:
            check_generates(self.model)
            runner = Runner(self.model, self.ranks)
            runner.probe()
            if not self.ranks:  # collectives in every layer have not been tried in a recording
                probe_capture(runner, capture_for(self.device) if self._capture == "auto" else self._capture)
            self._runner = runner
        return self._runner.plugged_in()

    def describe(self) -> dict:
        """How this engine generates: path (native, eager or generate; None before the first `inference()`), kernels,
        fused (operation -> places), captured (whether decode steps are replayed), refused (path or graphs -> reason),
        not_native (why a model whose type decodes natively with tested releases does not, or None), slots and kv_bytes
        (of the newest generation, on this rank), max_batch, tp."""
        runner = self._runner
        return {"path": runner and runner.path, "kernels": runner and runner.ops.name,
                "fused": dict(runner.fusions.counts) if runner else {}, "captured": bool(runner and runner.capture),
                "refused": dict(runner.reasons) if runner else {},
                "not_native": why_not_native(runner) if runner else None, "kv_bytes": self.kv_bytes,
                "slots": self._num_slots, "max_batch": self._num_at_once(),
                "tp": self.ranks.degree if self.ranks else 1}

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seed: int = 0, *,
                 limits: Sequence[int] | None = None, numbers: Sequence[int] | None = None,
                 keep_candidates: bool = False, images: Sequence[Sequence[ImageRef]] | None = None) -> Generation:
        """Sample one response to each prompt (token ids). Only inside `inference()`.

        limits: most tokens of each response (sampling.max_new_tokens for all). numbers: each request's number
        under the seed (0, 1, ...): a request draws the same tokens under the same number, whatever runs beside it
        (on a card up to rounding, which differs with the number of rows).
        Under tensor parallelism each rank gives its own prompts (or none), all are drawn together, and each gets its
        own responses. keep_candidates: whether the candidate tokens of truncated sampling are recorded
        (Generation.kept). images: of each prompt, in the order of their tokens; no response then has a token of an
        image. Raises UserError for a prompt that leaves no room for max_new_tokens in the model's context,
        for a cache that cannot hold one request, and for logits that are not finite.
        """
        self._require_inference("generate")
        limits = [sampling.max_new_tokens] * len(prompts) if limits is None else list(limits)
        numbers = range(len(prompts)) if numbers is None else numbers
        never = self._runner.images.never if images and any(images) else []
        if never:
            check_reads_images(self._runner, self.ranks)
            prompts = [self._runner.images.numbered(*each) for each in zip(prompts, images, strict=True)]
        asked = [(*each, seed) for each in zip(numbers, prompts, limits, strict=True)]
        stops, check = self._stops(sampling), partial(check_lengths, self._runner, prompts, limits)
        if self.ranks:
            draw = partial(self._draw, sampling=sampling, stops=stops, keep=keep_candidates)
            requests = draw_together(self.ranks, asked, sampling, check, draw)
        else:
            check()
            requests = self._draw(asked, sampling, stops, keep_candidates, never)
        return Generation([r.tokens for r in requests],
                          ["eos" if r.tokens[-1] in stops else "length" for r in requests],
                          [r.logprobs for r in requests],
                          [r.kept for r in requests] if keep_candidates and sampling.is_truncated else None)

    def _draw(self, asked: list[tuple], sampling: SamplingConfig, stops: list[int], keep: bool,
              never: Sequence[int] = ()) -> list[Request]:
        """Run the requests (number, prompt, limit, seed), with half the slots where memory ran out; they draw the
        same."""
        capacity = max((len(prompt) + limit for _, prompt, limit, _ in asked), default=0)
        while asked:
            requests = [Request(*each) for each in asked]
            slots = min(self._num_at_once(), len(asked), self.oom_limits.get("slots", len(asked)))
            try:
                if self._runner.path == "generate":
                    slots = fitting_slots(self._runner, slots, capacity, self.max_kv_bytes)
                    self._note(GenerateBatches(self._runner, sampling, stops, slots, keep).run(requests))
                else:
                    cache = self._fitting_cache(slots, capacity)
                    slots = cache.num_slots
                    scheduler = Scheduler(self._runner, cache, sampling, stops, keep_candidates=keep, never=never)
                    for _ in scheduler.run(requests):
                        pass
                    self._note(cache.num_bytes(), scheduler.num_preempted)
                self._num_slots = slots
                return requests
            except Exception as error:
                if self.ranks:  # the other ranks are in the middle of a step
                    raise
                self._note_fewer(slots, capacity, error)
            self._cache = cache = None
            release()
        return []

    def _num_at_once(self) -> int:
        """Sequences decoded at once, where memory allows."""
        if self.max_batch is not None:
            return self.max_batch
        return NUM_PAGED if self._runner and self._runner.takes_pages and self.device.type == "cuda" else NUM_WHOLE

    def _fitting_cache(self, wanted: int, capacity: int) -> SlotCache:
        """The cache of this mode, reallocated where it is too small: the wanted slots over pages as for NUM_WHOLE at
        most, or as many as fit; or as many slots as fit, where they share no pages."""
        cache = self._cache
        if cache is None or cache.num_slots < wanted or cache.capacity < capacity:
            self._cache = cache = None  # freed before the new one is measured
            most = self._num_at_once()
            whole = max(1, min(most, self.oom_limits.get("slots", most)) * min(most, NUM_WHOLE) // most)

            def fitting() -> tuple[int, int | None]:
                granted, chat = self.max_kv_bytes, self._conversation and self._conversation.cache
                granted = max(0, granted - chat.num_bytes()) if None not in (granted, chat) else granted
                return fitting_cache(self._runner, wanted, capacity, whole, granted)

            if self._runner.capture is not None and self.max_kv_bytes is None:  # it will serve longer prompts too
                capacity = -(-capacity // _COLUMNS) * _COLUMNS
            slots, pages = (min(all_agree(self.ranks, fitting), key=lambda fit: (fit[0], fit[1] or 0)) if self.ranks
                            else fitting())
            self._cache = cache = self._runner.new_cache(slots, capacity, pages)
        return cache

    def stream(self, prompt: list[int], sampling: SamplingConfig, seed: int = 0, *,
               images: Sequence[ImageRef] = ()) -> Iterator[int]:
        """Yield the tokens of one response one by one, stop tokens excluded. Only inside `inference()`. images: as in
        `generate`, of this prompt.

        The cache stays until the mode ends, so a prompt that continues the last one costs its new tokens only.
        """
        self._require_inference("stream")
        if self.ranks:
            raise RuntimeError("stream() over several ranks: one response at a time is one process's work")
        if images:
            check_reads_images(self._runner)
            prompt = self._runner.images.numbered(prompt, images)
        check_lengths(self._runner, [prompt], [sampling.max_new_tokens])
        stops = self._stops(sampling)
        if self._runner.path == "generate":
            fitting_slots(self._runner, 1, len(prompt) + sampling.max_new_tokens, self.max_kv_bytes)
            request = Request(0, prompt, sampling.max_new_tokens, seed)
            drawn = GenerateBatches(self._runner, sampling, stops, 1).stream(request)
            return (request.tokens[-1] for _ in drawn if request.tokens[-1] not in stops)
        self._cache = None  # a chat's cache may take what a batch's has left; the next batch makes its own
        if self._conversation is None:
            self._conversation = Conversation(self._runner, self.max_kv_bytes)
        return self._conversation.run(prompt, sampling, stops, seed)

    def prompt(self, ids: list[int], images: Sequence[ImageRef]) -> list[int]:
        """A prompt with images as requests of `open_turns` have it. UserError for a model that reads none there."""
        if images:
            check_reads_images(self._runner, self.ranks)
        return self._runner.images.numbered(ids, images)

    def open_turns(self, num_sequences: int, capacity: int, sampling: SamplingConfig,
                   keep_candidates: bool = False) -> Turns:
        """Sequences of several turns, at most `capacity` tokens each with all that is added to them, under one sampling
        setting. keep_candidates: whether requests record the candidate tokens of truncated sampling (Request.kept).
        Only inside `inference()`. Raises UserError where the cache of one sequence does not fit, or the model has no
        positions for it."""
        self._require_inference("open_turns")
        check_turns(self._runner, capacity)
        if self.ranks:
            raise RuntimeError("open_turns() over several ranks: what is added comes to one process")
        stops = self._stops(sampling)
        if self._runner.path == "generate":
            slots = fitting_slots(self._runner, min(self._num_at_once(), num_sequences), capacity, self.max_kv_bytes)
            self._num_slots = slots
            return BatchTurns(GenerateBatches(self._runner, sampling, stops, slots, keep_candidates), self._note)

        def scheduler() -> Scheduler:
            slots = min(self._num_at_once(), num_sequences, self.oom_limits.get("slots", num_sequences))
            self._num_slots = slots
            cache = self._fitting_cache(slots, capacity)
            self._num_slots = cache.num_slots
            return Scheduler(self._runner, cache, sampling, stops, keep_candidates=keep_candidates)

        return SlotTurns(scheduler, partial(self._shrink, capacity), self._note)

    def _note(self, num_bytes: int, num_preempted: int = 0) -> None:
        self.kv_bytes, self.num_preempted = num_bytes, num_preempted

    def _shrink(self, capacity: int, error: Exception) -> None:
        """Halve the slots from now on and free the cache; UserError where there is one slot."""
        self._note_fewer(self._num_slots, capacity, error)
        self._cache = None
        release()

    def _note_fewer(self, slots: int, capacity: int, error: Exception) -> None:
        self.oom_limits["slots"] = fewer_slots(slots, capacity, error)
        _log.warning("out of memory while the %s generates: %d slots of %d tokens do not fit; from now on at most %d",
                     self.name, slots, capacity, self.oom_limits["slots"])

    def serve(self, num_slots: int, capacity: int) -> Serving:
        """Requests that come and go while others run; see `Serving`. Only inside `inference()`, where it ends."""
        self._require_inference("serve")
        return open_serving(self._runner, num_slots, capacity, self._stops(SamplingConfig()), self.max_kv_bytes)

    def read(self, capacity: int) -> Reader:
        """Hidden states of given sequences of at most `capacity` tokens; see `Reader`. Only inside `inference()`, where
        it ends."""
        self._require_inference("read")
        if self.ranks:
            raise RuntimeError("read() over several ranks: what is read comes to one process")
        return Reader(self._runner, capacity)

    def __call__(self, *inputs: object, **named: object) -> Any:
        """The module's forward in training mode, with or without gradients as the caller has it."""
        if self.is_inference:
            raise RuntimeError("the training forward was called inside inference()")
        with self.active():
            return (self.training or self._frozen or self.module)(*inputs, **named)

    def _stops(self, sampling: SamplingConfig) -> list[int]:
        return [*self.eos_ids, *sampling.stop_token_ids, *self._runner.ending_ids]

    def num_forwards(self, num_own: int) -> int:
        """How many forwards this process must run for `num_own` of its own. Every process must call it: under ZeRO 3,
        which gathers layer by layer, and 2, which reduces at every backward pass, all run as many as the busiest."""
        return max_over_ranks(num_own) if self.stage >= 2 else num_own

    @property
    def stage(self) -> int:
        """The ZeRO stage; 3 too where other engines train this module at it."""
        return self.training.stage if self.training else 3 * is_partitioned(self.module)

    def dummy_forward(self) -> Tensor:
        """A forward that only joins other processes' collectives; returns a zero whose gradient is zero everywhere."""
        return zero_of(self(dummy_batch(self.pad_id, self.device)))

    def _require_inference(self, what: str) -> None:
        if not self.is_inference:
            raise RuntimeError(f"{what}() outside inference(): enter the mode first")
        if self.model is None:
            raise RuntimeError(f"{what}() on an engine whose module has no language model head")
