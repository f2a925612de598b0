"""The one way a command line and files of settings become frozen dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import re
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import GenericAlias, MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import yaml

from hybrid_rlhf.core.errors import UserError, check, nearest
from hybrid_rlhf.core.options import (
    expanded,
    holds_null,
    in_words,
    kinds_of,
    nearest_option,
    nearest_path,
    none_is_null,
    of_list,
    of_mapping,
    type_of,
    with_homes,
)

_SWITCHES = {"preview": "Print three rendered examples of the stage's data, trained tokens marked, and stop.",
             "check_signal": "Print whether there is anything to learn from: the scores of several responses to "
                             "each of a few prompts, and the time of a step; then stop.",
             "plan": "Print the memory that the run needs, by role and phase, before any weight is loaded, and stop."}
_VALUES = {"memory": "Memory that the run may use, such as 24GiB: chooses micro-batches, checkpointing, offload and "
                     "quantisation that fit.",
           "cards": "With --plan: count for NVIDIA cards that need not be here, hosts x cards x memory of each, such "
                    "as 2x8x80GiB or 24GiB; 97% of that memory, what torch finds of a card, is planned with."}
PartT = typing.TypeVar("PartT")


# -- commands beside the stages ----------------------------------------------------------------------------------------


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


# -- settings of a stage -----------------------------------------------------------------------------------------------


def parse(config_class: type, argv: list[str], *, prog: str, description: str = "",
          default_config: str | None = None, extra: Iterable[str] = (), unused: Mapping[str, str] = MappingProxyType({})
          ) -> tuple[object, dict]:
    """Command line -> (a frozen `config_class`, {flag: its value}).

    Later wins: the class's defaults, `default_config` (a YAML file), `--config FILE` and dotted overrides in the order
    of the command line. A list or a mapping replaces the one before it; --OPTION+ VALUE appends to a list, and
    --OPTION.KEY VALUE changes a key of a mapping. none stands for null wherever null may stand, null for an empty list
    where no text may stand, and ~ for the home folder in what names files and folders.

    extra: flags of the entry point itself, switches (bool) and those of _VALUES (text, None if not given). unused:
    options or sections that this stage never reads -> what is meant instead; they are not in the help, and an error
    where they are given.

    --help and --print_config[=comments] print, and raise SystemExit(0). Raises UserError, in one line and with the
    nearest name, for unknown keys, wrong types and values that a part's own check refuses.
    """
    stage = _Stage(config_class, prog, tuple(extra), unused)
    if not {"-h", "--help"}.isdisjoint(argv):
        print(stage.help(description))
        raise SystemExit(0)
    chosen = _Chosen(stage)
    if default_config is not None:
        chosen.read_file(default_config)
    chosen.read_words(argv)
    if chosen.printed is not None:  # before anything is checked that is missing: it may be a template
        print(stage.as_yaml(chosen, description), end="")
        raise SystemExit(0)
    config: Any = config_class(**_fields(config_class, chosen.values))
    return with_homes(config), chosen.flags


class Option(NamedTuple):
    """An option or a section. text: what its class's docstring says of it; choices: what its value may be, if that is
    one of a few."""

    name: str
    kind: Any
    text: str
    default: Any
    choices: tuple[str, ...] = ()

    @property
    def is_section(self) -> bool:
        return dataclasses.is_dataclass(self.kind)

    @property
    def explained(self) -> str:
        kind = getattr(self.kind, "__name__", str(self.kind)) if typing.get_origin(self.kind) is None else self.kind
        return f"{self.text} (type: {str(kind).replace('None', 'null')}, default: {in_line(self.default)})"


def options_of(config_class: type, unused: Iterable[str] = ()) -> list[Option]:
    """The options of nested settings, in the order of --help; sections are left out. unused: as in `parse`."""
    return [option for name, option in _options(config_class).items()
            if not option.is_section and not _is_below(name, unused)]


@cache
def _options(config_class: type) -> dict[str, Option]:
    """All options of nested settings by their dotted names, each section before its own."""
    defaults = {field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
                for field in dataclasses.fields(config_class)}
    return {option.name: option for option in _below(config_class, SimpleNamespace(**defaults), "")}


def _below(section: type, defaults: object, prefix: str) -> Iterator[Option]:
    texts, kinds = _texts(section), typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        name, kind, default = field.name, kinds[field.name], getattr(defaults, field.name)
        yield Option(f"{prefix}{name}", kind, texts.get(name, ""), default, field.metadata.get("choices", ()))
        if dataclasses.is_dataclass(kind):
            yield from _below(kind, default, f"{prefix}{name}.")  # type: ignore[arg-type]  # a class


def _texts(section: type) -> dict[str, str]:
    """What the docstrings of a dataclass and its bases say of its fields, under Attributes; its own first."""
    texts = [inspect.cleandoc(each.__doc__ or "").partition("Attributes:\n")[2] for each in reversed(section.__mro__)]
    return {name: " ".join(words.split()) for text in texts
            for name, words in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.M)}


def _is_below(name: str, options: Iterable[str]) -> bool:
    return any(name == option or name.startswith(f"{option}.") for option in options)


class _Stage(NamedTuple):
    """What may be given; as in `parse`."""

    config_class: type
    prog: str
    extra: tuple[str, ...]
    unused: Mapping[str, str]

    @property
    def options(self) -> list[Option]:
        return [option for name, option in _options(self.config_class).items() if not _is_below(name, self.unused)]

    def kind_of(self, name: str) -> Any:
        """The type of an option or a section. UserError for one that there is not here."""
        kind = type_of(self.config_class, name)
        if kind is None or _is_below(name, self.unused):
            raise UserError(self.unknown(name))
        return kind

    def unknown(self, name: str) -> str:
        """The message for an option that there is not here."""
        program = self.prog[max(self.prog.find("--stage"), 0):]
        if meant := next((text for option, text in self.unused.items() if _is_below(name, (option,))), None):
            return f"{name} is not used by {program}; {meant}"
        sections = [option.name for option in self.options if option.is_section]
        known = [*self.extra, *(option.name for option in self.options if not option.is_section)]
        section, close = name.partition(".")[0], nearest_option(name, known)
        if not close and section != name and section not in [*known, *sections]:
            return f"unknown option {name}: {program} has no {section} options; --help lists its own"
        return f"unknown option {name}{close or '; --help lists all options'}"

    def help(self, description: str) -> str:
        """What --help prints."""
        parser = argparse.ArgumentParser(
            self.prog, f"{self.prog} [--config FILE.yaml] [--OPTION VALUE] [--LIST+ VALUE] [--MAPPING.KEY VALUE] ...",
            f"{description.rstrip('.')}. --LIST+ appends to an option that is a list, --MAPPING.KEY changes one key of "
            "a mapping.", add_help=False)
        group: Any = parser.add_argument_group("options")
        group.add_argument("-h", "--help", action="store_true", help="Print this.")
        group.add_argument("--config", metavar="FILE", help="YAML file with any of the options below.")
        group.add_argument("--print_config", action="store_true", help="Print the settings as such a file, and stop; "
                           "--print_config=comments with what each option means.")
        for name in self.extra:
            if name in _VALUES:
                group.add_argument(f"--{name}", help=_VALUES[name].replace("%", "%%"))
            else:
                group.add_argument(f"--{name}", action="store_true", help=_SWITCHES.get(name, ""))
        groups = {"": parser.add_argument_group((self.config_class.__doc__ or "").partition("\n")[0].rstrip("."))}
        for option in self.options:
            if option.is_section:
                groups[option.name] = parser.add_argument_group(option.text.rstrip("."))
            else:
                section, _, name = option.name.rpartition(".")
                metavar = "{true,false}" if option.kind is bool else name.upper()
                groups[section].add_argument(f"--{option.name}", metavar=metavar,
                                             help=option.explained.replace("%", "%%"))
        return parser.format_help().rstrip()

    def as_yaml(self, chosen: _Chosen, description: str) -> str:
        """What --print_config prints: a file with the settings, which `parse` reads as the same ones."""
        has_comments = chosen.printed == "comments"
        lines = [f"# {description}"] if has_comments else []
        flags = [Option(name, str | None, _VALUES[name], value) if name in _VALUES else
                 Option(name, bool, _SWITCHES.get(name, ""), value) for name, value in chosen.flags.items()]
        for option in [*flags, *self.options]:
            indent = "  " * option.name.count(".")
            name = option.name.rpartition(".")[2]
            if has_comments:
                text = option.text if option.is_section else option.explained
                lines += ["", *textwrap.wrap(text, 110, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")]
            line = f"{name}:\n" if option.is_section else to_yaml(
                {name: chosen.values.get(option.name, option.default)})
            lines.append(textwrap.indent(line, indent).rstrip("\n"))
        return "\n".join([*lines, ""])


class _Chosen:
    """Values so far. values: by dotted option; flags: those of the entry point; printed: what follows --print_config,
    None without it."""

    def __init__(self, stage: _Stage) -> None:
        self.values: dict[str, Any] = {}
        self.flags: dict[str, Any] = {name: None if name in _VALUES else False for name in stage.extra}
        self.printed: str | None = None
        self._stage = stage

    def read_file(self, path: str) -> None:
        """Take what a YAML file says."""
        self._take_section(_read_yaml(path), "", f"--config {path}: ")

    def read_words(self, argv: Iterable[str]) -> None:
        """Take what a command line says."""
        words, option, value = iter(argv), None, ""
        for word in words:
            before = value.strip("[], ")
            name, has_value, value = word.removeprefix("--").partition("=")
            is_switch = name == "print_config" or (name in self.flags and name not in _VALUES)
            if option and not word.startswith("-") and of_list(option[1]) is not None:
                raise UserError(f"{word}: a second value of --{option[0]}; give them as one list, in quotes: "
                                f"--{option[0]} '[{before}, {word.strip('[], ')}]'")
            if not word.startswith("--") or not name:
                raise UserError(self._stage.unknown(word.lstrip("-") or word))
            if is_switch:
                check(not has_value or (name, value) == ("print_config", "comments"), f"{word}: give --{name} alone")
                if name == "print_config":
                    self.printed = value
                else:
                    self.flags[name] = True
                option = None
                continue
            option = None if name == "config" or name in self.flags else self._option_of(name)
            value = value if has_value else next(words, "--")
            check((has_value or not value.startswith("--")) and (value or name != "config"),
                  f"--{name} needs a {'file' if name == 'config' else 'value'}")
            if option is not None:
                self._take_word(name, option, value)
            elif name == "config":
                self.read_file(value)
            else:
                self.flags[name] = value

    def _option_of(self, word: str) -> tuple[str, Any, list[str]]:
        """The option that a word names, its type, and keys in its mapping. UserError for one that there is not."""
        name, parts = word.removesuffix("+"), word.split(".")
        kind = type_of(self._stage.config_class, name)
        if kind is not None and (name == word or of_list(kind) is not None):
            return name, kind if dataclasses.is_dataclass(kind) else self._stage.kind_of(name), []
        for i in range(len(parts) - 1, 0, -1):
            kind = type_of(self._stage.config_class, name := ".".join(parts[:i]))
            if kind is not None and not word.endswith("+") and of_mapping(kind) is not None:
                return name, self._stage.kind_of(name), parts[i:]
        raise UserError(self._stage.unknown(word))

    def _take_word(self, word: str, option: tuple[str, Any, list[str]], text: str) -> None:
        name, kind, keys = option
        before = self.values.get(name, _options(self._stage.config_class)[name].default)
        if keys:
            inner = of_mapping(kind) if len(keys) == 1 else object
            value = _with_key(before, keys, _value_of_word(inner, word, text))
        elif word.endswith("+"):
            items = of_list(kind)
            more = _value_of_word(GenericAlias(list, (items,)) if text.startswith("[") else items, name, text)
            value = [*(before if isinstance(before, list) else [before] if before else []),
                     *(more if isinstance(more, list) else [more])]
        else:
            value = _value_of_word(kind, name, text)
            check(value is not None or not dataclasses.is_dataclass(kind), f"--{name} needs a mapping of its options")
        self._take(name, value, "")

    def _take(self, name: str, value: Any, where: str) -> None:
        kind = type_of(self._stage.config_class, name)
        if dataclasses.is_dataclass(kind):  # one that is not used may stand there, empty
            check(value is None or isinstance(value, dict),
                  f"{where}{name} is a section; give a mapping of its options, or --{name}.OPTION")
            self._take_section(value or {}, f"{name}.", where)
        else:
            self.values[name] = _fitted(self._stage.kind_of(name), value, name, where)

    def _take_section(self, settings: dict, prefix: str, where: str) -> None:
        _check_keys(settings, f"{where}{prefix[:-1] or 'the file'}")
        for key, value in settings.items():
            name = f"{prefix}{key}"
            check(name != "config", f"{where}a file of settings cannot name another; give --config once for each")
            if name in self.flags:
                self.flags[name] = _fitted(str | None if name in _VALUES else bool, value, name, where)
            else:
                self._take(name, value, where)


def _fields(config_class: type, values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Arguments of a section's class (section: its dotted name and a point). A section inside it is its default, which
    may differ from its class's, with the chosen values. Raises the UserError of the section's own checks."""
    options, fields = _options(config_class), {}
    for name in dict.fromkeys(option.removeprefix(section).partition(".")[0] for option in values
                              if option.startswith(section)):
        option = options[f"{section}{name}"]
        fields[name] = values[option.name] if not option.is_section else dataclasses.replace(
            option.default, **_fields(config_class, values, f"{option.name}."))
    return fields


# -- values ------------------------------------------------------------------------------------------------------------


def _with_key(before: object, keys: Sequence[str], value: Any) -> Any:
    """The mapping before it, with a value at these nested keys."""
    if not keys:
        return value
    there = before if isinstance(before, dict) else {}
    return there | {keys[0]: _with_key(there.get(keys[0]), keys[1:], value)}


def _value_of_word(kind: Any, name: str, text: str) -> Any:
    """A word of the command line, for an option of that type: null, a list or a mapping as YAML reads it, and where
    anything may stand a number, true, false and quoted text too; what else it says is for `_fitted`."""
    kinds, items = kinds_of(kind), of_list(kind)
    if text.lower() in ("null", "~") and holds_null(kind):
        return None
    if kind is object:
        is_plain = text == "" or _Loader("").resolve(yaml.ScalarNode, text, (True, False)).endswith(":str")
        return text if is_plain and not text.startswith(("[", "{", "'", '"')) else _loaded(text)
    if (items is not None and text.startswith("[")) or (of_mapping(kind) is not None and text.startswith("{")):
        value = _loaded(text)
        is_text = str in (*kinds, *kinds_of(items))
        check(isinstance(value, (list, dict)) or is_text, f"{name}: {text[:60]} is not valid YAML; fix it")
        return value if isinstance(value, (list, dict)) else text
    return _loaded(text) if dataclasses.is_dataclass(kind) else _number((bool,), text) if bool in kinds else text


def _fitted(kind: Any, value: Any, name: str, where: str) -> Any:
    """The value as one of that type. UserError where it is none."""
    kinds, is_anything = kinds_of(kind), kind is object
    if isinstance(value, str) and value.lower() == "none" and none_is_null(kind, name):
        value = None
    if value is None and type(None) not in kinds and holds_null(kind):
        return []
    if isinstance(value, list) and (is_anything or of_list(kind) is not None):
        return [_fitted(of_list(kind) or object, item, f"{name}[{i}]", where) for i, item in enumerate(value)]
    if isinstance(value, dict) and (is_anything or of_mapping(kind) is not None):
        _check_keys(value, f"{where}{name}")
        return {key: _fitted(of_mapping(kind) or object, item, f"{name}[{key[:60]}]", where)
                for key, item in value.items()}
    if type(value) in (kinds if not is_anything else (str, int, float, bool, type(None))):
        return value
    if str not in kinds and isinstance(value, str) and not is_anything:
        if of_list(kind) is str and not value.startswith("["):
            return [value]
        value = _number(kinds, value)
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) in kinds:
        return value
    wanted = "text, a number, true or false, a list or a mapping" if is_anything else " or ".join(map(in_words, kinds))
    raise UserError(f"{where}{name} is {_shown(value)}; it must be {wanted}")


def as_part(kind: type[PartT], row: object, where: str) -> PartT:
    """A mapping in the settings as a dataclass; null stands for a default. UserError, which begins with `where`, for
    what is not one, for unknown and missing keys, wrong types, and what the class itself refuses."""
    kinds = typing.get_type_hints(kind)
    keys = f"its keys are {', '.join(kinds)}"
    if not isinstance(row, Mapping):
        raise UserError(f"{where} is {_shown(row)}; it must be a mapping, and {keys}")
    for key in row:
        check(key in kinds, f"unknown key {key} in {where}{nearest(str(key), kinds)}; {keys}")
    values = {key: _fitted(kinds[key], value, f"{where}: {key}", "") for key, value in row.items() if value is not None}
    for name, parameter in inspect.signature(kind).parameters.items():
        check(name in values or parameter.default is not parameter.empty, f"{where} has no {name}; {keys}")
    try:
        return kind(**values)
    except UserError as error:
        raise type(error)(f"{where}: {error}") from None


def _check_keys(mapping: dict, name: str) -> None:
    for key in mapping:
        check(isinstance(key, str), f"{name} has the key {_shown(key)}; a key must be text")


def _shown(value: object) -> str:
    return in_words(type(value)) if value is None or isinstance(value, (list, dict)) else (
        str(value).lower() if isinstance(value, bool) else repr(value)[:60])


# Whole numbers of at most 300 digits, which floats hold, and other numbers.
_DIGITS = r"\d(?:_?\d){0,299}"
_INT = rf"[-+]?(?:{_DIGITS}|0x[\da-f]{{1,16}})"
_FLOAT = rf"[-+]?(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:e[-+]?\d{{1,3}})?|[-+]?\.(?:inf|nan)"


def _number(kinds: tuple, text: str) -> Any:
    """A text that says a number or true or false as that; others as they are."""
    low = text.lower()
    if bool in kinds and low in ("true", "yes", "on", "false", "no", "off"):
        return low in ("true", "yes", "on")
    if int in kinds and re.fullmatch(_INT, low, re.A):
        return int(low, 16 if "x" in low else 10)
    if float in kinds and re.fullmatch(_FLOAT, low, re.A):
        value = float(low.replace(".inf", "inf").replace(".nan", "nan"))
        return text if math.isinf(value) and "inf" not in low else value
    return text


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML 1.1 with our numbers: 1e-5 is one; 010, 1:30 and 2020-01-01 are text. libyaml takes {a: b?, c: d} too."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - never changed
        first: [(tag, pattern) for tag, pattern in known if tag.rpartition(":")[2] in ("bool", "null", "merge")]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()}


class _Dumper(yaml.SafeDumper):
    """Writes text in quotes where `_Loader` or another reader of YAML 1.1 would take it for something else."""


for _tag, _pattern in (("tag:yaml.org,2002:int", rf"(?![-+]?0[\d_])(?:{_INT})\Z"),
                       ("tag:yaml.org,2002:float", rf"(?=.*[.e])(?:{_FLOAT})\Z")):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(_pattern, re.I | re.A), [*"-+.0123456789"])
    _Loader.add_constructor(_tag, lambda loader, node: _number((int, float), loader.construct_scalar(node)))
_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar(  # without quotes \x85 is read as a space
    "tag:yaml.org,2002:str", text, style='"' if "\x85" in text else None))


def to_yaml(value: object, **style: Any) -> str:
    """A value as YAML that a file of settings may hold: it is read as the same one."""
    return yaml.dump(value, Dumper=_Dumper, **{"sort_keys": False, "allow_unicode": True, "width": 10**6} | style)


def in_line(value: object) -> str:
    """A value as YAML, as a word of the command line or beside a key says it."""
    return to_yaml(value, default_flow_style=True).strip().removesuffix("...").strip()


def _loaded(text: str) -> Any:
    """A word as YAML reads it, or as it stands where that cannot."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text


def _read_yaml(path: str) -> dict:
    """UserError with file and line for a file that is not a YAML mapping."""
    path = expanded(path)
    try:
        value = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        why = f"{error.strerror}{nearest_path(path)}"
        raise UserError(f"cannot read --config {path}: {why}; give a YAML file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--config {path} is not UTF-8 text; give a YAML file") from error
    except yaml.YAMLError as error:
        mark, why = getattr(error, "problem_mark", None), getattr(error, "problem", error)
        line = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"--config {path}{line}: not valid YAML ({why}); fix it") from error
    check(isinstance(value, dict), f"--config {path}: a mapping of options such as seed: 1 is needed, found "
                                   f"{'nothing' if value is None else in_words(type(value))}")
    return value
