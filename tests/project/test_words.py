"""The words of tests/project/words.py stay out of the product."""

from __future__ import annotations

from tests.project.words import FOLDERS, places


def test_none_is_left():
    assert not list(places(FOLDERS)), "python -m tests.project.words prints them"


def test_a_name_and_a_phrase_are_found(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text('def f(given):\n    """It is no list.\n\n    Nobody asks."""\n    found = 1\n'
                                   '    return f"there is no {found} left"  # whoever asks\n')
    monkeypatch.setattr("tests.project.words.ROOT", tmp_path)
    assert [place.partition(": ")[2] for place in places(["a.py"])] == [
        "the name given", "the name found", "'is no'", "'Nobody'", "'whoever'"]
