"""Mappings of anything (environment.options, reward.judge.api_options): text in a file stays the text that is there."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from hybrid_rlhf.core.config import parse
from hybrid_rlhf.core.options import free_mappings


@dataclass(frozen=True)
class Inner:
    """An inner part.

    Attributes:
        free: Anything.
        named: Texts.
    """

    free: dict[str, object] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        inner: A part.
        free: Anything.
    """

    inner: Inner = field(default_factory=Inner)
    free: dict[str, object] = field(default_factory=dict)


TEXTS = ["####", "yes", "1e-5", "~", "null", "0x1F", "a: b", "- a", "[a]", "&a", '"yes"', "é", ""]


def read(tmp_path, free, *more):
    path = tmp_path / "a.yaml"
    path.write_text(json.dumps({"inner": {"free": free}, "free": free}))
    return parse(Config, ["--config", str(path), *more], prog="x")[0]


def test_the_options_of_any_value_are_found():
    assert free_mappings(Config) == ["free", "inner.free"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_a_file_is_read_once(tmp_path, text):
    config = read(tmp_path, {"a": text, "b": [text], "c": {"d": text}, "n": 1, "t": True, "z": None})
    assert config.inner.free == config.free == {"a": text, "b": [text], "c": {"d": text}, "n": 1, "t": True, "z": None}


def test_the_command_line_is_read_as_yaml_as_before_and_wins(tmp_path):
    config = read(tmp_path, {"a": "yes"}, "--inner.free.a=no", "--free", "{b: 1e-5, c: x}")
    assert config.inner.free == {"a": False}
    assert (config.free["b"], config.free["c"]) == (1e-5, "x")
