"""Write the model card, README.md of a model folder, from run.json, in the Hugging Face hub's format."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from hybrid_rlhf.core.own_files import write_file

CARD = "README.md"
_SHOWN = ("learning_rate", "max_steps", "num_train_epochs", "per_device_train_batch_size",
          "gradient_accumulation_steps", "optim", "lr_scheduler_type")


def write_card(folder: str | Path, name: str, run: dict) -> Path:
    """Write the card of the model in `folder`, made by the run `name`. run: the contents of its run.json."""
    path = Path(folder) / CARD
    write_file(path, card_text(name, run))
    return path


def card_text(name: str, run: dict) -> str:
    """The card: YAML front matter, then a description, data, results, and the command."""
    base, stage = _root(run), run["stage"]
    name = f"{_shown(base)}-{name}" if base else name
    head = {"library_name": "transformers", "tags": ["hybrid_rlhf", stage],
            "pipeline_tag": "text-classification" if stage == "reward" else "text-generation", "model_name": name}
    licence = base_licence(base)
    head |= {"license": licence} if licence else {}
    head |= {"base_model": base} if base and not _is_path(base) else {}
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", "", f"# {name}", "",
             f"A {'reward model' if stage == 'reward' else 'language model'} trained by hybrid_rlhf, stage `{stage}`"
             f"{f', from `{_shown(base)}`{_by_way_of(run, base)}' if base else ', from random weights'}."]
    if "model_step" in run["facts"]:
        lines += ["", f"The run {run['status']} early: this is its model after step {run['facts']['model_step']} of "
                      f"{run['facts'].get('num_steps')}."]
    lines += ["", "Licence: " + (f"`{licence}`, the base model's." if licence else
                                 "the base model's and the data's; neither was found beside them, so look before you "
                                 "share this.")]
    lines += ["", *_data(run), *_settings(run), *_results(run), "", "## Made by", "", f"`{run.get('command', '')}`", "",
              ", ".join(f"{package} {number}" for package, number in sorted(run.get("versions", {}).items())), ""]
    return "\n".join(lines)


def base_licence(base: str | None) -> str | None:
    """The licence in a local base model's own card, or None."""
    if not base or not (Path(base) / CARD).is_file():
        return None
    text = (Path(base) / CARD).read_text(encoding="utf-8", errors="replace")
    front_matter = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    try:
        head = yaml.safe_load(front_matter.group(1)) if front_matter else {}
    except yaml.YAMLError:
        return None
    licence = head.get("license") if isinstance(head, dict) else None
    return licence if isinstance(licence, str) else None


def _base(run: dict) -> str | None:
    return run["facts"].get("base_model") or (run["config"].get("model") or {}).get("model_name_or_path")


def _root(run: dict) -> str | None:
    """The model that the first of a chain of runs started from."""
    base, seen = _base(run), set()
    while base and base not in seen and (path := Path(base) / "run.json").is_file():
        seen.add(base)
        try:
            base = _base(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, LookupError, TypeError):  # a damaged record
            break
    return base


def _by_way_of(run: dict, root: str) -> str:
    return "" if (base := _base(run)) in (root, None) else f" by way of the run `{_shown(base)}`"


def _is_path(name: str) -> bool:
    return Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") != 1


def _shown(base: str) -> str:
    """A hub id, or the last part of a folder's path: the rest of it is private."""
    return Path(base).name if _is_path(base) else base


def _data(run: dict) -> list[str]:
    sources = (run["config"].get("data") or {}).get("sources") or []
    counts = run["facts"].get("data") or {}
    lines = [f"- data: `{_shown(str(source.get('path')))}`" for source in sources]
    if counts:
        lines.append("- rows: " + ", ".join(f"{name} {number}" for name, number in counts.items()
                                            if isinstance(number, (int, float)) and number))
    return lines


def _settings(run: dict) -> list[str]:
    train = run["config"].get("train") or {}
    shown = [f"{name} {train[name]}" for name in _SHOWN if train.get(name) is not None]
    roles = run["config"].get("roles") or {}
    shown += [f"{role} learning_rate {rate}" for role in ("actor", "critic")
              if (rate := (roles.get(role) or {}).get("learning_rate")) is not None]
    lora = (run["config"].get("model") or {}).get("lora") or {}
    shown += [f"LoRA r {lora['r']}"] if lora.get("r") else ["all weights"]
    return ["- settings: " + ", ".join([*shown, f"seed {run['config'].get('seed')}"])]


def _results(run: dict) -> list[str]:
    """A table of the metrics of the model's quality, without times and memory, which depend on the machine."""
    kept = {k: v for k, v in run["metrics"].items()
            if isinstance(v, (int, float)) and not k.startswith(("time/", "memory/", "engine/"))}
    if not kept:
        return []
    rows = [f"| {name} | {value:.4g} |" for name, value in sorted(kept.items())]
    return ["", "| metric | at the end |", "|---|---|", *rows]
