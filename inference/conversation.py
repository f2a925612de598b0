"""A conversation with one model: the saved template renders its messages, the engine streams the answer."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from hybrid_rlhf.core.accelerator import keep_within_card
from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.distributed import device
from hybrid_rlhf.core.image_files import ImageRef
from hybrid_rlhf.core.memory import explained
from hybrid_rlhf.core.options import expanded, nearest_path
from hybrid_rlhf.core.own_files import write_file
from hybrid_rlhf.data.chat import Encoded, SkipRow, compose_prompt, encode_all, encode_prompt
from hybrid_rlhf.data.messages import clean, with_tools
from hybrid_rlhf.data.row_images import sources_in
from hybrid_rlhf.data.turns import IMAGE, IMAGES, in_parts, is_begun, without_blank
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.engine.hybrid import HybridEngine
from hybrid_rlhf.inference.response_text import AnswerText, TurnText, pieces
from hybrid_rlhf.models.backbone import towers
from hybrid_rlhf.models.complete import few
from hybrid_rlhf.models.folder_files import check_config, read_object
from hybrid_rlhf.models.images import ImageReader, reader_of
from hybrid_rlhf.models.load import as_published, check_folder, load_causal_lm, max_positions, refuse_gguf
from hybrid_rlhf.models.template import special_ids
from hybrid_rlhf.models.tokenizer import load_tokenizer
from hybrid_rlhf.models.tool_calls import parse_turn

_FEWER = "take a turn back (/undo), start anew (/reset) or ask for fewer tokens (/set max_new_tokens=100)"


@dataclass
class Conversation:
    """The messages of a conversation, with the model and settings to answer the next one.

    Attributes:
        engine: A HybridEngine that can generate.
        tokenizer: The model's own, with its chat template.
        sampling: Settings of the next answer; max_new_tokens is cut to the room that the model has left.
        seed: The n-th answer of a conversation samples with seed + n: scripts are reproducible, and a retry differs.
        max_positions: Longest sequence of the model, or None.
        messages: Dicts of role and content, the system message first if there is one.
        was_cut: Whether the last answer reached max_new_tokens.
        tools: Schemas of the functions that the model may call, in OpenAI's form; the user answers the calls.
        call_errors: What was wrong with tool calls in the last answer; an answer with one that cannot be read is text.
    """

    engine: HybridEngine
    tokenizer: object
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = 0
    max_positions: int | None = None
    system: str | None = None
    messages: list[dict] = field(default_factory=list)
    num_answers: int = 0
    was_cut: bool = False
    tools: list[dict] = field(default_factory=list)
    call_errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": clean(self.system)}] if self.system else []

    def answer(self, text: str | None, images: Sequence[ImageRef] = ()) -> Iterator[str]:
        """Add the user's `text` and yield the answer in pieces as it is sampled, then its tool calls, a line each.
        None: no new text; the model continues after answers to its tool calls (`answer_call`), or its last answer.
        images: where the text has as many marks IMAGE, else before it.

        Leaving early (an interrupt, closing the iterator) keeps the part of the answer that was yielded. If nothing
        was, the question is removed too. Raises UserError if the conversation leaves no room for an answer.
        """
        if text is not None:
            self.messages.append(_question(clean(text), images))
        self.messages[:] = without_blank(self.messages)
        was_cut, self.was_cut, self.call_errors = self.was_cut, False, []
        answered: list[str] = []
        calls: list[dict] = []
        is_complete = False
        try:
            with explained("in this conversation", _FEWER), closing(self._stream(calls)) as stream:
                for piece in stream:
                    answered.append(piece)
                    yield piece
            is_complete = True
        finally:
            if answered or is_complete:
                begun = self.messages.pop()["content"] if is_begun(self.messages) else ""
                message: dict = {"role": "assistant", "content": begun + "".join(answered)}
                self.messages.append(message | ({"tool_calls": calls} if calls else {}))
                self.num_answers += 1
                self.was_cut |= not is_complete  # stopped, it has no end of its own either
            else:  # the last answer is the one before
                self.was_cut = was_cut
                if not is_begun(self.messages):
                    self.messages.pop()
        yield from (f"{chr(10) if i or answered else ''}{shown_call(call)}" for i, call in enumerate(calls))

    def _stream(self, calls: list[dict]) -> Iterator[str]:
        """Yield the text of an answer; at its end its tool calls are added to `calls`."""
        prompt = self.prompt()
        sampling = self._sampling_within(len(prompt.ids))
        seen = 0

        def counted(tokens: Iterator[int]) -> Iterator[int]:
            nonlocal seen
            for token in tokens:
                seen += 1
                yield token

        seed = self.seed + self.num_answers
        with self.engine.inference(), closing(self.engine.stream(prompt.ids, sampling, seed,
                                                                 images=prompt.images)) as tokens:
            text = AnswerText(self.tokenizer, (), self.engine.eos_ids)
            yield from self._turn(text, counted(tokens), calls) if self.tools else pieces(text, counted(tokens))
        self.was_cut = seen >= sampling.max_new_tokens

    def _turn(self, answer: AnswerText, tokens: Iterator[int], calls: list[dict]) -> Iterator[str]:
        prompt = compose_prompt(self.tokenizer, with_tools(self.messages, self.tools)).shown
        text = TurnText(self.tokenizer, answer, prompt)
        yield from pieces(text, tokens)
        turn = parse_turn(self.tokenizer, text.ids, self.tools, prompt)
        self.call_errors = turn.errors
        number = sum(len(message.get("tool_calls", ())) for message in self.messages)
        calls += [{"id": f"call{i:05}", **call} for i, call in enumerate(turn.message.get("tool_calls", ()), number)]
        if rest := text.behind_calls(turn.message["content"]) if calls else text.held:
            yield rest

    def open_calls(self) -> list[dict]:
        """The tool calls of the last answer without an answer."""
        last = next((i for i in reversed(range(len(self.messages))) if self.messages[i]["role"] != "tool"), None)
        calls = [] if last is None else self.messages[last].get("tool_calls", [])
        return calls[len(self.messages) - 1 - (last or 0) :]

    def answer_call(self, text: str) -> None:
        """Answer the first of the open calls; after the last, `answer(None)` continues."""
        call = self.open_calls()[0]
        self.messages.append({"role": "tool", "name": call["function"]["name"], "tool_call_id": call.get("id", ""),
                              "content": clean(text)})

    def prompt(self) -> Encoded:
        """The conversation as token ids and images, with the generation prompt at its end.

        The same function makes the prompts for training, so the two cannot differ.
        """
        try:
            rendered = compose_prompt(self.tokenizer, with_tools(self.messages, self.tools))
            return encode_all(self.tokenizer, [rendered])[0]
        except SkipRow as error:
            raise UserError(f"this conversation cannot go on: {error}; "
                            "take a turn back (/undo) or start anew (/reset)") from error

    def _sampling_within(self, num_prompt_tokens: int) -> SamplingConfig:
        if self.max_positions is None:
            return self.sampling
        room = self.max_positions - num_prompt_tokens
        check(room >= 1, f"the conversation is {num_prompt_tokens} tokens long and the model has room for "
                         f"{self.max_positions} with its answer; start anew (/reset) or ask shorter questions")
        return replace(self.sampling, max_new_tokens=min(self.sampling.max_new_tokens, room),
                       min_new_tokens=min(self.sampling.min_new_tokens, room))

    def save(self, path: str) -> None:
        """Write the messages as one line of jsonl with a `messages` column (and `tools`, and `images`: paths), which
        SFT can read."""
        check(bool(self.messages), "nothing to save: the conversation has no messages; ask something first")
        try:
            place = Path(expanded(path))
            check(not os.path.lexists(place), f"{path} exists; choose another name")
            paths = [image.path for image in sources_in(self.messages)]
            row = {"messages": in_parts(self.messages)} | ({"images": paths} if paths else {})
            row |= {"tools": self.tools} if self.tools else {}
            write_file(place, json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; give another name") from error


def _question(text: str, images: Sequence[ImageRef]) -> dict:
    if not images:
        return {"role": "user", "content": text}
    text = text if text.count(IMAGE) == len(images) else IMAGE * len(images) + text.replace(IMAGE, "\ufffd")
    return {"role": "user", "content": text, IMAGES: list(images)}


def image_reader(name: str, model: nn.Module, tokenizer: object) -> ImageReader:
    """What reads images for the model called `name`. UserError where it reads none."""
    reader = reader_of(tokenizer) if towers(model) else None
    if reader is None:
        raise UserError(f"{name} reads no images; ask in text, or take an image-text model with its processor")
    return reader


def shown_call(call: dict) -> str:
    """A tool call for display: name(argument=value, ...), values as JSON."""
    arguments = call["function"]["arguments"]
    if isinstance(arguments, dict):
        arguments = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    return f"{call['function']['name']}({arguments})"


def open_conversation(path: str, sampling: SamplingConfig, seed: int = 0, system: str | None = None,
                      needs_template: bool = True, template: str | None = None) -> Conversation:
    """Load the model at a folder (or hub id) for a conversation. Raises UserError, with advice, for a model that cannot
    chat. needs_template: whether to refuse a model without a chat template, which can only continue a text. template:
    the chat template of a model that has none of its own."""
    check_can_chat(path)
    tokenizer = load_tokenizer(path)
    tokenizer.chat_template = tokenizer.chat_template or template
    check(not needs_template or bool(tokenizer.chat_template),
          f"{path} has no chat template; a model trained here (--stage sft) saves one")
    model = load_to_chat(path)
    engine = HybridEngine.for_inference(model, tokenizer)
    _check_rows(path, tokenizer, model.get_input_embeddings().num_embeddings, engine.eos_ids)
    return Conversation(engine, tokenizer, sampling, seed=seed, system=system, max_positions=max_positions(model))


def load_to_chat(path: str) -> nn.Module:
    """The causal model at `path`, on the device."""
    keep_within_card()
    with explained(f"while loading {path}", "close what else uses the device, or take a smaller model"):
        return load_causal_lm(as_published(path), device())


def _check_rows(path: str, tokenizer, size: int, eos_ids: Collection[int]) -> None:  # noqa: ANN001
    """UserError for tokens of the tokenizer without a row in the model. Special ones (padding, image placeholders) are
    allowed: they are never inputs, unless an answer ends with them or the template writes them."""
    fed = set(eos_ids)
    with suppress(SkipRow):  # a template's refusal is reported when a question is asked
        fed |= set(encode_prompt(tokenizer, [{"role": "user", "content": "a"}]))
    spared = set(special_ids(tokenizer).values()) - fed
    beyond = sorted(token for token, i in tokenizer.get_vocab().items() if i >= size and i not in spared)
    check(not beyond, f"{path}: the tokenizer has {few(beyond, 'token')} beyond the {size} rows of the model's "
                      "vocabulary; give the tokenizer that it was made with")


def check_can_chat(path: str) -> None:
    """Raise UserError if a local `path` is not the folder of a causal language model."""
    folder = Path(path)
    if not folder.exists():
        # With an existing parent a folder was meant, and not a hub id.
        check(not folder.parent.is_dir(), f"model folder {path} does not exist{nearest_path(path)}; "
                                          "give a run's folder, a model folder or a hub id")
    if folder.is_dir() and not (folder / "config.json").exists():
        check(not (folder / "adapter_config.json").exists(),
              f"{path} holds a LoRA adapter alone; chat with the model folder that its run left beside it")
        inner = [*folder.glob("model/config.json"), *sorted(folder.glob("*/model/config.json"))]
        refuse_gguf(folder)
        hint = f"; did you mean {inner[0].parent}?" if inner else ""
        raise UserError(f"{path} is not a model folder; it needs a config.json{hint}")
    check_folder(path)
    if folder.is_dir():
        check_config(path)
        config = read_object(folder / "config.json")
        kinds = config.get("architectures") or []
        check(not any("Classification" in k for k in kinds), f"{path} is a reward model ({', '.join(kinds)}): it "
              "scores text and cannot chat; give an sft or ppo model")
        check(not config.get("is_encoder_decoder"), f"{path} is an encoder-decoder; chat needs a causal language model")
