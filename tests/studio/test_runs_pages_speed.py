"""The pages of runs under load: many runs, long runs, many news, many tabs; nothing is done that nobody sees."""

from __future__ import annotations

import json
import math
import time

import pytest

from tests.factories.browser import find, needs_browser, texts, until
from tests.factories.studio_pages import MadeQueue, studio_with_queue
from tests.factories.studio_runs import make_run

pytestmark = [needs_browser, pytest.mark.slow]

MAX_SCRIPT, MAX_HEAP = 0.1, 200 * 2**20  # seconds of an update; bytes
SLACK = 5  # times as long on a machine that does much else
STEPS, RUNS = 50_000, 200


@pytest.fixture
def studio(tmp_path, browser):
    browser.execute_cdp_cmd("Performance.enable", {})
    with studio_with_queue(tmp_path / "outputs", MadeQueue()) as found:
        yield found


def opened(browser, studio, where: str):
    browser.get(studio.url)
    browser.get("about:blank")
    browser.get(f"{studio.base}/{where}")
    until(browser, lambda: find(browser, "h1").text)
    return browser


def measures(page) -> dict[str, float]:
    """Seconds of script, of layout and styles, and of all work of the page so far; bytes of its heap."""
    found = {m["name"]: m["value"] for m in page.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]}
    return {"script": found["ScriptDuration"], "layout": found["LayoutDuration"] + found["RecalcStyleDuration"],
            "all": found["TaskDuration"], "heap": found["JSHeapUsedSize"]}


def cost(page, name: str, act, is_done, seconds: float = 4) -> dict[str, float]:  # noqa: ANN001
    """What an update costs the page that `act` brings within some seconds. Nobody asks the page anything meanwhile, for
    that would be counted too. Printed for people."""
    page.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
    before = measures(page)
    act()
    time.sleep(seconds)
    after = measures(page)
    assert is_done()
    found = {key: after[key] - before[key] for key in ("script", "layout", "all")} | {"heap": after["heap"]}
    print(f"{name}: script {found['script'] * 1000:.0f} ms, layout {found['layout'] * 1000:.0f} ms, "
          f"all work {found['all'] * 1000:.0f} ms, heap {found['heap'] / 2**20:.1f} MiB")
    return found


def requests(page, path: str) -> int:
    """How many requests to an address the page has made so far."""
    asked = page.execute_script("return performance.getEntriesByType('resource').map((each) => each.name)")
    return sum(f"/api/{path}" in url for url in asked)


def long_run(outputs, name: str):
    """A running run of 50,000 steps with eight metrics."""
    run = make_run(outputs, name, "sft", 0, "running", max_steps=2 * STEPS)
    names = [f"part{i}/value" for i in range(6)]
    with (run.folder / "metrics.jsonl").open("a") as file:
        for step in range(1, STEPS + 1):
            wave = math.sin(step / 500) + 0.1 * math.sin(step * 7.7)
            row = {"step": step, "loss": 3 + wave, "time/step": 0.5} | dict.fromkeys(names, wave)
            file.write(json.dumps(row) + "\n")
    run.done = STEPS
    run.values = lambda step: {"loss": float(step), "time/step": 0.5} | dict.fromkeys(names, 0.5)
    return run


def test_two_hundred_runs_change_quickly(browser, studio):
    for place in range(RUNS - 1):
        make_run(studio.studio.outputs, f"group{place // 5}/run{place:03}", "sft", 2,
                 parents=[f"group{place // 5}/run{place - 1:03}"] if place % 5 else [])
    run = make_run(studio.studio.outputs, "growing", "sft", 2, "running", max_steps=500)
    page = opened(browser, studio, "#/runs")
    until(page, lambda: len(texts(page, "tr.run")) == RUNS, 60)
    steps = find(page, "[aria-label='Choose growing']").find_element("xpath", "./ancestor::tr/td[5]")
    time.sleep(2)

    def grow() -> None:
        run.grow(5)
        studio.studio.news.publish("run", {"id": "growing", "step": run.done})

    found = cost(page, f"{RUNS} runs, news of one", grow, lambda: steps.text == f"{run.done} of 500")
    assert found["script"] < MAX_SCRIPT * SLACK
    assert found["heap"] < MAX_HEAP

    def add() -> None:
        make_run(studio.studio.outputs, "one_more", "sft", 2)
        studio.studio.news.publish("runs", {})

    found = cost(page, f"{RUNS} runs, one more", add, lambda: len(texts(page, "tr.run")) == RUNS + 1)
    assert found["script"] < MAX_SCRIPT * SLACK
    run.die()


def test_a_run_of_fifty_thousand_steps_grows_quickly(browser, studio):
    run = long_run(studio.studio.outputs, "long")
    page = opened(browser, studio, "#/run/long")
    until(page, lambda: find(page, "[data-metric=loss] .when").text == "step 50,000", 60)
    until(page, lambda: find(page, "[data-metric=loss] .plot .curve").get_attribute("d"))
    points = find(page, "[data-metric=loss] .plot .curve").get_attribute("d").count("L") + 1
    assert 200 <= points <= 400
    assert find(page, "[data-metric=loss] .plot .band").get_attribute("d")
    time.sleep(2)
    found = cost(page, f"{STEPS} steps, news of it", lambda: run.grow(3),
                 lambda: find(page, "[data-metric=loss] .when").text == "step 50,003")
    assert found["script"] < MAX_SCRIPT * SLACK
    assert found["heap"] < MAX_HEAP
    run.die()


def test_many_news_are_few_requests(browser, studio):
    run = make_run(studio.studio.outputs, "a", "sft", 10, "running", max_steps=500)
    page = opened(browser, studio, "#/run/a")
    until(page, lambda: find(page, "[data-metric=loss] .plot .curve").get_attribute("d"))
    time.sleep(1)
    before, began = requests(page, "history"), time.monotonic()
    while time.monotonic() - began < 3:
        studio.studio.news.publish("run", {"id": "a", "step": 10})
        time.sleep(0.02)
    asked, passed = requests(page, "history") - before, time.monotonic() - began
    # at most two a second of the curves, and one of the time left
    assert 3 <= asked <= 3 * passed + 3
    run.die()


def test_what_is_not_on_the_screen_is_not_fetched(browser, studio):
    run = make_run(studio.studio.outputs, "a", "ppo", 10, "running", max_steps=500)
    page = opened(browser, studio, "#/run/a")
    until(page, lambda: find(page, "[data-metric=reward] .plot .curve").get_attribute("d"))
    until(page, lambda: texts(page, ".sample"))
    time.sleep(1)
    asked = requests(page, "samples")
    run.grow(10)
    until(page, lambda: find(page, "[data-metric=reward] .when").text == "step 20")
    time.sleep(1.2)
    assert texts(page, "[data-metric=learning_rate] .when") == [""]
    assert requests(page, "samples") == asked
    page.execute_script("scrollTo(0, document.body.scrollHeight)")
    until(page, lambda: requests(page, "samples") > asked)
    time.sleep(1)
    run.grow(10)
    until(page, lambda: "step 30 of 500" in find(page, "#page").text)
    time.sleep(1.2)
    assert texts(page, "[data-metric=reward] .when") == ["step 20"]
    page.execute_script("scrollTo(0, 0)")
    until(page, lambda: find(page, "[data-metric=reward] .when").text == "step 30")
    run.die()


def test_ten_tabs_are_open_and_each_loads(browser, studio):
    """A browser has six connections to one server: hidden tabs must not keep them."""
    make_run(studio.studio.outputs, "a", "sft", 10)
    first = browser.current_window_handle
    opened(browser, studio, "#/runs")
    try:
        for _ in range(9):
            browser.switch_to.new_window("tab")
            browser.get(f"{studio.base}/#/run/a")
            until(browser, lambda: find(browser, "[data-metric=loss] .plot .curve").get_attribute("d"))
        run = make_run(studio.studio.outputs, "b", "sft", 10, "running")
        browser.switch_to.window(first)  # what came while it was hidden is loaded now
        until(browser, lambda: len(texts(browser, "tr.run")) == 2)
        run.die()
    finally:
        for handle in browser.window_handles:
            if handle != first:
                browser.switch_to.window(handle)
                browser.close()
        browser.switch_to.window(first)
