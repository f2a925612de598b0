"""Process reward models: a score for each step of a response, by a token-classification model that judges steps."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid_rlhf.core.config import check, nearest
from hybrid_rlhf.core.tensors import length_mask, pad_right
from hybrid_rlhf.data.chat import Text
from hybrid_rlhf.data.turns import readable
from hybrid_rlhf.models import load
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.tokenizer import Tokenizer
from hybrid_rlhf.rewards.model import BATCH_SIZE, check_fits, label_index, open_model
from hybrid_rlhf.rollout import Rollout

# The score of a response from the probabilities of its steps.
REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "each": lambda steps: sum(steps) / max(len(steps), 1),  # their mean: a step earns its probability / their number
    "sum": sum,
    "min": lambda steps: min(steps, default=0.0),
    "last": lambda steps: steps[-1] if steps else 0.0,
    "product": lambda steps: math.prod(steps) if steps else 0.0,
}
OPTIONS = ("label", "separator", "split", "reduce")
_TRL_LABELS = ["LABEL_0", "LABEL_1"]  # transformers' default names, which TRL keeps: 1 is a correct step


class Step(NamedTuple):
    """A step's text, and where it ends in the response, in characters, the separator included."""

    text: str
    end: int


@dataclass
class ProcessSource:
    """The token-classification model at `path` reads prompt and steps as TRL's PRMTrainer tokenises them: the prompt,
    then each step and a separator. The probability of `label` at the separator's last token is that of the step.

    split: the text at which responses are split into steps (None: the separator). reduce: how the steps' probabilities
    become a response's score. each and sum put each step's part at the policy's last token of that step
    (rollout.token_scores, step_ends); min, last and product score whole responses. A response without a step scores 0.
    policy_tokenizer: the one that decoded the responses, needed from the first `score` on. No weights are read before
    `open`.
    """

    path: str
    name: str
    separator: str = "\n"
    split: str | None = None
    label: str | int | None = None
    reduce: str = "each"
    dtype: str = "auto"
    batch_size: int = BATCH_SIZE
    policy_tokenizer: Any = None
    model: Any = field(default=None, init=False, repr=False)  # of transformers, from `open` on
    tokenizer: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        option = f"reward.options.{self.name}"
        check(self.reduce in REDUCTIONS, f"{option}: reduce is {self.reduce!r}; choose {', '.join(REDUCTIONS)}"
                                         f"{nearest(str(self.reduce), REDUCTIONS)}")
        for key in ("separator", "split"):
            value = getattr(self, key)
            check((isinstance(value, str) and bool(value)) or (key == "split" and value is None),
                  f"{option}: {key} is {value!r}; give text, such as \"\\n\"")
        self._settings = ModelConfig(self.path, dtype=self.dtype)
        config = load.configuration(self._settings)
        labels = [str(config.id2label[i]) for i in range(config.num_labels)]
        check(len(labels) > 1, f"reward.models: {self.path} has the one label {labels[0]}; a step's probability needs "
                               "two or more")
        label = 1 if self.label is None and labels == _TRL_LABELS else self.label
        self._index = label_index(label, labels, self.path, option, ", that of a good step")

    @property
    def places_scores(self) -> bool:
        """Whether the scores stand at the steps that earned them."""
        return self.reduce in ("each", "sum")

    def open(self) -> None:
        """Read tokenizer and weights, once."""
        if self.model is None:
            self.model, self.tokenizer = open_model(self.path, self._settings, load.load_token_classifier)

    @torch.no_grad()
    def score(self, rollout: Rollout) -> list[float]:
        """The reduced score of each response; where scores are placed, sets token_scores and step_ends too."""
        steps = [steps_of(text, self.separator if self.split is None else self.split) for text in rollout.completions]
        prompts = list(map(readable, rollout.prompts.given))
        probabilities = self._probabilities(prompts, steps)
        if self.places_scores:
            self._place(rollout, steps, probabilities)
        return [REDUCTIONS[self.reduce](each) for each in probabilities]

    def _place(self, rollout: Rollout, steps: list[list[Step]], probabilities: list[list[float]]) -> None:
        scores, ends = torch.zeros(rollout.action_mask.shape), torch.zeros_like(rollout.action_mask)
        lengths = rollout.response_mask.sum(1).tolist()
        for i, (row, values) in enumerate(zip(steps, probabilities, strict=True)):
            ids = rollout.response_ids[i, : lengths[i]].tolist()
            share = 1 / len(row) if row and self.reduce == "each" else 1.0
            for place, value in zip(last_tokens(self.policy_tokenizer, ids, rollout.completions[i], row), values,
                                    strict=True):
                scores[i, place] += value * share  # two steps may end in one token
                ends[i, place] = True
        rollout.token_scores, rollout.step_ends = scores, ends

    def _probabilities(self, prompts: Sequence[Text], steps: list[list[Step]]) -> list[list[float]]:
        """The probability of the label, for each step of each response."""
        rows = [step_ids(self.tokenizer, prompt, [step.text for step in each], self.separator)
                for prompt, each in zip(prompts, steps, strict=True)]
        check_fits(self.model, [ids for ids, _ in rows], f"reward source {self.name}: prompt and steps")
        probabilities: list[list[float]] = [[] for _ in rows]
        order = sorted((i for i, (_, places) in enumerate(rows) if places), key=lambda i: len(rows[i][0]))
        for start in range(0, len(order), self.batch_size):
            index = order[start : start + self.batch_size]
            for i, values in zip(index, self._read([rows[i] for i in index]), strict=True):
                probabilities[i] = values
        return probabilities

    def _read(self, rows: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        mask = length_mask(torch.tensor([len(ids) for ids, _ in rows]))
        ids = pad_right([ids for ids, _ in rows], self.tokenizer.pad_token_id)
        device = self.model.device
        logits: Tensor = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits  # (b, T, labels)
        chosen = logits.float().softmax(-1)[..., self._index].cpu()
        return [chosen[i, places].tolist() for i, (_, places) in enumerate(rows)]


def steps_of(text: str, split: str) -> list[Step]:
    """Split `text` at each `split`, the pieces as they are; a blank piece belongs to the step before. The last step
    ends where the text does."""
    steps: list[Step] = []
    end = 0
    for piece in text.split(split):
        end = min(end + len(piece) + len(split), len(text))
        if piece.strip():
            steps.append(Step(piece, end))
        elif steps:
            steps[-1] = steps[-1]._replace(end=end)
    return [*steps[:-1], steps[-1]._replace(end=len(text))] if steps else []


def step_ids(tokenizer: Tokenizer, prompt: Text, steps: Sequence[str], separator: str) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and its steps, and the place of each step's separator (its last token), as PRMTrainer of
    TRL 0.13 to 1.13 makes them: parts tokenised one by one without special tokens, BOS first where there is one.

    Messages are joined by empty lines; TRL's trainer has no template. The text of a special token in a step is
    tokenised as text: a response must not write special tokens.
    """
    asked = prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)
    ids: list[int] = tokenizer(asked, add_special_tokens=False)["input_ids"]
    bos = getattr(tokenizer, "bos_token_id", None)
    ids = ([] if bos is None else [bos]) + ids
    mark, places = tokenizer(separator, add_special_tokens=False)["input_ids"], []
    for step in steps:
        ids = ids + tokenizer(step, add_special_tokens=False, split_special_tokens=True)["input_ids"] + mark
        places.append(len(ids) - 1)
    return ids, places


def last_tokens(tokenizer: Tokenizer, ids: Sequence[int], text: str, steps: Sequence[Step]) -> list[int]:
    """For each step the index of its last token in `ids`, which `tokenizer` decoded to `text`. The last step extends to
    the end, EOS included.

    Found by decoding: sampled tokens need not be those that a tokenizer would make of the text.
    """
    def place_of(end: int) -> int:
        return bisect_left(range(1, len(ids)), True, key=lambda count: tokenizer.decode(
            ids[:count], skip_special_tokens=False).startswith(text[:end]))

    return [*(place_of(step.end) for step in steps[:-1]), len(ids) - 1] if steps else []
