"""Stream a response token by token, over a cache that stays between the turns of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybrid_rlhf.engine.decode.admission import fitting_capacity
from hybrid_rlhf.engine.decode.image_prompts import has_images
from hybrid_rlhf.engine.decode.kv_cache import SlotCache
from hybrid_rlhf.engine.decode.request import Request
from hybrid_rlhf.engine.decode.runner import Runner
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.engine.decode.scheduler import Scheduler
from hybrid_rlhf.models.load import max_positions

MIN_COLUMNS = 1024  # of a conversation's cache, to leave room for later turns


class Conversation:
    """A cache of one slot and the tokens whose columns it holds. A prompt that begins like them is computed from there,
    or from its start where images are new: a model joins images and text from the first token on.

    max_bytes: the most that the cache may take (None: what is free).
    """

    def __init__(self, runner: Runner, max_bytes: int | None = None) -> None:
        self.runner, self.max_bytes = runner, max_bytes
        self.tokens: list[int] = []
        self.cache: SlotCache | None = None

    def run(self, prompt: Sequence[int], sampling: SamplingConfig, stops: Sequence[int], seed: int) -> Iterator[int]:
        """Yield the tokens of the response to `prompt`, stop tokens excluded. Closing the iterator stops the work.

        Raises UserError where the cache for prompt and response does not fit.
        """
        request = Request(0, prompt, sampling.max_new_tokens, seed, is_stored=True)
        self._store(prompt[:-1], len(prompt) + sampling.max_new_tokens)
        sent = 0
        try:
            for _ in Scheduler(self.runner, self.cache, sampling, stops).run([request]):
                self.tokens = [*prompt, *request.tokens[:-1]]  # the newest token is not in the cache yet
                new, sent = request.tokens[sent:], len(request.tokens)
                yield from (token for token in new if token not in stops)
        except BaseException:
            self.tokens = []
            raise

    def _store(self, prompt: Sequence[int], capacity: int) -> None:
        """Store the columns of `prompt` in the slot, computing those that are missing."""
        common = 0
        if self.runner.is_stateful:  # a state cannot go back to where two prompts differ
            self.tokens = []
        if self.cache is None or self.cache.capacity < capacity:
            self.cache, self.tokens = None, []  # freed before the new one is measured
            room = max(capacity, min(max(2 * capacity, MIN_COLUMNS), max_positions(self.runner.model) or 2 * capacity))
            self.cache = self.runner.new_cache(1, fitting_capacity(self.runner, capacity, room, self.max_bytes))
        while common < min(len(prompt), len(self.tokens)) and prompt[common] == self.tokens[common]:
            common += 1
        self.tokens = []
        if common < len(prompt):
            common = 0 if has_images(prompt[common:]) else common
            self.runner.prefill(self.cache, [prompt[common:]], [0], [0], offset=common,
                                shifts=self.runner.shifts([prompt[:common]]))
        elif not prompt:
            self.cache.clear_states(self.cache.all_slots)
