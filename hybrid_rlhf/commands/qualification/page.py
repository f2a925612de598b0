"""The page of a qualification: what is wrong first, then every check, in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_rlhf.commands.qualification.findings import NOTE, PASSED, SKIPPED, WRONG, Row
from hybrid_rlhf.commands.qualification.machine import CARD

MACHINE = "environment"
TITLES = {MACHINE: "The machine", "equality": "Does it compute the right numbers?", "speed": "How fast is it?",
          "grpo-qlora": "GRPO with QLoRA", "ppo-qlora": "PPO with QLoRA", "grpo": "GRPO, all weights trained",
          "ppo": "PPO, all weights trained"}


def page_of(rows: Sequence[Row], *, is_dry: bool, minutes: float, version: str, when: str) -> str:
    """Markdown."""
    card = next((row for row in rows if row.name == CARD), None)
    name = (card.numbers.get("name") if card else None) or "no card"
    lines = [f"# hybrid-rlhf qualify: {name}", "", verdict(rows), ""]
    if is_dry:
        lines += ["This was a dry run: tiny sizes, to see that the command works. It says nothing about a card.", ""]
    lines += _table("What is wrong", [(f"{TITLES[row.part]}: {row.name}", row) for row in rows if row.state in WRONG])
    lines += _table("What was left out", [(f"{TITLES[row.part]}: {row.name}", row) for row in rows
                                          if row.state == SKIPPED])
    for part, title in TITLES.items():
        found = [row for row in rows if row.part == part]
        if part == MACHINE:  # what is as it should be takes a line
            fine = [f"{row.name} {row.found}" for row in found if row.state == PASSED and row.name != CARD]
            found = [row for row in found if row.state != PASSED or row.name == CARD]
            found += [Row(part, "as it should be", NOTE, "; ".join(fine))] if fine else []
        lines += _table(title, [(row.name, row) for row in found])
    lines += [f"Made by hybrid-rlhf {version} on {when} in {minutes:.1f} minutes. Please send us this page and "
              "qualify.json, which has every figure."]
    return "\n".join(lines) + "\n"


def verdict(rows: Sequence[Row]) -> str:
    """One sentence."""
    wrong, left_out = sum(r.state in WRONG for r in rows), sum(r.state == SKIPPED for r in rows)
    judged = wrong + sum(r.state == PASSED for r in rows)
    if not judged:
        return f"**Nothing was checked.** {left_out} were left out."
    text = f"**All {judged} checks passed.**" if not wrong else f"**{wrong} of {judged} checks did not pass.**"
    return text + (f" {left_out} {'was' if left_out == 1 else 'were'} left out." if left_out else "")


def _table(title: str, rows: Sequence[tuple[str, Row]]) -> list[str]:
    if not rows:
        return []
    cells = [f"| {_cell(name)} | {'' if row.state == NOTE else row.state} | {_cell(row.found)} |" for name, row in rows]
    return [f"## {title}", "", "| | | found |", "|---|---|---|", *cells, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
