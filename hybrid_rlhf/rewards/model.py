"""A trained reward model as a source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right
from hybrid_rlhf.data import chat
from hybrid_rlhf.data.chat import Rendered, Text
from hybrid_rlhf.data.turns import broken
from hybrid_rlhf.models.load import max_positions
from hybrid_rlhf.models.tokenizer import Tokenizer, turn_ends
from hybrid_rlhf.roles import Reward
from hybrid_rlhf.rollout import Rollout


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
        prompts = rollout.prompts.columns.get("prompt") or rollout.prompts.texts
        rows = [read_by(self.tokenizer, prompt, answer, bool(ended), self.raw) for prompt, answer, ended in
                zip(prompts, rollout.responses(), rollout.has_eos, strict=True)]
        longest, limit = max(map(len, rows)), self._positions()
        check(limit is None or longest <= limit,
              f"a response of {longest} tokens of the reward model's, which has {limit} positions; lower "
              "data.max_prompt_length or ppo.sampling.max_new_tokens")
        mask = length_mask(torch.tensor([len(r) for r in rows]))
        return self.role.score(SequenceBatch(pad_right(rows, self.role.engine.pad_id), mask, mask))

    def _positions(self) -> int | None:
        model: Any = self.role.engine.module.model
        return max_positions(model if hasattr(model, "config") else model.base_model)


def read_by(tokenizer: Tokenizer, prompt: Text, answer: Text, is_ended: bool, raw: bool = False) -> list[int]:
    """Token ids of prompt and answer, or of the messages of an episode, by `tokenizer`; an answer that did not end has
    neither end marker nor EOS. raw: a string prompt stays as it is even with a chat template. Raises UserError for a
    template that cannot render the messages."""
    try:
        rendered = chat.compose(tokenizer, chat.as_turn(tokenizer, prompt, raw), answer)
    except chat.SkipRow as error:
        raise UserError(f"a reward model cannot read a response: {error}; give one whose chat template shows it, or "
                        "reward.functions") from error
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
