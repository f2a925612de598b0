"""Stage 1: supervised fine-tuning, on demonstrations or on answers whose score is written into the prompt."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import main_first
from hybrid_rlhf.data import collate, datasets
from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.engine import ZeroConfig
from hybrid_rlhf.export.folder import export
from hybrid_rlhf.models.backbone import packing_is_exact
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.roles import Actor
from hybrid_rlhf.run import runfile
from hybrid_rlhf.run.loop import TrainConfig, fit, on_record
from hybrid_rlhf.trainers.sft import SFTTrainer
from hybrid_rlhf.training import announce, builders, defaults, fixed_prompts, unread_options


@dataclass(frozen=True)
class Config:
    """Supervised fine-tuning.

    Attributes:
        stage: Name of the stage: sft, or conditional_sft.
        output_dir: Folder of this run.
        seed: Seed of everything random.
        resume: auto (a finished run is left as it is, an unfinished one goes on from its newest checkpoint),
            never (start again) or the path of one of its checkpoints.
        report_to: Trackers (tensorboard, wandb, trackio, ...).
        model: The model to fine-tune.
        data: The demonstrations; for conditional_sft answers with scores or labels, or pairs.
        train: The schedule.
        engine: How training is laid out.
    """

    stage: str = "sft"
    output_dir: str = "outputs/sft"
    seed: int = 0
    resume: str = "auto"
    report_to: list[str] = field(default_factory=list)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: ZeroConfig = field(default_factory=ZeroConfig)

    def __post_init__(self) -> None:
        unread_options.refuse(self)

    @property
    def unused(self) -> dict[str, str]:
        return unread_options.of(self)


def start_model(config: Config) -> ModelConfig:
    """The model settings that name the weights to start from: those of a finished run where one is given."""
    given = config.model.model_name_or_path
    if given is None:
        return config.model
    path = builders.parent_run(given, config.output_dir, "sft", "model.model_name_or_path")
    return replace(config.model, model_name_or_path=builders.model_folder(path))


def preview(config: Config) -> None:
    """Print rendered examples of the data with the trained tokens marked."""
    from hybrid_rlhf.data.preview import preview as show

    builders.require_data(config.data, config.stage)
    tokenizer = builders.open_tokenizer(start_model(config), config.data, config.stage, config.seed)
    show(config.data, config.stage, tokenizer)


def run(config: Config, command: str = "") -> dict[str, float]:
    """Train, export to output_dir/model, and return the final metrics (also in output_dir/run.json)."""
    builders.require_data(config.data, config.stage)
    config = defaults.resolve(config)
    done = runfile.finished(config.output_dir, config.stage, config)
    if done:
        return done.metrics
    builders.seed_everything(config.seed)
    start = start_model(config)
    builders.check_model(start, config.engine, config.train.optim)
    builders.check_lengths(start, data__max_length=config.data.max_length)
    tokenizer = builders.open_tokenizer(start, config.data, config.stage, config.seed)
    with main_first():  # the others find its tables in the cache
        data = datasets.build(config.data, config.stage, tokenizer, config.seed)
    model = builders.open_policy(start, tokenizer, config.seed, dropout=True)
    if config.data.packing and not packing_is_exact(model):
        raise UserError(f"data.packing: {type(model).__name__} lets packed samples see each other; turn it off")
    length = config.data.max_length if config.data.packing else None
    pad = tokenizer.pad_token_id
    loader = builders.train_loader(data.train, config.train, config.seed, lambda r: collate.collate_sft(r, pad, length))
    held_out = builders.eval_loader(data.held_out, config.train, config.seed, lambda r: collate.collate_sft(r, pad))
    steps = builders.total_steps(config.train, len(loader))
    engine = builders.policy_engine(model, tokenizer)
    engine.prepare_training(builders.optimizer_of(config.train, config.train.learning_rate),
                            builders.schedule_of(config.train, steps), config.engine)
    trainer = SFTTrainer(Actor(engine, tokenizer, config.engine.micro_batch_tokens))
    record = builders.start(config, command, data)
    start = config.model.model_name_or_path or config.model.preset
    with on_record(record):  # a failing export is on the record too
        announce.before(record, config, {"policy": engine}, start, steps, loader)
        said = fixed_prompts.of_demonstrations(trainer.policy, data, config.train.num_fixed_prompts,
                                               config.data.max_length)
        metrics = fit(trainer, loader, held_out, config.train, record, steps, said)
        export(model, tokenizer, Path(config.output_dir) / builders.MODEL_FOLDER, engine.eos_ids)
        record.finish(metrics, tokenizer=tokenizer, base_model=config.model.model_name_or_path or config.model.preset,
                      data=data.report)
    return metrics
