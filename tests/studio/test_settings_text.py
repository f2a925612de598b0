"""Settings as a file that every reader takes as they were given; options as --help has them."""

from __future__ import annotations

import dataclasses
import importlib
import re
import typing
from functools import cache

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hybrid_rlhf.core.config import UserError, parse
from hybrid_rlhf.core.options import kinds_of, of_list, of_mapping, value_of
from hybrid_rlhf.memory_plan.presets import CARDS, WHY
from hybrid_rlhf.studio.preflight_answers import LEFT_OUT, options_of
from hybrid_rlhf.studio.settings_text import common_options, flow, settings_text, with_card
from hybrid_rlhf.training.registry import STAGES, by_table, variant_options

ODD = ["1e-5", ".5", ".inf", ".NaN", "null", "~", "yes", "No", "on", "y", "true", "0o7", "0x1F", "1_000", "1:30",
       "2020-01-01", "", " ", " x ", "a\nb", "a\n", "\n", "\t", "#a", "a #b", "a: b", "a:", ":a", "- a", "-", "?",
       "[a]", "{a: b}", "&a", "*a", "!a", "!!python/x 3", "%a", "@a", "`a", "'a'", '"a"', "\\n", "|", ">", "---",
       "...", "é", "😀", "\u2028", "\u0085", "\ufeff", "\x00", "<<", "=", "a,b", "C:\\x", "pay.py:name", "~/x"]
TEXT = st.one_of(st.sampled_from(ODD), st.text(st.characters(blacklist_categories=("Cs",)), max_size=30))
NUMBERS = st.one_of(st.booleans(), st.none(), st.integers(), st.floats(allow_nan=False))
JSON = st.recursive(st.one_of(TEXT, NUMBERS), lambda inner: st.one_of(
    st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)), max_leaves=8)


def as_launched(stage: str, text: str, folder):
    """The settings as the launcher's parser reads the file."""
    path, row = folder / "settings.yaml", STAGES[stage]
    path.write_text(text, encoding="utf-8")
    return parse(importlib.import_module(row.module).Config, [*row.preset, "--config", str(path)], prog="x")[0]


@given(JSON)
@settings(max_examples=150, deadline=None)
def test_a_value_is_one_line_that_reads_as_that_value(value):
    text = flow(value)
    assert "\n" not in text and yaml.safe_load(f"a: {text}  # why\nb: 1") == {"a": value, "b": 1}
    assert yaml.safe_load(f"a: [{text}, 2]") == {"a": [value, 2]}


NAMES = st.sampled_from([t for t in ODD if t.strip() and "\0" not in t])
VALUES = st.fixed_dictionaries({
    "data.sources": st.lists(NAMES.filter(lambda t: not t.startswith(("[", "{", "~"))), min_size=1, max_size=3),
    "reward.judge.url": st.just("http://localhost:1/v1"), "reward.judge.api_model": NAMES,
    "reward.judge.api_options": st.dictionaries(TEXT, st.one_of(NAMES, NUMBERS), max_size=3),
    "roles.actor.learning_rate": st.floats(0, 1), "seed": st.integers(0, 2**40), "data.raw": st.booleans(),
    "reward.judge.temperature": st.floats(0, 10), "train.max_steps": st.integers(1, 10**9),
    "train.num_train_epochs": st.one_of(st.none(), st.floats(0.1, 9)),
    "ppo.sampling.stop_token_ids": st.lists(st.integers(0, 9), max_size=3),
    "environment.tools": st.lists(NAMES.filter(lambda t: not t.startswith("~")), min_size=1, max_size=3),
    "report_to": st.lists(NAMES, max_size=3)})


@pytest.mark.slow
@given(VALUES)
@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])  # to shrink would take minutes
def test_the_launcher_reads_every_kind_of_value_as_it_was_given(tmp_path_factory, chosen):
    config = as_launched("grpo", settings_text("grpo", chosen, {}), tmp_path_factory.mktemp("x"))
    for name, value in chosen.items():
        found = value_of(config, name)
        assert ([source.path for source in found] if name == "data.sources" else found) == value, name


@pytest.mark.parametrize("stage", STAGES)
def test_a_file_without_a_choice_is_the_stages_own_defaults(stage, tmp_path):
    """Commented lines change nothing, and become settings that the launcher takes where a person uncomments them."""
    plain = as_launched(stage, settings_text(stage, {"seed": 0}, {}), tmp_path)
    row = STAGES[stage]
    assert plain == parse(importlib.import_module(row.module).Config, [*row.preset], prog="x")[0]
    defaults = {name: value_of(plain, name) for name in common_options(stage)}
    text = settings_text(stage, {"seed": 0}, defaults)
    used = "\n".join(line.replace("# ", "", 1) if line.lstrip().startswith("# ") else line
                     for line in text.splitlines()[2:])
    assert as_launched(stage, used, tmp_path) == plain
    assert all(f"{name.rpartition('.')[2]}:" in used for name in common_options(stage))


def test_a_card_gives_what_was_not_chosen_and_says_why(tmp_path):
    chosen = with_card({"model.lora.r": 4, "data.sources": ["a.jsonl"]}, "8gb")
    text = settings_text("sft", chosen, {}, "8gb")
    config = as_launched("sft", text, tmp_path)
    assert (config.model.lora.r, config.model.load_in_4bit, config.engine.micro_batch_tokens) == (4, True, 1024)
    assert "model:  # settings for 8gb; 3B of the Qwen2.5 family" in text
    assert all(why in text for option, why in WHY.items() if option in CARDS["8gb"].settings)
    with pytest.raises(UserError, match="card 9gb: choose"):
        with_card({}, "9gb")


def test_comments_say_what_null_means_and_what_is_true_of_the_value():
    text = settings_text("grpo", {"reward.functions": ["a.py:f"], "reward.options": {"f": {"n": 1}}}, {
        "ppo.kl_coef": None, "train.max_steps": -1, "ppo.sampling.temperature": 1.0})
    assert "# learning_rate: null  # by the table: 2e-05 for adapters, 1e-06 for all weights" in text
    assert "# max_steps: -1  # by the table: 100; each one samples and learns" in text
    assert "# temperature: 1.0\n" in text and "functions: [a.py:f]\n" in text and "column with" not in text
    text = settings_text("grpo", {"reward.functions": ["builtin:numeric_match"], "reward.options": {
        "numeric_match": {"column": "answer"}}}, {})
    assert "or your own, such as [pay.py:name]" in text and "the column with the right answer" in text


options = cache(options_of)
KINDS = {"int": int, "float": (int, float), "bool": bool, "text": str, "choice": (str, bool), "list": (list, str),
         "json": (dict, list, str)}


@pytest.mark.parametrize("stage", STAGES)
def test_every_option_of_help_is_there_with_its_default(stage, capsys):
    from hybrid_rlhf import cli

    found = {option["name"]: option for option in options(stage)["options"]}
    with pytest.raises(SystemExit):
        cli.main(["--stage", stage, "--help"])
    shown = set(re.findall(r"^  --([\w.]+),? ", capsys.readouterr().out, re.MULTILINE))
    shown = {name for name in shown if "." in name or name in ("seed", "resume", "report_to", "run_name", "run_stages")}
    sections = {name.rpartition(".")[0] for name in shown}
    assert {*found} == shown - sections - {*LEFT_OUT, *variant_options(stage)}
    defaults, _ = cli.read_settings(stage, [])
    for name, option in found.items():
        default = value_of(defaults, name)
        assert option["default"] == default or option["kind"] == "json"
        assert option["null"] if default is None else isinstance(default, KINDS[option["kind"]]), option
        assert option["help"] and "\n" not in option["help"]
        assert (option["kind"] == "choice") == bool(option["choices"])


@pytest.mark.parametrize("stage", STAGES)
def test_some_ten_options_are_shown_first(stage):
    found = options(stage)["options"]
    first = [option["name"] for option in found if option["is_common"]]
    assert first == [option["name"] for option in found[:len(first)]] == list(common_options(stage))
    assert 5 <= len(first) <= 14
    assert "model.lora.r" in first or stage == "evaluate"


def parts(config_class, prefix=""):
    """(class of a part, name of an option, its dotted name) of everything that is text."""
    hints = typing.get_type_hints(config_class)
    for each in dataclasses.fields(config_class):
        kind = hints[each.name]
        if dataclasses.is_dataclass(kind):
            yield from parts(kind, f"{prefix}{each.name}.")
        elif str in kinds_of(kind) and of_list(kind) is None and of_mapping(kind) is None:
            yield config_class, each.name, f"{prefix}{each.name}"


@pytest.mark.parametrize("stage", STAGES)
def test_what_refuses_all_but_some_words_is_a_choice_of_these(stage):
    """Each part's own check says what there is; the table must say the same."""
    found = {option["name"]: option for option in options(stage)["options"]}
    for part, option, name in parts(importlib.import_module(STAGES[stage].module).Config):
        if name in found and (text := refusal(part, option)):
            known = re.search(r"(?:choose(?: one of)?|there are) ([\w, -]+?)(?: \(did|$)", text)
            words = re.split(", | or ", known[1]) if known else []
            assert {*found[name]["choices"]} == {*words} - {"true", "false"}, (name, text)


def refusal(part, option) -> str:
    try:
        part(**{option: "no such word"})
    except UserError as error:
        return str(error)
    return ""


def test_what_null_means_is_said_where_the_table_has_it():
    assert by_table("sft", "train.learning_rate") == "0.0002 for adapters, 2e-05 for all weights"
    assert by_table("all", "stages.ppo.max_steps") == by_table("grpo", "train.max_steps") == "100"
    assert by_table("all", "stages.sft.num_train_epochs") == "3"
    assert by_table("ppo", "ppo.kl_coef") == "depends on the rewards"
    assert by_table("ppo", "ppo.update_kl") == by_table("ppo", "ppo.early_stop_kl") == (
        "depends on the updates on a rollout")
    assert by_table("rloo", "ppo.update_kl") is None
    assert by_table("sft", "seed") is None
