"""The page of a new run in a real Chromium, over made-up answers: what is asked, and what is sent."""

from __future__ import annotations

import json
import time

import pytest

from hybrid_rlhf.studio.studio import Refused
from tests.factories.browser import ALL_IMPACTS, axe_faults, dialog, narrow, needs_axe, needs_browser, texts
from tests.factories.new_run_stub import entry

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


def test_every_goal_sends_the_settings_of_its_own_question(page):
    page.visit("?goal=function&model=org/name&data=demo/prompts")
    page.says("what a good answer is")
    page.click("#reward-numeric_match")
    column = "reward.options.numeric_match.column"
    note = page.find(entry(column, ".notice"))
    page.until(lambda: "no column answer; they have prompt, chosen, rejected" in note.text)
    page.set(column, "chosen")
    assert not note.is_displayed()
    page.set(column, "solution")
    page.set("reward.options.numeric_match.tolerance", "0.1")
    page.click(entry("reward.options.numeric_match.strict"))
    page.set("reward.functions", "pay.py:one, pay.py:two")
    page.click("#has-tools")
    page.fill("#tools", "builtin:calculator")
    page.sends("environment.tools", ["builtin:calculator"])  # typed last
    found = page.settings
    assert found["reward.functions"] == ["builtin:numeric_match", "pay.py:one", "pay.py:two"]
    assert found["reward.options"] == {"numeric_match": {"column": "solution", "tolerance": 0.1, "strict": True}}
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
    page.until(lambda: page.sent("reward.judge.rubric")["items"][1]["question"].endswith("Really?"))
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
    page.sends("data.sources", [{"path": f"pairs-{s}.jsonl", "stages": [s]} for s in ("sft", "reward", "ppo")])
    assert page.settings["data.split"] is None


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
    page.until(lambda: page.sent("data.sources") == [{"path": "pairs.jsonl", "name": "main"}])


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
    dialog(page.browser).accept()
    page.says("Choose what")
    assert not page.find("input[value=prefer]").is_selected()


def leave_and_return(page) -> None:
    page.run("location.hash = '#/runs'")
    page.until(lambda: not page.all(".new-run"))
    page.run("location.hash = '#/new'")
    page.until(lambda: page.find(entry("model.lora.r")))


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


def test_options_set_for_another_goal_count_on_and_that_is_said(page, stub):
    page.ready()
    page.set("train.learning_rate", "0.5")
    page.goal("imitate")
    page.until(lambda: stub.last("settings")["stage"] == "sft" and page.settings["train.learning_rate"] == 0.5)
    said = "You set these for “Learn from preferences”, and they count here too: train.learning_rate 0.5."
    notice, = [node for node in page.all(".notice") if said in node.text]
    notice.find_element("css selector", "button").click()
    page.until(lambda: "train.learning_rate" not in page.settings)
    assert not notice.is_displayed()


def test_an_option_left_empty_says_the_value_that_the_run_takes(page, stub):
    stub.left_empty = {"dpo.beta": "0.05"}
    page.ready()
    page.until(lambda: "Left empty: 0.05." in page.find(entry("dpo.beta", "p.help:not([id])")).text)


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
    page.set("reward.options.length_penalty.max_tokens", "many")
    page.until(lambda: "needs max_tokens" in page.fault("reward.options.length_penalty.max_tokens"))
    assert page.settings["reward.options"]["length_penalty"]["max_tokens"] == "many"  # the launcher says what is wrong


def test_a_function_is_written_tried_on_the_first_rows_and_kept(page, stub):
    page.visit("?goal=function&model=org/name&data=pairs.jsonl")
    page.until(lambda: page.find("#code-template"))
    page.run("document.querySelector('#code').closest('details').open = true")
    assert "#### *-?" in page.find("#code").get_attribute("value")
    page.click("#code-template option:nth-child(3)")
    assert "50 words" in page.find("#code").get_attribute("value")
    page.fill("#code-answer", "<b>four</b>")
    page.press("Try on the first rows")
    page.until(lambda: "type the token" in page.find("details.more .fault[class='fault']:not([hidden]):not([id])").text)
    page.fill("#code-token", page.studio.token)
    page.press("Try on the first rows")
    page.until(lambda: texts(page.browser, "#page td.said") == ["2 + 2?", "<b>four</b>"])
    assert texts(page.browser, "#page details.more td.number") == ["0.5"]
    tried = stub.last("reward/try")
    assert tried["source"] == {"path": "pairs.jsonl"} and "def reward(prompts" in tried["code"]
    page.set("reward.functions", "pay.py:one")
    page.press("Keep and use it")
    page.until(lambda: "reward/keep" in stub.asked)
    kept = f"/kept/{len(stub.last('reward/keep')['code'])}.py:reward"
    page.sends("reward.functions", ["pay.py:one", kept])
    assert page.find(entry("reward.functions")).get_attribute("value") == f"pay.py:one, {kept}"


def test_a_function_that_was_written_is_not_lost_by_a_reload_or_a_template(page):
    page.visit("?goal=function")
    page.until(lambda: page.find("#code"))
    page.run("document.querySelector('#code').closest('details').open = true")
    page.fill("#code", "def reward(completions): return [1]")
    page.visit()
    page.until(lambda: page.find("#code").get_attribute("value") == "def reward(completions): return [1]")
    page.run("document.querySelector('#code').closest('details').open = true")
    page.click("#code-template option:nth-child(3)")
    dialog(page.browser).dismiss()
    assert page.find("#code").get_attribute("value") == "def reward(completions): return [1]"
    page.click("#code-template option:nth-child(2)")
    dialog(page.browser).accept()
    page.until(lambda: "last number" in page.find("#code").get_attribute("value"))


def test_odd_columns_are_chosen_beside_the_first_row_and_stay_with_their_file(page, stub):
    page.visit("?goal=imitate&model=org/name&data=odd.jsonl")
    page.until(lambda: "Missing: the question, the answer." in page.find(".data-found").text)
    assert texts(page.browser, ".mapping td") == ["2 + 2?", "<b>4</b>"]
    page.click("#column-data-prompt option[value=riddle]")
    page.until(lambda: stub.last("data").get("columns") == {"prompt": "riddle"})
    page.until(lambda: page.browser.switch_to.active_element.get_attribute("id") == "column-data-prompt")
    page.click("#column-data-completion option[value=solution]")
    page.until(lambda: "✓" in page.find(".data-found").text)
    odd = {"path": "odd.jsonl", "columns": {"prompt": "riddle", "completion": "solution"}}
    page.sends("data.sources", [odd])
    page.set("data.sources", "pairs.jsonl")
    page.sends("data.sources", ["pairs.jsonl"])
    page.set("data.sources", "odd.jsonl")
    page.sends("data.sources", [odd])


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


def test_options_that_cannot_be_loaded_are_asked_for_again(page, stub):
    stub.refusals["get options"] = Refused(503, "the process that looks ended")
    page.visit("?goal=prefer&model=demo/sft&data=pairs.jsonl")
    page.until(lambda: "the process that looks ended" in page.find("#page").text)
    del stub.refusals["get options"]
    page.press("Try again")
    page.says("Everything is there")


def test_the_rows_are_shown_as_the_model_sees_them_trained_ones_marked(page, stub):
    page.ready()
    page.click("#ask-preview")
    page.until(lambda: page.find(".example"))
    assert stub.last("preview") == {"stage": "dpo", "card": "24gb", "settings": page.settings | {
        "model.lora.r": 16, "model.load_in_4bit": True}}
    assert texts(page.browser, ".example .trained") == ["4<|end|>"]
    assert texts(page.browser, ".example .said span") == ["<b>user</b>: What is 2 + 2?\n"]
    mark = page.run("return getComputedStyle(document.querySelector('.example .trained'), '::before').content")
    assert mark == '"⟦"'
    assert "62: longer than data.max_length" in page.find(".checks").text
    assert "0: no prompt" not in page.find(".checks").text
    page.set("model.lora.r", "8")
    page.until(lambda: "have changed since" in page.find(".checks").text)


def test_the_plan_is_bars_and_its_advice_can_be_taken(page, stub):
    page.ready()
    page.click("#ask-plan")
    page.until(lambda: page.find(".checks .bars"))
    assert stub.last("plan")["memory"] is None  # this machine's own
    text = page.find(".checks").text
    assert "✗ short by 7 GiB" in text and "31.0 GiB (too much)" in text and "24.0 GiB" in text
    widths = [bar.size["width"] for bar in page.all(".checks .bar")]
    assert abs(widths[0] / widths[1] - 9 / 31) < 0.02
    page.click("#card option[value='80gb']")
    page.until(lambda: stub.last("settings")["card"] == "80gb" and "have changed since" in page.find(".checks").text)
    page.click("#ask-plan")
    page.until(lambda: stub.last("plan")["memory"] == 80 * 2**30)
    page.click(".notice li button")
    assert page.find(entry("model.load_in_4bit")).is_selected()
    page.until(lambda: page.settings.get("model.load_in_4bit") is True)
    page.focuses(entry("model.load_in_4bit"))


def test_the_signal_check_is_followed_to_its_verdict_and_over_a_reload(page, stub):
    page.visit("?goal=function&model=demo/sft&data=demo/prompts")
    page.click("#reward-exact_match")
    page.says("Everything is there")
    stub.output = "8 responses to each\n"
    page.click("#ask-signal")
    page.until(lambda: "The check: running" in page.find(".checks").text)
    assert stub.last("jobs")["kind"] == "signal"
    page.until(lambda: page.find("#start").text == "Add to the queue")
    page.until(lambda: "8 responses to each\n" in texts(page.browser, ".checks details pre"))
    page.visit()
    page.until(lambda: "The check: running" in page.find(".checks").text)
    page.run("document.getElementById('ask-signal').scrollIntoView()")  # what nobody sees waits
    stub.output += "verdict: <b>nothing</b> to learn\n"
    page.studio.studio.news.publish("job", {"id": "job1"})
    page.until(lambda: "<b>nothing</b> to learn" in texts(page.browser, ".checks .verdict"))
    stub.change("job1", state="done")
    page.until(lambda: "The check: done" in page.find(".checks").text)
    page.until(lambda: page.find("#start").text == "Start training")


def test_a_name_that_cannot_be_is_told_at_once(page, stub):
    page.ready()
    for name in ("taken", "a b", ".hidden", "../x", "a//b", "-x"):
        page.fill("#run-name", name)
        assert page.find(entry("run", ".fault")).is_displayed(), name
        page.click("#start")
        page.focuses("#run-name")
        assert "jobs" not in stub.asked, name
    page.fill("#run-name", "mine/first")
    assert not page.find(entry("run", ".fault")).is_displayed()


def test_the_yaml_can_be_copied_and_downloaded_and_the_command_stands_there(page):
    page.ready()
    page.until(lambda: "hybrid-rlhf --stage dpo --config pairs-dpo.yaml" in page.find("pre.same-command").text)
    page.run("navigator.clipboard.writeText = async (text) => (window.copied = text);"
                        "URL.createObjectURL = (blob) => ((window.saved = blob), 'blob:x');"
                        "HTMLAnchorElement.prototype.click = function () {window.savedAs = [this.download, this.href]}")
    page.click(".run-panel .buttons:not(:has(#start)) button")
    assert page.until(lambda: page.run("return window.copied")) == page.find("pre.same-yaml").get_attribute(
        "textContent")
    page.click("#download")
    assert page.run("return window.savedAs") == ["pairs-dpo.yaml", "blob:x"]
    text = page.browser.execute_async_script("window.saved.text().then(arguments[0])")
    assert text == page.find("pre.same-yaml").get_attribute("textContent")


def test_without_a_mouse_everything_is_reached_and_the_run_is_started(page, stub):
    from selenium.webdriver.common.keys import Keys

    page.visit()
    page.run("document.getElementById('page').focus()")
    page.keys(Keys.TAB, Keys.TAB, Keys.TAB, Keys.SPACE)  # two buttons, then the goals
    page.until(lambda: page.find("#step-4"))
    page.keys(Keys.ARROW_DOWN)
    page.until(lambda: stub.last("settings")["stage"] == "dpo")
    assert page.find("input[value=prefer]").is_selected()
    page.tab_to(entry("model.model_name_or_path"))
    page.keys("org/name")
    page.tab_to(entry("data.sources"))
    page.keys("pairs.jsonl")
    page.says("Everything is there")
    page.tab_to("#file-data")
    page.tab_to("details.all > summary")
    page.keys(Keys.ENTER)
    page.tab_to("#option-search")
    page.tab_to("#ask-preview")
    page.keys(Keys.ENTER)
    page.until(lambda: page.find(".example"))
    page.focuses("#ask-preview")
    page.tab_to("#start")
    page.keys(Keys.ENTER)
    page.until(lambda: "#/run/pairs-dpo" in page.browser.current_url)


def test_a_link_from_marks_chooses_the_method_and_what_is_entered_is_text(page, stub):
    for stage in ("kto", "dpo"):
        page.visit(f"?goal=prefer&stage={stage}&data=marks.jsonl")
        page.until(lambda stage=stage: stub.last("settings")["stage"] == stage)
        page.run("sessionStorage.clear()")
    page.visit("?goal=prefer")
    for text in ("Rücken an: pairs.jsonl", "<img src=x onerror=document.title='broken'>"):
        page.set("data.sources", text)
        page.sends("data.sources", [text])
        page.until(lambda text=text: text in page.find("pre.same-yaml").text)
    assert not page.all("main img")


@needs_axe
@pytest.mark.timeout(600)
def test_every_goal_stays_within_a_narrow_screen_and_has_no_axe_findings(page, stub):
    def looks_right() -> None:
        for scheme in ("light", "dark"):
            assert axe_faults(page.browser, scheme, ALL_IMPACTS) == []
        for width in (360, 1100):
            with narrow(page.browser, width):
                assert page.run("return document.documentElement.scrollWidth") <= width

    page.visit()
    looks_right()
    stub.refusal = {"option": "model.lora.r", "text": "no"}
    for query in ("?goal=judge&model=org/name", "?goal=three_stages", "?goal=function&model=a/b&data=prompts.jsonl"):
        page.visit(query)
        page.open_everything()
        looks_right()
    stub.refusal = None
    page.visit("?goal=prefer&model=demo/sft&data=pairs.jsonl")
    page.says("Everything is there")
    page.open_everything()
    page.set("model.lora.r", "8")
    looks_right()
