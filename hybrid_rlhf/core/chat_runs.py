"""What is said of the run of a chat that learns from marks (chat --learn), where its model is missing or of before."""

from __future__ import annotations

from pathlib import Path

STAGE = "chat"  # of run.json


def leaves_model(config: dict, folder: str | Path) -> str:
    """How the run of these settings in `folder` leaves a model of all its marks."""
    return f"hybrid-rlhf chat --model {config['model']['model_name_or_path']} --learn {folder}, then /save"


def changed_since(saved: int, marks: int, config: dict, folder: str | Path) -> str:
    """Which model it has, as words after "its model is that of"."""
    change = "taken back" if marks < saved else "learnt"
    return f"mark {saved}, and marks were {change} since: {leaves_model(config, folder)}, renews it"
