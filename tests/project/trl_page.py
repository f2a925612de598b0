"""The table of TRL's fields in docs/coming-from.md, made of hybrid_rlhf/trl_fields.py.

    python -m tests.project.trl_page    writes it anew
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from hybrid_rlhf.trl_fields import CONFIGS, IDLE, READ, REFUSED, TAKEN, Field

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from.md"
BEGIN = "<!-- fields of TRL's configurations, by python -m tests.project.trl_page -->"
END = "<!-- end of the fields -->"
NAMES = {kind: kind.removesuffix("Config") for kind in CONFIGS}


def _by_field(*kinds: str) -> dict[tuple[str, Field], list[str]]:
    """(name, what it is) -> the configurations in which it is that; the default is left out."""
    found = defaultdict(list)
    for config, fields in CONFIGS.items():
        for name, field in fields.items():
            if field.kind in kinds:
                found[name, field._replace(default=None)].append(NAMES[config])
    return found


def _where(name: str, configs: list[str]) -> str:
    has = [NAMES[config] for config, fields in CONFIGS.items() if name in fields]
    return "" if configs == has else f" ({', '.join(configs)})"


def table() -> str:
    lines = ["| there | here | |", "|---|---|---|"]
    for (name, field), configs in _by_field(TAKEN, READ).items():
        here = f"`{field.option}`" if field.option else ""
        lines.append(f"| `{name}`{_where(name, configs)} | {here} | {field.note} |".replace("  ", " "))
    lines += ["", "Refused with any value but TRL's default:", "", "| there | what to do |", "|---|---|"]
    lines += _grouped(REFUSED)
    lines += ["", "Without effect here; a line names those that a script gives:", "",
              "| there | why |", "|---|---|"]
    return "\n".join([*lines, *_grouped(IDLE)])


def _grouped(kind: str) -> list[str]:
    by_note = defaultdict(list)
    for (name, field), configs in _by_field(kind).items():
        by_note[field.note].append(f"`{name}`{_where(name, configs)}")
    return [f"| {', '.join(names)} | {note} |" for note, names in by_note.items()]


def written(page: str) -> str:
    """The page with the table of now."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
