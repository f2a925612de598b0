"""The page of a new run over the studio itself: the launcher's own options, refusals, rows and memory, and a run."""

from __future__ import annotations

import json

import pytest

from tests.factories.browser import axe_faults, find, needs_axe, needs_browser, texts, until
from tests.factories.studio_server import running_studio

pytest.importorskip("hybrid_rlhf.studio.goals")
pytest.importorskip("hybrid_rlhf.studio.jobs")
pytest.importorskip("hybrid_rlhf.studio.uploads")
pytestmark = [needs_browser, pytest.mark.slow]
SECONDS = 120  # a process that imports torch has to start


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    with running_studio(tmp_path_factory.mktemp("whole") / "outputs") as found:
        yield found


@pytest.fixture
def page(browser, studio):
    browser.get(studio.url)
    browser.execute_script("sessionStorage.clear()")
    browser.get("about:blank")
    yield browser
    browser.get("about:blank")


def visit(page, studio, query: str = "") -> None:
    page.get(f"{studio.base}/#/new{query}")
    until(page, lambda: find(page, "fieldset.goal-cards"), SECONDS)


def says(page, text: str) -> None:
    until(page, lambda: text in find(page, ".next-line").text, SECONDS)


def fill(page, option: str, text: str) -> None:
    found = find(page, f"[data-option='{option}'] input")
    found.clear()
    found.send_keys(text)


def fault(page, option: str) -> str:
    return find(page, f"[data-option='{option}'] .fault").text


def example(page, studio) -> None:
    visit(page, studio)
    find(page, "#try-out").click()
    says(page, "Everything is there")


def test_what_the_launcher_refuses_stands_beside_its_option(page, studio):
    example(page, studio)
    fill(page, "train.learning_rate", "fast")
    until(page, lambda: "train.learning_rate" in fault(page, "train.learning_rate"), SECONDS)
    find(page, "#start").click()
    until(page, lambda: page.execute_script("return document.activeElement.closest('.entry').dataset.option")
          == "train.learning_rate")
    find(page, "[data-option='train.learning_rate'] .mark button").click()
    says(page, "Everything is there")
    assert find(page, "[data-option='train.learning_rate'] input").get_attribute("value") == "0.004"
    visit(page, studio, "?goal=function&model=/none/at/all&data=demo/prompts")
    until(page, lambda: find(page, "#reward-format"), SECONDS).click()
    until(page, lambda: "/none/at/all" in fault(page, "model.model_name_or_path"), SECONDS)
    fill(page, "model.model_name_or_path", "org/name")
    until(page, lambda: "pattern" in fault(page, "reward.options.format"), SECONDS)
    fill(page, "reward.options.format", '{"pattern": "yes|no"}')
    says(page, "Everything is there")


def test_rows_and_memory_are_those_of_the_launcher(page, studio):
    example(page, studio)
    find(page, "#ask-plan").click()
    until(page, lambda: find(page, ".checks .bars"), SECONDS)
    assert "fits: needs" in find(page, ".checks .verdict").text
    find(page, "#ask-preview").click()
    until(page, lambda: find(page, ".example"), SECONDS)
    assert len(page.find_elements("css selector", ".example")) == 3
    assert all(text.endswith("<|im_end|>") for text in texts(page, ".example .trained"))
    assert "24,000" in find(page, ".checks").text


@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_with_every_option_of_a_stage_axe_finds_nothing(page, studio, scheme):
    visit(page, studio, "?goal=judge&model=org/name&data=demo/prompts")
    until(page, lambda: find(page, "details.all"), SECONDS)
    page.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    assert len(page.find_elements("css selector", "[data-option]")) > 150
    assert axe_faults(page, scheme, ("minor", "moderate", "serious", "critical")) == []


@pytest.mark.slow
def test_the_example_becomes_a_run(page, studio):
    example(page, studio)
    fill(page, "train.max_steps", "1")
    fill(page, "run", "first/try")
    says(page, "Everything is there")
    find(page, "#start").click()
    until(page, lambda: page.current_url.endswith("#/run/first/try"))
    until(page, lambda: studio.client.get("/api/jobs").json()["jobs"][0]["state"] not in ("queued", "running"), SECONDS)
    job = studio.client.get("/api/jobs").json()["jobs"][0]
    assert (job["state"], job["run"]) == ("done", "first/try"), job
    record = json.loads((studio.studio.outputs / "first" / "try" / "run.json").read_text())
    assert record["status"] == "finished"
