"""The page of a new run for everybody: by keys alone, on a narrow screen, for screen readers; text stays text."""

from __future__ import annotations

import pytest

from tests.factories.browser import axe_faults, needs_axe, needs_browser
from tests.factories.new_run_pages import entry

pytestmark = [needs_browser, pytest.mark.slow]
ALL_IMPACTS = ("minor", "moderate", "serious", "critical")


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


@pytest.mark.parametrize("width", [360, 1100])
def test_nothing_is_wider_than_the_window(page, width):
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False})
    try:
        for query in ("?goal=judge&model=org/name&data=pairs.jsonl", "?goal=three_stages", "?goal=function"):
            page.visit(query)
            page.open_everything()
            assert page.run("return document.documentElement.scrollWidth") <= width
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_at_all(page, stub, scheme):
    page.visit()
    assert axe_faults(page.browser, scheme, ALL_IMPACTS) == []
    stub.refusal = {"option": "model.lora.r", "text": "no"}
    for query in ("?goal=judge&model=org/name", "?goal=three_stages", "?goal=function&model=a/b&data=prompts.jsonl"):
        page.visit(query)
        page.open_everything()
        assert axe_faults(page.browser, scheme, ALL_IMPACTS) == []
    stub.refusal = None
    page.visit("?goal=prefer&model=demo/sft&data=pairs.jsonl")
    page.says("Everything is there")
    page.open_everything()
    page.set("model.lora.r", "8")
    assert axe_faults(page.browser, scheme, ALL_IMPACTS) == []


@pytest.mark.parametrize("text", ["Rücken an: pairs.jsonl", "<img src=x onerror=document.title='broken'>"])
def test_what_is_entered_is_text(page, text):
    page.visit("?goal=prefer")
    page.until(lambda: page.find(entry("data.sources")))
    page.set("data.sources", text)
    assert page.sent("data.sources") == [text]
    page.until(lambda: text in page.find("pre.same-yaml").text)
    assert not page.all("main img")
