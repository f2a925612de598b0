"""Before a run is started: its rows, its memory, its signal, its name and its file."""

from __future__ import annotations

import pytest

from hybrid_rlhf.studio.studio import Refused
from tests.factories.browser import needs_browser, texts
from tests.factories.new_run_pages import entry

pytestmark = [needs_browser, pytest.mark.slow]


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


def test_a_failed_look_is_told_in_the_servers_words(page, stub):
    page.ready()
    stub.refusals["plan"] = Refused(400, "the tokenizer of demo/sft is missing", "model.model_name_or_path")
    page.click("#ask-plan")
    page.focuses(entry("model.model_name_or_path"))
    assert "tokenizer" in page.fault("model.model_name_or_path")
    assert "tokenizer" in page.find(".checks .fault").text


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


def test_a_job_that_runs_makes_it_a_queue(page, stub):
    stub.jobs.append({"id": "job1", "kind": "train", "title": "t", "run": "other", "state": "running", "place": None})
    page.ready()
    page.until(lambda: page.find("#start").text == "Add to the queue")
    assert "other is running; this run starts after it" in page.find(".run-panel").text
    stub.change("job1", state="done")
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
