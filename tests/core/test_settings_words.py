"""How words and files become settings: numbers, texts, mappings of anything, what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

import pytest

from hybrid_rlhf.core.config import UserError, parse
from hybrid_rlhf.core.options import check_values, one_of, within


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


@dataclass(frozen=True)
class Outer:
    """Settings.

    Attributes:
        inner: A part.
    """

    inner: Inner = field(default_factory=lambda: Inner(free={"a": 1}, named={"b": "c"}))


TEXTS = ["####", "yes", "1e-5", "~", "null", "0x1F", "a: b", "- a", "[a]", "&a", '"yes"', "é", ""]


def read(tmp_path, free, *more):
    path = tmp_path / "a.yaml"
    path.write_text(json.dumps({"inner": {"free": free}, "free": free}))
    return parse(Config, ["--config", str(path), *more], prog="x")[0]


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_a_file_is_read_once(tmp_path, text):
    config = read(tmp_path, {"a": text, "b": [text], "c": {"d": text}, "n": 1, "t": True, "z": None})
    assert config.inner.free == config.free == {"a": text, "b": [text], "c": {"d": text}, "n": 1, "t": True, "z": None}


def test_the_command_line_is_read_as_yaml_as_before_and_wins(tmp_path):
    config = read(tmp_path, {"a": "yes"}, "--inner.free.a=no", "--free", "{b: 1e-5, c: x}")
    assert config.inner.free == {"a": False}
    assert config.free == {"b": 1e-5, "c": "x"}


@pytest.mark.parametrize(("word", "said"), [
    ("--free={a: [1}", "free: {a: [1} is not valid YAML"), ("--free.a=[1", "free.a: [1 is not valid YAML"),
    ("--named={a: 1}", "unknown option named (did you mean inner.named?)"), ("--free", "--free needs a value"),
    ("--inner.named.a=1", "inner.named[a] is 1; it must be text")])
def test_a_word_that_is_no_mapping_is_one_line(word, said):
    with pytest.raises(UserError, match=f"^{re.escape(said)}"):
        parse(Config, [word], prog="x")


def test_a_section_keeps_what_its_owner_has_changed_of_its_defaults():
    assert parse(Outer, ["--inner.free={}"], prog="x")[0].inner == Inner(free={}, named={"b": "c"})


def test_a_number_is_one_in_a_file_and_on_the_command_line(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("free: {a: 1e-5, b: '1e-5', c: 1E5, d: 1.5e3, day: 2020-01-01}")
    given = parse(Config, ["--config", str(path), "--free.e", "1e-5", "--free.f.g", "[2]"], prog="x")[0]
    assert given.free == {"a": 1e-5, "b": "1e-5", "c": 1e5, "d": 1.5e3, "day": "2020-01-01", "e": 1e-5, "f": {"g": [2]}}


@dataclass(frozen=True)
class Values:
    """Settings.

    Attributes:
        share: A share.
        count: A count.
        rate: A rate.
        limit: A limit.
        kind: A kind.
        other: A kind.
    """

    share: float = within(0.5, "[0, 1)")
    count: int = within(1, "[1,")
    rate: float = within(0.0, "[0,")
    limit: float | None = within(None, "(0, inf)")
    kind: str = one_of("a", ("a", "bcd"))
    other: str | None = one_of(None, ["x"])

    def __post_init__(self) -> None:
        check_values(self, "part.")


@pytest.mark.parametrize(("given", "said"), [
    ({"share": 1.0}, "part.share is 1.0; it must lie in [0, 1)"), ({"share": -0.1}, "it must lie in [0, 1)"),
    ({"share": float("nan")}, "part.share is nan; it must lie in [0, 1)"),
    ({"count": 0}, "part.count is 0; it must be at least 1"),
    ({"rate": -1}, "part.rate is -1; it must not be negative"),
    ({"limit": 0.0}, "part.limit is 0.0; it must be positive, or null"),
    ({"limit": float("inf")}, "part.limit is inf; it must be positive, or null"),
    ({"kind": "bcc"}, "part.kind is 'bcc'; choose a, bcd (did you mean bcd?)"),
    ({"kind": None}, "part.kind is None; choose a, bcd"), ({"other": "y"}, "part.other is 'y'; choose x")])
def test_a_value_that_is_none_of_the_choices_or_out_of_its_interval_is_refused(given, said):
    with pytest.raises(UserError, match=re.escape(said)):
        Values(**given)


def test_values_at_the_ends_of_their_intervals_are_taken():
    assert Values(0.0, 1, 0.0, 1e-9, "bcd", "x").share == 0.0
    assert Values(0.999, 10**9, float("inf"), None, "a", None).limit is None
