"""Messages about a run whose model is missing, or of before; those of a chat that learns from marks (chat --learn)."""

from __future__ import annotations

from pathlib import Path

STAGE = "chat"  # of run.json


def cure(stage: str, config: dict, folder: str | Path, what: str = "/save") -> str:
    """What to do where the model of a run in `folder` is needed; what: the lines to write in a chat."""
    if stage != STAGE:
        return f"run --stage {stage} --output_dir {folder} first"
    return f"hybrid-rlhf chat --model {config['model']['model_name_or_path']} --learn {folder}, then {what}"


def model_of(stage: str, facts: dict, config: dict, folder: str | Path) -> str:
    """The step or marks that the model of a run which ended early is of."""
    step, last = facts["model_step"], facts.get("num_steps") or 0
    if stage != STAGE:
        return f"step {step} of {last}"
    change, what = "taken back" if last < step else "learnt", "/save" if last else "a mark and /save"
    return f"mark {step}, and marks were {change} since: {cure(stage, config, folder, what)}, renews it"
