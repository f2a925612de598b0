"""The studio in a browser with the real launcher: from a dropped file to an exported model, and before a run."""

from __future__ import annotations

import json

import pytest

from tests.factories.browser import clicked, find, needs_browser, retype, texts, until
from tests.factories.studio_jobs import stop_all
from tests.factories.studio_pages import is_drawn
from tests.factories.studio_server import running_studio
from tests.factories.tiny import chatml_tokenizer, save_tiny

pytestmark = [needs_browser, pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS = 1500  # seconds enough to be stopped in


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    with running_studio(tmp_path_factory.mktemp("whole") / "outputs") as found:
        yield found
        stop_all(found.client)


@pytest.fixture
def page(browser, studio):
    browser.get(studio.url)
    browser.execute_script("sessionStorage.clear()")
    yield browser
    browser.get("about:blank")


def write_rows(path) -> str:
    rows = [{"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"It is {i}."}]}
            for i in range(100)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def go(browser, studio, address: str) -> None:
    browser.get("about:blank")
    browser.get(f"{studio.base}/{address}")


def button(browser, text: str):
    return next((each for each in browser.find_elements("css selector", "button, a.button")
                 if each.text == text and each.is_displayed()), None)


def fill(browser, selector: str, text: str) -> None:
    retype(until(browser, lambda: find(browser, selector)), text)


def begin(browser, studio, model: str, rows: str, name: str, steps: int) -> None:
    go(browser, studio, "#/new")
    until(browser, lambda: find(browser, "input[value=imitate]")).click()
    fill(browser, "[data-option='model.model_name_or_path'] input", model)
    find(browser, "#file-data").send_keys(rows)
    fill(browser, "[data-option='train.max_steps'] input", str(steps))
    until(browser, lambda: "Everything is there" in find(browser, ".next-line").text, 480)
    fill(browser, "#run-name", name)
    until(browser, lambda: find(browser, "#start").is_enabled())
    find(browser, "#start").click()
    until(browser, lambda: f"#/run/{name}" in browser.current_url)


def reaches(browser, wanted: str) -> None:
    """Until the run is in this state; one that fails says why on its page. Its process alone needs half a minute to
    start where two cores have other work, and minutes where they have much."""
    ended = until(browser, lambda: (state := find(browser, ".state").text) in (wanted, "failed") and state, 600)
    assert ended == wanted, find(browser, "#page").text


def test_from_a_dropped_file_to_an_exported_model(page, studio, tmp_path):
    browser = page
    model, rows = save_tiny(tmp_path / "start", 0), write_rows(tmp_path / "talks.jsonl")
    chatml_tokenizer().save_pretrained(model)
    begin(browser, studio, str(model), rows, "long", STEPS)

    until(browser, lambda: is_drawn(browser, "loss"), 600)
    until(browser, lambda: clicked(button(browser, "Stop with a checkpoint")), 600)
    reaches(browser, "stopped")
    record = studio.client.get("/api/run", params={"id": "long"}).json()
    assert 0 < record["row"]["step"] < STEPS and record["checkpoints"]
    until(browser, lambda: clicked(button(browser, "Resume")))
    reaches(browser, "finished")
    output = studio.studio.outputs / "long" / "metrics.jsonl"
    steps = [row["step"] for row in map(json.loads, output.read_text().splitlines()) if "loss" in row]
    assert steps[-1] == STEPS and len(steps) == len(set(steps))  # none twice, none lost

    begin(browser, studio, "long", rows, "short", 20)
    reaches(browser, "finished")
    assert "long" in find(browser, ".family").text
    go(browser, studio, "#/compare/long,short")
    until(browser, lambda: "train.max_steps" in find(browser, "#page").text)

    go(browser, studio, "#/talk?model=short")
    until(browser, lambda: find(browser, "#message").is_displayed(), 600)
    find(browser, "#message").send_keys("Say 7\n")
    until(browser, lambda: [text for text in texts(browser, ".answer .said") if text], 600)

    go(browser, studio, "#/export?run=short")
    until(browser, lambda: clicked(button(browser, "Export")))
    until(browser, lambda: texts(browser, "article.export h3") == ["short"], 600)
    assert (studio.studio.outputs / "exports" / "short" / "model.safetensors").is_file()


def test_rows_and_memory_of_the_example_are_those_of_the_launcher(page, studio):
    go(page, studio, "#/new?goal=imitate&data=demo/demonstrations")
    until(page, lambda: find(page, "input[name^=model-kind][value=new]"), 600).click()
    until(page, lambda: "Everything is there" in find(page, ".next-line").text, 480)
    find(page, "#ask-plan").click()
    until(page, lambda: find(page, ".checks .bars"), 600)
    assert "fits: needs" in find(page, ".checks .verdict").text
    find(page, "#ask-preview").click()
    until(page, lambda: find(page, ".example"), 600)
    assert len(page.find_elements("css selector", ".example")) == 3
    assert all(text.endswith("<|im_end|>") for text in texts(page, ".example .trained"))
    assert "24,000" in find(page, ".checks").text
