"""Experiment trackers (tensorboard, wandb, trackio, ...) through accelerate. Main process only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from hybrid_rlhf.core.config import check, nearest
from hybrid_rlhf.core.distributed import is_main


def check_trackers(names: Sequence[str]) -> None:
    """UserError for an unknown tracker, or one whose package is not installed."""
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = {str(t) for t in get_available_trackers()}
    for name in names:
        check(name in LOGGER_TYPE_TO_CLASS, f"report_to is {name!r}; choose from {', '.join(LOGGER_TYPE_TO_CLASS)}"
                                            f"{nearest(name, LOGGER_TYPE_TO_CLASS)}")
        check(name in installed, f"report_to {name}: its package is not installed; install it, or choose from "
                                 f"{', '.join(sorted(installed)) or 'nothing (none is installed)'}")


# Trackers whose runs have a name beside their project's -> the argument that gives it.
_NAMED = {"wandb": "name", "trackio": "name", "mlflow": "run_name", "swanlab": "experiment_name"}


def start_trackers(names: Sequence[str], stage: str, folder: str | Path, settings: dict) -> list:
    """Start trackers, which have log(values, step=) and finish(); those that write files do so under `folder`. The
    run's name is settings["run_name"], by default the stage."""
    check_trackers(names)
    if not names:
        return []
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState(cpu=not torch.cuda.is_available())  # accelerate's logging requires one
    if not is_main():
        return []

    started, run_name = [], settings.get("run_name")
    for name in dict.fromkeys(names):
        kind = LOGGER_TYPE_TO_CLASS[name]
        options = {"logging_dir": str(folder)} if kind.requires_logging_directory else {}
        if run_name and name in _NAMED:
            tracker = kind(stage, **options, **{_NAMED[name]: run_name})
        else:
            tracker = kind(run_name or stage, **options)
        tracker.start()
        tracker.store_init_configuration(_flat(settings))
        started.append(tracker)
    return started


def _flat(settings: dict, prefix: str = "") -> dict[str, bool | int | float | str]:
    """Nested settings under dotted names; lists and None as text, as some trackers take plain values only."""
    flat: dict = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return flat
