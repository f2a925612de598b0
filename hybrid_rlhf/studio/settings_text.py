"""Settings as a YAML file that a person can go on with: what was chosen, and the options worth knowing as comments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import yaml

from hybrid_rlhf.commands.init import comment, of_card
from hybrid_rlhf.core.config import check
from hybrid_rlhf.memory_plan.presets import card as card_of
from hybrid_rlhf.studio.common_options import by_table, common_options
from hybrid_rlhf.training.registry import STAGES

_ORDER = ("output_dir", "seed", "model", "data", "train", "stages", "engine", "roles", "reward", "reward_sources",
          "environment")  # what comes first; the method's own sections follow
_PLAIN = re.compile(r"(?:[A-Za-z]|\.{0,2}/)[\w./@+-]*(?::[\w./@+-]+)*", re.ASCII)
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none"}  # that YAML, or we, read as no text


def with_card(settings: Mapping[str, object], card: str | None) -> dict[str, object]:
    """The settings, and those of a card where nothing else is given. UserError for a card that there is not."""
    own = card_of(card, "card").settings if card else {}
    return {**settings, **{name: value for name, value in own.items() if name not in settings}}


def check_names(settings: Mapping[str, object]) -> None:
    """UserError for what no file of settings can hold: names without a word, an option inside of another one, and text
    that is none in UTF-8."""
    for name, value in settings.items():
        check(all(re.fullmatch(r"\w+", part, re.ASCII) for part in name.split(".")),
              f"unknown option {name!r:.60}; --help lists all options")
        inside = next((other for other in settings if name.startswith(f"{other}.")), None)
        check(inside is None, f"{inside} and {name} are both given; one is a part of the other")
        check(_is_unicode(value), f"{name} holds half a character, which no file in UTF-8 can; write it anew")


def _is_unicode(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def settings_text(stage: str, settings: Mapping[str, object], defaults: Mapping[str, object],
                  card: str | None = None) -> str:
    """The file. settings: with the card's own (`with_card`). The options of `common_options` that are not given stand
    there as comments, with their defaults."""
    row = STAGES[stage]
    lines = [f"# {row.help}. Try it: hybrid-rlhf --stage {stage} --config THIS --plan",
             f"# Every other option with its default: hybrid-rlhf --stage {stage} --help"]
    worth_knowing = [name for name in common_options(stage) if not any(f"{name}.".startswith(f"{given}.")
                                                                       for given in settings)]
    tree: dict = {}
    for name in sorted([*settings, *worth_knowing], key=_place):
        *sections, last = name.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        said = (card_of(card).why.get(name) if card else None) or comment(stage, name)
        inner[last] = _given(last, settings[name], said if _fits(name, settings[name]) else "") if (
            name in settings) else _open(last, defaults.get(name), said, by_table(stage, name))
    return "\n".join([*lines, *_written(tree, "", {"model": of_card(card)} if card else {}), ""])


def _place(name: str) -> tuple[int, str]:
    first = name.partition(".")[0]
    return (_ORDER.index(first) if first in _ORDER else len(_ORDER), first)


def _fits(name: str, value: object) -> bool:
    """Whether what is said beside an option is true of a value that a person chose."""
    wanted = {"reward.functions": "builtin:", "reward.options": "numeric_match"}.get(name, "")
    return wanted in str(value)


def _given(name: str, value: object, said: str) -> str:
    return f"{name}: {flow(value)}" + (f"  # {said}" if said else "")


def _open(name: str, default: object, said: str, means: str | None) -> str:
    """The line of an option that is not given, as a comment."""
    told = "; ".join(filter(None, (f"by the table: {means}" if means else "", said)))
    return f"# {_given(name, default, told)}"


def _written(tree: dict, indent: str, notes: Mapping[str, str]) -> list[str]:
    """The lines of a section. One without a given option is a comment as a whole."""
    lines = []
    for key, inner in tree.items():
        if isinstance(inner, str):
            lines.append(f"{indent}{inner}")
            continue
        note = f"  # {notes[key]}" if key in notes else ""
        body = _written(inner, f"{indent}  ", {})
        is_given = any(not line.lstrip().startswith("#") for line in body)
        lines.append(f"{indent}{key}:{note}" if is_given else f"{indent}# {key}:{note}")
        lines += body
    return lines


def block(nested: Mapping[str, object], indent: str = "") -> str:
    """Nested settings as YAML, a line for each option."""
    return "".join(f"{indent}{flow(name)}:\n{block(value, f'{indent}  ')}" if isinstance(value, Mapping) and value else
                   f"{indent}{flow(name)}: {flow(value)}\n" for name, value in nested.items())


def flow(value: object) -> str:
    """A value in one line of YAML, which every reader of YAML reads as that value."""
    if value is None or isinstance(value, (bool, int, float)):
        return yaml.safe_dump(value).strip().removesuffix("...").strip()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(flow, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{flow(str(k))}: {flow(v)}' for k, v in value.items())}}}"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return yaml.safe_dump(text, default_style='"', allow_unicode=True, width=10**9).strip()
