"""Answers to the page before a run starts: options of a stage, validation of settings, --preview and --plan, as by the
launcher itself.

Runs in the child processes of preflight.py, since it imports torch. No code named in settings is run: neither
reward functions nor environments, which the launcher's --preview does not run either, nor code of models.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import re
import tempfile
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hybrid_rlhf import cli
from hybrid_rlhf.commands.init import GOALS, found_card
from hybrid_rlhf.core.config import Option, UserError, check, nearest
from hybrid_rlhf.core.config import options_of as options_of_class
from hybrid_rlhf.core.distributed import device
from hybrid_rlhf.core.errors import escape_control
from hybrid_rlhf.core.options import kinds_of, value_of
from hybrid_rlhf.data.chat import SkipRow
from hybrid_rlhf.data.preview import counts, dropped
from hybrid_rlhf.data.row_images import MISSING, is_missing
from hybrid_rlhf.data.schema import KINDS, format_of, read_row
from hybrid_rlhf.data.sources import Source, check_there, first_rows, folder_of
from hybrid_rlhf.memory_plan.amounts import Cards
from hybrid_rlhf.memory_plan.plan import Plan
from hybrid_rlhf.memory_plan.presets import card as card_of
from hybrid_rlhf.memory_plan.table import verdict
from hybrid_rlhf.models.folder_files import is_local
from hybrid_rlhf.models.load import ModelConfig, check_folder
from hybrid_rlhf.rewards.builtin import BUILTINS
from hybrid_rlhf.rewards.functions import FunctionSource, open_functions, split
from hybrid_rlhf.studio import reward_code
from hybrid_rlhf.studio.run_history import pictures
from hybrid_rlhf.studio.settings_text import check_names, common_options, settings_text, with_card
from hybrid_rlhf.studio.studio import line_of
from hybrid_rlhf.training import (
    all_stages,
    builders,
    defaults,
    memory_options,
    on_policy,
    reward_sources,
    unread_options,
)
from hybrid_rlhf.training.memory_options import Place, look_ahead
from hybrid_rlhf.training.registry import STAGES, Rate, by_table, variant_options

MAX_ROW, MAX_PART, MAX_COLUMNS = 2000, 20_000, 100  # characters of a row, of a part of an example; columns
_KINDS = {bool: "bool", int: "int", float: "float", str: "text", list: "list", dict: "json"}
LEFT_OUT = ("stage", "output_dir")  # set by the goal and the run's name


def answer(kind: str, asked: dict) -> dict:
    """The answer of QUESTIONS[kind]. Raises UserError for a mistake in the question; its `option` is the one that the
    mistake is in, beside whose field the page shows it."""
    try:
        return QUESTIONS[kind](asked)
    except UserError as error:
        error.option = _option_of(error, _names(asked))
        raise


def options_of(stage: str) -> dict:
    """{"options": [...], "help"} of a stage; KeyError for an unknown one."""
    row, common = STAGES[stage], common_options(stage)
    config_class = importlib.import_module(row.module).Config
    defaults, _ = cli.read_settings(stage, [])
    fixed = {*LEFT_OUT, *variant_options(stage)}
    options = [_option(stage, option, value_of(defaults, option.name), option.name in common)
               for option in options_of_class(config_class, unread_options.of_stage(stage)) if option.name not in fixed]
    order = {name: i for i, name in enumerate(common)}
    return {"help": row.help, "options": sorted(options, key=lambda o: order.get(o["name"], len(order)))}


def _option(stage: str, option: Option, default: object, is_common: bool) -> dict:
    return {"name": option.name, "section": option.name.rpartition(".")[0],
            "kind": "choice" if option.choices else _kind(option.kind), "choices": list(option.choices),
            "default": plain(default), "null": type(None) in typing.get_args(option.kind), "help": option.text,
            "by_table": by_table(stage, option.name), "is_common": is_common}


def _kind(kind: Any) -> str:
    """The name of a type; in a union a list comes before text, and text before a mapping."""
    members = [typing.get_origin(k) or k for k in kinds_of(kind)]
    if dict in members and list in members:  # data.sources
        return "json"
    return next(_KINDS[k] for k in (list, str, dict, float, int, bool) if k in members)


def settings(asked: dict) -> dict:
    """The YAML of these settings, the resolved settings, and the launcher's error if it would refuse them."""
    stage, card, chosen = _stage(asked), asked.get("card"), _chosen(asked)
    result: dict = {"yaml": "", "settings": dict(chosen), "given": chosen, "error": None, "left_empty": {}}
    try:
        with about("output_dir"):
            check(not asked.get("run_error"), str(asked.get("run_error")))
        check_names(chosen)
        defaults = _defaults(stage)
        result["settings"] = defaults | chosen
        result["yaml"] = settings_text(stage, chosen, defaults, card)
        config = _read(stage, chosen)
        result["settings"] = plain_settings(config)
        check_start(config)
        result["left_empty"] = left_empty(config)
    except UserError as error:
        result["error"] = {"option": _option_of(error, result["settings"]), "text": line_of(error)}
    return result


def data(asked: dict) -> dict:
    """Whether data can serve a stage, by its columns and first rows."""
    stage, path = _stage(asked), str(asked.get("path") or "")
    result: dict = {"rows": None, "format": None, "columns": [], "fits": False, "why": "", "first": []}
    try:
        check(bool(path.strip()), "give a file, a folder or a hub id")
        more = {key: asked[key] for key in ("columns", "name", "split") if asked.get(key)}
        plain_rows, _ = first_rows(Source(path, **{key: more[key] for key in ("name", "split") if key in more}))
        result["first_row"] = {escape_control(str(name))[:100]: _cut(escape_control(str(value)), 300)
                               for name, value in [*plain_rows[0].items()][:MAX_COLUMNS]}
        rows, result["rows"] = first_rows(Source(path, **more))
        result["columns"] = [escape_control(str(name))[:100] for name in rows[0]][:MAX_COLUMNS]
        result["first"] = [_cut(escape_control(json.dumps(row, ensure_ascii=False, default=str)), MAX_ROW)
                           for row in rows]
        row_format = format_of(rows, path)
        result["format"] = row_format.name
        needs = GOALS["ppo"].needs if stage == "all" else (STAGES[stage].reads.kind,)
        lacks = [need for need in needs if need not in KINDS[row_format.kind]]
        check(not lacks, f"{path} has {row_format.name} rows, which make no {' and no '.join(lacks)}; --stage {stage} "
                         f"needs {', '.join(needs)} rows")
        skipped = []
        for number, row in enumerate(rows, 1):
            try:
                example = read_row(row, row_format, f"{path} row {number}")
                if any(is_missing(image, folder_of(Source(path, **more))) for image in example.images):
                    raise SkipRow(f"{MISSING}; give the path of the rows on this machine, beside which the images are, "
                                  "or rows that hold them: data URLs, parquet")
            except SkipRow as reason:
                skipped.append(f"row {number} would be dropped ({escape_control(str(reason))})")
        result["why"] = "; ".join([f"{row_format.name} rows, as --stage {stage} reads them", *skipped])
        result["fits"] = True
    except UserError as error:
        result["why"] = line_of(error)
    return result


def preview(asked: dict) -> dict:
    """The output of --preview, as data. UserError for a column that a built-in reward function would miss."""
    config = _to_look_at(asked)
    stages = list(importlib.import_module(STAGES[config.stage].module).previews(config))
    check_columns(config, stages[0].data.train[0])

    def label(stage: str, name: str) -> str:
        return f"{stage}: {name}" if len(stages) > 1 else name

    return {"counts": [{"name": label(look.stage, name), "rows": number}
                       for look in stages for name, number in counts(look.data.report)],
            "dropped": [{"why": label(look.stage, why), "rows": number}
                        for look in stages for why, number in dropped(look.data.report)],
            "examples": [{"title": row.title, "images": pictures(row.images), "parts": [
                             {"text": _cut(piece.text, MAX_PART), "is_trained": piece.is_trained}
                             for piece in row.pieces]} for look in stages for row in look.rows]}


# -- the plan of memory and time -------------------------------------------------------------------------------------


def plan(asked: dict) -> dict:
    """The output of --plan, as data. memory: bytes that the run may use (None: free memory). card: the name of a GPU,
    which need not be in this machine.

    With several stages phases are those of all stages, and the rest is of the stage with the highest peak."""
    config, memory, card = _to_look_at(asked), asked.get("memory"), asked.get("card")
    gib = card_of(card, "card").gib if card else None
    is_elsewhere = gib is not None and memory is None and device().type == "cpu"
    place = Place.of(Cards(1, 1, (gib or 0) << 30)) if is_elsewhere else Place.here(memory)
    config, plans, chosen = look_ahead(config, place)
    largest = max(plans, key=lambda plan: plan.peak)
    fits, changes = all(p.short <= 0 for p in plans), chosen.changes if chosen.fits else ()
    stages = [plan.title.partition(":")[0] for plan in plans]
    tightest = stages[plans.index(largest)]

    def label(stage: str, name: str) -> str:
        return f"{stage}: {name}" if len(plans) > 1 else name

    return {"fits": fits, "available": largest.available,
            "phases": [{"name": label(stage, phase), "bytes": plan.total(phase)}
                       for stage, plan in zip(stages, plans, strict=True) for phase in plan.phases],
            "lines": [{"name": f"{line.role}: {line.kind}", "bytes": line.phases[largest.peak_phase]}
                      for line in largest.lines if line.phases.get(largest.peak_phase)],
            "verdict": label(tightest, verdict(largest, chosen.flags if chosen.fits else ())),
            "changes": [] if fits else [{"option": change.option, "value": yaml.safe_load(change.chosen),
                                         "why": change.why} for change in changes],
            "plan_notes": [note for plan in plans for note in plan.notes],
            **_times(memory_options.timed_by_data(config, plans), stages, place)}


def _times(plans: list[Plan], stages: list[str], place: Place) -> dict:
    """Seconds of a step by phase, on the first device for which they can be predicted."""
    times, source, lengths = [], "", dict[str, None]()
    for stage, plan in zip(stages, plans, strict=True):
        rows, source = memory_options.predicted([("as given", plan)], place.device, place.card)
        if not rows:
            return {"times": [], "time_note": f"time is not predicted: {source}"}
        prediction, prefix = rows[0][1], f"{stage}: " if len(plans) > 1 else ""
        times += [{"name": f"{prefix}{phase}", "seconds": seconds} for phase, seconds in prediction.phases.items()]
        times += [{"name": f"{prefix}a step", "seconds": prediction.whole}]
        lengths[f"rows {prediction.lengths}"] = None
        times += [{"name": f"{prefix}the run of {prediction.steps} steps",
                   "seconds": prediction.whole * prediction.steps}] if prediction.steps else []
    left_out = memory_options.left_out(plans[0])
    note = "; ".join([f"predicted and not measured: {source}", *lengths,
                      *([f"not counted: {', '.join(left_out)}"] if left_out else [])])
    return {"times": times, "time_note": note}


# -- checks before data or weights are read --------------------------------------------------------------------------


@contextmanager
def about(option: str) -> Iterator[None]:
    """A UserError in the block is about this option."""
    try:
        yield
    except UserError as error:
        error.option = option
        raise


def check_start(config: object) -> None:
    """UserError for settings that the launcher would refuse at its start: missing options and paths. The hub is not
    accessed."""
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


def left_empty(config: object) -> dict[str, str]:
    """Option that is null -> its value in a run, as the run resolves it (training/defaults.py). The hub is not
    accessed, nor code of a model run: rates of such a model, whose size is not known, are said to be of a large one."""
    is_whole = hasattr(config, "run_stages")
    stages, values = all_stages.stage_configs(config) if is_whole else {config.stage: config}, {}
    for name, stage in stages.items():
        model = config.model if is_whole else defaults.start_of(stage)
        path = model.model_name_or_path
        is_here = (model.preset or path is None or is_local(path)) and not model.trust_remote_code
        before, row = plain_settings(stage), defaults.of_method(stage)
        after = plain_settings(defaults.resolve(stage, model if is_here else ModelConfig()))
        for option in (option for option, value in before.items() if value is None and after[option] is not None):
            is_larger = not is_here and isinstance(row.get(option), Rate)
            shown = option.replace("train.", f"stages.{name}.", 1) if is_whole else option
            values[shown] = f"{after[option]}" + " (more for a model below 200 million weights)" * is_larger
    return values


def _check_parents(config: object) -> None:
    """Check the reward model and the teacher of an online stage."""
    distill, reward = getattr(config, "distill", None), config.roles.reward.model_name_or_path
    if config.reward.has_model(config.roles, config.environment, is_needed=config.stage != "distill"):
        with about("roles.reward.model_name_or_path"):
            path = builders.parent_run(reward, config.output_dir, "reward", "roles.reward.model_name_or_path (or "
                                                                            "reward.functions instead of a model)")
            check_folder(builders.model_folder(path), ("weights",), config.model.trust_pickled_weights)
    if distill is not None and getattr(distill, "coef", 1) > 0:
        check(config.roles.teacher.model_name_or_path is not None,
              "no teacher: give roles.teacher.model_name_or_path (a model or run with the student's tokenizer)")


def check_columns(config: object, row: Mapping) -> None:
    """UserError for a built-in reward function that needs a column which the data does not have. row: of the data."""
    if hasattr(config, "environment"):  # online stages
        with about("reward.functions"):
            reward_sources.check_columns(_builtin_functions(config.reward), row)


def _builtin_functions(sources: object) -> list[FunctionSource]:
    functions = [name for name in getattr(sources, "function_list", []) if name.startswith("builtin:")]
    names = {name.partition(":")[2] for name in functions}
    options = {name: value for name, value in sources.options.items() if name in names} if functions else {}
    return open_functions(functions, options, 60.0)


def _check_functions(sources: object) -> None:
    """Check built-in functions with their options, and for other functions only that their files exist."""
    for text in getattr(sources, "function_list", []):
        split(text, "reward.functions", BUILTINS)
    _builtin_functions(sources)


# -- settings --------------------------------------------------------------------------------------------------------


def _stage(asked: Mapping) -> str:
    stage = asked.get("stage")
    check(stage in STAGES, f"there is no stage {stage!r}{nearest(str(stage), STAGES)}; there are {', '.join(STAGES)}")
    return str(stage)


def _chosen(asked: Mapping) -> dict[str, object]:
    """The settings of the question, with the run's folder and those of the GPU preset."""
    options, folder = asked.get("settings") or {}, asked.get("output_dir")
    sources = options.get("data.sources")
    if isinstance(sources, (str, dict)) and sources:  # a single source
        options = options | {"data.sources": [sources]}
    return with_card(({"output_dir": folder} if folder else {}) | options, asked.get("card"))


def _to_look_at(asked: Mapping) -> object:
    """The config, for a question that loads data or models."""
    options = _chosen(asked)
    check_names(options)
    config = _read(_stage(asked), options)
    check(not config.model.trust_remote_code,  # type: ignore[attr-defined]  # every stage has it
          "model.trust_remote_code: a look runs no code that a model brings; the command line does: --preview, --plan")
    return config


def _read(stage: str, options: Mapping[str, object]) -> object:
    """The config, parsed by the launcher from a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "settings.yaml")
        path.write_text(settings_text(stage, options, {}), encoding="utf-8")
        try:
            return cli.read_settings(stage, ["--config", str(path)] if options else [])[0]
        except UserError as error:
            text = str(error).replace(f"--config {path}: ", "").replace(f"--config {path}", "the settings")
            raise UserError(text) from error


@cache
def _defaults(stage: str) -> dict[str, object]:
    return plain_settings(_read(stage, {}))


def _names(asked: Mapping) -> set[str]:
    """The options that an error message may name."""
    stage = asked.get("stage")
    return {*(_defaults(str(stage)) if stage in STAGES else ()), *(asked.get("settings") or ())}


def _option_of(error: UserError, known: Iterable[str]) -> str | None:
    """The option that an error is `about`, or the first that its message names, in full or by its last parts."""
    if hasattr(error, "option"):
        return error.option
    names = {*known}
    for match in re.finditer(r"[a-z_]\w*(?:\.[a-z_]\w*)+|^[a-z_]\w*|(?<=option )[a-z_]\w*", str(error)):
        word = match[0]
        full = [name for name in sorted(names) if name == word or name.endswith(f".{word}")]
        if full and ("." in word or word in names):
            return word if word in names else full[0]
    return None


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most:,} more characters)"


# -- settings as JSON --------------------------------------------------------------------------------------------------


def plain_settings(config: object) -> dict[str, object]:
    """All options of nested settings, in order."""
    return dict(_leaves(config, ""))


def _leaves(config: object, prefix: str) -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(config):  # type: ignore[arg-type]  # a dataclass of settings
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", plain(value)


def plain(value: object) -> object:
    """A value as JSON. A source with only a path becomes that text; numbers that are not finite become text."""
    if isinstance(value, Source):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        chosen = {k: v for k, v in fields.items() if k == "path" or (v and (k, v) != ("split", "train"))}
        return value.path if list(chosen) == ["path"] else chosen
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


QUESTIONS: dict[str, Callable[[dict], dict]] = {
    "options": lambda asked: options_of(_stage(asked)), "card": lambda _asked: {"card": found_card()},
    "settings": settings, "data": data, "preview": preview, "plan": plan, "reward": reward_code.tried}
