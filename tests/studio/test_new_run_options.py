"""The options of a new run: what they show, how they are changed and found, and what is refused."""

from __future__ import annotations

import time

import pytest

from hybrid_rlhf.studio.studio import Refused
from tests.factories.browser import needs_browser
from tests.factories.new_run_pages import entry

pytestmark = [needs_browser, pytest.mark.slow]


def test_options_follow_the_card_and_a_change_has_a_way_back(page, stub):
    page.ready()
    rank = entry("model.lora.r")
    page.until(lambda: page.find(rank).get_attribute("value") == "16")
    assert "the default is 0" in page.find(entry("model.lora.r", ".mark")).text
    page.fill(rank, "64")
    page.sends("model.lora.r", 64)
    mark = page.find(entry("model.lora.r", ".mark"))
    assert "Changed by you" in mark.text
    mark.find_element("css selector", "button").click()
    assert page.find(rank).get_attribute("value") == "16"
    page.focuses(rank)
    page.until(lambda: "model.lora.r" not in page.settings)
    page.click("#card option[value=cpu]")
    page.until(lambda: page.find(rank).get_attribute("value") == "0")
    assert stub.last("settings")["card"] == "cpu"


def test_all_other_options_are_found_by_searching_and_say_what_was_changed(page):
    page.ready()
    assert not page.find(entry("train.warmup_ratio")).is_displayed()
    page.click("details.all > summary")
    page.fill("#option-search", "rises rate")
    assert page.find(entry("train.warmup_ratio")).is_displayed()
    assert not page.find(entry("engine.offload")).is_displayed()
    assert "1 of 14 options" in page.find("details.all").text
    for option, typed, value in (("train.warmup_ratio", "0.1", 0.1), ("engine.offload", "optimizer, parameters",
                                 ["optimizer", "parameters"]), ("train.adam_epsilon", "1e-6", 1e-6),
                                 ("data.split", "[1, 2, 3]", [1, 2, 3]), ("model.freeze", '["a,b"]', ["a,b"]),
                                 ("engine.micro_batch_tokens", "many", "many")):
        page.fill("#option-search", option.split(".")[1])
        page.set(option, typed)
        page.until(lambda option=option, value=value: page.settings.get(option) == value)
    assert "(6 changed)" in page.find("details.all > summary").text
    page.fill("#option-search", "preset")
    page.click(entry("model.preset", "option[value=tiny]"))
    assert page.sent("model.preset") == "tiny"
    page.click(entry("model.preset", "option[value='']"))
    page.until(lambda: page.settings.get("model.preset") is None)


def test_options_of_another_method_are_left_out_and_that_is_said(page, stub):
    page.ready()
    page.set("dpo.beta", "0.5")
    assert page.sent("dpo.beta") == 0.5
    page.goal("imitate")
    page.until(lambda: stub.last("settings")["stage"] == "sft")
    assert "dpo.beta" not in page.settings
    assert "Left out" in page.find("#page").text and "dpo.beta" in page.find(".notice").text
    page.goal("prefer")
    assert page.sent("dpo.beta") == 0.5


def test_incomplete_json_is_told_at_once_and_never_sent(page, stub):
    page.ready()
    page.click("details.all > summary")
    page.fill("#option-search", "reward.options")
    page.set("reward.options", '{"a": ', "textarea")
    assert "not complete JSON" in page.fault("reward.options")
    page.click("#start")
    page.focuses(entry("reward.options", "textarea"))
    page.set("reward.options", '{"a": {"b": 1}}', "textarea")
    assert page.sent("reward.options") == {"a": {"b": 1}}
    assert all(body["settings"].get("reward.options", {}) in ({}, {"a": {"b": 1}}) for body in stub.asked["settings"])
    assert not page.find(entry("reward.options", ".fault")).is_displayed()


def test_a_refusal_stands_beside_its_option_and_the_focus_goes_there(page, stub):
    page.ready()
    stub.refusal = {"option": "train.warmup_ratio", "text": "train.warmup_ratio is 7; it must be between 0 and 1"}
    page.set("model.lora.r", "8")
    page.says("between 0 and 1")
    assert not page.is_focused(entry("train.warmup_ratio"))  # nobody is taken away from where they type
    for press in ("#start", "#ask-preview", "#ask-plan"):
        page.click(press)
        page.focuses(entry("train.warmup_ratio"))
        said = page.find(entry("train.warmup_ratio", ".fault"))
        assert said.is_displayed() and "between 0 and 1" in said.text
        assert page.find(entry("train.warmup_ratio")).get_attribute("aria-invalid") == "true"
    page.fill("#option-search", "warmup")  # what is found already stays found; what a search hides is shown again
    page.click("#start")
    page.focuses(entry("train.warmup_ratio"))
    assert page.find("#option-search").get_attribute("value") == "warmup"
    page.fill("#option-search", "preset")
    page.click("#start")
    page.focuses(entry("train.warmup_ratio"))
    stub.refusal = {"option": None, "text": "two things do not go together"}
    page.set("model.lora.r", "9")
    page.until(lambda: "do not go together" in page.find("#settings-fault").text)
    assert not page.find(entry("train.warmup_ratio", ".fault")).is_displayed()
    stub.refusal = None
    stub.refusals["jobs"] = Refused(409, "there is a run of that name", None)
    page.set("model.lora.r", "10")
    page.says("Everything is there")
    page.click("#start")
    page.focuses("#run-name")
    assert "of that name" in page.fault("run")


def test_a_refusal_of_a_ready_made_function_stands_beside_its_settings(page, stub):
    page.visit("?goal=function&model=org/name")
    page.until(lambda: page.find("#reward-length_penalty"))
    page.press("Take the built-in demo data")
    page.until(lambda: page.find(".verdict"))  # what is said of the rows moves what a click below it would meet
    assert page.sent("reward.functions") == ["builtin:demo_correct"]  # what can score the answers to it
    assert page.find("#reward-demo_correct").is_selected()
    page.click("#reward-length_penalty")
    page.sends("reward.options", {"length_penalty": {"max_tokens": 256, "buffer": 64}})
    stub.refusal = {"option": "reward.functions", "text": "reward.functions: builtin:length_penalty needs max_tokens"}
    page.set("reward.options.length_penalty", "{}")
    page.until(lambda: "needs max_tokens" in page.fault("reward.options.length_penalty"))
    page.set("reward.options.length_penalty", '{"max_tokens"')
    page.until(lambda: "Not complete JSON" in page.fault("reward.options.length_penalty"))


def test_nothing_is_called_wrong_that_was_not_given_yet(page, stub):
    stub.refusal = {"option": "model.model_name_or_path", "text": "no model is named"}
    page.visit("?goal=prefer")
    page.until(lambda: "name the model" in page.find(".next-line").text and page.find("pre.same-yaml").text)
    assert not [f for f in page.all(".fault") if f.is_displayed()]
    page.click("#start")
    page.focuses(entry("model.model_name_or_path"))


def test_answers_that_come_late_do_not_replace_newer_ones(page, stub):
    page.ready()
    stub.slow["settings"] = 1.5
    page.set("model.lora.r", "8")
    page.sends("model.lora.r", 8)
    stub.slow.clear()
    page.set("model.lora.r", "9")
    page.until(lambda: "model.lora.r: 9" in page.find("pre.same-yaml").text)
    time.sleep(1.5)
    assert "model.lora.r: 9" in page.find("pre.same-yaml").text


def test_questions_that_another_tab_replaced_are_asked_again(page, stub):
    stub.once |= {name: [Refused(409, "replaced") for _ in range(2)] for name in ("get options", "settings", "data")}
    page.ready()
    stub.once["plan"] = [Refused(409, "replaced")]
    page.click("#ask-plan")
    page.until(lambda: page.find(".checks .bars"))


def test_a_studio_that_was_away_for_a_moment_is_asked_again(page, stub):
    page.ready()
    stub.refusals["settings"] = Refused(503, "the process that looks ended")
    page.set("model.lora.r", "8")
    page.says("the process that looks ended")
    del stub.refusals["settings"]
    page.click("#start")
    page.until(lambda: "#/run/pairs-dpo" in page.browser.current_url)
    assert stub.last("jobs")["settings"]["model.lora.r"] == 8


def test_options_that_cannot_be_loaded_are_asked_for_again(page, stub):
    stub.refusals["get options"] = Refused(503, "the process that looks ended")
    page.visit("?goal=prefer&model=demo/sft&data=pairs.jsonl")
    page.until(lambda: "the process that looks ended" in page.find("#page").text)
    del stub.refusals["get options"]
    page.press("Try again")
    page.says("Everything is there")
