"""Settings as a file: every value comes back from it as it was given, by any reader of YAML and by the launcher; and
what stands beside it is true."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hybrid_rlhf.core.config import UserError, parse
from hybrid_rlhf.core.options import value_of
from hybrid_rlhf.memory_plan.presets import CARDS
from hybrid_rlhf.studio.settings_text import check_names, common_options, flow, settings_text, with_card
from hybrid_rlhf.training.registry import STAGES

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
@settings(max_examples=400, deadline=None)
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
    assert all(why in text for option, why in CARDS["8gb"].why.items() if option in CARDS["8gb"].settings)
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


@pytest.mark.parametrize(("chosen", "said"), [
    ({"a..b": 1}, "unknown option 'a..b'"), ({"": 1}, "unknown option ''"), ({"a\nb": 1}, "unknown option"),
    ({"ü": 1}, "unknown option"), ({"a: b\nc": 1}, "unknown option"),
    ({"model": {"a": 1}, "model.lora.r": 1}, "model and model.lora.r are both given")])
def test_what_no_file_can_hold_is_one_line(chosen, said):
    with pytest.raises(UserError, match=said) as found:
        check_names(chosen)
    assert "\n" not in str(found.value)


def test_neither_the_file_nor_the_studio_needs_torch():
    code = ("import json, sys; from hybrid_rlhf.studio import command, studio_app, settings_text as s; "
            "s.settings_text('grpo', s.with_card({}, '8gb'), {}, '8gb'); print(json.dumps(sorted(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & {"torch", "transformers", "datasets", "deepspeed", "peft", "tokenizers", "pyarrow"}
