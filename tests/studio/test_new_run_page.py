"""The page of a new run in a real Chromium, over made-up answers: what is asked, and what is sent."""

from __future__ import annotations

import json
import time

import pytest

from tests.factories.browser import needs_browser, texts
from tests.factories.new_run_pages import entry

pytestmark = [needs_browser, pytest.mark.slow]


def test_a_beginner_is_led_from_the_goal_to_a_run(page, stub, tmp_path):
    page.visit()
    assert "Choose what the model is to learn from" in page.find(".next-line").text
    assert not page.find("#start").is_displayed()
    page.goal("prefer")
    page.says("name the model")
    page.set("model.model_name_or_path", "demo/sft")
    page.says("give the data")
    rows = tmp_path / "my pairs.jsonl"
    rows.write_text("{}\n")
    page.find("#file-data").send_keys(str(rows))
    page.says("Everything is there")
    stored = page.studio.studio.home / "data" / "my pairs.jsonl"
    assert stored.read_text() == "{}\n"
    assert page.find("#run-name").get_attribute("value") == "my-pairs-dpo"
    page.click("#start")
    page.until(lambda: "#/run/my-pairs-dpo" in page.browser.current_url)
    assert stub.last("jobs") == {
        "kind": "train", "stage": "dpo", "run": "my-pairs-dpo", "settings": {
            "model.lora.r": 16, "model.load_in_4bit": True, "data.sources": [str(stored)],
            "model.model_name_or_path": f"{page.studio.studio.outputs}/demo/sft"}}


def test_an_example_that_needs_nothing_is_filled_in(page, stub):
    page.visit()
    page.click("#try-out")
    page.says("Everything is there")
    found = stub.last("settings")
    assert (found["stage"], found["settings"]["model.preset"]) == ("sft", "demo")
    assert found["settings"]["data.sources"] == ["demo/demonstrations"]


def test_every_goal_sends_the_settings_of_its_own_question(page):
    page.visit("?goal=function&model=org/name&data=demo/prompts")
    page.says("what a good answer is")
    page.click("#reward-numeric_match")
    note = page.find(entry("reward.options.numeric_match", ".notice"))
    page.until(lambda: "no column answer; they have prompt, chosen, rejected" in note.text)
    page.set("reward.options.numeric_match", "chosen")
    assert not note.is_displayed()
    page.set("reward.options.numeric_match", "solution")
    page.set("reward.functions", "pay.py:one, pay.py:two")
    page.click("#has-tools")
    page.fill("#tools", "builtin:calculator")
    page.until(lambda: "environment.tools" in page.settings)
    time.sleep(0.5)
    found = page.settings
    assert found["reward.functions"] == ["builtin:numeric_match", "pay.py:one", "pay.py:two"]
    assert found["reward.options"] == {"numeric_match": {"column": "solution"}}
    assert found["environment.tools"] == ["builtin:calculator"]
    assert (found["model.model_name_or_path"], found["data.sources"]) == ("org/name", ["demo/prompts"])

    page.goal("model")
    page.says("reward model")
    page.set("roles.reward.model_name_or_path", "demo/reward")
    assert page.sent("roles.reward.model_name_or_path").endswith("/outputs/demo/reward")
    page.click("input[value=other]")
    page.set("reward.models", "org/judge")
    page.sends("reward.models", ["org/judge"])
    assert "roles.reward.model_name_or_path" not in page.settings

    page.goal("distil")
    page.says("teacher")
    page.set("roles.teacher.model_name_or_path", "/models/large")
    page.sends("roles.teacher.model_name_or_path", "/models/large")
    assert "reward.functions" not in page.settings


def test_a_judge_behind_an_address_with_questions_of_ones_own(page):
    page.visit("?goal=judge&model=org/name&data=demo/prompts")
    page.says("who judges")
    page.click("input[value=url]")
    page.set("reward.judge.url", "http://localhost:8000/v1")
    page.set("reward.judge.api_key_env", "sk-123")
    assert "not the key" in page.fault("reward.judge.api_key_env")
    assert "sk-123" not in page.run("return JSON.stringify(sessionStorage)")
    page.set("reward.judge.api_key_env", "KEY")
    page.click("input[value=own]")
    page.says("question for the judge")
    page.fill(".rubric-item input", "Is it 100% correct?")
    page.find("select[aria-label='Kind of question 1']").send_keys("yes")
    page.press("Add a question")
    page.focuses("input[aria-label='Question 2']")
    page.fill("input[aria-label='Question 2']", "Is it 100% correct? Really?")
    page.until(lambda: len(page.sent("reward.judge.rubric")["items"]) == 2)
    time.sleep(0.5)
    found = page.settings
    assert found["reward.judge.rubric"] == {"items": [
        {"name": "is_it_100_correct", "kind": "yes_no", "weight": 1, "question": "Is it 100% correct?"},
        {"name": "is_it_100_correct_2", "kind": "0-10", "weight": 1, "question": "Is it 100% correct? Really?"}]}
    assert (found["reward.judge.url"], found["reward.judge.api_key_env"]) == ("http://localhost:8000/v1", "KEY")
    assert "reward.judge.model" not in found


def test_three_stages_read_one_file_or_three(page, stub):
    page.visit("?goal=three_stages&model=org/name&data=pairs.jsonl")
    assert page.sent("data.sources") == [
        {"path": "pairs.jsonl", "stages": [stage]} for stage in ("sft", "reward", "ppo")]
    assert page.settings["data.split"] == [2, 4, 4]
    page.click("input[value=three]")
    for stage in ("sft", "reward", "ppo"):
        page.fill(entry(f"data.sources.{stage}"), f"pairs-{stage}.jsonl")
    page.says("Everything is there")
    assert {body["stage"] for body in stub.asked["data"]} == {"all", "sft", "reward", "ppo"}
    found = page.settings
    assert found["data.sources"] == [{"path": f"pairs-{s}.jsonl", "stages": [s]} for s in ("sft", "reward", "ppo")]
    assert found["data.split"] is None


def test_a_tiny_new_model_needs_no_name_and_is_trained_whole(page):
    page.visit("?goal=imitate&data=demo/demonstrations")
    page.click("input[value=new]")
    page.says("Everything is there")
    page.sends("model.preset", "demo")
    found = page.settings
    assert (found["model.lora.r"], found["train.learning_rate"]) == (0, 4e-3)  # the card would say 16
    assert "model.model_name_or_path" not in found


def test_what_was_found_in_the_data_is_told_and_a_misfit_stands_in_the_way(page, stub):
    page.visit("?goal=prefer&model=demo/sft&data=prompts.jsonl")
    page.says("do not fit")
    assert "prompt rows make no pair" in page.find(".data-found").text
    page.click("#start")
    page.focuses(entry("data.sources"))
    assert "jobs" not in stub.asked
    page.set("data.sources", "none.jsonl")
    page.until(lambda: "does not exist" in page.find(".data-found").text)
    page.set("data.sources", "pairs.jsonl")
    page.until(lambda: "✓" in page.find(".data-found").text)
    assert texts(page.browser, ".facts dd") == ["preference", "1,234", "prompt, chosen, rejected"]
    page.click(".data-found summary")
    assert json.loads(texts(page.browser, "pre.data-row")[0])["chosen"] == "<script>document.title = 'broken'</script>4"
    assert page.browser.title.startswith("New run")
    page.click("details.more summary")
    page.set("data.sources.data.name", "main")
    page.set("data.sources.data.columns", "prompt: question")
    page.until(lambda: page.sent("data.sources") == [
        {"path": "pairs.jsonl", "name": "main", "columns": {"prompt": "question"}}])


DROP = """
const moved = new DataTransfer();
moved.items.add(new File(["{}"], arguments[1]));
const event = new DragEvent("drop", {dataTransfer: moved, bubbles: true, cancelable: true});
document.querySelector(arguments[0]).dispatchEvent(event);
return event.defaultPrevented;
"""


def test_a_file_is_dropped_and_one_that_is_refused_is_told(page, stub):
    page.visit("?goal=prefer&model=demo/sft")
    page.until(lambda: page.find(".file-drop"))
    assert page.run(DROP, "h1", "beside.jsonl")  # the browser does not open it in place of the page
    assert page.run(DROP, ".file-drop", "pairs.jsonl")
    page.says("Everything is there")
    path = str(page.studio.studio.home / "data" / "pairs.jsonl")
    assert page.sent("data.sources") == [path]
    assert [f["name"] for f in stub.uploads] == ["pairs.jsonl"]
    page.until(lambda: path in [o.get_attribute("value") for o in page.all("#data-known option")])
    assert page.run(DROP, ".file-drop", "too.large.jsonl")
    page.until(lambda: "too.large.jsonl: the disk is full" in page.find(".file-drop .fault").text)
    assert page.settings["data.sources"] == [path]


def test_sources_are_looked_at_one_after_another(page, stub):
    stub.slow["data"] = 0.6
    page.visit("?goal=three_stages&model=org/name")
    page.click("input[value=three]")
    began = time.monotonic()
    for stage in ("sft", "reward", "ppo"):
        page.fill(entry(f"data.sources.{stage}"), f"pairs-{stage}.jsonl")
    page.until(lambda: len(page.all(".verdict.good")) == 3)
    assert time.monotonic() - began > 3 * 0.6
    assert len(stub.asked["data"]) == 3


def test_entries_survive_a_reload_and_another_page_until_started_over(page):
    page.ready()
    assert "?" not in page.browser.current_url  # a reload does not bring back what the link said
    page.set("model.lora.r", "8")
    page.set("model.model_name_or_path", "org/other")
    page.sends("model.lora.r", 8)
    for leave in (lambda: page.visit(), lambda: leave_and_return(page)):
        leave()
        page.until(lambda: page.find(entry("model.lora.r")).get_attribute("value") == "8")
        assert page.find(entry("model.model_name_or_path")).get_attribute("value") == "org/other"
        assert page.find("input[value=prefer]").is_selected()
    page.click("#start-over")
    page.browser.switch_to.alert.accept()
    page.says("Choose what")
    assert not page.find("input[value=prefer]").is_selected()


def leave_and_return(page) -> None:
    page.run("location.hash = '#/runs'")
    page.until(lambda: not page.all(".new-run"))
    page.run("location.hash = '#/new'")
    page.until(lambda: page.find(entry("model.lora.r")))
