"""The words of tests/project/words.py stay out of the product; LEFT holds what is still there, and only shrinks."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.project.words import FOLDERS, places

LEFT: dict[str, int] = {}


@cache
def counts() -> Counter[str]:
    """Places of each package."""
    return Counter("/".join(place.split("/")[:2 if place.startswith("hybrid_rlhf/") else 1]).partition(":")[0]
                   for place in places(FOLDERS))


@pytest.mark.parametrize("package", sorted({*LEFT, *counts()}))
def test_no_package_has_more_of_them_than_it_had(package):
    count = counts()[package]
    assert count <= LEFT.get(package, 0), "python -m tests.project.words prints them"
    assert count == LEFT.get(package, 0), f"{package}: {count} are left; lower its row"


def test_a_name_and_a_phrase_are_found(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text('def f(given):\n    """It is no list.\n\n    Nobody asks."""\n    found = 1\n'
                                   '    return f"there is no {found} left"  # whoever asks\n')
    monkeypatch.setattr("tests.project.words.ROOT", tmp_path)
    assert [place.partition(": ")[2] for place in places(["a.py"])] == [
        "the name given", "the name found", "'is no'", "'Nobody'", "'whoever'"]
