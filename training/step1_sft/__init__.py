"""Stage 1: supervised fine-tuning, on demonstrations or on answers whose score is written into the prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data import collate
from hybrid_rlhf.models.backbone import packing_is_exact
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.roles import Actor
from hybrid_rlhf.trainers.sft import SFTTrainer
from hybrid_rlhf.training import builders, fixed_prompts, supervised, unread_options
from hybrid_rlhf.training.stage_config import StageConfig


@dataclass(frozen=True)
class Config(StageConfig):
    """Supervised fine-tuning.

    Attributes:
        stage: Name of the stage: sft, or conditional_sft.
        model: The model to fine-tune.
        data: The demonstrations; for conditional_sft answers with scores or labels, or pairs.
    """

    stage: str = "sft"
    output_dir: str = "outputs/sft"

    def __post_init__(self) -> None:
        unread_options.refuse(self)


def start_model(config: Config) -> tuple[str, ModelConfig]:
    """The model or preset to start from, and the model settings with the path of its weights (for a run, its model)."""
    path = config.model.model_name_or_path
    if path is None:
        return config.model.preset, config.model
    path = builders.parent_run(path, config.output_dir, "sft", "model.model_name_or_path")
    return path, replace(config.model, model_name_or_path=builders.model_folder(path))


def _collation(config: Config, pad: int) -> tuple:
    length = config.data.max_length if config.data.packing else None
    return lambda rows: collate.collate_sft(rows, pad, length), lambda rows: collate.collate_sft(rows, pad)


def _open(opened: supervised.Opened) -> supervised.Learner:
    config, tokenizer = opened.config, opened.tokenizer
    model = builders.open_policy(opened.model, tokenizer, config.seed, dropout=True,
                                 in_parts=config.engine.cuts_weights)
    if config.data.packing and not packing_is_exact(model):
        raise UserError(f"data.packing: {type(model).__name__} lets packed samples see each other; turn it off")
    engine = builders.policy_engine(model, tokenizer)
    supervised.prepare_training(engine, config, opened.steps)
    policy = Actor(engine, tokenizer, config.engine.micro_batch_tokens)
    answers = fixed_prompts.of_demonstrations(policy, opened.data, config.train.num_fixed_prompts,
                                              config.data.max_length)
    return supervised.Learner(SFTTrainer(policy), "policy", engine, model, engine.eos_ids, answers)


previews = partial(supervised.previews, start=start_model)
run = partial(supervised.run, start=start_model, collation=_collation, make=_open)
