"""A model that is served, and what the server allows."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.least_tokens import LeastTokens
from hybrid_rlhf.inference.server.protocol import ApiError
from hybrid_rlhf.inference.server.worker import ModelQueue
from hybrid_rlhf.inference.token_text import TokenText
from hybrid_rlhf.models.template_kwargs import KWARGS, split_kwargs
from hybrid_rlhf.models.tool_calls import check_tools

MAX_TOLD = 100  # names of variables that a model is told to read in vain
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """max_queue: requests that may wait beside those that run. max_new_tokens: the longest answer, and its length
    where nothing else is asked for. request_seconds: from a request's arrival to the end of its answer."""

    max_queue: int = 64
    max_new_tokens: int = 1024
    max_prompt_tokens: int | None = None
    max_body_bytes: int = 2**20
    request_seconds: float = 300.0


@dataclass
class Served:
    """One model under its name. sampling: settings of a request that has none; num_open: its requests, running or
    waiting; seconds: what the last ones took."""

    name: str
    lane: ModelQueue
    tokenizer: object
    sampling: dict[str, float] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    num_open: int = 0
    unread: set[str] = field(default_factory=set)
    seconds: deque[float] = field(default_factory=lambda: deque([1.0], maxlen=32))

    def __post_init__(self) -> None:
        self.encoder = copy.deepcopy(self.tokenizer)  # used in another thread than the one that decodes
        self.least_tokens = LeastTokens(self.encoder)
        self.token_text = TokenText(self.tokenizer)
        # of the embedding, asked for now: while the model decodes in its own thread, its parts are other ones
        self.num_rows = self.lane.engine.model.get_input_embeddings().num_embeddings

    def check_tools(self, param: str) -> None:
        """ApiError for a model whose template has no tools. In the thread of the encoder."""
        try:
            check_tools(self.encoder)
        except UserError as error:
            raise ApiError(400, f"{self.name} cannot call tools: {error}; or leave tools out", param=param,
                           code="unsupported_parameter") from None

    def tell_unread(self, messages: Sequence[dict]) -> None:
        """One line, once, for variables of a request that the chat template does not read."""
        for name in split_kwargs(self.encoder, messages[0].get(KWARGS) or {})[1]:
            if name not in self.unread and len(self.unread) < MAX_TOLD:
                self.unread.add(name)
                _log.warning("%s: its chat template does not read %s of chat_template_kwargs", self.name, name[:100])

    def wait(self) -> int:
        """Seconds after which there may be room again."""
        mean = sum(self.seconds) / len(self.seconds)
        return min(60, max(1, math.ceil(mean * self.num_open / (self.lane.num_slots * 2))))


def check_length(model: Served, limits: Limits, what: str, count: int, words: str = "", param: str = "messages"
                 ) -> None:
    """ApiError for more tokens than a prompt may have, with room for an answer."""
    most = min(model.lane.capacity - 1, limits.max_prompt_tokens or model.lane.capacity)
    if count > most:
        raise ApiError(400, f"{what} {count} {words}tokens long; send less: with room for an answer there "
                            f"may be {most}", param=param, code="context_length_exceeded")
