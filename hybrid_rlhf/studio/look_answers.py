"""What the page asks before a run is started, answered from what the launcher itself would do: the options of a stage,
whether it takes some settings, and what --preview and --plan find.

For the process that answers (look_process.py): torch is imported here. Nothing that settings name is run: neither
reward functions nor environments, which the launcher's own --preview does not run either, nor code of models.
"""

from __future__ import annotations

import importlib
import io
import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, redirect_stderr
from functools import cache
from pathlib import Path

from hybrid_rlhf import cli
from hybrid_rlhf.commands.init import GOALS, found_card
from hybrid_rlhf.core.config import UserError, check, nearest
from hybrid_rlhf.core.text_safety import error_line, escape_control
from hybrid_rlhf.data.chat import SkipRow
from hybrid_rlhf.data.preview import counts, dropped
from hybrid_rlhf.data.schema import KINDS, format_of, read_row
from hybrid_rlhf.data.source import Source
from hybrid_rlhf.data.sources import first_rows
from hybrid_rlhf.studio.option_help import options_of
from hybrid_rlhf.studio.plain_settings import plain_settings
from hybrid_rlhf.studio.plan_answer import plan_answer
from hybrid_rlhf.studio.settings_text import check_names, settings_text, with_card
from hybrid_rlhf.studio.start_checks import about, check_columns, check_start
from hybrid_rlhf.training.registry import STAGES

MAX_ROW, MAX_PART, MAX_COLUMNS = 2000, 20_000, 100  # characters of a row, and of a part of an example; columns
_parsing = threading.Lock()  # the parser keeps state of its own


class OptionError(UserError):
    """A UserError that says which option is meant."""

    option: str | None = None


def options(asked: dict) -> dict:
    return options_of(_stage(asked))


def card(_asked: dict) -> dict:
    return {"card": found_card()}


def settings(asked: dict) -> dict:
    """The file of these settings, what the launcher makes of it, or why it would refuse it."""
    stage, chosen = _stage(asked), asked.get("card")
    given = _given(asked)
    answer: dict = {"yaml": "", "settings": dict(given), "given": given, "error": None}
    try:
        with about("output_dir"):
            check(not asked.get("run_error"), str(asked.get("run_error")))
        check_names(given)
        defaults = _defaults(stage)
        answer["settings"] = defaults | given
        answer["yaml"] = settings_text(stage, given, defaults, chosen)
        config = _read(stage, given)
        answer["settings"] = plain_settings(config)
        _check_kept(given, answer["settings"])
        check_start(config)
    except UserError as error:
        answer["error"] = {"option": getattr(error, "option", None) or _option_in(str(error), answer["settings"]),
                           "text": _line(error)}
    return answer


def data(asked: dict) -> dict:
    """Whether data can serve a stage, by its columns and first rows."""
    stage, path = _stage(asked), str(asked.get("path") or "")
    answer: dict = {"rows": None, "format": None, "columns": [], "fits": False, "why": "", "first": []}
    try:
        check(bool(path.strip()) and "\0" not in path, "give a file, a folder or a hub id")
        columns = asked.get("columns") or {}
        check(isinstance(columns, dict), "columns must be a mapping of names, such as {prompt: question}")
        more = {key: str(asked[key]) for key in ("name", "split") if asked.get(key)}
        rows, answer["rows"] = first_rows(Source(path, columns={str(k): str(v) for k, v in columns.items()}, **more))
        answer["columns"] = [escape_control(str(name))[:100] for name in rows[0]][:MAX_COLUMNS]
        answer["first"] = [_cut(escape_control(json.dumps(row, ensure_ascii=False, default=str)), MAX_ROW)
                           for row in rows]
        answer["why"], answer["format"] = _fit(stage, rows, path, answer)
        answer["fits"] = True
    except UserError as error:
        answer["why"] = _line(error)
    return answer


def _fit(stage: str, rows: list[dict], path: str, answer: dict) -> tuple[str, str]:
    """(why rows serve a stage, their format). UserError where they do not."""
    form = format_of(rows, path)
    answer["format"] = form.name
    needs = GOALS["ppo"].needs if stage == "all" else (STAGES[stage].reads.kind,)
    lacks = [need for need in needs if need not in KINDS[form.kind]]
    check(not lacks, f"{path} has {form.name} rows, which make no {' and no '.join(lacks)}; --stage {stage} needs "
                     f"{', '.join(needs)} rows")
    skipped = []
    for number, row in enumerate(rows, 1):
        try:
            read_row(row, form, f"{path} row {number}")
        except SkipRow as reason:
            skipped.append(f"row {number} would be dropped ({escape_control(str(reason))})")
    return "; ".join([f"{form.name} rows, as --stage {stage} reads them", *skipped]), form.name


def preview(asked: dict) -> dict:
    """What --preview prints, as data; and a column that a built-in reward function would miss."""
    config = _to_look_at(asked)
    found = list(importlib.import_module(STAGES[config.stage].module).previews(config))

    def named(stage: str, name: str) -> str:
        return f"{stage}: {name}" if len(found) > 1 else name

    check_columns(config, found[0].data.train[0])
    return {"counts": [{"name": named(each.stage, name), "rows": number}
                       for each in found for name, number in counts(each.data.report)],
            "dropped": [{"why": named(each.stage, why), "rows": number}
                        for each in found for why, number in dropped(each.data.report)],
            "examples": [{"title": row.title, "parts": [{"text": _cut(piece.text, MAX_PART),
                                                         "is_trained": piece.is_trained} for piece in row.pieces]}
                         for each in found for row in each.rows]}


def plan(asked: dict) -> dict:
    """What --plan prints, as data."""
    memory = asked.get("memory")
    check(memory is None or (isinstance(memory, (int, float)) and 2**20 <= memory < 2**60),
          "memory is no number of bytes; give one of 1 MiB at least, or null")
    return plan_answer(_to_look_at(asked), None if memory is None else int(memory), asked.get("card"))


QUESTIONS: dict[str, Callable[[dict], dict]] = {
    "options": options, "card": card, "settings": settings, "data": data, "preview": preview, "plan": plan}

TELLING = ("preview", "plan")  # one at a time: what they print is kept


def answer(kind: str, asked: dict) -> dict:
    """What QUESTIONS[kind] answers, with the lines that the launcher would have printed beside it ("notes")."""
    said = io.StringIO()
    try:
        with redirect_stderr(said) if kind in TELLING else nullcontext():
            found = QUESTIONS[kind](asked)
    except UserError as error:
        told = OptionError(_line(error))
        told.option = _option_in(str(error), _names(asked))
        raise told from error
    notes = [escape_control(line) for line in said.getvalue().splitlines() if line.strip()]
    return {**found, **({"notes": notes} if notes else {})}


def _stage(asked: Mapping) -> str:
    stage = asked.get("stage")
    check(isinstance(stage, str) and stage in STAGES,
          f"there is no stage {str(stage)[:60]!r}{nearest(str(stage)[:60], STAGES)}; there are {', '.join(STAGES)}")
    return str(stage)


def _given(asked: Mapping) -> dict[str, object]:
    """The settings that were asked about, with the folder of the run and those of the card."""
    found, folder, chosen = asked.get("settings") or {}, asked.get("output_dir"), asked.get("card")
    check(isinstance(found, dict), "settings must be a mapping of options")
    check(chosen is None or isinstance(chosen, str), "card must be a name")
    sources = found.get("data.sources")
    if isinstance(sources, (str, dict)) and sources:  # one of them
        found = found | {"data.sources": [sources]}
    return with_card(({"output_dir": folder} if folder else {}) | found, chosen)


def _to_look_at(asked: Mapping) -> object:
    """The settings, for what goes further than to read them."""
    given = _given(asked)
    check_names(given)
    config = _read(_stage(asked), given)
    check(not config.model.trust_remote_code,  # type: ignore[attr-defined]  # every stage has it
          "model.trust_remote_code: a look runs no code that a model brings; the command line does: --preview, --plan")
    return config


def _read(stage: str, given: Mapping[str, object]) -> object:
    """The settings as the launcher reads them from a file."""
    with tempfile.TemporaryDirectory() as folder, _parsing:
        path = Path(folder, "settings.yaml")
        path.write_text(settings_text(stage, given, {}), encoding="utf-8")
        try:
            return cli.read_settings(stage, ["--config", str(path)] if given else [])[0]
        except UserError as error:
            text = str(error).replace(f"--config {path}: ", "").replace(f"--config {path}", "the settings")
            raise UserError(text) from error


@cache
def _defaults(stage: str) -> dict[str, object]:
    return plain_settings(_read(stage, {}))


def _names(asked: Mapping) -> set[str]:
    """The options that a message may be about."""
    stage, given = asked.get("stage"), asked.get("settings")
    known = _defaults(stage) if isinstance(stage, str) and stage in STAGES else ()
    return {*known, *(given if isinstance(given, dict) else ())}


def _check_kept(given: Mapping[str, object], found: Mapping[str, object]) -> None:
    """UserError for text that the launcher would read as nothing: YAML of it is null, such as '#a' and '~'."""
    for name, value in given.items():
        is_lost = isinstance(value, str) and found.get(name, value) is None
        check(not is_lost or str(value).lower() in ("none", "null"),
              f"{name}: {value!r:.60} would be read as null; write it otherwise, such as ./ before a path")


def _option_in(text: str, known: Iterable[str]) -> str | None:
    """The option that a message is about: the first that it names, in full or by its last parts."""
    names = {*known}
    for found in re.finditer(r"[a-z_]\w*(?:\.[a-z_]\w*)+|^[a-z_]\w*|(?<=option )[a-z_]\w*", text):
        word = found[0]
        full = [name for name in sorted(names) if name == word or name.endswith(f".{word}")]
        if full and ("." in word or word in names):
            return word if word in names else full[0]
    return None


def _line(error: BaseException) -> str:
    return error_line(error).removeprefix("error: ")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most:,} more characters)"
