"""Offline preference optimisation of the stage-1 policy: DPO and its variants, on pairs or labels, without sampling."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from hybrid_rlhf.algorithms.preference import LOSSES
from hybrid_rlhf.core.config import check
from hybrid_rlhf.data import collate
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import Adapters, LoraConfig
from hybrid_rlhf.roles import Actor, Reference
from hybrid_rlhf.trainers.offline import DPOConfig, OfflineTrainer
from hybrid_rlhf.training import builders, fixed_prompts, supervised, unread_options
from hybrid_rlhf.training.stage_config import StageConfig


@dataclass(frozen=True)
class Config(StageConfig):
    """Offline preference optimisation.

    Attributes:
        stage: Name of the stage; its variants (ipo, kto, ...) set dpo.loss_type.
        model: The policy, and the reference; without a name, the finished sft run beside output_dir.
        data: The preference pairs; for kto labelled responses, or the two sides of pairs.
        train: The schedule. A row is a pair, or a labelled response.
        dpo: The loss and its settings.
    """

    stage: str = "dpo"
    output_dir: str = "outputs/dpo"
    dpo: DPOConfig = field(default_factory=DPOConfig)

    def __post_init__(self) -> None:
        unread_options.refuse(self)
        train = self.train
        check(LOSSES[self.dpo.loss_type].needs_pairs or train.per_device_train_batch_size is None
              or train.rows_per_step >= 2,
              "train.per_device_train_batch_size is 1, but kto compares each prompt with another row's response; take "
              "2 or more")


def start_model(config: Config) -> tuple[str, ModelConfig]:
    """The path of the stage-1 run or model, and the model settings that name its weights."""
    return supervised.start_from_sft(config, supervised.reads_of(config).stage)


def reference_model(model: ModelConfig) -> ModelConfig:
    """The settings of a reference with separate weights: those of the policy's start, frozen."""
    return replace(model, lora=LoraConfig(), freeze=[], gradient_checkpointing=False)


def open_roles(config: Config, model: ModelConfig, tokenizer, steps: int) -> tuple[Actor, Reference | None]:  # noqa: ANN001
    """The policy with its optimizer, and the reference: the policy's base without the adapter, or a frozen copy."""
    causal = builders.open_policy(model, tokenizer, config.seed, dropout=False, in_parts=config.engine.cuts_weights)
    needs_reference, tokens = LOSSES[config.dpo.loss_type].needs_reference, config.engine.micro_batch_tokens
    adapters = Adapters(causal) if model.lora.r and needs_reference else None
    turns = [{}, {}]
    if adapters:
        adapters.train_only(adapters.names)
        turns = [{"adapter": partial(adapters.use, name)} for name in (adapters.names[0], None)]
    engine = builders.policy_engine(causal, tokenizer, **turns[0])
    supervised.prepare_training(engine, config, steps)
    policy = Actor(engine, tokenizer, tokens)
    if not needs_reference:
        return policy, None
    if adapters:
        return policy, Reference(builders.policy_engine(causal, tokenizer, **turns[1]), tokens)
    is_cut = config.engine.zero_stage == 3
    copy = builders.open_policy(reference_model(model), tokenizer, config.seed, dropout=False, in_parts=is_cut)
    frozen = builders.policy_engine(copy.requires_grad_(False), tokenizer)
    if is_cut:
        frozen.prepare_frozen(config.engine)
    return policy, Reference(frozen, tokens)


def _open(opened: supervised.Opened) -> supervised.Learner:
    config = opened.config
    policy, reference = open_roles(config, opened.model, opened.tokenizer, opened.steps)
    answers = fixed_prompts.of_demonstrations(policy, opened.data, config.train.num_fixed_prompts,
                                              config.data.max_length)
    return supervised.Learner(OfflineTrainer(policy, reference, config.dpo), "policy", policy.engine,
                              policy.engine.model, policy.engine.eos_ids, answers)


def _collation(config: Config, pad: int) -> tuple:
    """How rows become a batch of the loss's kind."""
    if LOSSES[config.dpo.loss_type].needs_pairs:
        return (lambda rows: collate.collate_pairs(rows, pad),) * 2
    return (lambda rows: collate.collate_labelled(rows, pad, config.data.max_length),) * 2


previews = partial(supervised.previews, start=start_model)
run = partial(supervised.run, start=start_model, collation=_collation, make=_open)
