"""Shared code of the offline recipes (SFT, reward model, DPO): the run and the preview."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import nn

from hybrid_rlhf.core import activity
from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.distributed import main_first
from hybrid_rlhf.core.memory import explained
from hybrid_rlhf.data import datasets
from hybrid_rlhf.data.datasets import StageData
from hybrid_rlhf.data.preview import Preview, look
from hybrid_rlhf.data.sources import Reads
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.export.folder import export, try_export
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.run import runfile
from hybrid_rlhf.run.loop import Leaving, Trainer, fit, on_record
from hybrid_rlhf.training import announce, builders, defaults
from hybrid_rlhf.training.registry import STAGES
from hybrid_rlhf.training.stage_config import StageConfig


class Opened(NamedTuple):
    """A run before its model is loaded. config: resolved; model: what to load; steps: trainer steps of the run."""

    config: StageConfig
    model: ModelConfig
    tokenizer: object
    data: StageData
    steps: int


class Learner(NamedTuple):
    """The trained model with its optimizer. role: its name; model: what is exported; ends: the tokens that end its
    answers; answers: makes the fixed-prompt samples, if any; facts: for the record, called after the training."""

    trainer: Trainer
    role: str
    engine: HybridEngine
    model: nn.Module
    ends: list[int]
    answers: Callable[[], list[dict]] | None
    facts: Callable[[], dict] = dict


Start = Callable[[StageConfig], tuple[str, ModelConfig]]  # settings -> the run or model to start from, and its settings
# (settings, pad id) -> collate functions of training and of evaluation
Collation = Callable[[StageConfig, int], tuple[Callable[[list[dict]], object], Callable[[list[dict]], object]]]


def reads_of(config: StageConfig) -> Reads:
    """The rows that the stage reads; of preferences those of dpo.loss_type, whichever stage set it."""
    return STAGES[defaults.method_of(config)].reads


def previews(config: StageConfig, *, start: Start) -> Iterator[Preview]:
    """Rendered examples of the data."""
    reads = reads_of(config)
    builders.require_data(config.data, reads.stage)
    yield look(config.data, reads, builders.open_tokenizer(start(config)[1], config.data, reads, config.seed))


def run(config: StageConfig, command: str = "", *, start: Start, collation: Collation,
        make: Callable[[Opened], Learner]) -> dict[str, float]:
    """Train, export to output_dir/model, and return the final metrics (also in output_dir/run.json)."""
    reads = reads_of(config)
    builders.require_data(config.data, reads.stage)
    config = defaults.resolve(config)
    done = runfile.finished(config.output_dir, config.stage, config)
    if done:
        return done.metrics
    builders.seed_everything(config.seed)
    builders.choose_kernels(config.train)
    base, model = start(config)
    builders.check_model(model, config.engine, config.train.optim)
    builders.check_lengths(model, data__max_length=config.data.max_length)
    tokenizer = builders.open_tokenizer(model, config.data, reads, config.seed)
    with main_first():  # the others find its tables in the cache
        data = datasets.build(config.data, reads, tokenizer, config.seed)
    used = replace(config, data=replace(config.data, packing=False)) if data.report.get("unpacked") else config
    collate, collate_held_out = collation(used, tokenizer.pad_token_id)
    loader = builders.train_loader(data.train, config.train, config.seed, collate, drop_last=False)
    held_out = builders.eval_loader(data.held_out, config.train, config.seed, collate_held_out)
    steps = builders.total_steps(config.train, len(loader))
    with activity.slow("loading the model"):
        learner = make(Opened(used, model, tokenizer, data, steps))
    with explained("while trying the export"), learner.engine.active():
        try_export(learner.model, tokenizer, learner.ends)
    record = builders.start(config, command, data)

    def leave() -> None:
        with explained("while exporting", builders.EXPORT_LATER), learner.engine.active():
            export(learner.model, tokenizer, Path(config.output_dir) / builders.MODEL_FOLDER, learner.ends)

    def facts() -> dict:
        return {"base_model": base, "data": data.report} | builders.adapted_weights(model) | learner.facts()

    with on_record(record):
        announce.before(record, used, {learner.role: learner.engine}, base, steps, loader)
        return fit(learner.trainer, loader, held_out, config.train, record, steps, learner.answers,
                   builders.guesses([learner.engine]),
                   Leaving(tokenizer, leave, facts, lambda: learner.engine.training.num_steps))


def start_from_sft(config: StageConfig, what: str) -> tuple[str, ModelConfig]:
    """The path of the stage-1 run or model that `what` starts from, and the model settings that name its weights."""
    check(config.model.preset is None, f"model.preset: {what} starts from a trained model; give "
                                       "model.model_name_or_path or run --stage sft first")
    path = builders.parent_run(config.model.model_name_or_path, config.output_dir, "sft", "model.model_name_or_path")
    return path, replace(config.model, model_name_or_path=builders.model_folder(path))


def prepare_training(engine: HybridEngine, config: StageConfig, steps: int) -> None:
    """Prepare an engine for training with the optimizer of the run's settings."""
    with explained("while making the optimizer"):
        engine.prepare_training(builders.optimizer_of(config.train, config.train.learning_rate),
                                builders.schedule_of(config.train, steps), config.engine)
