"""What a request says of a new run, as a launcher's file of settings: all of it is data, and the launcher judges it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from pathlib import Path

import yaml

from hybrid_rlhf.studio.settings_text import block
from hybrid_rlhf.studio.studio import Refused, Studio
from hybrid_rlhf.studio.studio_files import read_bytes, read_json

EXPORTS = "exports"  # of the outputs: no runs
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
MAX_LEVELS = 4
RUN_FILE, SETTINGS_FILE = "run.json", "config.yaml"
_ASKED = ("data.sources", "data.max_prompt_length", "data.raw", "data.split")  # what an evaluation takes from a run
_SCORED, _MODEL = ("reward", "environment"), "roles.reward.model_name_or_path"


def run_folder(studio: Studio, run: object) -> Path:
    """Where a run of ours goes, by its id, whatever is there. Refused where the id is none."""
    parts = run.split("/") if isinstance(run, str) else []
    if not parts or len(parts) > MAX_LEVELS or not all(map(_PART.fullmatch, parts)):
        raise Refused(400, "a run's name has letters (a to z), digits, _, - and dots, begins with a letter, a digit or "
                           f"_, and may be in folders, such as demo/ppo (at most {MAX_LEVELS} levels)", "run")
    if parts[0].lower() == EXPORTS:
        raise Refused(400, f"{EXPORTS} is the folder of what is taken away; choose another name", "run")
    return studio.outputs.joinpath(*parts)


def new_folder(studio: Studio, run: object) -> Path:
    """Where a new run goes. Refused where something is there already, or in the way."""
    folder = run_folder(studio, run)
    for above in list(folder.relative_to(studio.outputs).parents)[:-1]:
        place = studio.outputs / above
        if (place / RUN_FILE).exists():
            raise Refused(409, f"{above} is a run, and no folder of runs; choose another name", "run")
        if os.path.lexists(place) and (place.is_symlink() or not place.is_dir()):
            raise Refused(409, f"{above} is no folder; choose another name", "run")
    if os.path.lexists(folder):
        raise Refused(409, f"there is a run or folder {run} already; choose another name, or resume it", "run")
    return folder


def settings_text(settings: object, output_dir: Path | None) -> str:
    """Dotted option -> value as YAML. output_dir: the run's, which the settings themselves may not move.

    Refused where they are no such mapping, or say two things of one option.
    """
    if not isinstance(settings, dict):
        raise Refused(400, "settings is no mapping of options")
    given = dict(settings)
    if output_dir is not None:
        named = given.pop("output_dir", None)
        if named is not None and not (isinstance(named, str) and Path(named).absolute() == output_dir):
            raise Refused(400, "the run's name says where it goes; leave output_dir out", "output_dir")
        given["output_dir"] = str(output_dir)
    nested: dict = {}
    sections = {id(nested)}
    for name, value in given.items():
        *above, last = name.split(".")
        place = nested
        for section in above:
            if section not in place:
                place[section] = {}
                sections.add(id(place[section]))
            place = place[section]
            if id(place) not in sections:
                raise Refused(400, f"the settings say two things of {name[:100]}; leave one out", name)
        if last in place:
            raise Refused(400, f"the settings say two things of {name[:100]}; leave one out", name)
        place[last] = value
    try:
        return block(nested).encode("ascii", "backslashreplace").decode()  # what is not ASCII stands in quotes
    except (RecursionError, yaml.YAMLError, ValueError) as error:
        raise Refused(400, "the settings are nested too deeply; write them flatter") from error


def own_settings(folder: Path) -> tuple[str, str]:
    """Of a run that is there: its stage, and the text of its config.yaml. Refused where they cannot be read."""
    stage = (read_json(folder / RUN_FILE) or {}).get("stage")
    text = read_bytes(folder / SETTINGS_FILE)
    if not isinstance(stage, str) or not text:
        raise Refused(409, f"{folder.name} has no readable {RUN_FILE} and {SETTINGS_FILE}; start it again as a new run")
    return stage, text.decode("utf-8", "replace")


def evaluation(studio: Studio, runs: object, given: object) -> dict:
    """The settings of an evaluation of `runs`: what is given, and where that names no prompts and no rewards, those of
    the first of the runs that was trained on rewards."""
    if not isinstance(runs, list) or not 2 <= len(runs) <= 8:
        raise Refused(400, "choose two to eight runs to evaluate", "runs")
    if not isinstance(given, dict):
        raise Refused(400, "settings is no mapping of options")
    folders = [studio.folder(run) for run in runs]
    if len(set(folders)) < len(folders):
        raise Refused(400, "one run is named twice; choose two that differ", "runs")
    models = [f"{run.replace('=', '_')}={folder}" for run, folder in zip(runs, folders, strict=True)]
    return {"evaluate.models": models, **_usual(folders, given), **given}


def _usual(folders: Sequence[Path], given: Mapping[str, object]) -> dict:
    """What the first run that was trained on rewards read, was scored by and could say; {} where there is none."""
    records = [read_json(folder / RUN_FILE) or {} for folder in folders]
    record = next((each for each in records if isinstance(_value(each, "config.reward"), dict)), {})
    config, found = record.get("config"), {}
    if not any(name.startswith(("data.", "evaluate.labels")) for name in given):
        found |= {name: value for name in _ASKED if (value := _value(config, name)) is not None}
        shares = [_value(each, "config.data.eval_fraction") for each in records]
        found |= {} if config is None else _held_out(config, shares)
    if not any(name.partition(".")[0] in (*_SCORED, "roles") for name in given):
        model = _value(config, _MODEL) or _value(record, "facts.reward_model")
        found |= {name: value for name in _SCORED if isinstance(value := _value(config, name), dict)}
        found |= {_MODEL: model} if isinstance(model, str) else {}
    sampling = next((each["sampling"] for each in (config or {}).values()
                     if isinstance(each, dict) and isinstance(each.get("sampling"), dict)), {})
    if isinstance(most := sampling.get("max_new_tokens"), int) and not any("sampling" in name for name in given):
        found["evaluate.sampling.max_new_tokens"] = most
    return found


def _held_out(config: object, fractions: list) -> dict:
    """The rows that no run was trained on: those of data.eval_sources, or of the smallest share that a run held out;
    where one held out none, all rows, which the evaluation then says."""
    if isinstance(sources := _value(config, "data.eval_sources"), list) and sources:
        return {"data.sources": sources, "evaluate.rows": "all"}
    least = min((each for each in fractions if isinstance(each, (int, float))), default=None)
    if least is None:
        return {}
    return {"data.eval_fraction": least} if least > 0 else {"evaluate.rows": "all"}


def _value(config: object, option: str) -> object:
    for name in option.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config


def free_name(studio: Studio, group: str, taken: Collection[str | None]) -> str:
    """group/1, or the next number that neither a folder nor one of the runs `taken` has."""
    return next(name for name in (f"{group}/{number}" for number in count(1))
                if name not in taken and not os.path.lexists(studio.outputs / name))
