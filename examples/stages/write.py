"""Writes the YAML file of every --stage beside this script: each option with its default and what it means.

    python examples/stages/write.py

The files come from the Config classes and their docstrings alone; tests/test_stage_files.py fails where they are stale.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml
from docstring_parser import parse as parse_docstring

from hybrid_rlhf.cli import STAGES, unused_by
from hybrid_rlhf.config import parse
from hybrid_rlhf.training import defaults

WIDTH = 118


def render(name: str) -> str:
    """The text of stage `name`'s file."""
    row = STAGES[name]
    config_class = importlib.import_module(row.module).Config
    config, _ = parse(config_class, list(row.preset), prog=name)
    plain = config_class() if row.preset else config
    head = [f"--stage {name}: {row.help}. Every option with its default;",
            f"delete what you do not change.  python train.py --stage {name} --config FILE.yaml",
            "Written by examples/stages/write.py from the settings' own classes."]
    lines = _lines(config, plain, 0, tuple(unused_by(name)), _table(name, config))
    return "\n".join([*(f"# {line}" for line in head), *lines]) + "\n"


def _table(name: str, config: object) -> dict[str, str]:
    """What null means for this stage, where training/defaults.py says it: option -> text."""
    if name == "all":
        rows = {f"stages.{stage}.{option.removeprefix('train.')}" if option.startswith("train.") else option: value
                for stage in ("sft", "reward", "ppo") for option, value in defaults.TABLE[stage].items()}
    else:
        rows = defaults.TABLE.get(defaults.method_of(config), {})
    return {option: f"{value.full:g}, of adapters {value.lora:g}" if isinstance(value, defaults.Rate) else f"{value:g}"
            for option, value in rows.items() if not callable(value)}


def _lines(part: object, plain: object, depth: int, unused: tuple[str, ...], table: dict[str, str],
           prefix: str = "") -> Iterator[str]:
    """The options of a dataclass as YAML, each below its comment. plain: the class's own defaults. unused: options that
    the stage does not have. table: what null means."""
    texts = _texts(type(part))
    for field in dataclasses.fields(part):
        if prefix + field.name in unused:
            continue
        value, default = getattr(part, field.name), getattr(plain, field.name)
        is_section = dataclasses.is_dataclass(value)
        preset = "" if is_section or value == default else f" This stage's own; elsewhere {_shown(default)}."
        yield from [""] * (is_section and not depth)
        null = f" Here {table[prefix + field.name]}." if prefix + field.name in table else ""
        yield from _comment(texts[field.name] + null + preset, depth)
        yield from _items(type(part), field.name, depth)
        if is_section:
            yield f"{'  ' * depth}{field.name}:"
            yield from _lines(value, default, depth + 1, unused, table, f"{prefix}{field.name}.")
        else:
            yield f"{'  ' * depth}{field.name}: {_shown(value)}"


def _items(owner: type, name: str, depth: int) -> Iterator[str]:
    """What the items of a list hold, as comments, where the list's field names the class of its items."""
    kind = owner.__dataclass_fields__[name].metadata.get("items")
    texts = _texts(kind) if kind else {}
    for field in dataclasses.fields(kind) if kind else ():
        value = "..." if field.default is field.default_factory else _shown(_default(field))
        yield from _comment(f"  {field.name}: {value}   {texts[field.name]}", depth)


def _default(field: dataclasses.Field) -> object:
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()


def _texts(kind: type) -> dict[str, str]:
    """Field -> its description in the class's docstring."""
    return {p.arg_name: " ".join(p.description.split()) for p in parse_docstring(kind.__doc__).params}


def _comment(text: str, depth: int) -> list[str]:
    lead = f"{'  ' * depth}# "
    own = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(text.strip(), WIDTH, initial_indent=lead + own, subsequent_indent=lead + own * 2,
                         break_on_hyphens=False)


def _shown(value: object) -> str:
    """A value as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()


def main() -> None:
    for name in STAGES:
        Path(__file__).with_name(f"{name}.yaml").write_text(render(name), encoding="utf-8")


if __name__ == "__main__":
    main()
