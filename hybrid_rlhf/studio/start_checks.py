"""What a launcher would say of settings before it reads data or weights: what is missing, and what is not there.

Runs no code that settings name, and reads nothing of a hub.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.data.sources import check_there
from hybrid_rlhf.models.load import check_folder
from hybrid_rlhf.rewards.functions import FunctionSource, open_functions
from hybrid_rlhf.training import builders, on_policy, reward_sources
from hybrid_rlhf.training.registry import STAGES


@contextmanager
def about(option: str) -> Iterator[None]:
    """A UserError of the block is about this option, whatever its text names."""
    try:
        yield
    except UserError as error:
        error.option = option  # type: ignore[attr-defined]  # for the page, which shows it beside its field
        raise


def check_start(config: object) -> None:
    """UserError, in one line. config: the settings of a stage, whose nulls may be open yet."""
    stage = importlib.import_module(STAGES[config.stage].module)
    if config.stage == "evaluate":
        stage.contenders(config)
        return
    is_whole = hasattr(config, "run_stages")
    with about("data.sources"):
        builders.require_data(config.data, config.run_stages[0] if is_whole else config.stage)
        for source in config.data.sources:
            check_there(source)
    with about("model.model_name_or_path"):
        path = (config.model.model_name_or_path if is_whole else stage.start_model(config)[0]
                if hasattr(stage, "start_model") else on_policy.find_actor(config))
        check(path is not None or config.model.preset is not None,
              "no model: give model.model_name_or_path (hub id or folder) or model.preset")
        if path is not None and not config.model.preset:
            needs = ("weights",) if config.model.tokenizer_name_or_path else ("weights", "tokenizer")
            check_folder(builders.model_folder(path), needs, config.model.trust_pickled_weights)
    if hasattr(config, "environment"):
        _check_parents(config)
    _check_functions(config.reward_sources if is_whole else getattr(config, "reward", None))


def _check_parents(config: object) -> None:
    """The reward model and the teacher of a stage that samples."""
    distils, given = getattr(config, "distill", None), config.roles.reward.model_name_or_path
    if config.reward.has_model(config.roles, config.environment, is_needed=config.stage != "distill"):
        with about("roles.reward.model_name_or_path"):
            path = builders.parent_run(given, config.output_dir, "reward", "roles.reward.model_name_or_path (or "
                                                                           "reward.functions instead of a model)")
            check_folder(builders.model_folder(path), ("weights",), config.model.trust_pickled_weights)
    if distils is not None and getattr(distils, "coef", 1) > 0:
        check(config.roles.teacher.model_name_or_path is not None,
              "no teacher: give roles.teacher.model_name_or_path (a model or run with the student's tokenizer)")


def check_columns(config: object, row: Mapping) -> None:
    """UserError for a built-in reward function that needs a column which the data does not have. row: of the data."""
    if hasattr(config, "environment"):  # who samples
        with about("reward.functions"):
            reward_sources.check_columns(_builtin_functions(config.reward), row)


def _builtin_functions(sources: object) -> list[FunctionSource]:
    given = [name for name in getattr(sources, "function_list", []) if name.startswith("builtin:")]
    own = {name.partition(":")[2] for name in given}
    return open_functions(given, {k: v for k, v in sources.options.items() if k in own} if given else {}, 60.0)


def _check_functions(sources: object) -> None:
    """Built-in functions with their options; of files only that they are there."""
    _builtin_functions(sources)
    for text in getattr(sources, "function_list", []):
        path, _, name = text.rpartition(":")
        check(bool(path and name), f"reward.functions: {text!r} names no function; give path.py:name, or builtin:name")
        check(not path.endswith(".py") or Path(path).is_file(), f"reward.functions: {path} does not exist; give a file "
                                                                "that does")
