"""Episodes by TRL's own GRPOTrainer: its loop of tool calls, with transformers' generate (the peer of episodes.py).

Of the loop nothing is replaced but what the model has drawn. A step is what the trainer does with a batch until its
episodes are there: environments are reset, prompts rendered, turns generated and parsed, tools called; what comes after
that is left out.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path

import peers.turns  # noqa: F401 - TRL is told to be quiet before it is imported
import torch


class TrlEpisodes:
    """rows: prompt and the environment's columns, one for each episode. written: the tokens of each turn, by row; what
    the model draws is replaced by them. environment: makes one environment.

    step() plays all episodes; .tokens: those of each response; .began: when each round of turns began to be
    generated, by time.perf_counter.
    """

    def __init__(self, model, tokenizer, rows: list[dict], written: list[list[list[int]]],  # noqa: ANN001
                 environment: Callable, max_tokens: int, out: Path) -> None:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        config = GRPOConfig(
            output_dir=str(out), per_device_train_batch_size=len(rows), num_generations=len(rows), beta=0.0,
            max_completion_length=max_tokens, max_steps=1, temperature=1.0, bf16=False, gradient_checkpointing=False,
            use_cpu=True, save_strategy="no", report_to="none", logging_strategy="no", disable_tqdm=True,
            dataloader_pin_memory=False)
        self.rows, self.written = rows, written
        self.began: list[float] = []
        self.tokens: list[list[int]] = []
        self.trainer = GRPOTrainer(model=model, reward_funcs=_no_reward, args=config,
                                   processing_class=copy.deepcopy(tokenizer), environment_factory=environment,
                                   train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]))
        model.train()
        self._bound(model, tokenizer.pad_token_id)
        self._end_when_played()

    def step(self) -> None:
        self.began.clear()
        try:
            self.trainer._generate_and_score_completions(copy.deepcopy(self.rows))
        except _Played as played:
            self.tokens = played.tokens

    def _bound(self, model, pad_id: int) -> None:  # noqa: ANN001
        """Let `model.generate` end each row where its turn does, and say what is written there."""
        from transformers import StoppingCriteria, StoppingCriteriaList

        generate = model.generate
        for settings in (self.trainer.generation_config, model.generation_config):
            settings.eos_token_id = model.config.vocab_size  # no token; None would be filled in from elsewhere

        def bounded(input_ids: torch.Tensor, **named: object) -> torch.Tensor:
            turns = [row[len(self.began)] for row in self.written]
            ends = torch.tensor([input_ids.shape[1] + len(turn) for turn in turns])
            self.began.append(time.perf_counter())

            class AtEnd(StoppingCriteria):
                def __call__(self, ids: torch.Tensor, scores: object, **_others: object) -> torch.Tensor:
                    return ids.shape[1] >= ends

            ids = generate(input_ids=input_ids, stopping_criteria=StoppingCriteriaList([AtEnd()]), **named)
            width = ids.shape[1] - input_ids.shape[1]
            said = torch.tensor([turn + [pad_id] * (width - len(turn)) for turn in turns])
            return torch.cat([input_ids, said], dim=1)

        model.generate = bounded

    def _end_when_played(self) -> None:
        generate = self.trainer._generate

        def played(prompts: list) -> None:
            _, tokens, *_ = generate(prompts)
            raise _Played(tokens)

        self.trainer._generate = played


class _Played(Exception):
    """The episodes are there. tokens: of each response."""

    def __init__(self, tokens: list[list[int]]) -> None:
        super().__init__()
        self.tokens = tokens


def _no_reward(completions: list, **_columns: object) -> list[float]:
    return [0.0] * len(completions)
