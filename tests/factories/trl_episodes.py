"""Steps of TRL's GRPOTrainer on episodes with tools: an oracle for ours. Its own tool loop runs, on turns that a test
wrote.

Whoever imports this calls `pytest.importorskip("trl")` first.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import nn

from tests.factories.trl_oracle import _alone


class Told(NamedTuple):
    """What TRL made of the episodes: lists of ids and of 0 and 1, one of each for an episode, its log of each
    optimizer step, and its model as the steps left it."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_mask: list[list[int]]
    completions: list[list[dict]]
    logs: list[dict]
    model: nn.Module


def trl_grpo_steps(model: nn.Module, reference: nn.Module, tokenizer, prompts: Sequence[list[dict]],  # noqa: ANN001
                   turns: Sequence[Sequence[list[int]]], scores: Sequence[float], tools: Sequence[Callable],
                   rate: float, images: Sequence[list] | None = None, **options: object) -> Told:
    """trl.GRPOTrainer on the CPU in fp32, all episodes as one batch, plain descent at `rate` without clipping.

    prompts: conversations, each for len(turns) / len(prompts) episodes in a row (a group). turns: of each episode, what
    the model says turn by turn; TRL asks for a further one where it finds a call and has run the tool, and raises
    AssertionError where the test wrote none or where it does not ask for one that is written. scores: of the episodes.
    images: Pillow's, of each prompt; tokenizer is then a processor.
    options: of GRPOConfig; num_iterations is the number of optimizer steps. The models stay as they are.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    with _alone(), tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(Path(folder) / "reference")
        policy = copy.deepcopy(model).float()
        policy.config._name_or_path = str(Path(folder) / "reference")  # where TRL loads the reference from
        fixed = dict(num_generations=len(turns) // len(prompts), per_device_train_batch_size=len(turns),
                     gradient_accumulation_steps=1, max_steps=options.get("num_iterations", 1), optim="sgd",
                     learning_rate=rate, lr_scheduler_type="constant", max_grad_norm=0.0, bf16=False, fp16=False,
                     use_cpu=True, seed=0, gradient_checkpointing=False, save_strategy="no", report_to="none",
                     disable_tqdm=True, logging_strategy="steps", logging_steps=1, shuffle_dataset=False,
                     output_dir=str(Path(folder) / "out"))
        trainer = GRPOTrainer(model=policy, args=GRPOConfig(**fixed | options), processing_class=tokenizer,
                              train_dataset=Dataset.from_list([
                                  {"prompt": prompt} | ({"images": images[i]} if images else {})
                                  for i, prompt in enumerate(prompts)]),
                              reward_funcs=lambda completions, **_: list(scores), tools=list(tools) or None)
        said = _Script(turns)
        trainer._generate_single_turn = said
        made: list[tuple] = []
        generate = trainer._generate
        trainer._generate = lambda given: made.append(generate(given)) or made[-1]
        trainer.train()
        said.check_ended()
    assert len(made) == 1
    prompt_ids, completion_ids, tool_mask, completions = made[0][:4]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Told(prompt_ids, completion_ids, tool_mask, completions, logs, trainer.model)


class _Script:
    """In the place of _generate_single_turn: the next turn of each episode that has one, in order."""

    def __init__(self, turns: Sequence[Sequence[list[int]]]) -> None:
        self.turns, self.number = turns, 0

    def __call__(self, prompt_ids: list, *_: object, **__: object) -> tuple[list, list]:
        going = [each for each in self.turns if len(each) > self.number]
        assert len(going) == len(prompt_ids), f"turn {self.number}: {len(prompt_ids)} episodes, {len(going)} written"
        for prompt, each in zip(prompt_ids, going, strict=True):  # it goes on from its own last turn
            assert not self.number or contains(prompt, each[self.number - 1])
        ids = [list(each[self.number]) for each in going]
        self.number += 1
        return ids, [[-1.0] * len(each) for each in ids]

    def check_ended(self) -> None:
        assert self.number == max(map(len, self.turns)), f"TRL asked for {self.number} turns"


def contains(whole: Sequence[int], part: Sequence[int]) -> bool:
    """Whether `part` stands in `whole`, in one piece."""
    return any(list(whole[i : i + len(part)]) == list(part) for i in range(len(whole) - len(part) + 1))
