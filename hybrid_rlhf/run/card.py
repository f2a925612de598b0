"""The model card: README.md of a model folder, written from run.json, in the form that the Hugging Face hub reads."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from hybrid_rlhf.run.runfile import RunRecord

CARD = "README.md"
_SHOWN = ("learning_rate", "max_steps", "num_train_epochs", "per_device_train_batch_size",
          "gradient_accumulation_steps", "optim", "lr_scheduler_type")


def write_card(folder: str | Path, record: RunRecord, parts: tuple[RunRecord, ...] = ()) -> Path:
    """Write the card of the model in `folder`, which `record` made; parts: the runs that it stands on, oldest first."""
    path = Path(folder) / CARD
    path.write_text(card_text(record, parts), encoding="utf-8")
    return path


def card_text(record: RunRecord, parts: tuple[RunRecord, ...] = ()) -> str:
    """The card: front matter for machines, then what it is, data, results, and how it was made."""
    base = _base(parts[0] if parts else record)
    head = {"library_name": "transformers", "tags": ["hybrid_rlhf", record.stage],
            "pipeline_tag": "text-classification" if record.stage == "reward" else "text-generation"}
    licence = base_licence(base)
    head |= {"license": licence} if licence else {}
    head |= {"base_model": base} if base and not _is_path(base) else {}
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", "",
             f"# {_title(record)}", "",
             f"A {'reward model' if record.stage == 'reward' else 'language model'} trained by hybrid_rlhf, stage "
             f"`{record.stage}`{f', from `{_shown(base)}`' if base else ', from random weights'}."]
    lines += ["", "Licence: " + (f"`{licence}`, the base model's." if licence else
                                 "the base model's and the data's; neither was found beside them, so look before you "
                                 "share this.")]
    for run in (*parts, record):
        lines += ["", f"## Stage {run.stage}", "", *_data(run), *_settings(run), *_results(run)]
    lines += ["", "## Made by", "", f"`{record.command}`", "",
              ", ".join(f"{name} {number}" for name, number in sorted(record.versions.items())), ""]
    return "\n".join(lines)


def base_licence(base: str | None) -> str | None:
    """The licence that a local base model's own card names, or None."""
    if not base or not (Path(base).expanduser() / CARD).is_file():
        return None
    text = (Path(base).expanduser() / CARD).read_text(encoding="utf-8", errors="replace")
    found = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    try:
        head = yaml.safe_load(found.group(1)) if found else {}
    except yaml.YAMLError:
        return None
    licence = head.get("license") if isinstance(head, dict) else None
    return licence if isinstance(licence, str) else None


def _title(record: RunRecord) -> str:
    return f"{Path(record.output_dir).resolve().name} ({record.stage})"


def _base(record: RunRecord) -> str | None:
    return record.facts.get("base_model") or (record.config.get("model") or {}).get("model_name_or_path")


def _is_path(name: str) -> bool:
    return Path(name).expanduser().exists() or name.startswith((".", "/", "~")) or name.count("/") != 1


def _shown(base: str) -> str:
    """A hub id whole; of a folder its last part: where it lay on the maker's disk is nobody's business."""
    return Path(base).name if _is_path(base) else base


def _data(record: RunRecord) -> list[str]:
    sources = (record.config.get("data") or {}).get("sources") or []
    counts = record.facts.get("data") or {}
    lines = [f"- data: `{_shown(str(source.get('path')))}`" for source in sources]
    if counts:
        lines.append("- rows: " + ", ".join(f"{name} {number}" for name, number in counts.items()
                                            if isinstance(number, (int, float))))
    return lines


def _settings(record: RunRecord) -> list[str]:
    train = record.config.get("train") or {}
    shown = [f"{name} {train[name]}" for name in _SHOWN if name in train]
    lora = (record.config.get("model") or {}).get("lora") or {}
    shown += [f"LoRA r {lora['r']}"] if lora.get("r") else ["all weights"]
    return ["- settings: " + ", ".join([*shown, f"seed {record.config.get('seed')}"])]


def _results(record: RunRecord) -> list[str]:
    """The metrics that say how good the model is; times and memory are the machine's."""
    kept = {k: v for k, v in record.metrics.items()
            if isinstance(v, (int, float)) and not k.startswith(("time/", "memory/", "engine/"))}
    if not kept:
        return []
    rows = [f"| {name} | {value:.4g} |" for name, value in sorted(kept.items())]
    return ["", "| metric | at the end |", "|---|---|", *rows]
