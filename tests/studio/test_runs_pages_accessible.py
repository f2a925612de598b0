"""The pages of runs for everybody: by keyboard alone, on a narrow screen, for screen readers; and text stays text."""

from __future__ import annotations

import json
import time

import pytest

from tests.factories.browser import axe_faults, find, needs_axe, needs_browser, texts, until
from tests.factories.studio_pages import is_drawn, press
from tests.factories.studio_runs import append, make_run, samples

pytestmark = [needs_browser, pytest.mark.slow]

MARKUP = "<img src=x onerror=document.title='broken'>"
ALL_IMPACTS = ("minor", "moderate", "serious", "critical")


def sticking_out(page) -> list[str]:
    """What makes the page scroll sideways; nothing where it does not."""
    return page.execute_script("""
        const width = document.documentElement.clientWidth;
        if (document.documentElement.scrollWidth <= width) return [];
        return [...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > width + 1)
          .map((e) => `${e.outerHTML.slice(0, 150)} ${e.getBoundingClientRect().right}`);""")


def test_what_models_and_names_say_is_never_markup(opened, outputs, queue):
    run = make_run(outputs, f"x/{MARKUP}", "grpo", 5, "failed", error=MARKUP)
    row = samples(9)[0] | {"prompt": MARKUP, "completion": MARKUP, "judge": MARKUP, "scores": {MARKUP: 1.0}}
    append(run.folder / "samples.jsonl", [row])
    append(run.folder / "metrics.jsonl", [{"step": 6, MARKUP: 1.0}])
    make_run(outputs, "x/other", "grpo", 5, parents=[f"x/{MARKUP}"])
    queue.add("1", "queued", title=MARKUP, error=MARKUP)
    page = opened("#/runs")
    until(page, lambda: len(texts(page, "tr.run")) == 2 and texts(page, ".job-title") == [MARKUP])
    link = next(a for a in page.find_elements("css selector", "tr.run a") if a.text == MARKUP)
    link.click()
    until(page, lambda: find(page, "h1").text == f"x/{MARKUP}")
    until(page, lambda: MARKUP in texts(page, ".sample .said"))
    assert MARKUP in texts(page, "#page > div > .fault")
    find(page, ".picker summary").click()
    opened(f"#/compare/x/other,x/{'%3Cimg%20src%3Dx%20onerror%3Ddocument.title%3D%27broken%27%3E'}")
    until(page, lambda: len(texts(page, "ul.compared li")) == 2)
    assert not page.find_elements("css selector", "#page img")
    assert page.title.startswith("Compare")


def test_by_keyboard_alone_two_runs_are_chosen_compared_and_one_is_left(opened, outputs):
    from selenium.webdriver.common.keys import Keys

    make_run(outputs, "demo/one", "grpo", 6)
    make_run(outputs, "demo/two", "grpo", 6)
    page = opened("#/runs")
    until(page, lambda: len(texts(page, "tr.run")) == 2)

    def tab_to(selector: str) -> None:
        for _ in range(60):
            press(page, Keys.TAB)
            if page.execute_script("return document.activeElement.matches(arguments[0])", selector):
                return
        raise AssertionError(f"Tab never comes to {selector}")

    for _ in range(2):
        tab_to("tr.run input")
        press(page, " ")
    tab_to(".choice a")
    press(page, Keys.ENTER)
    until(page, lambda: is_drawn(page, "reward"))
    tab_to("[data-metric=reward] .reader")
    press(page, Keys.HOME)
    assert find(page, "[data-metric=reward] .when").text == "step 1"
    tab_to("[data-metric=reward] summary")
    press(page, Keys.ENTER)
    until(page, lambda: len(texts(page, "[data-metric=reward] tbody tr")) == 6)
    page.execute_script("document.getElementById('page').focus()")
    tab_to("ul.compared a[aria-label]")
    press(page, Keys.ENTER)
    until(page, lambda: len(texts(page, "ul.compared li")) == 1)


PAGES = {"runs": "#/runs", "run": "#/run/demo/ppo", "compare": "#/compare/demo/ppo,demo/other",
         "one to compare": "#/compare/demo/ppo"}


@pytest.fixture
def full(opened, outputs, queue):
    """Pages with something of everything, under names without a place to break."""
    make_run(outputs, "demo/sft", "sft", 12)
    run = make_run(outputs, "demo/ppo", "ppo", 12, "running", parents=["demo/sft"], max_steps=30, has_tools=True)
    run.evaluate()
    make_run(outputs, "demo/other", "grpo", 12, settings={"ppo.kl_coef": 0.5, "long": "x" * 90})
    make_run(outputs, "y" * 60, "sft", 3, "failed", error="z" * 120)
    queue.add("1", "running", run="demo/ppo", started="2026-11-23T14:00:00+00:00", title="w" * 70)
    yield opened
    run.die()


@pytest.mark.parametrize("name", PAGES)
def test_on_a_narrow_screen_nothing_sticks_out(full, name):
    page = full(PAGES[name])
    metrics = {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        full(PAGES[name])
        until(page, lambda: not page.find_elements("css selector", ".chart") or is_drawn(page, "reward"))
        for details in page.find_elements("css selector", "details"):
            page.execute_script("arguments[0].open = true", details)
        time.sleep(0.3)
        assert sticking_out(page) == []
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing_at_all(full, name, scheme):
    page = full(PAGES[name])
    until(page, lambda: not page.find_elements("css selector", ".chart") or is_drawn(page, "reward"))
    for details in page.find_elements("css selector", "details"):
        page.execute_script("arguments[0].open = true", details)
    if name == "runs":
        find(page, "tr.run input").click()
    time.sleep(0.3)
    assert axe_faults(page, scheme, ALL_IMPACTS) == []


def test_nothing_is_asked_of_any_other_origin(full):
    page = full("#/runs")
    page.get_log("performance"), page.get_log("browser")  # what came before
    for where in PAGES.values():
        full(where)
        time.sleep(0.5)
    asked = [json.loads(e["message"])["message"] for e in page.get_log("performance")]
    urls = {e["params"]["request"]["url"] for e in asked if e["method"] == "Network.requestWillBeSent"}
    assert any("/api/history" in url for url in urls)
    assert not {url for url in urls if url.startswith("http") and not url.startswith(f"{full.studio.base}/")}
    assert not [e for e in page.get_log("browser") if e["level"] == "SEVERE"]
