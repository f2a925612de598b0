"""The loss that TRL's own trainers report for the first step on given tokens: an oracle for ours.

TRL is a dependency of the tests alone. Whoever imports this calls `pytest.importorskip("trl")` first.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn


def trl_sft_loss(model: nn.Module, rows: list[dict], pad_id: int) -> float:
    """First-step loss of trl.SFTTrainer on all `rows` as one batch, in fp32 on the CPU.

    model: a transformers causal language model; it is copied, so its weights stay as they are. rows: {"input_ids":
    list of ids, "completion_mask": list of 0 and 1, the tokens to be learned}. pad_id fills the batch up.
    """
    from trl import SFTConfig, SFTTrainer

    return _first_loss(SFTTrainer, SFTConfig, model, rows, pad_id, completion_only_loss=True)


def trl_reward_loss(model: nn.Module, rows: list[dict], pad_id: int, center_coef: float | None = None) -> float:
    """First-step loss of trl.RewardTrainer on all `rows` as one batch of pairs, in fp32 on the CPU.

    model: a transformers sequence classification model with one label; it is copied. rows: {"chosen_ids": list of ids,
    "rejected_ids": list of ids} and, in all rows or none, "margin": a number. No sequence may hold pad_id: transformers
    finds the last real token by comparing ids with it.
    """
    from trl import RewardConfig, RewardTrainer

    if any(pad_id in row[side] for row in rows for side in ("chosen_ids", "rejected_ids")):
        raise ValueError(f"pad id {pad_id} among the tokens: transformers would read the score elsewhere")
    return _first_loss(RewardTrainer, RewardConfig, model, rows, pad_id, center_rewards_coefficient=center_coef)


def trl_preference_loss(kind: str, model: nn.Module, reference: nn.Module, rows: list[dict], pad_id: int,
                        **options: object) -> float:
    """First-step loss of trl.DPOTrainer or trl.KTOTrainer (kind "DPO" or "KTO") on all `rows` as one batch, in fp32.

    rows: ids in lists under "prompt" and "chosen", "rejected" (DPO) or "completion" beside a bool "label" (KTO). Every
    answer ends with id 1, the tokenizer's EOS, which TRL would add. KTO compares each prompt with the answer of the row
    before it. options: the trainer's own, such as beta and loss_type.
    """
    import trl

    texts = [{k: " ".join(f"<{i}>" for i in v) + " " * (k == "prompt") if isinstance(v, list) else v
              for k, v in row.items()} for row in rows]
    return _first_loss(getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config"), model, texts, pad_id,
                       beside={"ref_model": copy.deepcopy(reference).float()}, **options)


def trl_advantages(model: nn.Module, sources: Sequence[Sequence[float | None]], group_size: int,
                   weights: Sequence[float], **options: object) -> list[float]:
    """The advantages that trl.GRPOTrainer trains on, of one response of two tokens each.

    sources: of each reward function the scores of all responses, None where it skips one. options: of GRPOConfig.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    size = len(sources[0])
    tokenizer = _tokenizer(model.config.vocab_size, 0)
    with _alone(), tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            num_generations=group_size, per_device_train_batch_size=size, gradient_accumulation_steps=1, max_steps=1,
            learning_rate=0.0, bf16=False, fp16=False, use_cpu=True, seed=0, save_strategy="no", report_to="none",
            disable_tqdm=True, logging_strategy="no", shuffle_dataset=False, reward_weights=list(weights),
            max_completion_length=2, output_dir=str(Path(folder) / "out"), **options)
        trainer = GRPOTrainer(
            model=copy.deepcopy(model).float(), args=config, processing_class=tokenizer,
            reward_funcs=[lambda completions, scores=scores, **_: list(scores) for scores in sources],
            train_dataset=Dataset.from_list([{"prompt": "<5> <6>"}] * (size // group_size)))
        trainer._generate_single_turn = lambda ids, *_: ([[5, tokenizer.eos_token_id] for _ in ids], None)
        made = []
        score = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda rows: made.append(score(rows)) or made[-1]
        trainer.train()
    return made[0]["advantages"].tolist()


def _first_loss(trainer_class: type, config_class: type, model: nn.Module, rows: list[dict], pad_id: int,
                beside: dict | None = None, **options: object) -> float:
    from datasets import Dataset

    with _alone(), tempfile.TemporaryDirectory() as folder:
        config = config_class(
            output_dir=str(Path(folder) / "out"), per_device_train_batch_size=len(rows), gradient_accumulation_steps=1,
            max_steps=1, max_length=None, learning_rate=0.0, bf16=False, fp16=False, use_cpu=True, seed=0,
            save_strategy="no", report_to="none", disable_tqdm=True,
            logging_strategy="no", **options)
        trainer = trainer_class(model=copy.deepcopy(model).float(), args=config, train_dataset=Dataset.from_list(rows),
                                processing_class=_tokenizer(model.config.vocab_size, pad_id), **beside or {})
        return float(trainer.train().training_loss)


@contextmanager
def _alone() -> Iterator[None]:
    """One process, whatever group the tests are in, and no trace left: accelerate writes RANK and its variants into the
    environment, where a process started later would take them for a launcher's, and transformers seeds torch."""
    with patch.dict(os.environ), torch.random.fork_rng(devices=[]):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        yield


def _tokenizer(vocab_size: int, pad_id: int):
    """A tokenizer that TRL can ask for special tokens; the text of ids 5, 6 is "<5> <6>"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"<{i}>": i for i in range(vocab_size)}
    eos = next(i for i in range(vocab_size) if i != pad_id)
    backend = Tokenizer(models.WordLevel(words, unk_token=f"<{eos}>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend,
                                   pad_token=f"<{pad_id}>", eos_token=f"<{eos}>")
