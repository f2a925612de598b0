"""The one way a command line becomes frozen dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from hybrid_rlhf.core import jsonargparse_compat
from hybrid_rlhf.core.errors import UserError, check, nearest
from hybrid_rlhf.core.given_paths import check_file, expanded, with_homes
from hybrid_rlhf.core.options import (
    WORDS,
    SettingsT,
    free_mappings,
    is_text,
    may_be_null,
    misfit,
    nulls_in,
    type_of,
    value_of,
    with_value,
)

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


def command_flags(name: str, description: str) -> argparse.ArgumentParser:
    """The flags of the command `hybrid-rlhf NAME`. What argparse refuses is a UserError that begins with the name."""
    flags = argparse.ArgumentParser(f"hybrid-rlhf {name}", description=description.splitlines()[0], allow_abbrev=False)

    def refuse(message: str) -> NoReturn:
        raise UserError(f"{name}: {message}")

    flags.error = refuse  # type: ignore[method-assign]  # argparse's own prints the usage and exits
    return flags


def parse_command(flags: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The options of such a command; UserError, with the nearest flag, for one that there is not."""
    options, unknown = flags.parse_known_args(argv)
    if unknown:
        close = nearest(unknown[0].split("=")[0], re.findall(r"--\w+", flags.format_usage()))
        raise UserError(f"{flags.prog.split()[-1]}: unknown argument {unknown[0]}{close}; --help lists them")
    return options


def parse(config_class: type, argv: list[str], *, prog: str, description: str = "",
          default_config: str | None = None, extra: Iterable[str] = (), unused: Mapping[str, str] = MappingProxyType({})
          ) -> tuple[object, dict]:
    """Command line -> (a frozen `config_class`, {flag: its value}).

    Later wins: the class's defaults, `default_config` (a YAML file), `--config FILE` and dotted overrides in the order
    of the command line. `extra` names flags of the entry point's own: switches (bool) and those of _VALUES (text, None
    if not given). unused: options or sections that this stage never reads -> what is meant instead; they are not in the
    help, and an error where they are given. none stands for null wherever null may stand, and ~ for the home folder in
    what names files and folders.

    Raises UserError, in one line and with the nearest name, for unknown keys, wrong types and values that a part's own
    check refuses.
    """
    parser = _parser(config_class, prog, description, default_config, tuple(extra), tuple(unused))
    known = jsonargparse_compat.option_names(parser)
    _check_shapes(config_class, argv, extra, lambda name: _unknown(name, known, unused, prog))
    try:
        values = parser.parse_args(_with_nulls(config_class, _emptied_first(argv)))
        parts = dict(vars(parser.instantiate(values)))
    except UserError:
        raise
    except RecursionError as error:
        raise UserError(_TOO_DEEP) from error
    except (ArgumentError, OSError, ValueError, TypeError) as error:
        raise UserError(_one_line(error, known, unused, prog)) from error
    parts.pop("config", None)
    config = config_class(**{k: v for k, v in parts.items() if k not in extra})
    return with_homes(_with_texts(config, argv)), {k: parts[k] for k in extra}


def _with_texts(config: SettingsT, argv: list[str]) -> SettingsT:
    """Text in mappings of anything (dict[str, object]) as the files have it: the parser reads it as YAML once more, and
    "yes" would be true, "####" null. What the command line says of such a mapping stays as it was read."""
    for option in free_mappings(type(config)):
        texts: dict[str, str] = {}
        for word, after in zip(argv, [*argv, ""][1:], strict=True):
            key, has_value, value = word.partition("=")
            if key == "--config" and (value := value if has_value else after):
                inner: Any = _read_yaml(value)
                for name in option.split("."):
                    inner = (inner or {}).get(name)
                texts |= {k: v for k, v in (inner or {}).items() if isinstance(v, str)}
            elif key == f"--{option}" or key.startswith(f"--{option}."):
                texts = {}
        found: Any = value_of(config, option)
        kept = {name: text for name, text in texts.items() if not isinstance(found.get(name, text), str)}
        config = with_value(config, option, found | kept) if kept else config
    return config


def help_of_options(config_class: type, unused: Iterable[str] = ()) -> dict[str, str]:
    """Dotted option -> what its help says, in the order of --help; sections are left out. unused: as in `parse`."""
    parser = _parser(config_class, "", "", None, (), tuple(unused))
    return {name: text for name, text in jsonargparse_compat.texts(parser).items()
            if (kind := type_of(config_class, name)) is not None and not dataclasses.is_dataclass(kind)}


@cache
def _parser(config_class: type, prog: str, description: str, default_config: str | None,
            extra: tuple[str, ...], unused: tuple[str, ...]) -> ArgumentParser:
    """Made once: a program that starts several runs, or the studio, parses often, and most of that is this."""
    from jsonargparse import ActionConfigFile, ArgumentParser

    parser = ArgumentParser(prog=prog, description=description, exit_on_error=False, allow_abbrev=False,
                            default_config_files=[default_config] if default_config else [])
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of the options below.")
    for name in extra:
        if name in _VALUES:
            parser.add_argument(f"--{name}", type=str, default=None, help=_VALUES[name])
        else:
            parser.add_argument(f"--{name}", action="store_true", help=_SWITCHES.get(name, ""))
    parser.add_class_arguments(config_class)
    jsonargparse_compat.hide(parser, lambda name: _is_below(name, unused))
    return parser


def _is_below(name: str, options: Iterable[str]) -> bool:
    return any(name == option or name.startswith(f"{option}.") for option in options)


def _with_nulls(config_class: type, argv: list[str]) -> list[str]:
    """argv, and the files that it names, with null for every none that stands where null may stand."""
    out = []
    for word, before in zip(argv, ["", *argv], strict=False):
        key, has_value, value = word.partition("=")
        if not (word.startswith("--") and has_value):
            key, value = before, word
        if key == "--config" and value != key and (has_value or before == "--config"):
            settings = _read_yaml(value)
            changed = nulls_in(config_class, settings)
            value = expanded(value) if changed == settings else json.dumps(changed, default=str)
        elif value.lower() == "none" and may_be_null(config_class, key.removeprefix("--")):
            value = "null"
        out.append(f"{key}={value}" if word.startswith("--") and has_value else value)
    return out


def _check_shapes(config_class: type, argv: list[str], extra: Iterable[str], unknown: Callable[[str], str]) -> None:
    """UserError for settings that have not the shape of their options, before the parser sees them: it takes a mapping
    with class_path, and a text where a section stands, for the name of a class to import or of another file.

    unknown: the message for an option that there is not.
    """
    for word, after in zip(argv, [*argv, ""][1:], strict=True):
        key, has_value, value = word.partition("=")
        value = value if has_value else after
        if key == "--config":
            _check_shape_of_file(config_class, _read_yaml(value) if value else {}, f"--config {value}", extra, unknown)
        elif key.startswith("--") and (kind := type_of(config_class, name := key[2:].removesuffix("+"))) is not None:
            found = None if is_text(kind) else _loaded(value)
            fault = misfit(kind, value if found is None else found, name)
            check(fault is None, f"{key}: {fault}")
            if isinstance(found, dict) and dataclasses.is_dataclass(kind):
                _check_shape_of_file(config_class, found, key, (), unknown, f"{name}.")


def _check_shape_of_file(config_class: type, settings: dict, where: str, extra: Iterable[str],
                         unknown: Callable[[str], str], prefix: str = "") -> None:
    """The same of the mapping in a file, or of a section (whose dotted name is `prefix`)."""
    fault = misfit(config_class, settings, prefix[:-1])
    check(fault is None, f"{where}: {fault}")
    for key, value in settings.items():
        name = f"{prefix}{key}"
        check(name != "config", f"{where}: a file of settings cannot name another; give --config once for each")
        kind = str if name in extra else type_of(config_class, name)
        if kind is None:
            raise UserError(unknown(name))
        fault = misfit(kind, value, name)
        check(fault is None, f"{where}: {fault}")
        if dataclasses.is_dataclass(kind):
            _check_shape_of_file(config_class, value or {}, where, (), unknown, f"{name}.")


def _loaded(text: str) -> object:
    """A value of the command line as YAML reads it; what it cannot read is the parser's to refuse."""
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        return None


def _emptied_first(argv: list[str]) -> list[str]:
    """argv with `--key=[]` before every list, on the command line or in a file: a list replaces the one before it.

    jsonargparse merges two lists of equal length item by item: a source would keep the columns of the one it replaces.
    """
    out = []
    for word, after in zip(argv, [*argv, ""][1:], strict=True):
        key, has_value, value = word.partition("=")
        value = value if has_value else after
        if key == "--config" and value:
            out += [f"--{name}=[]" for name in _lists(_read_yaml(value))]
        elif key.startswith("--") and not key.endswith("+") and value.lstrip().startswith("["):
            out.append(f"{key}=[]")
        out.append(word)
    return out


def _lists(settings: dict, prefix: str = "") -> Iterator[str]:
    """Dotted names of the lists in nested settings."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _lists(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield f"{prefix}{key}"


def _read_yaml(path: str) -> dict:
    """UserError with file and line for a file that is no YAML mapping: the parser's own message names neither."""
    import yaml

    path = expanded(path)
    check_file(path, "--config")
    try:
        value = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read --config {path}: {error.strerror}; give a YAML file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--config {path} is no text in UTF-8; give a YAML file") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"--config {path}{where}: not valid YAML ({getattr(error, 'problem', error)}); "
                        "fix that line") from error
    except (RecursionError, ValueError) as error:  # ValueError: a date of month 13, a number of thousands of digits
        raise UserError(f"--config {path}: not valid YAML ({str(error)[:100] or 'nested too deeply'}); "
                        "fix it") from error
    check(_is_small(value), f"--config {path}: {_TOO_DEEP}")
    check(isinstance(value, dict), f"--config {path}: a mapping of options such as seed: 1 is needed, found "
                                   f"{'nothing' if value is None else type(value).__name__}")
    return value


_TOO_DEEP = "the settings refer to themselves, or are nested too deeply; write them flatter"


def _is_small(value: object) -> bool:
    """Whether a value is no deeper and no larger than settings are, aliases written out: ten lines of YAML can say
    more than a machine holds."""
    waiting, count = [(value, 1)], 0
    while waiting:
        outer, depth = waiting.pop()
        count += 1
        if isinstance(outer, (dict, list)):
            waiting += [(inner, depth + 1) for inner in (outer.values() if isinstance(outer, dict) else outer)]
        if depth > 30 or count + len(waiting) > 10**5:
            return False
    return True


_SWITCHES = {"preview": "Print three rendered examples of the stage's data, trained tokens marked, and stop.",
             "check_signal": "Print whether there is anything to learn from: the scores of several responses to "
                             "each of a few prompts, and the time of a step; then stop.",
             "plan": "Print the memory that the run needs, by role and phase, before any weight is loaded, and stop."}
_VALUES = {"memory": "Memory that the run may use, such as 24GiB: chooses micro-batches, checkpointing, offload and "
                     "quantisation that fit.",
           "cards": "With --plan: count for NVIDIA cards that need not be here, hosts x cards x memory of each, such "
                    "as 2x8x80GiB or 24GiB; 97% of that memory, what torch finds of a card, is planned with."}


_KINDS = {kind.__name__: words for kind, words in WORDS.items()}  # as jsonargparse names them


def _one_line(error: Exception, known: list[str], unused: Mapping[str, str], prog: str) -> str:
    """jsonargparse's message as one line, with the nearest known key where a key is unknown."""
    text = re.sub(r"\s+", " ", str(error)).strip().replace("Parser key ", "option ")
    text = re.sub(r"<class '(\w+)'>", r"\1", text)
    text = re.sub(r"Expected a (\w+)\. Got value: (.*)", lambda m: f"{m[2]} is not {_KINDS.get(m[1], m[1])}", text)
    union = re.search(r"Does not validate against any of the Union subtypes Subtypes: \[(.*?)\] Errors:.* "
                      r"Given value type: \w+ Given value: (.*)", text)
    if union:
        kinds = " or ".join(_KINDS.get(kind, kind) for kind in union.group(1).split(", "))
        return f"{text[:union.start()]}{union.group(2)} is not {kinds}"
    unknown = re.search(r"[Uu]nrecognized arguments?: -*([\w.\-+]+)|does not accept option '([^']+)'|"
                        r"Option '([^']+)' is not accepted", text)
    if not unknown:
        return text
    group = re.search(r"Group '([^']+)'", text)
    name = next(g for g in unknown.groups() if g)
    return _unknown(f"{group.group(1)}.{name}" if group else name, known, unused, prog)


def _unknown(name: str, known: list[str], unused: Mapping[str, str], prog: str) -> str:
    """The message for an option that there is not; known: those that there are."""
    program = prog[max(prog.find("--stage"), 0):]
    if meant := next((text for option, text in unused.items() if _is_below(name, (option,))), None):
        return f"{name} is not used by {program}; {meant}"
    section, close = name.partition(".")[0], nearest(name, known)
    if not close and section != name and not any(option.startswith(f"{section}.") for option in known):
        return f"unknown option {name}: {program} has no {section} options; --help lists its own"
    return f"unknown option {name}{close or '; --help lists all options'}"
