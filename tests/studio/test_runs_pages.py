"""The pages of runs in a real Chromium: what they show, how it grows, and what their buttons do."""

from __future__ import annotations

import pytest

from tests.factories.browser import find, needs_browser, texts, until
from tests.factories.studio_pages import curve, is_drawn, press, studio_with_queue
from tests.factories.studio_runs import make_run

pytestmark = [needs_browser, pytest.mark.slow]


def rows_of(page) -> dict[str, list[str]]:
    """id -> the texts of its row."""
    return {row.find_element("css selector", "a").accessible_name:
            [cell.text for cell in row.find_elements("css selector", "td")][1:]
            for row in page.find_elements("css selector", "tr.run")}


def value_of(page, metric: str) -> str:
    return texts(page, f"[data-metric='{metric}'] .value")[0]


def rising(step: int) -> dict:
    return {"loss": float(step), "time/step": 2.0}


def test_an_empty_folder_says_what_to_do_first(opened):
    page = opened("#/runs")
    link = until(page, lambda: find(page, "#page a[href='#/new']"))
    assert link.is_displayed()
    assert "no run in this folder yet" in find(page, "#page").text
    assert not find(page, "table.runs").is_displayed()


def test_a_line_stays_a_line_and_a_branch_is_indented(opened, outputs):
    make_run(outputs, "demo/sft", "sft", 12)
    make_run(outputs, "demo/reward", "reward", 12, parents=["demo/sft"])
    make_run(outputs, "demo/ppo", "ppo", 12, "stopped", parents=["demo/sft", "demo/reward"], max_steps=30)
    for name in ("a", "b"):
        make_run(outputs, f"tries/{name}", "dpo", 5, "failed", parents=["tries/base"])
    make_run(outputs, "tries/base", "sft", 5)
    make_run(outputs, "tries/a2", "dpo", 5, "lost", parents=["tries/a"])
    page = opened("#/runs")
    until(page, lambda: len(rows_of(page)) == 7)
    rows = rows_of(page)
    assert rows["demo/ppo"][0] == "sft → reward → ppo"
    assert rows["demo/ppo"][1:4] == ["ppo", "stopped", "12 of 30"]
    assert rows["demo/reward"][0] == "sft → reward"
    assert rows["tries/a2"][0] == "a → a2"
    assert rows["tries/a2"][2] == "lost"
    assert rows["tries/b"][2].splitlines() == ["failed", "the GPU's memory is used up"]
    depth = {row.find_element("css selector", "a").accessible_name:
             page.execute_script("return arguments[0].style.getPropertyValue('--depth')",
                                 row.find_elements("css selector", "td")[1])
             for row in page.find_elements("css selector", "tr.run")}
    assert depth == {"demo/sft": "0", "demo/reward": "0", "demo/ppo": "0", "tries/base": "0", "tries/a": "1",
                     "tries/a2": "1", "tries/b": "1"}
    assert texts(page, "tr.group") == ["demo", "tries"] or texts(page, "tr.group") == ["tries", "demo"]


def test_news_change_the_list_in_place(opened, outputs):
    for place in range(40):
        make_run(outputs, f"old/run{place:02}", "sft", 2)
    growing = make_run(outputs, "old/growing", "sft", 3, "running", max_steps=50)
    page = opened("#/runs")
    until(page, lambda: len(rows_of(page)) == 41)
    box = find(page, "[aria-label='Choose old/run30']")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'}); arguments[0].focus()", box)
    press(page, " ")
    place = box.rect["y"] - page.execute_script("return scrollY")
    make_run(outputs, "new/one", "sft", 2)
    opened.publish("runs", {})
    until(page, lambda: page.find_elements("css selector", "[aria-label='Choose new/one']"))
    assert page.execute_script("return document.activeElement") == box
    assert box.is_selected()
    assert abs(box.rect["y"] - page.execute_script("return scrollY") - place) < 2
    assert find(page, ".choice span").text == "1 run chosen"
    growing.grow(4)
    until(page, lambda: rows_of(page)["old/growing"][3] == "7 of 50")
    growing.die()


def test_finding_hides_what_has_other_words(opened, outputs):
    for place in range(10):
        make_run(outputs, f"old/run{place:02}", "sft", 2, "failed" if place == 3 else "finished")
    make_run(outputs, "other", "dpo", 2)
    page = opened("#/runs")
    until(page, lambda: find(page, "#find-run").is_displayed())
    find(page, "#find-run").send_keys("old failed")
    shown = [row.text for row in page.find_elements("css selector", "tr.run") if row.is_displayed()]
    assert len(shown) == 1
    assert shown[0].startswith("run03")
    assert not find(page, "[aria-label='Choose other']").is_displayed()


def test_the_queue_stops_and_drops_and_says_refusals(opened, queue):
    queue.add("3", "failed", error="sft: no such data", finished="2026-11-23T14:05:00+00:00")
    queue.add("2", "queued", place=1, title="an evaluation")
    queue.add("1", "running", run="demo/ppo", started="2026-11-23T14:00:00+00:00")
    queue.output = "line one\n"
    page = opened("#/runs")
    until(page, lambda: len(texts(page, "ul.jobs > li")) == 3)
    first, second, third = page.find_elements("css selector", "ul.jobs > li")
    assert first.find_element("css selector", "a").get_attribute("href").endswith("#/run/demo/ppo")
    assert second.find_element("css selector", ".job-title").text == "an evaluation"
    assert "waiting, number 1" in second.text
    assert "sft: no such data" in third.get_attribute("textContent")
    first.find_element("css selector", "summary").click()
    until(page, lambda: first.find_element("css selector", "pre").text == "line one")
    queue.output += "line two\n"
    opened.publish("job", {"id": "1"})
    until(page, lambda: first.find_element("css selector", "pre").text == "line one\nline two")
    second.find_element("css selector", "button").click()
    until(page, lambda: queue.asked == [("/api/job/stop", {"id": "2"})])
    queue.refusal = "this job has ended (done)"
    first.find_element("css selector", "button").click()
    until(page, lambda: queue.refusal in texts(page, "ul.jobs > li > .fault"))
    queue.jobs[0]["state"] = "done"
    opened.publish("jobs", {})
    until(page, lambda: "Ended: 2" in find(page, "#page").text)


def test_a_run_shows_how_it_stands_and_how_it_was_made(opened, outputs):
    make_run(outputs, "demo/sft", "sft", 8)
    run = make_run(outputs, "demo/ppo", "ppo", 20, "running", parents=["demo/sft"], max_steps=100, has_tools=True)
    run.checkpoint(is_best=True)
    run.evaluate()
    page = opened("#/run/demo/ppo")
    until(page, lambda: "step 20 of 100, about" in find(page, "#page").text)
    assert find(page, ".state").text == "running"
    assert find(page, "progress").get_attribute("value") == "20"
    assert [b.text for b in page.find_elements("css selector", "#page .buttons button, #page a.button")
            if b.is_displayed()] == ["Stop with a checkpoint", "Talk", "Compare"]
    until(page, lambda: is_drawn(page, "reward"))
    assert "from 0.3302 to 0.4274" in find(page, "[data-metric=reward] .plot").get_attribute("aria-label")
    until(page, lambda: len(texts(page, ".sample")) >= 4)
    said = texts(page, ".samples .sample")[0]
    assert "It is 22." in said
    assert "correct 0" in said
    assert "judge 0.5" in said
    assert texts(page, "table.bars")[0].startswith("Seconds by phasegenerate5 s")
    assert "--stage ppo" in find(page, "pre.command").text
    text = find(page, "#page").get_attribute("textContent")
    for part in ("max_new_tokens: 16", "transformers", "step-00000020", "best so far", "data: 100 rows read"):
        assert part in text
    run.finish()
    until(page, lambda: find(page, ".state").text == "finished")
    until(page, lambda: find(page, "a[href^='api/report']").is_displayed())
    assert not find(page, "progress").is_displayed()


def test_a_run_grows_without_being_drawn_anew(opened, outputs):
    run = make_run(outputs, "demo/sft", "sft", 10, "running", max_steps=50, values=rising)
    page = opened("#/run/demo/sft")
    until(page, lambda: is_drawn(page, "loss"))
    node, before = curve(page, "loss"), curve(page, "loss").get_attribute("d")
    find(page, "[data-metric=loss] details").click()
    until(page, lambda: len(texts(page, "[data-metric=loss] tbody tr")) == 10)
    run.grow(15)
    until(page, lambda: value_of(page, "loss") == "25")
    assert curve(page, "loss") == node
    assert node.get_attribute("d") != before
    assert texts(page, "[data-metric=loss] tbody tr")[-1] == "2525"
    assert "step 25 of 50, about 50 s left" in find(page, "#page").text
    run.evaluate()
    until(page, lambda: "held out25" in find(page, "[data-metric=loss] .legend").get_attribute("textContent"))
    run.die()
    until(page, lambda: find(page, ".state").text == "lost")
    assert find(page, "#page .buttons").text.startswith("Resume")


def test_a_chart_is_read_by_pointer_and_by_arrow_keys(opened, outputs):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    values = [7.0, 1.5, -2.0, 4.0, None, 3.25, 3.0, 8.0, 9.0]
    make_run(outputs, "a", "sft", 9, values=lambda step: {"loss": values[step - 1]})
    page = opened("#/run/a")
    until(page, lambda: is_drawn(page, "loss"))
    assert value_of(page, "loss") == "9"
    assert "not a number" in find(page, "[data-metric=loss] .plot").get_attribute("aria-label")
    assert curve(page, "loss").get_attribute("d").count("M") == 2  # the line breaks at the step without a number
    plot = find(page, "[data-metric=loss] .plot")
    ActionChains(page).move_to_element_with_offset(plot, -plot.size["width"] // 2 + 40, 0).perform()
    until(page, lambda: find(page, "[data-metric=loss] .when").text == "step 1")
    assert value_of(page, "loss") == "7"
    ActionChains(page).move_to_element(find(page, "h1")).perform()
    until(page, lambda: value_of(page, "loss") == "9")
    reader = find(page, "[data-metric=loss] .reader")
    page.execute_script("arguments[0].focus()", reader)
    press(page, Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert reader.get_attribute("aria-valuetext") == "step 3: -2"
    assert value_of(page, "loss") == "-2"
    assert find(page, "[data-metric=loss] .cursor").get_attribute("d")
    press(page, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert reader.get_attribute("aria-valuetext") == "step 5: not a number"
    press(page, Keys.TAB)
    assert value_of(page, "loss") == "9"


def test_curves_are_chosen_and_the_choice_is_remembered(opened, outputs):
    make_run(outputs, "a", "sft", 9)
    page = opened("#/run/a")
    until(page, lambda: is_drawn(page, "loss"))
    find(page, ".picker summary").click()
    find(page, "input[value=loss]").click()
    find(page, "input[value=num_tokens]").click()
    page.execute_script("document.querySelector('[data-metric=num_tokens]').scrollIntoView()")
    until(page, lambda: is_drawn(page, "num_tokens"))
    assert not page.find_elements("css selector", "[data-metric=loss]")
    assert "tokens read so far" in find(page, "[data-metric=num_tokens]").text
    opened("#/run/a")
    until(page, lambda: page.find_elements("css selector", "[data-metric=num_tokens]"))
    assert not page.find_elements("css selector", "[data-metric=loss]")
    page.execute_script("localStorage.clear()")


def test_refusals_stand_beside_the_buttons_in_the_servers_words(opened, outputs, queue):
    running = make_run(outputs, "a", "sft", 5, "running", max_steps=50)
    make_run(outputs, "b", "sft", 5, "stopped")
    queue.refusal = "a was started elsewhere, and is stopped there (Ctrl-C)"
    page = opened("#/run/a")
    find(page, ".buttons button").click()
    until(page, lambda: queue.refusal in texts(page, ".fault"))
    queue.refusal = None
    find(page, ".buttons button").click()
    until(page, lambda: find(page, ".buttons button").text == "End at once")
    assert queue.asked == [("/api/run/stop", {"id": "a"})] * 2
    opened("#/run/b")
    until(page, lambda: find(page, "button.primary").is_displayed())
    find(page, "button.primary").click()
    until(page, lambda: queue.asked[-1] == ("/api/run/resume", {"id": "b"}))
    running.die()


def test_a_studio_that_has_ended_is_said(browser, outputs, queue):
    make_run(outputs, "b", "sft", 5, "stopped")
    with studio_with_queue(outputs, queue) as studio:
        browser.get(studio.url)
        browser.get(f"{studio.base}/#/run/b")
        until(browser, lambda: find(browser, "button.primary").is_displayed())
    find(browser, "button.primary").click()
    until(browser, lambda: "the studio does not answer; has it been ended?" in texts(browser, ".fault"))
    assert find(browser, "h1").text == "b"


def test_a_run_that_waits_shows_its_job_and_becomes_its_page(opened, outputs, queue):
    job = queue.add("1", "queued", run="demo/new", place=2)
    page = opened("#/run/demo/new")
    until(page, lambda: find(page, ".state").text == "waiting, number 2")
    job |= {"state": "running", "started": "2026-11-23T14:00:00+00:00"}
    run = make_run(outputs, "demo/new", "sft", 3, "running", max_steps=50)
    opened.publish("runs", {})
    until(page, lambda: "step 3 of 50" in find(page, "#page").text)
    assert len(texts(page, "h1")) == 1
    run.grow(2)
    until(page, lambda: "step 5 of 50" in find(page, "#page").text)
    run.die()


def test_runs_are_compared_curve_over_curve_and_answer_by_answer(opened, outputs, queue):
    for name, rate in (("one", 0.1), ("two", 0.2), ("three", 0.1)):
        make_run(outputs, f"demo/{name}", "grpo", 6, settings={"ppo.kl_coef": rate})
    page = opened("#/compare/demo/one,demo/two,demo/three")
    until(page, lambda: is_drawn(page, "reward"))
    lines = page.find_elements("css selector", "[data-metric=reward] .plot .curve:not(.sparse)")
    looks = {(line.value_of_css_property("stroke"), line.value_of_css_property("stroke-dasharray")) for line in lines}
    assert len(looks) == 3
    assert len({colour for colour, _ in looks}) == len({dashes for _, dashes in looks}) == 3
    assert texts(page, "[data-metric=reward] .label") == ["one", "two", "three"]
    assert texts(page, "table.differ tbody tr") == ["ppo.kl_coef0.10.20.1"]
    first = find(page, ".asked")
    assert "Name the first word" in first.text
    assert first.text.count("After 6 steps: B") == 3
    find(page, ".buttons button.primary").click()
    until(page, lambda: queue.asked)
    assert queue.asked == [("/api/jobs", {"kind": "evaluate", "runs": ["demo/one", "demo/two", "demo/three"],
                                          "settings": {}})]
    page.find_elements("css selector", "ul.compared a[aria-label]")[1].click()
    until(page, lambda: texts(page, "[data-metric=reward] .label") == ["one", "three"])
