"""A served model: its queue and limits, and the tokenization of its prompts."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.image_files import MAX_PIXELS, ImageRef
from hybrid_rlhf.data.chat import Rendered, SkipRow, compose_prompt, encode_first
from hybrid_rlhf.data.row_images import Files, resolved, sources_in
from hybrid_rlhf.inference.conversation import image_reader
from hybrid_rlhf.inference.sequence_scores import TokenText
from hybrid_rlhf.inference.server.protocol import ApiError, GenerationRequest
from hybrid_rlhf.inference.server.worker import ModelQueue
from hybrid_rlhf.models.detokenizer import IncrementalDetokenizer
from hybrid_rlhf.models.template_kwargs import KWARGS, split_kwargs
from hybrid_rlhf.models.tool_calls import check_tools

MAX_NUMBERS = 2**20  # log-probabilities of echoed prompts in one answer: some 30 MB of JSON
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """max_queue: requests that may wait besides the running ones. max_new_tokens: maximum and default length of an
    answer. request_seconds: from a request's arrival to the end of its answer."""

    max_queue: int = 64
    max_new_tokens: int = 1024
    max_prompt_tokens: int | None = None
    max_body_bytes: int = 2**20
    request_seconds: float = 300.0


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens, and as text. has_bos: the first token is BOS, added by the tokenizer, and has no text.
    images: those whose tokens are in `ids`, as the engine numbers them."""

    ids: list[int]
    text: str
    has_bos: bool = False
    images: tuple[ImageRef, ...] = ()

    def offsets(self, tokenizer) -> list[int]:  # noqa: ANN001 - a transformers class
        """Start of each token in the text; approximate if the tokenizer normalises text."""
        detokenizer, offsets, length = IncrementalDetokenizer(tokenizer), [], 0
        for token in self.ids:
            offsets.append(min(length, len(self.text)))
            if not (self.has_bos and len(offsets) == 1):
                length += len(detokenizer.push(token))
        return offsets


@dataclass
class Served:
    """One model under its name. sampling: default settings of requests; num_open: its requests, running or waiting;
    seconds: durations of the last ones; no_images: why it reads no images, or None."""

    name: str
    lane: ModelQueue
    tokenizer: object
    sampling: dict[str, float] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    num_open: int = 0
    unread: set[str] = field(default_factory=set)
    seconds: deque[float] = field(default_factory=lambda: deque([1.0], maxlen=32))

    def __post_init__(self) -> None:
        self.encoder = copy.deepcopy(self.tokenizer)  # for another thread than the one that decodes
        self.token_text = TokenText(self.tokenizer)
        # read now: while the model decodes in its own thread, its modules are replaced
        self.num_rows = self.lane.engine.model.get_input_embeddings().num_embeddings
        self.no_images: str | None = None
        try:
            image_reader(self.name, self.lane.engine.model, self.tokenizer)
        except UserError as error:
            self.no_images = str(error)

    def described(self) -> dict:
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "hybrid_rlhf",
                "max_context": self.lane.capacity, "reads_images": self.no_images is None}

    def wait(self) -> int:
        """Estimated seconds until there is room again."""
        mean = sum(self.seconds) / len(self.seconds)
        return min(60, max(1, math.ceil(mean * self.num_open / (self.lane.num_slots * 2))))

    # -- in the thread for prompts -----------------------------------------------------------------------------------

    def prompts(self, asked: GenerationRequest, limits: Limits, images: Path) -> list[Prompt]:
        """The prompts of a request; ApiError for one that is too long or that the model cannot read. images: the folder
        for theirs."""
        most = min(self.lane.capacity - 1, limits.max_prompt_tokens or self.lane.capacity)  # with room for an answer
        if asked.is_chat:
            return [self._chat_prompt(asked, most, images)]
        prompts = [self._completion_prompt(prompt, most, asked.adds_special) for prompt in asked.prompts]
        count = sum(len(prompt.ids) for prompt in prompts) * asked.num_choices * ((asked.num_top or 0) + 1)
        if asked.num_top is not None and asked.has_echo and count > MAX_NUMBERS:
            raise ApiError(400, f"these prompts ask for {count} log-probabilities, more than {MAX_NUMBERS} at once; "
                                "send fewer prompts or a smaller logprobs", param="prompt")
        return prompts

    def _chat_prompt(self, asked: GenerationRequest, most: int, folder: Path) -> Prompt:
        if not self.encoder.chat_template:
            raise ApiError(400, f"{self.name} has no chat template, so it cannot chat; send a prompt to "
                                "/v1/completions", param="model")
        if asked.tools or any(message.get("tool_calls") for message in asked.messages):
            try:
                check_tools(self.encoder)
            except UserError as error:
                raise ApiError(400, f"{self.name} cannot call tools: {error}; or leave tools out",
                               param="tools" if asked.tools else "messages", code="unsupported_parameter") from None
        if sources_in(asked.messages) and self.no_images:
            raise ApiError(400, self.no_images, param="messages", code="unsupported_parameter")
        try:
            messages, _ = resolved(asked.messages, Files(folder, folder, MAX_PIXELS, allow_urls=False))
        except SkipRow as error:
            raise ApiError(400, f"the messages have {error}; send another one", param="messages") from None
        try:
            self._note_unread(asked.messages)
            rendered = compose_prompt(self.encoder, messages, asked.continues)
        except SkipRow as error:
            raise ApiError(400, f"these messages make no prompt: {error}; "
                                "send messages that the model's template takes", param="messages") from None
        what = "the messages and tools are" if asked.tools else "the messages are"
        ids = self._tokens(rendered, most, what, "messages")
        return Prompt(self._numbered(ids, rendered.images), rendered.shown, images=rendered.images)

    def _numbered(self, ids: list[int], images: tuple[ImageRef, ...]) -> list[int]:
        if not images:
            return ids
        try:
            return self.lane.running().prompt(ids, images)
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from None

    def _completion_prompt(self, prompt: str | list[int], most: int, adds_special: bool) -> Prompt:
        if not isinstance(prompt, str):
            _check_length(len(prompt), most, f"a prompt is {len(prompt)}", "prompt")
            if wrong := [token for token in prompt if not 0 <= token < self.num_rows]:
                raise ApiError(400, f"{str(wrong[0])[:40]} is not a token of {self.name}; ids lie in "
                                    f"[0, {self.num_rows - 1}]", param="prompt")
            return Prompt(prompt, self.encoder.decode(prompt, clean_up_tokenization_spaces=False))
        ids = self._tokens(Rendered(prompt, [], adds_special), most, "a prompt is", "prompt")
        if not ids:
            raise ApiError(400, "a prompt is empty, and no BOS is put before it; send some text", param="prompt")
        bos = self.encoder.bos_token
        has_bos = bool(bos) and ids[0] == self.encoder.bos_token_id and not prompt.startswith(bos)
        return Prompt(ids, prompt, has_bos)

    def _tokens(self, rendered: Rendered, most: int, what: str, param: str) -> list[int]:
        """The tokens of a prompt. ApiError for too many, of which only the first ones are made."""
        ids = encode_first(self.encoder, [rendered], most + 1)[0].ids
        _check_length(len(ids), most, f"{what} {len(ids)} or more", param)
        return ids

    def _note_unread(self, messages: Sequence[dict]) -> None:
        """Log, once, variables of a request that the chat template does not read."""
        for name in split_kwargs(self.encoder, messages[0].get(KWARGS) or {})[1]:
            if name not in self.unread and len(self.unread) < 100:  # the names are the client's
                self.unread.add(name)
                _log.warning("%s: its chat template does not read %s of chat_template_kwargs", self.name, name[:100])


def _check_length(count: int, most: int, what: str, param: str) -> None:
    if count > most:
        raise ApiError(400, f"{what} tokens long; send less: with room for an answer there may be {most}", param=param,
                       code="context_length_exceeded")
