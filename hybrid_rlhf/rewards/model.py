"""Models as sources: the stage-2 reward model, and any sequence-classification model with its own tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybrid_rlhf.core.config import UserError, check, nearest
from hybrid_rlhf.core.distributed import device
from hybrid_rlhf.core.memory import explained
from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right
from hybrid_rlhf.data import chat
from hybrid_rlhf.data.chat import Rendered, Text
from hybrid_rlhf.data.turns import broken, readable
from hybrid_rlhf.models import load
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.tokenizer import Tokenizer, load_tokenizer, turn_ends
from hybrid_rlhf.roles import Reward
from hybrid_rlhf.rollout import Rollout

BATCH_SIZE = 32
READS = ("text", "pair", "completion")


@dataclass
class ModelSource:
    """The stage-2 reward model. It reads the actor's token ids, or, with a tokenizer of its own, the text: prompt and
    response rendered by its own template and tokenized together, as in stage 2. raw: data.raw of the run."""

    role: Reward
    name: str = "model"
    tokenizer: Tokenizer | None = None
    raw: bool = False

    def score(self, rollout: Rollout) -> Tensor:
        if self.tokenizer is None:
            return self.role.score_rollout(rollout)
        prompts = rollout.prompts.given
        rows = [read_by(self.tokenizer, prompt, answer, bool(ended), self.raw) for prompt, answer, ended in
                zip(prompts, rollout.responses(), rollout.has_eos, strict=True)]
        model: Any = self.role.engine.module.model
        model = model if hasattr(model, "config") else model.base_model
        check_fits(model, rows, f"reward source {self.name}: a response")
        mask = length_mask(torch.tensor([len(r) for r in rows]))
        return self.role.score(SequenceBatch(pad_right(rows, self.role.engine.pad_id), mask, mask))


def read_by(tokenizer: Tokenizer, prompt: Text, answer: Text, is_ended: bool, raw: bool = False) -> list[int]:
    """Token ids of prompt and answer, or of the messages of an episode, by `tokenizer`; an answer that did not end has
    neither end marker nor EOS. raw: a string prompt stays as it is even with a chat template. Raises UserError for a
    template that cannot render the messages."""
    try:
        rendered = chat.compose(tokenizer, chat.as_turn(tokenizer, prompt, raw), answer)
    except chat.SkipRow as error:
        raise UserError(f"a reward model cannot read a response: {error}; give one whose chat template shows it, or "
                        "reward.functions") from error
    check(not rendered.images, "a reward model with a tokenizer of its own reads no images; give reward.functions")
    answer = answer if isinstance(answer, str) else answer[-1]["content"] if answer[-1]["role"] == "assistant" else ""
    if is_ended or not answer:
        return chat.encode_all(tokenizer, [rendered])[0].ids
    start = rendered.spans[-1][0]
    text = answer if rendered.is_plain else broken(tokenizer, answer, is_own=True)
    end = next((at + len(w) for w in (text, text.strip()) if (at := rendered.text.rfind(w, start)) >= 0), None)
    cut = rendered.text if end is None else rendered.text[:end]
    ids = chat.encode_all(tokenizer, [Rendered(cut, [(start, len(cut))], rendered.is_plain)], append_eos=False)[0].ids
    ends = () if rendered.is_plain else (tokenizer.eos_token_id, *turn_ends(tokenizer))
    return ids[:-1] if ids[-1] in ends else ids


@dataclass
class ClassifierSource:
    """The model at `path` reads the responses as text, re-tokenized by its own tokenizer, at most `batch_size` at once.

    reads: text (prompt and completion as one text; with the tokenizer's chat template where it has one), pair (the
    tokenizer's text pair, as cross-encoders take it) or completion (that alone). label: which of several labels is the
    score, by name or number: its log-odds against the others, log p / (1 - p); a model with one label, or with
    independent ones (multi_label_classification), gives its output. No weights are read before `open`.
    raw: whether a string prompt stays as it is even with a chat template.
    """

    path: str
    name: str
    reads: str = "text"
    label: str | int | None = None
    dtype: str = "auto"
    batch_size: int = BATCH_SIZE
    raw: bool = False
    model: Any = field(default=None, init=False, repr=False)  # of transformers, from `open` on
    tokenizer: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        option = f"reward.options.{self.name}"
        check(self.reads in READS, f"{option}: reads is {self.reads!r}; choose {', '.join(READS)}"
                                   f"{nearest(str(self.reads), READS)}")
        self._settings = ModelConfig(self.path, dtype=self.dtype)
        config = load.configuration(self._settings)
        check(load.has_score(self.path), f"reward.models: {self.path} is not a sequence-classification model, nor a "
                                         "token-classification one, which scores steps; give one with such a head, as "
                                         "a --stage reward run's model/ has")
        labels = [str(config.id2label[i]) for i in range(config.num_labels)]
        label = 0 if self.label is None and len(labels) == 1 else self.label
        self._index = label_index(label, labels, self.path, option)

    def open(self) -> None:
        """Read tokenizer and weights, once."""
        if self.model is None:
            self.model, self.tokenizer = open_model(self.path, self._settings, load.load_classifier)

    @torch.no_grad()
    def score(self, rollout: Rollout) -> list[float]:
        prompts = list(map(readable, rollout.prompts.given))
        rows = [self._ids(prompt, answer, whole, bool(ended)) for prompt, answer, whole, ended in
                zip(prompts, rollout.completions, rollout.responses(), rollout.has_eos, strict=True)]
        check_fits(self.model, [ids for ids, _ in rows], f"reward source {self.name}: a response")
        out = torch.zeros(len(rows))
        for index in torch.tensor([len(ids) for ids, _ in rows]).argsort().split(self.batch_size) if rows else ():
            out[index] = self._scored([rows[i] for i in index.tolist()])
        return out.tolist()  # a list: a NaN in it is a BadAnswer, the user's to fix

    def _ids(self, prompt: Text, answer: str, episode: Text, is_ended: bool) -> tuple[list[int], list[int]]:
        """Token ids of one response as this model reads it, and their segments (0, or 1 for a pair's second part).
        episode: all messages of an episode, for a tokenizer with a chat template; others read the last answer."""
        if self.reads == "text" and (hasattr(self.model, "score") or self.tokenizer.chat_template):
            shown = episode if self.tokenizer.chat_template else answer
            ids = read_by(self.tokenizer, prompt, shown, is_ended, self.raw)
            return ids, [0] * len(ids)
        asked = prompt if isinstance(prompt, str) else "\n\n".join(m["content"] for m in prompt)
        texts = {"text": (asked + answer if isinstance(prompt, str) else f"{asked}\n\n{answer}",),
                 "pair": (asked, answer), "completion": (answer,)}[self.reads]
        encoded = self.tokenizer(*texts, split_special_tokens=True)  # [SEP] in an answer is text
        return encoded["input_ids"], encoded.get("token_type_ids") or [0] * len(encoded["input_ids"])

    def _scored(self, rows: list[tuple[list[int], list[int]]]) -> Tensor:
        """(b,) scores of one batch, right-padded."""
        mask = length_mask(torch.tensor([len(ids) for ids, _ in rows]))
        inputs = {"input_ids": pad_right([ids for ids, _ in rows], self.tokenizer.pad_token_id), "attention_mask": mask}
        if getattr(self.model.config, "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = pad_right([segments for _, segments in rows], 0)
        logits = self.model(**{k: v.to(self.model.device) for k, v in inputs.items()}).logits.float().cpu()
        if logits.shape[1] == 1 or self.model.config.problem_type == "multi_label_classification":
            return logits[:, self._index]  # the logit of an independent label is its log-odds
        others = [i for i in range(logits.shape[1]) if i != self._index]
        return logits[:, self._index] - logits[:, others].logsumexp(1)


def open_model(path: str, settings: ModelConfig, load_model: Callable) -> tuple[Any, Any]:
    """The model of transformers at `path`, frozen, by load_model(settings, device), and its own tokenizer."""
    tokenizer = load_tokenizer(path)
    with explained(f"while loading the reward model {path}"):
        model = load_model(settings, device())
    load.prepare(model, settings, len(tokenizer))
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return model.eval().requires_grad_(False), tokenizer


def label_index(label: str | int | None, labels: list[str], path: str, option: str, meant: str = "") -> int:
    """The index of a label of the model at `path`, given by name or number. UserError for None or an unknown label.
    option: the setting that gives it; meant: which label is meant, for the message."""
    check(label is not None, f"reward.models: {path} has the labels {', '.join(labels)}; give {option} "
                             f"{{label: {labels[-1]}}}{meant}")
    known = [*labels, *map(str, range(len(labels)))]
    check(str(label) in known, f"{option}: {path} has no label {label}{nearest(str(label), labels)}; there are "
                               f"{', '.join(labels)}")
    return known.index(str(label)) % len(labels)


def check_fits(model: Any, rows: Sequence[Sized], what: str) -> None:
    """UserError if a row has more tokens than `model` has positions. what: the source and its row, for the message."""
    longest, limit = max(map(len, rows), default=0), load.max_positions(model)
    check(limit is None or longest <= limit,
          f"{what} of {longest} of its tokens, and it has {limit} positions; lower data.max_prompt_length or "
          "ppo.sampling.max_new_tokens")
