"""A conversation with one model: the saved template turns its messages into a prompt, the engine streams the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors import SafetensorError

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.distributed import device
from hybrid_rlhf.data.chat import SkipRow, encode_prompt
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.engine.hybrid import HybridEngine
from hybrid_rlhf.inference.detokenizer import pieces
from hybrid_rlhf.models.load import ModelConfig, check_folder, load_causal_lm, max_positions
from hybrid_rlhf.models.tokenizer import load_tokenizer


@dataclass
class Conversation:
    """Messages so far and all that is needed to answer the next one.

    Attributes:
        engine: A HybridEngine that can generate.
        tokenizer: The model's own, with its chat template.
        sampling: Settings of the next answer; max_new_tokens is cut to the room that the model has left.
        seed: The n-th answer of a conversation draws with seed + n, so that a script repeats and a retry does not.
        max_positions: Longest sequence of the model, or None.
        messages: Dicts of role and content, the system message first if there is one.
        was_cut: Whether the last answer ended because its length did.
    """

    engine: HybridEngine
    tokenizer: object
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = 0
    max_positions: int | None = None
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    num_answers: int = 0
    was_cut: bool = False

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def answer(self, text: str) -> Iterator[str]:
        """Say `text` and yield the answer in pieces as it is drawn.

        Leaving early (an interrupt, closing the iterator) keeps the part of the answer that was given. If nothing was
        given, the question is taken back too. Raises UserError if the conversation leaves the model no room.
        """
        self.messages.append({"role": "user", "content": text})
        self.was_cut = False
        given: list[str] = []
        is_complete = False
        try:
            with closing(self._stream()) as stream:
                for piece in stream:
                    given.append(piece)
                    yield piece
            is_complete = True
        finally:
            if given or is_complete:
                self.messages.append({"role": "assistant", "content": "".join(given)})
                self.num_answers += 1
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        prompt = self.prompt_ids()
        sampling = self._sampling_within(len(prompt))
        seen = 0

        def counted(tokens: Iterator[int]) -> Iterator[int]:
            nonlocal seen
            for token in tokens:
                seen += 1
                yield token

        seed = self.seed + self.num_answers
        with self.engine.inference(), closing(self.engine.stream(prompt, sampling, seed)) as tokens:
            yield from pieces(counted(tokens), self.tokenizer)
        self.was_cut = seen >= sampling.max_new_tokens

    def prompt_ids(self) -> list[int]:
        """The conversation as token ids, up to and including the marker after which the model speaks.

        The same function makes the prompts that the model was trained on, so the two cannot differ.
        """
        try:
            return encode_prompt(self.tokenizer, self.messages)
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
        """Write the messages as one line of jsonl with a `messages` column, which SFT can read."""
        check(bool(self.messages), "nothing to save: the conversation has no messages; ask something first")
        check(not Path(path).exists(), f"{path} exists; choose another name")
        try:
            Path(path).write_text(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; give another name") from error


def open_conversation(path: str, sampling: SamplingConfig, seed: int = 0, system: str | None = None) -> Conversation:
    """Load the model at a folder (or hub id) and begin. Raises UserError for what cannot chat, with what would."""
    check_can_chat(path)
    tokenizer = load_tokenizer(path)
    check(bool(tokenizer.chat_template), f"{path} has no chat template; a model trained here (--stage sft) saves one")
    try:
        model = load_causal_lm(ModelConfig(model_name_or_path=path), device())
    except SafetensorError as error:
        raise UserError(f"cannot load {path}: its weights are damaged ({error}); download or export it anew") from error
    return Conversation(HybridEngine.for_inference(model, tokenizer), tokenizer, sampling, seed=seed, system=system,
                        max_positions=max_positions(model))


def check_can_chat(path: str) -> None:
    """Raise UserError if a local `path` is no folder of a causal language model."""
    folder = Path(path).expanduser()
    if not folder.exists():
        # With its parent here it was meant as a folder; it would be taken for a hub id else.
        check(not folder.parent.is_dir(), f"model folder {path} does not exist; "
                                          "give a run's folder, a model folder or a hub id")
    if folder.is_dir() and not (folder / "config.json").exists():
        check(not (folder / "adapter_config.json").exists(),
              f"{path} holds a LoRA adapter alone; chat with the model folder that its run left beside it")
        inner = [*folder.glob("model/config.json"), *sorted(folder.glob("*/model/config.json"))]
        hint = f"; did you mean {inner[0].parent}?" if inner else ""
        raise UserError(f"{path} is no model folder: it has no config.json{hint}")
    check_folder(path)
    if folder.is_dir():
        _check_kind(path, folder / "config.json")


def _check_kind(path: str, file: Path) -> None:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        check(isinstance(config, dict), f"{file} is no model configuration: it holds no table; give another folder")
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is no model configuration: {error}; give another folder") from error
    kinds = [str(k) for k in config.get("architectures") or []]
    check(not any("Classification" in k for k in kinds),
          f"{path} is a reward model ({', '.join(kinds)}): it scores text and cannot chat; give an sft or ppo model")
    check(not config.get("is_encoder_decoder"), f"{path} is an encoder-decoder; chat needs a causal language model")
