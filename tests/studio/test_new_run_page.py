"""The page of a new run in a real Chromium, over made-up answers: what is asked, what is sent, and what one is told."""

from __future__ import annotations

import json
import time

import pytest

from hybrid_rlhf.studio.studio import Refused
from tests.factories import studio_server
from tests.factories.browser import axe_faults, chromium, find, needs_axe, needs_browser, texts, until
from tests.factories.new_run_stub import Stub, run_row
from tests.factories.studio_server import running_studio

pytestmark = needs_browser
ALL_IMPACTS = ("minor", "moderate", "serious", "critical")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture
def stub():
    return Stub(runs=[run_row("demo/sft", "sft"), run_row("demo/reward", "reward"), run_row("taken", "dpo")])


@pytest.fixture
def studio(stub, tmp_path, monkeypatch):
    monkeypatch.setattr(studio_server, "open_parts", stub.open_parts)
    with running_studio(tmp_path / "outputs") as found:
        yield found


@pytest.fixture
def page(browser, studio):
    browser.get(studio.url)
    browser.execute_script("sessionStorage.clear()")
    yield browser
    browser.get("about:blank")  # its connection for news ends, and the studio need not wait
    faults = [e for e in browser.get_log("browser") if "api/" not in e["message"] and e["level"] == "SEVERE"]
    assert not faults


def visit(page, studio, query: str = "") -> None:
    """The page of a new run, loaded afresh."""
    page.get("about:blank")
    page.get(f"{studio.base}/#/new{query}")
    until(page, lambda: find(page, "fieldset.goal-cards"))


def goal(page, name: str) -> None:
    find(page, f"input[value={name}]").click()
    until(page, lambda: find(page, "#step-4"))


def fill(page, selector: str, text: str) -> None:
    found = find(page, selector)
    found.clear()
    found.send_keys(text)


def field(option: str, tag: str = "input") -> str:
    return f"[data-option='{option}'] {tag}"


def sent(page, stub, option: str):
    """Until the studio was asked about settings that have `option`; its value."""
    until(page, lambda: option in stub.last("settings")["settings"])
    return stub.last("settings")["settings"][option]


def next_line(page) -> str:
    return find(page, ".next-line").text


def ready(page, studio, query: str = "?goal=prefer&model=demo/sft&data=pairs.jsonl") -> None:
    visit(page, studio, query)
    until(page, lambda: "Everything is there" in next_line(page))


def has_focus(page, selector: str) -> bool:
    return page.execute_script("return document.activeElement.matches(arguments[0])", selector)


def test_a_beginner_is_led_from_the_goal_to_a_run(page, studio, stub, tmp_path):
    visit(page, studio)
    assert "Choose what the model is to learn from" in next_line(page)
    assert not find(page, "#start").is_displayed()
    goal(page, "prefer")
    until(page, lambda: "name the model" in next_line(page))
    fill(page, field("model.model_name_or_path"), "demo/sft")
    until(page, lambda: "give the data" in next_line(page))
    rows = tmp_path / "my pairs.jsonl"
    rows.write_text("{}\n")
    find(page, "#file-data").send_keys(str(rows))
    until(page, lambda: "Everything is there" in next_line(page))
    stored = studio.studio.home / "data" / "my pairs.jsonl"
    assert stored.read_text() == "{}\n"
    assert find(page, "#run-name").get_attribute("value") == "my-pairs-dpo"
    find(page, "#start").click()
    until(page, lambda: "#/run/my-pairs-dpo" in page.current_url)
    assert stub.last("jobs") == {
        "kind": "train", "stage": "dpo", "run": "my-pairs-dpo", "settings": {
            "model.lora.r": 16, "model.load_in_4bit": True, "data.sources": [str(stored)],
            "model.model_name_or_path": f"{studio.studio.outputs}/demo/sft"}}


def test_every_goal_sends_the_settings_of_its_own_question(page, studio, stub):
    visit(page, studio, "?goal=function&model=org/name&data=demo/prompts")
    until(page, lambda: "what a good answer is" in next_line(page))
    find(page, "#reward-numeric_match").click()
    fill(page, field("reward.options.numeric_match"), "solution")
    fill(page, field("reward.functions"), "pay.py:one, pay.py:two")
    find(page, "#has-tools").click()
    fill(page, "#tools", "builtin:calculator")
    until(page, lambda: "environment.tools" in stub.last("settings")["settings"])
    time.sleep(0.5)
    found = stub.last("settings")["settings"]
    assert found["reward.functions"] == ["builtin:numeric_match", "pay.py:one", "pay.py:two"]
    assert found["reward.options"] == {"numeric_match": {"column": "solution"}}
    assert found["environment.tools"] == ["builtin:calculator"]
    assert (found["model.model_name_or_path"], found["data.sources"]) == ("org/name", ["demo/prompts"])

    goal(page, "model")
    until(page, lambda: "reward model" in next_line(page))
    fill(page, field("roles.reward.model_name_or_path"), "demo/reward")
    assert sent(page, stub, "roles.reward.model_name_or_path").endswith("/outputs/demo/reward")
    find(page, "input[value=other]").click()
    fill(page, field("reward.models"), "org/judge")
    until(page, lambda: stub.last("settings")["settings"].get("reward.models") == ["org/judge"])
    assert "roles.reward.model_name_or_path" not in stub.last("settings")["settings"]

    goal(page, "distil")
    until(page, lambda: "teacher" in next_line(page))
    fill(page, field("roles.teacher.model_name_or_path"), "/models/large")
    until(page, lambda: sent(page, stub, "roles.teacher.model_name_or_path") == "/models/large")
    assert "reward.functions" not in stub.last("settings")["settings"]


def test_a_judge_behind_an_address_with_questions_of_ones_own(page, studio, stub):
    visit(page, studio, "?goal=judge&model=org/name&data=demo/prompts")
    until(page, lambda: "who judges" in next_line(page))
    until(page, lambda: find(page, "input[value=url]")).click()
    fill(page, field("reward.judge.url"), "http://localhost:8000/v1")
    fill(page, field("reward.judge.api_key_env"), "sk-123")
    assert "not the key" in find(page, field("reward.judge.api_key_env", ".fault")).text
    assert "sk-123" not in page.execute_script("return JSON.stringify(sessionStorage)")
    fill(page, field("reward.judge.api_key_env"), "KEY")
    find(page, "input[value=own]").click()
    until(page, lambda: "question for the judge" in next_line(page))
    fill(page, ".rubric-item input", "Is it 100% correct?")
    find(page, "select[aria-label='Kind of question 1']").send_keys("yes")
    page.find_elements("css selector", "button")
    next(b for b in page.find_elements("css selector", "button") if b.text == "Add a question").click()
    assert has_focus(page, "input[aria-label='Question 2']")
    fill(page, "input[aria-label='Question 2']", "Is it 100% correct? Really?")
    until(page, lambda: len(sent(page, stub, "reward.judge.rubric")["items"]) == 2)
    time.sleep(0.5)
    found = stub.last("settings")["settings"]
    assert found["reward.judge.rubric"] == {"items": [
        {"name": "is_it_100_correct", "kind": "yes_no", "weight": 1, "question": "Is it 100% correct?"},
        {"name": "is_it_100_correct_2", "kind": "0-10", "weight": 1, "question": "Is it 100% correct? Really?"}]}
    assert (found["reward.judge.url"], found["reward.judge.api_key_env"]) == ("http://localhost:8000/v1", "KEY")
    assert "reward.judge.model" not in found


def test_three_stages_read_one_file_or_three(page, studio, stub):
    visit(page, studio, "?goal=three_stages&model=org/name&data=pairs.jsonl")
    assert sent(page, stub, "data.sources") == [
        {"path": "pairs.jsonl", "stages": [stage]} for stage in ("sft", "reward", "ppo")]
    assert stub.last("settings")["settings"]["data.split"] == [2, 4, 4]
    until(page, lambda: find(page, "input[value=three]")).click()
    for stage in ("sft", "reward", "ppo"):
        fill(page, field(f"data.sources.{stage}"), f"pairs-{stage}.jsonl")
    until(page, lambda: "Everything is there" in next_line(page))
    assert {body["stage"] for body in stub.asked["data"]} == {"all", "sft", "reward", "ppo"}
    found = stub.last("settings")["settings"]
    assert found["data.sources"] == [{"path": f"pairs-{s}.jsonl", "stages": [s]} for s in ("sft", "reward", "ppo")]
    assert found["data.split"] is None


def test_what_was_found_in_the_data_is_told_and_a_misfit_stands_in_the_way(page, studio, stub):
    visit(page, studio, "?goal=prefer&model=demo/sft&data=prompts.jsonl")
    until(page, lambda: "do not fit" in next_line(page))
    assert "prompt rows make no pair" in find(page, ".data-found").text
    find(page, "#start").click()
    assert has_focus(page, field("data.sources"))
    assert "jobs" not in stub.asked
    fill(page, field("data.sources"), "none.jsonl")
    until(page, lambda: "does not exist" in find(page, ".data-found").text)
    fill(page, field("data.sources"), "pairs.jsonl")
    until(page, lambda: "✓" in find(page, ".data-found").text)
    assert texts(page, ".facts dd") == ["preference", "1,234", "prompt, chosen, rejected"]
    find(page, ".data-found summary").click()
    assert json.loads(texts(page, "pre.data-row")[0])["chosen"] == "<script>document.title = 'broken'</script>4"
    assert page.title.startswith("New run")
    find(page, "details.more summary").click()
    fill(page, field("data.sources.data.name"), "main")
    fill(page, field("data.sources.data.columns"), "prompt: question")
    until(page, lambda: sent(page, stub, "data.sources") == [
        {"path": "pairs.jsonl", "name": "main", "columns": {"prompt": "question"}}])


DROP = """
const moved = new DataTransfer();
moved.items.add(new File(["{}"], arguments[1]));
const event = new DragEvent("drop", {dataTransfer: moved, bubbles: true, cancelable: true});
document.querySelector(arguments[0]).dispatchEvent(event);
return event.defaultPrevented;
"""


def test_a_file_is_dropped_and_one_that_is_refused_is_told(page, studio, stub):
    visit(page, studio, "?goal=prefer&model=demo/sft")
    until(page, lambda: find(page, ".file-drop"))
    assert page.execute_script(DROP, "h1", "beside.jsonl")  # the browser does not open it in place of the page
    assert page.execute_script(DROP, ".file-drop", "pairs.jsonl")
    until(page, lambda: "Everything is there" in next_line(page))
    path = str(studio.studio.home / "data" / "pairs.jsonl")
    assert sent(page, stub, "data.sources") == [path]
    assert [f["name"] for f in stub.uploads] == ["pairs.jsonl"]
    until(page, lambda: path in page.execute_script("return [...document.getElementById('data-known').options].map((o) => o.value)"))
    assert page.execute_script(DROP, ".file-drop", "too.large.jsonl")
    until(page, lambda: "too.large.jsonl: the disk is full" in find(page, ".file-drop .fault").text)
    assert stub.last("settings")["settings"]["data.sources"] == [path]


@pytest.mark.parametrize("text", ["Rücken an: pairs.jsonl", "<img src=x onerror=document.title='broken'>"])
def test_what_is_entered_is_text(page, studio, stub, text):
    visit(page, studio, "?goal=prefer")
    until(page, lambda: find(page, field("data.sources")))
    fill(page, field("data.sources"), text)
    assert sent(page, stub, "data.sources") == [text]
    until(page, lambda: text in find(page, "pre.same-yaml").text)
    assert not page.find_elements("css selector", "main img")


def test_options_follow_the_card_and_a_change_has_a_way_back(page, studio, stub):
    ready(page, studio)
    rank = field("model.lora.r")
    until(page, lambda: find(page, rank).get_attribute("value") == "16")
    assert "the default is 0" in find(page, field("model.lora.r", ".mark")).text
    fill(page, rank, "64")
    until(page, lambda: stub.last("settings")["settings"].get("model.lora.r") == 64)
    mark = find(page, field("model.lora.r", ".mark"))
    assert "Changed by you" in mark.text
    mark.find_element("css selector", "button").click()
    assert find(page, rank).get_attribute("value") == "16"
    assert has_focus(page, rank)
    until(page, lambda: "model.lora.r" not in stub.last("settings")["settings"])
    find(page, "#card option[value=cpu]").click()
    until(page, lambda: find(page, rank).get_attribute("value") == "0")
    assert stub.last("settings")["card"] == "cpu"


def test_all_other_options_are_found_by_searching_and_say_what_was_changed(page, studio, stub):
    ready(page, studio)
    assert not find(page, field("train.warmup_ratio")).is_displayed()
    find(page, "details.all > summary").click()
    fill(page, "#option-search", "rises rate")
    assert find(page, field("train.warmup_ratio")).is_displayed()
    assert not find(page, field("engine.offload")).is_displayed()
    assert "1 of 14 options" in find(page, "details.all").text
    for option, typed, value in (("train.warmup_ratio", "0.1", 0.1), ("engine.offload", "optimizer, parameters",
                                 ["optimizer", "parameters"]), ("train.adam_epsilon", "1e-6", 1e-6),
                                 ("data.split", "[1, 2, 3]", [1, 2, 3]), ("model.freeze", '["a,b"]', ["a,b"]),
                                 ("engine.micro_batch_tokens", "many", "many")):
        fill(page, "#option-search", option.split(".")[1])
        fill(page, field(option), typed)
        until(page, lambda option=option, value=value: stub.last("settings")["settings"].get(option) == value)
    assert "(6 changed)" in find(page, "details.all > summary").text
    fill(page, "#option-search", "preset")
    find(page, field("model.preset", "option[value=tiny]")).click()
    assert sent(page, stub, "model.preset") == "tiny"
    find(page, field("model.preset", "option[value='']")).click()
    until(page, lambda: stub.last("settings")["settings"].get("model.preset") is None)


def test_incomplete_json_is_told_at_once_and_never_sent(page, studio, stub):
    ready(page, studio)
    find(page, "details.all > summary").click()
    fill(page, "#option-search", "reward.options")
    fill(page, field("reward.options", "textarea"), '{"a": ')
    assert "not complete JSON" in find(page, field("reward.options", ".fault")).text
    find(page, "#start").click()
    assert has_focus(page, field("reward.options", "textarea"))
    fill(page, field("reward.options", "textarea"), '{"a": {"b": 1}}')
    assert sent(page, stub, "reward.options") == {"a": {"b": 1}}
    assert all(body["settings"].get("reward.options", {}) in ({}, {"a": {"b": 1}}) for body in stub.asked["settings"])
    assert not find(page, field("reward.options", ".fault")).is_displayed()


def test_a_refusal_stands_beside_its_option_and_the_focus_goes_there(page, studio, stub):
    ready(page, studio)
    stub.refusal = {"option": "train.warmup_ratio", "text": "train.warmup_ratio is 7; it must be between 0 and 1"}
    fill(page, field("model.lora.r"), "8")
    until(page, lambda: "between 0 and 1" in next_line(page))
    assert not has_focus(page, field("train.warmup_ratio"))  # nobody is taken away from where they type
    for press in ("#start", "#ask-preview", "#ask-plan"):
        find(page, press).click()
        until(page, lambda: has_focus(page, field("train.warmup_ratio")))
        said = find(page, field("train.warmup_ratio", ".fault"))
        assert said.is_displayed() and "between 0 and 1" in said.text
        assert find(page, field("train.warmup_ratio")).get_attribute("aria-invalid") == "true"
    stub.refusal = {"option": None, "text": "two things do not go together"}
    fill(page, field("model.lora.r"), "9")
    until(page, lambda: "do not go together" in find(page, "#settings-fault").text)
    assert not find(page, field("train.warmup_ratio", ".fault")).is_displayed()
    stub.refusal = None
    stub.refusals["jobs"] = Refused(409, "there is a run of that name", None)
    fill(page, field("model.lora.r"), "10")
    until(page, lambda: "Everything is there" in next_line(page))
    find(page, "#start").click()
    until(page, lambda: has_focus(page, "#run-name"))
    assert "of that name" in find(page, field("run", ".fault")).text


def test_a_refusal_of_a_ready_made_function_stands_beside_its_settings(page, studio, stub):
    visit(page, studio, "?goal=function&model=org/name")
    until(page, lambda: find(page, "#reward-length_penalty"))
    next(b for b in page.find_elements("css selector", "button") if "demo data" in b.text).click()
    assert sent(page, stub, "reward.functions") == ["builtin:demo_correct"]  # what can score the answers to it
    assert find(page, "#reward-demo_correct").is_selected()
    find(page, "#reward-length_penalty").click()
    until(page, lambda: sent(page, stub, "reward.options") == {"length_penalty": {"max_tokens": 256, "buffer": 64}})
    stub.refusal = {"option": "reward.functions", "text": "reward.functions: builtin:length_penalty needs max_tokens"}
    fill(page, field("reward.options.length_penalty"), "{}")
    until(page, lambda: "needs max_tokens" in find(page, field("reward.options.length_penalty", ".fault")).text)
    fill(page, field("reward.options.length_penalty"), '{"max_tokens"')
    until(page, lambda: "Not complete JSON" in find(page, field("reward.options.length_penalty", ".fault")).text)


def test_nothing_is_called_wrong_that_was_not_given_yet(page, studio, stub):
    stub.refusal = {"option": "model.model_name_or_path", "text": "no model is named"}
    visit(page, studio, "?goal=prefer")
    until(page, lambda: "name the model" in next_line(page) and find(page, "pre.same-yaml").text)
    assert not [f for f in page.find_elements("css selector", ".fault") if f.is_displayed()]
    find(page, "#start").click()
    until(page, lambda: has_focus(page, field("model.model_name_or_path")))


def test_the_rows_are_shown_as_the_model_sees_them_trained_ones_marked(page, studio, stub):
    ready(page, studio)
    find(page, "#ask-preview").click()
    until(page, lambda: find(page, ".example"))
    assert stub.last("preview") == {"stage": "dpo", "card": "24gb", "settings": stub.last("settings")["settings"] | {
        "model.lora.r": 16, "model.load_in_4bit": True}}
    assert texts(page, ".example .trained") == ["4<|end|>"]
    assert texts(page, ".example .said span") == ["<b>user</b>: What is 2 + 2?\n"]
    mark = page.execute_script("return getComputedStyle(document.querySelector('.example .trained'), '::before').content")
    assert mark == '"⟦"'
    assert "62: longer than data.max_length" in find(page, ".checks").text
    assert "0: no prompt" not in find(page, ".checks").text
    fill(page, field("model.lora.r"), "8")
    until(page, lambda: "have changed since" in find(page, ".checks").text)


def test_the_plan_is_bars_and_its_advice_can_be_taken(page, studio, stub):
    ready(page, studio)
    find(page, "#ask-plan").click()
    until(page, lambda: find(page, ".plan-bars"))
    assert stub.last("plan")["memory"] is None  # this machine's own
    text = find(page, ".checks").text
    assert "✗ short by 7 GiB" in text and "31.0 GiB (too much)" in text and "24.0 GiB" in text
    widths = [bar.size["width"] for bar in page.find_elements("css selector", ".plan-filled")]
    assert abs(widths[0] / widths[1] - 9 / 31) < 0.02
    find(page, "#card option[value='80gb']").click()
    until(page, lambda: stub.last("settings")["card"] == "80gb" and "have changed since" in find(page, ".checks").text)
    find(page, "#ask-plan").click()
    until(page, lambda: stub.last("plan")["memory"] == 80 * 2**30)
    until(page, lambda: find(page, ".notice li button")).click()
    assert find(page, field("model.load_in_4bit")).is_selected()
    until(page, lambda: stub.last("settings")["settings"].get("model.load_in_4bit") is True)
    assert has_focus(page, field("model.load_in_4bit"))


def test_a_failed_look_is_told_in_the_servers_words(page, studio, stub):
    ready(page, studio)
    stub.refusals["plan"] = Refused(400, "the tokenizer of demo/sft is missing", "model.model_name_or_path")
    find(page, "#ask-plan").click()
    until(page, lambda: has_focus(page, field("model.model_name_or_path")))
    assert "tokenizer" in find(page, field("model.model_name_or_path", ".fault")).text
    assert "tokenizer" in find(page, ".checks .fault").text


def test_the_signal_check_is_followed_to_its_verdict_and_over_a_reload(page, studio, stub):
    visit(page, studio, "?goal=function&model=demo/sft&data=demo/prompts")
    until(page, lambda: find(page, "#reward-exact_match")).click()
    until(page, lambda: "Everything is there" in next_line(page))
    stub.output = "8 responses to each\n"
    find(page, "#ask-signal").click()
    until(page, lambda: "The check: running" in find(page, ".checks").text)
    assert stub.last("jobs")["kind"] == "signal"
    until(page, lambda: find(page, "#start").text == "Add to the queue")
    until(page, lambda: "8 responses to each\n" in texts(page, ".checks details pre"))
    visit(page, studio)
    until(page, lambda: "The check: running" in find(page, ".checks").text)
    page.execute_script("document.getElementById('ask-signal').scrollIntoView()")  # what nobody sees waits
    stub.output += "verdict: <b>nothing</b> to learn\n"
    studio.studio.news.publish("job", {"id": "job1"})
    until(page, lambda: "<b>nothing</b> to learn" in texts(page, ".checks .verdict"))
    stub.change("job1", state="done")
    until(page, lambda: "The check: done" in find(page, ".checks").text)
    assert find(page, "#start").text == "Start training"


def test_a_job_that_runs_makes_it_a_queue(page, studio, stub):
    stub.jobs.append({"id": "job1", "kind": "train", "title": "t", "run": "other", "state": "running", "place": None})
    ready(page, studio)
    until(page, lambda: find(page, "#start").text == "Add to the queue")
    assert "other is running; this run starts after it" in find(page, ".run-panel").text
    stub.change("job1", state="done")
    until(page, lambda: find(page, "#start").text == "Start training")


@pytest.mark.parametrize("name", ["taken", "a b", ".hidden", "../x", "a//b", "-x"])
def test_a_name_that_cannot_be_is_told_at_once(page, studio, stub, name):
    ready(page, studio)
    fill(page, "#run-name", name)
    assert find(page, field("run", ".fault")).is_displayed()
    find(page, "#start").click()
    until(page, lambda: has_focus(page, "#run-name"))
    assert "jobs" not in stub.asked
    fill(page, "#run-name", "mine/first")
    assert not find(page, field("run", ".fault")).is_displayed()


def test_what_was_entered_survives_a_reload_and_another_page_until_it_is_started_over(page, studio, stub):
    ready(page, studio)
    assert "?" not in page.current_url  # a reload does not bring back what the link said
    fill(page, field("model.lora.r"), "8")
    fill(page, field("model.model_name_or_path"), "org/other")
    until(page, lambda: stub.last("settings")["settings"].get("model.lora.r") == 8)
    for leave in (lambda: visit(page, studio), lambda: leave_and_return(page)):
        leave()
        until(page, lambda: find(page, field("model.lora.r")).get_attribute("value") == "8")
        assert find(page, field("model.model_name_or_path")).get_attribute("value") == "org/other"
        assert find(page, "input[value=prefer]").is_selected()
    find(page, "#start-over").click()
    page.switch_to.alert.accept()
    until(page, lambda: "Choose what" in next_line(page))
    assert not find(page, "input[value=prefer]").is_selected()


def leave_and_return(page) -> None:
    page.execute_script("location.hash = '#/runs'")
    until(page, lambda: not page.find_elements("css selector", ".new-run"))
    page.execute_script("location.hash = '#/new'")
    until(page, lambda: find(page, field("model.lora.r")))


def test_an_example_that_needs_nothing_is_filled_in(page, studio, stub):
    visit(page, studio)
    find(page, "#try-out").click()
    until(page, lambda: "Everything is there" in next_line(page))
    found = stub.last("settings")
    assert (found["stage"], found["settings"]["model.preset"]) == ("sft", "demo")
    assert found["settings"]["data.sources"] == ["demo/demonstrations"]


def test_questions_that_another_tab_replaced_are_asked_again(page, studio, stub):
    stub.once |= {name: [Refused(409, "replaced") for _ in range(2)] for name in ("get options", "settings", "data")}
    ready(page, studio)
    stub.once["plan"] = [Refused(409, "replaced")]
    find(page, "#ask-plan").click()
    until(page, lambda: find(page, ".plan-bars"))


def test_sources_are_looked_at_one_after_another(page, studio, stub):
    stub.slow["data"] = 0.6
    visit(page, studio, "?goal=three_stages&model=org/name")
    until(page, lambda: find(page, "input[value=three]")).click()
    began = time.monotonic()
    for stage in ("sft", "reward", "ppo"):
        fill(page, field(f"data.sources.{stage}"), f"pairs-{stage}.jsonl")
    until(page, lambda: len(page.find_elements("css selector", ".verdict.good")) == 3)
    assert time.monotonic() - began > 3 * 0.6
    assert len(stub.asked["data"]) == 3


def test_options_that_cannot_be_loaded_are_asked_for_again(page, studio, stub):
    stub.refusals["get options"] = Refused(503, "the process that looks ended")
    visit(page, studio, "?goal=prefer&model=demo/sft&data=pairs.jsonl")
    until(page, lambda: "the process that looks ended" in find(page, "#page").text)
    del stub.refusals["get options"]
    next(b for b in page.find_elements("css selector", "button") if b.text == "Try again").click()
    until(page, lambda: "Everything is there" in next_line(page))


def test_options_of_another_method_are_left_out_and_that_is_said(page, studio, stub):
    ready(page, studio)
    fill(page, field("dpo.beta"), "0.5")
    assert sent(page, stub, "dpo.beta") == 0.5
    goal(page, "imitate")
    until(page, lambda: stub.last("settings")["stage"] == "sft")
    assert "dpo.beta" not in stub.last("settings")["settings"]
    assert "Left out" in find(page, "#page").text and "dpo.beta" in find(page, ".notice").text
    goal(page, "prefer")
    assert sent(page, stub, "dpo.beta") == 0.5


def test_a_tiny_new_model_needs_no_name_and_is_trained_whole(page, studio, stub):
    visit(page, studio, "?goal=imitate&data=demo/demonstrations")
    until(page, lambda: find(page, "input[value=new]")).click()
    until(page, lambda: "Everything is there" in next_line(page))
    until(page, lambda: stub.last("settings")["settings"].get("model.preset") == "demo")
    found = stub.last("settings")["settings"]
    assert (found["model.lora.r"], found["train.learning_rate"]) == (0, 4e-3)  # the card would say 16
    assert "model.model_name_or_path" not in found


def test_answers_that_come_late_do_not_replace_newer_ones(page, studio, stub):
    ready(page, studio)
    stub.slow["settings"] = 1.5
    fill(page, field("model.lora.r"), "8")
    until(page, lambda: stub.last("settings")["settings"].get("model.lora.r") == 8)
    stub.slow.clear()
    fill(page, field("model.lora.r"), "9")
    until(page, lambda: "model.lora.r: 9" in find(page, "pre.same-yaml").text)
    time.sleep(1.5)
    assert "model.lora.r: 9" in find(page, "pre.same-yaml").text


def test_the_yaml_can_be_copied_and_downloaded_and_the_command_stands_there(page, studio, stub):
    ready(page, studio)
    until(page, lambda: "hybrid-rlhf --stage dpo --config pairs-dpo.yaml" in find(page, "pre.same-command").text)
    page.execute_script("navigator.clipboard.writeText = async (text) => (window.copied = text);"
                        "URL.createObjectURL = (blob) => ((window.saved = blob), 'blob:x');"
                        "HTMLAnchorElement.prototype.click = function () {window.savedAs = [this.download, this.href]}")
    find(page, ".run-panel .buttons:not(:has(#start)) button").click()
    assert until(page, lambda: page.execute_script("return window.copied")) == find(page, "pre.same-yaml").get_attribute(
        "textContent")
    find(page, "#download").click()
    assert page.execute_script("return window.savedAs") == ["pairs-dpo.yaml", "blob:x"]
    text = page.execute_async_script("window.saved.text().then(arguments[0])")
    assert text == find(page, "pre.same-yaml").get_attribute("textContent")


def test_without_a_mouse_everything_is_reached_and_the_run_is_started(page, studio, stub):
    from selenium.webdriver.common.keys import Keys

    visit(page, studio)
    page.execute_script("document.getElementById('page').focus()")
    press(page, Keys.TAB, Keys.TAB, Keys.TAB, Keys.SPACE)  # two buttons, then the goals
    until(page, lambda: find(page, "#step-4"))
    press(page, Keys.ARROW_DOWN)
    until(page, lambda: stub.last("settings")["stage"] == "dpo")
    assert find(page, "input[value=prefer]").is_selected()
    tab_to(page, field("model.model_name_or_path"))
    press(page, "org/name")
    tab_to(page, field("data.sources"))
    press(page, "pairs.jsonl")
    until(page, lambda: "Everything is there" in next_line(page))
    tab_to(page, "#file-data")
    tab_to(page, "details.all > summary")
    press(page, Keys.ENTER)
    tab_to(page, "#option-search")
    tab_to(page, "#ask-preview")
    press(page, Keys.ENTER)
    until(page, lambda: find(page, ".example"))
    assert has_focus(page, "#ask-preview")
    tab_to(page, "#start")
    press(page, Keys.ENTER)
    until(page, lambda: "#/run/pairs-dpo" in page.current_url)


def press(page, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    for key in keys:
        ActionChains(page, duration=0).send_keys(key).perform()


def tab_to(page, selector: str) -> None:
    from selenium.webdriver.common.keys import Keys

    for _ in range(120):
        if has_focus(page, selector):
            return
        press(page, Keys.TAB)
    raise AssertionError(f"no key leads to {selector}")


@pytest.mark.parametrize("width", [360, 1100])
def test_nothing_is_wider_than_the_window(page, studio, stub, width):
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False})
    try:
        for query in ("?goal=judge&model=org/name&data=pairs.jsonl", "?goal=three_stages", "?goal=function"):
            visit(page, studio, query)
            everything(page, stub)
            assert page.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def everything(page, stub) -> None:
    """All folds open, all that can be asked for asked."""
    until(page, lambda: find(page, "#ask-plan"))
    for selector in ("input[value=url]", "input[value=own]", "input[value=three]", "#reward-numeric_match", "#has-tools"):
        for found in page.find_elements("css selector", selector):
            found.click()
    page.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    if "Everything is there" in next_line(page):
        find(page, "#ask-plan").click()
        until(page, lambda: find(page, ".plan-bars"))
        find(page, "#ask-preview").click()
        until(page, lambda: find(page, ".example"))


@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_at_all(page, studio, stub, scheme):
    visit(page, studio)
    assert axe_faults(page, scheme, ALL_IMPACTS) == []
    stub.refusal = {"option": "model.lora.r", "text": "no"}
    for query in ("?goal=judge&model=org/name", "?goal=three_stages", "?goal=function&model=a/b&data=prompts.jsonl"):
        visit(page, studio, query)
        everything(page, stub)
        assert axe_faults(page, scheme, ALL_IMPACTS) == []
    stub.refusal = None
    visit(page, studio, "?goal=prefer&model=demo/sft&data=pairs.jsonl")
    until(page, lambda: "Everything is there" in next_line(page))
    everything(page, stub)
    fill(page, field("model.lora.r"), "8")
    assert axe_faults(page, scheme, ALL_IMPACTS) == []


def test_the_page_works_without_the_lists_of_runs_and_files_and_says_so(page, studio, stub):
    stub.refusals |= {f"get {name}": Refused(500, "an error") for name in ("runs", "uploads", "jobs")}
    visit(page, studio, "?goal=prefer&model=org/name&data=pairs.jsonl")
    until(page, lambda: "Everything is there" in next_line(page))
    assert "cannot be listed" in find(page, "#status").text
