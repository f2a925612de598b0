"""Write the model of a checkpoint: what the recipe would export if the run ended there.

A checkpoint holds the trained weights (all, adapters, a head) with their fp32 masters, and the settings of its run. The
model that the recipe started from is loaded again, the trained weights are restored by the code that resumes runs, and
the export is that of a run's end, which verifies what it wrote.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from hybrid_rlhf.core import own_files
from hybrid_rlhf.core.chat_runs import STAGE
from hybrid_rlhf.core.config import UserError, check, parse
from hybrid_rlhf.core.errors import present
from hybrid_rlhf.core.memory import explained
from hybrid_rlhf.core.own_files import refusal
from hybrid_rlhf.core.strict_json import to_json
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.export.folder import export
from hybrid_rlhf.models.tokenizer import load_tokenizer
from hybrid_rlhf.roles.sharing import Layout
from hybrid_rlhf.run import checkpoint, resume, runfile
from hybrid_rlhf.training import builders, on_policy, supervised, unread_options
from hybrid_rlhf.training.build_roles import Sources, build, find_starts
from hybrid_rlhf.training.registry import STAGES


class Trained(NamedTuple):
    """A model with its optimizer, as its recipe begins. ends: tokens that end an answer."""

    engine: HybridEngine
    model: nn.Module
    tokenizer: object
    ends: list[int]


def write(path: Path, folder: Path) -> None:
    """Write the model of the checkpoint in `path` into the empty folder `folder`, with its tokenizer, ready to serve,
    export and train; with adapters the merged model, and in adapter/ the adapter alone.

    Raises UserError for a damaged checkpoint, for one whose weights are sharded over several processes, for one of an
    unknown stage, and where the model that the run started from is missing.
    """
    home = path.absolute().parent
    run = (home.parent if home.name == checkpoint.BEST else home).parent
    with _copied(path, folder) as (copy, beside):
        trained = open_trained(copy, run)
        with trained.engine.active(), explained("while writing the model"):
            export(trained.model, trained.tokenizer, beside / "model", trained.ends)
        for each in (*(beside / "model").iterdir(), *beside.glob("adapter")):
            each.rename(folder / each.name)


@contextmanager
def _copied(path: Path, folder: Path) -> Iterator[tuple[Path, Path]]:
    """A copy of the checkpoint in a temporary folder in `folder`, as the run may remove the original; and that folder.
    Both are removed with the block. UserError where the run has removed it already, or the disk is full."""
    with own_files.fresh_folder(folder) as beside:
        copy = beside / path.name
        copy.mkdir()
        try:
            checkpoint.copy_files(path, copy)
        except OSError as error:
            refused = refusal(error)
            raise UserError(f"cannot hold on to {path}: {refused}" if refused else
                            f"{path} has just been removed by its run; take a newer one") from error
        yield copy, beside


def open_trained(path: Path, output_dir: Path) -> Trained:
    """The model with the weights of the checkpoint in `path`. output_dir: the folder of its run, beside which the runs
    of earlier stages are. Raises UserError as `write` does."""
    wrong = checkpoint.damage(path)
    check(wrong is None, f"the checkpoint {path.name} is damaged ({wrong}); take another")
    facts = resume.made_by(path)
    if facts is None:
        raise UserError(f"{path} is not a checkpoint of a run; take another")
    saved = checkpoint.read(path, of=0)["trainer"]
    stage, config = _settings(facts, output_dir)
    role = "actor" if hasattr(config, "roles") else "policy" if STAGES[facts["stage"]].leaves == "policy" else "reward"
    check(role in saved, f"{path.name} holds no {role}; take another checkpoint")
    _check_unsharded(saved[role], facts["world_size"])
    trained = (_open_actor if role == "actor" else _open_learner)(stage, _as_trained(config, saved[role]))
    with trained.engine.active(), explained("while reading the checkpoint"):
        present(trained.engine.training, "its optimizer").load_shard(_weights_of(saved[role]))
    return trained


def _settings(facts: dict, output_dir: Path) -> tuple[ModuleType, Any]:
    """The recipe of the run that made a checkpoint, and its settings."""
    name = facts["stage"]
    check(name in STAGES and STAGES[name].leaves is not None,
          f"a checkpoint of stage {name!r}, which no command makes: only its own program can load it")
    stage = importlib.import_module(STAGES[name].module)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(to_json(facts["settings"]))
        file.flush()
        config, _ = parse(stage.Config, ["--config", file.name], prog=f"hybrid-rlhf --stage {name}",
                          unused=unread_options.of_stage(name))
    for flag in ("trust_remote_code", "trust_pickled_weights"):  # the maker trusted it, the user who opens it may not
        check(not getattr(config.model, flag), f"the checkpoint's settings have model.{flag}; only the run itself may "
                                               "load it, at its end")
    return stage, replace(config, output_dir=str(output_dir))


def _check_unsharded(saved: Mapping, num_processes: int) -> None:
    """UserError for sharded weights, which only as many processes can put together."""
    check(num_processes == 1 or not any(name.startswith("group ") for name in saved["optimizer"]),
          f"the checkpoint has the weights in parts of {num_processes} processes (engine.zero_stage 1 or more): only "
          "the run itself puts them together, at its end")


def _as_trained(config: Any, saved: Mapping) -> Any:
    """The settings with the run's dtype, where auto chose it by a GPU that may be absent now: masters in the checkpoint
    mean bfloat16 weights."""
    if config.model.dtype == "auto" and any("master" in each for each in saved["optimizer"].values()):
        return replace(config, model=replace(config.model, dtype="bfloat16"))
    return config


def _open_learner(stage: ModuleType, config: Any) -> Trained:
    """The policy or reward model of an offline recipe."""
    builders.seed_everything(config.seed)
    _, model = stage.start_model(config)
    record = runfile.run_at(config.output_dir)
    if record is not None and record.stage == STAGE:  # whose rows may be of another kind than its settings say
        tokenizer = load_tokenizer(model.model_name_or_path)
    else:
        tokenizer = builders.open_tokenizer(model, config.data, supervised.reads_of(config), config.seed)
    is_policy = STAGES[config.stage].leaves == "policy"
    if is_policy:
        opened = builders.open_policy(model, tokenizer, config.seed, dropout=False)
        engine = builders.policy_engine(opened, tokenizer)
    else:
        opened = builders.open_scalar(model, tokenizer, new_head_std=config.reward.head_std)
        engine = builders.scalar_engine(opened, tokenizer)
    supervised.prepare_training(engine, config, 1)
    ends = engine.eos_ids if is_policy else [tokenizer.eos_token_id]
    return Trained(engine, opened, tokenizer, ends)


def _open_actor(_stage: ModuleType, config: Any) -> Trained:
    """The actor of an on-policy recipe, without its other roles."""
    builders.seed_everything(config.seed)
    config = replace(config, roles=replace(config.roles, actor=replace(config.roles.actor, tp=None)))
    sources = Sources(on_policy.find_actor(config), None, None, None)
    model = on_policy.actor_model(config, sources)
    tokenizer = builders.open_tokenizer(model, config.data, config.method.reads, config.seed)
    for reads in config.method.also_reads:
        builders.give_template(tokenizer, config.data, reads)
    starts = find_starts(sources, config.model, config.roles)
    roles, _ = build(config, starts, Layout((("actor",),), "model"), tokenizer, {"actor": 1}, None)
    engine = roles.actor.engine
    return Trained(engine, engine.model, tokenizer, engine.eos_ids)


def _weights_of(saved: Mapping) -> dict:
    """The argument of ZeroTraining.load_shard, without the optimizer's moments, which only training needs."""
    masters = {name: {"master": each["master"]} if "master" in each else {}
               for name, each in saved["optimizer"].items()}
    return {key: saved[key] for key in saved if key != "optimizer"} | {"optimizer": masters}
