"""Offline preference optimisation of the stage-1 policy: DPO and its variants, on pairs or labels, without sampling."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from hybrid_rlhf.algorithms.preference import LOSSES
from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.distributed import main_first
from hybrid_rlhf.data import collate, datasets
from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.engine import ZeroConfig
from hybrid_rlhf.export.folder import export
from hybrid_rlhf.models.adapters import Adapters
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig
from hybrid_rlhf.roles import Actor, Reference
from hybrid_rlhf.run import runfile
from hybrid_rlhf.run.loop import TrainConfig, fit, on_record
from hybrid_rlhf.trainers.offline import DPOConfig, OfflineTrainer
from hybrid_rlhf.training import announce, builders, defaults, fixed_prompts, unread_options


@dataclass(frozen=True)
class Config:
    """Offline preference optimisation.

    Attributes:
        stage: Name of the stage; its variants (ipo, kto, ...) set dpo.loss_type.
        output_dir: Folder of this run.
        seed: Seed of everything random.
        resume: auto (a finished run is left as it is, an unfinished one goes on from its newest checkpoint),
            never (start again) or the path of one of its checkpoints.
        report_to: Trackers (tensorboard, wandb, trackio, ...).
        model: The policy, and the reference; without a name, the finished sft run beside output_dir.
        data: The preference pairs; for kto labelled responses, or the two sides of pairs.
        train: The schedule. A row is a pair, or a labelled response.
        engine: How training is laid out.
        dpo: The loss and its settings.
    """

    stage: str = "dpo"
    output_dir: str = "outputs/dpo"
    seed: int = 0
    resume: str = "auto"
    report_to: list[str] = field(default_factory=list)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: ZeroConfig = field(default_factory=ZeroConfig)
    dpo: DPOConfig = field(default_factory=DPOConfig)

    def __post_init__(self) -> None:
        unread_options.refuse(self)
        train = self.train
        check(LOSSES[self.dpo.loss_type].needs_pairs or train.per_device_train_batch_size is None
              or train.rows_per_step >= 2,
              "train.per_device_train_batch_size is 1, but kto compares each prompt with another row's response; take "
              "2 or more")

    @property
    def unused(self) -> dict[str, str]:
        return unread_options.of(self)


def data_stage(config: Config) -> str:
    """The name under which this run's rows are asked for: that of the loss, however it was chosen."""
    return {"sigmoid": "dpo"}.get(config.dpo.loss_type, config.dpo.loss_type)


def start_model(config: Config) -> tuple[str, ModelConfig]:
    """The path of the stage-1 run or model, and the model settings that name its weights."""
    check(config.model.preset is None, f"model.preset: {data_stage(config)} starts from a trained model; give "
                                       "model.model_name_or_path or run --stage sft first")
    path = builders.parent_run(config.model.model_name_or_path, config.output_dir, "sft", "model.model_name_or_path")
    return path, replace(config.model, model_name_or_path=builders.model_folder(path))


def reference_model(model: ModelConfig) -> ModelConfig:
    """The settings of a reference with weights of its own: those of the policy's start, nothing of them trained."""
    return replace(model, lora=LoraConfig(), freeze=[], gradient_checkpointing=False)


def preview(config: Config) -> None:
    """Print rendered examples of the data with the trained tokens marked."""
    from hybrid_rlhf.data.preview import preview as show

    builders.require_data(config.data, data_stage(config))
    _, model = start_model(config)
    stage = data_stage(config)
    show(config.data, stage, builders.open_tokenizer(model, config.data, stage, config.seed))


def open_roles(config: Config, model: ModelConfig, tokenizer, steps: int) -> tuple[Actor, Reference | None]:  # noqa: ANN001
    """The policy under its optimizer and the reference: its base without the adapter, or a frozen copy."""
    causal = builders.open_policy(model, tokenizer, config.seed, dropout=False)
    needs_reference, tokens = LOSSES[config.dpo.loss_type].needs_reference, config.engine.micro_batch_tokens
    adapters = Adapters(causal) if model.lora.r and needs_reference else None
    turns = [{}, {}]
    if adapters:
        adapters.train_only(adapters.names)
        turns = [{"adapter": partial(adapters.use, name)} for name in (adapters.names[0], None)]
    engine = builders.policy_engine(causal, tokenizer, **turns[0])
    engine.prepare_training(builders.optimizer_of(config.train, config.train.learning_rate),
                            builders.schedule_of(config.train, steps), config.engine)
    policy = Actor(engine, tokenizer, tokens)
    if not needs_reference:
        return policy, None
    if adapters:
        return policy, Reference(builders.policy_engine(causal, tokenizer, **turns[1]), tokens)
    copy = builders.open_policy(reference_model(model), tokenizer, config.seed, dropout=False).requires_grad_(False)
    frozen = builders.policy_engine(copy, tokenizer)
    if config.engine.zero_stage == 3:
        frozen.prepare_frozen(config.engine)
    return policy, Reference(frozen, tokens)


def run(config: Config, command: str = "") -> dict[str, float]:
    """Train, export to output_dir/model, and return the final metrics."""
    builders.require_data(config.data, data_stage(config))
    config = defaults.resolve(config)
    done = runfile.finished(config.output_dir, config.stage, config)
    if done:
        return done.metrics
    builders.seed_everything(config.seed)
    base, model = start_model(config)
    builders.check_model(model, config.engine, config.train.optim)
    builders.check_lengths(model, data__max_length=config.data.max_length)
    stage = data_stage(config)
    tokenizer = builders.open_tokenizer(model, config.data, stage, config.seed)
    with main_first():  # the others find its tables in the cache
        data = datasets.build(config.data, stage, tokenizer, config.seed)
    collated = _collation(config, tokenizer.pad_token_id)
    loader = builders.train_loader(data.train, config.train, config.seed, collated)
    held_out = builders.eval_loader(data.held_out, config.train, config.seed, collated)
    steps = builders.total_steps(config.train, len(loader))
    policy, reference = open_roles(config, model, tokenizer, steps)
    trainer = OfflineTrainer(policy, reference, config.dpo)
    record = builders.start(config, command, data)
    with on_record(record):  # a failing export is on the record too
        announce.before(record, config, {"policy": policy.engine}, base, steps, loader)
        said = fixed_prompts.of_demonstrations(policy, data, config.train.num_fixed_prompts, config.data.max_length)
        metrics = fit(trainer, loader, held_out, config.train, record, steps, said)
        with policy.engine.active():
            export(policy.engine.model, tokenizer, Path(config.output_dir) / builders.MODEL_FOLDER,
                   policy.engine.eos_ids)
        record.finish(metrics, tokenizer=tokenizer, base_model=base, data=data.report)
    return metrics


def _collation(config: Config, pad: int):  # noqa: ANN202
    """How rows become a batch of the loss's kind."""
    if LOSSES[config.dpo.loss_type].needs_pairs:
        return lambda rows: collate.collate_pairs(rows, pad)
    return lambda rows: collate.collate_labelled(rows, pad, config.data.max_length)
