"""Reward functions by name: opened from a file or of the built-in ones, and what cannot be opened."""

from __future__ import annotations

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.rewards import checked_scores
from hybrid_rlhf.rewards.functions import open_functions
from tests.factories.rollouts import rollout

FILE = """
from dataclasses import dataclass

@dataclass
class Kept:
    size: int

def lengths(completions, factor: float = 1.0, **columns):
    return [Kept(len(c)).size * factor for c in completions]

def strict(completions):
    return [0.0] * len(completions)
"""


def test_functions_are_opened_from_a_file_and_named_apart(tmp_path):
    path = tmp_path / "pay.py"
    path.write_text(FILE)
    found = open_functions([f"{path}:lengths", f"{path}:lengths", "builtin:repetition_penalty"],
                           {"lengths_2": {"factor": -1.0}}, 5.0)
    assert [f.name for f in found] == ["lengths", "lengths_2", "repetition_penalty"]
    assert checked_scores(found[0], rollout()).tolist() == [3, 8, 3]
    assert checked_scores(found[1], rollout()).tolist() == [-3, -8, -3]
    path.write_text(FILE.replace("factor for", "factor + 1 for"))  # as long a file, in the same second
    again = open_functions([f"{path}:lengths"], {}, 5.0)
    assert checked_scores(again[0], rollout()).tolist() == [4, 9, 4]
    assert not list(tmp_path.glob("__pycache__"))


@pytest.mark.parametrize("given, options, message", [
    ("lengths", {}, "'lengths' names no function or class; give path.py:name"),
    ("PLACE/none.py:lengths", {}, "none.py is not a Python file"),
    ("PLACE/pay.py:length", {}, r"has no function length \(did you mean lengths"),
    ("PLACE/pay.py:strict", {"strict": {"x": 1}}, "takes no x"),
    ("PLACE/pay.py:strict", {"strickt": {}}, r"strickt is none of reward.functions \(strict\) \(did you mean strict"),
    ("PLACE/torn.py:f", {}, r"torn.py line 2 cannot be run: SyntaxError"),
    ("PLACE/leaves.py:f", {}, "leaves.py line 1 cannot be run: GeneratorExit"),
    ("PLACE/raises.py:f", {}, r"raises.py line 3 cannot be run: ModuleNotFoundError: No module named 'no_such_thing'"),
    ("builtin:numeric_mach", {}, r"no builtin:numeric_mach \(did you mean numeric_match"),
    ("builtin:format", {"format": {"patern": "x"}}, r"there is no patern \(did you mean pattern"),
    ("builtin:format", {}, "pattern"),
    ("builtin:format", {"format": {"pattern": "("}}, r"pattern '\(' is not a regular expression"),
    ("builtin:length_penalty", {"length_penalty": {"max_tokens": 5, "buffer": 9}}, "buffer is 9"),
    ("builtin:repetition_penalty", {"repetition_penalty": {"n": "x"}}, "repetition_penalty"),
])
def test_what_cannot_be_opened_is_one_line_of_the_user_s(tmp_path, given, options, message):
    (tmp_path / "pay.py").write_text(FILE)
    (tmp_path / "torn.py").write_text("\ndef f(:\n")
    (tmp_path / "leaves.py").write_text("raise GeneratorExit")
    (tmp_path / "raises.py").write_text("\n\nimport no_such_thing\n")
    with pytest.raises(UserError, match=message) as caught:
        open_functions([given.replace("PLACE", str(tmp_path))], options, 5.0)
    assert "\n" not in str(caught.value)
