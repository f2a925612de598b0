"""docs/one-ppo-step.md shows the code as it is: every line of its blocks stands in the file that it names, in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "one-ppo-step.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python (\S+)\n(.*?)^```$", PAGE, re.M | re.S)


@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[f"{i}:{name}" for i, (name, _) in enumerate(BLOCKS)])
def test_the_page_s_lines_are_the_code_s(name, block):
    source, place = (ROOT / name).read_text(encoding="utf-8"), 0
    for part in block.split("...\n"):
        place = source.find(part, place)
        assert place >= 0, f"{name} no longer holds, in this order:\n{part}"
        place += len(part)


def test_every_file_of_the_way_is_shown():
    assert len({name for name, _ in BLOCKS}) == 6 and len(BLOCKS) >= 9
