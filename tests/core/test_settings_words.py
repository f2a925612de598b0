"""How words and files become settings: numbers, texts, mappings of anything, what is refused."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field, fields

import pytest

from hybrid_rlhf.core.config import UserError, parse
from hybrid_rlhf.core.options import check_values, one_of, within
from hybrid_rlhf.training import step1_sft, step3_ppo


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
class Outer:
    """Settings.

    Attributes:
        inner: A part.
    """

    inner: Inner = field(default_factory=lambda: Inner(free={"a": 1}, named={"b": "c"}))


TEXTS = ["####", "yes", "1e-5", "~", "null", "0x1F", "a: b", "- a", "[a]", "&a", '"yes"', "é", ""]


@dataclass(frozen=True)
class Many:
    """Settings.

    Attributes:
        rate: A rate.
        count: A count.
        is_on: A switch.
        texts: Texts.
        numbers: Numbers.
        either: One or several.
        by_name: Texts by name.
        by_mapping: Anything by name.
        free: Anything.
        inner: A part.
    """

    rate: float | None = 0.5
    count: int = 1
    is_on: bool | None = True
    texts: list[str] = field(default_factory=lambda: ["t"])
    numbers: list[int] = field(default_factory=lambda: [7])
    either: list[str] | str = field(default_factory=list)
    by_name: dict[str, str] = field(default_factory=dict)
    by_mapping: dict[str, dict] = field(default_factory=dict)
    free: dict[str, object] = field(default_factory=dict)
    inner: Inner = field(default_factory=lambda: Inner(named={"b": "c"}))


def value(*words: str):
    """The only option that words have changed."""
    config, plain = parse(Many, list(words), prog="x")[0], Many()
    [changed] = [getattr(config, f.name) for f in fields(config) if getattr(config, f.name) != getattr(plain, f.name)]
    return changed


def value_in_file(tmp_path, text: str):
    """The only option that a file has changed."""
    (tmp_path / "a.yaml").write_text(text)
    return value("--config", f"{tmp_path}/a.yaml")


@pytest.mark.parametrize(("words", "wanted"), [
    (["--rate", "1e-5"], 1e-5), (["--rate=.5e3"], 500.0), (["--rate", "none"], None), (["--rate", ".inf"], math.inf),
    (["--count", "010"], 10), (["--count=0x10"], 16), (["--count", "1_000"], 1000), (["--is_on", "no"], False),
    (["--texts", "a b #c"], ["a b #c"]), (["--texts", "[a, 'b #c']"], ["a", "b #c"]),
    (["--texts+", "yes"], ["t", "yes"]),
    (["--texts+", "a", "--texts+", "[b, c]"], ["t", "a", "b", "c"]), (["--texts+", "[01]\\.x"], ["t", "[01]\\.x"]),
    (["--texts", "null"], []), (["--texts", "none"], []), (["--numbers", "~"], []), (["--numbers", "None"], []),
    (["--rate", "null"], None), (["--is_on", "none"], None),
    (["--either", "[qv]_proj"], "[qv]_proj"), (["--either", "yes"], "yes"), (["--either", "[a, b]"], ["a", "b"]),
    (["--by_name.a", "{prompt} hi #1"], {"a": "{prompt} hi #1"}), (["--by_name.a", "'x'"], {"a": "'x'"}),
    (["--by_mapping.f.low", "3"], {"f": {"low": 3}}), (["--by_mapping.f", "{low: 1e-3}"], {"f": {"low": 1e-3}}),
    (["--inner.named.a=[1"], Inner(named={"a": "[1", "b": "c"})),
    (["--free", "{q: is it long?, n: 2}"], {"q": "is it long?", "n": 2})])
def test_a_word_is_what_its_option_holds(words, wanted):
    assert value(*words) == wanted


@pytest.mark.parametrize(("word", "wanted"), [
    ("#fff", "#fff"), ("{x} y", "{x} y"), ("x #y", "x #y"), ("5 #y", "5 #y"), ("a: b", "a: b"), ("- a", "- a"),
    ("", ""), ("'x' y", "'x' y"), ("'x'", "x"), ('"010"', "010"), ("010", "010"), ("-010", "-010"), ("1:30", "1:30"),
    ("0b1", "0b1"), ("1__0", "1__0"), ("1_0", 10), ("0x1F", 31), ("-5", -5), ("1e-5", 1e-5), ("-.inf", -math.inf),
    ("1e400", "1e400"), ("none", "none"), ("null", None), ("No", False),
    ("[010, 10, {b: 1:30}]", ["010", 10, {"b": "1:30"}])])
def test_where_anything_may_stand_a_word_is_text_unless_it_is_plainly_something_else(word, wanted):
    assert value("--free.a", word) == {"a": wanted}
    assert value("--free.a.b", word) == {"a": {"b": wanted}}


@pytest.mark.parametrize(("words", "said"), [
    (["--free={a: [1}"], "free: {a: [1} is not valid YAML"), (["--free"], "--free needs a value"),
    (["--inner"], "--inner needs a value"), (["--inner="], "--inner needs a mapping"),
    (["--rate="], "rate is ''; it must be a number or null"),
    (["--count", ""], "count is ''; it must be a whole number"), (["--is_on="], "is_on is ''; it must be true"),
    (["count", "5"], "unknown option count; "), (["--count", "5", "rate"], "unknown option rate; "),
    (["--count+", "5"], "unknown option count+ (did you mean count?)"), (["--config+", "x"], "unknown option config+"),
    (["--either.a", "5"], "unknown option either.a"), (["--config="], "--config needs a file"),
    (["--config"], "--config needs a file"),
    (["--texts", "a", "b"], "b: a second value of --texts; give them as one list, in quotes: --texts '[a"),
    (["--count", "1__0"], "count is '1__0'; it must be a whole number")])
def test_a_word_that_is_not_for_its_option_is_one_line(words, said):
    with pytest.raises(UserError, match=f"^{re.escape(said)}"):
        value(*words)


@pytest.mark.parametrize(("stage", "given", "meant"), [
    (step1_sft, "train.lr", "train.learning_rate"), (step1_sft, "lr", "train.learning_rate"),
    (step1_sft, "learning_rate", "train.learning_rate"), (step1_sft, "train.epochs", "train.num_train_epochs"),
    (step1_sft, "batch_size", "train.per_device_train_batch_size"),
    (step1_sft, "model_name", "model.model_name_or_path"),
    (step1_sft, "lora_r", "model.lora.r"), (step1_sft, "data.max_seq_length", "data.max_length"),
    (step1_sft, "resume_from_checkpoint", "resume"), (step1_sft, "train.gradient_checkpointing",
                                                      "model.gradient_checkpointing"),
    (step3_ppo, "beta", "ppo.kl_coef"), (step3_ppo, "roles.critic.lr", "roles.critic.learning_rate"),
    (step3_ppo, "temperature", "ppo.sampling.temperature"), (step1_sft, "train.learning_rat", "train.learning_rate")])
def test_a_name_from_elsewhere_is_answered_with_what_it_is_called_here(stage, given, meant):
    with pytest.raises(UserError, match=rf"^unknown option {given} \(did you mean {meant}\?\)$"):
        parse(stage.Config, [f"--{given}", "1"], prog="p")


def test_a_section_alone_is_not_suggested():
    with pytest.raises(UserError, match=r"^unknown option inner.q \(did you mean inner.free\?\)$"):
        value("--inner.q", "5")


@pytest.mark.parametrize(("text", "said"), [
    ("rate: 1e400", "rate is"),
    ("free: {a: {1: 2}}", "free[a] has the key 1; a key must be text"), ("null: 1", "the file has the key null; a key"),
    ("free: {a: {null: 2}}", "free[a] has the key null; a key must be"), ("free: {null: 2}", "free has the key null"),
    ("by_name: {a: null}", "by_name[a] is null; it must be text"), ("inner: {yes: 1}", "inner has the key true; a key"),
    ("texts: '[a, b]'", "texts is '[a, b]'; it must be a list"), ("count: null", "count is null")])
def test_a_file_that_cannot_be_settings_is_one_line(tmp_path, text, said):
    with pytest.raises(UserError, match=re.escape(said)):
        value_in_file(tmp_path, text)


@pytest.mark.parametrize(("text", "wanted"), [
    ("rate: '1e-5'", 1e-5), ("is_on: 'false'", False), ("texts: a", ["a"]), ("texts: null", []), ("texts: none", []),
    ("numbers:", []), ("rate: none", None), ("is_on:", None), ("count: 010", 10),
    ("free: {a: 010, b: 1:30, c: 0b1, d: =, e: is it?, f: 0x1F}",
     {"a": "010", "b": "1:30", "c": "0b1", "d": "=", "e": "is it?", "f": 31}),
    ("free: {a: 1e-5, b: '1e-5', c: 1E5, d: 1.5e3, day: 2020-01-01, n: null, t: true}",
     {"a": 1e-5, "b": "1e-5", "c": 1e5, "d": 1.5e3, "day": "2020-01-01", "n": None, "t": True})])
def test_a_file_says_a_number_in_quotes_and_an_empty_list_too(tmp_path, text, wanted):
    assert value_in_file(tmp_path, text) == wanted


def test_a_section_may_stand_empty(tmp_path):
    (tmp_path / "a.yaml").write_text("inner:")
    assert parse(Many, ["--config", f"{tmp_path}/a.yaml"], prog="x")[0] == Many()


def test_help_says_defaults_as_the_command_line_takes_them(capsys):
    with pytest.raises(SystemExit):
        parse(Many, ["--help"], prog="x", description="Does it.")
    text = " ".join(capsys.readouterr().out.split())
    assert "Does it. --LIST+ appends" in text
    assert "A switch. (type: bool | null, default: true)" in text and "Texts. (type: list[str], default: [t])" in text


@pytest.mark.parametrize("text", ["1e5", "1e-5", "1E+5", "+1e3", "-1E3", "1.e5", ".5e3", "010", "2020-01-01", "1:30",
                                  "1:30.5", "0b1", "1__0", "=", "<<", "-.NaN", "a\x85b\u2028", *TEXTS])
def test_what_is_printed_is_read_as_the_same_text(tmp_path, text, capsys):
    given = f"--free={json.dumps({'a': text, text: [text]})}"
    with pytest.raises(SystemExit):
        value(given, "--print_config")
    (tmp_path / "a.yaml").write_text(capsys.readouterr().out)
    assert value("--config", f"{tmp_path}/a.yaml") == {"a": text, text: [text]} == value(given)


def test_a_section_keeps_what_its_owner_has_changed_of_its_defaults():
    assert parse(Outer, ["--inner.free={}"], prog="x")[0].inner == Inner(free={}, named={"b": "c"})


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
    ({"share": 1.0}, "part.share is 1.0; it must lie in [0, 1), such as 0.5"),
    ({"share": -0.1}, "it must lie in [0, 1)"),
    ({"share": float("nan")}, "part.share is nan; it must lie in [0, 1)"),
    ({"count": 0}, "part.count is 0; it must be at least 1"),
    ({"rate": -1}, "part.rate is -1; it must not be negative"),
    ({"limit": 0.0}, "part.limit is 0.0; it must be positive, and finite, or null"),
    ({"limit": float("inf")}, "part.limit is inf; it must be positive, and finite, or null"),
    ({"kind": "bcc"}, "part.kind is 'bcc'; choose a, bcd (did you mean bcd?)"),
    ({"rate": None}, "part.rate is None; it must not be negative"),
    ({"kind": None}, "part.kind is None; choose a, bcd"), ({"other": "y"}, "part.other is 'y'; choose x")])
def test_a_value_that_is_none_of_the_choices_or_out_of_its_interval_is_refused(given, said):
    with pytest.raises(UserError, match=re.escape(said)):
        Values(**given)


def test_values_at_the_ends_of_their_intervals_are_taken():
    assert Values(0.0, 1, 0.0, 1e-9, "bcd", "x").share == 0.0
    assert Values(0.999, 10**9, float("inf"), None, "a", None).limit is None
