"""The options as the page shows them: all that --help lists, with kinds and choices that the launcher takes."""

from __future__ import annotations

import dataclasses
import importlib
import re
import typing
from functools import cache

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.options import kinds_of, of_list, of_mapping, value_of
from hybrid_rlhf.studio.preflight_answers import LEFT_OUT, options_of
from hybrid_rlhf.studio.settings_text import by_table, common_options
from hybrid_rlhf.training.registry import STAGES, variant_options

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
    shown = {name for name in shown if "." in name or name in ("seed", "resume", "report_to", "run_stages")}
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


def test_the_choices_of_an_option_are_those_that_its_class_takes():
    found = {option["name"]: option["choices"] for option in options("ppo")["options"] if option["choices"]}
    assert found["ppo.ptx_scale"] == ["fixed", "relative"] and found["roles.critic.kind"][0] == "auto"
    assert found["ppo.aggregation"] == ["token", "sequence", "constant"]
    of_distill = {option["name"]: option["choices"] for option in options("distill")["options"]}["distill.divergence"]
    assert of_distill == [*found["distill.divergence"], "policy_gradient"]


def test_what_null_means_is_said_where_the_table_has_it():
    assert by_table("sft", "train.learning_rate") == "0.0002 for adapters, 2e-05 for all weights"
    assert by_table("all", "stages.ppo.max_steps") == by_table("grpo", "train.max_steps") == "100"
    assert by_table("all", "stages.sft.num_train_epochs") == "3"
    assert by_table("ppo", "ppo.kl_coef") == "depends on the rewards"
    assert by_table("ppo", "ppo.update_kl") == by_table("ppo", "ppo.early_stop_kl") == (
        "depends on the updates on a rollout")
    assert by_table("rloo", "ppo.update_kl") is None
    assert by_table("sft", "seed") is None
