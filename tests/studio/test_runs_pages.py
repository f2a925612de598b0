"""The pages of runs in a real Chromium: what they show, how it grows, and what their buttons do."""

from __future__ import annotations

import json
import time

import pytest

from tests.factories.browser import (
    ALL_IMPACTS,
    axe_faults,
    dialog,
    find,
    narrow,
    needs_axe,
    needs_browser,
    retype,
    texts,
    until,
)
from tests.factories.studio_pages import curve, is_drawn, press
from tests.factories.studio_runs import append, make_run, samples

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
    until(page, lambda: "no run in this folder yet" in find(page, "#page").text)
    assert texts(page, "ol.loop strong") == ["A prompt", "The model answers", "Good or bad?", "The model learns"]
    assert not find(page, "table.runs").is_displayed()


@pytest.mark.parametrize("where", ["#/start", "#/runs"])
def test_the_ways_in_are_seen_without_scrolling(opened, where):
    page = opened(where)
    until(page, lambda: "Looking for" not in find(page, ".doors").text)
    bottoms = "return [...document.querySelectorAll('.door')].map((e) => e.getBoundingClientRect().bottom)"
    with narrow(page, 1280, 800):
        assert len(ends := page.execute_script(bottoms)) == 3 and max(ends) <= 800
    with narrow(page, 390, 844):
        assert page.execute_script(bottoms)[0] <= 844 and not sticking_out(page)


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
    said = texts(page, "#page > div > details .samples .sample")[0]
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


def test_a_run_is_told_in_words_and_its_prompts_have_no_template_marks(opened, outputs):
    run = make_run(outputs, "a", "ppo", 20, values=lambda step: {"reward": step / 10, "kl": 0.5, "loss": 1.0})
    asked = ("<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nName <b>it</b>: A<|im_end|>\n"
             "<|im_start|>assistant\n")
    append(run.folder / "answers.jsonl", [{"step": step, "prompt": asked, "completion": "A"} for step in (0, 20)])
    page = opened("#/run/a")
    # twenty steps in ten parts of two: the first is the mean of .1 and .2, the last that of 1.9 and 2
    until(page, lambda: "Reward: 0.15 at the start, 1.95 now: it rose" in find(page, "#page").text)
    assert "KL: 0.5 nats per answer from the model that it began as: it has moved a little." in find(page, "#page").text
    assert "Loss:" not in find(page, "#page").text
    assert texts(page, ".speaker")[-2:] == ["before, step 0", "after, step 20"]
    assert texts(page, ".asked .prompt")[-1] == "Name <b>it</b>: A"
    page.execute_script("document.querySelector('#shows-marks').click()")
    assert texts(page, ".asked .prompt")[-1] == asked.strip()


def test_samples_and_answers_show_the_pictures_that_they_are_about(opened, outputs, tmp_path):
    from PIL import Image

    paths = [str(tmp_path / name) for name in ("<b>.png", "gone.png")]
    Image.new("RGB", (300, 200), "red").save(paths[0])
    for name in ("a", "b"):
        run = make_run(outputs, name, "grpo", 0)
        asked = {"prompt": "What is it?", "images": paths}
        append(run.folder / "samples.jsonl", [{"step": 1, **asked, "completion": "A wall."}])
        append(run.folder / "answers.jsonl", [{"step": step, **asked, "completion": "A fox."} for step in (0, 1)])
    for address, count in (("#/run/a", 2), ("#/compare/a,b", 1)):  # the prompt of both answers, and the sample
        page = opened(address)
        until(page, lambda count=count, page=page: len(page.find_elements("css selector", ".pictures")) == count)
        images = page.find_elements("css selector", ".pictures img")
        assert [(image.get_attribute("alt"), image.get_attribute("naturalWidth")) for image in images] == [
            ("<b>.png", "128")] * count
        assert texts(page, ".pictures") == ["gone.png (cannot be read)"] * count
    assert not [e for e in page.get_log("browser") if "Content Security Policy" in e["message"]]


def test_a_chart_has_a_name_for_people_and_smooth_lines_over_the_values(opened, outputs):
    values = [0.0, 3.0, 0.0, 3.0, 0.0]
    make_run(outputs, "a", "sft", 5, values=lambda step: {"loss": values[step - 1], "own/metric": 1.0})
    page = opened("#/run/a")
    until(page, lambda: is_drawn(page, "loss"))
    assert texts(page, "[data-metric=loss] h3, [data-metric=loss] code") == ["Loss", "loss"]
    plain = curve(page, "loss").get_attribute("d")
    assert not curve(page, "loss", ".smoothed").is_displayed()
    find(page, "#smooth").click()
    smooth = curve(page, "loss", ".smoothed")
    assert smooth.is_displayed() and curve(page, "loss").is_displayed()  # the values stay, faint
    heights = [float(point.split(" ")[1]) for point in smooth.get_attribute("d")[1:-2].split("L")]
    raw = [float(point.split(" ")[1]) for point in plain[1:-2].split("L")]
    # a twentieth of five values is one to each side: the second is the mean of the first three
    assert abs(heights[1] - sum(raw[:3]) / 3) < 0.1 and heights[0] == pytest.approx((raw[0] + raw[1]) / 2, abs=0.1)
    assert value_of(page, "loss") == "0"  # the value itself
    find(page, "#smooth").click()
    assert not smooth.is_displayed()


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


def test_refusals_stand_beside_the_buttons_in_the_servers_words(opened, outputs, queue):
    running = make_run(outputs, "a", "sft", 5, "running", max_steps=50)
    make_run(outputs, "b", "sft", 5, "stopped")
    queue.refusal = "a was started elsewhere, and is stopped there (Ctrl-C)"
    page = opened("#/run/a")
    until(page, lambda: find(page, ".buttons button").is_displayed())
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
    until(page, lambda: "as soon as the queue is free" in find(page, "#page").text)
    record = json.loads((outputs / "b" / "run.json").read_text())
    (outputs / "b" / "run.json").write_text(json.dumps(record | {"status": "finished"}))
    opened.publish("runs", {})
    until(page, lambda: find(page, ".state").text == "finished")
    assert "the queue is free" not in find(page, "#page").text
    running.die()


def test_a_run_is_renamed_and_deleted_once_a_person_has_confirmed_what_breaks(opened, outputs):
    make_run(outputs, "demo/sft", "sft", 2)
    make_run(outputs, "demo/ppo", "ppo", 2, parents=["demo/sft"])
    page = opened("#/run/demo/ppo")
    rename = until(page, lambda: next(e for e in page.find_elements("css selector", "summary")
                                      if e.text == "Rename or delete"))
    rename.click()
    name = find(page, "#rename")
    retype(name, "demo/sft")
    button(page, "Rename").click()
    until(page, lambda: any("demo/sft already" in text for text in texts(page, ".fault")))
    retype(name, "best one")
    button(page, "Rename").click()
    until(page, lambda: any("a run's name has letters" in text for text in texts(page, ".fault")))
    retype(name, "best")
    button(page, "Rename").click()
    until(page, lambda: find(page, "h1").text == "best")
    assert (outputs / "best/model").is_dir() and not (outputs / "demo/ppo").exists()

    opened("#/run/demo/sft")
    until(page, lambda: page.find_elements("css selector", "#rename"))
    page.execute_script("document.querySelector('#rename').closest('details').open = true")
    button(page, "Delete this run").click()
    asked = dialog(page)
    assert "best was made from it, and will not find it" in asked.text and "cannot be brought back" in asked.text
    asked.dismiss()
    assert (outputs / "demo/sft/model").is_dir()
    button(page, "Delete this run").click()
    dialog(page).accept()
    until(page, lambda: list(rows_of(page)) == ["best"])
    assert not (outputs / "demo/sft").exists()


def button(page, text: str):
    return next(e for e in page.find_elements("css selector", "button") if e.text == text)


def test_an_alarm_s_options_are_explained_and_a_failed_run_says_its_error_first(opened, outputs):
    values = {"reward": 0.0, "reward_std": 0.0, "kl": 9.0, "objective/kl": 9.0, "completions/mean_length": 4.0}
    make_run(outputs, "a", "grpo", 30, "failed", values=lambda step: values, error="mine.py:good raised KeyError: 'x'")
    page = opened("#/runs")
    until(page, lambda: rows_of(page)["a"][2].splitlines() == ["failed", "mine.py:good raised KeyError: 'x'"])
    opened("#/run/a")
    until(page, lambda: find(page, ".alarm-list").is_displayed())
    text = find(page, "#page").text
    assert text.index("raised KeyError") < text.index("nats per response")
    find(page, ".alarm-list summary").click()
    until(page, lambda: "ppo.kl_coef" in texts(page, ".alarm-list ul strong"), 120)


def test_what_a_reward_model_s_own_samples_said_is_on_its_page(opened, outputs):
    run = make_run(outputs, "r", "reward", 8)
    record = json.loads((run.folder / "run.json").read_text())
    record["facts"]["own_samples"] = {"agreement": 0.71875, "pairs": 64, "held_out": 0.9}
    (run.folder / "run.json").write_text(json.dumps(record))
    page = opened("#/run/r")
    until(page, lambda: "agreed in 72% of 64 pairs of the starting model's own answers" in find(page, "#page").text)


def test_on_a_telephone_a_run_and_a_comparison_are_sections(opened, outputs):
    make_run(outputs, "demo/ppo", "ppo", 20, has_tools=True)
    make_run(outputs, "demo/other", "ppo", 20)
    page = opened.browser
    with narrow(page, 390, 844):
        for where, most in (("#/run/demo/ppo", 2500), ("#/compare/demo/ppo,demo/other", 2500)):
            opened(where)
            until(page, lambda: page.find_elements("css selector", ".asked"))
            time.sleep(0.5)
            assert page.execute_script("return document.documentElement.scrollHeight") < most, where
            assert not find(page, ".charts").is_displayed() and not sticking_out(page)


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


MARKUP = "<img src=x onerror=document.title='broken'>"


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


EVALUATION = """# Evaluation

- prompts: rows.jsonl (held out)

## Results

| model | score \\| mean |
|---|---|
| sft | 0.5 [0.4, 0.6] |
| <b>ppo</b> | **0.9** |
"""


def test_the_page_of_an_evaluation_shows_what_it_found(opened, outputs):
    run = make_run(outputs, "compared", "evaluate", steps=0)
    (run.folder / "evaluate.md").write_text(EVALUATION)
    page = opened("#/run/compared")
    until(page, lambda: "sft" in find(page, "#page").text)
    assert texts(page, "#page table thead th")[:2] == ["model", "score | mean"]
    assert texts(page, "#page table tbody td")[:4] == ["sft", "0.5 [0.4, 0.6]", "<b>ppo</b>", "0.9"]
    shown = [each.text for each in page.find_elements("css selector", "a.button, button") if each.is_displayed()]
    assert "Talk" not in shown and "no step yet" not in find(page, "#page").text


def test_a_run_that_has_written_nothing_can_be_dropped_stopped_and_changed(opened, queue):
    job = queue.add("7", "queued", run="soon", place=1)
    page = opened("#/run/soon")
    until(page, lambda: find(page, "#page button").text == "Drop")
    find(page, "#page button").click()
    until(page, lambda: queue.asked == [("/api/job/stop", {"id": "7"})])
    job |= {"state": "failed", "place": None, "error": "there is no such model"}
    opened.publish("jobs", {})
    until(page, lambda: find(page, "#page a.button[href='#/new']").is_displayed())
    assert not find(page, "#page button").is_displayed()


@needs_axe
@pytest.mark.timeout(600)
def test_every_page_stays_within_a_narrow_screen_has_no_axe_findings_and_one_origin(full):
    page = full("#/runs")
    page.get_log("performance"), page.get_log("browser")  # what came before
    for where in ("#/runs", "#/start", "#/run/demo/ppo", "#/compare/demo/ppo,demo/other", "#/compare/demo/ppo"):
        full(where)
        until(page, lambda: not page.find_elements("css selector", ".chart") or is_drawn(page, "reward"))
        page.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
        if where == "#/runs":
            until(page, lambda: texts(page, "tr.run input"))
            find(page, "tr.run input").click()
        time.sleep(0.3)
        for scheme in ("light", "dark"):
            assert axe_faults(page, scheme, ALL_IMPACTS) == [], (where, scheme)
        with narrow(page):
            time.sleep(0.3)
            assert sticking_out(page) == [], where
    asked = [json.loads(e["message"])["message"] for e in page.get_log("performance")]
    urls = {e["params"]["request"]["url"] for e in asked if e["method"] == "Network.requestWillBeSent"}
    assert any("/api/history" in url for url in urls)
    assert not {url for url in urls if url.startswith("http") and not url.startswith(f"{full.studio.base}/")}
    assert not [e for e in page.get_log("browser") if e["level"] == "SEVERE"]


def test_ten_tabs_are_open_and_each_loads(opened, outputs):
    """A browser has six connections to one server: hidden tabs must not keep them."""
    make_run(outputs, "a", "sft", 10)
    browser = opened("#/runs")
    first = browser.current_window_handle
    try:
        for _ in range(9):
            browser.switch_to.new_window("tab")
            browser.get(f"{opened.studio.base}/#/run/a")
            until(browser, lambda: is_drawn(browser, "loss"))
        run = make_run(outputs, "b", "sft", 10, "running")
        browser.switch_to.window(first)  # what came while it was hidden is loaded now
        until(browser, lambda: len(texts(browser, "tr.run")) == 2)
        run.die()
    finally:
        for handle in browser.window_handles:
            if handle != first:
                browser.switch_to.window(handle)
                browser.close()
        browser.switch_to.window(first)


def test_a_run_that_samples_is_replayed_and_forked_from_its_page(opened, outputs, queue):
    make_run(outputs, "sft", "sft", 3)
    run = make_run(outputs, "grpo", "grpo", 3)
    append(run.folder / "metrics.jsonl", [{"step": 4, "reward": 1.0, "completions/mean_length": 5.0}])
    queue.add("000001", "done", kind="replay", run="grpo")
    queue.output = "hacking began around step 3"
    page = opened("#/run/grpo")
    fold = until(page, lambda: next(f for f in page.find_elements("css selector", "details")
                                    if f.is_displayed() and f.text.startswith("Replay, or go on")))
    fold.find_element("css selector", "summary").click()
    for name, text in (("reward", "f.py:aim"), ("step", "2"), ("settings", "ppo.kl_coef 0.1")):
        find(page, f"#replay-{name}").send_keys(text)
    for button in fold.find_elements("css selector", ".line button"):
        if button.text in ("Replay with another reward", "Go on from this step"):
            button.click()
    until(page, lambda: len(queue.asked) == 2, 10)
    assert queue.asked == [("/api/jobs", {"kind": "replay", "run": "grpo", **body}) for body in (
        {"reward": "f.py:aim"}, {"step": 2, "settings": "ppo.kl_coef 0.1"})]
    page.get(page.current_url.split("#")[0] + "#/run/sft")
    until(page, lambda: "sft" in find(page, "h1").text and find(page, "progress") and not any(
        f.is_displayed() for f in page.find_elements("css selector", "details") if "Replay, or" in f.text))
